"""`jax.vmap(..., axis_name=)` of a scheduled function: what knows the axis computes as in JAX."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import schedules
from tests.helpers import assert_close_sums, mesh_of

pytestmark = pytest.mark.cases(2)
MEMBERS, M = 3, 4
SCHEDULES = [
    schedules.OneFOneB(),
    schedules.ZeroBubbleH1(),
    schedules.Recompute(schedules.OneFOneB()),
]


def members(*sizes: int) -> list[jax.Array]:
    """Makes the weights of an ensemble, a first axis for each size."""
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(k, (*sizes, 4, 4)) / 2 for k in keys]


def data(size: int = 8) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (size, 4))


# ---- losses that know the axis -------------------------------------------------------------------


def layers(w, x, change=lambda h: h, first=lambda x: x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(first(x @ w[0])))
    return jnp.mean(change(h @ w[1]) ** 2)


def normalized(h):
    """A BatchNorm whose statistics are of the examples of all members."""
    mean = jax.lax.pmean(h.mean(0), "member")
    variance = jax.lax.pmean(jnp.mean((h - mean) ** 2, 0), "member")
    return (h - mean) / jnp.sqrt(variance + 1e-3)


def dropped(h):
    key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index("member"))
    return h * jax.random.bernoulli(key, 0.5, h.shape)


LOSSES = {
    "mean-of-weights": lambda w, x: layers(w, x, lambda h: h - jax.lax.pmean(w[0].sum(), "member")),
    "mean": lambda w, x: layers(w, x, lambda h: h - jax.lax.pmean(h, "member")),
    "sum": lambda w, x: layers(w, x, first=lambda h: h + jax.lax.psum(h, "member") / 9),
    "index": lambda w, x: layers(w, x, lambda h: h * (1 + jax.lax.axis_index("member"))),
    "gather": lambda w, x: layers(w, x, lambda h: jax.lax.all_gather(h, "member")[0] * h),
    "largest": lambda w, x: layers(
        w, x, lambda h: h - jax.lax.pmax(jax.lax.stop_gradient(h), "member")
    ),
    "batch-norm": lambda w, x: layers(w, x, normalized, normalized),
    "dropout": lambda w, x: layers(w, x, dropped, dropped),
}


def by_slices(loss, count: int = M):
    """Plain JAX: the mean over slices of the loss and its gradient."""

    def run(w, x):
        each = [jax.value_and_grad(loss)(w, own) for own in jnp.split(x, count)]
        return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]) / count, *each)

    return run


def scheduled(loss, schedule=SCHEDULES[0], count: int = M, **options) -> Any:
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), count, **options)
    return jaxpp.schedule(grad, schedule)


def batched(fun, axes: Any = (0, None), **options) -> Any:
    return jax.vmap(fun, axes, axis_name="member", **options)


def place(fun) -> Any:
    return jaxpp.place(fun, mesh_of(2))


#: Where the map is: outside of what is placed or compiled, or inside.
WAYS = {
    "placed": lambda f: place(batched(f)),
    "of-placed": lambda f: batched(place(f)),
    "jitted": lambda f: jax.jit(batched(f)),
    "of-jitted": lambda f: batched(jax.jit(f)),
    "eager": batched,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_knows_the_axis(loss, way):
    loss, args = LOSSES[loss], (members(MEMBERS), data())
    got = WAYS[way](scheduled(loss))(*args)
    assert_close_sums(got, jax.jit(batched(by_slices(loss)))(*args), 1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_each_schedule_keeps_the_values(loss, schedule):
    loss, args = LOSSES[loss], (members(MEMBERS), data())
    got = place(batched(scheduled(loss, schedule)))(*args)
    assert_close_sums(got, jax.jit(batched(by_slices(loss)))(*args), 1e-4)


@pytest.mark.parametrize("loss", ["index", "dropout"])
def test_members_that_differ_by_their_index_alone(loss):
    """No argument is batched, but results are."""
    loss, args = LOSSES[loss], (members(), data())
    options: Any = dict(axes=(None, None), axis_size=MEMBERS)
    got = place(batched(scheduled(loss), **options))(*args)
    assert_close_sums(got, jax.jit(batched(by_slices(loss), **options))(*args), 1e-4)
    assert got[0].shape == (MEMBERS,) and len(set(got[0].tolist())) == MEMBERS


@pytest.mark.parametrize("inner", [jax.jit, lambda f: f], ids=["jitted", "plain"])
def test_maps_are_nested(inner):
    def loss(w, x):
        h = jnp.tanh(x @ w[0])
        h = h - jax.lax.pmean(h, ("member", "other"))
        number = jax.lax.axis_index("other") + 2 * jax.lax.axis_index("member")
        h = jaxpp.pipeline_enter_stage(h * (1 + number)) @ w[1]
        total = jax.lax.psum(h, "other") / 9
        return jnp.mean((h - jax.lax.pmean(h, "member")) ** 2) + jnp.mean(total**2)

    def twice(f):
        return batched(jax.vmap(inner(f), (0, None), axis_name="other"))

    args = members(2, MEMBERS), data()
    want = jax.jit(twice(by_slices(loss)))(*args)
    assert_close_sums(place(twice(scheduled(loss)))(*args), want, 1e-4)
    assert_close_sums(twice(scheduled(loss))(*args), want, 1e-4)


@pytest.mark.parametrize(
    ("replicas", "devices"), [(r, d) for r, d in itertools.product((2, 4), (1, 2, 4)) if d <= r]
)
@pytest.mark.parametrize("size", [2, MEMBERS])
def test_replicas_have_the_axis_too(size, replicas, devices):
    loss, args = LOSSES["batch-norm"], (members(size), data(16))
    f = batched(scheduled(loss, count=2, replicas=replicas))
    mesh = jaxpp.MpmdMesh((2, devices), ("mpmd", "data"))
    got = jaxpp.place(f, mesh, in_specs=(None, P("data")))(*args)
    want = jax.jit(batched(by_slices(loss, 2 * replicas)))(*args)
    assert_close_sums(got, want, 1e-4)


def test_members_are_on_devices_of_their_own():
    def split(h):
        h = jax.lax.with_sharding_constraint(h, P(None, None))
        return h - jax.lax.pmean(h, "member")

    def loss(w, x, split=split):
        return layers(w, x, split)

    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "model"))
    f = batched(scheduled(loss), spmd_axis_name="model")
    args = members(4), data()
    got = jaxpp.place(f, mesh, in_specs=(P("model"), None))(*args)
    want = jax.jit(batched(by_slices(LOSSES["mean"])))(*args)
    assert_close_sums(got, want, 1e-4)


@pytest.mark.parametrize("reduce", ["mean", "max", "concat"])
def test_a_loss_over_the_whole_batch_knows_the_axis(reduce):
    def encode(w, x):
        h = x @ w[0]
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h - jax.lax.pmean(h, "member"))) @ w[1]
        return h if reduce == "concat" else jnp.max(h, 0)

    def grad(wrap):
        many = jaxpp.microbatch(wrap(encode), M, reduce=reduce)
        return jax.value_and_grad(lambda w, x: jnp.sum(many(w, x) ** 2))

    args = members(MEMBERS), data()
    got = place(batched(jaxpp.schedule(grad(jaxpp.wrap_forward), SCHEDULES[0])))(*args)
    assert_close_sums(got, jax.jit(batched(grad(lambda f: f)))(*args), 1e-4)


def test_gradients_of_several_scalars_know_the_axis():
    """To be over an axis is no effect, which could not be left out where nothing reads it."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        return jnp.mean((h - jax.lax.pmean(h, "member")) ** 2), jnp.mean(h)

    def grad(wrap):
        return jax.value_and_grad(jaxpp.microbatch(wrap(loss), M), has_aux=True)

    args = members(MEMBERS), data()
    got = place(batched(jaxpp.schedule(grad(jaxpp.wrap_forward), SCHEDULES[0])))(*args)
    assert_close_sums(got, jax.jit(batched(jax.value_and_grad(loss, has_aux=True)))(*args), 1e-4)
