"""What the variables of a program were computed from, and slices of them.

A slice of rows is taken as early as can be: of the operands of casts and other elementwise
operations, of transposes, slices and concatenations. So a stage that runs some of the layers reads
these of a parameter and nothing else, also where all layers were cast, or stacked, at once.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _checkpoints, _jaxprs
from jaxpp.transforms.stacked import _rows


class Origins:
    """Where the variables of a program come from.

    Args:
        invars: the inputs of the program.
        model: those of them that are arrays of the model; sets of these are written as bits.
    """

    def __init__(self, invars: Iterable[Any], model: Sequence[Any]):
        self._other = 1 << len(model)
        self._sources = dict.fromkeys(invars, self._other)
        self._sources.update((v, 1 << i) for i, v in enumerate(model))
        self._maker: dict[Any, Any] = {}
        self._bypassed: set[int] = set()

    def add(self, eqn) -> None:
        """Takes note of an equation."""
        sources = 0
        for v in _jaxprs.variables(eqn.invars):
            sources |= self._sources.get(v, 0)
        for v in eqn.outvars:
            self._sources[v] = sources
            self._maker[v] = eqn

    def model_arrays(self, atom: Any) -> int:
        """The arrays of the model that an atom depends on; none if it depends on anything else."""
        sources = 0 if _jaxprs.is_literal(atom) else self._sources.get(atom, 0)
        return sources if sources < self._other else 0

    def is_prepared(self, atom: Any) -> bool:
        """Whether an atom depends on nothing but arrays of the model."""
        return _jaxprs.is_literal(atom) or self._sources.get(atom, 0) < self._other

    def is_bypassed(self, eqn) -> bool:
        """Whether slices were taken of an equation's operands, and not of its results."""
        return id(eqn) in self._bypassed

    def slice(self, atom: Any, start: int, stop: int, scan, eqns: list[Any]) -> Any:
        """The rows from `start` to `stop` of an array, computed from as little as can be.

        The equations that it takes are added to `eqns`, under the names of the equation `scan`.
        """
        if (start, stop) == (0, atom.aval.shape[0]):
            return atom
        maker = None if _jaxprs.is_literal(atom) else self._maker.get(atom)
        if maker is not None and (intervals := _rows.concatenation_intervals(maker)):
            self._bypassed.add(id(maker))
            parts = [
                self.slice(part, max(start - row, 0), min(stop - row, end - row), scan, eqns)
                for part, (row, end) in zip(maker.invars, intervals, strict=True)
                if row < stop and start < end
            ]
            if len(parts) == 1:
                return parts[0]
            eqn = joined(scan, parts, _rows.with_rows(atom.aval, stop - start))
        elif maker is not None and _is_slice_of_rows(maker):
            self._bypassed.add(id(maker))
            row = maker.params["start_indices"][0]
            return self.slice(maker.invars[0], row + start, row + stop, scan, eqns)
        elif maker is not None and self.is_prepared(atom) and (rule := _rows.row_by_row(maker)):
            self._bypassed.add(id(maker))
            operands = [
                self.slice(v, start, stop, scan, eqns) if has_rows else v
                for v, has_rows in zip(maker.invars, rule.operands, strict=True)
            ]
            eqn = _rows.of_rows(maker, rule, operands, stop - start)
            self.add(eqn)
            eqns.append(eqn)
            return eqn.outvars[maker.outvars.index(atom)]
        else:
            # What was not made in a checkpoint is not sliced there: the slice alone is kept.
            around = [] if maker is None else _checkpoints.scopes(maker)
            eqn = _sliced(_checkpoints.outside(scan, around), atom, start, stop)
        self.add(eqn)
        eqns.append(eqn)
        return eqn.outvars[0]


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
    """The equation that concatenates rows."""
    return _equation(scan, parts, aval, jax.lax.concatenate_p, {"dimension": 0})


def _equation(scan, invars: Sequence[Any], aval, primitive, params: dict) -> Any:
    eqn = jex.new_jaxpr_eqn(list(invars), [jex.Var(aval)], primitive, params, set())
    return eqn.replace(source_info=scan.source_info)


def _is_slice_of_rows(eqn) -> bool:
    """Whether an equation is a slice that takes some rows, and all of each."""
    columns = {v.aval.shape[1:] for v in [*eqn.invars, *eqn.outvars]}
    return _rows.takes_some_rows(eqn) and len(columns) == 1
