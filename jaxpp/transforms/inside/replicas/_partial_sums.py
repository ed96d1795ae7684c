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
    kept = _jaxprs.variables([outvars[i] for i in wanted])
    apart = _shares.shares(scope, [invars[i] for i in given], kept)
    return _write(scope, apart, given, wanted)


def _write(
    scope: Scope, apart: Collection[Any], given: Collection[int], wanted: Collection[int]
) -> jex.ClosedJaxpr:
    """Does as `with_shares`; `apart` are the variables that are to be made as shares."""
    invars, outvars = scope.jaxpr.jaxpr.invars, scope.jaxpr.jaxpr.outvars
    rows = {}
    for v in (invars[i] for i in given):
        _, (rows[v],) = _jaxprs.record(lambda x: first_row(x, scope.replicas), [v])
    writer = _Writer(scope, apart, rows)
    for eqn in scope.jaxpr.eqns:
        writer.add(eqn)
    results = [writer.shares(v) if i in wanted else writer.whole(v) for i, v in enumerate(outvars)]
    eqns = _jaxprs.needed(writer.eqns, results)
    return _compat.make_closed_jaxpr([rows.get(v, v) for v in invars], results, eqns)


# ---- rows ---------------------------------------------------------------------------------------


def in_rows(atom: Any, maker: Mapping[Any, Any], replicas: Replicas) -> tuple[Callable, list[Any]]:
    """Gives a function that makes the shares of a whole value, and its operands.

    Zeros are made anew.
    """
    if _primitives.is_zero(atom, maker):
        shape, dtype = (replicas.count, *atom.aval.shape), atom.aval.dtype
        return lambda: keep_apart(jax.lax.full(shape, 0, dtype), replicas), []
    return functools.partial(first_row, replicas=replicas), [atom]


def first_row(x: jax.Array, replicas: Replicas) -> jax.Array:
    """Makes the shares of a whole value: the first row has it, the others have zeros."""
    shape = (replicas.count, *x.shape)
    # A comparison, not a pad, for which XLA would exchange rows between devices.
    is_first = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0
    rows = jax.lax.broadcast(x, (replicas.count,))
    return keep_apart(jax.lax.select(is_first, rows, jax.lax.full_like(rows, 0)), replicas)


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
    axes = {"axis_size": replicas.count, "spmd_axis_name": replicas.axes}
    mapped = jax.vmap(fun, tuple(dimensions), **axes)
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
        if not any(v in self._apart for v in eqn.outvars):
            self._append(eqn.replace(invars=[self.whole(v) for v in eqn.invars]))
        elif nested := self._scope.nested.get(id(eqn)):
            self._add_nested(eqn, nested)
        else:
            self._add_mapped(eqn)

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
        return self._record(*in_rows(atom, self._maker, self._replicas))[0]

    def _append(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        self._maker.update((v, eqn) for v in eqn.outvars)

    def _record(self, fun: Callable, operands: Sequence[Any]) -> list[Any]:
        eqns, results = _jaxprs.record(fun, operands, self._at)
        for eqn in eqns:
            self._append(eqn)
        return results

    def _add_mapped(self, eqn: Any) -> None:
        """Maps an equation over the examples of each replica, or over rows if it is additive."""
        summed = self._scope.summed(eqn)
        additive = self._scope.additive(eqn, self._apart)
        operands: list[Any] = []
        dimensions: list[int | None] = []
        for i, v in enumerate(eqn.invars):
            operand, dimension = self.whole(v), summed.get(i)
            if dimension is not None:
                split = functools.partial(by_replica, dimension=dimension, replicas=self._replicas)
                (operand,) = self._record(split, [operand])
            elif i in additive and not _primitives.is_zero(v, self._maker):
                operand, dimension = self.shares(v), 0
            operands.append(operand)
            dimensions.append(dimension)
        one = functools.partial(eqn.primitive.bind, **eqn.params)
        mapped = map_replicas(one, dimensions, self._replicas, eqn.primitive.name in _BY_HAND)
        (self._rows[eqn.outvars[0]],) = self._record(mapped, operands)

    def _add_nested(self, eqn: Any, nested: Nested) -> None:
        """Adds an equation whose jaxprs take and give shares; stacks are swapped on the way."""
        inputs, bodies = nested.bodies[0].jaxpr.jaxpr.invars, iter(nested.bodies)
        given = [i for i, v in enumerate(inputs) if v in self._apart]
        wanted = [i for i, v in enumerate(eqn.outvars) if v in self._apart]
        new = _jaxprs.map_jaxprs(eqn, lambda _: _write(next(bodies), self._apart, given, wanted))

        def operand(i: int, v: Any) -> Any:
            if i not in given:
                return self.whole(v)
            return self._swapped(self.shares(v)) if i >= nested.slices else self.shares(v)

        operands = [operand(i, v) for i, v in enumerate(eqn.invars, -nested.first)]
        one = functools.partial(eqn.primitive.bind, **new.params)
        results = list(eqn.outvars)
        avals = jax.make_jaxpr(one)(*(v.aval for v in operands)).out_avals
        for i in wanted:
            results[i] = jex.Var(avals[i])
        self._append(new.replace(invars=operands, outvars=results))
        for i in wanted:
            rows = self._swapped(results[i]) if i >= nested.stacks else results[i]
            self._rows[eqn.outvars[i]] = rows

    def _swapped(self, rows: Any) -> Any:
        """Exchanges the dimensions of replicas and of iterations, which costs a device nothing."""
        order = (1, 0, *range(2, rows.aval.ndim))
        return self._record(lambda x: jax.lax.transpose(x, order), [rows])[0]
