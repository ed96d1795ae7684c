"""Rewrites a jaxpr so that sums over examples stay apart by replica.

In place of a value there are its *shares*: an array with a leading dimension of one row for each
replica. A row stays where its replica is, and the value is the sum over the rows. Where an equation
sums over examples, their dimension of size b is reshaped to (D, b / D), and the equation is mapped
over the first of these by `jax.vmap`: so XLA finds nothing to reduce. Additive equations after it
are mapped over the rows. A whole value that is added to shares goes into the first row, with zeros
in the others.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._specs import Spec, partition_spec
from jaxpp.transforms.inside.replicas import _shares
from jaxpp.transforms.inside.replicas._rules import Replicas
from jaxpp.transforms.inside.replicas._shares import Nested, Scope


def with_shares(scope: Scope, given: Collection[int], wanted: Collection[int]) -> jex.ClosedJaxpr:
    """Rewrites a jaxpr so that some of its inputs and outputs are in shares.

    Args:
        scope: the jaxpr, opened.
        given: the numbers of its inputs that come in shares.
        wanted: the numbers of its outputs that are to be shares.
    """
    invars, outvars = scope.jaxpr.jaxpr.invars, scope.jaxpr.jaxpr.outvars
    apart = _shares.shares(
        scope,
        [invars[i] for i in given],
        _jaxprs.variables([outvars[i] for i in wanted]),
    )
    rows = {invars[i]: jex.Var(rows_type(invars[i], scope.replicas)) for i in given}
    writer = _Writer(scope, apart, rows)
    for eqn in scope.jaxpr.eqns:
        writer.add(eqn)
    results = [writer.shares(v) if i in wanted else writer.whole(v) for i, v in enumerate(outvars)]
    keep = _jaxprs.ancestors(writer.eqns, results)
    eqns = [e for e, k in zip(writer.eqns, keep, strict=True) if k]
    return _compat.make_closed_jaxpr([rows.get(v, v) for v in invars], results, eqns)


# ---- rows ---------------------------------------------------------------------------------------


def rows_type(var: Any, replicas: Replicas) -> Any:
    """Gives the type of a variable's shares."""
    return jax.make_jaxpr(lambda x: first_row(x, replicas))(var.aval).out_avals[0]


def first_row(x: jax.Array, replicas: Replicas) -> jax.Array:
    """Makes the shares of a whole value: the first row has it, the others have zeros."""
    shape = (replicas.count, *x.shape)
    # A comparison, not a pad, for which XLA would exchange rows between devices.
    is_first = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0
    rows = jax.lax.broadcast(x, (replicas.count,))
    return keep_apart(jax.lax.select(is_first, rows, jax.lax.full_like(rows, 0)), replicas)


def zero_rows(aval: Any, replicas: Replicas) -> jax.Array:
    """Makes the shares of zeros."""
    return keep_apart(jax.lax.full((replicas.count, *aval.shape), 0, aval.dtype), replicas)


def keep_apart(x: jax.Array, replicas: Replicas, dimension: int = 0) -> jax.Array:
    """Keeps each row where its replica is; does nothing without a mesh, as on one device."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    entries[dimension] = replicas.axes
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def sum_rows(rows: jax.Array) -> jax.Array:
    """Adds up shares to their value."""
    return jax.lax.reduce_sum(rows, (0,))


def scatter_rows(rows: jax.Array, spec: Spec, target: Spec, replicas: Replicas) -> jax.Array:
    """Adds up shares to their value, of which each replica gets a part.

    Args:
        rows: the shares.
        spec: the spec of the value over other axes than the replicas'.
        target: the spec of the result: one dimension is split over the replicas, too.
        replicas: the devices.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return sum_rows(rows)
    dimension = next(n for n, own in enumerate(target) if own != spec[n])

    def part(own):
        total = jax.lax.squeeze(own, (0,))
        return jax.lax.psum_scatter(total, replicas.axes, scatter_dimension=dimension, tiled=True)

    given = PartitionSpec(replicas.axes, *partition_spec(spec))
    return jax.shard_map(part, in_specs=given, out_specs=partition_spec(target), check_vma=False)(
        rows
    )


