"""Plans from costs alone: sound, no better than the bound, the same anywhere, and runnable."""

import dataclasses
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.planning.search import (
    Choice,
    Layers,
    LayersPlan,
    Setting,
    find,
    lower_bound,
    plan_layers,
)
from jaxpp.planning.search._judge import RULES, judge, table_of
from jaxpp.planning.search._moves import move, start
from jaxpp.planning.search._search import timed
from jaxpp.schedules import CATALOGUE, Costs, Kind, by_name, check, simulate


def layers_of(seed, count=10, **fields):
    """Layers of random times and bytes."""
    choose = random.Random(seed)
    forward, inputs, weights = (
        tuple(float(choose.randint(1, 9)) for _ in range(count)) for _ in range(3)
    )
    kept = tuple(float(choose.randint(1, 4)) for _ in range(count))
    return Layers(
        forward, inputs, weights, activation_bytes=kept, crossing=(2.0,) * (count - 1), **fields
    )


def settings(seed, limit=math.inf, **fields):
    """Layers on three ranks, one of them slow, with links that take their time."""
    return Setting(layers_of(seed), 3, 4, memory_limit=limit, latency=1.0, bandwidth=4.0,
                   speed=(1.0, 0.5, 1.0), **fields)  # fmt: skip


def wandering(setting, directions, halves=True, steps=60):
    """Choices that random moves lead to."""
    choose = random.Random(1)
    choice = start(setting, directions, 2, halves)
    for _ in range(steps):
        choice = move(setting, choice, choose) or choice
        yield choice


