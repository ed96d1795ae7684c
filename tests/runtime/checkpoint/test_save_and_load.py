"""What is saved is what is loaded, to the bit, wherever it goes; and what cannot be is an error."""

import errno
import itertools
import json
import os
import pathlib
import resource
import signal
import subprocess

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.runtime.arrays import ArrayType, StackedArray
from jaxpp.runtime.checkpoint import _handler, _shares, load_state, save_state

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
    tree = [True, 0, -(2**62), 0.1, float("nan"), -0.0, 1e-320, float("inf"), complex(0.1, -0.0),
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
    monkeypatch.setattr(_shares, "CHUNK_BYTES", 1 << 16)
    value = np.random.default_rng(0).standard_normal((1024, 64)).astype("float32")
    save_state(tmp_path / "a", value)
    row = value[700].tobytes()
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
    (file,) = [p for p in files if row in p.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(row)] ^= 1
    file.write_bytes(content)
    database = _shares.Database(str(tmp_path / "a"))
    first, second = (_shares.Wanted("", "", value, rows=rows) for rows in [(0, 512), (512, 1024)])
    (got,) = _shares.read_arrays(database, [first])
    assert (got == value[:512]).all()
    with pytest.raises(ValueError, match="damaged"):
        _shares.read_arrays(database, [second])


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 100), (1000,), (64, 64), (0, 3)])
@pytest.mark.parametrize("limit", [1, 16, 64, 10**6])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_no_chunk_goes_over_the_border_of_a_share(monkeypatch, shape, limit, parts):
    monkeypatch.setattr(_shares, "CHUNK_BYTES", limit)
    ends = [shape[0] * n // parts for n in range(parts + 1)]
    value = jnp.zeros(shape)
    stacked = StackedArray([value[a:b] for a, b in itertools.pairwise(ends)])
    chunk = _shares.chunk_shape(ArrayType.of(value), _handler._share_shape(stacked))
    assert all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape, strict=True))
    assert all(end % chunk[0] == 0 for end in ends[:-1])
    if limit == 10**6 and parts == 1:
        assert chunk == tuple(max(n, 1) for n in shape)
    if shape == (64, 64) and parts < 3:  # what can be cut evenly has chunks of the limit
        assert np.prod(chunk) * 4 == max(4, min(limit, 64 * 64 * 4 // parts))


def test_plain_orbax_reads_it(tmp_path, read_plainly):
    """In a process without jaxpp, and as the arrays of JAX that Orbax is asked for."""
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    split = NamedSharding(mesh, PartitionSpec("y", "x"))
    tree = {
        "split": jax.device_put(jnp.arange(32.0).reshape(8, 4), split),
        "bf16": jnp.arange(6, dtype="bfloat16").reshape(2, 3),
        "int4": jnp.arange(-3, 5, dtype="int4"),
        "float8": jnp.arange(8, dtype="float8_e4m3fn"),
        "bool": np.array([True, False]),
        "key": jax.random.split(jax.random.key(5), 3),
        "empty": jnp.zeros((0, 3)),
    }
    save_state(tmp_path / "a", tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "a", like)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()
    for name in tree.keys() - {"key"}:
        assert found[name].dtype == tree[name].dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(tree[name]).tobytes()
    save_state(tmp_path / "b", {**tree, "n": 3, "x": np.float32(0.5), "key": jnp.ones(3)})
    plain = read_plainly(tmp_path / "b")
    assert (plain["['n']"], plain["['x']"]) == (3, 0.5)
    for name in tree.keys() - {"key"}:
        assert plain[f"['{name}']"].tobytes() == np.asarray(tree[name]).tobytes()


@pytest.mark.parametrize("zarr3", [True, False])
def test_what_plain_orbax_has_saved_is_read(tmp_path, zarr3, assert_same):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": [np.arange(3), 7], "key": jax.random.key(2)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(tree))
    assert_same(load_state(tmp_path / "a", tree), tree)
    with pytest.raises(ValueError, match=r"\['a'\] is float32\[3,4\] in the checkpoint"):
        load_state(tmp_path / "a", {**tree, "a": jnp.ones((4, 3))})


# ---- errors -------------------------------------------------------------------------------------


def test_what_is_there_is_not_replaced_by_accident(tmp_path, assert_same):
    save_state(tmp_path / "a", [1])
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_state(tmp_path / "a", [2])
    assert load_state(tmp_path / "a", [0]) == [1]
    save_state(tmp_path / "a", [jnp.ones(3)], overwrite=True)
    assert_same(load_state(tmp_path / "a", [jnp.zeros(3)]), [jnp.ones(3)])
    assert os.listdir(tmp_path) == ["a"]

    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(FileExistsError, match="not a checkpoint"):
            save_state(tmp_path / name, [2], overwrite=True)
    assert (tmp_path / "folder" / "notes").read_text() == "mine"


def test_no_checkpoint_is_named_as_such(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "file", tmp_path / "other"):
        with pytest.raises(FileNotFoundError, match=path.name):
            load_state(path, [0])


def test_a_checkpoint_of_the_former_format_is_named_as_such(tmp_path):
    old = {"format": "jaxpp-state", "version": 1, "crc32": 0, "body": {}}
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="the format that jaxpp had before.*at commit"):
        load_state(tmp_path / "5", [0])


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


def test_a_copy_that_is_read_only_is_read(tmp_path, assert_same, read_only):
    tree = {"x": np.arange(3.0)}
    save_state(tmp_path / "a", tree)
    read_only(tmp_path / "a")
    with pytest.raises(OSError, match="Read-only|denied"):
        (tmp_path / "a" / "new").touch()
    assert_same(load_state(tmp_path / "a", tree), tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": 1}, r"lacks \['d'\], and has nothing besides"),
        ({"a": ...}, "lacks nothing, and has a besides"),
        ({"c": "text"}, r"\['c'\] is of kind scalar in the checkpoint, and 'text' in `like`"),
        ({"f": jnp.ones(3)}, r"\['f'\] is of kind string in the checkpoint, and Array"),
        (
            {"a": jnp.ones(3, "int32")},
            r"\['a'\] is float32\[3\] in the .* and int32\[3\] in `like`",
        ),
        ({"b": jnp.ones(4)}, r"\['b'\] is float32\[2,2\] in the checkpoint, and float32\[4\]"),
        ({"f": jax.nn.gelu}, r"\['f'\] is .*relu in the checkpoint, and .*gelu in `like`"),
        ({"k": jax.random.key(0)}, r"\['k'\] is float32\[2\] in .* and key<threefry2x32>\[\]"),
        ({"c": 1.0}, r"\['c'\] is int64\[\] in the checkpoint, and float64\[\]"),
        ({"u": jnp.ones(3, "uint8")}, r"\['u'\] is uint4\[3\] in the checkpoint, and uint8\[3\]"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_leaf(tmp_path, change, message, capfd):
    saved = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": 1, "f": jax.nn.relu, "k": jnp.ones(2)}
    saved["u"] = jnp.ones(3, "uint4")
    save_state(tmp_path / "a", saved)
    like = {k: v for k, v in {**saved, **change}.items() if v is not ...}
    with pytest.raises(ValueError, match=message):
        load_state(tmp_path / "a", like)
    assert "Traceback" not in capfd.readouterr().err


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    for tree, kind, message in [
        ({"x": gone}, ValueError, r"\['x'\] was deleted"),
        ({"x": np.array(["a"])}, TypeError, r"\['x'\] is an array of dtype <U1"),
        ({"x": np.array([None])}, TypeError, "dtype object"),
        ({"x": 2**63}, TypeError, r"\['x'\] is the number 9223372036854775808"),
        ({"a.b": 1, "a": {"b": 2}}, ValueError, "Two leaves .* path a.b"),
        ({"x": jax.ShapeDtypeStruct((), "int32")}, TypeError, "without values"),
    ]:
        with pytest.raises(kind, match=message):
            save_state(tmp_path / "a", tree)
    with pytest.raises(TypeError, match="being traced"):
        jax.jit(lambda x: save_state(tmp_path / "a", {"x": x}))(1.0)
    assert not list(tmp_path.iterdir())


def flipped(content, position, bit):
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_a_changed_bit_is_an_error_and_never_another_number(tmp_path):
    """In the arrays; Orbax keeps the names and kinds of leaves in a file without a checksum."""
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((40, 40)), "b": jnp.arange(5, dtype="int8"), "n": 7}
    save_state(tmp_path / "a", tree)
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.stat().st_size]
    damaged = 0
    for file in files:
        content = file.read_bytes()
        for position in sorted(rng.choice(len(content), min(60, len(content)), replace=False)):
            file.write_bytes(flipped(content, int(position), int(rng.integers(8))))
            try:
                loaded = load_state(tmp_path / "a", tree)
            except Exception as error:
                damaged += "damaged at the leaf" in str(error)
            else:
                assert all(np.array_equal(loaded[k], tree[k]) for k in tree), (file, position)
        file.write_bytes(content)
    assert damaged > 50
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
        except (ValueError, FileNotFoundError) as error:
            assert str(tmp_path / "a") in str(error) or file.name == "_METADATA"
            failed.add("data" if len(content) > 80000 else file.name)
        else:  # what nobody reads, and what the database has left of its first entries
            assert all(np.array_equal(loaded[k], tree[k]) for k in tree)
        file.write_bytes(content)
    assert failed >= {"data", "manifest.ocdbt", "_METADATA"}


def test_data_that_are_missing_do_not_read_as_zeros(tmp_path):
    import tensorstore

    save_state(tmp_path / "a", {"x": np.arange(10.0)})
    base = {"driver": "file", "path": f"{tmp_path / 'a'}/"}
    database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    assert b"x/c/0" in database.list().result()
    database.write("x/c/0", None).result()
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path / "a", {"x": np.zeros(10)})


