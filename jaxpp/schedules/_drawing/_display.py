"""Notebooks show tables, timelines and results of a synthesis as pictures, in place of their text.

A notebook looks for `_repr_svg_` of a value, and shows the text where that gives None.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpp.schedules._drawing._plot import plot
from jaxpp.schedules._simulation import Timeline, simulate
from jaxpp.schedules._synthesis import Synthesis
from jaxpp.schedules._table import Table

#: The picture of more tasks than these takes megabytes of the notebook.
_MOST_TASKS = 1_000


def _show(cls: Any, timelines: Callable[[Any], Mapping[str, Timeline]]) -> None:
    def svg(value: Any) -> str | None:
        try:
            shown = timelines(value)
            if sum(len(timeline.spans) for timeline in shown.values()) > _MOST_TASKS:
                return None
            return plot(shown)._repr_svg_()  # type: ignore[attr-defined]
        except (ImportError, ValueError):  # no matplotlib, no task, a table that cannot be run
            return None

    cls._repr_svg_ = svg


_show(Timeline, lambda timeline: {"": timeline})
_show(Table, lambda table: {f"{table!r} with Costs()": simulate(table)})
_show(Synthesis, lambda found: {f"{found.source}, bound {found.lower_bound:.6g}": found.timeline})
