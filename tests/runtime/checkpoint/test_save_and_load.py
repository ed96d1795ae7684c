"""What is saved is what is loaded, to the bit, wherever it goes; and what cannot be is an error."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.runtime.checkpoint import _directory, _manifest, _store, load_state, save_state

DTYPES = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16",
    "uint32", "uint64", "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
SHAPES = [(), (5,), (3, 4), (0,), (2, 0, 3), (1, 1, 2, 3)]


def random_bits(dtype, shape, seed=0):
    """Any pattern of bits that the dtype has: NaNs with payloads and negative zeros too."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(seed)
    if dtype.itemsize > 1 or dtype.kind == "b":
        bits = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), "uint8")
        return np.ascontiguousarray(bits).view(dtype).reshape(shape)
    return rng.integers(0, 4, shape).astype(dtype)  # the bits that a dtype of 2 or 4 has at least


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bitwise(tmp_path, dtype, assert_same):
    hosts = [random_bits(dtype, shape) for shape in SHAPES]
    with jax.enable_x64(True):
        tree = {"jax": [jax.device_put(x) for x in hosts], "numpy": hosts}
    assert tree["jax"][1].dtype == hosts[1].dtype
    save_state(tmp_path / "a", tree)
    assert_same(load_state(tmp_path / "a", tree), tree)


def test_zeros_of_both_signs_come_back_bitwise(tmp_path, assert_same):
    tree = [jnp.full(4, -0.0), jnp.zeros(4), np.full(3, -0.0)]
    save_state(tmp_path / "a", tree)
    assert_same(load_state(tmp_path / "a", tree), tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_come_back(tmp_path, impl, assert_same):
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    key = jax.random.key(3, impl=impl)
    keys = jax.random.split(key, (4, 3))
    sharded = jax.device_put(keys, NamedSharding(mesh, PartitionSpec("x")))
    tree = {"one": key, "many": keys, "sharded": sharded, "none": keys[:0]}
    save_state(tmp_path / "a", tree)
    loaded = load_state(tmp_path / "a", tree)
    assert_same(loaded, tree)
    assert jax.random.normal(loaded["one"]) == jax.random.normal(key)


def test_numbers_come_back(tmp_path, assert_same):
    tree = [True, 0, -(10**30), 0.1, float("nan"), -0.0, 1e-320, float("inf"), complex(0.1, -0.0),
            np.float32(0.1), np.int64(-3), np.bool_(True)]  # fmt: skip
    save_state(tmp_path / "a", tree)
    assert_same(load_state(tmp_path / "a", [type(x)(0) for x in tree]), tree)


def test_a_weakly_typed_array_stays_one(tmp_path, assert_same):
    tree = {"scalar": jnp.asarray(2.0), "vector": jnp.asarray(2.0) * np.ones((), int) + 1}
    assert tree["scalar"].weak_type
    save_state(tmp_path / "a", tree)
    assert_same(load_state(tmp_path / "a", tree), tree)


def test_a_model_and_its_optimizer_come_back(tmp_path, assert_same):
    model = eqx.nn.MLP(3, 2, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tree = {"model": model, "state": optimizer.init(eqx.filter(model, eqx.is_array))}
    save_state(tmp_path / "a", tree)
    other = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, tree)
    loaded = load_state(tmp_path / "a", other)
    assert_same(loaded, tree)
    assert loaded["model"].activation is other["model"].activation


# ---- where arrays go ----------------------------------------------------------------------------


def shardings():
    devices = np.array(jax.devices())
    mesh = Mesh(devices[:4].reshape(2, 2), ("x", "y"))
    specs = [("x", "y"), ("y",), (None, "x"), (("y", "x"),), ()]
    return {
        "one": SingleDeviceSharding(devices[5]),
        **{str(spec): NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs},
        "eight": NamedSharding(Mesh(devices, "x"), PartitionSpec("x")),
    }


@pytest.mark.parametrize("before", range(7))
def test_an_array_goes_from_any_sharding_to_any_other(tmp_path, before, assert_same):
    value = jnp.arange(8 * 4, dtype="float32").reshape(8, 4)
    value = jax.device_put(value, list(shardings().values())[before])
    save_state(tmp_path / "a", [value])
    for after in shardings().values():
        got = load_state(tmp_path / "a", [value], after)
        assert_same(got, [jax.device_put(value, after)])
        assert_same(load_state(tmp_path / "a", got), got)
        aval = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=after)
        assert_same(load_state(tmp_path / "a", [aval]), got)


