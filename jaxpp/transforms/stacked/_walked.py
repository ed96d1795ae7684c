"""Finds scans that walk a stack by a number, and hands them the stack as xs.

`lax.fori_loop(0, n, lambda i, h: layer(w[i], h), h)`, and a scan over `jnp.arange(n)`, read all of
`w` in each iteration, and take a row of it. A scan over `w` itself does the same, and can be cut.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var, primitives


def walked_as_xs(
    jaxpr: jex.ClosedJaxpr, is_stack: Callable[[Atom], bool]
) -> tuple[jex.ClosedJaxpr, list[Eqn]]:
    """Makes the stacks whose rows a scan takes by the number of the iteration xs of the scan.

    `is_stack` tells whether a constant of a scan may be one. Also gives the scans that have some.
    """
    walking: list[Eqn] = []

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
            walk = _Walk.of(eqn, jaxpr.eqns, is_stack)
            for way in (walk, walk.mirrored()):
                if way is not None and (taken := way.rows()):
                    walking.append(eqn)
                    return way.over(taken)
        return None

    return jaxprs.rewrite(jaxpr, rule), walking


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A scan whose iterations count.

    Args:
        eqn: the scan.
        body: its body, in which the calls are open that may take rows.
        takers: the equations of the body that take a row of a stack, each with the stack's number.
        values: the numbers that are known in the body, each with its values in all iterations, in
            the order of the rows that these read.
        ends: what carried numbers are after the last iteration.
    """

    eqn: Eqn
    body: jex.ClosedJaxpr
    takers: Sequence[tuple[Eqn, int]]
    values: Mapping[Var, np.ndarray]
    ends: Mapping[Var, np.ndarray]

    @classmethod
    def of(cls, eqn: Eqn, eqns: Sequence[Eqn], is_stack: Callable[[Atom], bool]) -> "_Walk":
        body = jaxprs.bind_constants(*jaxprs.without_constants(eqn.params["jaxpr"]))
        body = jaxprs.inline(body, _may_take_rows)
        num_consts, num_carry = _compat.scan_parts(eqn)
        invars = body.jaxpr.invars
        stacks = {v: n for n, v in enumerate(invars[:num_consts]) if is_stack(eqn.invars[n])}
        takers = [(e, stacks[e.invars[0]]) for e in body.eqns if _takes_row(e, stacks)]
        if not takers:
            return cls(eqn, body, (), {}, {})
        given = zip(invars[num_consts:], eqn.invars[num_consts:], strict=True)
        first = {v: x for v, atom in given if (x := _numbers(atom, eqns)) is not None}
        after = dict(zip(invars[num_consts:], body.jaxpr.outvars[:num_carry], strict=False))

        def is_known(atom: Atom) -> bool:
            return first.keys() >= set(_part(body.eqns, [atom]).inputs)

        while unknown := [v for v in first if v in after and not is_known(after[v])]:
            first = {v: x for v, x in first.items() if v not in unknown}
        carries, xs = [v for v in first if v in after], [v for v in first if v not in after]
        indices = [e.invars[1] for e, _ in takers if is_known(e.invars[1])]
        part = _part(body.eqns, [*(after[v] for v in carries), *indices])

        def step(carry, x):
            known = dict(zip([*carries, *xs], [*carry, *x], strict=True))
            numbers = jaxprs.run(part.jaxpr, *(known[v] for v in part.inputs))
            ends = [y.astype(v.aval.dtype) for y, v in zip(numbers, carries, strict=False)]
            return ends, [*carry, *numbers[len(carries) :]]

        params = {k: eqn.params[k] for k in ("length", "reverse")}
        with jax.ensure_compile_time_eval():
            starts = [jnp.asarray(first[v]) for v in carries]
            ends, known = jax.lax.scan(step, starts, [first[v] for v in xs], **params)
        values = dict(zip([*carries, *indices], map(np.asarray, known), strict=True))
        values |= {v: first[v] for v in xs}
        last = dict(zip(carries, map(np.asarray, ends), strict=True))
        return cls(eqn, body, takers, values, last)

    def mirrored(self) -> "_Walk | None":
        """Returns the walk with the rows of xs in the opposite order; None if it has others."""
        num_consts, num_carry = _compat.scan_parts(self.eqn)
        xs = self.body.jaxpr.invars[num_consts + num_carry :]
        if len(self.eqn.outvars) > num_carry or not all(v in self.values for v in xs):
            return None
        params = {**self.eqn.params, "reverse": not self.eqn.params["reverse"]}
        values = {v: numbers[::-1] for v, numbers in self.values.items()}
        return dataclasses.replace(self, eqn=self.eqn.replace(params=params), values=values)

    def rows(self) -> dict[Var, tuple[int, int]]:
        """Finds what is a row of a constant, the next one in each iteration.

        It has the number of the constant, and the row of the first iteration.
        """
        found = {}
        for eqn, stack in self.takers:
            (index,) = jaxprs.variables(eqn.invars[1:2])
            if (numbers := self.values.get(index)) is not None:
                start, length = int(numbers.flat[0]), len(numbers)
                in_order = np.array_equal(numbers.ravel(), start + np.arange(length))
                if in_order and 0 <= start <= eqn.invars[0].aval.shape[0] - length:
                    found[eqn.outvars[0]] = stack, start
        return found

    def over(self, taken: Mapping[Var, tuple[int, int]]) -> jaxprs.Replacement:
        """Makes the scan over constants, as `rows` gives them; what it counts are xs, too."""
        num_consts, num_carry = _compat.scan_parts(self.eqn)
        inside, outvars = self.body.jaxpr.invars, self.body.jaxpr.outvars
        consts, carries, xs = (
            [v for v in inside[part] if v not in self.values]
            for part in (slice(num_consts), slice(num_consts, num_consts + num_carry),
                         slice(num_consts + num_carry, None))
        )  # fmt: skip
        counts = [v for v in inside[num_consts:] if v in self.values]
        rows = {
            v: Var(v.aval.update(shape=inside[n].aval.shape[1:])) for v, (n, _) in taken.items()
        }

        def rule(eqn: Eqn) -> jaxprs.Replacement | None:
            if eqn.outvars[:1] and eqn.outvars[0] in rows:
                shape = eqn.outvars[0].aval.shape
                return jaxprs.record(lambda row: row.reshape(shape), [rows[eqn.outvars[0]]], eqn)
            return None

        known = jaxprs.Substitution()
        eqns = jaxprs.rewritten(self.body.eqns, rule, known)
        ends = zip(inside[num_consts:], outvars[:num_carry], strict=False)
        after = [known(out) for v, out in ends if v not in self.values]
        outputs = [*after, *map(known, outvars[num_carry:])]
        invars = [*consts, *carries, *xs, *counts, *rows.values()]
        body = _compat.make_closed_jaxpr(invars, outputs, eqns)
        body = _compat.eliminate_dead_code(body, [True] * len(outputs))
        params = {k: self.eqn.params[k] for k in ("length", "reverse", "unroll")}

        def run(*values):
            given = dict(zip(inside, values, strict=True))
            stacks = [
                jax.lax.slice_in_dim(values[n], start, start + params["length"])
                for n, start in taken.values()
            ]

            def iterate(carry, slices):
                results = jaxprs.run(body, *map(given.__getitem__, consts), *carry, *slices)
                return results[: len(carries)], results[len(carries) :]

            numbers = [jnp.asarray(self.values[v], v.aval.dtype) for v in counts]
            over = [*map(given.__getitem__, xs), *numbers, *stacks]
            carry, ys = jax.lax.scan(iterate, [given[v] for v in carries], over, **params)
            return [*carry, *ys]

        eqns, results = jaxprs.record(run, self.eqn.invars, self.eqn)
        rest = iter(results)
        ends = [
            jaxprs.literal(self.ends[v], v.aval) if v in self.ends else next(rest)
            for v in inside[num_consts:][:num_carry]
        ]
        return eqns, [*ends, *rest]


