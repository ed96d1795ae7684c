"""Values in the memory of the host: a task may have some inside; none leaves a task there."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpp
from tests.helpers import assert_close
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KINDS = ("pinned_host", "unpinned_host")
POLICIES = jax.checkpoint_policies


def in_memory(x, kind):
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [False, True])
def test_an_argument_in_another_memory_kind_is_named(kind, later):
    def step(state, x):
        value, grads = two_layers.scheduled()(state["w"], x)
        return value, [jax.device_put(state["m"], DEVICE) + jnp.mean(g) for g in grads]

    placed = two_layers.place(step)
    if later:
        placed({"w": WEIGHTS, "m": X}, X)
    with pytest.raises(ValueError, match=rf"args\[0\]\['m'\] is in memory kind '{kind}'.*Device"):
        placed({"w": WEIGHTS, "m": in_memory(X, kind)}, X)


def with_host_result(value, grads):
    return value, [jax.device_put(g, HOST) for g in grads]


def with_host_sharding(value, grads):
    return value, [in_memory(g, "pinned_host") for g in grads]


@pytest.mark.parametrize("around", [with_host_result, with_host_sharding])
def test_a_result_in_host_memory_is_refused_with_its_line(around):
    placed = two_layers.place(lambda w, x: around(*two_layers.scheduled()(w, x)))
    with pytest.raises(ValueError, match=r"test_memory_kinds\.py:\d+ leaves .*host memory"):
        placed(WEIGHTS, X)


def there_and_back(x):
    return jax.device_put(jax.device_put(x, HOST), DEVICE)


def offloaded(policy):
    """A loss of two stages, each of which keeps for its backward what a policy says."""

    def loss(w, x):
        h = checkpoint_name(jnp.sin(jnp.tanh(x @ w[0])), "h")
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ w[1]) ** 2)

    loop = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss, policy=policy)), two_layers.MICROBATCHES
    )
    return jaxpp.schedule(loop, jaxpp.schedules.OneFOneB()), loss


def test_activations_that_a_policy_offloads_between_tasks_are_refused():
    fun, _ = offloaded(POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"))
    with pytest.raises(ValueError, match="in host memory, and .*checkpoint policy"):
        two_layers.place(fun)(WEIGHTS, X)


def test_what_stays_inside_a_task_may_be_in_host_memory():
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    fun, loss = offloaded(policy)

    def step_of(grad_fn):
        def step(w, x):
            value, grads = grad_fn(w, x)
            return value, [there_and_back(g) for g in grads]

        return step

    got = two_layers.place(step_of(fun))(WEIGHTS, X)
    assert_close(got, jax.jit(step_of(two_layers.accumulated(loss)))(WEIGHTS, X), rtol=1e-4)
