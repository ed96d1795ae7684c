"""Messages are made of bytes, and give arrays of their own."""

import jax
import numpy as np

from jaxpp._program import Message
from jaxpp.runtime.transport._frames import Unpacker


def test_what_was_unpacked_from_a_small_message_does_not_read_its_bytes():
    x = jax.numpy.arange(6, dtype="float32").reshape(2, 3)
    unpack = Unpacker.of(Message(0, 0, 1, ("x",), ("edge",), (x.aval,)), jax.devices()[0])
    buffer = bytearray(np.asarray(x).tobytes().ljust(unpack.nbytes, b"\0"))
    (array,) = unpack(buffer)
    buffer[:] = bytes(len(buffer))
    np.testing.assert_array_equal(array, x, strict=True)
