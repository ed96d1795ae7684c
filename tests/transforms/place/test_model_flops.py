"""The model FLOPs of a step, against counts by hand and those of XLA for the plain function."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp.planning import DEVICES
from jaxpp.schedules import by_name

WIDTH, EXAMPLES, MICROBATCHES, STAGES = 32, 64, 4, 4
PRODUCT = 2 * EXAMPLES * WIDTH * WIDTH
DEVICE = jaxpp.Device(flops=1e12, bandwidth=1e11)
NOTHING, DOTS = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.dots_saveable


def loss_fn(weights, x):
    for n, w in enumerate(weights):
        x = jnp.tanh((x if n == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean(x**2)


WEIGHTS, X = [jnp.eye(WIDTH)] * STAGES, jnp.ones((EXAMPLES, WIDTH))


def make_step(schedule, mesh, policy=None, replicas=1, **options):
    grad = jax.grad(jaxpp.wrap_forward(loss_fn, policy=policy))
    grad = jaxpp.microbatch(grad, MICROBATCHES, in_axes=(None, 0), replicas=replicas)
    return jaxpp.place(jaxpp.schedule(grad, schedule), mesh, **options)


def shared(ranks):
    """A mesh whose ranks share a device."""
    return jaxpp.MpmdMesh((ranks,), devices=[jax.devices()[0]] * ranks)


@pytest.mark.parametrize("policy", [None, NOTHING, DOTS], ids=["all", "nothing", "dots"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_recomputation_does_not_count(name, policy):
    lowered = make_step(by_name(name), shared(STAGES), policy).lower(WEIGHTS, X)
    # The forward, and the gradients of weights and examples, but those of the first examples.
    assert lowered.flops == (2 * PRODUCT, *[3 * PRODUCT] * (STAGES - 1))


def test_a_rank_of_several_stages_has_those_of_all():
    step = make_step(jaxpp.schedules.Interleaved1F1B(2), shared(2), NOTHING)
    assert step.lower(WEIGHTS, X).flops == (5 * PRODUCT, 6 * PRODUCT)


@pytest.mark.parametrize("policy", [None, NOTHING], ids=["all", "nothing"])
def test_replicas_count_on_all_devices_of_a_rank(policy):
    mesh = jaxpp.MpmdMesh((4, 2), ("mpmd", "data"))
    specs = None, PartitionSpec("data")
    step = make_step(jaxpp.schedules.OneFOneB(), mesh, policy, replicas=2, in_specs=specs)
    compiled = step.lower(WEIGHTS, X).compile()
    assert compiled.flops == (2 * PRODUCT, *[3 * PRODUCT] * (STAGES - 1))
    assert compiled.mfu(1e-3, DEVICE) == pytest.approx(11 * PRODUCT / (1e-3 * 8e12))
    assert compiled.mfu(1e-3, DEVICE, rank=1) == pytest.approx(3 * PRODUCT / (1e-3 * 2e12))


def test_the_sum_is_that_of_xla_for_the_plain_function():
    plain = jax.jit(jax.grad(loss_fn)).lower(WEIGHTS, X).cost_analysis()
    compiled = make_step(jaxpp.schedules.OneFOneB(), shared(STAGES)).lower(WEIGHTS, X).compile()
    assert isinstance(plain, dict)
    assert sum(compiled.flops) == pytest.approx(plain["flops"], rel=0.05)  # it counts tanh, too
    again = make_step(jaxpp.schedules.OneFOneB(), shared(STAGES), NOTHING)
    counted = sum(own["flops"] for own in again.lower(WEIGHTS, X).compile().cost_analysis())
    assert counted > 1.2 * plain["flops"]  # XLA counts recomputation


def test_a_placed_function_has_those_of_its_last_call():
    step = make_step(jaxpp.schedules.OneFOneB(), shared(STAGES))
    with pytest.raises(ValueError, match="has not been called yet"):
        _ = step.flops
    with pytest.raises(ValueError, match="has not been called yet"):
        step.mfu(1.0, DEVICE)
    step(WEIGHTS, X)
    assert sum(step.flops) == 11 * PRODUCT
    assert step.mfu(1e-3, DEVICE) == pytest.approx(11 * PRODUCT / (1e-3 * 1e12))  # one device
    step(WEIGHTS, X[: EXAMPLES // 2])
    assert sum(step.flops) == 11 * PRODUCT / 2


def test_a_device_may_be_named():
    compiled = make_step(jaxpp.schedules.OneFOneB(), shared(STAGES)).lower(WEIGHTS, X).compile()
    assert compiled.mfu(1e-3, "h100") == compiled.mfu(1e-3, DEVICES["h100"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seconds": 0.0}, "seconds is the time of a step, finite and more than 0, got 0.0"),
        ({"seconds": -1.0}, "seconds is the time of a step"),
        ({"seconds": math.nan}, "seconds is the time of a step"),
        ({"seconds": math.inf}, "seconds is the time of a step"),
        ({"rank": 4}, "rank is one of 0 to 3, or None, got 4"),
        ({"rank": -1}, "rank is one of 0 to 3, or None, got -1"),
        ({"device": "h1000"}, "there is no device named 'h1000'; use one of a100"),
    ],
)
def test_bad_input_is_an_error(values, message):
    compiled = make_step(jaxpp.schedules.OneFOneB(), shared(STAGES)).lower(WEIGHTS, X).compile()
    given = {"seconds": 1.0, "device": DEVICE, "rank": None} | values
    with pytest.raises(ValueError, match=message):
        compiled.mfu(given["seconds"], given["device"], rank=given["rank"])
