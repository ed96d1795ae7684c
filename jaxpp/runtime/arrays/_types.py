"""The type of an array besides its bytes, and the way from arrays to bytes and back.

Between processes an array goes as its bytes alone, since both sides know its type. This holds for
every dtype of JAX. Those of `ml_dtypes` have whole bytes for each element on the host, also int4,
int2 and float4, which a device may pack. Keys go as the integers that they are made of.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxpp import _compat
from jaxpp._specs import Spec
from jaxpp.jaxprs import WIDE
from jaxpp.runtime.arrays._homes import Box, Home, box_of, boxes_here, sharding_in

_FLOAT0 = "float0"


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of an array, as plain data that any process can read.

    Args:
        shape: the shape of the array.
        dtype: the name of the dtype; for keys that of the integers that they are made of.
        key: for keys the name of their implementation, such as `"threefry2x32"`.
        kind: the memory kind, `"pinned_host"`; None for the memory of the device.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ArrayType.of(jnp.ones((2, 3), "bfloat16"))
        ArrayType(shape=(2, 3), dtype='bfloat16', key=None, kind=None)
        >>> ArrayType.of(jax.random.key(0)).nbytes
        8
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    kind: str | None = None

    @classmethod
    def of(cls, array: Any) -> "ArrayType":
        """Makes the type of an array, or of anything that has a shape and a dtype."""
        dtype, kind = array.dtype, _compat.memory_kind(getattr(array, "aval", array))
        if isinstance(dtype, np.dtype):
            name = _FLOAT0 if dtype == jax.dtypes.float0 else dtype.name
            return cls(tuple(array.shape), name, kind=kind)
        return cls(tuple(array.shape), "uint32", _key_implementation(dtype), kind)

    def __str__(self):
        name = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{name}{'<host>' * bool(self.kind)}[{','.join(map(str, self.shape))}]"

    @property
    def host_shape(self) -> tuple[int, ...]:
        """The shape of the array on the host, where keys are rows of integers."""
        return self.shape if self.key is None else self.shape + _key_shape(self.key)

    @property
    def host_dtype(self) -> np.dtype:
        """The dtype of the array on the host."""
        return jax.dtypes.float0 if self.dtype == _FLOAT0 else np.dtype(self.dtype)

    def share(self, boxes: Sequence[Box]) -> "ArrayType":
        """Returns the type of some boxes as one array on the host; its first axis counts them."""
        shape = tuple(stop - start for start, stop in boxes[0])
        return dataclasses.replace(self, shape=(len(boxes), *shape))

    @property
    def nbytes(self) -> int:
        """The bytes of the array on the host, and on the wire."""
        return math.prod(self.host_shape) * self.host_dtype.itemsize

    def of_plain(self, array: Any) -> Any:
        """Returns keys of their integers where the type is of keys; else the array itself."""
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


def plain(array: Any) -> Any:
    """Returns the integers that keys are made of; any other array as it is."""
    return array if isinstance(array.dtype, np.dtype) else jax.random.key_data(array)


@functools.cache
def _key_implementation(dtype: Any) -> str:
    found = []
    aval = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), aval)
    return str(found[0])


@functools.cache
def _key_shape(implementation: str) -> tuple[int, ...]:
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
    return data.shape


def to_host(array: Any) -> np.ndarray:
    """Returns the bytes of an array, once it has been computed.

    Of an array that several processes hold, these are the bytes of the boxes that this one holds,
    each once, in the order of its devices.

    On CPU the bytes, `uint8` of one axis, are the array's own memory where host and device store
    the dtype alike. This view must not be written to. While it lives, the memory is not donated.

    Raises:
        Exception: what the computation of the array raised.
    """
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return own_share(array)[1]
    array = plain(array)
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        host = np.empty(array.shape, array.dtype)  # unlike `np.asarray`, which the array would keep
        for box, data in shards_of(array):
            host[_slices(box)] = np.asarray(data)
    else:
        host = np.asarray(array)
    if host.dtype.itemsize == 0 or host.size == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)


def is_ready(array: Any) -> bool:
    """Tells whether an array is known to have been computed."""
    # On some versions of JAX, key arrays have no `is_ready`.
    return isinstance(array.dtype, np.dtype) and array.is_ready()


def shards_of(array: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Returns the shards that this process has of an array, and no earlier device, by their boxes.

    Keys are the integers that they are made of. The shards are on their way to the host.
    """
    found = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            data = plain(shard.data)
            data.copy_to_host_async()
            found.append((box_of(shard.index, array.shape), data))
    return found


def _slices(box: Box) -> tuple[Any, ...]:
    return (*(slice(*interval) for interval in box), ...)


def from_host(
    buffer: Any,
    array_type: ArrayType,
    home: Home,
    spec: Spec = (),
    boxes: Sequence[Box] | None = None,
) -> Any:
    """Makes an array from its bytes.

    The array may read the buffer for as long as it lives, and keeps alive the object that `buffer`
    is a view of. So the buffer belongs to the array from here on: nobody may write to it or unmap
    it before that object has gone. Pass a copy of memory that stays the caller's.

    On CPU the bytes are taken without a copy where they start at a multiple of 64 bytes. Those of
    an array of several processes are of the `boxes` of this process's devices alone. An array of
    dtype float0, which no device has, is one of NumPy.
    """
    host = host_array(buffer, array_type if boxes is None else array_type.share(boxes))
    if array_type.dtype == _FLOAT0:
        return np.empty(array_type.host_shape, array_type.host_dtype)

    def part(box: Box) -> np.ndarray:
        return host[_slices(box)] if boxes is None else host[boxes.index(box), ...]

    return from_boxes(part, array_type, sharding_in(home, spec, array_type.kind))


