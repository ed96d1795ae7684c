"""Arrays of any type survive the way to bytes and back, and nobody's memory is written to."""

import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpp.runtime.arrays._homes import sharding_in
from jaxpp.runtime.arrays._types import ArrayMaker, ArrayType, from_host, to_host
from tests.helpers import assert_same
from tests.runtime.transport.ranks import failing_array

DTYPES = [
    "bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "uint64", "bfloat16", "float16", "float32", "float64", "complex64",
    "complex128", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]
SHAPES = [(), (3, 5), (0,), (4, 0, 2), (130,)]


def make(dtype, shape):
    """An array of distinct values, as far as the dtype has them."""
    values = np.arange(np.prod(shape, dtype=int)) % 100
    with jax.enable_x64(True):
        return jax.device_put(values.astype(np.dtype(dtype)).reshape(shape))


def aligned(data, offset=0):
    """A copy of some bytes in memory of ours, from `offset` bytes after a multiple of 64."""
    memory = np.zeros(len(data) + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_back(dtype):
    device = jax.devices()[3]
    for shape in SHAPES:
        array = make(dtype, shape)
        kind = ArrayType.of(array)
        data = to_host(array)
        assert array.dtype == np.dtype(dtype)
        assert data.dtype == np.uint8 and data.shape == (kind.nbytes,)
        back = from_host(aligned(data), kind, device)
        assert_same(back, array)
        assert back.devices() == {device}
        got, want = (np.asarray(a).astype(complex) for a in (back, array))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)], ids=str)
def test_keys(implementation, shape):
    keys = jax.random.split(jax.random.key(7, impl=implementation), shape)
    kind = ArrayType.of(keys)
    assert kind.shape == shape and kind.key == implementation
    assert kind == ArrayType.of(jax.eval_shape(lambda: keys))
    back = from_host(to_host(keys), kind, jax.devices()[0])
    assert_same(back, keys)
    if shape == ():
        np.testing.assert_array_equal(jax.random.normal(back, (4,)), jax.random.normal(keys, (4,)))


def mesh_of_four():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def check_split(array, spec):
    """To a mesh by both ways, and back."""
    home, kind, data = mesh_of_four(), ArrayType.of(array), to_host(array)
    (copied,) = ArrayMaker((kind,), (0,), home, (spec,))(data)
    for back in (from_host(aligned(data), kind, home, spec), copied):
        assert_same(back, array)
        assert back.sharding.is_equivalent_to(sharding_in(home, spec), array.ndim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_split_over_a_mesh(dtype):
    check_split(make(dtype, ()), ())
    check_split(make(dtype, (5,)), ((),))
    check_split(make(dtype, (4, 0)), (("data",), ()))
    check_split(make(dtype, (4, 6)), (("model",), ("data",)))
    check_split(make(dtype, (3, 8)), ((), ("data", "model")))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_that_are_split_over_a_mesh(implementation):
    keys = jax.random.split(jax.random.key(7, impl=implementation), (4, 2))
    check_split(keys, (("data",), ("model",)))
    check_split(keys[0, 0], ())


def test_what_each_device_has_whole_is_donated_without_a_trace():
    """All devices may read one buffer of the host; nobody may write to it."""
    data = aligned(to_host(make("float32", (1024,))))
    before = data.copy()
    array = from_host(data, ArrayType((1024,), "float32"), mesh_of_four(), ((),))
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(array)
    for shard in doubled.addressable_shards:
        np.testing.assert_array_equal(shard.data, 2 * before.view(np.float32))
    np.testing.assert_array_equal(data, before)


def test_float0():
    zeros = np.zeros((2, 3), jax.dtypes.float0)
    kind = ArrayType.of(zeros)
    assert kind.nbytes == 0 and to_host(zeros).size == 0
    back = from_host(to_host(zeros), kind, jax.devices()[0])
    assert back.dtype == jax.dtypes.float0 and back.shape == (2, 3)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_memory_at_any_offset(offset):
    x = make("float64", (17,))
    assert_same(from_host(aligned(to_host(x), offset), ArrayType.of(x), jax.devices()[0]), x)


def test_a_type_is_plain_data():
    for array in (jnp.ones((2, 3), jnp.bfloat16), jax.random.key(0)):
        kind = ArrayType.of(array)
        assert pickle.loads(pickle.dumps(kind)) == kind
        assert len({kind, ArrayType.of(array)}) == 1
        assert b"jax." not in pickle.dumps(kind)


def test_avals_have_the_type_of_their_arrays():
    x = jnp.ones((2, 3), jnp.int4)
    for aval in (x.aval, jax.ShapeDtypeStruct(x.shape, x.dtype), np.asarray(x)):
        assert ArrayType.of(aval) == ArrayType.of(x)


def test_the_bytes_of_a_cpu_array_are_its_own():
    x = make("float32", (1024,))
    assert to_host(x).ctypes.data == x.unsafe_buffer_pointer()


def test_an_array_is_donated_once_its_bytes_have_gone():
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jnp.ones(1 << 16)
    pointer = x.unsafe_buffer_pointer()
    data = to_host(x)
    kept = double(x)
    assert kept.unsafe_buffer_pointer() != pointer
    np.testing.assert_array_equal(data.view(np.float32), 1)
    pointer = kept.unsafe_buffer_pointer()
    to_host(kept)
    assert double(kept).unsafe_buffer_pointer() == pointer


def test_an_array_keeps_the_object_below_its_bytes():
    class Memory(np.ndarray):
        pass

    memory = np.zeros(1 << 16, np.uint8).view(Memory)
    data = memory[-memory.ctypes.data % 64 :][: 1 << 15]
    gone = weakref.ref(memory)
    array = from_host(data, ArrayType((1 << 13,), "float32"), jax.devices()[0])
    del memory, data
    assert gone() is not None
    np.testing.assert_array_equal(array, 0)


def test_what_a_failed_computation_raised():
    with failing_array() as x, pytest.raises(Exception, match="no such luck"):
        to_host(x)


def test_too_few_bytes():
    with pytest.raises(ValueError, match="needs 12 bytes, got 8"):
        from_host(np.zeros(8, np.uint8), ArrayType((3,), "float32"), jax.devices()[0])
