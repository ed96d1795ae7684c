"""Two kinds of task: `P` packs what a stage keeps for its backward, `Y` unpacks it.

    grad_fn = pack(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()), stages=[0, 1])

`small` and `whole` are functions of yours: a code of fewer bytes, and its inverse. By default they
keep the arrays, and show when each task would pack them.
"""

from jaxpp import extend

P = extend.Kind("P", "pack", after="F", holds=-1, colours=("#777777", "#bbbbbb"))
Y = extend.Kind("Y", "unpack", after="P", makes="F", holds=1, colours=("#999999", "#dddddd"))
BACKWARD = "BIW"


def same(*arrays):
    return arrays


def pack(fun, stages, small=same, whole=same):
    """Puts a `P` right after each forward of some stages, and a `Y` right before its backward."""

    def rule(loop):
        recomputed = {task.stage for task in loop.table.dropped} & set(stages)
        if recomputed:
            raise ValueError(f"stages {recomputed} are computed again: there is nothing to pack")
        for stage in stages:
            readers = [key for key in loop.tasks if key.kind in BACKWARD and key.stage == stage]
            kept = [
                value
                for value in loop.values
                if value.maker == ("F", stage) and set(value.readers) & set(readers)
            ]
            if not kept:
                continue
            loop, there = loop.insert(P, stage, small, kept)
            first = "I" if loop.table.splits_backward else "B"
            loop, again = loop.insert(Y, stage, whole, there, before=(first, stage))
            for old, new in zip(kept, again, strict=True):
                for key in set(old.readers) & set(readers):
                    loop = loop.read(key, new, of=old)
        return loop

    return extend.edit_loops(fun, rule)
