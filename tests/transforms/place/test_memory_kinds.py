"""Memory kinds: what `jax.jit` runs, a placed step runs, with results in the same memory."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import compute_on
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

import jaxpp
from tests.helpers import assert_close, mesh_of
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
POLICIES = jax.checkpoint_policies
NAMES = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)
DOTS = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")


def sharding(kind):
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def put(tree, place, **options):
    return jax.tree.map(lambda x: jax.device_put(x, place, **options), tree)


def kinds_of(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


# ---- losses: in the stages ----------------------------------------------------------------------


def of_host_weights(w, x):
    return two_layers.loss(put(w, DEVICE, src=HOST), x)


def of_host_batch(w, x):
    return two_layers.loss(w, jax.device_put(x, DEVICE))


def with_host_edge(w, x):
    h = jax.device_put(jnp.tanh(x @ w[0]), HOST, src=DEVICE)
    h = jaxpp.pipeline_enter_stage(h)
    return jnp.mean((jax.device_put(h, DEVICE, src=HOST) @ w[1]) ** 2)


def with_edge_by_sharding(w, x):
    host, device = sharding("pinned_host"), sharding("device")
    h = jax.device_put(jnp.tanh(x @ w[0]), host, src=device)
    h = jaxpp.pipeline_enter_stage(h)
    return jnp.mean((jax.device_put(h, device, src=host) @ w[1]) ** 2)


def named(w, x):
    h = checkpoint_name(jnp.sin(jnp.tanh(x @ w[0])), "h")
    return jnp.mean(jnp.sin(jaxpp.pipeline_enter_stage(h) @ w[1]) ** 2)


def checkpointed(w, x):
    def first(w, x):
        return 2 * checkpoint_name(jnp.sin(jnp.tanh(x @ w)), "h")

    def last(w, h):
        return checkpoint_name(jnp.sin(h @ w), "h")

    h = jaxpp.pipeline_enter_stage(jax.checkpoint(first, policy=NAMES)(w[0], x))
    return jnp.mean(eqx.filter_checkpoint(last, policy=DOTS)(w[1], h) ** 2)


# ---- steps: around the loop ---------------------------------------------------------------------


def plain(grad_fn):
    return grad_fn


def with_momentum(bring, send):
    def around(grad_fn):
        def step(w, m, x):
            value, grads = grad_fn(w, x)
            m = [0.9 * a + g for a, g in zip(bring(m), grads, strict=True)]
            return [a - 0.1 * b for a, b in zip(w, m, strict=True)], send(m), value

        return step

    return around


def by_space(grad_fn):
    return with_momentum(lambda m: put(m, DEVICE), lambda m: put(m, HOST))(grad_fn)


def by_sharding(grad_fn):
    host, device = sharding("pinned_host"), sharding("device")
    return with_momentum(lambda m: put(m, device), lambda m: put(m, host))(grad_fn)


def on_host(fun):
    """Computes in the memory of the host; JAX 0.12 changed how that is said."""
    under: Any = compute_on.compute_on
    try:
        under("device_host")
    except TypeError:
        return under(fun, compute_type="device_host", out_memory_spaces=HOST)

    def run(*args):
        with under("device_host"):
            return fun(*args)

    return run


def computed_there(grad_fn):
    def step(w, m, x):
        value, grads = grad_fn(w, x)
        update = on_host(lambda a, g: 0.9 * a + g)
        m = [update(a, g) for a, g in zip(m, put(grads, HOST), strict=True)]
        norm = sum(jnp.sum(a * a) for a in m)
        return put(m, DEVICE), [a * norm for a in m], norm, value

    return step


def with_results(grad_fn):
    def step(w, m, x):
        value, grads = grad_fn(w, x)
        back = put(put(grads[0], HOST), DEVICE)
        unpinned = put(grads[1], sharding("unpinned_host"))
        return put(value, HOST), put(grads, sharding("pinned_host")), back, unpinned, m

    return step


def in_kind(kind):
    return lambda: put([jnp.ones_like(w) for w in WEIGHTS], sharding(kind))


PINNED, UNPINNED = in_kind("pinned_host"), in_kind("unpinned_host")
PLAIN = (two_layers.loss, None)
ZB = jaxpp.schedules.ZeroBubbleH1()

#: By name: what is around the loop, the loss, its policy, the arguments, and which are donated.
CASES = {
    "momentum": (by_space, *PLAIN, lambda: (WEIGHTS, PINNED(), X), ()),
    "momentum, donated": (by_space, *PLAIN, lambda: (WEIGHTS, PINNED(), X), (1,)),
    "momentum by sharding": (by_sharding, *PLAIN, lambda: (WEIGHTS, PINNED(), X), ()),
    "compute_on": (computed_there, *PLAIN, lambda: (WEIGHTS, PINNED(), X), (1,)),
    "results": (with_results, *PLAIN, lambda: (WEIGHTS, PINNED(), X), ()),
    "unpinned": (by_space, *PLAIN, lambda: (WEIGHTS, UNPINNED(), X), (1,)),
    "weights": (plain, of_host_weights, None, lambda: (put(WEIGHTS, HOST), X), ()),
    "batch": (plain, of_host_batch, None, lambda: (WEIGHTS, put(X, HOST)), ()),
    "edge": (plain, with_host_edge, None, lambda: (WEIGHTS, X), ()),
    "edge by sharding": (plain, with_edge_by_sharding, None, lambda: (WEIGHTS, X), ()),
    "names": (plain, named, NAMES, lambda: (WEIGHTS, X), ()),
    "dots": (plain, named, DOTS, lambda: (WEIGHTS, X), ()),
    "checkpoint": (plain, checkpointed, None, lambda: (WEIGHTS, X), ()),
}
MORE = pytest.mark.more


def loop_of(loss, policy, schedule):
    staged = jaxpp.wrap_forward(loss, policy=policy)
    loop = jaxpp.microbatch(jax.value_and_grad(staged), two_layers.MICROBATCHES)
    return jaxpp.schedule(loop, schedule)


def check(mesh, case, schedule=None, **options):
    """Compares the values and the memory kinds of a placed step with those of `jax.jit`."""
    around, loss, policy, args, donated = CASES[case]
    want = jax.jit(around(jax.value_and_grad(loss)))(*args())
    loop = loop_of(loss, policy, schedule or jaxpp.schedules.OneFOneB())
    placed = jaxpp.place(around(loop), mesh, donate_argnums=donated, **options)
    got = placed(*args())
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4)
    assert kinds_of(jaxpp.gather(got)) == kinds_of(want)
    return placed, got, want


@pytest.mark.parametrize(
    "case", [next(iter(CASES)), *(pytest.param(c, marks=MORE) for c in [*CASES][1:])]
)
def test_a_step_does_as_jit_with_results_in_the_same_memory(case):
    for shared, schedule in ((False, None), (True, ZB)):
        placed, got, want = check(mesh_of(2, shared=shared), case, schedule)
        assert kinds_of(got) == kinds_of(want)
    assert jaxpp.certify(placed, *CASES[case][3]()).exact


@MORE
@pytest.mark.parametrize("case", ["momentum, donated", "compute_on", "batch", "edge", "dots"])
def test_so_does_one_with_axes_inside_a_rank(case):
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    count = len(CASES[case][3]())
    specs = (*[P()] * (count - 1), P("data"))
    with pytest.warns(UserWarning, match="all-reduce"):
        _, got, want = check(mesh, case, in_specs=specs)
    assert kinds_of(got) == kinds_of(want)
