"""The equation of a scheduled loop on one device: the scan that it is.

So it runs, is lowered, and is differentiated, which gives a plain loop; under `vmap` it keeps its
schedule.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxpp import _compat, _specs, jaxprs
from jaxpp.jaxprs import Var
from jaxpp.transforms.stages import call_as, called_as
from jaxpp.transforms.tasks._loop import ScheduledLoop, loop_p, remade, row_type, rows_type


def run_as_scan(*operands: Any, **params: Any):
    """Computes the loop's results, microbatch after microbatch, all tasks of each in order.

    Each direction of the table is a scan over its own microbatches. Replicas run one after the
    other.
    """
    loop = ScheduledLoop.of_params(**params)
    consts = operands[: loop.num_consts]
    if loop.replicas > 1:
        replica_alone = functools.partial(run_as_scan, **{**params, "replicas": 1})

        def replica(_, rows):
            return None, replica_alone(*consts, *rows)

        rows = list(operands[loop.num_consts :])
        return jax.lax.scan(replica, None, rows, length=loop.replicas)[1]
    count, length, reverse = loop.num_directions, loop.length, loop.reverse
    step = functools.partial(_step, loop, consts)
    rest = list(operands[loop.num_consts :])
    carries, xs = rest[: count * loop.num_carry], rest[count * loop.num_carry :]
    if count == 1:
        carry, ys = jax.lax.scan(step, carries, xs, length=length, reverse=reverse)
        return [*carry, *ys]
    of_directions = []
    for direction in range(count):
        numbers = [i for i, d in enumerate(loop.table.direction_of) if d == direction]
        at = np.array([length - 1 - i for i in numbers] if reverse else numbers, np.int32)
        start = carries[direction::count]
        carry, ys = jax.lax.scan(step, start, [x[at] for x in xs], length=len(numbers))
        ys = [jnp.zeros_like(y, shape=(length, *y.shape[1:])).at[at].set(y) for y in ys]
        of_directions.append([*carry, *ys])
    return [result for alike in zip(*of_directions, strict=True) for result in alike]


def _step(loop: ScheduledLoop, consts, carry, slices):
    """Runs all tasks of one microbatch in order; gives the new carries, and its results."""
    values: dict[Any, Any] = dict(zip(loop.inputs, [*consts, *carry, *slices], strict=True))
    for task in loop.tasks:
        inputs = [values[v] for v in task.invars]
        # Else XLA keeps the forward's values, and computes nothing again.
        if task.params["recomputes"]:
            inputs = jax.lax.optimization_barrier(jaxprs.with_cloned_keys(inputs))
            inputs = jaxprs.with_cloned_keys(inputs)
        # The names of these calls outlive differentiation, so that `was_loop` can find the loop.
        run = functools.partial(jaxprs.run, task.params["jaxpr"])
        outs = call_as(f"task_{task.params['key']}", run, inputs)
        values.update(zip(task.outvars, outs, strict=True))
    results = [values[v] for v in loop.outputs]
    return results[: loop.num_carry], results[loop.num_carry :]


@jax.debug_key_reuse(False)
def _plain(*avals, **params):
    return jax.make_jaxpr(lambda *xs: run_as_scan(*xs, **params))(*avals)


def _abstract(*avals, **params):
    loop = ScheduledLoop.of_params(**params)
    if loop.replicas > 1:
        types = [a if n < loop.num_consts else row_type(a) for n, a in enumerate(avals)]
        results, effects = _abstract(*types, **{**params, "replicas": 1})
        return [rows_type(y, loop.replicas) for y in results], effects
    given = dict(zip(loop.operands, avals, strict=True))
    became = dict(zip(loop.carry_outs, loop.carries, strict=True))
    results = []
    for v, direction in loop.results:
        if (carry := became.get(v)) is None:
            results.append(v.aval.update(shape=(loop.length, *v.aval.shape)))
        else:
            aval = given[carry, direction]
            weak = aval.weak_type and (v is carry or v.aval.weak_type)
            results.append(aval.update(weak_type=weak))
    if any(map(_compat.is_split, [*results, *(v.aval for v in loop.ys)])):
        jaxpr = _plain(*avals, **params)
        return jaxpr.out_avals, jaxpr.jaxpr.effects
    return results, params["body"].effects


loop_p.def_impl(
    lambda *xs, **params: jaxprs.run_compiled(functools.partial(run_as_scan, **params), *xs)
)
loop_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(
    loop_p, mlir.lower_fun(jax.debug_key_reuse(False)(run_as_scan), multiple_results=True)
)


def _jvp(primals, tangents, **params):
    """Differentiates the plain loop: the derivative's tasks are not those of the schedule."""
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    run = functools.partial(run_as_scan, **params)
    if not _compat.writes_jaxpr():  # else `was_loop` has to find the scan
        run = jaxprs.compiled(run, *primals)
    return jax.jvp(run, tuple(primals), tangents)


