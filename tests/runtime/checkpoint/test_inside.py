"""Checkpoints of arrays that ranks have split: on any mesh they are the same arrays, bitwise."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp.runtime.checkpoint import load_state, save_state
from tests.helpers import assert_same
from tests.runtime.inside import AXES, LAYERS, batch, local, placed, start, train

# A mesh, and the axes over which it splits the optimizer state.
WHOLE = [(2,), (1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2)]
ZERO1 = [(1, 2, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1)]
PLACES = [*((shape, ()) for shape in WHOLE), *((shape, "data") for shape in ZERO1)]
CHOSEN = ((2, 2, 2), "data"), ((2,), ())


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2, 2, 2), AXES) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def plain_mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


def shardings_of(step):
    """Where a step reads its parameters and optimizer state."""
    return list(step.lower(*start(), *batch()).compile().input_shardings[:2])


def save(step, path):
    """Saves what two steps give; returns it."""
    state, _ = train(step, start(), range(2))
    expected = jax.device_get(state)
    save_state(path, state)
    return expected


def check_load(path, expected, step, like, losses):
    """Loads for a step by `like`, its state after three steps, and by shardings; trains on."""
    by_like = load_state(path, like)
    wanted = jax.tree.map(lambda x: x.sharding, like)
    assert jax.tree.map(lambda x: x.sharding, by_like) == wanted
    assert_same(by_like, expected)
    by_sharding = load_state(path, jax.eval_shape(start), shardings_of(step))
    assert_same(by_sharding, expected)
    went_on, got = train(step, by_like, range(2, 3))
    np.testing.assert_allclose(got, losses[2:], rtol=1e-5)
    assert_same(train(step, by_sharding, range(2, 3))[0], went_on)
    with pytest.raises(AssertionError):
        assert_same(went_on, expected)


def check(saving, loading, path):
    """Saves on one mesh, and loads on another."""
    step = placed(loading)
    check_load(path, save(placed(saving), path), step, *train(step, start(), range(3)))


def chunks(path):
    """For each array the writers of its chunks, as many times as they have written one."""
    found = collections.defaultdict(list)
    for folder in path.glob("ocdbt.process_*"):
        base = {"driver": "file", "path": f"{folder}/"}
        database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        for key in database.list().result():
            name, _, chunk = key.decode().partition("/c/")
            if chunk:
                found[name].append((folder.name.removeprefix("ocdbt.process_"), chunk))
    return found


def id_of(place):
    shape, zero1 = place
    return "x".join(map(str, shape)) + ("-zero1" if zero1 else "")


@functools.cache
def local_step(shape, zero1):
    return placed(local(shape), replicas=shape[1] if len(shape) > 1 else 1, zero1=zero1)


@pytest.fixture(scope="module")
def saving(request, tmp_path_factory):
    """Where a state was saved by one of the places, and the state."""
    path = tmp_path_factory.mktemp("saved") / "state"
    return path, save(local_step(*request.param), path)


@functools.cache
def trained(shape, zero1):
    return train(local_step(shape, zero1), start(), range(3))


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param(*pair, marks=() if pair == CHOSEN else pytest.mark.slow)
        for pair in itertools.product(PLACES, PLACES)
    ],
    indirect=["saving"],
    ids=id_of,
)
def test_between_meshes_of_this_process(saving, loading):
    path, saved = saving
    expected, went_on = trained(*loading)
    check_load(path, saved, local_step(*loading), expected, went_on)


@pytest.mark.slow
def test_from_processes_to_this_one_and_back(mesh, tmp_path):
    check(mesh, local((1, 2, 1)), tmp_path / "a")
    check(local((1, 2, 1)), mesh, tmp_path / "b")


@pytest.mark.slow
def test_between_processes_of_one_device_and_of_four(mesh, plain_mesh, tmp_path):
    check(mesh, plain_mesh, tmp_path / "a")
    check(plain_mesh, mesh, tmp_path / "b")


@pytest.mark.slow
def test_each_part_is_written_once_however_many_devices_have_it(mesh, tmp_path):
    here, there = (train(placed(m), start(), range(1))[0] for m in (local((2, 2, 2)), mesh))
    save_state(tmp_path / "here", here)
    save_state(tmp_path / "there", there)
    for path, last in ((tmp_path / "here", "driver"), (tmp_path / "there", "rank1process0")):
        found = chunks(path)
        assert [writer for writer, _ in found[f"0.{LAYERS - 1}.up"]] == [last] * 2
        assert [writer for writer, _ in found[f"0.{LAYERS - 1}.bias"]] == [last]
        assert all(len({c for _, c in own}) == len(own) for own in found.values())


def test_keys_and_narrow_and_empty_arrays_that_are_split(tmp_path, mesh):
    """On a mesh of this process, and on the ranks of a remote one."""
    home = local((2, 2, 2)).homes[1]
    tree = {
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "int4": jnp.arange(8, dtype="int4"),
        "weak": jax.lax.broadcast(2.0, (2, 4)),
        "empty": jnp.zeros((0, 2)),
    }
    specs = {"keys": P(("data", "model")), "int4": P("model"), "weak": P("data", "model")}
    specs["empty"] = P(None, "data")
    split = {n: jax.device_put(x, NamedSharding(home, specs[n])) for n, x in tree.items()}
    save_state(tmp_path / "a", split)
    loaded = load_state(tmp_path / "a", split)
    remote = {n: jaxpp.RemoteSharding(mesh, (1,), spec) for n, spec in specs.items()}
    save_state(tmp_path / "b", load_state(tmp_path / "a", tree, remote))
    for found in (loaded, load_state(tmp_path / "b", split)):
        for name, x in split.items():
            assert found[name].sharding == x.sharding
            assert found[name].aval.weak_type == x.aval.weak_type
            assert_same(data_of(found[name]), data_of(tree[name]))


def data_of(array):
    keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if keys else array)


@pytest.mark.parametrize("spec", [P("data"), P("stage"), P(None, ("data", "model"))])
def test_a_split_that_does_not_fit_names_the_leaf(mesh, tmp_path, spec):
    save_state(tmp_path / "a", {"w": jnp.zeros((3, 6))})
    like = {"w": jax.ShapeDtypeStruct((3, 6), "float32")}
    with pytest.raises(ValueError, match=r"The leaf \['w'\] is float32\[3,6\], which cannot be"):
        load_state(tmp_path / "a", like, jaxpp.RemoteSharding(mesh, (0,), spec))
