"""Draws `choosing.svg`, bubble against memory: run `python docs/draw_choosing.py`."""

import collections
from collections.abc import Sequence

from drawing import EDGES, GREY, INK, PALE, beside, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jaxpp.schedules import CATALOGUE, Comparison, Costs, Kind, compare

_RANKS, _MICROBATCHES, _LATENCY = 8, 16, 0.25
_WHOLE, _SPLIT = EDGES[0], EDGES[3]
_WIDEST, _HIGHEST = 18.4, 0.5


def main() -> None:
    """Draws a point for each schedule of the catalogue: with fast messages, and with slow ones."""
    figure = Figure(figsize=(752 / 72, 640 / 72))
    fast, slow = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.075, right=0.99, top=0.93, bottom=0.075, hspace=0.13)
    _draw(fast, Costs(), "messages take no time")
    title = f"a message takes {_LATENCY}, where a forward, and each half of a backward, takes 1"
    _draw(slow, Costs(latency=_LATENCY), title)
    size = f"{_RANKS} ranks, {_MICROBATCHES} microbatches"
    slow.set_xlabel(f"activations that a rank holds at most, in microbatches ({size})", color=INK)
    _explain(figure)
    save(figure, beside(__file__, "choosing.svg"))


def _draw(axes: Axes, costs: Costs, title: str) -> None:
    schedules = {name: make() for name, make in CATALOGUE.items()}
    points = compare(schedules, _RANKS, _MICROBATCHES, costs)
    for point in points:
        table = schedules[point.schedule].table_for_ranks(_RANKS, _MICROBATCHES)
        colour = _SPLIT if Kind.W in {task.kind for task in table.tasks} else _WHOLE
        fill = "white" if point.parameters == 2 else colour
        at = point.peak_memory, point.bubble
        axes.plot(*at, "o", markersize=7, color=colour, markerfacecolor=fill)
    axes.set(xlim=(0, _WIDEST), ylim=(0, _HIGHEST), xticks=range(0, 19, 2))
    _label(axes, points)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_ylabel("idle share of a step (bubble)", color=INK)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PALE)
    axes.set_axisbelow(True)
    axes.annotate("better", (0.4, 0.02), (1.6, 0.09), color=GREY, fontsize=9,
                  arrowprops={"arrowstyle": "-|>", "color": GREY})  # fmt: skip


def _label(axes: Axes, points: Sequence[Comparison]) -> None:
    """Writes the names beside the points: to the right, or where there is room."""
    names = collections.defaultdict(list)
    for point in points:
        names[point.peak_memory, point.bubble].append(point.schedule)
    taken = [(x - 0.15, x + 0.15, y - 0.01, y + 0.01) for x, y in names]
    for (x, y), own in sorted(names.items()):
        text = ", ".join(own).replace("forward_only", "forward_only (no backward)")
        width = 0.14 * len(text)
        right, left = x + 0.15, x - 0.15 - width
        places = [(x + 0.25, y), (x - 0.25 - width, y)]
        places += [(right, y + 0.03), (right, y - 0.03), (left, y - 0.03), (left, y + 0.03)]
        for start, height in places:
            box = (start, start + width, height - 0.013, height + 0.013)
            free = not any(
                box[0] < b and a < box[1] and box[2] < d and c < box[3] for a, b, c, d in taken
            )
            if free and start > 0 and start + width < _WIDEST:
                break
        taken.append(box)
        axes.text(start, height, text, fontsize=9, color=INK, va="center")


def _explain(figure: Figure) -> None:
    styles = [
        ("backward in halves", _SPLIT, _SPLIT),
        ("whole backward", _WHOLE, _WHOLE),
        ("each parameter is on two ranks", GREY, "white"),
    ]
    handles = [
        Line2D([], [], color=edge, marker="o", markerfacecolor=fill, linestyle="", label=label)
        for label, edge, fill in styles
    ]
    figure.legend(handles=handles, loc="upper right", frameon=False, labelcolor=INK, ncols=3)


if __name__ == "__main__":
    main()
