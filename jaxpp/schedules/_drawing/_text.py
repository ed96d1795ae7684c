"""Draws tables and timelines in the terminal."""

import itertools
import math
import os
import shutil
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpp.schedules._costs import Costs
from jaxpp.schedules._drawing._styles import (
    Cell,
    Colour,
    by_title,
    explain_shades,
    is_dark,
    lay_out,
    measures,
    num_slots,
    shade,
    shared_unit,
)
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._simulation import Timeline, simulate
from jaxpp.schedules._table import Table

_WIDTH_OF_A_FILE = 120
_NARROWEST = 16  # columns of time, however narrow the terminal
_TICK_COLUMNS = 8
Drawn = Table | Timeline


def to_text(
    drawn: Drawn | Mapping[str, Drawn], colour: bool | None = None, width: int | None = None
) -> str:
    """Draws a table or a timeline for a terminal: a line for each rank, time to the right.

    A table is drawn with unit costs for each stage: F, I and W take one column, B takes two, a task
    of a kind of your own what the kind says. `F3` is the forward of microbatch 3, or `F2.3` that of
    stage 2 where ranks have several stages; `=` is a task that goes on, and a dot is a rank that
    runs no task. A drawing that does not fit the width, or has other costs, is scaled to the
    width: numbers are left out where they do not fit their tasks, and where tasks are shorter than
    a column, columns show kinds in the shares of their time. Of tasks that run together, one is on
    a second line of the rank; so are copies.

    Args:
      drawn: a table or a timeline, or several by title, drawn one above the other on one time axis.
      colour: whether to colour tasks by kind, lighter for later stages of a rank; by default where
        stdout is a terminal, unless the environment has `NO_COLOR`, or `FORCE_COLOR`.
      width: the most columns of a line; by default those of the terminal, or 120.

    Returns:
      The lines, without a newline at the end.

    Raises:
      ScheduleError: a table deadlocks.
      TypeError: it is neither a table nor a timeline, nor these by title.

    >>> from jaxpp.schedules import Costs, OneFOneB
    >>> table = OneFOneB().table(num_stages=3, num_microbatches=3)
    >>> print(to_text(table, colour=False))
    rank 0 | F0 F1 F2 .  .  .  .  B0 == .  B1 == .  B2 ==
    rank 1 | .  F0 F1 .  .  B0 == F2 B1 == .  B2 == .  .
    rank 2 | .  .  F0 B0 == F1 B1 == F2 B2 == .  .  .  .
    >>> print(to_text(simulate(table, Costs(1.5, 2.0, 1.2)), colour=False, width=60))
    rank 0 | F0=F1==F2=..............B0=====...B1=====...B2=====
    rank 1 | ...F0==F1=.......B0=====F2=B1=====...B2=====.......
    rank 2 | .......F0=B0=====F1=B1=====F2==B2=====.............
    time   | 0          5          10         15        20
    F forward, B backward, = goes on, . idle
    """
    titled = drawn if isinstance(drawn, Mapping) else {"": drawn}
    timelines = by_title(
        {title: _clocked(one) if isinstance(one, Table) else one for title, one in titled.items()}
    )
    unit = shared_unit(timelines)
    colour = _stdout_shows_colour() if colour is None else colour
    width = shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns if width is None else width
    charts = {title: lay_out(timeline) for title, timeline in timelines.items()}
    margin = max((len(_name(len(rows) - 1, len(rows))) for rows in charts.values()), default=0)
    horizon = max((timeline.makespan for timeline in timelines.values()), default=0.0)
    scale = _scale(list(charts.values()), horizon, max(width - margin, _NARROWEST), colour)
    lines = []
    for title, rows in charts.items():
        if title:
            lines += [*[""] * bool(lines), f"{title}: {measures(timelines[title])}"]
        lines += _chart(rows, scale, margin, colour)
    if not scale.whole:
        lines.append(f"time {unit}".ljust(margin - 2) + "| " + _axis(horizon, scale))
    if not scale.whole or colour:
        slots = [num_slots(rows) for rows in charts.values()]
        lines += _legend(list(timelines.values()), slots, scale, width, colour)
    return "\n".join(line.rstrip() for line in lines)


def _clocked(table: Table) -> Timeline:
    """Simulates a table, an `F` of a stage in one column."""
    return simulate(table, Costs(per="stage"))


