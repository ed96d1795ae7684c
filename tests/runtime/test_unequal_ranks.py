"""Ranks whose meshes differ in size: each runs a step as it would among its like."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.models import gpt2, parallel
from jaxpp._program import Run, Send
from jaxpp.runtime.checkpoint import load_state, save_state
from jaxpp.schedules import GPipe, Interleaved1F1B, OneFOneB
from tests.helpers import assert_close, assert_same, bytes_on
from tests.runtime import inside
from tests.runtime.inside import LAYERS, RULES, WIDTH, batch, of_ranks, placed, start, train

NAMES = ("data", "model")
#: The sizes of (data, model) in each rank.
WIDE = ((2, 2), (2, 1))
NARROW = ((4, 1), (2, 1))
FROM_ONE = ((1, 1), (4, 1))
MANY = ((1, 1), (2, 1), (1, 1), (2, 2))
ONE_F_ONE_B = OneFOneB()


@functools.cache
def on_one_device():
    """The training without a mesh."""
    return train(placed(inside.local((1,))), start(), range(3))


@functools.cache
def on_mesh(sizes, schedule=ONE_F_ONE_B, zero1=()):
    """The step, and its training."""
    step = placed(of_ranks(*sizes), schedule=schedule, zero1=zero1)
    return step, train(step, start(), range(3))


# ---- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "zero1"),
    [
        *((sizes, ()) for sizes in (WIDE, NARROW, FROM_ONE)),
        (NARROW, "data"),
        *(
            pytest.param(sizes, zero1, marks=pytest.mark.slow)
            for sizes, zero1 in [(WIDE, "data"), (FROM_ONE, "data"), (MANY, ()), (MANY, "data")]
        ),
    ],
)
def test_a_training_is_that_of_one_device(sizes, zero1):
    assert_close(on_mesh(sizes, zero1=zero1)[1], on_one_device())


def test_so_it_is_with_several_stages_on_a_rank():
    assert_close(on_mesh(WIDE, Interleaved1F1B(2))[1], on_one_device())


def test_schedules_of_a_kind_agree_to_the_bit():
    assert_same(on_mesh(WIDE, GPipe())[1], on_mesh(WIDE)[1])


def test_ranks_of_one_size_are_an_ordinary_mesh():
    got, want = (placed(mesh) for mesh in (of_ranks((2, 1), (2, 1)), inside.local((2, 2, 1))))
    assert_same(train(got, start(), range(3)), train(want, start(), range(3)))


def test_explicit_axes():
    def layer(own, x, split):
        h = jnp.einsum("bi,ij->bj", x, own["up"], out_sharding=P("data", "model"))
        return jnp.einsum("bj,ji->bi", jnp.tanh(h), own["down"], out_sharding=P("data", None)) + (
            jax.sharding.reshard(own["bias"], P())
        )

    mesh = of_ranks(*WIDE, types=(AxisType.Explicit,) * 2)
    assert_close(train(placed(mesh, layer), start(), range(3)), on_one_device())


def test_a_shard_map_sees_the_shards_of_its_rank():
    seen = set()

    def by_hand(own, x, split):
        if not split:
            return inside.dense(own, x, split)

        def part(x, up, down):
            seen.add((jax.lax.axis_size("data"), jax.lax.axis_size("model"), *up.shape))
            mean = jax.lax.pmean(jnp.mean(x), "data")  # divides by the number of its own rows
            return jax.lax.psum(jnp.tanh(x @ up) @ down, "model") + 0 * mean

        specs = P("data"), P(None, "model"), P("model")
        split = jax.shard_map(part, in_specs=specs, out_specs=P("data"))
        return split(x, own["up"], own["down"]) + own["bias"]

    got = train(placed(of_ranks(*WIDE), by_hand), start(), range(3))
    assert seen == {(2, 2, WIDTH, WIDTH), (2, 1, WIDTH, 2 * WIDTH)}
    assert_close(got, on_one_device())


# ---- a language model ----------------------------------------------------------------------------

OPTIMIZER = optax.adam(1e-2, eps=1e-3)


def gpt2_start():
    config = gpt2.Config(2, 16, 4, context=8, vocabulary=20, dropout=0.1)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda x: (
            jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if hasattr(x, "shape") else x
        ),
        eqx.filter_eval_shape(gpt2.GPT2, config, key=jax.random.key(0)),
        is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct),
    )
    return [model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))]


def gpt2_step(mesh=None, **options):
    """A step of GPT-2, whose embedding is in its first and its last stage, with dropout."""
    loss = gpt2.loss_fn
    if mesh is not None:
        loss = jaxpp.wrap_forward(jaxpp.split_stages(loss, at=["blocks.1"]))
    grad = jaxpp.microbatch(eqx.filter_value_and_grad(loss), 2, in_axes=(None, 0, 0))

    def step(model, state, tokens, keys):
        value, grads = grad(model, tokens, keys)
        updates, state = OPTIMIZER.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    if mesh is None:
        return eqx.filter_jit(step)
    grad = jaxpp.schedule(grad, ONE_F_ONE_B)
    rules = parallel.rules()
    specs = rules, rules, P("data"), P("data")
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), in_specs=specs, **options)


@functools.cache
def gpt2_training(sizes=None, zero1=()):
    step = gpt2_step(of_ranks(*sizes), zero1=zero1) if sizes else gpt2_step()
    state, losses = gpt2_start(), []
    for n in range(3):
        tokens = np.random.default_rng(n).integers(20, size=(8, 9)).astype(np.int32)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), n), 8)
        *state, loss = step(*state, tokens, keys)
        losses.append(np.asarray(loss))
    return eqx.filter(state, eqx.is_array), losses


@pytest.mark.parametrize(
    ("sizes", "zero1"),
    [
        pytest.param(sizes, zero1, marks=pytest.mark.slow)
        for sizes in (WIDE, NARROW, FROM_ONE)
        for zero1 in ((), "data")
    ],
)
def test_gpt2_is_that_of_one_device(sizes, zero1):
    assert_close(gpt2_training(sizes, zero1), gpt2_training())


# ---- what goes between devices -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [WIDE, NARROW, FROM_ONE])
def test_gradients_are_reduced_once_a_step(sizes):
    for (data, _), rank in zip(sizes, on_mesh(sizes)[0].describe().ranks, strict=True):
        assert rank.collectives.get("all-reduce over data", 0) == (data > 1)
        # A device has one row of each gradient, and of the loss.
        assert rank.accumulator_bytes <= rank.parameter_bytes + 4


def test_so_they_are_with_more_microbatches():
    step = placed(of_ranks(*WIDE), microbatches=4)
    train(step, start(), range(1))
    for rank in step.describe().ranks:
        assert rank.collectives["all-reduce over data"] == 1


def test_a_message_is_split_anew_in_one_transfer(monkeypatch):
    step, _ = on_mesh(NARROW)
    *state, _ = step(*start(), *batch(3))
    data = jax.device_put(batch(4), step._cache[0].input_shardings[2:])
    put, sizes = jax.device_put, []

    def counted(x, *args, **options):
        assert all(len(shard.devices()) == 1 for shard in x)
        sizes.append(sum(shard.size for shard in x))
        return put(x, *args, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    step(*state, *data)
    messages = [s.message for program in step.programs for s in program.sends]
    # Activations and cotangents, of which each device has its rows alone.
    assert sizes == [sum(a.size for a in m.avals) for m in messages] and messages


def test_zero1_divides_the_optimizer_state_by_the_size_in_its_rank():
    step, ((_, state), _) = on_mesh(NARROW, zero1="data")
    _, ((_, whole), _) = on_mesh(NARROW)
    mesh = of_ranks(*NARROW)
    for (data, _), home, rank in zip(NARROW, mesh.homes, step.describe().ranks, strict=True):
        for device in home.devices.flat:
            own, all_of_it = (bytes_on(device, tree[0].mu) for tree in (state, whole))
            assert own * data == all_of_it > 0
        assert rank.devices == tuple(map(str, home.devices.flat))
        assert rank.optimizer_bytes == 2 * own + 4  # two moments, and the number of steps
        assert rank.collectives["reduce-scatter over data"] > 0


# ---- arrays that several ranks have --------------------------------------------------------------


def shared_step(mesh, spec):
    def loss(w, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["shared"]))
        return jnp.mean((jnp.tanh(x @ w["shared"]) @ w["own"]) ** 2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2)
    grad = jaxpp.schedule(grad, ONE_F_ONE_B)

    def step(w, x):
        value, grads = grad(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return jaxpp.place(
        step, mesh, donate_argnums=0, in_specs=({"shared": spec, "own": P()}, P("data"))
    )


@pytest.mark.parametrize(
    ("sizes", "spec"), [(((1, 1), (2, 1)), P()), (((1, 2), (2, 1)), P(None, "model"))]
)
def test_a_parameter_of_ranks_that_differ(sizes, spec):
    results = []
    for mesh in (of_ranks(*sizes), inside.local((2, 1, 1))):
        step = shared_step(mesh, spec)
        own, shared = jax.random.normal(jax.random.key(3), (2, WIDTH, WIDTH))
        w = {"own": own, "shared": shared}
        for n in range(3):
            given = w
            w, loss = step(w, batch(n)[0])
            assert given["shared"].is_deleted()
        results.append((w, loss))
    assert_close(*results)
    shared, first = results[0][0]["shared"], sizes[0]
    # Split ones are with the first rank alone.
    assert len(shared.devices()) == (3 if spec == P() else math.prod(first))
    lowered = shared_step(of_ranks(*sizes), spec).lower(w, batch()[0])
    assert lowered.compile().input_shardings[0]["shared"] == shared.sharding


# ---- initial values, checkpoints, traces ---------------------------------------------------------


def test_initial_values_are_those_without_a_mesh():
    step = placed(of_ranks((2, 1), (1, 1)))  # an executable for one device could be loaded on it

    def make(key):
        keys = jax.random.split(key, LAYERS)
        shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "bias": (WIDTH,)}
        layers = [{n: jax.random.normal(k, s) for n, s in shapes.items()} for k in keys]
        return layers, inside.OPTIMIZER.init(layers)

    state = step.initialize(make, jax.random.key(5), rest=batch())
    assert_same(state, make(jax.random.key(5)))
    assert [x.devices() for x in state[0][-1].values()] == [{jax.devices()[2]}] * 3


def test_checkpoints_go_between_all_meshes(tmp_path):
    def shardings(tree):
        return [x.sharding for x in jax.tree.leaves(tree)]

    for number, pair in enumerate([(WIDE, NARROW), (NARROW, WIDE)]):
        (_, (state, _)), (step, (like, _)) = map(on_mesh, pair)
        save_state(tmp_path / str(number), state)
        loaded = load_state(tmp_path / str(number), like)
        assert shardings(loaded) == shardings(like)
        assert_same(loaded, state)
        *went_on, _ = step(*loaded, *batch(3))
        assert shardings(went_on) == shardings(like)


def test_a_trace_has_all_runs_and_messages(tmp_path):
    step, _ = on_mesh(NARROW)
    mesh, state = step.mesh, start()
    assert isinstance(mesh, jaxpp.MpmdMesh)
    mesh.start_trace(tmp_path, profiler=False)
    *state, _ = step(*state, *batch())
    trace = mesh.stop_trace()
    instructions = [i for program in step.programs for i in program.instructions]
    assert len(trace.runs) == sum(isinstance(i, Run) for i in instructions)
    assert len(trace.messages) == sum(isinstance(i, Send) for i in instructions)
    assert not trace.errors


# ---- what is wrong -------------------------------------------------------------------------------


def mesh_of(names, types=None):
    grid = np.array(jax.devices()[:1]).reshape((1,) * len(names))
    return Mesh(grid, names, axis_types=types)


@pytest.mark.parametrize(
    ("meshes", "words"),
    [
        ([], "mesh of each rank, got none"),
        ([mesh_of(NAMES), mesh_of(NAMES[::-1])], r"axis_names of rank 1 are \('model', 'data'\)"),
        ([mesh_of(NAMES), mesh_of(NAMES[:1])], "axis_names of rank 1.*has it with size 1"),
        ([mesh_of(("mpmd", "data"))], "none called 'mpmd'.* for rank 0"),
        ([mesh_of(())], "at least one"),
        ([mesh_of(NAMES), mesh_of(NAMES, (AxisType.Explicit,) * 2)], "axis_types of rank 1"),
        ([jax.devices()[0]], "jax.make_mesh.*for rank 0"),
    ],
)
def test_meshes_that_are_no_ranks(meshes, words):
    with pytest.raises((ValueError, TypeError), match=words):
        jaxpp.MpmdMesh.of_ranks(meshes)


def test_a_dimension_that_a_rank_cannot_divide():
    step = placed(of_ranks((2, 1), (3, 1)))
    with pytest.raises(ValueError, match=r"\[2\].*dimension 0 of size 8 into 3 parts"):
        step.lower(*start(), *batch())


def test_a_model_that_depends_on_the_size_of_its_rank():
    def layer(own, x, split):
        wider = jax.sharding.get_abstract_mesh().shape["model"] > 1
        return inside.dense(own, x.astype(jnp.bfloat16) if wider else x, split)

    def loss(layers, x, y):
        for n, own in enumerate(layers):
            size = jax.sharding.get_abstract_mesh().shape["model"]
            x = jnp.concatenate([x + layer(own, x, False)] * size, axis=0)
            x = jaxpp.pipeline_enter_stage(x) if n == 0 else x
        return jnp.mean(x**2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2, in_axes=(None, 0, 0))
    step = jaxpp.place(
        jaxpp.schedule(grad, ONE_F_ONE_B), of_ranks(*WIDE), in_specs=(RULES, P(), P())
    )
    with pytest.raises(ValueError, match=r"rank 0 exchanges other arrays.*'model': 2.*'model': 1"):
        step.lower(inside.params(), *batch())