def from_boxes(
    part: Callable[[Box], np.ndarray], array_type: ArrayType, sharding: Sharding | None
) -> jax.Array:
    """Makes an array of boxes on the host, whose memory it may keep as `from_host` does.

    `part` gives the box of each device of this process. Without a sharding the array goes to the
    default device, to which it is not committed.
    """
    shape = array_type.host_shape

    def of_index(index: Any) -> np.ndarray:
        return part(box_of(index, array_type.shape))

    with jax.enable_x64(True) if array_type.dtype in WIDE else contextlib.nullcontext():
        if sharding is None:
            array = jax.device_put(part(tuple((0, n) for n in array_type.shape)))
        elif sharding.memory_kind != _compat.PINNED_HOST:  # in a third of the time of device_put
            array = jax.make_array_from_callback(shape, sharding, of_index)
        else:  # JAX's functions for callbacks and for shards lose the memory kind of one device
            one = functools.partial(SingleDeviceSharding, memory_kind=sharding.memory_kind)
            shards = [
                jax.device_put(of_index(index), one(device))
                for device, index in sharding.addressable_devices_indices_map(shape).items()
            ]
            whole = isinstance(sharding, SingleDeviceSharding)
            join = jax.make_array_from_single_device_arrays
            array = shards[0] if whole else join(shape, sharding, shards)
    return array_type.of_plain(array)


class ArrayMaker:
    """Makes arrays, always of the same types, from bytes that may change afterwards.

    For small arrays this takes a fraction of the time of `from_host`. The bytes of each array start
    at its offset in the buffer. Without specs all are whole.
    """

    def __init__(
        self,
        array_types: Sequence[ArrayType],
        offsets: Sequence[int],
        home: Home,
        specs: Sequence[Spec] = (),
    ):
        self._views = [
            (t.host_shape, t.host_dtype, offset)
            for t, offset in zip(array_types, offsets, strict=True)
        ]
        split = tuple(specs) if isinstance(home, Mesh) else ()
        self._copy = _copier(tuple(array_types), home, split)

    def __call__(self, buffer: Any) -> list[Any]:
        """Makes the arrays whose bytes are in a buffer."""
        views = [np.ndarray(shape, dtype, buffer, offset) for shape, dtype, offset in self._views]
        return list(self._copy(*views))


@functools.lru_cache(4096)
def _copier(types: tuple[ArrayType, ...], home: Home, specs: tuple[Spec, ...]) -> Callable:
    """Returns what copies arrays of the host to a home; a compiled identity where that is fastest.

    On four CPU devices it takes 4 times as long. It would narrow wide dtypes, does not take float0,
    and leaves all in the device's memory.
    """
    if isinstance(home, Mesh) or any(t.dtype in WIDE or t.nbytes == 0 or t.kind for t in types):
        specs = specs or ((),) * len(types)
        return lambda *hosts: [
            from_host(to_host(np.array(host)), type_, home, spec)
            for host, type_, spec in zip(hosts, types, specs, strict=True)
        ]

    def copy(*hosts: Any) -> list[Any]:
        return [type_.of_plain(host) for type_, host in zip(types, hosts, strict=True)]

    return jax.jit(copy, out_shardings=sharding_in(home))


def host_array(buffer: Any, array_type: ArrayType) -> np.ndarray:
    """Views bytes as an array on the host; keys are the integers that they are made of.

    Raises:
        ValueError: if there are fewer bytes than the type has.
    """
    nbytes = array_type.nbytes
    if nbytes == 0:
        return np.empty(array_type.host_shape, array_type.host_dtype)
    data = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if data.nbytes < nbytes:
        raise ValueError(f"{array_type} needs {nbytes} bytes, got {data.nbytes}.")
    return data[:nbytes].view(array_type.host_dtype).reshape(array_type.host_shape)


# ---- arrays of several processes ----------------------------------------------------------------

#: The share of a process in an array: boxes, all of one shape, and the bytes of all of them.
Share = tuple[Sequence[Box], np.ndarray]


def own_share(array: Any) -> Share:
    """Returns the share of this process in an array: what its devices hold, each part once."""
    if not isinstance(array, jax.Array):  # float0, which no device has
        return (), np.empty(0, np.uint8)
    held = {box_of(s.index, array.shape): s.data for s in array.addressable_shards}
    boxes = tuple(boxes_here(array.shape, array.sharding))
    return boxes, np.concatenate([to_host(held[box]) for box in boxes])


def join_shares(array_type: ArrayType, shares: Sequence[Share]) -> np.ndarray:
    """Makes the whole array, a copy on the host, from what `own_share` gives in its processes.

    Example:
        >>> left = [((0, 1),)], np.array([7], np.uint8)
        >>> right = [((1, 2),)], np.array([8], np.uint8)
        >>> join_shares(ArrayType((2,), "uint8"), [left, right])
        array([7, 8], dtype=uint8)
    """
    whole = np.empty(array_type.host_shape, array_type.host_dtype)
    for boxes, data in shares:
        parts = host_array(data, array_type.share(boxes)) if boxes else ()
        for box, part in zip(boxes, parts, strict=True):
            whole[_slices(box)] = part
    return whole
