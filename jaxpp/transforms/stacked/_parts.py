"""Divides arrays into parts, each of some rows: where they are cut, and what runs part by part.

Arrays whose rows an equation joins are cut alike (`Classes`); the equations over them are then
rewritten to equations over the parts (`Splitter`).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._typing import Atom, Eqn, Var
from jaxpp.transforms._step import Guard
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._rows import Bounds
from jaxpp.transforms.stacked._scans import cut_scan

#: An atom, or None for zeros, of which no array is made before one is needed.
Part = Atom | None


class Classes:
    """The variables in classes; equations join those of a class, so their rows are cut alike."""

    def __init__(self, eqns: Sequence[Eqn], pairs: Iterable[tuple[Atom, Atom]] = ()):
        self._above: dict[Var, Var] = {}
        for eqn in eqns:
            rule = _rows.rows_of(eqn)
            members = _rows.scanned(eqn) if rule is None else rule.members(eqn)
            self._join(_jaxprs.variables(members))
        for pair in pairs:
            if len({v.aval.shape for v in pair}) == 1 and _rows.num_rows(pair[0]) >= 0:
                self._join(_jaxprs.variables(pair))

    def _join(self, members: Sequence[Var]) -> None:
        for v in members[1:]:
            first, other = self.of(members[0]), self.of(v)
            if first is not other:
                self._above[other] = first

    def of(self, var: Var) -> Var:
        """Returns the variable that stands for the class of a variable."""
        path = []
        while var in self._above:
            path.append(var)
            var = self._above[var]
        for v in path:
            self._above[v] = var
        return var

    def bounds(
        self,
        used: Iterable[tuple[Var, tuple[int, int], frozenset[int]]],
        variables: Iterable[Var],
    ) -> dict[Var, Bounds]:
        """Cuts variables so that each interval of rows that stages use consists of whole parts.

        Args:
            used: variables, the rows of them that are read or made, and the stages that do so.
            variables: those to cut; a class that the same stages use all over stays whole.
        """
        found: dict[Var, dict[tuple[int, int], frozenset[int]]] = {}
        for var, interval, stages in used:
            known = found.setdefault(self.of(var), {})
            known[interval] = known.get(interval, frozenset()) | stages
        cuts = {
            own: tuple(sorted({0, _rows.num_rows(own)}.union(*intervals)))
            for own, intervals in found.items()
            if len(set(intervals.values())) > 1
        }
        return {v: cuts[own] for v in variables if (own := self.of(v)) in cuts}


class Splitter:
    """Rewrites equations one after the other; its attributes hold the results so far.

    Args:
        bounds: where each array that is in parts is cut.
        given: the variables that no equation makes, and that have parts if they are cut.
        guards: the guards of variables whose equations run only at times.
    """

    def __init__(
        self,
        bounds: Mapping[Var, Bounds],
        given: Iterable[Var],
        guards: Mapping[Var, Guard] | None = None,
    ):
        self._guards = guards or {}
        #: The guards of new variables whose equations run only at times.
        self.guards: dict[Var, Guard] = {}
        self._bounds = bounds
        self._parts: dict[Var, Sequence[Part]] = {}
        self._known = _jaxprs.Substitution()
        #: For each of the given variables new ones for its parts; itself if it is not cut.
        self.inputs: list[list[Var]] = []
        for v in given:
            own = [v]
            if v in bounds:
                own = [_rows.rows_var(v, high - low) for low, high in self._intervals(v)]
                self._parts[v] = own
            self.inputs.append(own)
        #: The equations made, each with the number of the old equation if it is unchanged, or None.
        self.eqns: list[tuple[Eqn, int | None]] = []
        #: Variables to make wherever they are read: slices of whole arrays, and combinations.
        self.floating: set[Part] = set()
        #: Arrays put together from parts, with the equation that reads each of them.
        self.gathered: dict[Atom, Eqn] = {}
        self._at: Eqn

    def rewrite(self, eqns: Sequence[Eqn]) -> None:
        """Adds equations, in order."""
        for number, eqn in enumerate(eqns):
            self._at = eqn
            if any(v in self._bounds for v in _jaxprs.variables([*eqn.invars, *eqn.outvars])):
                self._split(eqn)
            else:
                self._add(self._known.rename(eqn), number)

    def outputs(self, atoms: Iterable[Atom], cuts: Iterable[Bounds | None]) -> list[Atom]:
        """Returns atoms: the parts of each that is cut, and each other one as one array."""
        outs = []
        for v, bounds in zip(atoms, cuts, strict=True):
            outs += [self._whole(v)] if bounds is None else self._solid_parts(v, bounds)
        return outs

    def _add(self, eqn: Eqn, number: int | None = None) -> None:
        """Adds an equation in place of the one that is rewritten, under its guard.

        Equations that `_emit` and `_record` add beside it have no guard, for others may read their
        results.
        """
        self.eqns.append((eqn, number))
        guard = next((self._guards[v] for v in self._at.outvars if v in self._guards), ())
        if guard:
            own: Any = tuple((self._known(v), k) for v, k in guard)
            self.guards.update((v, own) for v in eqn.outvars)

    def _emit(self, eqn: Eqn) -> Var:
        """Adds an equation beside the one that is rewritten; gives its result."""
        self.eqns.append((eqn, None))
        return eqn.outvars[0]

    def _record(self, fun: Callable, *atoms: Atom) -> Atom:
        """Adds the equations of a function of atoms likewise; gives the function's result."""
        eqns, (result,) = _jaxprs.record(fun, atoms, self._at)
        self.eqns += [(e, None) for e in eqns]
        return result

    # ---- atoms ----------------------------------------------------------------------------------

    def _intervals(self, var: Var) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self._bounds[var]))

    def _take(self, atom: Atom, low: int, high: int) -> Part:
        """Returns some rows of an atom."""
        if not _jaxprs.is_literal(atom) and atom in self._parts:
            operands = zip(self._intervals(atom), self._parts[atom], strict=True)
            return self._put_together(operands, atom, low, high)
        if (low, high) == (0, _rows.num_rows(atom)):
            return self._known(atom)
        if _jaxprs.is_literal(atom):
            return _rows.literal_rows(atom, low, high)
        return self._emit(_rows.slice_rows(self._at, self._known(atom), low, high))

    def _put_together(
        self, operands: Iterable[tuple[tuple[int, int], Part]], var: Var, low: int, high: int
    ) -> Part:
        """Returns some rows of a variable that consists of operands, and of zeros elsewhere."""
        pieces = list(_rows.pieces(operands, low, high))
        parts = [None if v is None else self._take(v, *own) for v, *own in pieces]
        if all(part is None for part in parts):
            return None
        parts = [self._solid(p, var, b - a) for p, (_, a, b) in zip(parts, pieces, strict=True)]
        return parts[0] if len(parts) == 1 else self._emit(_rows.join(self._at, parts, var))

    def _solid(self, part: Part, var: Atom, rows: int) -> Atom:
        """Returns a part of a variable as an array, even if it is zeros."""
        if part is not None:
            return part
        return self._record(functools.partial(_rows.zeros, var.aval, rows))

    def _whole(self, atom: Atom) -> Atom:
        """Returns an atom as one array, put together from its parts if it has parts."""
        if _jaxprs.is_literal(atom) or atom not in self._parts or atom in self._known.of:
            return self._known(atom)
        rows = _rows.num_rows(atom)
        self._known.of[atom] = whole = self._solid(self._take(atom, 0, rows), atom, rows)
        self.gathered[whole] = self._at
        return whole

    def _parts_of(self, atom: Atom, bounds: Bounds) -> Sequence[Part]:
        """Returns the parts of an atom; slices of it, if it is whole."""
        if not _jaxprs.is_literal(atom) and atom in self._parts:
            return self._parts[atom]
        parts = [self._take(atom, *rows) for rows in itertools.pairwise(bounds)]
        if not _jaxprs.is_literal(atom):
            self._known.of[atom] = self._known(atom)
            self._parts[atom] = parts
            self.floating.update(parts)
        return parts

    def _solid_parts(self, atom: Atom, bounds: Bounds) -> list[Atom]:
        """Returns the parts of an atom, with arrays for zeros too."""
        return [
            self._solid(part, atom, high - low)
            for part, (low, high) in zip(
                self._parts_of(atom, bounds), itertools.pairwise(bounds), strict=True
            )
        ]

    # ---- equations ------------------------------------------------------------------------------

    def _split(self, eqn: Eqn) -> None:
        """Adds an equation over arrays in parts, by the rule of its primitive."""
        is_cut, rule = any(v in self._bounds for v in eqn.outvars[:1]), _rows.rows_of(eqn)
        if _rows.takes_some_rows(eqn):
            self._slice(eqn)
        elif is_cut and (interval := _rows.pad_interval(eqn)):
            self._place(eqn.outvars[0], [(interval, eqn.invars[0])])
        elif is_cut and (intervals := _rows.concatenation_intervals(eqn)):
            self._place(eqn.outvars[0], list(zip(intervals, eqn.invars, strict=True)))
        elif rule is not None and any(v in self._bounds for v in rule.members(eqn)):
            self._split_rows(eqn, rule)
        elif any(v in self._bounds for v in _jaxprs.variables(_rows.scanned(eqn))):
            self._split_scan(eqn)
        else:
            self._add(eqn.replace(invars=[self._whole(v) for v in eqn.invars]))

    def _slice(self, eqn: Eqn) -> None:
        start, stop = _rows.slice_interval(eqn) or (0, 0)
        operand = eqn.invars[0]
        rows = self._solid(self._take(operand, start, stop), operand, stop - start)
        columns = _rows.slice_columns(eqn, rows)
        if columns is not None:
            self._add(columns)
            (rows,) = columns.outvars
        self._known.of[eqn.outvars[0]] = rows

    def _place(self, result: Var, operands: list[tuple[tuple[int, int], Atom]]) -> None:
        intervals = self._intervals(result)
        self._parts[result] = [self._put_together(operands, result, *rows) for rows in intervals]

    def _split_rows(self, eqn: Eqn, rule: _rows.Rows) -> None:
        """Adds an equation for each part."""
        bounds = next(self._bounds[v] for v in rule.members(eqn) if v in self._bounds)
        columns = [
            self._parts_of(v, bounds) if has_rows else [self._whole(v)] * (len(bounds) - 1)
            for v, has_rows in zip(eqn.invars, rule.operands, strict=True)
        ]
        made = [
            self._one_part(eqn, rule, [column[k] for column in columns], high - low)
            for k, (low, high) in enumerate(itertools.pairwise(bounds))
        ]
        for v, *column in zip(eqn.outvars, *made, strict=True):
            if rule.combine is None:
                self._parts[v] = column
            else:
                self._known.of[v] = self._combine(rule.combine, column)

    def _combine(self, combine: Callable, partial: Sequence[Atom]) -> Atom:
        """Combines the results of all parts; each reader may do so itself, as they are small."""
        result, *others = partial
        for other in others:
            result = self._record(combine, result, other)
            self.floating.add(result)
        return result

    def _one_part(
        self, eqn: Eqn, rule: _rows.Rows, operands: list[Part], rows: int
    ) -> Sequence[Part]:
        zero = [x is None for x in operands]
        if eqn.primitive.name in _primitives.ADDS and any(zero) and all(rule.operands):
            return [next((x for x in operands if x is not None), None)]
        if any(zero) and rule.combine is None and _primitives.keeps_zeros(eqn, zero):
            return [None] * len(eqn.outvars)
        solid = [self._solid(x, v, rows) for x, v in zip(operands, eqn.invars, strict=True)]
        own = _rows.of_rows(eqn, rule, solid, rows)
        self._add(own)
        return own.outvars

    def _split_scan(self, eqn: Eqn) -> None:
        """Adds a scan for each part, which goes on from the one before."""
        num_consts, num_carry = _compat.scan_parts(eqn)
        xs, ys = eqn.invars[num_consts + num_carry :], eqn.outvars[num_carry:]
        bounds = next(self._bounds[v] for v in _jaxprs.variables([*xs, *ys]) if v in self._bounds)
        columns = [self._solid_parts(v, bounds) for v in xs]
        whole = [self._whole(v) for v in eqn.invars[: num_consts + num_carry]]
        slices = [[column[k] for column in columns] for k in range(len(bounds) - 1)]
        scans, carry, stacks = cut_scan(eqn, bounds, whole, slices)
        for part in scans:
            self._add(part)
        self._known.of.update(zip(eqn.outvars, carry, strict=False))
        self._parts.update(zip(ys, stacks, strict=True))
