"""Ranks that are meshes, in processes of their own: the same results as in this process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import assert_same
from tests.runtime.inside import (
    AXES,
    LAYERS,
    WIDTH,
    assert_same_descriptions,
    batch,
    local,
    placed,
    start,
    train,
)


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2, 2, 2), AXES) as mesh:
        yield mesh


def shards_of(process, number):
    """How a rank has an array: its spec, and the shape of each device's part."""
    array = process.arrays[number]
    return array.sharding.spec, {s.data.shape for s in array.addressable_shards}


# ---- the law: the same results on any mesh ------------------------------------------------------


def three_steps(mesh, **options):
    step = placed(mesh, **options)
    return train(step, start(), range(3))


def test_three_steps_are_bitwise_those_of_the_local_mesh(mesh):
    state, losses = three_steps(mesh)
    expected, expected_losses = three_steps(local((2, 2, 2)))
    assert losses == expected_losses
    assert_same(state, expected)
    other, _ = train(placed(local((2, 2, 2))), start(), range(2))
    with pytest.raises(AssertionError):
        assert_same(state, other)


@pytest.mark.more
@pytest.mark.parametrize("zero", [{}, {"zero1": "data"}])
def test_replicas_in_worker_processes_are_bitwise_those_of_the_local_mesh(mesh, zero):
    step, other = (placed(m, replicas=2, **zero) for m in (mesh, local((2, 2, 2))))
    state, losses = train(step, start(), range(3))
    expected, expected_losses = train(other, start(), range(3))
    assert losses == expected_losses
    assert_same(state, expected)
    assert_same_descriptions(step.describe(), other.describe())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1, 2), {}),
        pytest.param((2, 1, 2), {"transport": "jax"}, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), {"transport": "jax"}, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), {"cores": 1}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1), {"cores": 1}, marks=pytest.mark.slow),
    ],
)
def test_other_shapes_and_transports_give_the_same(shape, options, ray_session):
    expected, losses = three_steps(local(shape))
    with jaxpp.RemoteMpmdMesh(shape, AXES, **options) as mesh:
        actual, got = three_steps(mesh)
        assert got == losses
        assert_same(actual, expected)


def ring(own, x, split):
    """A layer in which each device sees all rows of the batch of its part of the hidden values."""

    def body(x, up, down):
        h = jnp.tanh(x @ up) * (1 + jax.lax.axis_index("model"))
        x = jax.lax.ppermute(h, "data", [(0, 1), (1, 0)])
        return jax.lax.psum(x @ down, "model")

    specs = P("data"), P(None, "model"), P("model")
    return jax.shard_map(body, in_specs=specs, out_specs=P("data"))(x, own["up"], own["down"])


def test_collectives_of_a_shard_map_in_a_stage(mesh):
    state, losses = three_steps(mesh, layer=ring)
    expected, expected_losses = three_steps(local((2, 2, 2)), layer=ring)
    assert losses == expected_losses
    assert_same(state, expected)


# ---- where the arrays are -----------------------------------------------------------------------


def test_each_device_holds_its_part(mesh):
    step = placed(mesh)
    layers, state, loss = step(*start(), *batch())
    up, down, bias = (layers[LAYERS - 1][name] for name in ("up", "down", "bias"))
    assert up.sharding == jaxpp.RemoteSharding(mesh, (1,), P(None, "model"))
    assert not up.is_fully_replicated and loss.is_fully_replicated
    found = {n: mesh.apply(shards_of, {1: (x.id,)})[1] for n, x in enumerate((up, down, bias))}
    assert found == {
        0: (P(None, "model"), {(WIDTH, WIDTH)}),
        1: (P("model"), {(WIDTH, WIDTH)}),
        2: (P(), {(WIDTH,)}),
    }
    shardings = step.lower(*start(), *batch()).compile().input_shardings
    assert shardings[0][0]["up"] == jaxpp.RemoteSharding(mesh, (0,), P(None, "model"))
    assert shardings[2] == jaxpp.RemoteSharding(mesh, (0,), P("data"))
    here = placed(local((2, 2, 2)))(*start(), *batch())
    assert_same(np.asarray(up), here[0][LAYERS - 1]["up"])
    assert_same(jnp.asarray(down), here[0][LAYERS - 1]["down"])


def test_what_is_said_of_a_step_is_what_the_local_mesh_says(mesh):
    found, expected = (
        placed(m).lower(*start(), *batch()).compile().describe() for m in (mesh, local((2, 2, 2)))
    )
    assert [len(rank.devices) for rank in found.ranks] == [4, 4]
    assert_same_descriptions(found, expected)


def test_donated_arrays_are_gone_and_no_rank_keeps_them(mesh):
    def held():
        mesh.flush()
        return mesh.apply(lambda process: len(process.arrays), {0: (), 1: ()})

    step = placed(mesh)
    layers, state, _ = step(*start(), *batch())
    before = held()
    *after, _ = step(layers, state, *batch(1))
    assert layers[0]["up"].is_deleted()
    with pytest.raises(ValueError, match=r"args\[0\]\[0\]\['bias'\] was donated"):
        step(layers, state, *batch())
    assert held() == before
    del after


def test_an_array_is_split_anew_where_another_step_reads_it_so(mesh):
    """On its rank, and on another one that it is sent to."""

    def forward(layers, x):
        h = jnp.tanh(x @ layers[0]["up"] @ layers[3]["down"])
        h = jaxpp.pipeline_enter_stage(h)
        return jnp.mean(h @ layers[3]["up"] @ layers[0]["down"], axis=0)

    def evaluate(mesh):
        loop = jaxpp.microbatch(jaxpp.wrap_forward(forward), 2)
        loop = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
        specs = [
            (r"0.up$", P("data")), (r"3.up$", P(("data", "model"))), (r"down$", P(None, "model"))
        ]  # fmt: skip
        return jaxpp.place(loop, mesh, in_specs=(specs, P("data")))

    layers, state, _ = placed(mesh)(*start(), *batch())
    expected = evaluate(local((2, 2, 2)))(jax.device_get(layers), batch()[0])
    for _ in range(2):
        assert_same(evaluate(mesh)(layers, batch()[0]), expected)
    assert not layers[0]["up"].is_deleted()


def test_ranks_load_their_batch_themselves(mesh):
    here = placed(local((2, 2, 2)), feed={2: lambda n: batch(n)[0], 3: lambda n: batch(n)[1]})
    fed = placed(mesh, feed={2: lambda n: batch(n)[0], 3: lambda n: jnp.asarray(batch(n)[1])})
    state, expected = start(), start()
    for number in range(2):
        *state, loss = fed(*state, number, number)
        *expected, expected_loss = here(*expected, number, number)
    assert float(loss) == float(expected_loss)
    assert_same(state, expected)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_few_devices_are_an_error_at_the_start(ray_session):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with pytest.raises(ValueError, match=r"Rank 0 needs 4 devices .*'data': 2, 'model': 2.* has 2"):
        jaxpp.RemoteMpmdMesh((1, 2, 2), AXES, environment=flags)


def test_axes_and_gpus_are_checked_before_anything_starts():
    with pytest.raises(ValueError, match="a GPU for each of the 4 devices of a rank"):
        jaxpp.RemoteMpmdMesh((2, 2, 2), AXES, gpus_per_rank=0.5)
    with pytest.raises(ValueError, match="a type for each"):
        jaxpp.RemoteMpmdMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,))
