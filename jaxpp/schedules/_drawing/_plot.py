"""Draws timelines as pictures."""

import dataclasses
import functools
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpp._messages import need
from jaxpp.schedules._drawing._styles import (
    Cell,
    Colour,
    by_title,
    explain_shades,
    in_unit,
    is_dark,
    lay_out,
    measures,
    num_slots,
    shade,
    shared_unit,
)
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._simulation import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

_IDLE = "#f1f1f1"
#: The name of a rank's time after its last task.
_AFTER = (("reduction", "#5b7f95"), ("optimizer", "#7a9e7e"))
_MARGIN_INCHES = 0.8
_WIDEST_INCHES = 13.0  # a page of the site, or a cell of a notebook, with 160 points an inch
_ROW_INCHES = 0.25
_SHARED_ROW_INCHES = 0.42  # where tasks share the height of a row
_DIGIT_POINTS = 0.64  # the width of a digit, for a font size of one point
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 8.0  # of the numbers in cells, in points


def plot(
    timelines: Timeline | Mapping[str, Timeline],
    path: str | os.PathLike[str] | None = None,
    *,
    ax: "Axes | None" = None,
    memory: bool = False,
    side_by_side: bool = False,
    unit: str | None = None,
) -> "Figure":
    """Draws timelines as a picture: a row for each rank, a colour for each kind of task.

    Cells have the number of their microbatch where it is legible. Where a rank has several stages,
    or microbatches go in two directions, later ones have the next shade. Tasks that run together
    share the height of their row; so do copies with those that compute. Several timelines are drawn
    on one time axis: a simulated and a measured one, for instance.

    Args:
      timelines: a timeline, or several by title.
      path: where to write, if anywhere; the suffix gives the format, `.png` or `.svg` for instance.
      ax: axes of your own, for one timeline without its memory; by default a figure is made.
      memory: whether to draw under each timeline what its ranks hold over time.
      side_by_side: whether several timelines are beside each other, not one above the other.
      unit: the unit of time; by default that of the timelines, `Costs.unit`.

    Returns:
      The figure; it shows itself at the end of a cell of a notebook.

    Raises:
      ValueError: there is no timeline, or one without tasks, or more than `ax` has room for; or
        the timelines have different units.
      ImportError: matplotlib is not installed; it is in the extra `plot`.

    >>> import pathlib, tempfile
    >>> from jaxpp.schedules import GPipe, simulate
    >>> timeline = simulate(GPipe().table(num_stages=4, num_microbatches=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot({"GPipe": timeline}, pathlib.Path(folder, "gpipe.png"), memory=True)
    <Picture size 880x370 with 2 Axes>
    """
    need("plot", "plot", "matplotlib")
    titled = by_title(timelines)
    if not titled or not all(timeline.spans for timeline in titled.values()):
        raise ValueError(
            f"plot needs timelines that have tasks, got {titled!r}; simulate a table to make one."
        )
    unit = shared_unit(titled) if unit is None else unit
    charts = [_Chart(title, one, lay_out(one), unit) for title, one in titled.items()]
    page = _Page.of(charts, memory, side_by_side)
    if ax is not None:
        return _plot_into(ax, charts, page, memory, unit, path)
    figure = _picture()(figsize=(page.width, page.height), layout="constrained")
    grid = figure.subplots(
        len(page.row_heights),
        page.columns,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": page.row_heights},
    )
    most_held = max(peak for chart in charts for peak in chart.timeline.peak_memory)
    panels = 1 + memory
    for n, chart in enumerate(charts):
        row, column = (0, n) if side_by_side else (n * panels, 0)
        above, last = grid[row, column], grid[row + memory, column]
        _draw_ranks(above, chart, page)
        title = chart.title
        if memory:
            title += f", peak memory {max(chart.timeline.peak_memory):.5g}"
        above.set_title(title, loc="left", fontsize=page.font)
        if memory:
            above.tick_params(axis="x", length=0)
            _draw_memory(last, chart.timeline, most_held, page)
        last.tick_params(axis="x", labelsize=0.8 * page.font, labelbottom=True)
        last.set_xlim(0, page.horizon)
        if side_by_side or n == len(charts) - 1:
            _label_time(last, page, unit)
    _draw_legend(figure, charts, memory, page)
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def _plot_into(
    axes: "Axes",
    charts: Sequence["_Chart"],
    page: "_Page",
    memory: bool,
    unit: str,
    path: str | os.PathLike[str] | None,
) -> "Figure":
    """Draws one timeline into axes that are there already, at their size."""
    if memory or len(charts) != 1:
        raise ValueError(
            f"plot draws one timeline without its memory into ax=, got {len(charts)} and "
            f"memory={memory}; leave ax out, or call plot once for each of your axes."
        )
    (chart,), figure = charts, axes.get_figure(root=True)
    assert figure is not None
    width = axes.get_window_extent().width * 72 / figure.dpi
    page = dataclasses.replace(page, points_per_unit=width / page.horizon, font=10)
    _draw_ranks(axes, chart, page)
    axes.set_title(chart.title, loc="left", fontsize=page.font)
    axes.set_xlim(0, page.horizon)
    _label_time(axes, page, unit)
    if path is not None:
        figure.savefig(path)
    return figure


