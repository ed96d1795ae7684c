"""The plan is the fastest candidate that fits, never worse than the catalogue at an even cut."""

import dataclasses
import io
import itertools
import json
import math
import re
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.planning._plan import solve
from jaxpp.planning._problem import MADE, SCHEDULES, Problem
from jaxpp.planning._profile import Profile
from jaxpp.planning.search import Cutter
from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import Costs, Kind, Machine, OneFOneB, Task, by_name, check, simulate
from tests.helpers import assert_close

MEBIBYTE = 1 << 20


def profile_of(times, kept=None, parameters=None):
    """A profile of made-up units: a forward takes a third of a unit's time."""
    count = len(times)
    kept = kept or (MEBIBYTE,) * count
    third = tuple(time / 3 for time in times)
    return Profile(
        (1e3,) * (count - 1), count, tuple(times), third, tuple(2 * t for t in third),
        (0.0, *third[1:]), third, tuple(kept), (0,) * count, tuple(parameters or (0,) * count),
    )  # fmt: skip


def problem_of(found, limit=math.inf, schedules=SCHEDULES, ranks=4, microbatches=8, **options):
    fields: dict[str, Any] = dict(memory_limit=limit, speed=(1.0,) * ranks)
    return Problem({microbatches: found}, ranks, tuple(schedules), **(fields | options))


def cutter_of(problem, microbatches, name, ways=("R", "O")):
    return Cutter(problem.settings[microbatches], by_name(name), ways)


def planned(found, limit=math.inf, **options):
    return solve(problem_of(found, limit, **options))


def at_even_cut(found, name, ranks=4, microbatches=8):
    """The time of a schedule whose stages have as many units."""
    table = by_name(name).table_for_ranks(ranks, microbatches)
    count = len(found.costs)
    at = [round(count * n / table.num_stages) for n in range(table.num_stages + 1)]

    def sums(values):
        return tuple(sum(values[a:b]) for a, b in itertools.pairwise(at))

    whole, halves = (found.forward, found.backward), (found.input_grad, found.weight_grad)
    (forward, backward), (inputs, weights) = map(sums, whole), map(sums, halves)
    return simulate(table, Costs(forward, inputs, weights, backward)).makespan


UNEVEN = (0.2, *(1.0,) * 14, 4.0)


@pytest.mark.parametrize(("ranks", "microbatches", "gain"), [(4, 8, 1.31), (8, 16, 1.36)])
def test_a_plan_of_delayed_steps_does_not_drain(ranks, microbatches, gain, tmp_path):
    """Parameters and the sums of gradients are held once more; a limit counts them."""
    found = profile_of((1.0,) * 16, parameters=(10,) * 16)
    sizes: dict[str, Any] = dict(schedules=["1f1b"], ranks=ranks, microbatches=microbatches)
    one, many = planned(found, **sizes), planned(found, steps=8, **sizes)
    assert many.units == one.units and round(one.seconds / many.seconds, 2) == gain
    assert many.lower_bound <= many.seconds and many.lower_bound < one.lower_bound
    assert f"{microbatches} microbatches, a step of 8 in one program: " in str(many)
    more = 2 * 10 * 16 / ranks
    assert np.subtract(many.peak_bytes, one.peak_bytes).tolist() == [more] * ranks
    assert many.order == one.order and many.timeline.table.num_microbatches == 8 * microbatches
    many.save(tmp_path / "plan.json")
    assert jaxpp.Plan.load(tmp_path / "plan.json") == many
    tight = planned(found, max(one.peak_bytes), steps=8, **sizes)
    assert tight.activations[0] == "R" and not any(one.activations)


def test_what_gains_most_by_delay_is_chosen_and_each_step_has_its_update():
    found = dataclasses.replace(profile_of((3.0,) * 4, parameters=(10,) * 4), memory_bandwidth=35.0)
    options: dict[str, Any] = dict(schedules=["1f1b", "gpipe"])
    plan = planned(found, 1e9, steps=8, **options)
    assert plan.schedule == "1f1b"
    update = 10 * (2 * 4 - 1) / 35
    assert plan.seconds == pytest.approx((8 * 8 + 3) * 3 / 8 + update)
    others = planned(found, 1e9, **options).others
    assert plan.others[0].seconds == pytest.approx(others[0].seconds)  # GPipe gains nothing


