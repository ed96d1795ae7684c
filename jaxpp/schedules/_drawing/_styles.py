"""Styles that all drawings share: the colours of tasks, and their places in their ranks' rows."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._simulation import Span, Timeline

#: Red, green and blue, from 0 to 1.
Colour = tuple[float, float, float]


@functools.cache
def _colour(code: str) -> Colour:
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


@dataclass(frozen=True, slots=True)
class Cell:
    """A task and its place in a drawing.

    `slot` numbers the stages of its rank, one direction after the other. `lane` is its place among
    the `num_lanes` tasks that share the row of its rank at its time.
    """

    span: Span
    slot: int
    lane: int
    num_lanes: int


def lay_out(timeline: Timeline) -> tuple[tuple[Cell, ...], ...]:
    """Returns each rank's tasks with their places, by start.

    Tasks that run at the same time share the height of their row; copies and collectives
    are in lanes of their own, the last.

    >>> from jaxpp.schedules import Interleaved1F1B, simulate
    >>> cells = lay_out(simulate(Interleaved1F1B(2).table(num_stages=4, num_microbatches=2)))
    >>> print(*(f"{cell.span.task} in slot {cell.slot}" for cell in cells[1][:3]), sep=", ")
    F1.0 in slot 0, F1.1 in slot 0, F3.0 in slot 1
    """
    table = timeline.table
    direction_of = table.direction_of if table.placement else (0,) * table.num_microbatches
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    tolerance = 1e-9 * timeline.makespan  # the rounding error between one end and the next start
    placed = []
    for spans in rows:
        lanes = _lanes([s for s in spans if s.task.kind.lane == "compute"], tolerance)
        if table.lanes:
            most = max((lane for lane, _ in lanes), default=0) + 1
            place = {name: most + n for n, name in enumerate(table.lanes)}
            own, count = iter(lanes), most + len(place)
            lanes = [
                (place[lane] if (lane := span.task.kind.lane) in place else next(own)[0], count)
                for span in spans
            ]
        homes = [(direction_of[span.task.microbatch], span.task.stage) for span in spans]
        slots = {home: slot for slot, home in enumerate(sorted(set(homes)))}
        placed.append(
            tuple(
                Cell(span, slots[home], lane, num_lanes)
                for span, home, (lane, num_lanes) in zip(spans, homes, lanes, strict=True)
            )
        )
    return tuple(placed)


def _lanes(spans: list[Span], tolerance: float) -> list[tuple[int, int]]:
    """Finds each span, sorted by start, the first free lane, and the number of lanes in its group.

    A group is a run of spans without an idle moment between them.
    """
    lanes: list[int] = []
    sizes: list[int] = []
    group = 0  # the first span of the group
    ends: list[float] = []  # of each lane of the group
    for n, span in enumerate(spans):
        if ends and max(ends) <= span.start + tolerance:
            sizes += [len(ends)] * (n - group)
            group, ends = n, []
        lane = next((k for k, end in enumerate(ends) if end <= span.start + tolerance), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    sizes += [len(ends)] * (len(spans) - group)
    return list(zip(lanes, sizes, strict=True))


def num_slots(rows: tuple[tuple[Cell, ...], ...]) -> int:
    """Returns the most stages of a rank; those of each direction count by themselves."""
    return 1 + max((cell.slot for cells in rows for cell in cells), default=0)


def shade(kind: Kind, slot: int, slots: int) -> Colour:
    """Returns the colour of a kind in a slot: the later the slot, the lighter.

    >>> shade(Kind.F, 0, 1) == shade(Kind.F, 0, 4)
    True
    """
    first, last = map(_colour, kind.colours)
    part = slot / max(slots - 1, 1)
    red, green, blue = (a + part * (b - a) for a, b in zip(first, last, strict=True))
    return red, green, blue


def is_dark(colour: Colour) -> bool:
    """Tells whether white, rather than black, is legible on a colour."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.52


def explain_shades(timelines: Iterable[Timeline], slots: Iterable[int]) -> str:
    """Explains lighter colours; empty where there is one shade.

    Args:
      timelines: the timelines of a drawing.
      slots: how many slots each of them has.
    """
    directions = [max(len(timeline.table.placement), 1) for timeline in timelines]
    stages = any(n > d for n, d in zip(slots, directions, strict=True))
    meanings = ["a later stage of the rank"] * stages
    meanings += ["the second direction"] * any(d > 1 for d in directions)
    return " or ".join(meanings)


def measures(timeline: Timeline, unit: str | None = None) -> str:
    """Names the makespan and the bubble, for a title.

    >>> from jaxpp.schedules import Costs, GPipe, simulate
    >>> measures(simulate(GPipe().table(4, 8), Costs(1e-3, 1e-3, 1e-3, unit="s")))
    'makespan 33 ms, bubble 27.3%'
    """
    unit = timeline.unit if unit is None else unit
    made = in_unit(timeline.makespan, unit)
    return f"makespan {made}, bubble {timeline.bubble_fraction:.1%}"


def in_unit(time: float, unit: str) -> str:
    """Writes a time with its unit; of seconds it takes the thousandths or millionths that suit."""
    if unit == "s" and 0 < time < 1:
        factor, unit = (1e3, "ms") if time >= 1e-3 else (1e6, "us")
        time *= factor
    return f"{time:.5g} {unit}".rstrip()


def shared_unit(timelines: Mapping[str, Timeline]) -> str:
    """Returns the unit of the times of timelines that share an axis.

    Raises:
      ValueError: they have different units.
    """
    units = {title: timeline.unit for title, timeline in timelines.items()}
    if len(set(units.values())) > 1:
        each = ", ".join(
            f"{title!r} is {f'in {unit}' if unit else 'without a unit'}"
            for title, unit in units.items()
        )
        raise ValueError(
            f"timelines that share an axis have one unit of time, but {each}; simulate with costs "
            f"in the same unit, such as those of a measurement (measured.costs), and name the unit "
            f"of costs of your own: Costs(..., unit='s')."
        )
    return next(iter(units.values()), "")


def by_title(timelines: Timeline | Mapping[str, Timeline]) -> Mapping[str, Timeline]:
    """Returns timelines by title; a single one gets an empty title.

    Raises:
      TypeError: it is neither a timeline nor timelines by title.
    """
    titled = timelines if isinstance(timelines, Mapping) else {"": timelines}
    for title, timeline in titled.items():
        if not isinstance(timeline, Timeline):
            raise TypeError(
                f"Timelines to draw are one, or several by title: {{'1F1B': timeline}}; got "
                f"{type(timeline).__name__} {title and f'for {title!r}'}".rstrip()
                + ". simulate(table) makes a timeline."
            )
    return titled