def by_replica(x: jax.Array, dimension: int, replicas: Replicas) -> jax.Array:
    """Splits a dimension of size b, over examples, into one of replicas and one of size b / D."""
    size = x.shape[dimension] // replicas.count
    shape = (*x.shape[:dimension], replicas.count, size, *x.shape[dimension + 1 :])
    return keep_apart(jax.lax.reshape(x, shape), replicas, dimension)


#: The primitives whose operands XLA moves between devices if they are mapped over a dimension that
#: is split over the devices: a convolution is mapped by its groups of features.
_BY_HAND = frozenset({"conv_general_dilated"})


def map_replicas(
    fun: Callable, dimensions: Sequence[int | None], replicas: Replicas, by_hand: bool
) -> Callable:
    """Applies a function to each replica's part of its operands; the results are rows.

    Args:
        fun: a function of arrays.
        dimensions: the dimension of the replicas in each operand, or None where all have the same.
        replicas: the devices.
        by_hand: whether each device applies it to its own part (`jax.shard_map`), where there is a
            mesh; otherwise this is left to XLA (`jax.vmap`).
    """
    if by_hand and not jax.sharding.get_abstract_mesh().empty:

        def apply(*xs):
            pairs = zip(xs, dimensions, strict=True)
            own = [x if d is None else jax.lax.squeeze(x, (d,)) for x, d in pairs]
            return jax.lax.broadcast(fun(*own), (1,))

        specs = [
            PartitionSpec() if d is None else PartitionSpec(*[None] * d, replicas.axes)
            for d in dimensions
        ]
        return jax.shard_map(
            apply,
            in_specs=tuple(specs),
            out_specs=PartitionSpec(replicas.axes),
            axis_names=set(replicas.axes),
            check_vma=False,
        )
    mapped = jax.vmap(
        fun,
        in_axes=tuple(dimensions),
        axis_size=replicas.count,
        spmd_axis_name=replicas.axes,
    )
    return lambda *xs: keep_apart(mapped(*xs), replicas)


# ---- equations ----------------------------------------------------------------------------------