def test_a_head_that_takes_long_gets_fewer_layers_beside_it():
    best = planned(profile_of(UNEVEN), schedules=["1f1b"])
    assert sum(best.units) == len(UNEVEN)
    assert best.units[-1] < best.units[0]
    assert best.seconds < 0.85 * at_even_cut(profile_of(UNEVEN), "1f1b")


@pytest.mark.more
@pytest.mark.parametrize("times", [(1.0,) * 16, UNEVEN, tuple(np.linspace(1, 3, 20)), (1, 1, 1, 9)])
def test_no_schedule_of_the_catalogue_is_faster_at_an_even_cut(times):
    found = profile_of(times)
    plan = planned(found)
    assert plan.seconds <= min(at_even_cut(found, name) for name in SCHEDULES[:-2]) + 1e-12
    assert plan.lower_bound <= plan.seconds
    assert [c.seconds for c in plan.others] == sorted(c.seconds for c in plan.others)
    assert all(c.reason for c in plan.others)


def test_an_even_cut_is_taken_where_another_gains_next_to_nothing():
    problem = problem_of(profile_of((*(1.0,) * 7, 1.01)), schedules=["1f1b"], ranks=2)
    cutter = cutter_of(problem, 8, "1f1b")
    uneven, even = cutter.kept((0, 3, 8)), cutter.kept((0, 4, 8))
    cutter._known.update({uneven: (0.0, 1.0, 1.0), even: (0.0, 1.009, 1.0)})
    assert cutter.even_if_as_fast(uneven) == even
    cutter._known[even] = 0.0, 1.011, 1.0
    assert cutter.even_if_as_fast(uneven) == uneven
    cutter._known[even] = 1.0, 1.0, 1.0  # it does not fit
    assert cutter.even_if_as_fast(uneven) == uneven
    for middle, units in ((0.02, (4, 5)), (0.2, (5, 4))):
        found = profile_of((*(1.0,) * 4, middle, *(1.0 + middle / 2,) * 4))
        assert planned(found, schedules=["1f1b"], ranks=2).units == units


def test_stages_compute_again_where_activations_do_not_fit_and_only_there():
    found = profile_of((1.0,) * 16)
    room = planned(found, schedules=["1f1b"])
    assert not any(room.activations)
    limit = max(room.peak_bytes) / 2
    tight = planned(found, limit, schedules=["1f1b"])
    assert tight.activations[0] == "R" and not tight.activations[-1]
    assert max(tight.peak_bytes) <= limit
    assert tight.seconds > room.seconds


@pytest.mark.parametrize(
    ("forward", "way", "ahead"), [(1, "O", 1), (1.5, "O", 2), (2, "O", 2), (3, "R", 1)]
)
def test_the_cheaper_of_recomputation_and_offload_is_chosen(tmp_path, forward, way, ahead):
    """A copy takes as many times a forward; all choices at an even cut are tried."""
    found = profile_of((1.0,) * 8)
    room = planned(found, schedules=["1f1b"])
    limit = max(room.peak_bytes) * 0.8
    found = dataclasses.replace(found, copy=(forward / 3,) * 8)
    problem = problem_of(found, limit, schedules=["1f1b"])
    plan, cutter = solve(problem), cutter_of(problem, 8, "1f1b")
    even = cutter.kept((0, 2, 4, 6, 8))
    over, least, _ = min(
        cutter.value(dataclasses.replace(even, ways=ways, ahead=ahead))
        for ways in itertools.product(("", "R", "O"), repeat=4)
        for ahead in range(5)
    )
    assert (over, least) >= (0, plan.seconds) and max(plan.peak_bytes) <= limit
    # A round trip of up to three forwards is hidden by the tasks of a microbatch.
    assert plan.activations == (way, "", "", "") and plan.ahead == ahead
    assert (plan.seconds == pytest.approx(room.seconds)) == (forward < 2)
    assert ("offloaded: the activations of stages 0" in str(plan)) == (way == "O")
    plan.save(tmp_path / "plan.json")
    table = jaxpp.Plan.load(tmp_path / "plan.json").order.table_for_ranks(4, 8)
    check(table)
    assert simulate(table, plan.costs).makespan == pytest.approx(plan.seconds)
    again = plan.again(plan.costs)
    assert again.problem.speed == pytest.approx((1.0,) * 4) and again.activations[0] == way
    # Copies that took three times as long as planned are planned to do so.
    slow = dataclasses.replace(plan.costs, offload=2 * forward, load=2 * forward)
    again = plan.again(slow)
    assert again.activations[0] == "R" and again.problem.speed == pytest.approx((1.0,) * 4)
    if way == "O":
        assert again.problem.profiles[8].copy == pytest.approx((forward,) * 8)


