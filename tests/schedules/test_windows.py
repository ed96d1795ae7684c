"""`synthesize` chooses windows of gathers and reductions together with what ranks keep."""

import contextlib
import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    Gather,
    GPipe,
    Kind,
    Memory,
    Reduce,
    Synthesized,
    Table,
    Task,
    Windows,
    by_name,
    check,
    simulate,
    synthesize,
)
from jaxpp.schedules.building_blocks import loop, waves

F, B = Kind.F, Kind.B


def orders(placement, m):
    """All tables of whole backwards, with the microbatches of each kind and stage in order."""
    each = []
    for rank in range(max(placement) + 1):
        stages = [stage for stage, own in enumerate(placement) if own == rank]
        kinds = [Task(kind, stage, 0) for kind in (F, B) for stage in stages]
        rows = set(itertools.permutations(kinds * m))
        each.append([
            tuple(dataclasses.replace(t, microbatch=row[:n].count(t)) for n, t in enumerate(row))
            for row in rows
        ])  # fmt: skip
    for ranks in itertools.product(*each):
        table = Table(ranks, len(placement), m)
        with contextlib.suppress(ValueError):
            check(table)
            yield table


def every_way(table):
    """A table whose activations are kept, and with any of them computed again or offloaded."""
    forwards = [task for task in sorted(table.tasks, key=str) if task.kind is F]
    yield table
    for count in range(1, len(forwards) + 1):
        for some in map(frozenset, itertools.combinations(forwards, count)):
            yield table.with_recomputation(some.__contains__)
            yield from (table.with_offload(some.__contains__, ahead) for ahead in (0, 1, 2))


def timed(table, costs, memory, reduces):
    """The time and the peaks of a table, whose ranks reduce at the end what no task does."""
    made = simulate(table, costs, memory=memory)
    if reduces:
        return made.makespan, made.peak_memory
    stages = [sorted({task.stage for task in order}) for order in table.ranks]
    late, held = (
        [sum(own.of(Task(Kind.S, stage, 0)) for stage in each) for each in stages]
        for own in (costs, memory)
    )
    ends = (max(ends) + more for ends, more in zip(made.ends, late, strict=True))
    return max(ends), tuple(a + b for a, b in zip(made.peak_memory, held, strict=True))


def drawn(seed, stages):
    """Random costs and memory: times of each stage, and bytes."""
    draw = random.Random(seed)

    def each(low, high):
        return tuple(draw.randint(low, high) / 4 for _ in range(stages))

    kept = each(4, 8)
    costs = Costs(
        each(2, 8), each(2, 8), each(0, 0), gather=each(0, 6), reduce=each(0, 6),
        offload=each(0, 6), load=each(0, 6), latency=draw.choice((0, 0.5)), per="stage",
    )  # fmt: skip
    memory = Memory(kept, 0.0, tuple(-own for own in kept), recompute=tuple(0.75 * k for k in kept),
                    gather=each(0, 8), reduce=each(0, 4), per="stage")  # fmt: skip
    return costs, memory


ASKED: Any = dict(recompute=True, offload=True, gather=True, reduce=True)