def test_a_type_goes_to_the_default_device_and_is_free_to_go_on(tmp_path):
    save_state(tmp_path / "a", jax.device_put(jnp.ones(3), jax.devices()[2]))
    aval = jax.ShapeDtypeStruct((3,), "float32")
    assert load_state(tmp_path / "a", aval).devices() == {jax.devices()[0]}
    with jax.default_device(jax.devices()[1]):
        loaded = load_state(tmp_path / "a", aval)
    assert loaded.devices() == {jax.devices()[1]}
    (loaded + jax.device_put(jnp.ones(3), jax.devices()[4])).block_until_ready()


def test_shardings_may_be_a_prefix(tmp_path):
    one, two = (SingleDeviceSharding(d) for d in jax.devices()[1:3])
    tree = {"a": [jnp.ones(3), jnp.ones(2)], "b": (jnp.ones(1), None), "c": jnp.ones(1), "d": 1}
    save_state(tmp_path / "a", tree)
    got = load_state(tmp_path / "a", tree, {"a": one, "b": (two, None), "c": None, "d": None})
    assert [x.sharding for x in got["a"]] == [one, one]
    assert got["b"][0].sharding == two
    assert got["c"].sharding == tree["c"].sharding
    with pytest.raises(ValueError) as caught:
        load_state(tmp_path / "a", tree, {"a": one})
    assert "prefix" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="got 'x'"):
        load_state(tmp_path / "a", tree, {"a": "x", "b": None, "c": None, "d": None})


def test_what_like_holds_may_have_been_donated(tmp_path, assert_same):
    tree = [jax.device_put(jnp.arange(3.0), jax.devices()[1]), jnp.asarray(1.0)]
    save_state(tmp_path / "a", tree)
    copies = jax.tree.map(lambda x: x + 0, tree)
    for x in tree:
        x.delete()
    assert_same(load_state(tmp_path / "a", tree), copies)


def test_loaded_numpy_arrays_may_be_written_to(tmp_path):
    tree = [np.arange(3.0), np.arange(9)]
    save_state(tmp_path / "a", tree)
    loaded = load_state(tmp_path / "a", tree)
    loaded[0][0] = loaded[1][0] = 7


def test_a_share_is_read_without_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "CHUNK_BYTES", 1 << 16)
    value = np.random.default_rng(0).standard_normal((1024, 64)).astype("float32")
    save_state(tmp_path / "a", value)
    row = value[700].tobytes()
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
    (file,) = [p for p in files if row in p.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(row)] ^= 1
    file.write_bytes(content)
    with _directory.reading(tmp_path / "a") as (manifest, data):
        (leaf,) = manifest.leaves
        assert isinstance(leaf, _manifest.ArrayLeaf)
        box = ((0, 512), (0, 64))
        ((got,),) = _store.read(data, [_store.Request(leaf, (box,))], "a")
        assert (got == value[:512]).all()
        with pytest.raises(ValueError, match="damaged"):
            _store.read(data, [_store.Request(leaf, (((512, 1024), (0, 64)),))], "a")


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 100), (1000,)])
@pytest.mark.parametrize("limit", [1, 16, 64, 10**6])
def test_chunks_are_small_and_as_large_as_they_may_be(monkeypatch, shape, limit):
    monkeypatch.setattr(_store, "CHUNK_BYTES", limit)
    chunk = _store.chunk_shape(shape, 4)
    assert all(1 <= c <= n for c, n in zip(chunk, shape, strict=True))
    assert np.prod(chunk) * 4 <= max(4, limit)
    assert tuple(chunk) == shape or 2 * np.prod(chunk) * 4 > limit // 2


def test_an_array_may_lie_in_pieces_of_several_writers(tmp_path):
    """What ranks that each hold a slice of one array will write."""
    value = np.arange(24.0).reshape(6, 4)
    with _directory.drafting(tmp_path / "a", overwrite=False) as draft:
        pieces = []
        for rank, rows in enumerate(np.split(value, 3)):
            _store.write(draft.data / f"rank-{rank}", {"0.0": np.ascontiguousarray(rows)})
            pieces.append(_manifest.Piece(f"rank-{rank}", "0.0", (2 * rank, 0), (2, 4)))
        kind = _manifest.ArrayType.of(value)
        draft.publish((_manifest.ArrayLeaf("", kind, tuple(pieces)),))
    assert (load_state(tmp_path / "a", value) == value).all()
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
    with jax.enable_x64(True):
        got = load_state(tmp_path / "a", aval, NamedSharding(mesh, PartitionSpec(None, "x")))
    assert (np.asarray(got) == value).all()


