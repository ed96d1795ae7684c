"""The synthesizer's tables fit, are no worse than the catalogue, and no better than the bound."""

import csv
import dataclasses
import itertools
import math
import pathlib
import random
import sys
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthesis_cases import best_of_catalogue, published_row, v_row
from jaxpp.schedules import (
    Costs,
    Kind,
    Memory,
    OneFOneB,
    ZeroBubbleV,
    by_name,
    check,
    simulate,
    synthesize,
)
from jaxpp.schedules._synthesis._bounds import lower_bound
from jaxpp.schedules._synthesis._justify import Justifier
from jaxpp.schedules._synthesis._portfolio import Rules, one_at_a_time
from jaxpp.schedules._synthesis._synthesize import Case
from jaxpp.schedules._synthesis._tabu import escape
from jaxpp.schedules.building_blocks import loop, waves
from jaxpp.schedules.simulator import evaluate, list_schedule

TABLE5 = pathlib.Path(__file__).parent / "data" / "zero_bubble_table5.csv"
ROWS = [row for row in csv.DictReader(TABLE5.open()) if row["schedule"] in ("ZB-1p", "ZB-2p")]
SMALL = [row for row in ROWS if row["model"] == "1.5B" and int(row["m"]) < 64]


@dataclasses.dataclass(frozen=True)
class Instance:
    """Arguments of `synthesize`."""

    costs: Costs
    placement: tuple[int, ...]
    microbatches: int
    memory: Memory
    limit: float

    def problem(self, objective: Literal["wall", "span"] = "wall", split=True):
        limits = [self.limit] * (max(self.placement) + 1)
        fields = self.costs, (self.placement,), self.microbatches, self.memory, limits
        return Case(*fields, objective, None, split).problem(split)

    def synthesize(self, **options: Any):
        given: Any = {"evaluations": 60, "memory": self.memory, "memory_limit": self.limit}
        return synthesize(self.costs, self.placement, self.microbatches, **{**given, **options})


@st.composite
def instances(draw, most_ranks=4, most_microbatches=7):
    p, v = draw(st.integers(1, most_ranks)), draw(st.integers(1, 2))
    placement = draw(st.sampled_from([loop, waves]))(p, v)
    times = st.tuples(*[st.integers(1, 6)] * (p * v))
    freed = draw(st.integers(0, 3))
    return Instance(
        Costs(*(draw(times) for _ in "FIW"), latency=draw(st.integers(0, 2))),
        placement,
        draw(st.integers(1, most_microbatches)),
        Memory(4, -freed, freed - 4, per="stage"),
        4 * v * draw(st.sampled_from([1, 1.5, 2, 3, math.inf])),
    )


@pytest.mark.more
@given(instances(), st.sampled_from(["wall", "span"]), st.integers(0, 3))
@settings(max_examples=25)
def test_the_table_is_sound_and_between_the_bound_and_the_catalogue(case, objective, seed):
    found = case.synthesize(objective=objective, seed=seed)
    check(found.table, kinds={Kind.F, Kind.I, Kind.W})
    assert found.table.directions == (case.placement,)
    assert max(case.memory.peaks(found.table)) <= case.limit
    timeline = simulate(found.table, case.costs)
    value = timeline.makespan if objective == "wall" else timeline.longest_span
    assert found.value == value >= found.lower_bound
    if objective == "wall" and case.memory == Memory(4, 0, -4, per="stage"):
        sizes = case.placement, case.microbatches
        assert value <= best_of_catalogue(case.costs, *sizes, case.limit / 4)


