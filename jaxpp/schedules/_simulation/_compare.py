"""Compares schedules of one size: time, bubble and memory of each, side by side."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxpp import _messages
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._check import ScheduleError, check
from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules._simulation._machine import Machine
from jaxpp.schedules._simulation._simulate import Timeline, simulate
from jaxpp.schedules._table import Table


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The figures of one schedule in a comparison; None, and the reason, where there are none.

    Args:
      schedule: the name that it was given.
      ranks: the number of ranks.
      microbatches: the number of microbatches.
      reason: why the schedule has no table of this size; else empty.
      stages_per_rank: the number of stages on each rank, where all have as many.
      parameters: how often the ranks together hold the parameters.
      makespan: the time of a step, in the unit of the costs.
      bubble: `Timeline.bubble_fraction`.
      span_bubble: `Timeline.span_bubble_fraction`.
      peak_memory: the most that a rank holds, in the unit of the memory model.

    >>> from jaxpp.schedules import DualPipe
    >>> compare({"dualpipe": DualPipe()}, num_ranks=2, num_microbatches=3)[0].reason[:60]
    'DualPipe() needs num_microbatches to be even and at least tw'
    """

    schedule: str
    ranks: int
    microbatches: int
    reason: str = ""
    stages_per_rank: int | None = None
    parameters: int | None = None
    makespan: float | None = None
    bubble: float | None = None
    span_bubble: float | None = None
    peak_memory: float | None = None


class Comparisons(list[Comparison]):
    """The rows of a comparison; they show themselves as a table, in a terminal and a notebook.

    Args:
      rows: the rows.
      timelines: the timeline of each schedule that has a table, by the schedule's name: those that
        the rows have the figures of, for `plot`.
    """

    def __init__(
        self, rows: Iterable[Comparison] = (), timelines: Mapping[str, Timeline] | None = None
    ) -> None:
        super().__init__(rows)
        self.timelines: dict[str, Timeline] = dict(timelines or {})

    def __repr__(self) -> str:
        header, cells = self._table()
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        lines = []
        for row in (header, *cells):
            first, *rest = zip(row, widths, strict=True)
            text = "  ".join([first[0].ljust(first[1]), *(c.rjust(width) for c, width in rest)])
            lines.append(text.rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return _messages.html_table(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the names of the figures that a row has, and the figures as text."""
        names = [field.name for field in dataclasses.fields(Comparison)]
        names = [
            name for name in names if name == "schedule" or any(getattr(r, name) for r in self)
        ]
        cells = [[_text(getattr(row, name)) for name in names] for row in self]
        return [name.replace("_", " ") for name in names], cells


def _text(value: str | float | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def compare(
    schedules: Schedule | Iterable[Schedule] | Mapping[str, Schedule],
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory: Memory | None = None,
    overlap: Literal["atomic", "free", "none"] = "atomic",
    machine: Machine | None = None,
) -> Comparisons:
    """Simulates schedules for one number of ranks and microbatches.

    Args:
      schedules: a schedule, a list of them, or schedules by name; without a name of yours
        a schedule's own text is its name.
      num_ranks: the number of ranks.
      num_microbatches: the number of microbatches.
      costs: the time of tasks and transfers, as `simulate` takes them: a number is that of a
        rank's whole share of a microbatch, whatever the number of its stages.
      memory: what that share holds; by default 1 from the forward to the weight gradient.
      overlap: what tasks that may overlap do: see `simulate`.
      machine: the ranks' speeds, the links, and the end of a step.

    Returns:
      A list with a row for each schedule, in order. `dataclasses.asdict` makes a dictionary of one,
      and the list shows itself as a table. Its `timelines` are what `plot` takes. A size that does
      not fit a schedule is no error: the row of that schedule has the reason, and no figures.

    Raises:
      TypeError: something in `schedules` is not a schedule.
      ScheduleError: a table breaks a rule; a note names the schedule.

    >>> from jaxpp.schedules import Interleaved1F1B, OneFOneB
    >>> rows = compare({"1f1b": OneFOneB(), "interleaved": Interleaved1F1B(2)}, 4, 8)
    >>> [(row.schedule, row.makespan, row.peak_memory) for row in rows]
    [('1f1b', 33.0, 4.0), ('interleaved', 28.5, 5.5)]
    >>> rows.timelines["interleaved"]
    Timeline(Table(4 ranks, 8 stages, 8 microbatches), makespan=28.5)
    """
    rows = Comparisons()
    for name, schedule in _named(schedules):
        row = Comparison(name, num_ranks, num_microbatches)
        try:
            table = schedule.table_for_ranks(num_ranks, num_microbatches)
        except ValueError as error:
            rows.append(dataclasses.replace(row, reason=str(error)))
            continue
        try:
            check(table)
        except ScheduleError as error:
            size = f"{num_ranks} ranks and {num_microbatches} microbatches"
            error.add_note(f"in the table of {name!r}, for {size}")
            raise
        found = simulate(table, costs, memory=memory, overlap=overlap, machine=machine)
        rows.timelines[name] = found
        stages, left = divmod(table.num_stages, num_ranks)
        rows.append(
            dataclasses.replace(
                row,
                stages_per_rank=None if left else stages,
                parameters=len(table.directions),
                makespan=found.makespan,
                bubble=found.bubble_fraction,
                span_bubble=found.span_bubble_fraction,
                peak_memory=max(found.peak_memory),
            )
        )
    return rows


def _named(schedules: Any) -> list[tuple[str, Schedule]]:
    """Pairs each schedule with its name."""
    pairs: list[tuple[str, Any]]
    if isinstance(schedules, Mapping):
        pairs = list(schedules.items())
    elif isinstance(schedules, str | Schedule) or not isinstance(schedules, Iterable):
        pairs = [(str(schedules), schedules)]
    else:
        pairs = [(str(own), own) for own in schedules]
    for name, schedule in pairs:
        if not isinstance(schedule, Schedule):
            way_out = ""
            if isinstance(schedule, str):
                way_out = f" Write by_name({schedule!r})."
            elif isinstance(schedule, type):
                way_out = f" Write {schedule.__name__}()."
            elif isinstance(schedule, Table):
                way_out = " Write FromTable(table)."
            raise TypeError(
                "compare takes schedules, such as OneFOneB(), as a list or by name; got "
                f"{schedule!r} for {name!r}.{way_out}"
            )
    return pairs