def test_the_driver_of_tensorstore_is_that_of_the_path(tmp_path):
    """Of buckets the drivers are made, and not called: there is none here."""
    import tensorstore

    for path, driver in [
        ("gs://bucket/x", "gcs"),
        ("s3://bucket/x", "s3"),
        (str(tmp_path), "file"),
    ]:
        base = _shares._base(path)
        assert (base["driver"], base["path"][-1]) == (driver, "/")
        assert tensorstore.KvStore.Spec(base)


def test_shares_go_through_any_driver_of_tensorstore(monkeypatch, assert_same):
    import tensorstore

    context = tensorstore.Context({"cache_pool#ocdbt": {}})  # which has the memory
    monkeypatch.setattr(tensorstore, "Context", lambda *_: context)
    monkeypatch.setattr(_shares, "DATABASE", "")
    value = np.arange(12.0).reshape(3, 4)
    kind = ArrayType.of(value)
    saved = _shares.Saved("x", kind, (3, 4))
    _shares.write_shares("memory://bucket", "a", [(saved, (0, 0), value)])
    wanted = _shares.Wanted("x", "['x']", value, rows=(1, 3))
    found = _shares.read_arrays(_shares.Database("memory://bucket/a"), [wanted])
    assert_same(found, [value[1:]])


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
        assert str(path) in str(caught.value)
    assert sorted(small_disk.rglob("*")) == before
    assert_same(load_state(small_disk / "a", tree), tree)


def test_a_file_that_may_not_grow_is_an_error_and_costs_nothing(tmp_path, assert_same):
    """What a full disk is, without being root."""
    tree = {"x": jnp.arange(1000.0)}
    save_state(tmp_path / "a", tree)
    large = {"x": np.random.default_rng(0).standard_normal(1 << 19)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        for path in (tmp_path / "a", tmp_path / "b"):
            with pytest.raises(OSError, match="File too large"):
                save_state(path, large, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == ["a"]
    assert_same(load_state(tmp_path / "a", tree), tree)


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


def test_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_state("a", [1])
    save_state(pathlib.Path("b/c"), [2])
    assert load_state(tmp_path / "a", [0]) == [1]
    assert load_state("b/c", [0]) == [2]
