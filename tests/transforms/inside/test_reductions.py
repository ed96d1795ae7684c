"""What replicas on devices of their own made is combined, and differentiated, as on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import assert_close, assert_same

pytestmark = pytest.mark.cases(3)
REPLICAS, MICROBATCHES = 4, 2
EXAMPLES = 2 * REPLICAS * MICROBATCHES


class Difference:
    """An operator of the user's; its order counts."""

    def init(self, x):
        return jnp.zeros(x.shape, x.dtype)

    def combine(self, acc, x):
        return x - acc / 2

    def finish(self, acc, num_microbatches):
        return acc

    def merge(self, acc, other):
        return other - acc / 2


def parameters():
    return [jax.random.normal(k, (4, 4)) / 2 for k in jax.random.split(jax.random.key(0))]


def data():
    return jax.random.normal(jax.random.key(1), (EXAMPLES, 4))


def place(fun: Any, devices: int, **options) -> Any:
    fun = jaxpp.schedule(fun, options.pop("schedule", jaxpp.schedules.OneFOneB()))
    mesh = jaxpp.MpmdMesh((2, devices), ("mpmd", "data"))
    return jaxpp.place(fun, mesh, in_specs=(None, P("data")), **options)


# ---- a maximum ----------------------------------------------------------------------------------

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.bool_]


def largest(w, x):
    """The loss, and the largest activations of each type."""
    h = jaxpp.pipeline_enter_stage(x * w[0][0])
    most = jnp.max(h, axis=0)
    return jnp.mean(h @ w[1]), [(most if d != jnp.bool_ else most > 2).astype(d) for d in DTYPES]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 3, EXAMPLES - 1])
def test_a_maximum_over_replicas_keeps_nan(at, devices):
    run = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(largest), has_aux=True),
        MICROBATCHES,
        reduce=(("mean", "max"), "mean"),
        replicas=REPLICAS,
    )
    x = data().at[at, 1].set(jnp.nan)
    ((_, got), _), ((_, want), _) = (
        place(run, devices)(parameters(), x),
        jax.jit(run)(parameters(), x),
    )
    assert_same(got, want)
    assert all(jnp.isnan(y[1]) and jnp.isfinite(y[0]) for y in got[:4])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_maximum_of_what_replicas_carry_keeps_nan(devices):
    def run(seen, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x))
        return jnp.maximum(seen, jnp.max(h * 2, axis=0))

    run = jaxpp.microbatch(
        jaxpp.wrap_forward(run),
        MICROBATCHES,
        in_axes=("carry", 0),
        reduce="carry",
        merge="max",
        replicas=REPLICAS,
    )
    step = place(run, devices, schedule=jaxpp.schedules.ForwardOnly())
    for at in (0, EXAMPLES // 2, EXAMPLES - 1):
        x = data().at[at, 1].set(jnp.nan)
        got = step(jnp.zeros(4), x)
        assert_same(got, jax.jit(run)(jnp.zeros(4), x))
        assert jnp.isnan(got).tolist() == [False, True, False, False]


# ---- a loss over the whole batch -----------------------------------------------------------------


@pytest.mark.cases(7)
@pytest.mark.parametrize("reduce", ["max", "mean", "sum", "concat", "last", "stack", Difference()])
@pytest.mark.parametrize("devices", [2, 1, 4])
def test_a_loss_over_the_batch_of_all_devices_is_differentiated(reduce, devices):
    def encode(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        return h if reduce == "concat" else jnp.max(h, axis=0)

    def of(wrap):
        many = jaxpp.microbatch(wrap(encode), MICROBATCHES, reduce=reduce, replicas=REPLICAS)
        return jax.value_and_grad(lambda w, x: jnp.sum(many(w, x) ** 2))

    got = place(of(jaxpp.wrap_forward), devices)(parameters(), data())
    want = jax.jit(of(lambda encode: encode))(parameters(), data())
    assert_close(got, want, rtol=1e-5, atol=1e-5)
