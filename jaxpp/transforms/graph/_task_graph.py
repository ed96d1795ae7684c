"""`TaskGraph`: what all ranks run, as tasks over typed values.

The tasks stand in an order in which they can run. So a rank that runs its own tasks in this order
never waits for one that stands later.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax.extend.core as jex

from jaxpp._program import Argument
from jaxpp._specs import Spec
from jaxpp.schedules import Task


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array that tasks make and read; it is the same one on every rank that has it.

    Args:
        aval: its type.
        kind: its kind in a message (see `Message`).
        name: its name in a message: what made it.
        argument: the argument of the step that it is; None for any other value.
        constant: its array, if it is there before the step; else None.
        memory: the buffer that it is in; the values of one accumulator share a buffer.
        begins: whether it is the first value in the buffer.
        spec: its spec inside a rank, where one is given.
    """

    aval: Any
    kind: str
    name: str
    argument: Argument | None = None
    constant: Any = None
    memory: Hashable = None
    begins: bool = False
    spec: Spec | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The jaxpr of a task; tasks that compute the same share a body.

    `donated` are the inputs whose memory the outputs take; None for all inputs that nothing reads
    any more.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    donated: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GraphTask:
    """A run of a body on a rank; `task` and `loop` are those of `Run`.

    Once it is dispatched, the rank waits until `waits` are made.
    """

    rank: int
    body: Body
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    label: str
    task: Task | None = None
    loop: int = 0
    waits: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of all ranks.

    Args:
        tasks: the tasks, in an order in which they can run. Each has its `rank`, its `label`, its
            `inputs` and `outputs`, which are values, and the `task` of a loop that it is; None for
            what is around the loops.
        arguments: the arguments of the step, each with the ranks that read it.
        results: the results of the step, each with the ranks that it is left on.
        stages: the stages of each rank.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x))
        >>> def show(graph):
        ...     print(*(task.label for task in graph.tasks if task.task))
        ...     return graph
        >>> lowered = jaxpp.extend.edit_tasks(step, show).lower(jnp.eye(2), jnp.ones((4, 2)))
        F0.0 B0.0 F0.1 B0.1
    """

    tasks: tuple[GraphTask, ...]
    arguments: tuple[tuple[Value, tuple[int, ...]], ...]
    results: tuple[tuple[Value, tuple[int, ...]], ...]
    stages: tuple[tuple[int, ...], ...]
