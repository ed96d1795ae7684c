"""What the units of a function take, measured alone, and the cuts that follow from it."""

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.planning import Profile
from jaxpp.schedules import OneFOneB, simulate
from jaxpp.transforms.stages import UnitCosts
from tests.helpers import assert_close

WIDTH, LAYERS, WORDS = 16, 4, 64


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(eqx.Module):
    embed: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = jax.random.normal(keys[0], (WORDS, WIDTH))
        self.blocks = [Block(eqx.nn.Linear(WIDTH, WIDTH, key=k)) for k in keys[2:]]
        self.head = eqx.nn.Linear(WIDTH, WORDS, key=keys[1])

    def __call__(self, token):
        x = self.embed[token]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def tokens(size=8):
    return jax.random.randint(jax.random.key(1), (size,), 0, WORDS)


@pytest.fixture(scope="module")
def model():
    return Model(jax.random.key(0))


@pytest.fixture(scope="module")
def found(model):
    return jaxpp.profile(loss_fn, model, tokens(), repeats=1)


def stages_of(model, number, balance, size=8):
    """The parameters that each stage reads, by their paths."""
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, number, balance=balance))
    step = jaxpp.place(staged, jaxpp.MpmdMesh((number,)))
    arguments = step.lower(model, tokens(size)).bundle.arguments
    return [
        [a.path.removeprefix("[0]") for a in arguments if stage in a.stages and a.path[:3] == "[0]"]
        for stage in range(number)
    ]


@pytest.mark.more
def test_a_unit_is_a_layer_or_what_lies_around_the_layers(found):
    linear, table = 4 * (WIDTH * WIDTH + WIDTH), 4 * WIDTH * WORDS
    assert found.parameter_bytes == (table, *[linear] * LAYERS, table + 4 * WORDS)
    assert found.crossing == (4 * 8 * WIDTH,) * (LAYERS + 1)
    assert len(found.costs) == len(found.forward) == len(found.activation_bytes) == LAYERS + 2
    assert len(set(found.activation_bytes[1:-1])) == 1


def test_layers_are_alike_and_every_task_takes_time(found):
    for times in (found.forward, found.backward, found.weight_grad):
        assert all(time > 0 for time in times)
        assert len(set(times[1:-1])) == 1  # one executable
    assert found.input_grad[0] == 0  # nobody reads a gradient of tokens
    assert all(time > 0 for time in found.input_grad[1:])
    assert found.costs == pytest.approx(
        [f + b for f, b in zip(found.forward, found.backward, strict=True)]
    )


@pytest.mark.more
def test_an_update_moves_bytes_as_fast_as_was_measured_or_published(model, found):
    assert 1e6 < found.memory_bandwidth < math.inf
    device = jaxpp.Device(flops=1e9, bandwidth=2e9)
    published = jaxpp.profile(loss_fn, model, tokens(), device=device)
    assert published.memory_bandwidth == 2e9 and not published.copy
    device = dataclasses.replace(device, host_bandwidth=4e9)
    published = jaxpp.profile(loss_fn, model, tokens(), device=device)
    assert published.copy == tuple(n / 4e9 for n in found.activation_bytes)


def test_a_profile_says_what_of_the_cores_tasks_keep_busy(model, found):
    """Published figures say nothing of it."""
    assert 0 < found.busy < 1.1
    assert jaxpp.profile(loss_fn, model, tokens(), device="h100").busy == 0


def test_what_units_keep_takes_its_time_to_the_host(found):
    assert all(0 < time < 10 for time in found.copy) and len(found.copy) == len(found.costs)
    assert len(set(found.copy[1:-1])) == 1  # layers are alike


@pytest.mark.more
def test_the_cut_is_balanced_by_what_was_measured(model, found):
    even = dataclasses.replace(found, costs=(1.0,) * len(found.costs))
    assert stages_of(model, 2, even)[0] == [
        ".embed", *(f".blocks[{n}].linear.{name}" for n in range(2) for name in ("weight", "bias")),
    ]  # fmt: skip
    heavy = dataclasses.replace(found, costs=(*(1.0,) * (LAYERS + 1), 9.0))
    assert stages_of(model, 2, heavy)[1] == [".head.weight", ".head.bias"]
    loss, grads = eqx.filter_value_and_grad(
        jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, 3, balance=heavy))
    )(model, tokens())
    assert_close((loss, grads), eqx.filter_value_and_grad(loss_fn)(model, tokens()))


def test_units_have_the_names_of_their_layers(found):
    first, *blocks, last = found.names
    assert blocks == [f"blocks.{n}" for n in range(LAYERS)]
    assert (first, last) == ("embed", "head") and len(found.names) == len(found.forward)


def test_a_profile_is_saved_and_loaded(found, tmp_path):
    found.save(tmp_path / "profile.json")
    assert jaxpp.Profile.load(tmp_path / "profile.json") == found


