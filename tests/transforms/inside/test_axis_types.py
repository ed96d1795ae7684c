"""Explicit axes: a step is checked by its types, and gives what it gives on automatic axes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from tests.helpers import assert_close, assert_same
from tests.transforms.residual import AXES, RULES, batch, parameters

SHAPE = (2, 2, 2)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_step(multiply, schedule=None, layer_of=None, replicas=1):
    def layer_fn(x, layer):
        h = jnp.tanh(multiply(x, layer["up"], P("data", "model")))
        return x + multiply(h, layer["down"], P("data", None)) + layer["bias"]

    layer_fn = layer_of(layer_fn) if layer_of else layer_fn

    def loss_fn(params, x, y):
        for n, layer in enumerate(params):
            if n == 2:
                x = jaxpp.pipeline_enter_stage(x)
            x = layer_fn(x, layer)
        return jnp.mean((x - y) ** 2)

    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad_fn = jaxpp.microbatch(grad_fn, 4, in_axes=(None, 0, 0), replicas=replicas)
    if schedule is not None:
        grad_fn = jaxpp.schedule(grad_fn, schedule)

    def step(params, x, y):
        loss, grads = grad_fn(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def plain(a, b, spec):
    return a @ b


def place(fun, types, **options):
    mesh = jaxpp.MpmdMesh(SHAPE, AXES, axis_types=(AUTO, *types))
    return jaxpp.place(fun, mesh, in_specs=(RULES, P("data"), P("data")), **options)


@functools.cache
def on_one_device():
    return jax.jit(make_step(plain))(parameters(), *batch())


@functools.cache
def on_automatic_axes():
    step = place(make_step(plain, jaxpp.schedules.OneFOneB()), (AUTO, AUTO))
    return step(parameters(), *batch()), reductions(step)


def reductions(step):
    """For each rank the collectives of a step, by kind and axes."""
    return [rank.all for rank in count_collectives(step)]


def with_types(names):
    """A product that says how the result is split, as far as axes are explicit."""

    def multiply(a, b, spec):
        return jnp.matmul(a, b, out_sharding=P(*(e if e in names else None for e in spec)))

    return multiply


@pytest.mark.more
@pytest.mark.parametrize(
    ("types", "multiply"),
    [
        ((EXPLICIT, EXPLICIT), with_types(("data", "model"))),
        ((EXPLICIT, AUTO), plain),
        ((EXPLICIT, AUTO), with_types(("data",))),
        ((AUTO, EXPLICIT), with_types(("model",))),
    ],
)
def test_a_step_on_explicit_axes_gives_what_it_gives_on_automatic_ones(types, multiply):
    step = place(make_step(multiply, jaxpp.schedules.OneFOneB()), types)
    got = step(parameters(), *batch())
    wanted, counted = on_automatic_axes()
    assert_close(got, on_one_device())
    assert_close(got, wanted)
    assert reductions(step) == counted


@pytest.mark.parametrize(
    ("types", "names"),
    [
        ((EXPLICIT, EXPLICIT), ("data", "model")),
        pytest.param((EXPLICIT, EXPLICIT), ("model",), marks=pytest.mark.more),
        pytest.param((EXPLICIT, AUTO), ("data",), marks=pytest.mark.more),
        pytest.param((AUTO, EXPLICIT), ("model",), marks=pytest.mark.more),
    ],
)
def test_replicas_have_their_own_examples_on_explicit_axes_too(types, names):
    """What types say of the axis of the replicas moves no example, and no task reduces over it."""

    def run(multiply, types):
        step = place(make_step(multiply, jaxpp.schedules.OneFOneB(), replicas=2), types)
        return step(parameters(), *batch()), count_collectives(step)

    got, ranks = run(with_types(names), types)
    wanted, counted = run(plain, (AUTO, AUTO))
    assert_same(got, wanted)
    for rank, other in zip(ranks, counted, strict=True):
        assert rank.all == other.all
        assert rank.once == {"all-reduce over data": 1}
        assert all(kind.endswith("model") for own in rank.in_tasks.values() for kind in own)


def test_the_types_in_a_stage_say_how_a_microbatch_is_split():
    seen = []

    def watch(layer_fn):
        def watched(x, layer):
            seen.append((jax.typeof(x).sharding.spec, jax.typeof(layer["up"]).sharding.spec))
            return layer_fn(x, layer)

        return watched

    multiply = with_types(("data", "model"))
    step = place(make_step(multiply, jaxpp.schedules.OneFOneB(), watch), (EXPLICIT, EXPLICIT))
    step.lower(parameters(), *batch())
    assert set(seen) == {(P("data", None), P(None, "model"))}


def scanned(layer_fn):
    def twice(x, layer):
        return jax.lax.scan(lambda x, _: (layer_fn(x, layer), None), x, None, length=2)[0]

    return twice


def resharded(layer_fn):
    def gathered(x, layer):
        whole = jax.sharding.reshard(layer_fn(x, layer), P(None, None))
        return jax.sharding.reshard(jnp.cumsum(whole, axis=0), P("data", None)) / 4

    return gathered


def shard_mapped(layer_fn):
    def centred(x, layer):
        def centre(x):
            return x - jax.lax.pmean(jnp.mean(x, 0, keepdims=True), "data")

        return jax.shard_map(centre, in_specs=P("data"), out_specs=P("data"))(layer_fn(x, layer))

    return centred


def branched(layer_fn):
    def either(x, layer):
        large = jnp.sum(x) > 0
        return jax.lax.cond(large, lambda x: layer_fn(x, layer), lambda x: 2 * x, x)

    return either


def rematerialised(layer_fn):
    return jax.checkpoint(layer_fn)


def cumulative(layer_fn):
    return lambda x, layer: jnp.cumsum(layer_fn(x, layer), axis=0) / 4


def centred(layer_fn):
    def without_mean(x, layer):
        x = layer_fn(x, layer)
        return x - jnp.mean(x, 0, keepdims=True)

    return without_mean


@pytest.mark.more
@pytest.mark.parametrize(
    ("layer_of", "same"),
    [
        (scanned, scanned),
        (resharded, cumulative),
        (shard_mapped, centred),
        (branched, branched),
        (rematerialised, rematerialised),
    ],
)
def test_what_a_layer_does_is_done_on_explicit_axes_too(layer_of, same):
    wanted = jax.jit(jaxpp.place(make_step(plain, jaxpp.schedules.OneFOneB(), same)).__wrapped__)
    multiply = with_types(("data", "model"))
    step = place(make_step(multiply, jaxpp.schedules.OneFOneB(), layer_of), (EXPLICIT, EXPLICIT))
    assert_close(step(parameters(), *batch()), wanted(parameters(), *batch()))


def test_optimizer_state_is_split_on_explicit_axes():
    def step(params, momentum, x, y):
        new, loss = make_step(with_types(("data", "model")), jaxpp.schedules.OneFOneB())(
            params, x, y
        )
        momentum = jax.tree.map(lambda m, p, n: 0.9 * m + p - n, momentum, params, new)
        return jax.tree.map(lambda p, m: p - m, params, momentum), momentum, loss

    mesh = jaxpp.MpmdMesh(SHAPE, AXES, axis_types=(AUTO, EXPLICIT, EXPLICIT))
    specs = (RULES, RULES, P("data"), P("data"))
    placed = jaxpp.place(step, mesh, in_specs=specs, zero1="data")
    momentum = jax.tree.map(jnp.zeros_like, parameters())
    params, momentum, loss = placed(parameters(), momentum, *batch())
    assert_close((params, loss), on_one_device())
    for leaf in jax.tree.leaves(momentum):
        assert leaf.addressable_shards[0].data.size * 2 <= leaf.size


def test_a_type_that_is_not_clear_is_an_error_of_jax_with_the_line():
    step = place(make_step(plain, jaxpp.schedules.OneFOneB()), (EXPLICIT, EXPLICIT))
    with pytest.raises(Exception, match="out_sharding") as error:
        step(parameters(), *batch())
    assert any(__file__ == str(entry.path) for entry in error.traceback[1:])


def test_a_sum_that_is_left_unreduced_is_an_error():
    def multiply(a, b, spec):
        if spec == P("data", None):
            h = jnp.matmul(a, b, out_sharding=P("data", None, unreduced=frozenset({"model"})))
            return jax.sharding.reshard(h, spec)
        return jnp.matmul(a, b, out_sharding=spec)

    step = place(make_step(multiply, jaxpp.schedules.OneFOneB()), (EXPLICIT, EXPLICIT))
    with pytest.raises(ValueError, match=r"unreduced.*test_axis_types.py|test_axis_types.py.*unre"):
        step(parameters(), *batch())
