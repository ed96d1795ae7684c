"""Traces the variables of a program back to their sources, and takes slices of them."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpp import _checkpoints, _jaxprs
from jaxpp.transforms.stacked._slicer import Slicer


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

    def add(self, eqn) -> None:
        """Notes the sources of the results of an equation."""
        sources = 0
        for v in _jaxprs.variables(eqn.invars):
            sources |= self._sources.get(v, 0)
        for v in eqn.outvars:
            self._sources[v] = sources
            self._maker[v] = eqn

    def model_arrays(self, atom: Any) -> int:
        """Finds the arrays of the model that an atom depends on; none if it has another source."""
        sources = 0 if _jaxprs.is_literal(atom) else self._sources.get(atom, 0)
        return sources if sources < self._other else 0

    def slicer(self, scan: Any) -> Slicer:
        """Makes a slicer for a scan over arrays of the program."""

        def enters(eqn) -> bool:
            if any(True for _ in _jaxprs.sub_jaxprs(eqn)):
                return False
            is_prepared = self._sources[eqn.outvars[0]] < self._other
            return is_prepared or eqn.primitive.name in ("concatenate", "slice")

        def around(eqn) -> Any:
            # An array made outside of a checkpoint is sliced outside: only the slice is kept.
            return _checkpoints.outside(scan, [] if eqn is None else _checkpoints.scopes(eqn))

        return Slicer(self._maker, enters, around)