def _may_take_rows(eqn: Eqn) -> bool:
    """Tells whether an equation is a `jit` in which rows may be taken."""
    if eqn.primitive.name not in primitives.PLAIN_CALLS:
        return False
    return jaxprs.contains(eqn, lambda e: e.primitive.name in ("dynamic_slice", "gather"))


def _part(eqns: Sequence[Eqn], atoms: Sequence[Atom]) -> jaxprs.Part:
    """Makes a jaxpr of what atoms are computed from, without effects."""
    return jaxprs.part(jaxprs.needed([e for e in eqns if not e.effects], atoms), atoms)


def _numbers(array: Atom, eqns: Sequence[Eqn]) -> np.ndarray | None:
    """Returns the values of whole numbers, or truth values, if no argument has a part in them."""
    if not any(jnp.issubdtype(array.aval.dtype, kind) for kind in (jnp.integer, jnp.bool_)):
        return None
    part = _part(eqns, [array])
    with jax.ensure_compile_time_eval():
        return None if part.inputs else np.asarray(jaxprs.run(part.jaxpr)[0], array.aval.dtype)


def _takes_row(eqn: Eqn, stacks: Mapping[Var, int]) -> bool:
    """Tells whether an equation takes a row of one of some stacks, by the row's number."""
    if eqn.primitive.name not in ("dynamic_slice", "gather"):
        return False
    array, index, *_ = eqn.invars
    is_one = tuple(eqn.params["slice_sizes"]) == (1, *array.aval.shape[1:])
    if any(map(jaxprs.is_literal, (array, index))) or array not in stacks or not is_one:
        return False
    if eqn.primitive.name == "dynamic_slice":
        return True
    numbers = eqn.params["dimension_numbers"]
    is_one = index.aval.size == 1 and not numbers.operand_batching_dims
    return is_one and tuple(map(int, numbers.start_index_map)) == (0,)
