"""The loop over slices of the arguments of a function, and its derivative.

With replicas, each runs the loop over slices of its own, and what the loops give is combined once.
On one device that is a loop over the replicas, in order. The loop of a replica, and each
combination of the values of replicas, is a call with a name, by which `schedule` and `place` know
them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxpp import _compat, _specs, jaxprs
from jaxpp.transforms.microbatch import _reductions
from jaxpp.transforms.microbatch._reductions import CARRY, Reduction, is_inexact
from jaxpp.transforms.stages import call_as, keep_nothing


def loop_over_slices(
    jaxpr: jex.ClosedJaxpr,
    roles: Sequence[str],
    operators: Sequence[Reduction],
    count: int,
    replicas: int = 1,
) -> Callable:
    """Makes the loop over slices, as a function of the jaxpr's inputs, with its derivative.

    Where only scalars that are summed are differentiated, their gradients are accumulated in the
    loop that makes their values. Else all gradients are accumulated in a second loop, which knows
    the slices' cotangents; those of the first loop are dead code then.

    Args:
        jaxpr: the computation on one slice.
        roles: the role of each input, `"whole"`, `"slice"` or `"carry"`.
        operators: the operator of each output.
        count: the number of slices.
        replicas: the number of replicas, each of which runs a loop over as many slices.
    """
    loop = _SliceLoop(jaxpr, roles, operators, count, replicas)
    # The gradient of a value that a slice carries to the next is known only after the last slice.
    if CARRY in roles or not (loop.scalars or loop.chained or replicas > 1):
        return functools.partial(jaxprs.run_compiled, loop.recomputed)

    def forward(*primals):
        inputs = [p.value for p in primals]
        active = [i for i, p in enumerate(primals) if p.perturbed and is_inexact(p.value)]
        run = functools.partial(loop.with_gradients, active=active)
        outputs, gradients, values = jaxprs.run_compiled(run, inputs)
        return outputs, (inputs, gradients, values, dict.fromkeys(active, ()))

    def backward(residuals, cotangents):
        given = {k: ct for k, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)}
        return jaxprs.run_compiled(pull_back, *residuals, given)

    def pull_back(inputs, gradients, values, active, given):
        result: list[Any] = [None] * len(inputs)
        parts = [
            (i, _specs.as_weak_as(g, given[k] * g)) for (k, i), g in gradients.items() if k in given
        ]
        if active and not given.keys() <= set(loop.scalars):
            parts = loop.gradients(inputs, list(active), values, given)
        for i, part in parts:
            result[i] = part if result[i] is None else result[i] + part
        pairs = zip(result, inputs, strict=True)
        return tuple(g if g is None or g.dtype == x.dtype else g.astype(x.dtype) for g, x in pairs)

    plain = functools.partial(jaxprs.run_compiled, loop.plain)
    return _compat.custom_vjp(plain, forward, backward, symbolic_zeros=True)


def _without_effects(pullback: Callable, cotangent: Any) -> list[Any]:
    """Runs the pullback of one scalar of several, of which only some may be asked for later.

    Raises:
        ValueError: it has an effect, which would happen for a scalar that is not asked for, too.
    """
    traced = jax.make_jaxpr(pullback)(cotangent)
    for eqn in traced.eqns:
        if _compat.acts(eqn):
            raise ValueError(
                f"microbatch: the backward pass has an effect, such as a print"
                f"{_compat.at_source_line(eqn)}, and the function several scalars that it could be "
                f"of. Differentiate first: microbatch(jax.value_and_grad(f, has_aux=True), M), or "
                f"return one scalar."
            )
    return jaxprs.run(traced, cotangent)


@dataclasses.dataclass(frozen=True)
class _SliceLoop:
    """A loop over slices, with the fields that `loop_over_slices` takes."""

    jaxpr: jex.ClosedJaxpr
    roles: Sequence[str]
    operators: Sequence[Reduction]
    count: int
    replicas: int = 1

    @functools.cached_property
    def scalars(self) -> list[int]:
        """The outputs whose gradients are accumulated together with their values."""
        avals = [v.aval for v in self.jaxpr.jaxpr.outvars]
        return [
            k
            for k, (operator, aval) in enumerate(zip(self.operators, avals, strict=True))
            if _reductions.is_sum(operator)
            and aval.shape == ()
            and jnp.issubdtype(aval.dtype, jnp.floating)
        ]

    def plain(self, *inputs):
        """Computes the outputs."""
        return self._run(self._body, self.roles, self.operators, *inputs)

    def recomputed(self, *inputs):
        """Computes the outputs; for its backward, it keeps the inputs of each slice alone."""
        wider = {
            i: dtype
            for i, x in enumerate(inputs)
            if self.roles[i] == "whole" and is_inexact(x)
            if (dtype := _reductions.dtype_of_gradient(self.operators, x)) != x.dtype
        }
        if not wider:
            return self._recomputed(inputs, [], [])
        # JAX adds up the gradient by what all slices read, in the dtype of what has the tangent.
        loop = jax.custom_jvp(lambda *inputs: self._recomputed(inputs, [], []))

        def along(primals, tangents):
            active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
            apart = [i for i in active if i in wider]
            rest = [i for i in active if i not in wider]

            def of_active(chosen, carriers):
                return self._recomputed(_replaced(primals, rest, chosen), apart, carriers)

            carriers = [_specs.filled(primals[i], 0, wider[i]) for i in apart]
            given = [tangents[i] for i in rest], [tangents[i].astype(wider[i]) for i in apart]
            return jax.jvp(of_active, ([primals[i] for i in rest], carriers), given)

        loop.defjvp(along, symbolic_zeros=True)
        return loop(*inputs)

    def _recomputed(self, inputs: Sequence[Any], apart: Sequence[int], carriers: Sequence[Any]):
        """Runs the loop; the inputs `apart` have their tangents in values of a wider dtype."""
        body = jax.checkpoint(self._body, policy=keep_nothing)

        def of_slice(*given):
            slice_inputs, carriers = given[: len(inputs)], given[len(inputs) :]
            joined = [
                _with_tangent_of(slice_inputs[i], c) for i, c in zip(apart, carriers, strict=True)
            ]
            return body(*_replaced(slice_inputs, apart, joined))

        roles = [*self.roles, *("whole" for _ in apart)]
        return self._run(of_slice, roles, self.operators, *inputs, *carriers)

    @functools.cached_property
    def chained(self) -> list[int]:
        """The outputs whose slices have cotangents that depend on the values of the slices."""
        avals = [v.aval for v in self.jaxpr.jaxpr.outvars]
        return [
            k
            for k, (operator, aval) in enumerate(zip(self.operators, avals, strict=True))
            if _reductions.is_chain(operator) and is_inexact(aval)
        ]

    def with_gradients(
        self, inputs: Sequence[Any], active: Sequence[int]
    ) -> tuple[list[Any], dict[tuple[int, int], Any], dict[int, Any]]:
        """Computes the outputs, and what their gradients need.

        These are the gradient of scalar k by each active input i, as (k, i), and the slices' values
        of each of the outputs `chained`.
        """
        pairs = [(k, i) for k in self.scalars for i in active]
        if not active or not (pairs or self.chained):
            return self.plain(*inputs), {}, {}

        def of_slice(*inputs):
            def of_active(*chosen):
                outputs = self._body(*_replaced(inputs, active, chosen))
                return [outputs[k] for k in self.scalars], outputs

            chosen = [inputs[i] for i in active]
            values, pullback, outputs = jax.vjp(of_active, *chosen, has_aux=True)
            zeros = [ad.Zero(jax.typeof(y)) for y in values]
            ones = map(jnp.ones_like, values)
            # Only later it is known which scalars are differentiated; the others are dead code.
            of_each = [
                _without_effects(lambda seed, n=n: pullback(_replaced(zeros, [n], [seed])), unit)
                if len(values) > 1
                else pullback([unit])
                for n, unit in enumerate(ones)
            ]
            values = [outputs[k] for k in self.chained]
            return [*outputs, *values, *(g for gradients in of_each for g in gradients)]

        def operator(k: int, i: int):
            reduction = self.operators[k]
            if self.roles[i] == "slice":
                mean = reduction.name == "mean"
                return _reductions.Collect("stack", lambda s: s / self.count if mean else s)
            return _reductions.of_gradient(reduction.name, [reduction], inputs[i])

        stacks = [_reductions.REDUCTIONS["stack"]] * len(self.chained)
        operators = [*self.operators, *stacks, *(operator(k, i) for k, i in pairs)]
        results = iter(self._run(of_slice, self.roles, operators, *inputs))
        outputs = list(itertools.islice(results, len(self.operators)))
        values = dict(zip(self.chained, itertools.islice(results, len(stacks)), strict=True))
        return outputs, dict(zip(pairs, results, strict=True)), values

    def gradients(
        self,
        inputs: Sequence[Any],
        active: Sequence[int],
        values: dict[int, Any],
        cotangents: dict[int, Any],
    ) -> list[tuple[int, Any]]:
        """Computes the gradient by each active input, for the cotangents of some outputs."""
        shares = [self._shares(k, ct, values) for k, ct in cotangents.items()]

        def of_slice(*operands):
            inputs, cts = operands[: len(self.roles)], operands[len(self.roles) :]

            def of_active(*chosen):
                results = self._body(*_replaced(inputs, active, chosen))
                return [results[k] for k in cotangents]

            primals, pullback = jax.vjp(of_active, *(inputs[i] for i in active))
            return pullback([ct.astype(y.dtype) for ct, y in zip(cts, primals, strict=True)])

        names = ["stack" if self.roles[i] == "slice" else "sum" for i in active]
        roles = [*self.roles, *(role for role, _ in shares)]
        operands = [*inputs, *(ct for _, ct in shares)]
        reductions = [self.operators[k] for k in cotangents]
        operators = [
            _reductions.of_gradient(name, reductions, inputs[i])
            for i, name in zip(active, names, strict=True)
        ]
        results = self._run(of_slice, roles, operators, *operands)
        return list(zip(active, results, strict=True))

    def _shares(self, k: int, ct: Any, values: dict[int, Any]) -> tuple[str, Any]:
        """Returns the cotangents of output k in the slices, and their role in the loop."""
        operator = self.operators[k]
        if not _reductions.is_chain(operator):
            return _reductions.cotangent_of_slices(operator, ct, self.count)

        def combined(values):
            return self._run(lambda x: [x], ["slice"], [operator], values)[0]

        (slices,) = jax.vjp(combined, values[k])[1](ct)
        return "slice", slices

    def _body(self, *inputs):
        return jaxprs.run(self.jaxpr, *inputs)

    def _run(
        self, body: Callable, roles: Sequence[str], operators: Sequence[Reduction], *inputs: Any
    ) -> list[Any]:
        """Scans `body` over the slices, folding, collecting or handing on each of its outputs.

        Each of the replicas does so for its own slices; then their results are combined.
        """
        whole, first, slices = (
            [x for x, r in zip(inputs, roles, strict=True) if r == role]
            for role in ("whole", CARRY, "slice")
        )

        def call(carried, one_slice):
            given = {"whole": iter(whole), CARRY: iter(carried), "slice": iter(one_slice)}
            return body(*(next(given[role]) for role in roles))

        slice_types = _specs.types_of(lambda slices: [x[0] for x in slices], slices)
        shapes = _specs.types_of(call, first, slice_types)

        def those(kind, outputs):
            return [y for op, y in zip(operators, outputs, strict=True) if isinstance(op, kind)]

        folds = {i: op for i, op in enumerate(operators) if isinstance(op, _reductions.Fold)}

        def step(state, one_slice):
            accs, carried = state
            outputs = call(carried, one_slice)
            pairs = zip(folds.items(), accs, strict=True)
            accs = [op.combine(acc, outputs[i]) for (i, op), acc in pairs]
            return (accs, those(_reductions.Carry, outputs)), those(_reductions.Collect, outputs)

        init = [op.init(shapes[i]) for i, op in folds.items()]

        def loop(*slices):
            length = self.count // self.replicas
            (accs, carried), stacked = jax.lax.scan(
                step, (init, first), list(slices), length=length
            )
            return accs, carried, stacked

        if self.replicas == 1:
            accs, carried, stacked = loop(*slices)
        else:
            accs, carried, stacked = _run_replicas(loop, slices, self.replicas)
            accs = list(map(_merged, folds.values(), accs))
            carried = list(map(_merged, those(_reductions.Carry, operators), carried))
            stacked = [call_as("merge_slices", _in_order, (rows,)) for rows in stacked]
        accs, carried, stacked = iter(accs), iter(carried), iter(stacked)

        def result(op: Reduction) -> Any:
            if isinstance(op, _reductions.Carry):
                return next(carried)
            if isinstance(op, _reductions.Collect):
                return op.finish(next(stacked))
            return op.finish(next(accs), self.count)

        return [result(op) for op in operators]


#: Gives its first operand, with the tangent of its second.
_with_tangent_of = jax.custom_jvp(lambda x, carrier: x)
_with_tangent_of.defjvp(
    lambda primals, tangents: (primals[0], tangents[1].astype(primals[0].dtype))
)


def _replaced(values: Sequence[Any], numbers: Sequence[int], by: Iterable[Any]) -> list[Any]:
    """Replaces the values of the given numbers."""
    result = list(values)
    for i, x in zip(numbers, by, strict=True):
        result[i] = x
    return result


# ---- replicas -----------------------------------------------------------------------------------


def _run_replicas(loop: Callable[..., Any], slices: Sequence[Any], replicas: int) -> Any:
    """Runs a loop for each replica, of which the d-th has the d-th run of all slices.

    The arrays of the result have a new first axis, of a row for each replica.
    """

    def replica(_, slices):
        return None, call_as("replica", loop, slices)

    rows = [_by_replica(x, replicas) for x in slices]
    return jax.lax.scan(replica, None, rows, length=replicas)[1]


def _by_replica(x: Any, replicas: int) -> Any:
    shape = (replicas, x.shape[0] // replicas, *x.shape[1:])
    split = _specs.in_type(x)
    if split is not None:
        split = _specs.partition_spec((split[0], (), *split[1:]))
    return jax.lax.reshape(x, shape, out_sharding=split)


def _merged(operator: Reduction, rows: Any) -> Any:
    """Combines the values of the replicas, a row each, in order, as the operator of them says."""
    is_carried = isinstance(operator, _reductions.Carry)
    how: Any = operator.merge if is_carried else operator.name
    if isinstance(operator, _reductions.Fold) and operator.merge:
        how = functools.partial(_folded, operator.merge)
    if callable(how):
        return call_as("merge_other", how, (rows,))
    name = how if how in _MERGES else "sum"
    merged = call_as(f"merge_{name}", _MERGES[name], (rows,))
    if not is_carried or how != "mean":
        return merged
    return _specs.as_weak_as(rows, (merged / rows.shape[0]).astype(rows.dtype))


def _folded(combine: Any, rows: Any) -> Any:
    """Combines rows, the second with the first, the third with both, and so on."""
    count = jax.tree.leaves(rows)[0].shape[0]
    values = (jax.tree.map(lambda x, d=d: x[d], rows) for d in range(count))
    return functools.reduce(combine, values)


#: Combines rows, by name; each function is one, so that it is traced once for a type.
_MERGES: dict[str, Callable[[Any], Any]] = {
    "sum": functools.partial(_folded, jnp.add),
    "max": functools.partial(_folded, jnp.maximum),
    "last": lambda rows: rows[-1],
}


def _in_order(rows: Any) -> Any:
    """Puts the slices of all replicas, which have a row each, along one axis."""
    shape = (rows.shape[0] * rows.shape[1], *rows.shape[2:])
    split = _specs.in_type(rows)
    if split is not None:
        split = _specs.partition_spec((split[0], *split[2:]))
    return jax.lax.reshape(rows, shape, out_sharding=split)
