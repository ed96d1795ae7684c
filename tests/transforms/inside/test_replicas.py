"""Replicas on devices of their own: the bits of one device, and one reduction a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from jaxpp._program import Run
from jaxpp.runtime.checkpoint import load_state, save_state
from tests.helpers import assert_close, assert_close_sums, assert_same, mesh_of, train_step_of

LAYERS, WIDTH, EXAMPLES, MICROBATCHES = 4, 8, 32, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SCHEDULES = {
    "1f1b": jaxpp.schedules.OneFOneB(),
    "zb_h1": jaxpp.schedules.ZeroBubbleH1(),
    "chimera": jaxpp.schedules.Chimera(),
    "dualpipe": jaxpp.schedules.DualPipe(),
}


def start():
    into, layers, out = jax.random.split(jax.random.key(0), 3)
    params = {
        "into": jax.random.normal(into, (4, WIDTH)) / 2,
        "layers": jax.random.normal(layers, (LAYERS, WIDTH, WIDTH)) / 3,
        "out": jax.random.normal(out, (WIDTH, 4)) / 3,
    }
    return params, OPTIMIZER.init(params)


def batch(number=0):
    x = np.random.default_rng(number).normal(size=(EXAMPLES, 4)).astype("f4")
    return x, np.sin(x)


def forward(params, x, split=None):
    """Layers that are stacked, and scanned over."""

    def layer(x, w):
        h = jnp.tanh(x @ w)
        return x + (h if split is None else jax.lax.with_sharding_constraint(h, split)), None

    return jax.lax.scan(layer, x @ params["into"], params["layers"])[0] @ params["out"]


def loss_fn(params, x, y, split=None):
    made = forward(params, x, split)
    return jnp.mean((made - y) ** 2), made


def step_of(replicas, schedule="1f1b", microbatches=MICROBATCHES, loss=loss_fn):
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, num_stages=2))
    grad = jaxpp.microbatch(
        jax.value_and_grad(staged, has_aux=True),
        microbatches,
        in_axes=(None, 0, 0),
        reduce=(("mean", "concat"), "mean"),
        replicas=replicas,
    )
    return train_step_of(OPTIMIZER, jaxpp.schedule(grad, SCHEDULES[schedule]))


def place(step, shape=(2, 2), axes=("mpmd", "data"), specs=None, **options):
    mesh = jaxpp.MpmdMesh(shape, axes)
    in_specs = (specs, specs, P("data"), P("data"))
    return jaxpp.place(step, mesh, in_specs=in_specs, **options)


def train(step, numbers=range(3), state=None):
    params, state = state or start()
    for number in numbers:
        params, state, result = step(params, state, *batch(number))
    return jax.device_get(jaxpp.gather((params, state, result)))


def on_one_device_a_rank(step):
    return train(jaxpp.place(step, mesh_of(2, shared=True)))


more = pytest.mark.more


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        pytest.param("1f1b", {"zero1": "data"}, marks=more),
        pytest.param("zb_h1", {"zero3": "data"}, marks=more),
        pytest.param("chimera", {}, marks=more),
        pytest.param("dualpipe", {}, marks=more),
    ],
)
def test_three_steps_are_bitwise_those_of_a_loop_over_replicas(schedule, options):
    """Outputs that are put together ("concat") are in the order of the examples.

    With ZeRO devices also share the sum of the squares of gradients, which is rounded otherwise.
    """
    step = step_of(2, schedule)
    want = on_one_device_a_rank(step)
    placed = place(step, **options)
    (assert_close_sums if options else assert_same)(train(placed), want)
    assert_close_sums(train(jax.jit(step)), want)
    with pytest.raises(AssertionError):
        assert_same(train(placed, range(2)), want)


@more
def test_more_replicas_than_devices_run_one_after_the_other():
    """Two meshes with as many devices along the axis give the same bits, as one without does."""
    step = step_of(4)
    want = on_one_device_a_rank(step)
    assert_same(train(place(step, (2, 4))), want)
    assert_close(train(place(step, (2, 2))), want, rtol=1e-5, atol=1e-6)
    shared = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"), devices=2 * jax.devices()[4:6])
    specs = None, None, P("data"), P("data")
    assert_same(train(place(step, (2, 2))), train(jaxpp.place(step, shared, in_specs=specs)))


def collectives(step):
    """The kinds of collectives of a step, once a step and in tasks, by their axes."""
    once, in_tasks = set(), set()
    for rank in count_collectives(step):
        once |= set(rank.once)
        in_tasks |= {kind for own in rank.in_tasks.values() for kind in own}
    return once, in_tasks


@pytest.mark.parametrize(
    ("options", "once", "in_tasks"),
    [
        ({}, {"all-reduce over data"}, set()),
        pytest.param(
            {"zero1": "data"},
            {"all-reduce over data", "reduce-scatter over data", "all-gather over data"},
            set(),
            marks=more,
        ),
        pytest.param(
            {"zero3": "data"},
            {"all-reduce over data", "reduce-scatter over data"},
            {"all-gather over data"},
            marks=more,
        ),
    ],
)
def test_the_compiled_tasks_have_no_collective_over_the_replicas(options, once, in_tasks, tmp_path):
    """Optimizer state that is split has gradients scattered; a trace has the reduction."""
    step = place(step_of(2), **options)
    mesh: Any = step.mesh
    mesh.start_trace(tmp_path)
    train(step, range(1))
    assert {run.rank for run in mesh.stop_trace().runs if run.label == "reduce"} == {0, 1}
    assert collectives(step) == (once, in_tasks)
    runs = [
        i
        for p in step.programs
        for i in p.instructions
        if isinstance(i, Run) and i.label == "reduce"
    ]
    assert {step.bundle.computations[i.computation].name for i in runs} == {"reduce_0", "reduce_1"}


@more
def test_other_axes_have_the_collectives_of_their_own():
    """Tensor parallelism; a constraint of the model that names the axis of replicas, too."""

    def split(params, x, y):
        return loss_fn(params, x, y, P("data", "model"))

    step = step_of(2, loss=split)
    specs = [("layers", P(None, None, "model"))]
    placed = place(step, (2, 2, 2), ("mpmd", "data", "model"), specs)
    assert_close_sums(train(placed), on_one_device_a_rank(step_of(2)))
    once, in_tasks = collectives(placed)
    assert in_tasks and all(kind.endswith(" over model") for kind in in_tasks)
    assert any("data" in kind for kind in once)


@more
def test_a_model_exchanges_examples_over_an_axis_of_its_own():
    """Experts by `shard_map`, and a sequence that is split: no axis of theirs is the replicas'."""

    def exchange(x):
        def local(x):
            x = jax.lax.all_to_all(x, "expert", 1, 0, tiled=True)
            return jax.lax.all_to_all(jnp.tanh(x), "expert", 0, 1, tiled=True)

        spec = P("expert")
        return jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={"expert"})(x)

    def loss(params, x, y):
        h = x @ params["into"]
        h = jaxpp.pipeline_enter_stage(h + exchange(h))
        h = jax.lax.with_sharding_constraint(h @ params["layers"][0], P("expert"))
        made = h @ params["out"]
        return jnp.mean((made - y) ** 2), made

    def plain(params, x, y):
        h = x @ params["into"]
        h = jaxpp.pipeline_enter_stage(h + jnp.tanh(h))
        made = h @ params["layers"][0] @ params["out"]
        return jnp.mean((made - y) ** 2), made

    def of(loss):
        grad = jaxpp.microbatch(
            jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True),
            MICROBATCHES,
            in_axes=(None, 0, 0),
            reduce=(("mean", "concat"), "mean"),
            replicas=2,
        )
        return train_step_of(OPTIMIZER, jaxpp.schedule(grad, SCHEDULES["1f1b"]))

    placed = place(of(loss), (2, 2, 2), ("mpmd", "data", "expert"))
    assert_close_sums(train(placed), on_one_device_a_rank(of(plain)))
    _, in_tasks = collectives(placed)
    assert "all-to-all over expert" in in_tasks
    assert not any("data" in kind for kind in in_tasks)


