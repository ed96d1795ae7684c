"""Rewrites equations so that some arrays are divided into parts, each of some rows."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._rows import Bounds

#: An atom, or None for zeros, of which no array is made before one is needed.
Part = Any


class Splitter:
    """Rewrites equations one after the other; its attributes hold the results so far.

    Args:
        bounds: where each array that is in parts is cut.
        rules: for each equation how it treats rows.
        given: the parts of variables that no equation makes.
        guards: the guards of variables whose equations run only at times.
    """

    def __init__(
        self,
        bounds: Mapping[Any, Bounds],
        rules: Mapping[int, _rows.Rows | None],
        given: Mapping[Any, Sequence[Any]],
        guards: Mapping[Any, Any] | None = None,
    ):
        self._guards = guards or {}
        #: The guards of new variables whose equations run only at times.
        self.guards: dict[Any, Any] = {}
        self._bounds = bounds
        self._rules = rules
        self._parts: dict[Any, tuple[Part, ...]] = {v: tuple(p) for v, p in given.items()}
        self._scattered: set[Any] = set()
        self._known = _jaxprs.Substitution()
        #: The equations made, each with the number of the old equation if it is unchanged, or None.
        self.eqns: list[tuple[Any, int | None]] = []
        #: Variables to make wherever they are read: slices of whole arrays, and combinations.
        self.floating: set[Any] = set()
        #: Arrays put together from parts, with the old variable and the equation that reads it.
        self.gathered: dict[Any, tuple[Any, Any]] = {}

    def rewrite(self, eqns: Sequence[Any]) -> None:
        """Adds equations, in order."""
        for number, eqn in enumerate(eqns):
            self._at = eqn
            if any(v in self._bounds for v in _jaxprs.variables([*eqn.invars, *eqn.outvars])):
                self._split(eqn, self._rules[number])
            else:
                self._add(self._known.rename(eqn), number)

    def _add(self, eqn: Any, number: int | None = None) -> None:
        """Adds an equation in place of the one that is rewritten, under its guard.

        Equations that `emit` adds beside it have no guard, for others may read their results.
        """
        self.eqns.append((eqn, number))
        guard = next((self._guards[v] for v in self._at.outvars if v in self._guards), ())
        if guard:
            own = tuple((self._known(v), k) for v, k in guard)
            self.guards.update(dict.fromkeys(eqn.outvars, own))

    # ---- atoms ----------------------------------------------------------------------------------

    def parts(self, atom: Any, bounds: Bounds) -> list[Part]:
        """Gives the parts of an atom; slices of it, if it is whole."""
        if _jaxprs.is_literal(atom):
            return [self._literal_rows(atom, *rows) for rows in _intervals(bounds)]
        if atom not in self._parts:
            whole = self._known(atom)
            self._parts[atom] = tuple(self._slice(whole, *rows) for rows in _intervals(bounds))
            self._scattered.add(atom)
            self.floating.update(self._parts[atom])
        return list(self._parts[atom])

    def whole(self, atom: Any) -> Any:
        """Gives an atom as one array, put together from its parts if it has parts."""
        if _jaxprs.is_literal(atom) or atom not in self._parts or atom in self._known.of:
            return self._known(atom)
        if atom in self._scattered:
            return self._known(atom)
        self._known.of[atom] = gathered = self._join(self._solid(atom))
        self.gathered[gathered] = (atom, self._at)
        return gathered

    def rows(self, atom: Any, start: int, stop: int) -> Any:
        """Gives some rows of an atom as one array."""
        if _jaxprs.is_literal(atom):
            return self._literal_rows(atom, start, stop)
        if atom not in self._parts:
            return self._slice(self._known(atom), start, stop)
        pieces = []
        for part, (low, high) in zip(
            self._solid(atom), _intervals(self._bounds[atom]), strict=True
        ):
            own = max(start, low), min(stop, high)
            if own == (low, high):
                pieces.append(part)
            elif own[0] < own[1]:
                pieces.append(self._slice(part, own[0] - low, own[1] - low))
        return pieces[0] if len(pieces) == 1 else self._join(pieces)

    def solid_parts(self, atom: Any, bounds: Bounds) -> list[Any]:
        """Gives the parts of an atom, with arrays for zeros too."""
        parts = self.parts(atom, bounds)
        return [
            self.emit(functools.partial(_rows.zeros, atom.aval, high - low)) if p is None else p
            for p, (low, high) in zip(parts, _intervals(bounds), strict=True)
        ]

    def _solid(self, var: Any) -> list[Any]:
        if any(p is None for p in self._parts[var]):
            self._parts[var] = tuple(self.solid_parts(var, self._bounds[var]))
        return list(self._parts[var])

    def _literal_rows(self, literal: Any, start: int, stop: int) -> Any:
        value = _rows.slice_rows(_jaxprs.literal_array(literal), start, stop)
        return _jaxprs.literal(value, _rows.with_rows(literal.aval, stop - start))

    def _slice(self, atom: Any, start: int, stop: int) -> Any:
        return self.emit(lambda x: jax.lax.slice_in_dim(x, start, stop), atom)

    def _join(self, atoms: Sequence[Any]) -> Any:
        return self.emit(lambda *xs: jnp.concatenate(xs), *atoms)

    def emit(self, fun: Callable, *atoms: Any) -> Any:
        """Adds the equations of a function of atoms; gives the function's result."""
        eqns, (result,) = _jaxprs.record(fun, atoms, self._at)
        self.eqns += [(e, None) for e in eqns]
        return result

    # ---- equations ------------------------------------------------------------------------------

    def _split(self, eqn: Any, rule: _rows.Rows | None) -> None:
        result = eqn.outvars[0]
        if _rows.takes_some_rows(eqn):
            self._slice_rows(eqn)
        elif result in self._bounds and (interval := _rows.pad_interval(eqn)):
            self._place_rows(result, [(interval, eqn.invars[0])])
        elif result in self._bounds and (intervals := _rows.concatenation_intervals(eqn)):
            self._place_rows(result, list(zip(intervals, eqn.invars, strict=True)))
        elif rule is not None and any(v in self._bounds for v in rule.members(eqn)):
            self._split_rows(eqn, rule)
        elif any(v in self._bounds for v in _jaxprs.variables(_rows.scanned(eqn))):
            self._split_scan(eqn)
        else:
            self._add(eqn.replace(invars=[self.whole(v) for v in eqn.invars]))

    def _slice_rows(self, eqn: Any) -> None:
        interval = _rows.slice_interval(eqn)
        assert interval is not None
        rows, own = self.rows(eqn.invars[0], *interval), _jaxprs.fresh_var(eqn.outvars[0])
        columns = _rows.slice_of_rows(eqn, rows, own)
        if columns is not None:
            self._add(columns)
        self._known.of[eqn.outvars[0]] = rows if columns is None else own

    def _place_rows(self, result: Any, operands: list[tuple[tuple[int, int], Any]]) -> None:
        """Makes the parts of a result from rows of operands, and from zeros elsewhere."""
        parts: list[Part] = []
        for low, high in _intervals(self._bounds[result]):
            pieces, at = [], low
            for (start, stop), operand in operands:
                own = max(start, low), min(stop, high)
                if own[0] >= own[1]:
                    continue
                if at < own[0]:
                    pieces.append(
                        self.emit(functools.partial(_rows.zeros, result.aval, own[0] - at))
                    )
                if own == (start, stop) and operand not in self._bounds:
                    pieces.append(self._known(operand))
                else:
                    pieces.append(self.rows(operand, own[0] - start, own[1] - start))
                at = own[1]
            if pieces and at < high:
                pieces.append(self.emit(functools.partial(_rows.zeros, result.aval, high - at)))
            parts.append(
                None if not pieces else pieces[0] if len(pieces) == 1 else self._join(pieces)
            )
        self._parts[result] = tuple(parts)

    def _split_rows(self, eqn: Any, rule: _rows.Rows) -> None:
        bounds = next(self._bounds[v] for v in rule.members(eqn))
        columns = [
            self.parts(v, bounds) if f else [self.whole(v)] * (len(bounds) - 1)
            for v, f in zip(eqn.invars, rule.operands, strict=True)
        ]
        made = []
        for operands, (low, high) in zip(
            zip(*columns, strict=True) if columns else [()] * (len(bounds) - 1),
            _intervals(bounds),
            strict=True,
        ):
            made.append(self._one_part(eqn, rule, list(operands), high - low))
        for n, v in enumerate(eqn.outvars):
            column = [results[n] for results in made]
            if rule.combine is None:
                self._parts[v] = tuple(column)
            else:
                self._known.of[v] = self._combine(rule.combine, column)

    def _combine(self, combine: Callable, partial: Sequence[Any]) -> Any:
        """Combines the results of all parts; each reader may do so itself, as they are small."""
        result, *others = partial
        for other in others:
            result = self.emit(combine, result, other)
            self.floating.add(result)
        return result

    def _one_part(self, eqn: Any, rule: _rows.Rows, operands: list[Part], rows: int) -> list[Part]:
        zero = [x is None for x in operands]
        if eqn.primitive.name in _primitives.ADDS and any(zero) and all(rule.operands):
            return [next((x for x in operands if x is not None), None)]
        if any(zero) and rule.combine is None and _primitives.keeps_zeros(eqn, zero):
            return [None] * len(eqn.outvars)
        operands = [
            self.emit(functools.partial(_rows.zeros, v.aval, rows)) if x is None else x
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        own = _rows.of_rows(eqn, rule, operands, rows)
        self._add(own)
        return own.outvars

    def _split_scan(self, eqn: Any) -> None:
        """Divides a scan over rows into a scan for each part, which goes on from the one before."""
        num_consts, num_carry = _compat.scan_parts(eqn)
        xs, ys = eqn.invars[num_consts + num_carry :], eqn.outvars[num_carry:]
        bounds = next(self._bounds[v] for v in _jaxprs.variables([*xs, *ys]))
        columns = [self.solid_parts(v, bounds) for v in xs]
        consts = [self.whole(v) for v in eqn.invars[:num_consts]]
        carry = [self.whole(v) for v in eqn.invars[num_consts : num_consts + num_carry]]
        stacks: dict[int, list[Any]] = {}
        order = list(enumerate(_intervals(bounds)))
        for k, (low, high) in reversed(order) if eqn.params["reverse"] else order:
            outvars = [_jaxprs.fresh_var(v) for v in eqn.outvars[:num_carry]]
            stacks[k] = [jex.Var(_rows.with_rows(v.aval, high - low)) for v in ys]
            part = eqn.replace(
                invars=[*consts, *carry, *(column[k] for column in columns)],
                outvars=[*outvars, *stacks[k]],
                params={**eqn.params, "length": high - low},
            )
            self._add(part)
            carry = outvars
        self._known.of.update(zip(eqn.outvars[:num_carry], carry, strict=True))
        for n, v in enumerate(ys):
            self._parts[v] = tuple(stacks[k][n] for k in range(len(order)))


def _intervals(bounds: Bounds) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds))


def part_vars(var: Any, bounds: Bounds) -> list[Any]:
    """Makes new variables for the parts of a variable."""
    return [jex.Var(_rows.with_rows(var.aval, high - low)) for low, high in _intervals(bounds)]


def merge_bounds(rows: int, intervals: Iterable[tuple[int, int]]) -> Bounds:
    """Cuts rows so that each interval consists of whole parts."""
    return tuple(sorted({0, rows}.union(*intervals)))