@dataclass(frozen=True)
class _Scale:
    """The scale of a drawing: a column is `per_column` of time.

    With `whole`, times are whole numbers of columns, each of `cell` characters, which have room for
    a label, and then a gap. With `dense`, tasks are shorter than columns; with `halves`, two
    columns share one character.
    """

    columns: int
    per_column: float
    cell: int = 1
    labels: bool = False
    whole: bool = False
    dense: bool = False
    halves: bool = False


def _scale(
    charts: Sequence[tuple[tuple[Cell, ...], ...]], horizon: float, room: int, colour: bool
) -> _Scale:
    """Chooses the scale of the most readable drawing."""
    cells = [cell for rows in charts for cells in rows for cell in cells]
    if not cells or horizon <= 0:
        return _Scale(0, 1.0, whole=True)
    longest = max(
        len(_label(cell, slots))
        for rows in charts
        for slots in [num_slots(rows)]
        for cells in rows
        for cell in cells
    )
    ends = {time for cell in cells for time in (cell.span.start, cell.span.end)}
    integral = all(float(time).is_integer() for time in ends)
    if integral and horizon * (longest + 1) - 1 <= room:
        return _Scale(round(horizon), 1.0, longest, labels=True, whole=True)
    columns = room
    if integral and horizon <= room:
        columns = room // round(horizon) * round(horizon)
    typical = statistics.median_low(cell.span.end - cell.span.start for cell in cells)
    if typical * columns / horizon >= longest:
        return _Scale(columns, horizon / columns, labels=True)
    if typical * columns / horizon >= 1:
        return _Scale(columns, horizon / columns)
    if colour:
        columns = round(horizon) if integral and horizon <= 2 * room else 2 * room
    return _Scale(columns, horizon / columns, dense=True, halves=colour)


def _name(rank: int, num_ranks: int) -> str:
    return f"rank {rank:>{len(str(num_ranks - 1))}} | "


def _label(cell: Cell, slots: int) -> str:
    task = cell.span.task
    return str(task) if slots > 1 else f"{task.kind}{task.microbatch}"


def _chart(
    rows: tuple[tuple[Cell, ...], ...], scale: _Scale, margin: int, colour: bool
) -> Iterable[str]:
    slots = num_slots(rows)
    num_lanes = max((cell.num_lanes for cells in rows for cell in cells), default=1)
    for rank, cells in enumerate(rows):
        for lane in range(num_lanes):
            shown = _sample([cell for cell in cells if cell.lane == lane], scale)
            if scale.halves:
                drawn = _halves([c and shade(c.span.task.kind, c.slot, slots) for c in shown])
            else:
                drawn = _runs(shown, scale, slots, " " if colour or lane else ".", colour)
            name = "| " if lane else _name(rank, len(rows))
            yield name.rjust(margin) + drawn


def _sample(cells: Sequence[Cell], scale: _Scale) -> list[Cell | None]:
    """Chooses the task that each column shows, or None where the rank is idle.

    Where several tasks share a column, it shows the kind, or idleness, that the columns so far show
    least for its time. So each kind has a number of columns that fits its time.
    """
    inside: list[dict[tuple[Kind, int] | None, tuple[float, Cell | None]]] = [
        {} for _ in range(scale.columns)
    ]
    for cell in cells:
        start, end = cell.span.start / scale.per_column, cell.span.end / scale.per_column
        key = (cell.span.task.kind, cell.slot)
        for column in range(int(start), min(int(end) + 1, scale.columns)):
            part = min(end, column + 1) - max(start, column)
            before, shown = inside[column].get(key, (0.0, cell))
            inside[column][key] = (before + part, cell if part > before else shown)
    owed: dict[tuple[Kind, int] | None, float] = {}
    shown = []
    for parts in inside:
        parts[None] = (1.0 - sum(part for part, _ in parts.values()), None)
        for key, (part, _) in parts.items():
            owed[key] = owed.get(key, 0.0) + part
        present = [key for key, (part, _) in parts.items() if part > 1e-6]
        key = max(present, key=lambda key: owed[key])
        owed[key] -= 1.0
        shown.append(parts[key][1])
    return shown


