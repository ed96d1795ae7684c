"""Adds up gradients over the replicas of the batch once a step, not once a microbatch.

If a rank's devices share the examples of a microbatch, each weight gradient and the loss is a sum
over all devices, so that XLA reduces it in each backward task. But the sum over microbatches and
the sum over replicas commute: each replica can accumulate the sums of its own examples, and the
accumulators are added up after the loop. So do PyTorch's `DistributedDataParallel.no_sync` (Li et
al., "PyTorch Distributed", VLDB 2020, section 4.3) and Megatron-LM, which leave out the reduction
of all microbatches but the last, and Alpa (Zheng et al., OSDI 2022), which skips the collectives
that XLA has put in. With JAX's explicit sharding the accumulator would have the spec
`unreduced={"data"}`, in programs whose types say so (Autodiff and sharding, docs.jax.dev). Here
programs are of any kind, and the accumulator is an array like others: it has a leading dimension of
one row for each replica, which is split over the replicas.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._program import Role
from jaxpp._specs import Spec, replicated
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside._zero import scattered
from jaxpp.transforms.inside.replicas import _partial_sums, _shares
from jaxpp.transforms.inside.replicas._rules import Replicas
from jaxpp.transforms.inside.replicas._shares import Scope
from jaxpp.transforms.tasks import LoopTasks, Ref, TaskBody, is_loop


def defer_sums(step: Step) -> Step:
    """Adds up gradients over the replicas once a step, not once a microbatch."""
    inside = step.inside
    if inside is None:
        return step
    jaxpr = with_deferred_sums(
        step.jaxpr,
        [a.spec for a in step.arguments],
        inside.examples,
        inside.sizes,
        scatter=set(inside.examples) == set(inside.zero[Role.OPTIMIZER]),
    )
    return dataclasses.replace(step, jaxpr=jaxpr)


def with_deferred_sums(
    jaxpr: jex.ClosedJaxpr,
    specs: Sequence[Spec | None],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    *,
    scatter: bool = False,
) -> jex.ClosedJaxpr:
    """Keeps sums over the batch apart by replica, in the scheduled loops of a step.

    An accumulator of a loop gets a leading dimension of one row for each replica if sums over
    examples are added to it, and nothing but such sums and values made of them by additive
    equations. After the loop the rows are added up, so that the rest of the step is as it was. A
    sum that another equation reads too, such as the mean and the variance of a batch, or the count
    that a loss is divided by, is still reduced where it is made. With no mesh set (`jax.set_mesh`,
    `jax.sharding.use_abstract_mesh`), rows are tied to no devices.

    Args:
        jaxpr: the step, its calls inlined.
        specs: the spec of each of its inputs; None where it may be any.
        axes: the axes that the batch is split over, such as `("data",)`.
        sizes: the number of devices along each axis inside a rank.
        scatter: whether each replica gets a part of a sum, where the sum can be divided, for
            optimizer state that is split over the replicas.

    Returns:
        A step with the same inputs and outputs, equal but for rounding.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean(h ** 2)
        >>> def gradient(w, xs):
        ...     def add(total, x):
        ...         return total + jax.grad(jaxpp.wrap_forward(loss))(w, x), None
        ...     return jax.lax.scan(add, jnp.zeros((3, 3)), xs)[0]
        >>> step = jaxpp.schedule(gradient, jaxpp.schedules.OneFOneB())
        >>> jaxpr = jax.make_jaxpr(step)(jnp.eye(3), jnp.ones((4, 8, 3)))
        >>> specs = [((), ()), ((), ("data",), ())]
        >>> deferred = with_deferred_sums(jaxpr, specs, ("data",), {"data": 2})
        >>> [[v.aval.shape for v in e.outvars] for e in deferred.eqns][-2:]
        [[(2, 3, 3)], [(3, 3)]]
    """
    replicas = Replicas(axes, sizes)
    if replicas.count == 1:
        return jaxpr
    known = propagation.propagate(jaxpr, specs, sizes)
    maker: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        new = [eqn]
        if is_loop(eqn) and eqn.params["tasks"].replicas == 1:
            new = _defer_in_loop(eqn, known, maker, replicas, scatter)
        maker.update((v, e) for e in new for v in e.outvars)
        eqns.extend(new)
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, eqns)


# ---- loops --------------------------------------------------------------------------------------


def _defer_in_loop(
    eqn: Any,
    known: Mapping[Any, Spec | None],
    maker: Mapping[Any, Any],
    replicas: Replicas,
    scatter: bool,
) -> list[Any]:
    """Keeps a loop's sums over examples apart; gives it with the equations before and after it."""
    tasks: LoopTasks = eqn.params["tasks"]
    held = propagation.held(eqn, known, replicas.sizes)
    opened = [_shares.open_scope(jaxpr, specs, replicas) for jaxpr, specs in held]
    scopes = list(zip(tasks.bodies, opened, strict=True))
    deferred = {i for body, scope in scopes for i in _deferrable(body, scope, tasks)}
    if not deferred:
        return [eqn]
    bodies = tuple(_rewrite(body, scope, deferred) for body, scope in scopes)
    before, after = [], []
    operands, results = list(eqn.invars), list(eqn.outvars)
    for i in sorted(deferred):
        first, total = operands[tasks.num_consts + i], results[i]
        start = _partial_sums.in_rows(first, maker, replicas)
        made, (operands[tasks.num_consts + i],) = _jaxprs.record(*start, eqn)
        before.extend(made)
        results[i] = jex.Var(operands[tasks.num_consts + i].aval)
        after.extend(_sum_replicas(results[i], total, eqn, known.get(total), scatter, replicas))
    params = {**eqn.params, "tasks": dataclasses.replace(tasks, bodies=bodies)}
    return [*before, eqn.replace(invars=operands, outvars=results, params=params), *after]


def _deferrable(body: TaskBody, scope: Scope, tasks: LoopTasks) -> set[int]:
    """Finds the accumulators of a loop to which a task adds sums over examples."""
    outvars = scope.jaxpr.jaxpr.outvars
    added = {
        n: ref.index
        for n, ref in enumerate(body.outputs)
        if ref.source == "carry"
        and ref.index in tasks.folds
        and tasks.folds[ref.index].name in _primitives.ADDS
        and not _jaxprs.is_literal(outvars[n])
    }
    apart = _shares.shares(scope, (), [outvars[n] for n in added])
    return {i for n, i in added.items() if outvars[n] in apart}


def _rewrite(body: TaskBody, scope: Scope, deferred: Collection[int]) -> TaskBody:
    """Rewrites a task so that its deferred accumulators are in shares."""

    def numbers(refs: Sequence[Ref]) -> list[int]:
        return [n for n, r in enumerate(refs) if r.source == "carry" and r.index in deferred]

    given, wanted = numbers(body.inputs), numbers(body.outputs)
    if not given and not wanted:
        return body
    return dataclasses.replace(body, jaxpr=_partial_sums.with_shares(scope, given, wanted))


def _sum_replicas(
    partial: Any, total: Any, eqn: Any, spec: Spec | None, scatter: bool, replicas: Replicas
) -> list[Any]:
    """Makes the equations that add up the rows of an accumulator to a loop's result."""
    spec = spec or replicated(total.aval.ndim)
    target = None
    if scatter and replicas.count > 1:
        target = scattered(spec, total.aval.shape, replicas.axes, replicas.sizes)

    def add_up(rows):
        if target is None:
            return _partial_sums.sum_rows(rows)
        return _partial_sums.scatter_rows(rows, spec, target, replicas)

    return _jaxprs.splice(add_up, [partial], [total], eqn)