def test_the_same_seed_gives_the_same_result():
    choose = random.Random(1)
    scale = [choose.uniform(0.8, 1.2) for _ in range(8)]
    case = Instance(Costs(scale, scale, scale), waves(4), 8, Memory(per="stage"), 5)
    results = [case.synthesize(seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert results[0] == results[1]
    assert any(result != results[0] for result in results)  # It does depend on chance.


@pytest.mark.parametrize("seed", [2, *(pytest.param(n, marks=pytest.mark.more) for n in (5, 6))])
def test_more_evaluations_never_give_a_worse_table(seed):
    """Also where tabu search, or what justifies its results, is cut short."""
    choose = random.Random(seed)
    forward, inputs, weights = (
        tuple(float(choose.randint(1, 30)) for _ in range(9)) for _ in range(3)
    )
    costs = Costs(forward, inputs, weights, latency=3.0)
    memory = Memory(per="stage")
    case = Instance(costs, (0, 2, 1, 1, 0, 2, 2, 1, 0), 8, memory, 5.0)
    numbers = (1, 30, 99, 100, 101, 320, 1300, 1301, 1350)
    values = [case.synthesize(evaluations=n).value for n in numbers]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_a_table_of_eager_ranks_is_found_where_stages_lie_irregularly():
    """Backwards first, older microbatches first: no rank that waits gets as far at once."""
    choose = random.Random(4)
    forward, inputs, weights = (
        tuple(float(choose.randint(1, 30)) for _ in range(9)) for _ in range(3)
    )
    costs = Costs(forward, inputs, weights, latency=3.0)
    found = synthesize(costs, (0, 2, 1, 1, 0, 2, 2, 1, 0), 8, evaluations=1)
    assert found.gap == 0


@pytest.mark.more
@given(instances(most_ranks=3, most_microbatches=4), st.sampled_from(["wall", "span"]))
@settings(max_examples=8)
def test_the_bound_is_not_above_what_is_proved_optimal(case, objective):
    pytest.importorskip("ortools")
    exact = case.synthesize(objective=objective, exact=0.5)
    assert lower_bound(case.problem(objective)) <= exact.value * (1 + 1e-9)
    assert exact.lower_bound <= exact.value <= case.synthesize(objective=objective).value


@given(instances(), st.sampled_from(["wall", "span"]), st.integers(0, 2**32))
@settings(max_examples=30)
def test_no_order_at_all_beats_the_bound(case, objective, seed):
    choose = random.Random(seed)  # a number of `st.randoms` may be as large as floats can be
    problem = case.problem(objective)
    rules = Rules(problem, lower_bound(problem))
    rule = choose.choice(rules.grid())
    for _ in range(5):
        rule = rules.near(rule, choose)
        found = list_schedule(problem, rule)
        assert found is not None and problem.fits(orders := found[0])
        times = evaluate(problem, orders)
        assert times is not None and times.value >= lower_bound(problem) * (1 - 1e-9)


@given(instances(), st.sampled_from(["wall", "span"]), st.integers(0, 100))
@settings(max_examples=30)
def test_justified_orders_are_sound_and_no_worse(case, objective, seed):
    problem = case.problem(objective)
    choose = random.Random(seed)
    rules = Rules(problem, lower_bound(problem))
    found = list_schedule(problem, rules.near(choose.choice(rules.grid()), choose))
    assert found is not None
    start, ends = found
    before = evaluate(problem, start)
    assert before is not None
    assert ends == [before.ends[order[-1]] for order in start]
    orders = Justifier(problem).improve(start, before)
    check(problem.to_table(orders))
    assert problem.fits(orders)
    after = evaluate(problem, orders)
    assert after is not None and after.value <= before.value


def test_justification_brings_scattered_idle_time_together():
    """ZB-V waits in each round of its end; moved late and early again, it is proved optimal."""
    case = Instance(Costs(30, 30, 20, latency=1).divided(2), waves(3), 8, Memory(7, -4, -3), 42)
    problem = case.problem("span")
    start = problem.to_orders(ZeroBubbleV().table(6, 8))
    before = evaluate(problem, start)
    assert before is not None and before.value == 8 * 80 + 30
    after = evaluate(problem, Justifier(problem).improve(start, before))
    assert after is not None and after.value == lower_bound(problem) == 8 * 80 + 22


@given(case=instances(), objective=st.sampled_from(["wall", "span"]), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_local_search_keeps_orders_sound_and_agrees_with_the_simulator(case, objective, seed):
    problem = case.problem(objective)
    start = one_at_a_time(problem)
    value, orders = escape(problem, start, 60, target=0.0, seed=seed)
    table = problem.to_table(orders)
    check(table)
    assert problem.fits(orders)
    timeline = simulate(table, case.costs)
    assert value == (timeline.makespan if objective == "wall" else timeline.longest_span)
    before = evaluate(problem, start)
    assert before is not None and value <= before.value


def test_tabu_search_gets_further_where_stages_lie_irregularly(monkeypatch):
    """Further than the same search that may go back at once."""
    choose = random.Random(2)
    forward, inputs, weights = (
        tuple(float(choose.randint(1, 30)) for _ in range(12)) for _ in range(3)
    )
    placement = (0, 2, 1, 1, 0, 2, 2, 1, 0, 1, 2, 0)
    problem = Instance(Costs(forward, inputs, weights), placement, 6, Memory(), math.inf).problem()
    start = one_at_a_time(problem)
    found = escape(problem, start, 400, 0.0, seed=0)[0]
    assert found < escape(problem, start, 100, 0.0, seed=0)[0]
    monkeypatch.setattr("jaxpp.schedules._synthesis._tabu._TENURE", (0, 0))
    assert found < escape(problem, start, 400, 0.0, seed=0)[0]


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("place", [loop, waves])
def test_memory_for_one_microbatch_is_enough(place, v):
    case = Instance(Costs(), place(3, v), 4, Memory(), v)
    problem = case.problem()
    for rule in Rules(problem, lower_bound(problem)).grid():
        found = list_schedule(problem, rule)
        assert found is not None and problem.fits(found[0])


@pytest.mark.parametrize(
    ("p", "m", "v", "limit", "optimum"),
    [(4, 8, 1, math.inf, 27), (8, 16, 1, math.inf, 55), (4, 8, 2, 8, 25.5), (4, 8, 2, 4, 29.5)],
)
def test_the_proved_optima(p, m, v, limit, optimum):
    found = synthesize(Costs(), waves(p, v), m, memory=Memory(per="stage"), memory_limit=limit)
    assert found.value == optimum
    assert found.lower_bound == optimum


def test_the_exact_solver_proves_the_optimum_of_v_min():
    pytest.importorskip("ortools")
    found = synthesize(Costs(), waves(2), 4, memory_limit=1, evaluations=10, exact=20.0)
    assert found.gap == 0


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in SMALL else pytest.mark.slow) for row in ROWS],
    ids=lambda row: "-".join(row[key] for key in ("schedule", "model", "p", "m")),
)
def test_at_or_below_the_published_bubble_rate(row):
    result = published_row(row)
    assert result["found"] <= result["published"]