def _runs(shown: Sequence[Cell | None], scale: _Scale, slots: int, idle: str, colour: bool) -> str:
    """Writes columns as text: a label for each task, and a fill while the task goes on."""
    gap = " " if scale.whole else ""
    pieces = []
    for cell, run in itertools.groupby(shown):
        columns = len(list(run))
        if cell is None:
            pieces.append(gap.join([idle.ljust(scale.cell)] * columns))
            continue
        kind = cell.span.task.kind
        letter = kind.lower() if cell.slot and not colour else str(kind)
        body = gap.join([(letter if scale.dense else "=") * scale.cell] * columns)
        label = _label(cell, slots) if scale.labels else letter
        label = label if len(label) <= len(body) else letter
        text = label.ljust(scale.cell) + body[max(len(label), scale.cell) :]
        if colour:
            text = _painted(text.replace("=", " "), shade(kind, cell.slot, slots))
        pieces.append(text)
    return gap.join(pieces)


def _halves(colours: Sequence[Colour | None]) -> str:
    """Writes two columns as one character, its left half and its right half."""
    pieces = []
    pairs = itertools.zip_longest(colours[::2], colours[1::2])
    for (left, right), run in itertools.groupby(pairs):
        length = len(list(run))
        if left is None and right is None:
            pieces.append(" " * length)
        elif left == right:
            pieces.append(_escape(back=left) + " " * length + _RESET)
        elif left is None:
            pieces.append(_escape(front=right) + "▐" * length + _RESET)
        else:
            pieces.append(_escape(front=left, back=right) + "▌" * length + _RESET)
    return "".join(pieces)


_RESET = "\x1b[0m"


def _painted(text: str, colour: Colour) -> str:
    front = (1.0, 1.0, 1.0) if is_dark(colour) else (0.0, 0.0, 0.0)
    return _escape(front, colour) + text + _RESET


def _escape(front: Colour | None = None, back: Colour | None = None) -> str:
    """Returns the code that switches colours, of the 256 that nearly all terminals have."""
    codes = [
        f"{which};5;{_terminal_colour(c)}"
        for which, c in ((38, front), (48, back))
        if c is not None
    ]
    return f"\x1b[{';'.join(codes)}m"


def _terminal_colour(colour: Colour) -> int:
    """Finds the nearest colour of the cube of six levels a channel, numbered from 16."""
    levels = (0, 95, 135, 175, 215, 255)
    red, green, blue = (min(range(6), key=lambda n: abs(levels[n] - 255 * part)) for part in colour)
    return 16 + 36 * red + 6 * green + blue


def _axis(horizon: float, scale: _Scale) -> str:
    """Writes times under their columns."""
    characters = scale.columns // 2 if scale.halves else scale.columns
    least = horizon * _TICK_COLUMNS / characters
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))
    line = ""
    for n in range(int(horizon / step * (1 + 1e-9)) + 1):
        longer = line.ljust(round(n * step / horizon * characters)) + f"{n * step:.5g}"
        line = longer if len(longer) <= characters else line
    return line


def _legend(
    timelines: Sequence[Timeline], slots: Sequence[int], scale: _Scale, width: int, colour: bool
) -> Iterable[str]:
    """Explains the colours and signs of a drawing, in lines of at most `width` characters."""
    kinds = {task.kind for timeline in timelines for task in timeline.table.tasks}
    words = [f"{kind} {kind.title}" for kind in Kind if kind in kinds]
    if meaning := explain_shades(timelines, slots):
        words += [f"{'lighter' if colour else 'lower case'}: {meaning}"]
    if scale.dense:
        words.append(f"a column is {scale.per_column * (1 + scale.halves):.3g} of time")
    elif not colour:
        words.append("= goes on")
    words += [] if colour else [". idle"]
    # Lines break between entries, unless an entry is longer than a line.
    kept = [word.replace(" ", "\xa0") if len(word) < width else word for word in words]
    for line in textwrap.wrap(", ".join(kept), max(width, _NARROWEST)):
        line = line.replace("\xa0", " ")
        if colour:
            for kind in kinds:
                name = f"{kind} {kind.title}"
                line = line.replace(name, _painted(name, shade(kind, 0, 1)))
        yield line


def _stdout_shows_colour() -> bool:
    """Follows no-color.org and force-color.org, as Python's own tracebacks do."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and sys.stdout.isatty()