def _label_time(axes: "Axes", page: "_Page", unit: str) -> None:
    """Labels the axis of time; of seconds it shows the thousandths or millionths that suit."""
    if unit == "s":
        unit = in_unit(page.horizon, unit).rpartition(" ")[2]
        scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
        axes.xaxis.set_major_formatter(lambda time, _: f"{scale * time:.6g}")
    axes.set_xlabel(f"time ({unit or 'unit of the costs'})", fontsize=0.9 * page.font)


@functools.cache
def _picture() -> type["Figure"]:
    """Makes the class of the figures: one that a notebook shows, without pyplot."""
    # Imported here, so that only drawing waits for matplotlib; and without pyplot, which would
    # keep the figure and look for a window system.
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_svg_(self) -> str:
            file = io.StringIO()
            self.savefig(file, format="svg")
            return file.getvalue()

    return Picture


@dataclass(frozen=True)
class _Chart:
    name: str
    timeline: Timeline
    rows: tuple[tuple[Cell, ...], ...]
    unit: str

    @property
    def title(self) -> str:
        made = measures(self.timeline, self.unit)
        return f"{self.name}: {made}" if self.name else made

    @property
    def height(self) -> float:
        shared = any(cell.num_lanes > 1 for cells in self.rows for cell in cells)
        return (_SHARED_ROW_INCHES if shared else _ROW_INCHES) * len(self.rows)


@dataclass(frozen=True)
class _Page:
    """The sizes of a picture, in inches, and its font, in points."""

    width: float
    row_heights: tuple[float, ...]
    columns: int
    horizon: float
    points_per_unit: float
    font: float

    @property
    def height(self) -> float:
        return sum(height + 0.3 for height in self.row_heights) + 0.9

    @staticmethod
    def of(charts: Sequence[_Chart], memory: bool, side_by_side: bool) -> "_Page":
        horizon = max(chart.timeline.makespan for chart in charts)
        spans = [span for chart in charts for span in chart.timeline.spans]
        lengths = sorted(s.end - s.start for s in spans if s.end > s.start)
        # Of measured tasks a few are very short, and of any some may go without their numbers.
        short = lengths[len(lengths) // 10] if lengths else horizon
        columns = len(charts) if side_by_side else 1
        # Wide enough for two digits in nearly every task, within the width of a page or a screen.
        each = min(max(8.0 / columns, 0.15 * horizon / short), _WIDEST_INCHES / columns)
        width = columns * (each + _MARGIN_INCHES)
        heights = [chart.height + 0.3 for chart in charts]
        heights = [max(heights)] if side_by_side else heights
        return _Page(
            width,
            tuple(h for height in heights for h in [height, max(0.9, height / 4)][: 1 + memory]),
            columns,
            horizon,
            72 * each / horizon,
            10 * max(1.0, width / 14),  # people look at wide pictures from further away
        )


def _draw_ranks(axes: "Axes", chart: _Chart, page: _Page) -> None:
    slots = num_slots(chart.rows)
    spans = chart.timeline.spans
    edge = min(0.5, 0.06 * page.points_per_unit * min(span.end - span.start for span in spans))
    digits = len(str(max(span.task.microbatch for span in spans)))
    for rank, cells in enumerate(chart.rows):
        colours = [shade(cell.span.task.kind, cell.slot, slots) for cell in cells]
        bars = [_bar(cell, rank) for cell in cells]
        _draw_bars(axes, bars, colours, edge)
        numbers = [str(cell.span.task.microbatch) for cell in cells]
        rooms = [(page.points_per_unit * width - 1.0) / digits for _, _, width, _ in bars]
        _draw_numbers(axes, numbers, rooms, bars, colours)
    ranks = range(len(chart.rows))
    begin = [max(ends, default=0.0) for ends in chart.timeline.ends]
    for times, (_, colour) in zip(_after(chart), _AFTER, strict=True):
        if any(times):
            axes.barh(ranks, times, 0.9, begin, color=colour, edgecolor="white", linewidth=edge)
            begin = [a + b for a, b in zip(begin, times, strict=True)]
    axes.set_ylim(len(ranks) - 0.4, -0.6)  # rank 0 at the top
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", labelsize=min(0.8 * page.font, 11), length=0)
    axes.set_facecolor(_IDLE)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _after(chart: _Chart) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns for each rank the times of its reduction and its optimizer, after its last task."""
    update = chart.timeline.update
    reduction = chart.timeline.machine.reduction(len(update))
    return reduction, tuple(a - b for a, b in zip(update, reduction, strict=True))


def _bar(cell: Cell, rank: int) -> tuple[float, float, float, float]:
    """Returns the left, top, width and height of a cell."""
    height = 0.9 / cell.num_lanes
    span = cell.span
    return span.start, rank - 0.45 + cell.lane * height, span.end - span.start, height


def _draw_bars(
    axes: "Axes",
    bars: Sequence[tuple[float, float, float, float]],
    colours: Sequence[Colour],
    edge: float,
) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        for x, y, width, height in bars
    ]
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=edge)
    )


def _draw_numbers(
    axes: "Axes",
    numbers: Sequence[str],
    rooms: Sequence[float],
    bars: Sequence[tuple[float, float, float, float]],
    colours: Sequence[Colour],
) -> None:
    """Writes a number into each bar where a digit has the room, in points, to be legible.

    All numbers are one collection of outlines; thousands of texts would take most of a minute.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.transforms import Affine2D

    paths, centres, shades = [], [], []
    for number, room, (left, top, width, height), colour in zip(
        numbers, rooms, bars, colours, strict=True
    ):
        size = min(_LARGEST_FONT, round(4 * room / _DIGIT_POINTS) / 4)
        if size >= _SMALLEST_FONT:
            paths.append(_outline(number, size))
            centres.append((left + width / 2, top + height / 2))
            shades.append("white" if is_dark(colour) else "#202020")
    if paths:
        outlines = PathCollection(
            paths,
            offsets=centres,
            offset_transform=axes.transData,
            facecolors=shades,
            linewidths=0,
        )
        outlines.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
        axes.add_collection(outlines, autolim=False)


@functools.cache
def _outline(number: str, size: float) -> "Path":
    """Makes the outline of a number around the origin, at a font size in points."""
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), number, size=size)
    box, digit = path.get_extents(), TextPath((0, 0), "0", size=size).get_extents()
    return path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -digit.height / 2))