def test_without_a_known_link_to_the_host_nothing_is_offloaded():
    found, names = profile_of((1.0,) * 8), ["1f1b", "jaxpp.schedules:Offload(schedule='1f1b')"]
    plan = planned(found, schedules=names)
    assert plan.schedule == "1f1b" and "nobody knows the host_bandwidth" in plan.others[0].reason
    known = planned(dataclasses.replace(found, copy=(1e-3,) * 8), schedules=names)
    assert known.schedule == names[1] and known.seconds == pytest.approx(plan.seconds)
    assert max(known.peak_bytes) < max(plan.peak_bytes)
    with pytest.raises(ValueError, match="offload of .* is inf; a cost is a finite number"):
        simulate(by_name(names[1]).table(4, 8), found.costs_of((2,) * 4))
    with pytest.raises(ValueError, match="copy of layer 0 is -1.0; times and bytes are finite"):
        dataclasses.replace(found, copy=(-1.0,) * 8)


def test_a_rank_needs_what_its_largest_task_needs_while_it_runs():
    found = profile_of((1.0,) * 4)
    least = planned(found, schedules=["1f1b"], ranks=2).peak_bytes
    found = dataclasses.replace(found, temporary_bytes=(MEBIBYTE, 3 * MEBIBYTE, 0, MEBIBYTE))
    more = planned(found, schedules=["1f1b"], ranks=2).peak_bytes
    assert np.subtract(more, least).tolist() == [3 * MEBIBYTE, MEBIBYTE]


def test_the_search_is_not_worse_than_where_it_could_have_started():
    """There are too many cuts to try all; from balanced stages alone this search ends at 84.7."""
    found = profile_of(np.random.default_rng(1207).uniform(0.2, 3, 40).tolist())
    plan = planned(found, schedules=["1f1b"], ranks=6, microbatches=4)
    assert plan.seconds <= at_even_cut(found, "1f1b", 6, 4) < 80


