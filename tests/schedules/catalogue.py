"""Tables of every schedule of the catalogue, for property-based tests."""

import inspect
import itertools

from hypothesis import strategies as st

from jaxpp.schedules import CATALOGUE, Schedule, Table, by_name

_KNOBS = {"stages_per_rank": (1, 2, 3), "num_waves": (1, 2), "slices": (1, 2, 3)}


def _variants(name: str) -> list[Schedule]:
    known = inspect.signature(CATALOGUE[name]).parameters
    variants = []
    for knob, values in _KNOBS.items():
        for value in values if knob in known else ():
            try:
                variants.append(by_name(name, **{knob: value}))
            except ValueError:  # some need two stages on a rank, or more
                assert value == 1, f"{name} has no variant with {knob}={value}"
    return variants or [by_name(name)]


#: Every schedule; with several values of what says how many stages a rank has.
SCHEDULES: list[Schedule] = list(
    dict.fromkeys(schedule for name in CATALOGUE for schedule in _variants(name))
)


def valid_size(schedule: Schedule, ranks: int, microbatches: int) -> tuple[int, int]:
    """The first size that a schedule takes, from the one given on."""
    sizes = itertools.product(range(ranks, ranks + 4), range(microbatches, microbatches + 32))
    return next((p, m) for p, m in sizes if schedule.broken_rule(p, m) is None)


@st.composite
def tables(draw, max_ranks: int = 6, max_microbatches: int = 16) -> Table:
    """Tables of any schedule, of few ranks and microbatches, or as many as it needs.

    Any of its microbatches' stages may be recomputed.
    """
    schedule = draw(st.sampled_from(SCHEDULES))
    size = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    p, m = valid_size(schedule, *size)
    table = schedule.table(p * schedule.stages_per_rank, m)
    if table.forward_only or not draw(st.booleans()):
        return table
    random = draw(st.randoms(use_true_random=False))
    return table.with_recomputation(lambda task: random.random() < 0.5)
