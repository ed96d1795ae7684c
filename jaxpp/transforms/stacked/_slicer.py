"""Makes rows of variables, of as few rows of others as can be: those that results ask for.

Rows of a result are made of rows of the operands wherever the equation allows it. So a stage that
runs some layers reads these layers of a parameter alone, even if all layers were cast, or stacked,
at once. A rank that owns some layers makes the keys of all layers, which are small, takes its own,
and computes its layers from them. And equations over arrays that are in parts run part by part.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var, primitives
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._classes import row_by_row, rule_of
from jaxpp.transforms.stacked._rows import Bounds, Rows, cut_scan, scanned


class Slicer:
    """Makes rows of variables; `eqns` are the new equations that do so, in order.

    Args:
        maker: the equation that makes each variable.
        bounds: where variables that are in parts are cut; all their rows are made part by part.
        given: the parts of those that no equation makes.
        enters: tells whether to make rows of an equation's results of rows of its operands. An
            equation that calls others is to be entered only where nothing is differentiated later,
            as its derivative rule is lost.
        source: gives the equation whose names and source line a slice gets, from that which makes
            the array, or None for an array that no equation makes.
        wanted_whole: is told of each equation that reads some operands whole, or makes its results
            whole; of these variables; and of the equations that make variables there.
        of_input: makes rows of a variable that no equation makes; None for a slice of it.
    """

    def __init__(
        self,
        maker: Mapping[Var, Eqn],
        *,
        bounds: Mapping[Var, Bounds] | None = None,
        given: Mapping[Var, Sequence[Var]] | None = None,
        enters: Callable[[Eqn], bool] = lambda _: True,
        source: Callable[[Eqn | None], Eqn | None] = lambda eqn: eqn,
        wanted_whole: Callable[[Eqn, list[Atom], Mapping[Var, Eqn]], None] = lambda *_: None,
        of_input: Callable[[Var, int, int], Atom] | None = None,
    ):
        self.eqns: list[Eqn] = []
        #: The old equation in whose place a new one is, by the new one's first result.
        self.replaced: dict[Var, Eqn] = {}
        #: Variables to make wherever they are read: slices of whole arrays, and combinations.
        self.floating: set[Atom] = set()
        #: Arrays put together from parts, with the equation that reads each of them.
        self.gathered: dict[Atom, Eqn] = {}
        self._maker = maker
        self._bounds = bounds or {}
        self._enters = enters
        self._source = source
        self._wanted_whole = wanted_whole
        self._of_input = of_input or self._slice
        self._known: dict[tuple[Var, int, int], Atom] = {
            (v, *rows): part
            for v, parts in (given or {}).items()
            for rows, part in zip(self._intervals(v), parts, strict=True)
        }
        #: The atoms that stand for variables that are not in parts, or that are put together.
        self._whole = jaxprs.Substitution()
        self._zeros: set[Var] = set()
        #: Weakly typed variables as arrays of a strong type.
        self._strong: dict[Var, Var] = {}
        #: The equation that `rewrite` is at.
        self._reader: Eqn | None = None

    # ---- what is asked for ----------------------------------------------------------------------

    def rows(self, atom: Atom, low: int, high: int) -> Atom:
        """Returns an atom for rows `low` to `high` of another, made of as few rows as can be."""
        if jaxprs.is_literal(atom):
            return _rows.literal_rows(atom, low, high)
        if (atom, low, high) not in self._known:
            self._known[atom, low, high] = self._make(self._maker.get(atom), atom, low, high)
        return self._known[atom, low, high]

    def whole(self, atom: Atom) -> Atom:
        """Returns what stands for an atom, put together from its parts if it is in parts."""
        if jaxprs.is_literal(atom) or atom not in self._bounds or atom in self._whole.of:
            return self._whole(atom)
        whole = self._whole.of[atom] = self.rows(atom, 0, _rows.num_rows(atom))
        if self._reader is not None:
            self.gathered[whole] = self._reader
        return whole

    def outputs(self, atoms: Iterable[Atom], cuts: Iterable[Bounds | None]) -> list[Atom]:
        """Returns atoms: the parts of each that is cut, and each other one as one array."""
        found: list[Atom] = []
        for atom, bounds in zip(atoms, cuts, strict=True):
            intervals = itertools.pairwise(bounds or ())
            found += [self.rows(atom, *rows) for rows in intervals] or [self.whole(atom)]
        return found

    def rewrite(self, eqns: Iterable[Eqn]) -> None:
        """Asks for the results of equations in order: for those in parts part by part."""
        for eqn in eqns:
            self._reader = eqn
            cut = [v for v in eqn.outvars if v in self._bounds]
            for v in cut:
                for rows in self._intervals(v):
                    self.rows(v, *rows)
            if not cut:
                self._make_whole(eqn)

    # ---- equations ------------------------------------------------------------------------------

    def _make(self, eqn: Eqn | None, var: Var, low: int, high: int) -> Atom:
        """Makes rows of a variable by the rule of the equation that makes it."""
        intervals = self._intervals(var)
        if intervals and (low, high) not in intervals:
            near = [part for part in intervals if part[0] < high and low < part[1]]
            return self._join([(part, self.rows(var, *part)) for part in near], var, low, high)
        if eqn is None:
            return self._of_input(var, low, high)
        if self._enters(eqn) and (intervals or not self._bounds):
            of_rule = self._by_rule(eqn, var, low, high)
            if of_rule is not None:
                return of_rule
        self._wanted_whole(eqn, [var], self._maker)
        if intervals and var not in self._whole.of:
            self._add_whole(eqn)
        rows = self._slice(var, low, high)
        self.floating.update([rows] if intervals else [])
        return rows

    def _by_rule(self, eqn: Eqn, var: Var, low: int, high: int) -> Atom | None:
        """Makes rows of a result of rows of operands; None if the equation does not allow it."""
        if (intervals := _rows.concatenation_intervals(eqn)) is not None:
            return self._join(zip(intervals, eqn.invars, strict=True), var, low, high)
        if (interval := _rows.pad_interval(eqn)) is not None:
            return self._join([(interval, eqn.invars[0])], var, low, high)
        if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
            outvars = [_rows.rows_var(var, high - low)]
            return self._add(eqn.replace(invars=eqn.invars[low:high], outvars=outvars), eqn)
        if _rows.takes_some_rows(eqn):
            return self._of_slice(eqn, low, high)
        rule = rule_of(eqn) if var in self._bounds else row_by_row(eqn)
        if rule is not None and (var, True) in rule.results_with_rows(eqn.outvars):
            return self._row_by_row(eqn, rule, var, low, high)
        if var in self._bounds and var in scanned(eqn):
            self._split_scan(eqn)
            return self._known[var, low, high]
        if jaxprs.called_jaxpr(eqn) is not None:
            return self._of_call(eqn, var, low, high)
        if eqn.primitive.name == "cond":
            return self._of_conditional(eqn, var, low, high)
        return None

    def _make_whole(self, eqn: Eqn) -> None:
        """Adds an equation none of whose results is in parts; its operands may be."""
        rule = rule_of(eqn) if self._is_cut(eqn.invars) else None
        if rule is not None and rule.combine and self._is_cut(rule.having(eqn.invars)):
            self._combine(eqn, rule, rule.combine)
        elif self._is_cut(eqn.invars) and _rows.takes_some_rows(eqn):
            (result,) = eqn.outvars
            self._whole.of[result] = self._of_slice(eqn, 0, _rows.num_rows(result))
        elif self._is_cut(scanned(eqn)):
            self._split_scan(eqn)
        else:
            self._add_whole(eqn)

    def _add_whole(self, eqn: Eqn) -> None:
        self._add(eqn.replace(invars=list(map(self.whole, eqn.invars))), eqn)
        self._whole.of.update((v, v) for v in eqn.outvars)

    def _add(self, eqn: Eqn, old: Eqn | None = None) -> Any:
        """Adds an equation, perhaps in the place of an old one; gives its first result."""
        self.eqns.append(eqn)
        self.replaced.update((v, old) for v in eqn.outvars[:1] if old is not None)
        return next(iter(eqn.outvars), None)

    def _record(self, fun: Callable, *atoms: Atom) -> Any:
        """Adds the equations of a function of atoms; gives the function's result."""
        eqns, (result,) = jaxprs.record(fun, atoms, self._reader)
        self.eqns += eqns
        return result

    def _intervals(self, var: Var) -> list[tuple[int, int]]:
        """Returns the rows of each part of a variable; none if it is not in parts."""
        return list(itertools.pairwise(self._bounds.get(var, ())))

    def _is_cut(self, atoms: Iterable[Atom]) -> bool:
        return any(v in self._bounds for v in jaxprs.variables(atoms))

    # ---- equations that move rows ---------------------------------------------------------------

    def _source_of(self, var: Var) -> Eqn | None:
        return self._reader or self._source(self._maker.get(var))

    def _slice(self, var: Var, low: int, high: int) -> Atom:
        if (low, high) == (0, _rows.num_rows(var)):
            return self._whole(var)
        array, source = self._whole(var), self._source_of(var)
        if not var.aval.weak_type:
            return self._add(_rows.slice_rows(source, array, low, high))
        # The derivative of a slice is strongly typed; that of a cast has the type of its operand.
        if var not in self._strong:
            self._strong[var] = self._add(_rows.typed(source, array, is_weak=False))
        rows = self._add(_rows.slice_rows(source, self._strong[var], low, high))
        return self._add(_rows.typed(source, rows, is_weak=True))

    def _join(
        self, operands: Iterable[tuple[tuple[int, int], Atom]], var: Var, low: int, high: int
    ) -> Atom:
        """Makes rows of a variable that consists of operands, and of zeros elsewhere."""
        pieces = list(_rows.pieces(operands, low, high))
        if all(operand is None for operand, _, _ in pieces):
            return self._zero_rows(var, high - low)
        parts = [
            self._zero_rows(var, b - a) if operand is None else self.rows(operand, a, b)
            for operand, a, b in pieces
        ]
        if len(parts) == 1:
            return parts[0]
        return self._add(_rows.join(self._source_of(var), parts, var))

    def _zero_rows(self, var: Var, rows: int) -> Var:
        zeros = self._record(functools.partial(_rows.zeros, var.aval, rows))
        self._zeros.add(zeros)
        return zeros

    def _of_slice(self, eqn: Eqn, low: int, high: int) -> Atom:
        start = eqn.params["start_indices"][0]
        rows = self.rows(eqn.invars[0], start + low, start + high)
        columns = _rows.slice_columns(eqn, rows)
        return rows if columns is None else self._add(columns, eqn)

    # ---- equations that compute rows ------------------------------------------------------------

    def _row_by_row(self, eqn: Eqn, rule: Rows, var: Var, low: int, high: int) -> Atom:
        operands = self._operands(eqn, rule, low, high)
        results = rule.results_with_rows(eqn.outvars)
        if (known := self._without_zeros(eqn, rule, operands, high - low)) is not None:
            self._known.update(
                ((v, low, high), x) for (v, _), x in zip(results, known, strict=True)
            )
            return self._known[var, low, high]
        part = _rows.of_rows(eqn, rule, operands, high - low)
        self._add(part, eqn)
        for (v, has_rows), new in zip(results, part.outvars, strict=True):
            if has_rows:
                self._known[v, low, high] = new
            elif self._bounds:
                self._whole.of.setdefault(v, new)
        return self._known[var, low, high]

    def _operands(self, eqn: Eqn, rule: Rows, low: int, high: int) -> list[Atom]:
        flags = list(zip(eqn.invars, rule.operands, strict=True))
        self._wanted_whole(eqn, [v for v, has_rows in flags if not has_rows], self._maker)
        return [self.rows(v, low, high) if has_rows else self.whole(v) for v, has_rows in flags]

    def _without_zeros(
        self, eqn: Eqn, rule: Rows, operands: Sequence[Atom], rows: int
    ) -> list[Atom] | None:
        """Returns what an equation makes of rows of zeros; None if it has to be computed."""
        zero = [not jaxprs.is_literal(x) and x in self._zeros for x in operands]
        if not self._bounds or not any(zero):
            return None
        if eqn.primitive.name in primitives.ADDS and all(rule.operands):
            return [next(itertools.compress(operands, map(operator.not_, zero)), operands[0])]
        if primitives.keeps_zeros(eqn, zero):
            return [self._zero_rows(v, rows) for v in eqn.outvars]
        return None

    def _combine(self, eqn: Eqn, rule: Rows, combine: Callable[[Any, Any], Any]) -> None:
        """Combines the results of all parts; each reader may do so itself, as they are small."""
        intervals = next(
            filter(None, map(self._intervals, jaxprs.variables(rule.having(eqn.invars))))
        )
        partial = []
        for low, high in intervals:
            part = _rows.of_rows(eqn, rule, self._operands(eqn, rule, low, high), high - low)
            partial.append(self._add(part, eqn))
        result, *others = partial
        for other in others:
            result = self._record(combine, result, other)
            self.floating.add(result)
        self._whole.of[eqn.outvars[0]] = result

    def _split_scan(self, eqn: Eqn) -> None:
        """Adds a scan for each part of its rows, which goes on from the one before."""
        num_consts, num_carry = _compat.scan_parts(eqn)
        xs, ys = eqn.invars[num_consts + num_carry :], eqn.outvars[num_carry:]
        intervals = next(filter(None, map(self._intervals, jaxprs.variables([*xs, *ys]))))
        slices = [[self.rows(v, *rows) for v in xs] for rows in intervals]
        whole = list(map(self.whole, eqn.invars[: num_consts + num_carry]))
        bounds = [0, *(high for _, high in intervals)]
        scans, carry, stacks = cut_scan(eqn, bounds, whole, slices)
        for part in scans:
            self._add(part, eqn)
        self._whole.of.update(zip(eqn.outvars, carry, strict=False))
        for v, parts in zip(ys, stacks, strict=True):
            self._known.update(((v, *rows), x) for rows, x in zip(intervals, parts, strict=True))

    # ---- equations that hold others -------------------------------------------------------------

    def _of_call(self, eqn: Eqn, var: Var, low: int, high: int) -> Var:
        """Calls the part of a function that makes rows of one of its results."""
        body, operands = self._body(eqn, jaxprs.called_jaxpr(eqn), eqn.invars, var, low, high)
        fun = _named(jex.jaxpr_as_fun(body), eqn.params.get("name", "rows"))
        traced = jax.make_jaxpr(jax.jit(fun))(*(v.aval for v in body.jaxpr.invars))
        (call,) = jaxprs.without_constants(traced)[0].eqns
        result = _rows.rows_var(var, high - low)
        part = call.replace(invars=operands, outvars=[result], source_info=eqn.source_info)
        return self._add(part)

    def _of_conditional(self, eqn: Eqn, var: Var, low: int, high: int) -> Var:
        parts = [
            self._body(eqn, branch, eqn.invars[1:], var, low, high)
            for branch in eqn.params["branches"]
        ]
        # Each branch is given the operands that any of them reads.
        branches = []
        for k, (body, _) in enumerate(parts):
            invars = [
                v if n == k else jaxprs.fresh_var(v)
                for n, (other, _) in enumerate(parts)
                for v in other.jaxpr.invars
            ]
            whole = _compat.make_closed_jaxpr(invars, body.jaxpr.outvars, body.eqns)
            branches.append(_compat.with_closed_type(whole, eqn.params["branches"][k]))
        operands = [eqn.invars[0], *(x for _, inputs in parts for x in inputs)]
        params = {**eqn.params, "branches": tuple(branches)}
        result = _rows.rows_var(var, high - low)
        return self._add(eqn.replace(invars=operands, outvars=[result], params=params))

    def _body(
        self, eqn: Eqn, body: Any, operands: Sequence[Atom], var: Var, low: int, high: int
    ) -> tuple[jex.ClosedJaxpr, list[Atom]]:
        """Makes the jaxpr of rows of a result of a called jaxpr, and finds its operands."""
        opened = jaxprs.opened(body)
        whole = dict(zip(opened.invars, operands, strict=True))
        constants = zip(opened.constvars, _compat.constants_of(body), strict=True)
        whole.update((v, jaxprs.literal(x, v.aval)) for v, x in constants)
        sliced: dict[Var, Atom] = {}

        def of_input(var: Var, low: int, high: int) -> Atom:
            inner_var = _rows.rows_var(var, high - low)
            sliced[inner_var] = self.rows(whole[var], low, high)
            return inner_var

        maker = {v: e for e in opened.eqns for v in e.outvars}
        inner = Slicer(
            maker,
            enters=self._enters,
            source=self._source,
            wanted_whole=self._wanted_whole,
            of_input=of_input,
        )
        output = inner.rows(opened.outvars[eqn.outvars.index(var)], low, high)
        eqns = [*opened.eqns, *inner.eqns]
        keep = jaxprs.ancestors(eqns, [output])
        part = jaxprs.part([e for e, k in zip(eqns, keep, strict=True) if k], [output])
        self._wanted_whole(eqn, [whole[v] for v in part.inputs if v in whole], self._maker)
        return part.jaxpr, [(whole | sliced)[v] for v in part.inputs]


def in_parts(
    eqns: Sequence[Eqn], bounds: Mapping[Var, Bounds], given: Mapping[Var, Sequence[Var]]
) -> Slicer:
    """Rewrites equations over variables that are in parts to equations over the parts.

    Args:
        eqns: the equations, in order.
        bounds: where the variables are cut that are in parts.
        given: the parts of those that no equation makes.

    Returns:
        The slicer, which has the new equations, and gives results.
    """

    def is_open(eqn: Eqn) -> bool:
        return jaxprs.called_jaxpr(eqn) is None and eqn.primitive.name != "cond"

    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    slicer = Slicer(maker, bounds=bounds, given=given, enters=is_open)
    slicer.rewrite(eqns)
    return slicer


def _named(fun: Callable, name: str) -> Callable:
    def named(*args):
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return named
