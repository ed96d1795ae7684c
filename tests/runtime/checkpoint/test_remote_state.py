"""Arrays that ranks hold: each writes and reads its own, and nothing goes through the driver."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp.runtime.checkpoint import Checkpointer, _manifest, _ranks, _store, load_state, save_state
from jaxpp.runtime.remote._array import RemoteArray, RemoteSharding
from jaxpp.runtime.remote._failure import RankError


def values():
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
    return {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.arange(4, dtype="bfloat16"),
        "shared": jnp.arange(5, dtype="int4"),
        "key": keys,
        "count": jnp.asarray(3),
        "weak": jnp.asarray(2.0),
        "empty": jnp.zeros((0, 2)),
    }


def on_ranks(mesh):
    holders = {"a": (0,), "b": (1,), "shared": (1, 2), "key": (2,), "count": (0, 1, 2)}
    tree = {n: mesh.put(v, *holders.get(n, (1,))) for n, v in values().items()}
    return tree | {"here": jnp.arange(3.0), "number": 4}


def assert_on_ranks(mesh, tree, holders, assert_same):
    for name, value in values().items():
        array = tree[name]
        assert isinstance(array, RemoteArray)
        assert array.ranks == holders(name)
        for rank in array.ranks:
            got = mesh.value(array, rank)
            assert got.devices() == {mesh.processes[rank].home}
            assert_same(got, value, where=False)


def test_arrays_come_back_to_their_ranks(tmp_path, thread_mesh, assert_same):
    mesh = thread_mesh(3)
    tree = on_ranks(mesh)
    save_state(tmp_path / "a", tree)
    loaded = load_state(tmp_path / "a", tree)
    assert_on_ranks(mesh, loaded, lambda name: tree[name].ranks, assert_same)
    assert loaded["number"] == 4
    assert_same(loaded["here"], tree["here"])
    assert all(loaded[name].id != tree[name].id for name in values())


def test_arrays_go_to_other_ranks_of_another_mesh(tmp_path, thread_mesh, assert_same):
    tree = on_ranks(thread_mesh(3))
    save_state(tmp_path / "a", tree)
    mesh = thread_mesh(2)
    places = {name: RemoteSharding(mesh, (1,) if name < "c" else (0, 1)) for name in values()}
    loaded = load_state(tmp_path / "a", tree, places | {"here": None, "number": None})
    assert_on_ranks(mesh, loaded, lambda name: places[name].ranks, assert_same)
    nobody = load_state(tmp_path / "a", tree, RemoteSharding(mesh, ()))
    assert nobody["a"].ranks == (0,)


def test_arrays_go_to_this_process_and_back(tmp_path, thread_mesh, assert_same):
    mesh = thread_mesh(3)
    tree = on_ranks(mesh)
    save_state(tmp_path / "a", tree)
    like = values() | {"here": tree["here"], "number": 0}
    local = load_state(tmp_path / "a", like)
    assert_same(local, values() | {"here": tree["here"], "number": 4})
    one = load_state(tmp_path / "a", tree, SingleDeviceSharding(jax.devices()[7]))
    assert one["a"].devices() == {jax.devices()[7]}
    save_state(tmp_path / "b", local)
    loaded = load_state(tmp_path / "b", tree)
    assert_on_ranks(mesh, loaded, lambda name: tree[name].ranks, assert_same)


def test_each_rank_writes_its_own_and_the_first_what_several_hold(tmp_path, thread_mesh):
    save_state(tmp_path / "a", on_ranks(thread_mesh(3)))
    manifest = _manifest.decode((tmp_path / "a" / "manifest.json").read_bytes(), "a")
    writers = {
        leaf.path: [piece.writer for piece in leaf.pieces]
        for leaf in manifest.leaves
        if isinstance(leaf, _manifest.ArrayLeaf)
    }
    assert writers == {
        "['a']": ["rank-0"], "['b']": ["rank-1"], "['shared']": ["rank-1"], "['key']": ["rank-2"],
        "['count']": ["rank-0"], "['weak']": ["rank-1"], "['empty']": [], "['here']": ["driver"],
    }  # fmt: skip


def test_each_rank_reads_its_own_and_nothing_goes_through_the_driver(
    tmp_path, thread_mesh, monkeypatch
):
    mesh = thread_mesh(3)
    tree = {name: x for name, x in on_ranks(mesh).items() if isinstance(x, RemoteArray)}
    read = []
    store_read = _store.read

    def noting_read(data, requests, path):
        if requests:
            read.append(sorted(request.leaf.path for request in requests))
        return store_read(data, requests, path)

    monkeypatch.setattr(_store, "read", noting_read)
    save_state(tmp_path / "a", tree)
    assert not list((tmp_path / "a").rglob("driver"))
    load_state(tmp_path / "a", tree)
    held = [sorted(f"['{n}']" for n, x in tree.items() if rank in x.ranks) for rank in range(3)]
    assert sorted(read) == sorted(held)


def test_a_snapshot_is_of_the_arrays_as_they_were(tmp_path, thread_mesh, assert_same):
    """Also where the memory of an array has been taken since by a step that it was donated to."""
    mesh = thread_mesh(2)
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    states = [{"x": mesh.put(jnp.arange(1000.0), 1), "y": jnp.arange(1000.0)} for _ in range(2)]
    with Checkpointer(tmp_path) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state)
            arrays = mesh.processes[1].arrays
            arrays[state["x"].id] = increment(arrays[state["x"].id])
            state["y"] = increment(state["y"])
        checkpointer.wait()
        loaded = checkpointer.restore(states[0])
    assert_same(mesh.value(loaded["x"], 1), jnp.arange(1000.0), where=False)
    assert_same(loaded["y"], jnp.arange(1000.0), where=False)
    assert not _ranks._snapshots


# ---- errors -------------------------------------------------------------------------------------


def test_an_error_on_a_rank_is_the_savers_and_leaves_nothing(tmp_path, thread_mesh, monkeypatch):
    mesh = thread_mesh(3)
    write = _store.write

    def failing_write(directory, pieces):
        if directory.name == "rank-1":
            raise OSError(28, os.strerror(28), str(directory))
        write(directory, pieces)

    monkeypatch.setattr(_store, "write", failing_write)
    tree = on_ranks(mesh)
    with pytest.raises(OSError, match="No space left.*rank-1") as caught:
        save_state(tmp_path / "a", tree)
    assert "on rank 1" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="No space left.*rank-1"), Checkpointer(tmp_path) as saving:
        saving.save(3, tree)
    assert list(tmp_path.iterdir()) == []
    assert not _ranks._snapshots


@pytest.mark.parametrize("dies", ["in a save", "in a snapshot's write", "in a load"])
def test_the_death_of_a_worker_is_the_savers_error(tmp_path, thread_mesh, dies, assert_same):
    mesh = thread_mesh(3)
    tree = on_ranks(mesh)
    save_state(tmp_path / "7", tree)
    before = sorted(tmp_path.rglob("*"))
    if dies == "in a save":
        mesh.dead.add(2)
        with pytest.raises(RankError):
            save_state(tmp_path / "8", tree)
    elif dies == "in a snapshot's write":
        with pytest.raises(RankError), Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(8, tree)
            mesh.dead.add(2)
    else:
        mesh.dead.add(2)
        with pytest.raises(RankError):
            load_state(tmp_path / "7", tree)
    assert sorted(tmp_path.rglob("*")) == before
    mesh.dead.clear()
    loaded = load_state(tmp_path / "7", tree)
    assert_on_ranks(mesh, loaded, lambda name: tree[name].ranks, assert_same)


def test_damage_is_found_by_the_rank_that_reads(tmp_path, thread_mesh):
    mesh = thread_mesh(2)
    tree = {"x": mesh.put(jnp.arange(10000.0), 1)}
    save_state(tmp_path / "a", tree)
    (file,) = [p for p in (tmp_path / "a").rglob("*") if p.stat().st_size > 30000 and p.is_file()]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path / "a", tree)


def test_a_host_without_the_directory_is_named(tmp_path, thread_mesh):
    process = thread_mesh(1).processes[0]
    missing = str(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="all hosts share"):
        _ranks.write_pieces(missing, "rank-0", [])
    with pytest.raises(FileNotFoundError, match="all hosts share"):
        _ranks.read(process, missing, "path", [])


def test_an_array_that_a_rank_does_not_hold_is_an_error(tmp_path, thread_mesh):
    mesh = thread_mesh(2)
    lost = mesh.new_array(jax.ShapeDtypeStruct((3,), "float32"), (1,))
    with pytest.raises(LookupError, match="Rank 1 does not hold 1"):
        save_state(tmp_path / "a", lost)
    gone = mesh.put(np.zeros(3), 0)
    gone.consume("donated to the call of step")
    with pytest.raises(ValueError, match=r"\['x'\] was"):
        save_state(tmp_path / "a", {"x": gone})


def test_arrays_of_two_meshes_are_refused(tmp_path, thread_mesh):
    one, two = thread_mesh(1), thread_mesh(1)
    tree = [one.put(jnp.ones(3), 0), two.put(jnp.ones(3), 0)]
    with pytest.raises(ValueError, match="2 remote meshes"):
        save_state(tmp_path / "a", tree)
    save_state(tmp_path / "a", [jnp.ones(3), jnp.ones(3)])
    with pytest.raises(ValueError, match="one remote mesh"):
        load_state(tmp_path / "a", tree)