def test_a_stage_keeps_its_activations_where_the_recomputation_of_others_is_enough():
    """The last stage is made to compute again first, and then need not; all choices are tried."""
    times = 1.26, 2.4, 0.35, 1.21, 1.95, 0.73, 1.52, 0.25, 2.54, 1.31, 1.1, 0.33, 0.89, 2.99, 1.46
    quarters = 4, 19, 16, 10, 18, 5, 19, 16, 1, 14, 3, 1, 12, 6, 15
    found = profile_of(times, kept=tuple(n * MEBIBYTE // 4 for n in quarters))
    problem = problem_of(found, 17.5e6, ["1f1b"], ranks=3, microbatches=3)
    plan, cutter = solve(problem), cutter_of(problem, 3, "1f1b")
    assert plan.activations == ("R", "R", "")
    over, least, _ = min(
        cutter.value(dataclasses.replace(cutter.kept((0, *cuts, 15)), ways=ways))
        for cuts in itertools.combinations(range(1, 15), 2)
        for ways in itertools.product(("", "R"), repeat=3)
    )
    assert (over, least) == (0, plan.seconds)


def test_where_nothing_fits_the_missing_bytes_are_named():
    found = profile_of((1.0,) * 16, parameters=(MEBIBYTE,) * 16)
    with pytest.raises(ValueError, match=r"nothing fits into 1\.0 MiB a rank: .* MiB more\."):
        planned(found, MEBIBYTE, schedules=["1f1b", "gpipe"])
    with pytest.raises(ValueError, match=r"optimizer's state alone take 16\.0 MiB a rank"):
        planned(found, MEBIBYTE, schedules=["1f1b", "gpipe"])
    with pytest.raises(ValueError, match=r"17\.0 MiB a rank: .* MiB more\. Use"):
        planned(found, 17 * MEBIBYTE, schedules=["1f1b", "gpipe"])


def test_more_ranks_than_units_are_an_error():
    with pytest.raises(ValueError, match="8 stages, but the function has 4 units"):
        planned(profile_of((1.0,) * 4), schedules=["1f1b"], ranks=8)


def test_a_plan_is_saved_and_loaded(tmp_path):
    plan, path = planned(profile_of(UNEVEN)), tmp_path / "plan.json"
    plan.save(path)
    assert jaxpp.Plan.load(path) == plan
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jaxpp_plan": 9}))
    with pytest.raises(ValueError, match="is a plan of version 9, and this jaxpp reads version 10"):
        jaxpp.Plan.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no plan; make one: jaxpp.plan"):
        jaxpp.Plan.load(path)


def test_a_plan_says_what_it_chose_and_why_the_others_lost():
    shown = str(planned(profile_of(UNEVEN)))
    assert "any cut and schedule takes at least" in shown and "units of each stage" in shown
    assert "slower, bubble" in shown
    assert "; without a limit" in shown and "computed again: the activations of no stage" in shown


@pytest.mark.parametrize(("busy", "says"), [(0.0, False), (0.25, False), (0.6, True)])
def test_a_plan_says_where_its_ranks_would_share_cores(busy, says):
    found = dataclasses.replace(profile_of(UNEVEN), busy=busy)
    shown = str(planned(found, schedules=["1f1b"]))
    assert ("4 ranks need 2.4 times those of the machine" in shown) == says


def test_a_plan_prints_its_limit_and_folds_what_it_did_not_take():
    names = [name for name in SCHEDULES if name not in MADE][:7]
    plan = planned(profile_of(UNEVEN), 4e6, schedules=names)
    assert len(plan.others) > 4
    lines = str(plan).splitlines()
    assert f"; of {format_bytes(4e6)}" in str(plan)
    assert sum(line.startswith("not ") for line in lines) == 4
    assert lines[-1].startswith(f"and {len(plan.others) - 4} more, which `others` has")
    assert len(lines) <= 10


def test_a_slow_rank_gets_fewer_units():
    found = profile_of((1.0,) * 16)
    plan = planned(found, schedules=["1f1b"])
    assert plan.units == (4, 4, 4, 4)
    assert plan.again(plan.costs).units == plan.units
    slow = dataclasses.replace(
        plan.costs, forward=lambda task: 4 / 3 * (2.0 if task.stage == 2 else 1.0)
    )
    slow = dataclasses.replace(
        slow, backward=lambda task: 8 / 3 * (2.0 if task.stage == 2 else 1.0)
    )
    again = plan.again(slow)
    assert again.problem.speed == pytest.approx((1.0, 1.0, 0.5, 1.0))
    assert again.units[2] == 2 and sum(again.units) == 16
    assert again.seconds < simulate(OneFOneB().table(4, 8), slow).makespan


def test_a_slow_rank_is_known_where_another_has_the_same_stages():
    plan = planned(profile_of((1.0,) * 16), schedules=["dualpipe"])
    table = plan.order.table_for_ranks(4, 8)
    slow = Machine(speed=(1.0, 1.0, 1.0, 0.5))
    timeline = simulate(table, plan.costs, machine=slow, overlap="none")
    times: dict[Any, list[float]] = {}
    for span in timeline.spans:
        own = times.setdefault((span.task.kind, span.task.stage), [])
        own.append(span.end - span.start)
    means = {key: sum(own) / len(own) for key, own in times.items()}
    nothing = (0.0,) * 4
    found = jaxpp.Measurement(
        table, {}, means, means, nothing, nothing, {}, 0.0, math.inf, (1.0,), timeline
    )
    assert plan.again(found).problem.speed == pytest.approx((1.0, 1.0, 1.0, 0.5))
    assert plan.again(found.costs).problem.speed == pytest.approx((2 / 3, 1.0, 1.0, 2 / 3))


def test_a_synthesized_table_is_taken_where_it_is_faster(tmp_path):
    found = profile_of((1.0, 1.0, 1.0, 3.0))
    others = planned(found, ranks=4, schedules=["gpipe", "synthesized"])
    assert others.schedule == "synthesized"
    assert others.seconds < others.others[0].seconds
    others.save(tmp_path / "plan.json")
    table = jaxpp.Plan.load(tmp_path / "plan.json").order.table_for_ranks(4, 8)
    check(table)
    assert simulate(table, others.costs).makespan == pytest.approx(others.seconds)


@pytest.mark.more
@pytest.mark.parametrize("limit", [math.inf, 40 * MEBIBYTE])
def test_a_searched_plan_is_taken_where_it_is_faster(tmp_path, limit):
    """Its placement is its own, perhaps of two directions; it is a plan as any other."""
    found = profile_of(UNEVEN)
    plan = planned(found, limit, schedules=["1f1b", "zb_v", "synthesized", "searched"], tries=300)
    assert plan.schedule == "searched" and max(plan.peak_bytes) <= limit
    assert plan.lower_bound <= plan.seconds < 0.99 * plan.others[0].seconds
    assert sum(plan.units) == 16 and len(plan.cuts.firsts) == len(plan.units) - 1
    plan.save(tmp_path / "plan.json")
    loaded = jaxpp.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    table = loaded.order.table_for_ranks(4, 8)
    check(table)
    assert simulate(table, loaded.costs, overlap="none").makespan == pytest.approx(plan.seconds)
    assert plan.again(plan.costs).seconds <= plan.seconds * (1 + 1e-9)


def test_a_synthesized_table_recomputes_within_a_limit():
    """Where a rank cannot hold what its forwards keep, single microbatches are computed again."""
    found = profile_of((1.0,) * 8)
    room = planned(found, ranks=4, schedules=["gpipe"])
    limit = max(room.peak_bytes) * 0.6
    plan = planned(found, limit, ranks=4, schedules=["gpipe", "synthesized"])
    assert plan.schedule == "synthesized" and max(plan.peak_bytes) <= limit
    table = plan.order.table_for_ranks(4, 8)
    check(table)
    assert plan.seconds < plan.others[0].seconds


@pytest.mark.more
def test_what_follows_the_tasks_is_part_of_a_plans_time():
    """Two copies of a stage are updated twice, and their gradients go over the link."""
    found = dataclasses.replace(
        profile_of((3.0,) * 4, parameters=(10, 20, 30, 40)), memory_bandwidth=100.0
    )
    links: dict[str, Any] = dict(latency=0.25, bandwidth=20.0)
    bare = planned(dataclasses.replace(found, memory_bandwidth=math.inf, parameter_bytes=(0,) * 4))
    one = planned(found, schedules=["1f1b"], **links)
    assert one.timeline.update == tuple(7 * n / 100 for n in (10, 20, 30, 40))
    two = planned(found, schedules=["dualpipe"], **links)
    each = [(7 * (a + b) / 100, 0.5 + (a + b) / 20) for a, b in ((10, 40), (20, 30))]
    assert two.timeline.update == pytest.approx([sum(each[n]) for n in (0, 1, 1, 0)])
    slow = dataclasses.replace(two.problem, speed=(1.0, 1.0, 1.0, 0.5))
    assert slow.timeline(two).update[3] == pytest.approx(2 * each[0][0] + each[0][1])
    assert bare.schedule in ("dualpipe", "chimera")  # which win, but for what follows
    assert planned(found, **links).schedule not in ("dualpipe", "chimera")
    three = planned(found, schedules=["1f1b"], **links, replicas=4, reduction_bandwidth=30.0)
    reduced = tuple(1.5 * n / 30 for n in (10, 20, 30, 40))
    assert three.timeline.machine.reduction(4) == pytest.approx(reduced)
    assert three.timeline.update == pytest.approx(np.add(reduced, one.timeline.update))
    assert three.lower_bound > one.lower_bound
    for plan in (one, two, three):
        assert plan.lower_bound <= plan.seconds == plan.timeline.makespan


@pytest.mark.parametrize("name", ["zb_v", "gpipe", "interleaved_1f1b", "dualpipe"])
def test_a_message_takes_as_long_whether_it_keeps_ranks_or_not(name):
    """A chain of tasks and messages takes as long; a rank that has other tasks is held up."""
    found = profile_of((3.0,) * 8)
    problem = problem_of(found, ranks=2, microbatches=16, schedules=[name])
    seconds = []
    for overhead in (0.0, 0.25, 0.5):
        links = dict(latency=0.5, bandwidth=1e4, overhead=overhead)
        plan = solve(dataclasses.replace(problem, **links))
        seconds.append(plan.seconds)
        costs: Any = plan.costs
        order = plan.order.table_for_ranks(2, 16).directions[0]
        crossing = [a != b for a, b in itertools.pairwise(order)]
        forward = [costs.of(Task(Kind.F, s, 0)) for s in range(len(order))]
        expected = [
            units + overhead * 0.6 * sum(crossing[max(0, stage - 1) : stage + 1])
            for stage, units in enumerate(plan.units)
        ]
        assert forward == pytest.approx(expected)
        weights = [costs.of(Task(Kind.W, s, 0)) for s in range(len(order))]
        assert weights[1:] == pytest.approx(plan.units[1:])  # no message comes or goes with a W
        chain = sum(forward) + sum(costs.of(Task(Kind.B, s, 0)) for s in range(len(order)))
        beside = costs.latency + 1000 / costs.bandwidth
        assert chain + 2 * sum(crossing) * beside == pytest.approx(24 + 2 * sum(crossing) * 0.6)
    assert seconds == sorted(seconds) and seconds[2] > seconds[0] + 1


@pytest.mark.more
def test_what_a_plan_predicts_is_what_predict_makes_of_it():
    plan = planned(profile_of(UNEVEN))
    table = plan.order.table_for_ranks(4, 8)
    simulated = simulate(table, plan.costs, overlap="none")
    assert simulated.makespan == pytest.approx(plan.seconds)
    assert plan.timeline.makespan == plan.seconds
    assert tuple(plan.timeline.peak_memory) == plan.peak_bytes
    kept = plan.problem.profiles[8]
    if not any(plan.activations):
        assert kept.costs_of(plan.units).forward == plan.costs.forward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(limit=0.0), "memory_limit is a positive number, got 0.0"),
        (dict(state_bytes=math.nan), "state_bytes is a finite number of at least 0, got nan"),
        (dict(speed=(1.0,)), "one for each rank, got 1 for 4 ranks"),
        (dict(speed=(1.0, 0.0, 1.0, 1.0)), "speed of rank 1 is a positive number, got 0.0"),
    ],
)
def test_bad_numbers_of_a_problem_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        planned(profile_of(UNEVEN), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(latency=-1.0), "latency is a finite number of at least 0, got -1.0"),
        (dict(bandwidth=0.0), "bandwidth is a positive number, got 0.0"),
        (dict(overhead=0.6), "overhead is a share from 0 to 0.5, got 0.6"),
        (dict(microbatches=2.0), "microbatches is an integer of at least 1, got 2.0"),
        (dict(microbatches=()), r"give one number of microbatches .* got \(\)"),
        (dict(tries="x"), "tries is an integer of at least 1, got 'x'"),
        (dict(schedules="1f1b"), "a list of schedules by name .* got 2 and '1f1b'"),
        (dict(schedules=[OneFOneB()]), r"a schedule is named by text, .* got OneFOneB\(\)"),
        (dict(device=3), "device is a jax.Device, a jaxpp.Device or the name of one, .* got 3"),
        (dict(at_least="x"), "at_least is an integer of at least 1, got 'x'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        given: Any = {"ranks": 2, "microbatches": 2, **options}
        jaxpp.plan(jnp.sum, jnp.ones(2), **given)


def test_an_option_that_there_is_not_is_named():
    with pytest.raises(TypeError, match="plan has no option 'trys'; did you mean tries=?"):
        jaxpp.plan(jnp.sum, jnp.ones(2), ranks=2, microbatches=2, trys=9)  # pyright: ignore


@pytest.mark.parametrize(("name", "share"), [("1f1b", 1.0), ("1f1b", 0.8), ("interleaved_1f1b", 1)])
def test_a_plans_bytes_are_those_of_its_step(name, share):
    """With its batch, as it is given and in microbatches, and with messages that wait."""

    def loss_fn(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights, x = list(jax.random.normal(jax.random.key(0), (8, 32, 32)) / 6), jnp.ones((256, 32))
    device = jaxpp.Device(1e9, 1e9)
    options: Any = dict(ranks=2, microbatches=8, schedules=[name], at_least=8, device=device)
    plan = jaxpp.plan(loss_fn, weights, x, state_bytes=2.0, **options)
    if share < 1:
        plan = solve(dataclasses.replace(plan.problem, memory_limit=share * max(plan.peak_bytes)))
        assert "R" in plan.activations
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=plan.cuts))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(jax.grad(staged), 8), plan.order)

    def train_step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grad_fn(weights, x))

    step = jaxpp.place(train_step, jaxpp.MpmdMesh((2,)), donate_argnums=0)
    peaks = jaxpp.predict(step, weights, x, costs=device).peaks
    assert plan.peak_bytes == pytest.approx([peak.total for peak in peaks], rel=0.1)