def _draw_memory(axes: "Axes", timeline: Timeline, most_held: float, page: _Page) -> None:
    from matplotlib.ticker import MaxNLocator

    for rank in range(timeline.num_ranks):
        resident = timeline.machine.held(timeline.num_ranks)[rank]
        steps = [(0.0, resident), *timeline.memory_over_time(rank)]
        steps.append((timeline.makespan, steps[-1][1]))
        axes.step(
            [time for time, _ in steps],
            [held for _, held in steps],
            where="post",
            color=_rank_colour(rank, timeline.num_ranks),
            linewidth=0.1 * page.font,
        )
    axes.set_ylim(0.0, 1.1 * most_held if most_held > 0 else 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylabel("memory", fontsize=min(0.8 * page.font, 11))
    axes.tick_params(axis="y", labelsize=min(0.8 * page.font, 11))
    axes.spines[["top", "right"]].set_visible(False)


def _rank_colour(rank: int, num_ranks: int) -> tuple[float, float, float, float]:
    import matplotlib

    return matplotlib.colormaps["viridis"](0.9 * rank / max(num_ranks - 1, 1))


def _draw_legend(figure: "Figure", charts: Sequence[_Chart], memory: bool, page: _Page) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {span.task.kind for chart in charts for span in chart.timeline.spans}
    each = [num_slots(chart.rows) for chart in charts]
    slots = max(each)
    entries: list[tuple[tuple[Patch | Line2D, ...], str]] = [
        (
            tuple(Patch(facecolor=shade(kind, slot, slots)) for slot in range(slots)),
            f"{kind.title} ({kind})",
        )
        for kind in Kind
        if kind in kinds
    ]
    for n, (name, colour) in enumerate(_AFTER):
        if any(any(_after(chart)[n]) for chart in charts):
            entries.append(((Patch(facecolor=colour),), name))
    entries.append(((Patch(facecolor=_IDLE, edgecolor="#c0c0c0"),), "idle"))
    if meaning := explain_shades((chart.timeline for chart in charts), each):
        greys = (Patch(facecolor=str(0.3 + 0.5 * n / (slots - 1))) for n in range(slots))
        entries.append((tuple(greys), f"next shade: {meaning}"))
    if memory:
        ranks = max(chart.timeline.num_ranks for chart in charts)
        lines = (
            Line2D([], [], color=_rank_colour(n, ranks)) for n in sorted({0, ranks // 2, ranks - 1})
        )
        entries.append((tuple(lines), f"memory, rank 0 to {ranks - 1}" if ranks > 1 else "memory"))
    size = 0.9 * page.font
    figure.legend(
        handles=[handle for handle, _ in entries],
        labels=[label for _, label in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=_legend_columns([label for _, label in entries], 72 * page.width / size),
        fontsize=size,
        frameon=False,
    )


def _legend_columns(labels: Sequence[str], room: float) -> int:
    """Returns the number of columns of a legend that fit; `room` is in multiples of the font size.

    In these multiples a character is about 0.55 wide, and a colour with the gaps around it 5. A
    legend fills its columns one after the other.
    """
    widths = [5 + 0.55 * len(label) for label in labels]
    for rows in range(1, len(labels)):
        columns = [widths[n : n + rows] for n in range(0, len(widths), rows)]
        if sum(map(max, columns)) <= room:
            return len(columns)
    return 1