class _Writer:
    """Writes the equations of a jaxpr anew; `eqns` are those written so far.

    Args:
        scope: the jaxpr.
        apart: the variables that are to be made as shares.
        rows: the shares of the inputs that come in shares.
    """

    def __init__(self, scope: Scope, apart: Collection[Any], rows: Mapping[Any, Any]):
        self.eqns: list[Any] = []
        self._scope = scope
        self._replicas = scope.replicas
        self._apart = apart
        self._rows = dict(rows)
        self._whole: dict[Any, Any] = {}
        self._maker: dict[Any, Any] = {}
        self._at: Any = None

    def add(self, eqn: Any) -> None:
        """Adds an equation, unchanged or rewritten to give shares."""
        self._at = eqn
        nested = self._scope.nested(eqn)
        apart = [v in self._apart for v in eqn.outvars]
        if nested is not None and any(apart):
            self._add_nested(eqn, nested)
        elif any(apart) and (summed := self._scope.summed(eqn)):
            self._add_sum(eqn, summed)
        elif any(apart):
            self._add_additive(eqn)
        else:
            self._append(eqn.replace(invars=[self.whole(v) for v in eqn.invars]))

    def whole(self, atom: Any) -> Any:
        """Gives an atom's whole value; if there are only its shares, their sum."""
        if _jaxprs.is_literal(atom) or atom not in self._rows:
            return atom
        if atom not in self._whole:
            (self._whole[atom],) = self._record(sum_rows, [self._rows[atom]])
        return self._whole[atom]

    def shares(self, atom: Any) -> Any:
        """Gives an atom's shares; if there is only its whole value, puts that in the first row."""
        if not _jaxprs.is_literal(atom) and atom in self._rows:
            return self._rows[atom]
        if _primitives.is_zero(atom, self._maker):
            (rows,) = self._record(lambda: zero_rows(atom.aval, self._replicas), [])
        else:
            (rows,) = self._record(lambda x: first_row(x, self._replicas), [atom])
        return rows

    def _append(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        self._maker.update((v, eqn) for v in eqn.outvars)

    def _record(self, fun: Callable, operands: Sequence[Any]) -> list[Any]:
        eqns, results = _jaxprs.record(fun, operands, self._at)
        for eqn in eqns:
            self._append(eqn)
        return results

    def _add_mapped(
        self, eqn: Any, operands: Sequence[Any], dimensions: Sequence[int | None]
    ) -> None:
        """Maps an equation over a dimension of each operand; None if all replicas have the same."""
        one = functools.partial(eqn.primitive.bind, **eqn.params)
        mapped = map_replicas(one, dimensions, self._replicas, eqn.primitive.name in _BY_HAND)
        (self._rows[eqn.outvars[0]],) = self._record(mapped, operands)

    def _add_sum(self, eqn: Any, summed: Mapping[int, int]) -> None:
        """Adds an equation that sums over the examples of each replica."""
        replicas = self._replicas
        operands, dimensions = [], []
        for i, v in enumerate(eqn.invars):
            operand, dimension = self.whole(v), summed.get(i)
            if i in _shares.summed_onto(eqn):
                operand, dimension = self._mapped(v)
            elif dimension is not None:
                (operand,) = self._record(
                    lambda x, d=dimension: by_replica(x, d, replicas), [operand]
                )
            operands.append(operand)
            dimensions.append(dimension)
        self._add_mapped(eqn, operands, dimensions)

    def _add_additive(self, eqn: Any) -> None:
        """Adds an additive equation, applied to each row."""
        additive = self._scope.additive(eqn, self._apart)
        pairs = [
            self._mapped(v) if i in additive else (self.whole(v), None)
            for i, v in enumerate(eqn.invars)
        ]
        self._add_mapped(eqn, [v for v, _ in pairs], [d for _, d in pairs])

    def _mapped(self, atom: Any) -> tuple[Any, int | None]:
        """Gives an operand to map an equation over, and its dimension; zeros are not mapped."""
        return (atom, None) if _primitives.is_zero(atom, self._maker) else (self.shares(atom), 0)

    # ---- equations that hold others -------------------------------------------------------------

    def _add_nested(self, eqn: Any, nested: Nested) -> None:
        can = tuple(not _jaxprs.is_literal(v) and v in self._rows for v in eqn.invars)
        ins, outs = nested.settled(can, tuple(v in self._apart for v in eqn.outvars))
        operands = [
            self._operand(v, apart, i in nested.stacked_operands)
            for i, (v, apart) in enumerate(zip(eqn.invars, ins, strict=True))
        ]
        given = [i - nested.first for i, apart in enumerate(ins) if apart]
        wanted = [i for i, apart in enumerate(outs) if apart]
        bodies = [with_shares(scope, given, wanted) for scope in nested.bodies]
        results = [
            self._result(v, body_out, apart, i in nested.stacked_results, eqn)
            for i, (v, body_out, apart) in enumerate(
                zip(eqn.outvars, bodies[0].jaxpr.outvars, outs, strict=True)
            )
        ]
        self._append(eqn.replace(invars=operands, outvars=results, params=_holding(eqn, bodies)))
        for i, (v, rows) in enumerate(zip(eqn.outvars, results, strict=True)):
            if not outs[i]:
                continue
            if i in nested.stacked_results:
                (rows,) = self._record(_swap, [rows])
            self._rows[v] = rows

    def _operand(self, atom: Any, apart: bool, stacked: bool) -> Any:
        if not apart:
            return self.whole(atom)
        rows = self.shares(atom)
        return self._record(_swap, [rows])[0] if stacked else rows

    def _result(self, var: Any, of_body: Any, apart: bool, stacked: bool, eqn: Any) -> Any:
        if not apart:
            return var
        if not stacked:
            return jex.Var(of_body.aval)
        length = eqn.params["length"]
        stack = jax.make_jaxpr(lambda x: jax.lax.broadcast(x, (length,)))(of_body.aval)
        return jex.Var(stack.out_avals[0])


def _swap(x: jax.Array) -> jax.Array:
    """Exchanges the dimensions of replicas and of iterations, which costs a device nothing."""
    return jax.lax.transpose(x, (1, 0, *range(2, x.ndim)))


def _holding(eqn: Any, bodies: Sequence[jex.ClosedJaxpr]) -> dict[str, Any]:
    """Makes the parameters of an equation with other jaxprs in them."""
    if eqn.primitive.name == "cond":
        old = eqn.params["branches"]
        branches = [_compat.with_closed_type(b, o) for b, o in zip(bodies, old, strict=True)]
        return {**eqn.params, "branches": tuple(branches)}
    return {**eqn.params, "jaxpr": _compat.with_closed_type(bodies[0], eqn.params["jaxpr"])}