@pytest.mark.parametrize(
    ("placement", "seed"),
    [((0, 1), 2), *(pytest.param((0, 1), n, marks=pytest.mark.further) for n in (0, 1, 5)),
     pytest.param((0, 0), 3, marks=pytest.mark.further)],
)  # fmt: skip
def test_nothing_beats_the_choice_on_small_tables(placement, seed):
    """Of all orders, with all windows, whose activations are kept, or some not, in one way."""
    costs, memory = drawn(seed, len(placement))
    found = [
        timed(own, costs, memory, windows.reduces)
        for table in orders(placement, 2)
        for windows in Windows().choices(table, True, True)
        if windows.held is not None
        for own in every_way(windows.added_to(table))
    ]
    peaks = sorted({max(held) for _, held in found})
    values = []
    for limit in (*peaks[:: max(1, len(peaks) // 4)], math.inf):
        own = synthesize(costs, placement, 2, memory=memory, memory_limit=limit,
                         split_backward=False, evaluations=50, **ASKED)  # fmt: skip
        assert own.value == min(value for value, held in found if max(held) <= limit)
        assert own.value == timed(own.table, costs, memory, own.windows.reduces)[0]
        assert own.lower_bound <= own.value
        values.append(own.value)
    assert values[0] > values[-1]  # the limit counts


@given(st.integers(0, 10**6), st.sampled_from(["wall", "span"]))
@settings(max_examples=25)
def test_no_table_beats_the_bound_and_each_fits(seed, objective):
    draw = random.Random(seed)
    p, v, m = draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 5)
    placement = draw.choice((loop, waves))(p, v)
    costs, memory = drawn(seed, p * v)
    # All that one rank may hold at once for one microbatch, or more.
    each: Any = memory.forward, memory.gather, memory.reduce
    least = sum(map(sum, each))
    limit = draw.choice((least, 1.5 * least, math.inf))
    asked: Any = {name: draw.random() < 0.6 for name in ASKED}
    own = synthesize(costs, placement, m, memory=memory, memory_limit=limit, objective=objective,
                     evaluations=20, **asked)  # fmt: skip
    check(own.table)
    assert own.timeline.makespan >= own.value >= own.lower_bound > 0
    assert max(own.timeline.peak_memory) <= limit
    assert {Kind.G in own.table.kinds, own.windows.held is not None} == {asked["gather"]}
    assert {Kind.S in own.table.kinds, own.windows.reduces} == {own.windows.reduces}
    # No other table of the catalogue takes less than the bound, with windows of any kind.
    for name in ("1f1b", "gpipe", "interleaved_1f1b"):
        with contextlib.suppress(ValueError):
            plain = by_name(name).table(p * v, m)
            if plain.directions == (placement,) and limit == math.inf:
                for windows in Windows().choices(plain, asked["gather"], asked["reduce"]):
                    if asked["gather"] <= (windows.held is not None):
                        made = simulate(windows.added_to(plain), costs)
                        time = made.makespan if objective == "wall" else made.longest_span
                        assert own.lower_bound <= own.value <= time + 1e-9 or asked["reduce"]


def test_a_limit_that_gathers_and_offload_keep_together():
    costs = Costs(gather=0.5, reduce=0.5, offload=0.5, load=0.5)
    memory = Memory(gather=2.0, reduce=1.0)
    limited: Any = dict(memory=memory, memory_limit=3.0, evaluations=10, gather=True, reduce=True)
    case = costs, (0, 1, 0, 1), 4
    both = synthesize(*case, offload=True, **limited)
    assert both.windows == Windows(held=1, reduces=True) and "offloaded" in both.source
    assert both.value < synthesize(*case, **limited).value
    # More stages that are held, and as much offloaded, are too much.
    more = dataclasses.replace(both.windows, held=2)
    plain = tuple(tuple(t for t in order if not t.kind.of_stage) for order in both.table.ranks)
    table = more.added_to(dataclasses.replace(both.table, ranks=plain))
    assert max(simulate(table, costs, memory=memory).peak_memory) > 3.0
    assert {*"GHSOL"} <= both.table.kinds
    # A schedule has them, too.
    own = Synthesized(costs, case[1], offload=True, **limited)
    assert own.synthesis(4, 4).table == own.table(4, 4) == both.table


def test_a_limit_that_not_even_one_microbatch_keeps_says_by_how_much():
    limited: Any = dict(memory=Memory(gather=2.0, reduce=1.0), gather=True, reduce=True)
    message = "rank 0 may hold 3.5, but a microbatch alone, with gathered .*, makes it hold 4: no"
    with pytest.raises(ValueError, match=message):
        synthesize(Costs(), (0, 1), 4, memory_limit=3.5, **limited)
    assert synthesize(Costs(), (0, 1), 4, memory_limit=4, **limited).value > 0


def test_windows_that_a_table_has_stay():
    base = Reduce(Gather(GPipe(2), held=1)).table(4, 2)
    assert Gather(Gather(GPipe(2), held=1), held=0).table(4, 2) == Gather(GPipe(2), held=1).table(
        4, 2
    )
    assert Reduce(base_of := Reduce(GPipe(2)), every=1).table(4, 2) == base_of.table(4, 2)
    assert Windows().choices(base, True, True) == [Windows(held=2, reduces=True)]
    assert Windows(held=1).choices(base, True, True) == [Windows(held=1, reduces=True)]
    assert Windows(held=1, reduces=True).added_to(base) == base
    assert Windows(held=1, reduces=True).of(GPipe(2)).table(4, 2) == base