def test_another_version_or_file_is_refused(found, tmp_path):
    path = tmp_path / "profile.json"
    found.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jaxpp_profile": 0}))
    with pytest.raises(ValueError, match="is a profile of version 0, and this jaxpp reads"):
        jaxpp.Profile.load(path)
    for text in ("[]", "{}", "no JSON"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no profile; make one: jaxpp.profile"):
            jaxpp.Profile.load(path)


def test_a_profile_of_other_shapes_is_refused(model, found):
    with pytest.raises(ValueError, match="of another function, or of other shapes: it has 6 units"):
        stages_of(model, 2, found, size=16)


def test_more_stages_than_units_are_refused(model, found):
    with pytest.raises(ValueError, match="ask for at most 6 stages"):
        stages_of(model, 8, found)


def limited(costs, kept, state, limit, schedule="1f1b"):
    """The limited cuts of made-up units."""
    count = len(costs)
    found = jaxpp.Profile(
        (1.0,) * (count - 1), count, costs, costs, costs, costs, costs, kept, (0,) * count, state,
    )  # fmt: skip
    return found.within(limit, microbatches=8, schedule=schedule, state_bytes=1.0)


@pytest.mark.parametrize("seed", range(8))
def test_a_cut_within_a_limit_is_the_best_of_all_that_fit(seed):
    draw = random.Random(seed)
    costs = tuple(draw.uniform(1, 5) for _ in range(9))
    kept, state = ([draw.randrange(1, 9) for _ in range(9)] for _ in range(2))

    def fits(cuts, limit):
        bounds = enumerate(itertools.pairwise((0, *cuts, 9)))
        return all(sum(state[a:b]) + (4 - s) * sum(kept[a:b]) <= limit for s, (a, b) in bounds)

    every = list(itertools.combinations(range(1, 9), 3))
    for limit in (30, 40, 60, 1000):
        balance = limited(costs, tuple(kept), tuple(state), limit)

        def time(cuts, found=balance.profile):
            units = [b - a for a, b in itertools.pairwise((0, *cuts, 9))]
            return simulate(OneFOneB().table(4, 8), found.costs_of(units)).makespan

        if fitting := [cuts for cuts in every if fits(cuts, limit)]:
            chosen = tuple(balance.choose(4))
            assert fits(chosen, limit)
            assert time(chosen) == pytest.approx(min(map(time, fitting)))
        else:
            with pytest.raises(ValueError, match=f"no cut into 4 stages fits into {limit} B"):
                balance.choose(4)


def test_a_limit_moves_the_cut_of_a_function(model, found):
    heavy = dataclasses.replace(
        found,
        forward=(9.0, *(1.0,) * (LAYERS + 1)),
        backward=(1.0,) * (LAYERS + 2),
        activation_bytes=(0,) * (LAYERS + 2),
        temporary_bytes=(0,) * (LAYERS + 2),
    )
    free = heavy.within(1e9, microbatches=4)
    assert stages_of(model, 2, free)[0] == [".embed"]
    half = heavy.within(4 * 0.6 * sum(heavy.parameter_bytes), microbatches=4)
    assert len(stages_of(model, 2, half)[0]) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(limit=0.0), "memory_limit is a positive number of bytes, got 0.0"),
        (dict(limit=1), "need 3 B together, 1 B more than all ranks have"),
        (dict(kept=(0, 0, 0), state=(8, 8, 9), limit=10), "need 25 B together, 5 B more than all"),
        (dict(kept=(9, 9, 9), state=(1, 1, 1), limit=19), "rank . needs .* at the leanest cut"),
    ],
)
def test_a_limit_that_cannot_be_kept_says_why(options, message):
    fields = dict(costs=(1.0,) * 3, kept=(1, 1, 1), state=(1, 1, 1), limit=100) | options
    with pytest.raises(ValueError, match=message):
        limited(**fields).choose(2)


@pytest.mark.more
def test_a_function_without_layers_is_cut_into_equal_parts():
    def deep(w, x):
        for _ in range(12):
            x = jnp.sin(x @ w)
        return jnp.mean(x)

    found = jaxpp.profile(deep, jnp.eye(8), jnp.ones((4, 8)), at_least=5, repeats=1)
    assert len(found.costs) == 5 and isinstance(found, UnitCosts)
    with pytest.raises(ValueError, match="repeats is an integer of at least 1, got 0"):
        jaxpp.profile(deep, jnp.eye(8), jnp.ones((4, 8)), repeats=0)


WEIGHTS = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(jax.random.key(2), 4)]
ROWS = jax.random.normal(jax.random.key(3), (8, WIDTH))


def deep_loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def with_metrics(weights, x):
    value = deep_loss(weights, x)
    return value, {"loss": value, "examples": len(x)}


def with_state(weights, mean, x):
    return deep_loss(weights, x - mean), 0.9 * mean + 0.1 * x.mean(0)


def with_keys(weights, x, keys):
    kept = jax.random.bernoulli(keys[0], 0.5, x.shape)
    return deep_loss(weights, jnp.where(kept, x, 0.0))