def test_the_room_does_not_import_jax():
    folder = Path(jaxpp.__file__).parent
    program = f"""
import sys, types
for name, path in (("jaxpp", ""), ("jaxpp.planning", "planning")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(folder)!r} + "/" + path]
from jaxpp.planning.search import Layers, plan_layers
plan_layers(Layers((1.0,) * 4, (1.0,) * 4, (1.0,) * 4), ranks=2, microbatches=4, tries=20)
print([name for name in ("jax", "numpy", "matplotlib") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("limit", [math.inf, 45.0])
def test_the_judge_says_what_the_simulator_says_and_fits(directions, limit):
    """And no order of any choice beats the bound."""
    setting, judged = settings(0, limit), 0
    bound = lower_bound(setting, directions)
    for choice, rule in zip(wandering(setting, directions), itertools.cycle(RULES), strict=False):
        value = judge(setting, choice, rule=rule)
        if value == math.inf:
            continue
        judged += 1
        table = table_of(setting, choice, rule)
        check(table)
        assert max(setting.memory(choice).peaks(table)) <= limit
        assert timed(setting, choice, table).time == pytest.approx(value)
        assert bound <= value
        assert judge(setting, choice, value, rule) == value
        assert judge(setting, choice, 0.99 * value, rule) in (value, math.inf)
    assert judged > 40


def test_the_bound_of_a_limit_counts_how_long_activations_are_held():
    ones = (1.0,) * 8
    layers = Layers(ones, ones, ones, activation_bytes=ones)
    free, tight = (Setting(layers, 4, 8, memory_limit=limit) for limit in (math.inf, 2.0))
    assert lower_bound(free) == (8 * 24 + 1 + 2 + 3) / 4
    # A layer's activation is held for its forward, the later ones, as many I, and its W.
    area = sum(2 * n + 1 for n in range(1, 9))
    assert lower_bound(tight) == (8 * area + 2.0 * (1 + 2 + 3)) / 8
    plan = plan_layers(layers, ranks=4, microbatches=8, memory_limit=2.0, directions=(1,), tries=99)
    assert plan.lower_bound <= plan.time


def test_backwards_stay_whole_where_that_takes_less_or_halves_are_not_known():
    whole = Layers((1.0,) * 6, backward=(2.0,) * 6)
    for layers in (whole, Layers((1.0,) * 6, (5.0,) * 6, (5.0,) * 6, (2.0,) * 6)):
        plan = plan_layers(layers, ranks=2, microbatches=4, tries=60, memory_limit=1e9)
        assert plan.table.kinds == {Kind.F, Kind.B}
        plan.check()
        assert plan.time < 4 * 18 / 2 * 1.3


@pytest.mark.more
def test_the_same_tries_give_the_same_plan_and_more_never_a_worse_one(tmp_path):
    options: dict[str, Any] = dict(ranks=3, microbatches=4, latency=0.5, memory_limit=60.0)
    tries = (30, 70, 110, 200, 260, 300, 400, 500, 700)
    found = [plan_layers(layers_of(2), tries=n, **options) for n in tries]
    assert found[4] == plan_layers(layers_of(2), tries=260, **options)
    assert found[4] != plan_layers(layers_of(2), tries=260, seed=1, **options)
    assert all(a.time >= b.time for a, b in itertools.pairwise(found))
    assert found[0].time > found[-1].time
    for n, plan in enumerate(found):
        plan.check()
        plan.save(tmp_path / f"{n}.json")
        assert LayersPlan.load(tmp_path / f"{n}.json") == plan
    with pytest.raises(ValueError, match="the plan says"):
        dataclasses.replace(plan, time=2 * plan.time).check()
    with pytest.raises(ValueError, match="may hold"):
        tight = dataclasses.replace(plan.setting, memory_limit=10.0)
        dataclasses.replace(plan, setting=tight).check()
    (tmp_path / "0.json").write_text("{}")
    with pytest.raises(ValueError, match="is no layers_plan"):
        LayersPlan.load(tmp_path / "0.json")


def test_a_larger_budget_goes_on_where_a_smaller_one_ended():
    def rounds(tries):
        reports = []
        find(settings(0), tries=tries, report=lambda tried, best: reports.append((tried, best)))
        return reports

    less, more = rounds(180), rounds(620)
    assert less[-1][0] == 180 and more[-1][0] == 620
    assert len(less) > 2 and more[: len(less) - 1] == less[:-1]
    assert less[-1][1] >= more[len(less) - 1][1]


def test_a_plan_is_faster_than_the_catalogue_at_an_even_cut():
    layers = layers_of(3, 16)
    times = []
    for name in CATALOGUE:
        if name in ("forward_only", "seq1f1b"):
            continue
        table = by_name(name).table_for_ranks(4, 8)
        cut = [16 * n // table.num_stages for n in range(table.num_stages + 1)]
        forward, inputs, weights = ([sum(own[a:b]) for a, b in itertools.pairwise(cut)]
                for own in (layers.forward, layers.input_grad, layers.weight_grad))  # fmt: skip
        times.append(simulate(table, Costs(forward, inputs, weights), overlap="none").makespan)
    for directions, gap in ((1, 0.06), (2, 0.02)):
        plan = plan_layers(layers, ranks=4, microbatches=8, directions=(directions,), tries=1300)
        assert plan.time < min(times) and plan.gap < gap


def test_a_plan_says_what_it_chose_and_a_search_what_it_does(capsys):
    plan = plan_layers(layers_of(1), ranks=2, microbatches=4, tries=30, progress=True)
    assert "any plan takes at least" in str(plan) and "rank of each stage" in str(plan)
    assert "30 of 30 tries, best" in capsys.readouterr().err
    with pytest.raises(ValueError, match="have no names"):
        _ = plan.cuts
    options: dict[str, Any] = dict(ranks=2, microbatches=4, tries=10**9)
    assert plan_layers(layers_of(1), time_limit=0.2, **options).time <= 2 * plan.time


@pytest.mark.parametrize("directions", [1, 2])
def test_a_plan_says_what_parameters_ranks_hold_and_a_limit_counts_all_of_them(directions):
    """With two directions a stage's parameters are on two ranks, or once where these are one."""
    layers = dataclasses.replace(layers_of(4), parameter_bytes=(1.0,) * 10)
    options: dict[str, Any] = dict(ranks=2, microbatches=4, tries=300, directions=(directions,))
    plan = plan_layers(layers, **options)
    once = [
        (stage, rank)
        for stage, ranks in enumerate(zip(*plan.placement, strict=True))
        for rank in set(ranks)
    ]
    assert sum(plan.parameter_bytes) == sum(plan.units[stage] for stage, _ in once) >= 10
    assert "bytes of parameters of each rank" in str(plan)
    limit = 0.8 * max(plan.timeline.peak_memory)
    tight = plan_layers(layers, memory_limit=limit, **options)
    state = [4 * own for own in tight.parameter_bytes]
    kept = tight.setting.memory(tight.choice).peaks(tight.table)
    assert max(map(sum, zip(state, kept, strict=True))) <= limit * (1 + 1e-6)
    assert plan.time <= tight.time


