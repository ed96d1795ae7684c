"""What `microbatch` gives has the weak types of the plain function, scheduled and placed alike.

An array is weakly typed if it is made of Python numbers alone, as `jnp.full(4, 0.1)` is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import schedules
from tests.helpers import assert_close, mesh_of
from tests.transforms.tasks.test_directions import BothWays

pytestmark = pytest.mark.cases(2)
M = 4
SCHEDULES = {
    "1f1b": schedules.OneFOneB(),
    "zb_h1": schedules.ZeroBubbleH1(),
    "recompute": schedules.Recompute(schedules.OneFOneB()),
    "both_ways": BothWays(),
}


class Mean:
    """An operator of the user's, whose accumulators are strongly typed."""

    def init(self, x):
        return jnp.zeros(x.shape, x.dtype)

    def combine(self, acc, x):
        return acc + x

    def finish(self, acc, num_microbatches):
        return acc / num_microbatches

    def merge(self, acc, other):
        return acc + other


def parameters():
    first, second = jax.random.normal(jax.random.key(0), (2, 4, 4)) / 2
    weak = {
        "bias": jnp.full(4, 0.1),
        "tied": jnp.full(4, 0.3),
        "unread": jnp.full((2, 3), 0.7),
        "number": jax.lax.full((), 0.5),
        "layers": jnp.full((4, 4), 0.2),
    }
    assert all(w.weak_type for w in weak.values())
    return {"first": first, "second": second, **weak}


def data():
    return jax.random.normal(jax.random.key(1), (16, 4))


#: How the outputs that are no loss are combined, and the values that slices have in common.
REDUCE = {
    "mean": "mean",
    "sum": "sum",
    "integers": "sum",
    "max": "max",
    "stack": "stack",
    "concat": "concat",
    "operator": Mean(),
    "strong": "max",
    "number": "mean",
}


def loss(w, x):
    h = jnp.tanh(x @ w["first"] * w["number"] + w["bias"] + w["tied"])
    h = jaxpp.pipeline_enter_stage(h) @ w["second"] + w["tied"]
    return jnp.mean((h - x) ** 2), {
        "mean": w["bias"] * 2,
        "sum": w["bias"] + w["tied"],
        "integers": jax.lax.full((3,), 2),
        "max": w["tied"] / 2,
        "stack": w["unread"] * 3,
        "concat": w["unread"] + 1,
        "operator": w["bias"] - 1,
        "strong": jnp.max(h),
        "number": w["number"] * w["number"],
    }


def looped(wrap, outside: bool, count: int = M, **options) -> Any:
    """The loss, its outputs, and its gradient; taken in each slice, or outside of the loop."""
    if outside:
        many = jaxpp.microbatch(wrap(loss), count, reduce=("mean", REDUCE), **options)
        return jax.value_and_grad(many, has_aux=True)
    grad = jax.value_and_grad(wrap(loss), has_aux=True)
    return jaxpp.microbatch(grad, count, reduce=(("mean", REDUCE), "mean"), **options)


def plain(loss):
    return loss


def weak_types(tree):
    return jax.tree.map(lambda x: bool(x.weak_type), tree)


WANTED = weak_types(jax.eval_shape(jax.value_and_grad(loss, has_aux=True), parameters(), data()))
outside = pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])


@outside
@pytest.mark.parametrize("jit", [plain, jax.jit], ids=["eager", "jit"])
def test_a_loop_keeps_weak_types(jit, outside):
    got = jit(looped(plain, outside))(parameters(), data())
    assert weak_types(got) == WANTED
    assert WANTED[1]["bias"] and WANTED[0][1]["integers"] and not WANTED[0][1]["strong"]


@outside
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_so_does_a_schedule(schedule, outside):
    run = jaxpp.schedule(looped(jaxpp.wrap_forward, outside), SCHEDULES[schedule])
    want = jax.jit(looped(plain, outside))(parameters(), data())
    for way in (run, jax.jit(run), jaxpp.place(run, mesh_of(2))):
        got = way(parameters(), data())
        assert weak_types(got) == WANTED
        assert_close(got, want)


@outside
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_so_do_replicas(devices, outside):
    run = looped(jaxpp.wrap_forward, outside, 2, replicas=2)
    run = jaxpp.schedule(run, SCHEDULES["1f1b"])
    if devices:
        mesh = jaxpp.MpmdMesh((2, devices), ("mpmd", "data"))
        run = jaxpp.place(run, mesh, in_specs=(None, P("data")))
    assert weak_types(run(parameters(), data())) == WANTED


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["mean", "last"])
def test_so_does_what_is_carried(how, replicas):
    def run(state, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x))
        return state * 0.5 + 1.0, jnp.mean(h * state[0])

    merge = {"merge": (how, None)} if replicas > 1 else {}
    options: Any = dict(in_axes=("carry", 0), reduce=("carry", "mean"), replicas=replicas, **merge)
    f = jaxpp.microbatch(jaxpp.wrap_forward(run), 2, **options)
    placed = jaxpp.place(jaxpp.schedule(f, schedules.ForwardOnly()), mesh_of(2))
    for way in (f, jax.jit(f), placed):
        state, mean = way(jnp.full(4, 0.1), data())
        assert state.weak_type and not mean.weak_type


def test_so_do_stacked_layers():
    def loss(w, x):
        def layer(h, own):
            return jnp.tanh(h @ w["first"] + own), None

        return jnp.mean(jax.lax.scan(layer, x, w["layers"])[0] ** 2)

    want = jax.jit(jax.value_and_grad(loss))(parameters(), data())
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, 2))
    run = jaxpp.schedule(jaxpp.microbatch(jax.value_and_grad(staged), M), SCHEDULES["1f1b"])
    got = jaxpp.gather(jaxpp.place(run, mesh_of(2))(parameters(), data()))
    assert want[1]["layers"].weak_type
    assert_close(got, want)


def test_so_does_a_map():
    run = jaxpp.schedule(looped(jaxpp.wrap_forward, False), SCHEDULES["1f1b"])
    many = jax.tree.map(lambda x: jnp.stack([x, x]), parameters())

    def batched(f):
        return jax.vmap(f, (0, None))

    want = jax.jit(batched(looped(plain, False)))(many, data())
    assert_close(jaxpp.place(batched(run), mesh_of(2))(many, data()), want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_traced_once(schedule):
    """Were a new parameter of another type than the old one, each step would be traced twice."""
    traced = []

    def counted(w, x):
        traced.append(None)
        return loss(w, x)[0]

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(counted)), M)
    grad = jaxpp.schedule(grad, SCHEDULES[schedule])

    def step(w, x):
        value, gradients = grad(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value

    placed, w = jaxpp.place(step, mesh_of(2)), parameters()
    w, _ = placed(w, data())
    first = len(traced)
    for _ in range(2):
        w, _ = placed(w, data())
    assert len(traced) == first
    assert weak_types(w) == weak_types(parameters())
