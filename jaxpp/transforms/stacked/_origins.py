"""Traces the variables of a program back to their sources, and takes slices of them.

A slice of rows is taken as early as can be: of the operands of casts and other elementwise
operations, of transposes, slices and concatenations. So a stage that runs some layers reads only
these layers of a parameter, even if all layers were cast, or stacked, at once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _checkpoints, _jaxprs
from jaxpp.transforms.stacked import _rows


class Origins:
    """The sources of the variables of a program.

    Args:
        invars: the inputs of the program.
        model: the inputs that are arrays of the model; a set of these is an integer, a bit each.
    """

    def __init__(self, invars: Iterable[Any], model: Sequence[Any]):
        self._other = 1 << len(model)
        self._sources = dict.fromkeys(invars, self._other)
        self._sources.update((v, 1 << i) for i, v in enumerate(model))
        self._maker: dict[Any, Any] = {}
        self._bypassed: set[int] = set()

    def add(self, eqn) -> None:
        """Notes the sources of the results of an equation."""
        sources = 0
        for v in _jaxprs.variables(eqn.invars):
            sources |= self._sources.get(v, 0)
        for v in eqn.outvars:
            self._sources[v] = sources
            self._maker[v] = eqn

    def model_arrays(self, atom: Any) -> int:
        """Gives the arrays of the model that an atom depends on; none if it has another source."""
        sources = 0 if _jaxprs.is_literal(atom) else self._sources.get(atom, 0)
        return sources if sources < self._other else 0

    def is_prepared(self, atom: Any) -> bool:
        """Tells whether an atom depends on nothing but arrays of the model."""
        return _jaxprs.is_literal(atom) or self._sources.get(atom, 0) < self._other

    def is_bypassed(self, eqn) -> bool:
        """Tells whether slices were taken of an equation's operands, and not of its results."""
        return id(eqn) in self._bypassed

    def slices(
        self, atoms: Sequence[Any], start: int, stop: int, scan
    ) -> tuple[list[Any], list[Any]]:
        """Takes the rows from `start` to `stop` of arrays, computed from as little as can be.

        Returns:
            The slices, and the equations that make them, in the scopes of the equation `scan`.
        """
        eqns: list[Any] = []
        known: dict[tuple[int, int, int], Any] = {}

        def rows(atom, start: int, stop: int):
            key = id(atom), start, stop
            if key not in known:
                known[key] = self._rows(atom, start, stop, scan, eqns, rows)
            return known[key]

        return [rows(v, start, stop) for v in atoms], eqns

    def _rows(self, atom: Any, start: int, stop: int, scan, eqns: list[Any], rows: Callable) -> Any:
        """Takes rows of an array; `rows` takes them of the arrays that it is made of."""
        if (start, stop) == (0, atom.aval.shape[0]):
            return atom
        maker = None if _jaxprs.is_literal(atom) else self._maker.get(atom)
        if maker is not None and (intervals := _rows.concatenation_intervals(maker)):
            self._bypassed.add(id(maker))
            parts = [
                rows(part, max(start - low, 0), min(stop, high) - low)
                for part, (low, high) in zip(maker.invars, intervals, strict=True)
                if low < stop and start < high
            ]
            if len(parts) == 1:
                return parts[0]
            eqn = joined(scan, parts, _rows.with_rows(atom.aval, stop - start))
        elif maker is not None and _is_slice_of_rows(maker):
            self._bypassed.add(id(maker))
            low = maker.params["start_indices"][0]
            return rows(maker.invars[0], low + start, low + stop)
        elif maker is not None and self.is_prepared(atom) and (rule := _rows.row_by_row(maker)):
            self._bypassed.add(id(maker))
            operands = [
                rows(v, start, stop) if has_rows else v
                for v, has_rows in zip(maker.invars, rule.operands, strict=True)
            ]
            eqn = _rows.of_rows(maker, rule, operands, stop - start)
        else:
            # An array made outside of a checkpoint is sliced outside: only the slice is kept.
            around = [] if maker is None else _checkpoints.scopes(maker)
            eqn = _sliced(_checkpoints.outside(scan, around), atom, start, stop)
        self.add(eqn)
        eqns.append(eqn)
        number = maker.outvars.index(atom) if len(eqn.outvars) > 1 and maker is not None else 0
        return eqn.outvars[number]


def _sliced(scan, array: Any, start: int, stop: int) -> Any:
    rest = array.aval.shape[1:]
    params = {
        "start_indices": (start, *(0 for _ in rest)),
        "limit_indices": (stop, *rest),
        "strides": None,
    }
    return _equation(
        scan, [array], _rows.with_rows(array.aval, stop - start), jax.lax.slice_p, params
    )


def joined(scan, parts: Sequence[Any], aval) -> Any:
    """Makes an equation that concatenates rows."""
    return _equation(scan, parts, aval, jax.lax.concatenate_p, {"dimension": 0})


def _equation(scan, invars: Sequence[Any], aval, primitive, params: dict) -> Any:
    eqn = jex.new_jaxpr_eqn(list(invars), [jex.Var(aval)], primitive, params, set())
    return eqn.replace(source_info=scan.source_info)


def _is_slice_of_rows(eqn) -> bool:
    """Tells whether an equation is a slice that takes some rows, and all of each row."""
    columns = {v.aval.shape[1:] for v in [*eqn.invars, *eqn.outvars]}
    return _rows.takes_some_rows(eqn) and len(columns) == 1