@pytest.mark.parametrize(("zero", "limit"), [(1, math.inf), (3, math.inf), (3, 60.0)])
def test_a_plan_of_state_that_is_split_has_windows(zero, limit, tmp_path):
    layers = dataclasses.replace(layers_of(4), parameter_bytes=(4.0,) * 10)
    options: dict[str, Any] = dict(ranks=2, microbatches=4, tries=200, directions=(1,))
    machine: dict[str, Any] = dict(replicas=4, reduction_bandwidth=2.0, state_bytes=2.0)
    plan = plan_layers(layers, zero=zero, memory_limit=limit, **options, **machine)
    plan.check()
    assert ("G" in plan.table.kinds, "S" in plan.table.kinds) == (
        plan.choice.held is not None, plan.choice.reduces,
    )  # fmt: skip
    assert "reduced: gradients" in str(plan) and ("gathered" in str(plan)) == (zero == 3)
    kept = dataclasses.replace(plan.choice, held=None, reduces=False)
    bare = plan.table.kinds - set("GSH")
    orders = tuple(tuple(t for t in own if t.kind in bare) for own in plan.table.ranks)
    plain = timed(plan.setting, kept, dataclasses.replace(plan.table, ranks=orders))
    assert plan.time < plain.time and max(plan.timeline.peak_memory) <= limit * (1 + 1e-6)
    plan.save(tmp_path / "plan.json")
    assert LayersPlan.load(tmp_path / "plan.json") == plan


def test_cp_sat_proves_how_much_another_order_gains():
    pytest.importorskip("ortools")
    plan = plan_layers(layers_of(1, 6), ranks=2, microbatches=4, directions=(1,), tries=40)
    assert plan.order_bound == 0 and "any order at this cut" not in str(plan)
    proved = plan.proved(work=5.0)
    proved.check()
    assert plan.lower_bound <= proved.order_bound <= proved.time <= plan.time
    assert "any order at this cut takes at least" in str(proved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ranks=20), "20 ranks need as many layers, got 10"),
        (dict(microbatches=0), "microbatches is an integer of at least 1, got 0"),
        (dict(speed=(1.0,)), "one for each rank, got 1 for 2 ranks"),
        (dict(latency=-1.0), "latency is a finite number of at least 0, got -1.0"),
        (dict(directions=(3,)), "directions are 1, 2 or both"),
        (dict(directions=1), "directions are 1, 2 or both, as .1, 2., got 1"),
        (dict(ranks=2.0), "ranks is an integer of at least 1, got 2.0"),
        (dict(microbatches=[4, 8]), r"microbatches is an integer of at least 1, got \[4, 8\]"),
        (dict(memory_limit=(9.0, 9.0)), r"memory_limit is a positive number, got \(9.0, 9.0\)"),
        (dict(tries=math.inf), "tries is an integer of at least 1"),
        (dict(time_limit=0), "time_limit is a positive number, got 0"),
        (dict(memory_limit=1.0), "no plan was found that fits into 1 a rank"),
    ],
)
def test_bad_arguments_are_named(options, message):
    given: Any = {"ranks": 2, "microbatches": 4, "tries": 20, **options}
    with pytest.raises(ValueError, match=message):
        plan_layers(layers_of(0), **given)


@pytest.mark.parametrize("name", ["bogus", "steps"])
def test_an_option_that_there_is_not_is_named(name):
    with pytest.raises(TypeError, match=f"plan_layers has no option '{name}'; .*"):
        plan_layers(layers_of(0), ranks=2, microbatches=4, **{name: 2})  # pyright: ignore


def test_layers_that_take_no_time_have_a_plan_without_a_gap():
    nothing = (0.0,) * 4
    plan = plan_layers(Layers(nothing, backward=nothing), ranks=2, microbatches=4, tries=9)
    assert plan.gap == 0.0 and "a gap of 0.0%" in str(plan)


def test_a_limit_holds_where_no_activation_is_kept():
    """A task that adds no bytes does not ask for room; what is there all the time counts."""
    zeros, ones = (0.0, 0.0), (1.0, 1.0)
    layers = Layers(ones, ones, ones, activation_bytes=zeros, parameter_bytes=(9.0, 1.0))
    options: Any = dict(ranks=2, microbatches=2, directions=(1,), tries=20)
    with pytest.raises(ValueError, match="no plan was found that fits into 8 a rank"):
        plan_layers(layers, memory_limit=8.0, state_bytes=1.0, **options)
    plan_layers(layers, memory_limit=9.0, state_bytes=1.0, **options).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(forward=()), "there is no layer"),
        (dict(forward=1.0), "forward has a value for each layer, got 1.0; give a list"),
        (dict(forward=(1.7e308,), backward=(1.0,)), r"forward of layer 0 is 1\.7e\+308"),
        (dict(forward="a", backward="b"), "forward of layer 0 is 'a'"),
        (dict(forward=(1.0, math.nan), backward=(1.0, 1.0)), "forward of layer 1 is nan"),
        (dict(forward=(1.0,), input_grad=(1.0, 2.0)), "input_grad has 2 values for 1 layers"),
        (dict(forward=(1.0,), input_grad=(1.0,)), "whole, as backward=, or by both halves"),
    ],
)
def test_bad_layers_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Layers(**fields)