# ---- errors -------------------------------------------------------------------------------------


def test_what_is_there_is_not_replaced_by_accident(tmp_path, assert_same):
    save_state(tmp_path / "a", [1])
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_state(tmp_path / "a", [2])
    assert load_state(tmp_path / "a", [0]) == [1]
    save_state(tmp_path / "a", [jnp.ones(3)], overwrite=True)
    assert_same(load_state(tmp_path / "a", [jnp.zeros(3)]), [jnp.ones(3)])
    assert len(list((tmp_path / "a").iterdir())) == 2

    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(FileExistsError, match="not a checkpoint"):
            save_state(tmp_path / name, [2], overwrite=True)
    assert (tmp_path / "folder" / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_state(tmp_path / "empty", [2])


def test_no_checkpoint_is_named_as_such(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_state(tmp_path / "nowhere", [0])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "an app"}')
    for path in (tmp_path, tmp_path / "file", tmp_path / "other"):
        with pytest.raises(ValueError, match="not a checkpoint"):
            load_state(path, [0])


def test_a_half_written_one_is_named_as_such_and_replaced(tmp_path):
    save_state(tmp_path / "a", [jnp.ones(3)])
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="half-written"):
        load_state(tmp_path / "a", [jnp.ones(3)])
    save_state(tmp_path / "a", [4])
    assert load_state(tmp_path / "a", [0]) == [4]
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_two_do_not_save_to_one_path(tmp_path):
    with (
        _directory.drafting(tmp_path / "a", overwrite=False),
        pytest.raises(FileExistsError, match="is saving"),
    ):
        save_state(tmp_path / "a", [1])


def test_leftovers_are_cleaned_but_not_those_in_use(tmp_path):
    save_state(tmp_path / "a", [1])
    leftovers = [tmp_path / "a" / name for name in ("data-dead", "data-gone.removed")]
    for path in leftovers:
        path.mkdir()
    with _directory.drafting(tmp_path / "a", overwrite=True) as draft:
        assert not any(path.exists() for path in leftovers)  # their space is free for the new one
        save_state(tmp_path / "a", [2], overwrite=True)
        assert draft.data.is_dir()
    assert not draft.data.exists()
    assert load_state(tmp_path / "a", [0]) == [2]


def test_a_checkpoint_that_is_read_stays(tmp_path, assert_same):
    save_state(tmp_path / "a", {"x": np.arange(3.0)})
    with _directory.reading(tmp_path / "a") as (manifest, data):
        save_state(tmp_path / "a", {"x": np.arange(4.0)}, overwrite=True)
        (leaf,) = manifest.leaves
        assert isinstance(leaf, _manifest.ArrayLeaf)
        request = _store.Request(leaf, (((0, 3),),))
        assert _store.read(data, [request], "a")[0][0].tolist() == [0, 1, 2]
    with _directory.reading(tmp_path / "a"):
        assert not _directory.remove(tmp_path / "a")
    assert _directory.remove(tmp_path / "a")


