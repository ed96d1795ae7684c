"""A message comes out of a stream as it went in, however the stream is cut into pieces."""

import socket
import threading

import jax
import numpy as np
import pytest

from jaxpp._program import Message
from jaxpp.runtime.transport._frames import (
    SMALL,
    Header,
    Unpacker,
    read_header,
    read_into,
    read_small,
    send_frame,
    stream_of,
)


def payload(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read_message(stream, wire):
    header = read_header(stream)
    if header.nbytes <= SMALL:
        return header, read_small(stream, header.nbytes)
    buffer = np.empty(header.nbytes, np.uint8)
    read_into(stream, wire, buffer.data)
    return header, buffer.tobytes()


@pytest.mark.parametrize("piece", [1, 31, 4096, None])
def test_messages_of_all_sizes_come_whole_and_in_order(piece):
    sizes = [64, 0, SMALL, 64, SMALL + 64, 2 * SMALL, 128, 5 * SMALL, 64]
    if piece == 1:
        sizes = sizes[:5]
    ours, theirs = socket.socketpair()
    wire, end = socket.socketpair()
    sent = [(Header(1, n, n, size), payload(size, n)) for n, size in enumerate(sizes)]

    def write():
        for header, data in sent:
            send_frame(ours, header, [data.data] if data.size else [])
        ours.close()

    def pass_on():
        while data := theirs.recv(piece or 1 << 20):
            end.sendall(data)
        end.close()

    for run in (write, pass_on):
        threading.Thread(target=run, daemon=True).start()
    with wire, stream_of(wire) as stream:
        for header, data in sent:
            assert read_message(stream, wire) == (header, data.tobytes())
        assert read_header(stream) is None
    theirs.close()


@pytest.mark.parametrize("read", ["header", "small", "large"])
def test_a_stream_that_ends_within_a_message_is_an_error(read):
    ours, theirs = socket.socketpair()
    ours.sendall(Header(0, 0, 0, 64).pack() + (b"" if read == "header" else bytes(10)))
    ours.sendall(bytes(10))
    ours.close()
    with theirs, stream_of(theirs) as stream:
        assert read_header(stream) == Header(0, 0, 0, 64)
        with pytest.raises(ConnectionError, match="ended within a message"):
            if read == "header":
                read_header(stream)
            elif read == "small":
                read_small(stream, 64)
            else:
                read_into(stream, theirs, memoryview(bytearray(64)))


def test_what_was_unpacked_from_a_small_message_does_not_read_its_bytes():
    x = jax.numpy.arange(6, dtype="float32").reshape(2, 3)
    unpack = Unpacker.of(Message(0, 0, 1, ("x",), ("edge",), (x.aval,)), jax.devices()[0])
    buffer = bytearray(np.asarray(x).tobytes().ljust(unpack.nbytes, b"\0"))
    (array,) = unpack(buffer)
    buffer[:] = bytes(len(buffer))
    np.testing.assert_array_equal(array, x, strict=True)