@pytest.mark.more
@pytest.mark.parametrize(
    "placement",
    [((1, 0, 0, 1, 0),), ((1, 0, 0, 1, 0), (0, 1, 1, 0, 1)), ((0, 0, 1, 0, 1), (0, 1, 1, 1, 0))],
)
def test_a_plan_with_an_irregular_placement_runs_to_the_bit(placement):
    """Through the transforms, on two ranks and on one device; a stage may be twice on a rank."""
    names = tuple(f"layer{n}" for n in range(6))

    def loss_fn(weights, x):
        for name, w in zip(names, weights, strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    ones = (1.0,) * 6
    setting = Setting(Layers(ones, ones, ones, names=names), 2, 4)
    choice = Choice((0, 1, 2, 4, 5, 6), placement)
    found = timed(setting, choice, table_of(setting, choice, 0))
    plan = LayersPlan(setting, choice, found.table, found.time, found.time)
    plan.check()
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=plan.cuts))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(jax.value_and_grad(staged), 4), plan.order)

    def train_step(weights, x):
        loss, grads = grad_fn(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    one_device = [jax.devices()[0]] * 2
    results = []
    for devices in (None, one_device):
        weights = list(jax.random.normal(jax.random.key(0), (6, 8, 8)) / 2)
        step = jaxpp.place(train_step, jaxpp.MpmdMesh((2,), devices=devices))
        for n in range(3):
            x = jax.random.normal(jax.random.key(n), (8, 8))
            weights, loss = step(weights, x)
        results.append(jaxpp.gather((weights, loss)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    plain = jax.value_and_grad(loss_fn)(results[0][0], x)
    again = jax.jit(grad_fn)(results[0][0], x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)


# ---- layers that are a graph --------------------------------------------------------------------

#: Two towers of three layers, and two layers that read both.
TOWERS = ((), (0,), (1,), (), (3,), (4,), (2, 5), (6, 2))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("halves", [True, False])
def test_the_judge_of_a_graph_is_the_simulation_of_its_table(directions, halves):
    layers = layers_of(3, count=8, inputs=TOWERS)
    setting = Setting(layers, 3, 4, latency=1.0, bandwidth=4.0)
    bound = lower_bound(setting, directions)
    for choice in wandering(setting, directions, halves, steps=20):
        table = table_of(setting, choice, 0)
        check(table)
        time = judge(setting, choice)
        assert bound <= timed(setting, choice, table).time == pytest.approx(time)


def test_stages_of_layers_read_what_their_layers_read():
    setting = Setting(layers_of(3, count=8, inputs=TOWERS), 2, 4)
    choice = Choice((0, 2, 3, 6, 8), ((0, 1, 0, 1),))
    assert setting.graph(choice) == ((), (0,), (), (1, 2))
    assert Setting(layers_of(3), 2, 4).graph(choice) == ((), (0,), (1,), (2,))


def test_a_plan_of_towers_is_faster_than_that_of_a_chain():
    ones = (1.0,) * 8
    options: Any = dict(ranks=4, microbatches=4, directions=(1,), latency=0.2, tries=400)
    chain, towers = (
        plan_layers(Layers(ones, ones, ones, inputs=own), **options) for own in ((), TOWERS)
    )
    towers.check()
    assert towers.time < chain.time
    assert towers.lower_bound < chain.lower_bound
    assert towers.timeline.table.stage_inputs == towers.setting.graph(towers.choice)


@pytest.mark.parametrize("limit", [math.inf, 4.0])
def test_layers_that_wait_for_nothing_begin_together(limit):
    """Two layers on two ranks take the time of one, and the bound says so."""
    own = (1.0, 1.0)
    apart = Layers(own, backward=own, activation_bytes=(4.0, 4.0), inputs=((), ()))
    setting = Setting(apart, 2, 1, memory_limit=limit)
    choice = Choice((0, 1, 2), ((0, 1),), halves=False)
    assert judge(setting, choice) == lower_bound(setting) == 2.0
    chain = dataclasses.replace(setting, layers=dataclasses.replace(apart, inputs=()))
    assert lower_bound(chain) > 2.0


def test_a_layer_that_reads_a_later_one_is_refused():
    with pytest.raises(ValueError, match=r"layer 1 reads layers \(2,\)"):
        Layers((1.0,) * 3, backward=(1.0,) * 3, inputs=((), (2,), (1,)))