@pytest.fixture
def read_only(tmp_path):
    """Makes a directory that not even root can write to; it is writable again at the end.

    For root a process of its own mounts it read-only, and unmounts it even if the tests are killed.
    """
    changed, mounts = [], []
    mount = 'mount --bind -o ro "$1" "$1" && echo mounted && read -r _; umount "$1"'

    def make(path):
        if os.geteuid():
            for folder in (path, *(p for p in path.rglob("*") if p.is_dir())):
                folder.chmod(0o500)
                changed.append(folder)
        else:
            process = subprocess.Popen(
                ["sh", "-c", mount, "sh", path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            mounts.append(process)
            if not process.stdout.readline():
                pytest.skip("nothing can be mounted here")

    yield make
    for path in changed:
        path.chmod(0o700)
    for process in mounts:
        process.communicate()


@pytest.mark.parametrize("lock", ["with", "without"])
def test_a_copy_that_is_read_only_is_read(tmp_path, assert_same, read_only, lock):
    tree = {"x": np.arange(3.0)}
    save_state(tmp_path / "a", tree)
    if lock == "without":
        next((tmp_path / "a").glob("data-*/lock")).unlink()
    read_only(tmp_path / "a")
    with pytest.raises(OSError, match="Read-only|denied"):
        (tmp_path / "a" / "new").touch()
    assert_same(load_state(tmp_path / "a", tree), tree)


def test_on_a_file_system_without_locks_leftovers_stay_for_a_day(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    save_state(tmp_path / "a", [1])
    for name in ("data-young", "data-old"):
        (tmp_path / "a" / name).mkdir()
    yesterday = time.time() - 25 * 3600
    os.utime(tmp_path / "a" / "data-old", (yesterday, yesterday))
    save_state(tmp_path / "a", [2], overwrite=True)
    assert load_state(tmp_path / "a", [0]) == [2]
    assert (tmp_path / "a" / "data-young").exists()
    assert not (tmp_path / "a" / "data-old").exists()
    assert _directory.remove(tmp_path / "a")


def test_a_newer_format_is_named_as_such(tmp_path):
    save_state(tmp_path / "a", [1])
    file = tmp_path / "a" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2}))
    with pytest.raises(ValueError, match="format 2.*up to 1"):
        load_state(tmp_path / "a", [0])


@pytest.mark.parametrize("name", ["..", "../other", "/tmp", ""])
@pytest.mark.parametrize("what", ["data", "writer"])
def test_a_manifest_cannot_name_a_folder_outside(tmp_path, what, name):
    save_state(tmp_path / "a", [jnp.ones(3)])
    file = tmp_path / "a" / "manifest.json"
    document = json.loads(file.read_text())
    body = document["body"]
    (body if what == "data" else body["leaves"][0]["pieces"][0])[what] = name
    file.write_text(json.dumps({**document, "crc32": _manifest._checksum(body)}))
    with pytest.raises(ValueError, match=f"damaged: its manifest names {name!r}"):
        load_state(tmp_path / "a", [jnp.ones(3)])


def test_a_checkpoint_of_another_model_names_the_leaves(tmp_path):
    saved = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": 1, "f": jax.nn.relu, "k": jnp.ones(2)}
    save_state(tmp_path / "a", saved)
    keys = jax.random.key(0)
    like = {"a": jnp.ones(3, "int32"), "b": jnp.ones(4), "d": 1, "f": jax.nn.gelu, "k": keys}
    with pytest.raises(ValueError) as caught:
        load_state(tmp_path / "a", like)
    for part in (
        "not in the checkpoint: ['d']", "only in the checkpoint: ['c']",
        "['a'] (float32[3] there, int32[3] in `like`)",
        "['b'] (float32[2,2] there, float32[4] in `like`)",
        "['f']", "threefry2x32 keys[]",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="and 2 more"):
        load_state(tmp_path / "a", saved | {f"x{i}": 0 for i in range(7)})
    with pytest.raises(ValueError, match="a Python int there, a Python float"):
        load_state(tmp_path / "a", saved | {"c": 1.0})


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    for tree, kind, message in [
        ({"x": gone}, ValueError, r"\['x'\] was deleted"),
        ({"x": np.array(["a"])}, TypeError, r"\['x'\] is an array of dtype <U1"),
        ({"x": np.array([None])}, TypeError, "dtype object"),
        ({"x": jax.ShapeDtypeStruct((), "int32")}, TypeError, "without values"),
    ]:
        with pytest.raises(kind, match=message):
            save_state(tmp_path / "a", tree)
    with pytest.raises(TypeError, match="being traced"):
        jax.jit(lambda x: save_state(tmp_path / "a", {"x": x}))(1.0)
    assert not (tmp_path / "a").exists()


def flipped(content, position, bit):
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_a_changed_bit_is_an_error_and_never_another_number(tmp_path):
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((40, 40)), "b": np.arange(5, dtype="int8"), "n": 7}
    save_state(tmp_path / "a", tree)
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.stat().st_size]
    seen = set()
    for file in files:
        content = file.read_bytes()
        for position in sorted(rng.choice(len(content), min(60, len(content)), replace=False)):
            file.write_bytes(flipped(content, int(position), int(rng.integers(8))))
            try:
                loaded = load_state(tmp_path / "a", tree)
            except (ValueError, FileNotFoundError) as error:
                seen.add(type(error))
                assert str(tmp_path / "a") in str(error)
            else:
                assert all(np.array_equal(loaded[k], tree[k]) for k in tree), (file, position)
        file.write_bytes(content)
    assert seen == {ValueError}
    load_state(tmp_path / "a", tree)


