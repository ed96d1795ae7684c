"""What several stages add up is added as the function adds it: first added, then cast."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp import precision, schedules
from jaxpp.transforms.tasks._accumulators import adds_like
from tests.helpers import assert_close_sums, assert_same, mesh_of
from tests.transforms.tasks.test_directions import BothWays

pytestmark = pytest.mark.cases(8)
M, STAGES = 4, 2
SCHEDULES = {
    "1f1b": schedules.OneFOneB(),
    "zb_h1": schedules.ZeroBubbleH1(),
    "recompute": schedules.Recompute(schedules.OneFOneB()),
    "both_ways": BothWays(),
}
by_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def data(scale: float = 1.0):
    return scale * jax.random.uniform(jax.random.key(1), (8, 4), minval=0.9, maxval=1.1)


def parameters(dtype):
    return jax.random.uniform(jax.random.key(0), (4,), minval=0.9, maxval=1.1).astype(dtype)


def shares_loss(factors, dtype=jnp.float32):
    """A sum over two stages, which read a weight in a type of their own, each times its factor."""
    first, second = (jnp.asarray(f, dtype) for f in factors)

    def loss(w, x):
        w, x = w.astype(dtype), x.astype(dtype)
        h = jaxpp.pipeline_enter_stage(first * (x * w))
        return jnp.mean(jnp.sum((h + second * (x * w)).astype(jnp.float32), axis=1))

    return loss


def both(fun, schedule: str, *args, **options):
    """What a function of stages gives placed, and what it gives as a loop over microbatches."""
    plain = jaxpp.microbatch(fun(lambda loss: loss), M, **options)
    placed = jaxpp.schedule(
        jaxpp.microbatch(fun(jaxpp.wrap_forward), M, **options), SCHEDULES[schedule]
    )
    placed = jaxpp.place(placed, mesh_of(STAGES))
    return placed(*args), jax.jit(plain)(*args)


def gradient(loss):
    return lambda wrap: jax.grad(wrap(loss))


#: Types of a weight, and the factors of its two shares, which almost cancel and are large for it.
CANCEL = {
    "bfloat16": (jnp.bfloat16, (3.0, -2.997)),
    "float16": (jnp.float16, (1e5, -99990.0)),
    "float8_e4m3fn": (jnp.float8_e4m3fn, (1e3, -990.0)),
    "float8_e5m2": (jnp.float8_e5m2, (1e6, -1e6 + 100)),
}


@by_schedule
@pytest.mark.parametrize("dtype", CANCEL)
def test_shares_are_cast_after_they_are_added(dtype, schedule):
    dtype, factors = CANCEL[dtype]
    loss = gradient(shares_loss(factors))
    got, want = both(loss, schedule, parameters(dtype), data())
    assert float(jnp.abs(want.astype(jnp.float32)).min()) > 0 and jnp.isfinite(want).all()
    chex.assert_trees_all_close(
        *(x.astype(jnp.float32) for x in (got, want)), rtol=2 * float(jnp.finfo(dtype).eps)
    )
    assert got.dtype == want.dtype


@by_schedule
@pytest.mark.parametrize("dtype", ["auto", None, jnp.float32])
def test_what_overflows_where_it_is_added_overflows(dtype, schedule):
    loss = shares_loss((1e4, 1.2e4), jnp.float16)
    x = data(4.0).at[:, 1].set(0.5)
    got, want = both(gradient(loss), schedule, parameters(jnp.float32), x, accumulator_dtype=dtype)
    assert_same(got, want)
    assert jnp.isinf(want).any() and jnp.isfinite(want).any()


def test_a_dynamic_loss_scale_sees_what_overflows_in_a_sum_of_stages():
    optimizer = precision.dynamic_loss_scale(optax.sgd(1e-3), 40000.0, period=100)

    def loss(w, scale, x):
        return scale * shares_loss((1.0, 1.0), jnp.float16)(w, x)

    def step(wrap):
        grad = jaxpp.microbatch(jax.grad(wrap(loss)), M, in_axes=(None, None, 0))
        grad = grad if wrap is plain else jaxpp.schedule(grad, schedules.OneFOneB())

        def run(w, state, x):
            updates, state = optimizer.update(grad(w, state.scale, x), state, w)
            return optax.apply_updates(w, updates), state

        return run

    def plain(loss):
        return loss

    w = parameters(jnp.float32)
    args = w, optimizer.init(w), data()
    got = jaxpp.place(step(jaxpp.wrap_forward), mesh_of(STAGES))(*args)
    want = jax.jit(step(plain))(*args)
    assert_same(got, want)
    assert not want[1].finite


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e5m2])
def test_shares_do_not_overflow_where_each_microbatch_adds_them(dtype):
    """The sums of each stage over microbatches would, and their sum is not a number."""
    loss = shares_loss((3e4, -3e4), jnp.float16)
    args = parameters(dtype), data()
    got, want = both(gradient(loss), "1f1b", *args, accumulator_dtype=None, reduce="sum")
    assert_same(got, want)
    assert jnp.isfinite(want).all()


@pytest.mark.parametrize("wide", [jnp.float32, jnp.int32, jnp.int16])
@pytest.mark.parametrize("narrow", [jnp.int8, jnp.uint8])
def test_integers_wrap_where_they_are_added(narrow, wide):
    def counts(w, x):
        h = jnp.tanh(x @ w[0])
        first = jnp.sum(h > -0.5, 0, dtype=narrow) * narrow(50)
        h = jaxpp.pipeline_enter_stage(h)
        return first, jnp.sum(h @ w[1] > -9, 0, dtype=narrow) * narrow(90)

    def cast(wrap):
        return lambda w, x: jnp.add(*wrap(counts)(w, x)).astype(wide)

    ws = list(jax.random.normal(jax.random.key(2), (2, 4, 4)))
    plain = jaxpp.microbatch(cast(lambda f: f), M, reduce="sum")
    f = jaxpp.microbatch(cast(jaxpp.wrap_forward), M, reduce="sum")
    f = jaxpp.place(jaxpp.schedule(f, schedules.ForwardOnly()), mesh_of(STAGES))
    x = jax.random.normal(jax.random.key(3), (8, 4))
    assert_same(f(ws, x), jax.jit(plain)(ws, x))


@by_schedule
@pytest.mark.parametrize("dtype", ["auto", None, jnp.float32])
@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
def test_a_weight_is_read_in_several_types(narrow, dtype, schedule):
    """Three of its shares are narrow or wide, and one goes through a transpose."""

    def loss(w, x):
        wide = w.astype(jnp.float32)
        h = jnp.tanh(x @ wide)
        h = jaxpp.pipeline_enter_stage(h.astype(narrow))
        h = (jnp.tanh(h @ w) @ w.T).astype(jnp.float32)
        return jnp.mean((h @ wide) ** 2)

    w = (jax.random.normal(jax.random.key(4), (4, 4)) / 2).astype(narrow)
    got, want = both(gradient(loss), schedule, w, data(), accumulator_dtype=dtype)
    assert_close_sums(*(x.astype(jnp.float32) for x in (got, want)), rtol=2e-2)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_replicas_add_shares_as_one(shared):
    loss = shares_loss((1e5, -99990.0))
    w, x = parameters(jnp.float16), data()

    def grad(wrap) -> Any:
        return jaxpp.microbatch(jax.grad(wrap(loss)), 2, replicas=2)

    f = jaxpp.schedule(grad(jaxpp.wrap_forward), schedules.OneFOneB())
    mesh = mesh_of(2, shared) if shared else jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    got = jaxpp.place(f, mesh)(w, x)
    assert_same(got, jax.jit(grad(lambda loss: loss))(w, x))


def test_floats_of_one_range_are_added_in_the_wider_one():
    floats = [jnp.bfloat16, jnp.float32, jnp.complex64]
    assert [[adds_like(a, b) for b in floats] for a in floats] == [
        [True, False, False], [True, True, False], [False, False, True]
    ]  # fmt: skip
    few = [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]
    assert not any(adds_like(a, b) for a in [*floats, *few] for b in few)
    integers = [jnp.int4, jnp.int8, jnp.uint8, jnp.int32]
    assert all(adds_like(a, b) == (a == b) for a in [*integers, jnp.float32] for b in integers)


def test_shares_of_bfloat16_are_sent_once_a_step():
    """What narrow floats of many exponents add up is added apart, as in float32."""
    loss = shares_loss((3.0, -2.9), jnp.bfloat16)
    f = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), M)
    step = jaxpp.place(jaxpp.schedule(f, schedules.OneFOneB()), mesh_of(STAGES))
    lowered = step.lower(parameters(jnp.float32), data())
    sent = [s.message for p in lowered.bundle.programs for s in p.sends]
    shapes = [a.shape for m in sent for k, a in zip(m.kinds, m.avals, strict=True) if k == "edge"]
    assert (4,) not in shapes
