"""`edit_tasks`: a transform of a placed step whose rule edits the tasks of all ranks."""

import functools
from collections.abc import Callable, Sequence

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import P, R
from jaxpp.transforms.graph import GraphTask, GraphValue, TaskGraph
from jaxpp.transforms.place._place import Placed


def edit_tasks(step: Placed[P, R], rule: Callable[[TaskGraph], TaskGraph]) -> Placed[P, R]:
    """Lets a rule edit the tasks of a placed step: those of its loops, and what is around them.

    The rule gives a `TaskGraph` for a `TaskGraph`, by `dataclasses.replace`: with the tasks in
    another order, which is that of each rank, or with other labels.

    Args:
        step: what `place` gave.
        rule: gives a graph for a graph, each time that the step is lowered.

    Returns:
        A placed step of the same function, on the same mesh.

    Raises:
        TypeError: the step is not placed.
        ValueError: in the new order a task reads a value that is not there yet, or whose memory
            another one has taken; or ordered effects change places. The error names the rule and
            the task.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x))
        >>> def shout(graph):
        ...     tasks = (dataclasses.replace(t, label=t.label.upper()) for t in graph.tasks)
        ...     return dataclasses.replace(graph, tasks=tuple(tasks))
        >>> loud = jaxpp.extend.edit_tasks(step, shout).lower(jnp.eye(2), jnp.ones((4, 2)))
        >>> "run UPDATE" in loud.as_text()
        True
    """
    if not isinstance(step, Placed):
        raise TypeError(
            f"edit_tasks needs a step that place made, got {step!r}; use edit_loops for a function."
        )
    return step.with_edit(functools.partial(_checked, rule))


def _checked(rule: Callable[[TaskGraph], TaskGraph], graph: TaskGraph) -> TaskGraph:
    """Applies a rule; checks that the tasks can run in the order that it gives."""
    who = f"edit_tasks: the rule {jaxprs.describe_function(rule)}"
    new = rule(graph)
    if not isinstance(new, TaskGraph):
        raise ValueError(f"{who} gave {new!r}; a rule gives the graph, edited or not.")
    known: set[GraphValue] = {value for value, _ in new.arguments}
    taken: dict[tuple[int, GraphValue], GraphTask] = {}
    for task in new.tasks:
        for value in task.inputs:
            if value not in known and value.constant is None:
                raise ValueError(
                    f"{who} has {task.label} of rank {task.rank} read {value.name}, which no task "
                    f"before it makes; put it behind the task that makes it."
                )
            if (other := taken.get((task.rank, value))) is not None:
                raise ValueError(
                    f"{who} has {task.label} of rank {task.rank} read {value.name}, whose memory "
                    f"{other.label} before it takes; put it before that task."
                )
        known.update(task.outputs)
        for i in task.body.donated or ():
            taken[task.rank, task.inputs[i]] = task
    if lacking := next((value for value, _ in new.results if value not in known), None):
        raise ValueError(f"{who} leaves out the task that makes the result {lacking.name}.")
    before, now = (list(filter(_is_ordered, tasks)) for tasks in (graph.tasks, new.tasks))
    if list(map(_identity, before)) != list(map(_identity, now)):
        raise ValueError(
            f"{who} changes the order or the number of tasks with ordered effects, such as an "
            f"ordered jax.debug.print; leave these as they are."
        )
    return new


def _is_ordered(task: GraphTask) -> bool:
    return any(map(_compat.is_ordered, task.body.jaxpr.eqns))


def _identity(task: GraphTask) -> tuple[int, Sequence[GraphValue], Sequence[GraphValue]]:
    """Returns the rank, inputs and outputs of a task, which stay when it is renamed."""
    return task.rank, task.inputs, task.outputs
