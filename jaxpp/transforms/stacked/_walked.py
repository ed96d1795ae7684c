"""Finds scans that walk a stack by a number, and hands them the stack as xs.

`lax.fori_loop(0, n, lambda i, h: layer(w[i], h), h)`, and a scan over `jnp.arange(n)`, read all of
`w` in each iteration, and take a row of it. A scan over `w` itself does the same, and can be cut.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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

    Args:
        jaxpr: the program.
        is_stack: tells whether a constant of a scan is such a stack, if its rows are taken so.

    Returns:
        the program, and those of its scans that take rows so.
    """
    walking: list[Eqn] = []
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
            return None
        walk = _Walk.of(eqn, maker)
        for own in (walk, walk.mirrored()):
            taken = own.rows() if own is not None else {}
            taken = {v: rows for v, rows in taken.items() if is_stack(eqn.invars[rows[0]])}
            if own is not None and taken:
                walking.append(eqn)
                return own.over(taken)
        return None

    return jaxprs.rewrite(jaxpr, rule), walking


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A scan whose iterations count.

    Args:
        eqn: the scan.
        body: its body, in which the calls are open that may take rows.
        values: the numbers that are known in the body, each with its values in all iterations, in
            the order of the rows that these read.
    """

    eqn: Eqn
    body: jex.ClosedJaxpr
    values: Mapping[Var, np.ndarray]

    @classmethod
    def of(cls, eqn: Eqn, maker: Mapping[Var, Eqn]) -> "_Walk":
        body = jaxprs.bind_constants(*jaxprs.without_constants(eqn.params["jaxpr"]))
        body = jaxprs.inline(body, _may_take_rows)
        num_consts, num_carry = _compat.scan_parts(eqn)
        steps = np.arange(eqn.params["length"])
        steps = steps[::-1] if eqn.params["reverse"] else steps
        values: dict[Var, np.ndarray] = {}
        given = list(zip(eqn.invars, body.jaxpr.invars, strict=True))
        for first, v in given[num_consts + num_carry :]:
            if (numbers := _numbers(first, maker)) is not None:
                values[v] = numbers
        afters = zip(given[num_consts:], body.jaxpr.outvars[:num_carry], strict=False)
        for (first, v), after in afters:
            step = _step(body.eqns, v, after)
            if step is not None and jaxprs.is_literal(first):
                values[v] = np.asarray(first.val + step * steps, v.aval.dtype)
        for inner in body.eqns:
            values.update(_computed(inner, values, len(steps)))
        return cls(eqn, body, values)

    def mirrored(self) -> "_Walk | None":
        """Returns the walk with the rows of xs in the opposite order; None if it has others."""
        num_consts, num_carry = _compat.scan_parts(self.eqn)
        xs = self.body.jaxpr.invars[num_consts + num_carry :]
        if len(self.eqn.outvars) > num_carry or not all(v in self.values for v in xs):
            return None
        params = {**self.eqn.params, "reverse": not self.eqn.params["reverse"]}
        values = {v: own[::-1] for v, own in self.values.items()}
        return dataclasses.replace(self, eqn=self.eqn.replace(params=params), values=values)

    def rows(self) -> dict[Var, tuple[int, int]]:
        """Finds what is a row of a constant, the next one in each iteration.

        Returns:
            for each such variable the number of the constant, and the row of the first iteration.
        """
        num_consts, _ = _compat.scan_parts(self.eqn)
        consts = {v: n for n, v in enumerate(self.body.jaxpr.invars[:num_consts])}
        found = {}
        for eqn in self.body.eqns:
            for index in jaxprs.variables(_row_taken(eqn)):
                stack, numbers = eqn.invars[0], self.values.get(index, np.zeros(1))
                start = int(numbers.flat[0])
                in_order = np.array_equal(numbers, start + np.arange(self.eqn.params["length"]))
                if (
                    stack in consts
                    and in_order
                    and 0 <= start <= stack.aval.shape[0] - len(numbers)
                ):
                    found[eqn.outvars[0]] = consts[stack], start
        return found

    def over(self, taken: Mapping[Var, tuple[int, int]]) -> jaxprs.Replacement:
        """Makes the scan over constants; the numbers that it counts are further xs.

        Args:
            taken: the variables that are rows of constants, as `rows` gives them.
        """
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
        made = [*after, *map(known, outvars[num_carry:])]
        invars = [*consts, *carries, *xs, *counts, *rows.values()]
        body = _compat.make_closed_jaxpr(invars, made, eqns)
        body = _compat.eliminate_dead_code(body, [True] * len(made))
        params = {k: self.eqn.params[k] for k in ("length", "reverse", "unroll")}

        def run(*values):
            given = dict(zip(inside, values, strict=True))
            stacks = [
                jax.lax.slice_in_dim(values[n], start, start + params["length"])
                for n, start in taken.values()
            ]

            def iterate(carry, own):
                results = jaxprs.run(body, *map(given.__getitem__, consts), *carry, *own)
                return results[: len(carries)], results[len(carries) :]

            numbers = [jnp.asarray(self.values[v], v.aval.dtype) for v in counts]
            over = [*map(given.__getitem__, xs), *numbers, *stacks]
            carry, ys = jax.lax.scan(iterate, [given[v] for v in carries], over, **params)
            return [*carry, *ys]

        eqns, results = jaxprs.record(run, self.eqn.invars, self.eqn)
        rest = iter(results)
        ends = [
            self._end(v) if v in self.values else next(rest)
            for v in inside[num_consts:][:num_carry]
        ]
        return eqns, [*ends, *rest]

    def _end(self, count: Var) -> Atom:
        """Returns what a number is after the last iteration."""
        values = self.values[count][:: -1 if self.eqn.params["reverse"] else 1]
        return jaxprs.literal(2 * values[-1] - values[-2], count.aval)


def _may_take_rows(eqn: Eqn) -> bool:
    """Tells whether an equation is a `jit` in which rows may be taken."""
    if eqn.primitive.name not in primitives.PLAIN_CALLS:
        return False
    return jaxprs.contains(eqn, lambda e: e.primitive.name in ("dynamic_slice", "gather"))


def _evaluated(eqn: Eqn, operands: list[Any]) -> Any:
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params))


def _numbers(array: Atom, maker: Mapping[Var, Eqn]) -> np.ndarray | None:
    """Returns the values of an array of numbers, if no argument has a part in them."""
    if not _is_count(array):
        return None
    if jaxprs.is_literal(array):
        return np.asarray(array.val)
    eqn = maker.get(array)
    if eqn is None or len(eqn.outvars) > 1:
        return None
    if eqn.primitive.name not in primitives.ELEMENTWISE | {"iota", "broadcast_in_dim"}:
        return None
    operands = [_numbers(x, maker) for x in eqn.invars]
    return None if any(x is None for x in operands) else _evaluated(eqn, operands)


def _step(eqns: list[Eqn], count: Var, after: Atom) -> int | None:
    """Returns what a carried number grows by in each iteration; None if it does not count."""
    for eqn in eqns:
        if after in eqn.outvars and eqn.primitive.name == "add" and count in eqn.invars:
            for step in eqn.invars:
                if jaxprs.is_literal(step) and count.aval.shape == () and _is_count(count):
                    return int(step.val)
    return None


def _is_count(atom: Atom) -> bool:
    """Tells whether an atom is a whole number or a truth value, or an array of such."""
    return any(jnp.issubdtype(atom.aval.dtype, kind) for kind in (jnp.integer, jnp.bool_))


def _computed(eqn: Eqn, values: Mapping[Var, np.ndarray], length: int) -> dict[Var, np.ndarray]:
    """Computes what an equation makes of known numbers, in all iterations at once."""
    operands = jaxprs.variables(eqn.invars)
    if not operands or not all(v in values for v in operands) or len(eqn.outvars) > 1:
        return {}
    if eqn.outvars[0].aval.size > 1 or not _is_count(eqn.outvars[0]):
        return {}
    if eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        return {eqn.outvars[0]: values[operands[0]]}
    if eqn.primitive.name not in primitives.ELEMENTWISE:
        return {}
    numbers = [
        np.broadcast_to(np.asarray(x.val, x.aval.dtype), length)
        if jaxprs.is_literal(x) else values[x]
        for x in eqn.invars
    ]  # fmt: skip
    return {eqn.outvars[0]: _evaluated(eqn, numbers)}


def _row_taken(eqn: Eqn) -> list[Atom]:
    """Returns the number of the row that an equation takes of its first operand, if it does."""
    name = eqn.primitive.name
    if name not in ("dynamic_slice", "gather") or jaxprs.is_literal(eqn.invars[0]):
        return []
    if tuple(eqn.params["slice_sizes"]) != (1, *eqn.invars[0].aval.shape[1:]):
        return []
    if name == "gather":
        numbers = eqn.params["dimension_numbers"]
        indexed = tuple(map(int, numbers.start_index_map))
        if indexed != (0,) or numbers.operand_batching_dims or eqn.invars[1].aval.size != 1:
            return []
    return [eqn.invars[1]]
