"""Two kinds of task: `O` moves what a stage keeps for its backward to the host, `L` brings it back.

    grad_fn = offload(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()), stages=[0, 1])

Tasks hand on arrays in device memory alone, so `host` and `device` are functions of yours, such as
a code and its inverse. By default they keep the arrays, and show when each task would move them.
"""

from jaxpp import extend

O = extend.Kind("O", "offload", after="F", holds=-1, colours=("#777777", "#bbbbbb"))  # noqa: E741
L = extend.Kind("L", "load", after="O", makes="F", holds=1, colours=("#999999", "#dddddd"))
BACKWARD = "BIW"


def same(*arrays):
    return arrays


def offload(fun, stages, host=same, device=same):
    """Puts an `O` right after each forward of some stages, and an `L` right before its backward."""

    def rule(loop):
        recomputed = {task.stage for task in loop.table.dropped} & set(stages)
        if recomputed:
            raise ValueError(f"stages {recomputed} are computed again: there is nothing to offload")
        for stage in stages:
            readers = [key for key in loop.tasks if key.kind in BACKWARD and key.stage == stage]
            kept = [
                value
                for value in loop.values
                if value.maker == ("F", stage) and set(value.readers) & set(readers)
            ]
            if not kept:
                continue
            loop, there = loop.insert(O, stage, host, kept)
            first = "I" if loop.table.splits_backward else "B"
            loop, again = loop.insert(L, stage, device, there, before=(first, stage))
            for old, new in zip(kept, again, strict=True):
                for key in set(old.readers) & set(readers):
                    loop = loop.read(key, new, of=old)
        return loop

    return extend.edit_loops(fun, rule)
