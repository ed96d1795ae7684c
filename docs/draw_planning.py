"""Draws `planning.png`: run `python docs/draw_planning.py`."""

import itertools
import pathlib

from jaxpp.planning import Problem, Profile
from jaxpp.planning._plan import solve
from jaxpp.schedules import OneFOneB, plot, simulate

_RANKS, _MICROBATCHES = 4, 8
_LAYERS = (1.0,) * 12 + (5.0,)


def main() -> None:
    """Draws 1F1B at an even cut and at a planned one, and the plan, of a model with a slow head."""
    count = len(_LAYERS)
    third, both = tuple(t / 3 for t in _LAYERS), tuple(2 * t / 3 for t in _LAYERS)
    found = Profile(
        (0.0,) * (count - 1), count, _LAYERS, third, both, (0.0, *third[1:]), third,
        (1,) * count, (0,) * count, (1,) * count,
    )  # fmt: skip

    def planned(*schedules: str):
        machine = dict(memory_limit=1e9, bandwidth=1e9)
        return solve(Problem({_MICROBATCHES: found}, _RANKS, schedules, **machine))

    bounds = [round(count * n / _RANKS) for n in range(_RANKS + 1)]
    even = found.costs_of([b - a for a, b in itertools.pairwise(bounds)])
    best = planned("1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v", "synthesized")
    timelines = {
        "1F1B, even cut": simulate(OneFOneB().table(_RANKS, _MICROBATCHES), even),
        "1F1B, planned cut": planned("1f1b").timeline,
        f"the plan: {best.schedule}, units {best.units}": best.timeline,
    }
    plot(timelines, pathlib.Path(__file__).with_name("planning.png"))


if __name__ == "__main__":
    main()
