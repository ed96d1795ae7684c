"""Draws `schedules.png`, the picture of the README: run `python docs/draw_schedules.py`."""

import pathlib

from jaxpp.schedules import Costs, OneFOneB, Schedule, ZeroBubbleH1, ZeroBubbleV, plot, simulate

_RANKS, _MICROBATCHES = 4, 8


def main() -> None:
    """Draws three schedules of the same model, on as many ranks, at the same costs."""
    schedules: dict[str, Schedule] = {
        "1F1B": OneFOneB(),
        "ZB-H1: the backward split into input and weight gradients": ZeroBubbleH1(),
        "ZB-V: the same, and two stages a rank, placed as a V": ZeroBubbleV(),
    }
    timelines = {}
    for title, schedule in schedules.items():
        v = schedule.stages_per_rank
        table = schedule.table(_RANKS * v, _MICROBATCHES)
        timelines[title] = simulate(table, Costs().divided(v))
    plot(timelines, pathlib.Path(__file__).with_name("schedules.png"))


if __name__ == "__main__":
    main()