def test_a_plan_fits_into_the_memory_that_it_needs():
    """Its table may be made, and need less than any of the catalogue."""

    def loss_fn(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jnp.ones(size) for size in itertools.pairwise((8, 8, 16, 8, 32))]
    options: Any = dict(ranks=4, schedules=["1f1b", "synthesized"], device=jaxpp.Device(1e9, 1e9))
    plan = jaxpp.plan(loss_fn, weights, jnp.ones((256, 8)), microbatches=8, at_least=4, **options)
    problem, low, high = plan.problem, 0.0, max(plan.peak_bytes)
    for _ in range(7):
        limit = (low + high) / 2
        try:
            plan, high = solve(dataclasses.replace(problem, memory_limit=limit)), limit
        except ValueError:
            low = limit
    plan = solve(dataclasses.replace(problem, memory_limit=max(plan.peak_bytes)))
    assert plan.again(plan.costs).seconds == plan.seconds
    less = dataclasses.replace(problem, memory_limit=1.0)
    with pytest.raises(ValueError, match=r"nothing fits .* no longer fits: copies .* take 1 times"):
        dataclasses.replace(plan, problem=less).again(plan.costs)


def test_a_plan_names_the_layers_before_which_it_cuts():
    model = eqx.nn.MLP(8, 8, 8, 5, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    options: Any = dict(ranks=2, microbatches=4, schedules=["1f1b"], device="h100")
    plan = jaxpp.plan(loss_fn, model, jnp.ones((16, 8)), **options)
    (name,) = plan.cuts.names
    assert name == f"layers.{plan.units[0]}" and f"{plan.cuts}" in f"{plan}"
    assert name in str(plan.cuts)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_far_a_plan_is(monkeypatch):
    tqdm, stream = pytest.importorskip("tqdm").tqdm, Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("tqdm.tqdm", lambda **options: tqdm(**options, mininterval=0))
    options: Any = dict(ranks=2, microbatches=(2, 4), device="h100", at_least=4, tries=9)
    kinds = ["gpipe", "1f1b", "searched"]
    jaxpp.plan(of_lists, dict_of(4), jnp.ones((16, 8)), schedules=kinds, **options)
    shown = [line for line in stream.getvalue().split("\r") if "jaxpp: planning" in line]
    assert "0/7" in shown[0] and "7/7" in shown[-1]


def dict_of(layers):
    blocks = [{"scale": jnp.ones(8), "up": jnp.eye(8), "down": jnp.eye(8)} for _ in range(layers)]
    return {"blocks": blocks, "head": jnp.ones((8, 1))}


def layer_of_a_dict(x, layer):
    h = (x - x.mean(-1, keepdims=True)) * layer["scale"]
    return x + jnp.tanh(h @ layer["up"]) @ layer["down"]


def of_lists(params, x):
    for layer in params["blocks"]:
        x = layer_of_a_dict(x, layer)
    return jnp.mean(x @ params["head"])


def of_a_stack(params, x):
    x, _ = jax.lax.scan(lambda x, own: (layer_of_a_dict(x, own), None), x, params["blocks"])
    return jnp.mean(x @ params["head"])


@pytest.mark.parametrize("loss_fn", [of_lists, of_a_stack])
def test_a_plan_names_the_layers_of_a_dictionary(loss_fn):
    params = dict_of(4)
    if loss_fn is of_a_stack:
        params["blocks"] = jax.tree.map(lambda *own: jnp.stack(own), *params["blocks"])
    options: Any = dict(ranks=2, microbatches=4, schedules=["1f1b"], device="h100")
    plan = jaxpp.plan(loss_fn, params, jnp.ones((16, 8)), at_least=4, **options)
    assert "(blocks.2" in str(plan)
    (name,) = plan.cuts.names
    staged, cut = (jaxpp.split_stages(loss_fn, at=own) for own in ([name], plan.cuts))
    args = params, jnp.ones((4, 8))
    tables = [jaxpp.stages_as_text(own, *args).splitlines() for own in (staged, cut)]
    layers, planned_layers = ([re.findall("[a-z]+[.0-9-]*", line) for line in t] for t in tables)
    assert layers == planned_layers
    if loss_fn is of_lists:  # pieces of layers, some of which read no parameter
        fine = jaxpp.plan(loss_fn, params, jnp.ones((16, 8)), at_least=32, **options)
        assert re.search(r"\(inside blocks\.\d\.scale\)", str(fine))


def test_the_marks_of_a_function_do_not_count_for_a_plan_of_it():
    def loss_fn(weights, x, mark=lambda x: x):
        for w in weights:
            x = mark(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    def marked(weights, x):
        return loss_fn(weights, x, jaxpp.pipeline_enter_stage)

    args = list(jax.random.normal(jax.random.key(0), (6, 8, 8)) / 2), jnp.ones((16, 8))
    options: Any = dict(ranks=2, microbatches=4, schedules=["1f1b"], at_least=6, device="h100")
    plan, plain = (jaxpp.plan(own, *args, **options) for own in (marked, loss_fn))
    assert plan == plain and plan.units == (3, 3) and str(plan.cuts) == "cuts before unit 3 (3)"
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(marked, at=plan.cuts)))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(grad_fn, 4), plan.order)
    found = jaxpp.place(grad_fn, jaxpp.MpmdMesh((2,)))(*args)
    assert_close(jaxpp.gather(found), jax.value_and_grad(loss_fn)(*args))