def of_pairs(weights, batch):
    return jnp.mean((batch["x"] @ weights[0] @ weights[1] - batch["y"].T) ** 2)


KEYS = jax.random.split(jax.random.key(4), 4)
LIKE_MICROBATCH = {
    "metrics": (with_metrics, (WEIGHTS, ROWS), None),
    "a carried state": (with_state, (WEIGHTS, jnp.zeros(WIDTH), ROWS), (None, "carry", 0)),
    "keys": (with_keys, (WEIGHTS, ROWS, KEYS), (None, 0, 0)),
    "axes of a dictionary": (
        of_pairs,
        (WEIGHTS[:2], {"x": ROWS, "y": ROWS.T}),
        (None, {"x": 0, "y": 1}),
    ),
}


@pytest.mark.parametrize("name", LIKE_MICROBATCH)
def test_a_loss_is_taken_as_microbatch_takes_it(name):
    fun, args, axes = LIKE_MICROBATCH[name]
    options: Any = dict(at_least=2, in_axes=axes, device="h100", schedules=["1f1b"], tries=5)
    plan = jaxpp.plan(fun, *args, ranks=2, microbatches=4, **options)
    has_aux = name in ("metrics", "a carried state")
    staged = jaxpp.wrap_forward(jaxpp.split_stages(fun, at=plan.cuts))
    grad = eqx.filter_value_and_grad(staged, has_aux=has_aux)
    reduce = (("mean", "carry" if "state" in name else "last") if has_aux else "mean", "mean")
    grad = jaxpp.microbatch(grad, 4, in_axes=axes or (None, 0), reduce=reduce)
    _, grads = eqx.filter_eval_shape(jaxpp.schedule(grad, plan.order), *args)
    assert [g.shape for g in grads] == [w.shape for w in args[0]]


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x.mean(), 1, 2)])
def test_a_function_that_is_no_loss_is_an_error(result):
    with pytest.raises(ValueError, match="profile: the function is a loss: .* got"):
        jaxpp.profile(lambda w, x: result(x @ w[0]), WEIGHTS, ROWS, repeats=1)


def test_a_function_without_parameters_is_an_error():
    with pytest.raises(ValueError, match=r"no array of floats in \(\[\],\); give them first"):
        jaxpp.profile(deep_loss, [], ROWS, device="h100")


def test_bytes_are_those_of_a_device_where_a_rank_has_several():
    options: Any = dict(at_least=4, repeats=1)
    mesh = jaxpp.MpmdMesh((1, 2), ("mpmd", "model"))
    specs = (jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec())
    whole = jaxpp.profile(deep_loss, WEIGHTS, ROWS, **options)
    split = jaxpp.profile(deep_loss, WEIGHTS, ROWS, device=mesh, in_specs=specs, **options)
    assert [2 * n for n in split.parameter_bytes] == list(whole.parameter_bytes)
    assert sum(split.activation_bytes) < sum(whole.activation_bytes)
    with pytest.raises(ValueError, match="of a single rank"):
        jaxpp.profile(deep_loss, WEIGHTS, ROWS, device=jaxpp.MpmdMesh((2,)), **options)


class Towers(eqx.Module):
    left: list[Block]
    right: list[Block]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        blocks = [Block(eqx.nn.Linear(WIDTH, WIDTH, key=k)) for k in keys]
        self.left, self.right = blocks[:2], blocks[2:]

    def __call__(self, x, y):
        for block in self.left:
            x = block(x)
        for block in self.right:
            y = block(y)
        return x * y


def towers_loss(model, xs, ys):
    return jnp.mean(jax.vmap(model)(xs, ys) ** 2)


def test_the_graph_of_the_units_is_found_kept_and_planned_for(tmp_path):
    model, args = Towers(jax.random.key(0)), (jnp.ones((8, WIDTH)), jnp.ones((8, WIDTH)))
    found = jaxpp.profile(towers_loss, model, *args, at_least=4, device="h100")
    assert found.inputs == ((), (0,), (), (2,), (1, 3))  # the last one is the loss
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    options: Any = dict(at_least=4, device="h100", schedules=["1f1b"], tries=5)
    plan = jaxpp.plan(towers_loss, model, *args, ranks=4, microbatches=4, **options)
    problem, table = plan.problem, plan.timeline.table
    assert table.stage_inputs is not None
    chain = {n: dataclasses.replace(own, inputs=()) for n, own in problem.profiles.items()}
    later = dataclasses.replace(problem, profiles=chain).timeline(plan)
    assert plan.seconds < later.makespan
    staged = jaxpp.wrap_forward(jaxpp.split_stages(towers_loss, at=plan.cuts))
    grad = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 4, in_axes=(None, 0, 0))
    step = jaxpp.place(jaxpp.schedule(grad, plan.order), jaxpp.MpmdMesh((4,)))
    predicted = jaxpp.predict(step, model, *args, costs=plan.costs).timeline
    assert predicted.table.stage_inputs == table.stage_inputs
