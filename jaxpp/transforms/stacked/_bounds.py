"""Chooses where arrays are cut into rows: alike, if an equation joins their rows."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpp import _jaxprs
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._rows import Bounds


class Classes:
    """The variables in classes; equations join those of a class, so their rows are cut alike."""

    def __init__(self, eqns: Sequence[Any], pairs: Iterable[tuple[Any, Any]] = ()):
        self._above: dict[Any, Any] = {}
        for eqn in eqns:
            rule = _rows.rows_of(eqn)
            members = _rows.scanned(eqn) if rule is None else rule.members(eqn)
            self._join(_jaxprs.variables(members))
        for pair in pairs:
            if len({v.aval.shape for v in pair}) == 1 and _rows.num_rows(pair[0]) >= 0:
                self._join(_jaxprs.variables(pair))

    def _join(self, members: Sequence[Any]) -> None:
        for v in members[1:]:
            first, other = self.of(members[0]), self.of(v)
            if first is not other:
                self._above[other] = first

    def of(self, var) -> Any:
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
        used: Iterable[tuple[Any, tuple[int, int], frozenset[int]]],
        variables: Iterable[Any],
    ) -> dict[Any, Bounds]:
        """Cuts variables so that each interval of rows that stages use consists of whole parts.

        Args:
            used: variables, the rows of them that are read or made, and the stages that do so.
            variables: those to cut; a class that the same stages use all over stays whole.
        """
        found: dict[Any, dict[tuple[int, int], frozenset[int]]] = {}
        for var, interval, stages in used:
            known = found.setdefault(self.of(var), {})
            known[interval] = known.get(interval, frozenset()) | stages
        cuts = {
            own: tuple(sorted({0, _rows.num_rows(own)}.union(*intervals)))
            for own, intervals in found.items()
            if len(set(intervals.values())) > 1
        }
        return {v: cuts[own] for v in variables if (own := self.of(v)) in cuts}
