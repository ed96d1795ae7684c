"""Ranks that differ in size, in processes of their own: the same results as in this process."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import assert_same
from tests.runtime import inside
from tests.runtime.inside import AXES, LAYERS, WIDTH, batch, of_ranks, placed, start, train

NAMES = AXES[1:]
#: The sizes of (data, model) in each rank.
NARROW = ((4, 1), (2, 1))
WIDE = ((2, 2), (2, 1))
FROM_ONE = ((1, 1), (4, 1))


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh.of_ranks(NARROW, NAMES) as mesh:
        yield mesh


def three_steps(mesh, **options):
    return train(placed(mesh, **options), start(), range(3))


@pytest.mark.parametrize("options", [{}, {"zero1": "data"}, {"zero3": "data"}], ids=str)
def test_three_steps_are_bitwise_those_of_the_local_mesh(mesh, options):
    assert_same(three_steps(mesh, **options), three_steps(of_ranks(*NARROW), **options))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [WIDE, FROM_ONE])
def test_so_they_are_on_ranks_of_other_sizes(sizes, ray_session):
    with jaxpp.RemoteMpmdMesh.of_ranks(sizes, NAMES) as mesh:
        assert_same(three_steps(mesh), three_steps(of_ranks(*sizes)))


def shapes_of(process, number):
    return {s.data.shape for s in process.arrays[number].addressable_shards}


def test_each_rank_splits_over_its_own_axes(mesh):
    (layers, state), _ = three_steps(mesh, zero1="data")
    for rank, ((data, _), layer) in enumerate(zip(NARROW, (0, LAYERS - 1), strict=True)):
        moment = state[0].mu[layer]["bias"]
        found = mesh.apply(shapes_of, {rank: (moment.id,)})[rank]
        assert found == {(WIDTH // data,)}
        found = mesh.apply(shapes_of, {rank: (layers[layer]["bias"].id,)})[rank]
        assert found == {(WIDTH,)}


def test_what_is_said_of_a_step_is_what_the_local_mesh_says(mesh):
    found, expected = (
        placed(m).lower(*start(), *batch()).compile().describe() for m in (mesh, of_ranks(*NARROW))
    )
    assert [len(rank.devices) for rank in found.ranks] == [4, 2]
    inside.assert_same_descriptions(found, expected)


def make(key):
    """Parameters and optimizer state, made of random numbers."""
    keys = jax.random.split(key, LAYERS)
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "bias": (WIDTH,)}
    layers = [{n: jax.random.normal(k, s) for n, s in shapes.items()} for k in keys]
    return layers, inside.OPTIMIZER.init(layers)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"zero3": "data"}], ids=str
)
def test_initial_values_are_made_by_the_ranks(mesh, options):
    step = placed(mesh, **options)
    layers, state = step.initialize(make, jax.random.key(5), rest=batch())
    assert_same((layers, state), make(jax.random.key(5)))
    expected = P("data") if options else P()
    assert layers[-1]["bias"].sharding == jaxpp.RemoteSharding(mesh, (1,), expected)
    got = train(step, (layers, state), range(2))
    assert_same(got, train(placed(of_ranks(*NARROW), **options), make(jax.random.key(5)), range(2)))


def test_checkpoints_go_to_and_from_the_local_mesh(mesh, tmp_path):
    remote, local = placed(mesh), placed(of_ranks(*WIDE))
    (ours, _), (theirs, _) = train(remote, start(), [0]), train(local, start(), [0])
    jaxpp.save_state(tmp_path / "remote", ours)
    jaxpp.save_state(tmp_path / "local", theirs)
    here = jaxpp.load_state(tmp_path / "remote", theirs)
    there = jaxpp.load_state(tmp_path / "local", ours)
    assert_same(here, ours)
    assert_same(there, theirs)
    assert [x.sharding for x in jax.tree.leaves(there)] == [
        x.sharding for x in jax.tree.leaves(ours)
    ]
    assert_same(train(remote, there, [1]), train(placed(of_ranks(*NARROW)), theirs, [1]))


@pytest.mark.parametrize(
    ("shapes", "names", "options", "words"),
    [
        ([], NAMES, {}, "a shape for each rank"),
        ([(1,)], ("mpmd",), {}, "none of them 'mpmd'"),
        ([(2, 1), (2,)], NAMES, {}, r"rank 1 needs a name of its own for each axis"),
        ([(2, 1), (0, 1)], NAMES, {}, r"rank 1 needs axes of size 1 at least"),
        (NARROW, NAMES, {"processes_per_rank": 2}, "one process each.*processes_per_rank=2"),
        (NARROW, NAMES, {"transport": "device"}, "over sockets.*transport='device'"),
        (NARROW, NAMES, {"gpus_per_rank": 0.5}, "a GPU for each of the 4 devices"),
    ],
)
def test_shapes_that_are_no_ranks(shapes, names, options, words):
    with pytest.raises(ValueError, match=words):
        jaxpp.RemoteMpmdMesh.of_ranks(shapes, names, **options)


def test_options_that_are_not_known():
    with pytest.raises(TypeError, match="gpus_per_device"):
        jaxpp.RemoteMpmdMesh.of_ranks(NARROW, NAMES, gpus_per_device=1)