@pytest.mark.parametrize(("p", "m"), [(8, 24), pytest.param(32, 128, marks=pytest.mark.slow)])
def test_a_v_is_no_worse_than_the_greedy_search_of_zb_v_and_proved_optimal(p, m):
    row = next(row for row in ROWS if row["model"] == "28.3B")
    result = v_row(row, p, m, evaluations=100)
    assert result["good"] and result["found"] < result["ZB-V"]
    assert result["gap"] < 1e-9


@pytest.mark.parametrize("limit", [4.0, 6.0, 8.0])
def test_unequal_stages_at_any_limit_are_close_to_the_bound(limit):
    choose = random.Random(0)
    scale = [choose.uniform(0.8, 1.2) for _ in range(8)]
    costs = Costs(scale, scale, scale)
    found = synthesize(costs, loop(8), 24, memory_limit=limit, evaluations=400)
    assert found.value <= best_of_catalogue(costs, loop(8), 24, limit)
    assert found.gap < {4.0: 0.12, 6.0: 0.06, 8.0: 0.03}[limit]


def test_a_result_is_a_schedule_of_its_size():
    found = synthesize(Costs(), (0, 1, 2), 4)
    assert found.schedule.table(3, 4) is found.table
    assert isinstance(hash(found.schedule), int)


