"""Takes rows of variables before they are made: moves slices back through equations.

Rows of a result are made of rows of the operands wherever the equation allows it. So a stage that
runs some layers reads these layers of a parameter alone, even if all layers were cast, or stacked,
at once. And a rank that owns some layers makes the keys of all layers, which are small, takes its
own, and computes its layers from them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp._typing import Atom, Eqn, Var
from jaxpp.transforms.stacked import _rows


class Slicer:
    """Makes rows of variables; `eqns` are the new equations that do so, in order.

    Args:
        maker: the equation that makes each variable.
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
        enters: Callable[[Eqn], bool] = lambda _: True,
        source: Callable[[Eqn | None], Eqn | None] = lambda eqn: eqn,
        wanted_whole: Callable[[Eqn, list[Atom], Mapping[Var, Eqn]], None] = lambda *_: None,
        of_input: Callable[[Var, int, int], Atom] | None = None,
    ):
        self.eqns: list[Eqn] = []
        self._maker = maker
        self._enters = enters
        self._source = source
        self._wanted_whole = wanted_whole
        self._of_input = of_input or self._slice
        self._known: dict[tuple[Var, int, int], Atom] = {}
        #: Weakly typed variables as arrays of a strong type.
        self._strong: dict[Var, Var] = {}

    def rows(self, atom: Atom, low: int, high: int) -> Atom:
        """Returns an atom for rows `low` to `high` of another, made of as few rows as can be."""
        if _jaxprs.is_literal(atom):
            return _rows.literal_rows(atom, low, high)
        if (atom, low, high) not in self._known:
            self._known[atom, low, high] = self._make(self._maker.get(atom), atom, low, high)
        return self._known[atom, low, high]

    def _make(self, eqn: Eqn | None, var: Var, low: int, high: int) -> Atom:
        """Makes rows of a variable by the rule of the equation that makes it."""
        if eqn is None:
            return self._of_input(var, low, high)
        if self._enters(eqn):
            if intervals := _rows.concatenation_intervals(eqn):
                return self._of_concatenation(eqn, intervals, low, high)
            if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
                outvars = [_rows.rows_var(var, high - low)]
                return self._add(eqn.replace(invars=eqn.invars[low:high], outvars=outvars))
            if _rows.takes_some_rows(eqn):
                return self._of_slice(eqn, low, high)
            if rule := _rows.row_by_row(eqn):
                return self._row_by_row(eqn, rule, var, low, high)
            if _jaxprs.called_jaxpr(eqn) is not None:
                return self._of_call(eqn, var, low, high)
            if eqn.primitive.name == "cond":
                return self._of_conditional(eqn, var, low, high)
        self._wanted_whole(eqn, [var], self._maker)
        return self._slice(var, low, high)

    def _slice(self, var: Var, low: int, high: int) -> Var:
        if (low, high) == (0, _rows.num_rows(var)):
            return var
        source = self._source(self._maker.get(var))
        if not var.aval.weak_type:
            return self._add(_rows.slice_rows(source, var, low, high))
        # The derivative of a slice is strongly typed; that of a cast has the type of its operand.
        if var not in self._strong:
            self._strong[var] = self._add(_rows.typed(source, var, is_weak=False))
        rows = self._add(_rows.slice_rows(source, self._strong[var], low, high))
        return self._add(_rows.typed(source, rows, is_weak=True))

    def _add(self, eqn: Eqn) -> Var:
        self.eqns.append(eqn)
        return eqn.outvars[0]

    # ---- equations that move or compute rows ----------------------------------------------------

    def _of_concatenation(
        self, eqn: Eqn, intervals: Sequence[tuple[int, int]], low: int, high: int
    ) -> Atom:
        operands = zip(intervals, eqn.invars, strict=True)
        parts = [self.rows(*piece) for piece in _rows.pieces(operands, low, high)]
        if len(parts) == 1:
            return parts[0]
        return self._add(_rows.join(self._source(eqn), parts, eqn.outvars[0]))

    def _of_slice(self, eqn: Eqn, low: int, high: int) -> Atom:
        start = eqn.params["start_indices"][0]
        rows = self.rows(eqn.invars[0], start + low, start + high)
        columns = _rows.slice_columns(eqn, rows)
        return rows if columns is None else self._add(columns)

    def _row_by_row(self, eqn: Eqn, rule: _rows.Rows, var: Var, low: int, high: int) -> Var:
        flags = list(zip(eqn.invars, rule.operands, strict=True))
        operands = [self.rows(v, low, high) if has_rows else v for v, has_rows in flags]
        self._wanted_whole(eqn, [v for v, has_rows in flags if not has_rows], self._maker)
        own = _rows.of_rows(eqn, rule, operands, high - low)
        self.eqns.append(own)
        made = {(v, low, high): own for v, own in zip(eqn.outvars, own.outvars, strict=True)}
        self._known.update(made)
        return made[var, low, high]

    # ---- equations that hold others -------------------------------------------------------------

    def _of_call(self, eqn: Eqn, var: Var, low: int, high: int) -> Var:
        """Calls the part of a function that makes rows of one of its results."""
        body, operands = self._body(eqn, _jaxprs.called_jaxpr(eqn), eqn.invars, var, low, high)
        fun = _named(jex.jaxpr_as_fun(body), eqn.params.get("name", "rows"))
        traced = jax.make_jaxpr(jax.jit(fun))(*(v.aval for v in body.jaxpr.invars))
        (call,) = _jaxprs.without_constants(traced)[0].eqns
        own = _rows.rows_var(var, high - low)
        made = call.replace(invars=operands, outvars=[own], source_info=eqn.source_info)
        return self._add(made)

    def _of_conditional(self, eqn: Eqn, var: Var, low: int, high: int) -> Var:
        parts = [
            self._body(eqn, branch, eqn.invars[1:], var, low, high)
            for branch in eqn.params["branches"]
        ]
        # Each branch is given the operands that any of them reads.
        branches = []
        for k, (body, _) in enumerate(parts):
            invars = [
                v if own == k else _jaxprs.fresh_var(v)
                for own, (other, _) in enumerate(parts)
                for v in other.jaxpr.invars
            ]
            whole = _compat.make_closed_jaxpr(invars, body.jaxpr.outvars, body.eqns)
            branches.append(_compat.with_closed_type(whole, eqn.params["branches"][k]))
        operands = [eqn.invars[0], *(x for _, own in parts for x in own)]
        params = {**eqn.params, "branches": tuple(branches)}
        own = _rows.rows_var(var, high - low)
        return self._add(eqn.replace(invars=operands, outvars=[own], params=params))

    def _body(
        self, eqn: Eqn, body: Any, operands: Sequence[Atom], var: Var, low: int, high: int
    ) -> tuple[jex.ClosedJaxpr, list[Atom]]:
        """Makes the jaxpr of rows of a result of a called jaxpr, and finds its operands."""
        opened = _jaxprs.opened(body)
        whole = dict(zip(opened.invars, operands, strict=True))
        constants = zip(opened.constvars, _compat.constants_of(body), strict=True)
        whole.update((v, _jaxprs.literal(x, v.aval)) for v, x in constants)
        sliced: dict[Var, Atom] = {}

        def of_input(var: Var, low: int, high: int) -> Atom:
            own = _rows.rows_var(var, high - low)
            sliced[own] = self.rows(whole[var], low, high)
            return own

        maker = {v: e for e in opened.eqns for v in e.outvars}
        inner = Slicer(maker, self._enters, self._source, self._wanted_whole, of_input)
        output = inner.rows(opened.outvars[eqn.outvars.index(var)], low, high)
        eqns = [*opened.eqns, *inner.eqns]
        keep = _jaxprs.ancestors(eqns, [output])
        part = _jaxprs.part([e for e, k in zip(eqns, keep, strict=True) if k], [output])
        self._wanted_whole(eqn, [whole[v] for v in part.inputs if v in whole], self._maker)
        return part.jaxpr, [(whole | sliced)[v] for v in part.inputs]


def _named(fun: Callable, name: str) -> Callable:
    def named(*args):
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return named