def test_bad_costs_are_named():
    plan = planned(profile_of(UNEVEN), schedules=["1f1b"])
    with pytest.raises(ValueError, match=r"F\[stage 0, microbatch 0\] takes no time by these"):
        plan.again(Costs(forward=0.0))
    with pytest.raises(ValueError, match="forward of layer 1 is -1.0; times and bytes are finite"):
        profile_of((1.0, -3.0))
    with pytest.raises(ValueError, match="memory_bandwidth is a positive number, got 0.0"):
        dataclasses.replace(profile_of(UNEVEN), memory_bandwidth=0.0)
    with pytest.raises(ValueError, match="the profile has 16 units, .* got stages of .3, 4. units"):
        profile_of(UNEVEN).costs_of((3, 4))


def test_a_plan_is_applied_with_the_transforms():
    def loss_fn(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = list(jax.random.normal(jax.random.key(0), (6, 8, 8)) / 2)
    x = jax.random.normal(jax.random.key(1), (16, 8))
    options: dict[str, Any] = dict(ranks=2, schedules=["1f1b", "zb_h1"], at_least=6, repeats=1)
    plan = jaxpp.plan(loss_fn, weights, x, microbatches=[2, 4], **options)
    staged = jaxpp.split_stages(loss_fn, at=plan.cuts)
    staged = jaxpp.wrap_forward(staged)
    grad_fn = jaxpp.microbatch(jax.value_and_grad(staged), plan.microbatches)
    step = jaxpp.place(jaxpp.schedule(grad_fn, plan.order), jaxpp.MpmdMesh((2,)))
    assert_close(jaxpp.gather(step(weights, x)), jax.value_and_grad(loss_fn)(weights, x))
    published: dict[str, Any] = options | dict(device="h100", microbatches=4)
    found = jaxpp.plan(loss_fn, weights, x, **published)
    assert found.problem.memory_limit == 80e9 and 0 < found.seconds < 1e-3
    again = jaxpp.plan(loss_fn, weights, x, **published)
    assert again == found  # nothing was measured
    with pytest.raises(ValueError, match="no device named 'h1000'"):
        published["device"] = "h1000"
        jaxpp.plan(loss_fn, weights, x, **published)
    with pytest.raises(ValueError, match="3 microbatches do not divide the 16 examples"):
        jaxpp.plan(loss_fn, weights, x, microbatches=3, **options)
    with pytest.raises(ValueError, match="4 microbatches of 3 replicas each do not divide the 16"):
        jaxpp.plan(loss_fn, weights, x, microbatches=4, replicas=3, **options)