def test_two_directions_are_no_worse_than_dualpipe_and_chimera():
    """With what each direction costs; and the table fits, and is one of two directions."""
    choose = random.Random(0)
    there, p, m = tuple(range(4)), 4, 8
    placement = (there, there[::-1])
    scale = [choose.uniform(0.8, 1.2) for _ in there]
    memory, limit = Memory(7, -4, -3), 42.0
    for costs in (Costs(), Costs(scale, scale, scale, latency=0.1)):
        found = synthesize(costs, placement, m, memory=memory, memory_limit=limit, evaluations=200)
        check(found.table)
        assert found.table.directions == placement
        assert found.table.direction_of == (0, 1) * (m // 2)
        assert max(memory.peaks(found.table)) <= limit
        assert found.lower_bound <= found.value == simulate(found.table, costs).makespan
        for name in ("dualpipe", "chimera"):
            table = by_name(name).table(p, m)
            assert found.value <= simulate(table, costs, overlap="none").makespan
    # One direction is the case of one: the same table, however its placement is given.
    assert synthesize(Costs(), (there,), m) == synthesize(Costs(), there, m)


def test_a_whole_backward_that_costs_less_than_its_halves_stays_whole():
    costs = Costs(backward=1.25)
    found = synthesize(costs, loop(4), 8)
    best = simulate(OneFOneB().table(4, 8), costs).makespan
    assert found.value <= best
    # The last rank: 3 forwards before it, its own F and I, and after them 3 I and a W of 0.25.
    assert found.lower_bound == 3 + 8 * 2 + 3 + 0.25
    assert any(task.kind is Kind.B for task in found.table.tasks)


def test_backwards_stay_whole_where_they_must():
    found = synthesize(Costs(), loop(4), 8, split_backward=False)
    check(found.table, kinds={Kind.F, Kind.B})
    assert found.value == found.lower_bound == 33


def test_stages_may_be_a_graph():
    inputs = ((), (0,), (0,), (1, 2))
    found = synthesize(Costs(latency=0.5), (0, 1, 2, 1), 6, memory_limit=5, stage_inputs=inputs)
    assert found.table.stage_inputs == inputs
    check(found.table)
    assert found.lower_bound <= found.value


def test_a_stage_may_read_a_later_one():
    found = synthesize(Costs(), (0, 1), 2, stage_inputs=((1,), ()), evaluations=1)
    check(found.table)
    assert found.lower_bound == found.value == synthesize(Costs(), (1, 0), 2).value


def test_costs_may_depend_on_the_microbatch():
    costs = Costs(forward=lambda task: 1.0 + task.microbatch % 2)
    found = synthesize(costs, loop(3), 6)
    assert found.value == simulate(found.table, costs).makespan >= found.lower_bound


def test_a_limit_that_one_microbatch_breaks_is_an_error():
    with pytest.raises(ValueError, match=r"rank 0 may hold 0\.5, but .* hold 1: .* to 1 or more"):
        synthesize(Costs(), waves(2), 4, memory_limit=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": (0, 2)}, "without gaps"),
        ({"placement": ((0, 1), (1, 0)), "num_microbatches": 3}, "3 microbatches .* use 4"),
        ({"placement": ((0, 1), (1, 0, 1))}, "in each direction, got 2, 3 stages"),
        ({"memory_limit": [1.0]}, "1 numbers, but the placement has 2 ranks"),
        ({"num_microbatches": 0}, "at least 1"),
        ({"objective": "bubble"}, "'wall' or 'span'"),
        ({"placement": (0.0, 1.0)}, "numbered from 0"),
        ({"memory_limit": math.nan}, "memory_limit of rank 0 is a number, got nan"),
        ({"memory_limit": [1.0, None]}, "memory_limit of rank 1 is a number, got None"),
        ({"evaluations": -1}, "evaluations is an integer of at least 0, got -1"),
        ({"seed": "x"}, "seed is an integer, got 'x'"),
        ({"exact": math.nan}, "exact is a number of at least 0, got nan"),
        ({"costs": Costs(1.7e308)}, r"is 1\.7e\+308; a cost is .* and less than 1e\+100"),
        ({"stage_inputs": ((1,), (0,))}, r"stages \[0, 1, 0\] wait for each other in a circle"),
        ({"stage_inputs": ((0,), (0,))}, r"stages \[0, 0\] wait for each other in a circle"),
        ({"stage_inputs": ((),)}, "for each of the 2 stages the numbers of those"),
        ({"stage_inputs": ((), (2,))}, "for each of the 2 stages the numbers of those"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given: Any = {"costs": Costs(), "placement": (0, 1), "num_microbatches": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        synthesize(**given)


def test_an_option_that_there_is_not_is_named():
    with pytest.raises(TypeError, match="synthesize has no option 'evaluation'; did you mean eval"):
        synthesize(Costs(), (0, 1), 2, evaluation=3)  # pyright: ignore[reportCallIssue]


def test_the_exact_solver_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpp\[exact\]'"):
        synthesize(Costs(), waves(2), 4, memory_limit=1, evaluations=1, exact=1.0)


@pytest.mark.parametrize(("p", "m", "idle"), [(2, 5, 6), (3, 8, 22), (4, 12, 38)])
def test_the_bound_of_a_v_counts_what_memory_and_transfers_cost(p, m, idle):
    """With p microbatches of memory, a V with short weight gradients has to wait: proved exactly.

    The last rank fills its memory before an input gradient comes back to it; from then on each of
    its forwards waits for an input and a weight gradient. When the last one has ended, the first
    rank still waits for that microbatch's way up, down and up again. The least idle time is 9, 22
    and at most 38.
    """
    costs = Costs(30, 30, 20, latency=1).divided(2)
    case = Instance(costs, waves(p), m, Memory(7, -4, -3), 2 * p * 7)
    assert lower_bound(case.problem("span")) == m * 80 + idle


def test_bounds_grow_as_memory_shrinks():
    bounds = [
        lower_bound(Instance(Costs(), loop(4), 12, Memory(), limit).problem())
        for limit in (math.inf, 4, 3, 2, 1)
    ]
    assert all(a <= b for a, b in itertools.pairwise(bounds))
    assert bounds[-1] == 12 * (4 * 2 + 1)
