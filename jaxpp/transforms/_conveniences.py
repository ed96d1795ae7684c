"""`accumulate_grads` and `pipelined`, which users of JaxPP know, made of the transforms alone.

The names and the defaults follow NVIDIA's JaxPP (Xhebraj et al., arXiv 2412.14374, and
github.com/NVIDIA/jaxpp: `accumulate_grads`, later `treduce`; `pipelined`, later
`mpmd_jit_with_loop`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from jaxpp import jaxprs
from jaxpp._program import Mesh
from jaxpp._spellings import names_ours
from jaxpp.transforms.microbatch import microbatch, microbatch_by
from jaxpp.transforms.place import place
from jaxpp.transforms.stages import is_backward_call, is_stage_call
from jaxpp.transforms.tasks import schedule as schedule_loops


@names_ours
def accumulate_grads(
    fun: Callable[[Any], Any],
    batch: Any,
    *,
    schedule: Any,
    num_microbatches: int | None = None,
    axis: int = 0,
    reduce: Any = None,
) -> Any:
    """Runs `fun` on each microbatch, in the order of a schedule, and combines the results.

    It is `schedule(microbatch(fun, ...), schedule)(batch)`, for a `fun` that closes over the
    parameters. Gradients are added up, and values (losses, predictions) stacked.

    Args:
        fun: a function of one microbatch; it differentiates a function that `wrap_forward` made,
            as `lambda microbatch: jax.value_and_grad(staged)(params, microbatch)` does.
        batch: a pytree of arrays with one axis of the same size.
        schedule: a `jaxpp.schedules.Schedule`.
        num_microbatches: the number of runs into which the axis is cut, as `microbatch` does. None
            where the axis counts the microbatches: `fun` then gets slices without it.
        axis: the axis of each array of the batch.
        reduce: how each result is combined, a prefix of its pytree, as for `microbatch`. By default
            `fun` returns two results, in either order: the one that the backward pass of the stages
            makes is summed, and the other one stacked along a new first axis.

    Returns:
        The combined results.

    Raises:
        ValueError: if the arrays have no such axis or differ in its size, `fun` calls no stages
            that `wrap_forward` made, or its results are not gradients and values, and `reduce` does
            not say how to combine them.
        jaxpp.schedules.ScheduleError: if the schedule does not fit the loop.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> @jaxpp.wrap_forward
        ... def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> def gradients(w, batch):
        ...     fun = lambda x: jax.value_and_grad(loss)(w, x)
        ...     return jaxpp.accumulate_grads(fun, batch, schedule=jaxpp.schedules.OneFOneB())
        >>> losses, grads = gradients(jnp.eye(2), jnp.ones((4, 3, 2)))  # 4 microbatches of 3
        >>> losses.shape, grads.shape
        ((4,), (2, 2))
    """
    count = _size(batch, axis) if num_microbatches is None else num_microbatches

    def without_axis(x):
        return jax.lax.squeeze(x, (axis,)) if jaxprs.is_array(x) else x

    def of_microbatch(part):
        return fun(jtu.tree_map(without_axis, part) if num_microbatches is None else part)

    if reduce is None:
        loop = microbatch_by(of_microbatch, count, axis, _gradients_summed)
    else:
        loop = microbatch(of_microbatch, count, in_axes=axis, reduce=reduce)
    return schedule_loops(loop, schedule)(batch)


def _gradients_summed(trace: Callable[[], jaxprs.Traced]) -> Any:
    """Chooses reductions of two results: sums the one that a backward makes, stacks the other."""
    traced = trace()
    flat = jaxprs.inline(traced.jaxpr, lambda eqn: not is_stage_call(eqn))
    if not any(jaxprs.contains(eqn, is_stage_call) for eqn in flat.eqns):
        return "last"  # `schedule` says that there are no stages
    cotangents = [v for eqn in flat.eqns if is_backward_call(eqn) for v in eqn.outvars]
    reached = jaxprs.descendants(flat.eqns, cotangents)
    gradient, value = object(), object()
    results = traced.rebuild(
        gradient if not jaxprs.is_literal(v) and v in reached else value for v in flat.jaxpr.outvars
    )
    parts = results if isinstance(results, tuple) else (results,)
    summed = [any(leaf is gradient for leaf in jtu.tree_leaves(part)) for part in parts]
    if len(parts) != 2 or sum(summed) != 1:
        raise ValueError(
            f"accumulate_grads: fun returns {len(parts)} results, {sum(summed)} of which come out "
            f"of the backward pass; only of two, gradients and values, is it known how to combine "
            f"them. Say it: reduce=('stack', 'sum') for (values, gradients), ('sum', 'stack') for "
            f"(gradients, values)."
        )
    return tuple("sum" if is_sum else "stack" for is_sum in summed)


def _size(batch: Any, axis: int) -> int:
    """Finds the size of an axis, which is the same in all arrays; 1 where no array has the axis."""
    sizes = {
        jtu.keystr(path): x.shape[axis]
        for path, x in jtu.tree_leaves_with_path(batch)
        if jaxprs.is_array(x) and -x.ndim <= axis < x.ndim
    }
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"accumulate_grads: axis {axis} counts the microbatches, but its size differs: "
            f"{', '.join(f'batch{path}: {n}' for path, n in sizes.items())}; give num_microbatches "
            f"where the axis counts examples."
        )
    return next(iter(sizes.values()), 1)


@names_ours
def pipelined(
    fun: Callable | None = None,
    *,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    feed: Mapping[int, Callable[[Any], Any]] | None = None,
) -> Any:
    """Runs a train step as a pipeline: `place` as a decorator, with arguments or without.

    Args:
        fun: the train step, a function of pytrees whose loop `accumulate_grads` or `schedule`
            made; None where the decorator is given arguments.
        mesh: the mesh to run on, as for `place`.
        donate_argnums: the positions of arguments that the step consumes, as for `place`.
        static_argnums: the positions of arguments whose numbers are static, as for `place`.
        feed: for positions of arguments the functions that load them, as for `place`.

    Returns:
        The result of `place`; without `fun`, a decorator.

    Raises:
        ValueError: as `place`, or if `fun` cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> @jaxpp.wrap_forward
        ... def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> @jaxpp.pipelined(mesh=mesh, donate_argnums=0)
        ... def train_step(w, batch):
        ...     losses, grads = jaxpp.accumulate_grads(
        ...         lambda x: jax.value_and_grad(loss)(w, x),
        ...         batch,
        ...         schedule=jaxpp.schedules.Eager1F1B(),
        ...     )
        ...     return w - 0.1 * grads, losses
        >>> w, losses = train_step(jnp.eye(2), jnp.ones((4, 3, 2)))
        >>> losses.shape
        (4,)
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "feed": feed,
    }
    if fun is None:
        return functools.partial(pipelined, **options)
    if not callable(fun):
        raise ValueError(
            f"pipelined: {fun!r} is no function to run as a pipeline; a mesh is given by name: "
            f"@jaxpp.pipelined(mesh=mesh)."
        )
    return place(fun, **options)
