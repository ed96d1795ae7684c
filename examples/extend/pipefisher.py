"""PipeFisher: curvature in the bubbles. A schedule, a kind of task and a transform.

Osawa, Li and Hoefler, arXiv 2211.14133: K-FAC needs the factors a^T a of what layers read. They are
tasks of their own, `C`, which nothing waits for, and so fill the ranks' bubbles.

    grad_fn = jaxpp.schedule(grad_fn, PipeFisher())
    (loss, grads), factors = curvature(grad_fn)(model, batch)
"""

import dataclasses

from jaxpp import extend, schedules

C = extend.Kind("C", "curvature", after="F", cost=0.5, colours=("#1f8a8a", "#9fd6d6"))


@dataclasses.dataclass(frozen=True)
class PipeFisher(schedules.Schedule):
    """1F1B, with each `C` in the first bubble of its rank that has room, or else at the end."""

    def orders(self, num_ranks, num_microbatches):
        """Gives the tasks of each rank."""
        table = schedules.OneFOneB().table(num_ranks, num_microbatches)
        spans = schedules.simulate(table).spans
        for rank in range(num_ranks):
            order, ready, now = [], [], 0.0
            for span in sorted((s for s in spans if s.rank == rank), key=lambda s: s.start):
                while ready and now + C.cost <= span.start:
                    order.append(ready.pop(0))
                    now += C.cost
                order.append(span.task)
                now = span.end
                if span.task.kind == "F":
                    ready.append(dataclasses.replace(span.task, kind=C))
            yield order + ready


def curvature(fun):
    """Adds the factors of the matrices that stages read from others: one for each microbatch."""

    def rule(loop):
        for stage in range(loop.table.num_stages):
            read = [v for v in loop.values if ("F", stage) in v.readers and v.aval.ndim == 2]
            if read:
                loop, made = loop.insert(C, stage, lambda *xs: [x.T @ x for x in xs], read)
                loop = loop.result(f"stage {stage}", (C, stage), lambda *xs: list(xs), made)
        return loop

    return extend.edit_loops(fun, rule, has_aux=True)
