"""The optimizer in the backward: the update of a stage is a task, which runs when it can.

    step = early_update(jaxpp.place(train_step, mesh))

Where a rank has several stages, the update of one runs between the backwards of the others. With
clipping by the global norm, the norms move alone: each update needs all gradients.
"""

import dataclasses

from jaxpp import extend
from jaxpp.schedules import Task

U = extend.Kind("U", "update", after="BW", colours=("#8a5a3c", "#d9bba6"))


def early_update(step):
    """Moves what is around the loop to right after the last task that it reads from."""

    def rule(graph):
        order = []
        for part in graph.tasks:
            at = len(order)
            if part.task is None:
                made = [n for n, t in enumerate(order) if set(t.outputs) & set(part.inputs)]
                at = 1 + max(made, default=-1)
                loop = [order[n].task for n in made if order[n].task]
                if len({task.stage for task in loop}) == 1:
                    task = Task(U, loop[-1].stage, loop[-1].microbatch)
                    part = dataclasses.replace(part, task=task, label=str(task))
            order.insert(at, part)
        return dataclasses.replace(graph, tasks=tuple(order))

    return extend.edit_tasks(step, rule)