@pytest.mark.parametrize("change", ["truncated", "gone"])
def test_a_file_that_is_cut_or_gone_is_an_error(tmp_path, change):
    tree = {"w": np.arange(10000.0), "b": np.arange(5, dtype="int8")}
    save_state(tmp_path / "a", tree)
    failed = set()
    for file in [p for p in (tmp_path / "a").rglob("*") if p.is_file()]:
        content = file.read_bytes()
        if change == "gone":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2])
        try:
            loaded = load_state(tmp_path / "a", tree)
        except ValueError as error:
            assert "damaged" in str(error) or "half-written" in str(error)
            failed.add("data" if len(content) > 80000 else file.name)
        else:  # the lock, and what the database has left of its first entries
            assert all(np.array_equal(loaded[k], tree[k]) for k in tree)
        file.write_bytes(content)
    assert failed >= {"data", "manifest.json", "manifest.ocdbt"}
    shutil.rmtree(next((tmp_path / "a").glob("data-*")))
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path / "a", tree)


def test_data_that_are_missing_do_not_read_as_zeros(tmp_path):
    import tensorstore

    save_state(tmp_path / "a", np.arange(10.0))
    (directory,) = (tmp_path / "a").glob("data-*/driver")
    base = {"driver": "file", "path": f"{directory}/"}
    database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    assert b"0.0/c/0" in database.list().result()
    database.write("0.0/c/0", None).result()
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path / "a", np.zeros(10))


# ---- the operating system refuses ---------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_an_error_and_costs_nothing(small_disk, assert_same):
    tree = {"x": jnp.arange(1000.0)}
    save_state(small_disk / "a", tree)
    before = sorted(small_disk.rglob("*"))
    large = {"x": np.random.default_rng(0).standard_normal(1 << 19)}
    for path in (small_disk / "a", small_disk / "b"):
        with pytest.raises(OSError) as caught:
            save_state(path, large, overwrite=True)
        assert caught.value.errno == errno.ENOSPC
        assert str(path) in caught.value.filename
    assert sorted(small_disk.rglob("*")) == before
    assert_same(load_state(small_disk / "a", tree), tree)


def test_a_directory_that_cannot_be_written_to_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_state(tmp_path / "file" / "a", [jnp.ones(3)])
    if os.path.isdir("/proc/self"):  # where even root makes no directory
        with pytest.raises(OSError, match="/proc/nowhere"):
            save_state("/proc/nowhere/a", [jnp.ones(3)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        save_state(tmp_path / "a", [jnp.ones(3)])


@pytest.mark.parametrize("call", range(1, 31))
def test_an_error_at_any_call_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, call):
    """Whatever the operating system refuses, and whenever."""
    save_state(tmp_path / "a", {"x": np.arange(3.0)})
    count = itertools.count(1)

    def failing(function):
        def call_or_fail(*args, **kwargs):
            if next(count) == call:
                raise OSError(errno.EIO, "Input/output error", str(args[0]))
            return function(*args, **kwargs)

        return call_or_fail

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "fsync", "open", "rmdir", "unlink"):
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            save_state(tmp_path / "a", {"x": np.arange(4.0)}, overwrite=True)
            failed = False
        except OSError:
            failed = True
    loaded = [n for n in (3, 4) if _holds(tmp_path / "a", n)]
    assert len(loaded) == 1
    assert failed or loaded == [4]
    assert failed or call > 15
    assert not failed or call < 30, "there are more calls than are tried"
    save_state(tmp_path / "a", {"x": np.arange(5.0)}, overwrite=True)
    assert len(list((tmp_path / "a").iterdir())) == 2


def _holds(path, size):
    try:
        got = load_state(path, {"x": np.zeros(size)})["x"]
    except ValueError as error:
        assert "of another type" in str(error)
        return False
    assert (got == np.arange(size)).all()
    return True


def test_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_state("a", [1])
    save_state(pathlib.Path("b/c"), [2])
    assert load_state(tmp_path / "a", [0]) == [1]
    assert load_state("b/c", [0]) == [2]
