"""ZeRO-3: parameters split over the replicas, gathered by each task that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from tests.helpers import assert_close_sums, train_step_of

WIDTH, LAYERS, EXAMPLES = 8, 2, 16
RULES = [(r"up$", P(None, "model")), (r"down$", P("model"))]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
AXES = ("mpmd", "data", "model")


def parameters():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 2 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 2 * WIDTH, WIDTH)) / WIDTH,
        "bias": 0.1 * jnp.arange(float(LAYERS * WIDTH)).reshape(LAYERS, WIDTH),
        "scale": jnp.float32(0.5),  # which cannot be split
    }


def by_layer(params):
    """The parameters as a list of layers, so that each rank has its own."""
    layers = [{k: v[n] for k, v in params.items() if v.ndim} for n in range(LAYERS)]
    return {"layers": layers, "scale": params["scale"]}


def apply(layer, x, scale):
    return x + scale * jnp.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]


def unrolled(params, x, y):
    for n, layer in enumerate(params["layers"]):
        if n == LAYERS // 2:
            x = jaxpp.pipeline_enter_stage(x)
        x = apply(layer, x, params["scale"])
    # What is added to the loss of the examples counts once.
    return jnp.mean((x - y) ** 2) + 0.01 * jnp.sum(params["layers"][-1]["up"] ** 2)


def scanned(params, x, y):
    layers = {k: v for k, v in params.items() if v.ndim}
    x, _ = jax.lax.scan(lambda x, own: (apply(own, x, params["scale"]), None), x, layers)
    return jnp.mean((x - y) ** 2)


def narrow(params, x, y):
    """The weights are cast once a step; tasks gather what they were cast to."""
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
    return unrolled({**params, "layers": cast}, x, y).astype(jnp.float32)


def make_step(loss_fn=unrolled, num_microbatches=4, schedule=None, replicas=1):
    if loss_fn is scanned:
        loss_fn = jaxpp.split_stages(loss_fn, 2)
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    axes = (None, 0, 0)
    grad_fn = jaxpp.microbatch(grad_fn, num_microbatches, in_axes=axes, replicas=replicas)
    if schedule is not None:
        grad_fn = jaxpp.schedule(grad_fn, schedule)
    return train_step_of(OPTIMIZER, grad_fn)


def place(shape, loss_fn=unrolled, num_microbatches=4, **options):
    step = make_step(loss_fn, num_microbatches, jaxpp.schedules.OneFOneB(), shape[1])
    rules = RULES if len(shape) == 3 else None
    mesh = jaxpp.MpmdMesh(shape, AXES[: len(shape)])
    in_specs = (rules, rules, P("data"), P("data"))
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), in_specs=in_specs, **options)


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, EXAMPLES, WIDTH)).astype(np.float32)


def start(loss_fn):
    params = parameters() if loss_fn is scanned else by_layer(parameters())
    return params, OPTIMIZER.init(params)


def train(step, loss_fn=unrolled):
    (params, state), losses = start(loss_fn), []
    for seed in range(3):
        params, state, loss = step(params, state, *batch(seed))
        losses.append(loss)
    return params, state, losses


def on_one_device(loss_fn):
    return train(jax.jit(make_step(loss_fn)), loss_fn)


@pytest.mark.parametrize(
    ("shape", "loss_fn", "rtol"),
    [
        ((2, 2, 2), unrolled, 1e-5),
        pytest.param((2, 4), unrolled, 1e-5, marks=pytest.mark.slow),
        ((2, 2), scanned, 1e-5),
        pytest.param((2, 2), narrow, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_one_device_with_a_part_of_the_state_on_each(shape, loss_fn, rtol):
    got = train(place(shape, loss_fn, zero3="data"), loss_fn)
    assert_close_sums(got, on_one_device(loss_fn), rtol)
    devices = set()
    for x in parts_of(got[:2]):
        axes = [axis for axis in x.sharding.spec if axis]
        assert "data" in axes
        parts = np.prod([shape[AXES.index(axis)] for axis in axes])
        for shard in x.addressable_shards:
            assert shard.data.nbytes * parts == x.nbytes
            devices.add(shard.device)
    assert len(devices) == np.prod(shape)


def parts_of(tree):
    """The arrays that can be split; of stacked ones their parts on the ranks."""
    for x in jax.tree.leaves(tree):
        if x.ndim:
            yield from getattr(x, "parts", [x])


def test_tasks_gather_and_gradients_are_scattered_once_a_step():
    compiled = [
        place((2, 2), num_microbatches=m, zero3="data").lower(*start(unrolled), *batch(0)).compile()
        for m in (2, 8)
    ]
    few, many = map(count_collectives, compiled)
    weights = 3 * LAYERS // 2
    for rank, other in zip(few, many, strict=True):
        assert rank.once == other.once
        assert rank.in_tasks == other.in_tasks
        assert rank.once["reduce-scatter over data"] == weights
        assert "all-gather over data" not in rank.once
        forward, backward = rank.in_tasks.values()
        assert forward == {"all-gather over data": weights}
        assert backward.keys() == {"all-gather over data"}
        assert backward["all-gather over data"] <= weights  # a gradient needs no bias


@pytest.mark.more
def test_what_names_the_axis_itself_is_not_gathered():
    """Experts that are split over the replicas stay where they are."""

    def loss_fn(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(jnp.einsum("ebi,eij->ebj", x, w["experts"])))
        return jnp.mean((h @ w["out"]) ** 2)

    grad_fn = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), 2, in_axes=(None, 1))
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    in_specs = ([("experts", P("data"))], P("data"))
    w = {"experts": jnp.ones((2, WIDTH, WIDTH)), "out": jnp.ones((WIDTH, WIDTH))}
    step = jaxpp.place(grad_fn, mesh, in_specs=in_specs, zero3="data")
    compiled = step.lower(w, jnp.ones((2, 8, WIDTH))).compile()
    first, second = count_collectives(compiled)
    assert first.in_tasks == {}
    assert second.in_tasks["F1"] == {"all-gather over data": 1}