def test_programs_compute_the_function():
    """By the certificate, which runs what a `shard_map` does on each device."""
    for schedule, options in (("1f1b", {"zero1": "data"}), ("chimera", {})):
        placed = place(step_of(2, schedule), **options)
        jaxpp.testing.assert_computes_the_function(placed, *start(), *batch())


@more
def test_a_reduction_that_leaves_out_a_replica_is_refuted(monkeypatch):
    from jaxpp.transforms.inside import _batch

    def first(rows, axis):
        return jnp.where(jax.lax.axis_index(axis) == 0, rows, 0 * rows)

    combine = jnp.add, lambda rows, axis: jax.lax.psum(first(rows, axis), axis)
    monkeypatch.setitem(_batch._COMBINE, "sum", combine)
    with pytest.raises(jaxpp.Refuted):
        jaxpp.certify(place(step_of(2)), *start(), *batch())


@more
def test_state_is_that_of_no_number_of_replicas(tmp_path):
    """What is saved by two replicas, four go on with; and a step makes its state where it is."""
    two, four = place(step_of(2), zero1="data"), place(step_of(4), (2, 4), zero1="data")
    params, state, _ = two(*two.initialize(start, rest=batch()), *batch())
    assert_same(jax.device_get((params, state)), train(two, range(1))[:2])
    save_state(tmp_path / "state", (params, state))
    shardings = tuple(four.lower(*start(), *batch()).compile().input_shardings[:2])
    loaded = load_state(tmp_path / "state", jax.eval_shape(start), shardings)
    got = train(four, range(1, 2), loaded)
    assert_close_sums(got, train(two, range(1, 2), (params, state)))


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="4 devices along 'data', which do not divide the 2"):
        place(step_of(2), (2, 4)).lower(*start(), *batch())
    with pytest.raises(ValueError, match="no axis inside a rank"):
        place(step_of(2), replica_axis="dataa")

    def summed(params, x, y):
        h = jaxpp.pipeline_enter_stage(x @ params["into"])
        spread: Any = dict(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        h = jax.shard_map(lambda h: h - jax.lax.pmean(h, "data"), **spread)(h)
        made = h @ params["out"]
        return jnp.mean((made - y) ** 2), made

    step = step_of(2, loss=summed)
    with pytest.raises(ValueError, match=r"shard_map at .*is over 'data', and so are the replicas"):
        place(step).lower(*start(), *batch())
