"""Arrays that ranks hold: each writes and reads its own, and nothing goes through the driver."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp.runtime.arrays import StackedArray, StackedSharding
from jaxpp.runtime.checkpoint import _shares, load_state, restore_args, save_args, save_state
from jaxpp.runtime.site._array import RemoteArray, RemoteSharding
from jaxpp.runtime.site._failure import RankError


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


def written(path):
    """For each writer the names of the arrays that it has written."""
    import tensorstore

    found = {}
    for folder in path.glob("ocdbt.process_*"):
        base = {"driver": "file", "path": f"{folder}/"}
        database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        names = {key.decode().split("/")[0] for key in database.list().result()}
        found[folder.name.removeprefix("ocdbt.process_")] = sorted(names)
    return found


def test_each_rank_writes_its_own_and_the_first_what_several_hold(tmp_path, thread_mesh):
    save_state(tmp_path / "a", on_ranks(thread_mesh(3)))
    assert written(tmp_path / "a") == {
        "rank0process0": ["a", "count"], "rank1process0": ["b", "empty", "shared", "weak"],
        "rank2process0": ["key"], "driver": ["here"], "scalar": ["number"],
    }  # fmt: skip


def test_each_rank_reads_its_own_and_nothing_goes_through_the_driver(
    tmp_path, thread_mesh, monkeypatch
):
    mesh = thread_mesh(3)
    tree = {name: x for name, x in on_ranks(mesh).items() if isinstance(x, RemoteArray)}
    read = []
    read_arrays = _shares.read_arrays

    def noting_read(database, items):
        if items:
            read.append(sorted(own.path for own in items))
        return read_arrays(database, items)

    monkeypatch.setattr(_shares, "read_arrays", noting_read)
    save_state(tmp_path / "a", tree)
    assert "driver" not in written(tmp_path / "a")
    load_state(tmp_path / "a", tree)
    held = [sorted(f"['{n}']" for n, x in tree.items() if rank in x.ranks) for rank in range(3)]
    assert sorted(read) == sorted(held)


@pytest.mark.parametrize("rows", [(2, 3), (4, 1), (1, 1, 3)])
def test_stacked_arrays_are_one_array(tmp_path, thread_mesh, read_plainly, rows):
    """Saved by ranks that have some rows each; read by ranks that have others, and as a whole."""
    value = jnp.arange(20.0).reshape(5, 4)
    bounds = np.cumsum([0, *rows])

    def stacked(mesh, bounds):
        each = zip(bounds, bounds[1:], strict=False)
        return StackedArray([mesh.put(value[a:b], rank) for rank, (a, b) in enumerate(each)])

    save_state(tmp_path / "a", {"x": stacked(thread_mesh(3), bounds)})
    assert (read_plainly(tmp_path / "a")["['x']"] == value).all()
    mesh = thread_mesh(3)
    loaded = load_state(tmp_path / "a", {"x": stacked(mesh, (0, 3, 5))})["x"]
    got = [mesh.value(part, rank) for rank, part in enumerate(loaded.parts)]
    assert (np.concatenate(got) == value).all()
    place = StackedSharding((0, 1, 6), loaded.sharding.parts)
    with pytest.raises(ValueError, match=r"\['x'\] is float32\[5,4\], but its .* with 6 rows"):
        load_state(tmp_path / "a", {"x": value}, place)


def test_a_snapshot_is_of_the_arrays_as_they_were(tmp_path, thread_mesh, assert_same, monkeypatch):
    """Steps take the memory of arrays that are yet to be written, as they would without a save."""
    mesh = thread_mesh(2)
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    start = jnp.arange(1000.0)
    state = {"x": mesh.put(start, 1), "y": start + 0, "host": np.arange(3.0)}
    go_on, write_shares = threading.Event(), _shares.write_shares

    def write_later(*args):
        assert go_on.wait(60)
        write_shares(*args)

    monkeypatch.setattr(_shares, "write_shares", write_later)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=save_args(state))
        arrays = mesh.processes[1].arrays
        for place, name in ((arrays, state["x"].id), (state, "y")):
            memory = place[name].unsafe_buffer_pointer()
            place[name] = increment(place[name])
            assert place[name].unsafe_buffer_pointer() == memory, "the save keeps its memory"
        state["host"] += 1
        go_on.set()
        manager.wait_until_finished()
        loaded = manager.restore(0, args=restore_args(state))
    assert_same(mesh.value(loaded["x"], 1), start, where=False)
    assert_same(loaded["y"], start, where=False)
    assert_same(loaded["host"], np.arange(3.0))


# ---- errors -------------------------------------------------------------------------------------


def test_an_error_on_a_rank_is_the_savers_and_leaves_nothing(tmp_path, thread_mesh, monkeypatch):
    mesh = thread_mesh(3)
    write_shares = _shares.write_shares

    def failing_write(directory, writer, shares):
        if writer == "rank1process0":
            raise OSError(28, os.strerror(28), str(directory))
        write_shares(directory, writer, shares)

    monkeypatch.setattr(_shares, "write_shares", failing_write)
    tree = on_ranks(mesh)
    with pytest.raises(OSError, match="No space left") as caught:
        save_state(tmp_path / "a", tree)
    assert "on rank 1" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=save_args(tree))
        with pytest.raises(OSError, match="No space left"):
            manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None
    # The ranks have dropped their copies.
    assert all(isinstance(x, jax.Array) for p in mesh.processes for x in p.arrays.values())


@pytest.mark.parametrize("dies", ["in a save", "in a write beside steps", "in a load"])
def test_the_death_of_a_worker_is_the_savers_error(tmp_path, thread_mesh, dies, assert_same):
    mesh = thread_mesh(3)
    tree = on_ranks(mesh)
    save_state(tmp_path / "7", tree)
    if dies == "in a save":
        mesh.dead.add(2)
        with pytest.raises(RankError):
            save_state(tmp_path / "8", tree)
    elif dies == "in a write beside steps":
        go_on = threading.Event()
        mesh.beside[2].submit(go_on.wait)
        with pytest.raises(RankError), ocp.CheckpointManager(tmp_path / "m") as manager:
            manager.save(8, args=save_args(tree))
            mesh.dead.add(2)
            go_on.set()
    else:
        mesh.dead.add(2)
        with pytest.raises(RankError):
            load_state(tmp_path / "7", tree)
    assert [p.name for p in tmp_path.iterdir() if p.name != "m"] == ["7"]
    mesh.dead.clear()
    loaded = load_state(tmp_path / "7", tree)
    assert_on_ranks(mesh, loaded, lambda name: tree[name].ranks, assert_same)


def test_damage_is_found_by_the_rank_that_reads(tmp_path, thread_mesh):
    mesh = thread_mesh(2)
    tree = {"x": mesh.put(jnp.arange(10000.0), 1)}
    save_state(tmp_path / "a", tree)
    (file,) = [p for p in (tmp_path / "a").rglob("*") if p.stat().st_size > 30000 and p.is_file()]
    content = bytearray(file.read_bytes())
    content[20000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged at the leaf \['x'\]"):
        load_state(tmp_path / "a", tree)


def test_a_host_without_the_directory_is_named(tmp_path):
    missing = str(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="all hosts share"):
        _shares.write_shares(missing, "rank0process0", [])
    with pytest.raises(FileNotFoundError, match="all hosts share"):
        _shares.read_arrays(_shares.Database(missing), [])


def test_arrays_that_are_gone_and_of_two_meshes_are_refused(tmp_path, thread_mesh):
    one, two = thread_mesh(1), thread_mesh(1)
    gone = one.put(np.zeros(3), 0)
    gone.consume("donated to the call of step")
    with pytest.raises(ValueError, match=r"\['x'\] was donated to the call of step"):
        save_state(tmp_path / "a", {"x": gone})
    tree = [one.put(jnp.ones(3), 0), two.put(jnp.ones(3), 0)]
    with pytest.raises(ValueError, match="2 remote meshes"):
        save_state(tmp_path / "a", tree)
    save_state(tmp_path / "a", [jnp.ones(3), jnp.ones(3)])
    with pytest.raises(ValueError, match="2 remote meshes"):
        load_state(tmp_path / "a", tree)
