"""Draws tables and timelines: in the terminal, and as pictures."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxpp.schedules._simulate import Timeline, simulate
from jaxpp.schedules._table import Kind, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

# For each kind: its name, and the colours of a rank's first chunk and of its last.
_STYLES: dict[Kind, tuple[str, str, str]] = {
    Kind.F: ("forward", "#2f6db3", "#a5c8ea"),
    Kind.B: ("backward", "#3c8a4c", "#aad9b0"),
    Kind.I: ("input gradient", "#1f7f6d", "#8fd0bf"),
    Kind.W: ("weight gradient", "#d8a23a", "#f4e0ab"),
}
_MARGIN_INCHES = 0.8
_DIGIT_POINTS = 0.64  # the width of a digit, for a font size of one point


def to_text(table: Table) -> str:
    """Draws a table for a terminal, at unit costs: F, I and W take one column, B takes two.

    Args:
      table: the table; its stages are a chain.

    Returns:
      A line for each rank. `F3` is the forward of microbatch 3, or `F2.3` that of stage 2 where
      ranks have several stages; a dot is an idle rank.

    Raises:
      ScheduleError: the table deadlocks.

    >>> from jaxpp.schedules import OneFOneB
    >>> print(to_text(OneFOneB().table(num_stages=3, num_microbatches=3)))
    rank 0 | F0 F1 F2 .  .  .  .  B0 == .  B1 == .  B2 ==
    rank 1 | .  F0 F1 .  .  B0 == F2 B1 == .  B2 == .  .
    rank 2 | .  .  F0 B0 == F1 B1 == F2 B2 == .  .  .  .
    """
    timeline = simulate(table)
    several = table.num_stages > table.num_ranks
    rows = [["."] * round(timeline.makespan) for _ in table.ranks]
    for span in timeline.spans:
        start, end = round(span.start), round(span.end)
        label = str(span.task) if several else f"{span.task.kind}{span.task.microbatch}"
        rows[span.rank][start:end] = [label, *["="] * (end - start - 1)]
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(table.num_ranks - 1))
    return "\n".join(
        f"rank {rank:>{digits}} | "
        + " ".join("=" * width if cell == "=" else cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def plot(timelines: Timeline | Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draws timelines as a picture: a row for each rank, a colour for each kind of task.

    Cells have the number of their microbatch where it is legible. Where a rank has several stages,
    later ones are lighter. Several timelines are drawn one above the other, on one time axis.

    Args:
      timelines: a timeline, or several by title.
      path: where to write; the suffix gives the format, `.png` or `.svg` for instance.

    Raises:
      ValueError: there is no timeline, or one without tasks.

    >>> import pathlib, tempfile
    >>> from jaxpp.schedules import GPipe
    >>> timeline = simulate(GPipe().table(num_stages=4, num_microbatches=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot({"GPipe": timeline}, pathlib.Path(folder, "gpipe.png"))
    """
    # Imported here, so that only who draws waits for matplotlib; and without pyplot, which would
    # keep the figure and look for a window system.
    from matplotlib.figure import Figure

    titled = timelines if isinstance(timelines, Mapping) else {"": timelines}
    if not titled or not all(timeline.spans for timeline in titled.values()):
        raise ValueError(
            f"plot needs timelines that have tasks, got {titled!r}; simulate a table to make one."
        )
    horizon = max(timeline.makespan for timeline in titled.values())
    shortest = min(
        (s.end - s.start for t in titled.values() for s in t.spans if s.end > s.start),
        default=horizon,
    )
    # Wide enough for two digits in the shortest task, within what a screen can show.
    width = min(max(8.0, _MARGIN_INCHES + 0.15 * horizon / shortest), 28.0)
    heights = [0.3 + 0.25 * timeline.num_ranks for timeline in titled.values()]
    figure = Figure(figsize=(width, sum(h + 0.3 for h in heights) + 0.9), layout="constrained")
    grid = figure.subplots(
        len(titled), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    points_per_unit = 72 * (width - _MARGIN_INCHES) / horizon
    font = 10 * max(1.0, width / 14)  # wide pictures are looked at from further away
    for axes, (title, timeline) in zip(grid[:, 0], titled.items(), strict=True):
        _draw_ranks(axes, timeline, points_per_unit)
        axes.tick_params(axis="x", labelsize=0.8 * font, labelbottom=True)
        axes.tick_params(axis="y", labelsize=min(0.8 * font, 11), length=0)
        measures = f"makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}"
        axes.set_title(f"{title}: {measures}" if title else measures, loc="left", fontsize=font)
        axes.set_xlim(0, horizon)
    grid[-1, 0].set_xlabel("time", fontsize=0.9 * font)
    _draw_legend(figure, list(titled.values()), 0.9 * font)
    figure.savefig(path, dpi=160)


def _draw_ranks(axes: "Axes", timeline: Timeline, points_per_unit: float) -> None:
    stages = [
        sorted({span.task.stage for span in timeline.spans if span.rank == rank})
        for rank in range(timeline.num_ranks)
    ]
    edge = min(0.5, 0.06 * points_per_unit * min(s.end - s.start for s in timeline.spans))
    digits = len(str(max(span.task.microbatch for span in timeline.spans)))
    for rank in range(timeline.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        colours = [
            _shade(s.task.kind, stages[rank].index(s.task.stage), len(stages[rank])) for s in spans
        ]
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in spans],
            (rank - 0.45, 0.9),
            facecolors=colours,
            edgecolors="white",
            linewidth=edge,
        )
        for span, colour in zip(spans, colours, strict=True):
            room = points_per_unit * (span.end - span.start) - 1.0
            size = min(8.0, room / (_DIGIT_POINTS * digits))
            if size >= 4.5:
                axes.text(
                    (span.start + span.end) / 2,
                    rank,
                    str(span.task.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color="white" if _luminance(colour) < 0.55 else "#202020",
                    clip_on=True,
                )
    axes.set_ylim(timeline.num_ranks - 0.4, -0.6)  # rank 0 at the top
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.set_facecolor("#f1f1f1")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: "Figure", timelines: Sequence[Timeline], font: float) -> None:
    from matplotlib.patches import Patch

    kinds = {span.task.kind for timeline in timelines for span in timeline.spans}
    patches = [
        Patch(facecolor=_shade(kind, 0, 1), label=f"{_STYLES[kind][0]} ({kind})")
        for kind in Kind
        if kind in kinds
    ]
    patches.append(Patch(facecolor="#f1f1f1", edgecolor="#c0c0c0", label="idle"))
    if any(len({s.task.stage for s in t.spans}) > t.num_ranks for t in timelines):
        patches.append(Patch(facecolor="none", label="lighter: a later stage of the rank"))
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        fontsize=font,
        frameon=False,
    )


def _shade(kind: Kind, chunk: int, num_chunks: int) -> Colour:
    from matplotlib.colors import to_rgb

    _, first, last = _STYLES[kind]
    part = chunk / max(num_chunks - 1, 1)
    red, green, blue = (
        a + part * (b - a) for a, b in zip(to_rgb(first), to_rgb(last), strict=True)
    )
    return red, green, blue


def _luminance(colour: Colour) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
