"""ZeRO-2 and 3: `A` gathers a stage's parameters, `V` gathers them again, `Q` reduces gradients.

Rajbhandari et al., arXiv 1910.02054. `schedules.Gather` and `Reduce` do so by kinds of their own.

    grad_fn = gather(jaxpp.schedule(grad_fn, Zero(jaxpp.schedules.OneFOneB())))
    step = jaxpp.place(step, mesh, in_specs=(None, None, P("data")), zero3="data")
"""

import dataclasses

from jaxpp import extend, schedules

A = extend.Kind("A", "all-gather", lane="collective", of_stage=True)
V = extend.Kind("V", "all-gather again", makes="A", parts="A", lane="collective", of_stage=True)
Q = extend.Kind("Q", "reduce-scatter", lane="collective", of_stage=True, takes="BIW")


@dataclasses.dataclass(frozen=True)
class Zero:
    """A schedule whose ranks hold the gathered parameters of one stage at a time."""

    schedule: schedules.Schedule

    def table(self, num_stages, num_microbatches):
        """Adds tasks to a table: where a rank's stage changes, and after its last backward."""
        table, ranks = self.schedule.table(num_stages, num_microbatches), []
        for tasks in table.ranks:
            order, stage, last = [], None, {t.stage: t for t in tasks if t.kind in Q.takes}
            for task in tasks:
                own = dataclasses.replace(task, kind=A if task.kind == "F" else V)
                order += [own] * (task.stage != stage and own not in order) + [task]
                order += [dataclasses.replace(task, kind=Q)] * (task == last.get(task.stage))
                stage = task.stage
            ranks.append(tuple(order))
        return dataclasses.replace(table, ranks=tuple(ranks))


def gather(fun, code=lambda *arrays: arrays, decode=lambda array: array):
    """Lets tasks read what an `A` made: the parameters, or a code that each task decodes."""

    def rule(loop):
        for stage in sorted({key.stage for v in loop.constants for key in v.readers}):
            read = [v for v in loop.constants if any(key.stage == stage for key in v.readers)]
            loop, made = loop.insert(A, stage, code, read)
            for old, new in zip(read, made, strict=True):
                for key in (key for key in old.readers if key.stage == stage):
                    loop = loop.before(key, decode, [new], of=old)
        return loop

    return extend.edit_loops(fun, rule)