def _batch(axis, args, dims, **params):
    """Batches the tasks of a loop over an axis, by whose name they may know it.

    The loop keeps its schedule.
    """
    loop, size = ScheduledLoop.of_params(**params), axis.size
    operands = [v for v, _ in loop.operands]
    given = {v for v, d in zip(operands, dims, strict=True) if d is not None}
    batched = _reached(loop, given, axis.name)
    if not batched:
        return loop_p.bind(*args, **params), [None] * len(loop.results)
    consts, stacked = {*loop.consts}, {*loop.xs, *loop.ys}

    def axis_of(v: Var) -> int:
        """The axis of the batch: after those of the replicas and of the microbatches."""
        return (loop.replicas > 1 and v not in consts) + (v in stacked)

    def operand(v: Var, x, dim):
        if dim is not None:
            return jnp.moveaxis(x, dim, axis_of(v))
        # A carry that begins equal for the whole batch may become different.
        if v not in batched:
            return x
        return jnp.moveaxis(jnp.broadcast_to(x, (size, *x.shape)), 0, axis_of(v))

    new = jaxprs.Substitution(
        (v, Var(rows_type(v.aval, size))) for v in loop.inputs if v in batched
    )

    def batch(task):
        jaxpr = task.params["jaxpr"]
        axes, out_axes = (
            [0 if v in batched else None for v in atoms] for atoms in (task.invars, task.outvars)
        )
        run = jax.vmap(
            functools.partial(jaxprs.run, jaxpr),
            axes,
            out_axes,
            axis_name=axis.name,
            axis_size=size,
            spmd_axis_name=axis.spmd_name,
        )
        avals = [
            v.aval if axis is None else _specs.type_of(v.aval, (size, *v.aval.shape))
            for v, axis in zip(jaxpr.jaxpr.invars, axes, strict=True)
        ]
        closed = jaxprs.bind_constants(*jaxprs.without_constants(jax.make_jaxpr(run)(*avals)))
        outvars = list(map(jaxprs.fresh_var, closed.jaxpr.outvars))
        new.of.update(zip(task.outvars, outvars, strict=True))
        return remade(task, closed, map(new, task.invars), outvars)

    tasks = list(map(batch, loop.tasks))
    invars, outvars = map(new, loop.inputs), map(new, loop.outputs)
    body = _compat.make_closed_jaxpr([*invars], [*outvars], tasks)
    outputs = loop_p.bind(
        *map(operand, operands, args, dims), **{**params, "body": body, "is_batched": True}
    )
    return outputs, [axis_of(v) if v in batched else None for v, _ in loop.results]


def _reached(loop: ScheduledLoop, sources: set[Var], axis_name: Any) -> set[Var]:
    """Finds all variables that depend on the sources, or an axis, in any microbatch."""
    reached, before = set(sources), -1
    while before < len(reached):
        before = len(reached)
        for task in loop.tasks:
            inside = task.params["jaxpr"].jaxpr
            indices = [
                v for v, given in zip(inside.invars, task.invars, strict=True) if given in reached
            ]
            indices += jaxprs.results_of(e for e in inside.eqns if _compat.knows_axis(e, axis_name))
            depends = jaxprs.descendants(inside.eqns, indices)
            outvars = zip(inside.outvars, task.outvars, strict=True)
            reached.update(o for v, o in outvars if not jaxprs.is_literal(v) and v in depends)
        for pair in loop.becomes().items():
            reached.update(pair if not reached.isdisjoint(pair) else ())
    return reached


_compat.checkify_as(loop_p, run_as_scan)
ad.primitive_jvps[loop_p] = _jvp
batching.fancy_primitive_batchers[loop_p] = _batch


def _flat(eqn) -> jex.ClosedJaxpr:
    """Returns a loop as scans whose bodies are flat: tasks may share an array of keys."""
    plain = _plain(*(v.aval for v in eqn.invars), **eqn.params)
    opened = [jaxprs.map_jaxprs(e, lambda body: jaxprs.inline(body, _is_task)) for e in plain.eqns]
    return _compat.with_equations(plain, opened)


_compat.use_keys_as(loop_p, _flat)


def _is_task(eqn) -> bool:
    return called_as(eqn, "task_") is not None


def was_loop(eqn) -> bool:
    """Tells whether an equation was a scheduled loop before it was differentiated."""
    return eqn.primitive.name == "scan" and jaxprs.contains(eqn, _is_task)
