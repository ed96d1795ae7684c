"""Draws `offload.svg`, what `Offload` saves at no cost: run `python docs/draw_offload.py`."""

import itertools

from drawing import EDGES, GREY, INK, PALE, beside, save
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jaxpp.schedules import CATALOGUE, Costs, Offload, Schedule, simulate

_RANKS, _MICROBATCHES = 8, 16
#: The time of a copy there and back, over that of a forward and a backward, and how it is drawn.
_COPIES = {1.0: (EDGES[1], "a copy there and back as long as a forward and a backward"),
           0.5: (EDGES[2], "half as long")}  # fmt: skip


def least(schedule: Schedule, share_of_time: float) -> tuple[float, float]:
    """The most that a rank holds without offload, and with what costs no time at all."""
    table = schedule.table_for_ranks(_RANKS, _MICROBATCHES)
    copy = 1.5 * share_of_time
    costs = Costs(offload=copy, load=copy)
    base = simulate(table, costs)
    held = before = max(base.peak_memory)
    halves = (None, range(table.num_stages // 2))
    for ahead, share, stages in itertools.product(range(6), (0.25, 0.5, 0.75, 1.0), halves):
        offload = Offload(schedule, stages=stages, share=share, ahead=ahead)
        own = simulate(offload.table_for_ranks(_RANKS, _MICROBATCHES), costs)
        if own.makespan <= base.makespan * (1 + 1e-9):
            held = min(held, max(own.peak_memory))
    return before, held


def main() -> None:
    """Draws a line for each schedule, from what it holds to what it need hold."""
    names = [name for name in CATALOGUE if name != "forward_only"]
    found = {name: {k: least(CATALOGUE[name](), k) for k in _COPIES} for name in names}
    names.sort(key=lambda name: max(before for before, _ in found[name].values()))
    figure = Figure(figsize=(752 / 72, 480 / 72))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.15, right=0.98, top=0.9, bottom=0.1)
    for y, name in enumerate(names):
        before = found[name][1.0][0]
        axes.plot((min(held for _, held in found[name].values()), before), (y, y), color=GREY, lw=1)
        axes.plot(before, y, "o", markersize=7, color=INK, markerfacecolor="white")
        for n, (k, (colour, _)) in enumerate(_COPIES.items()):
            axes.plot(found[name][k][1], y, "o", markersize=7 - 2 * n, color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, None), ylim=(-0.6, len(names) - 0.4))
    size = f"{_RANKS} ranks, {_MICROBATCHES} microbatches"
    axes.set_xlabel(f"activations that a rank holds at most, in microbatches ({size})", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PALE)
    axes.set_axisbelow(True)
    styles = [(INK, "white", "without offload"),
              *((colour, colour, text) for colour, text in _COPIES.values())]  # fmt: skip
    handles = [
        Line2D([], [], color=edge, marker="o", markerfacecolor=fill, linestyle="", label=label)
        for edge, fill, label in styles
    ]
    figure.legend(handles=handles, loc="upper right", frameon=False, labelcolor=INK, ncols=3)
    save(figure, beside(__file__, "offload.svg"))


if __name__ == "__main__":
    main()
