"""Draws `schedules.png`, the picture of the README: run `python docs/draw_schedules.py`."""

import pathlib

from jaxpp.schedules import Costs, OneFOneB, ZeroBubbleH1, ZeroBubbleV, compare, plot


def main() -> None:
    """Draws what the code of the README draws."""
    schedules = {"1F1B": OneFOneB(), "ZB-H1": ZeroBubbleH1(), "ZB-V": ZeroBubbleV()}
    costs = Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, latency=0.1)
    rows = compare(schedules, num_ranks=4, num_microbatches=8, costs=costs)
    plot(rows.timelines, pathlib.Path(__file__).with_name("schedules.png"))


if __name__ == "__main__":
    main()
