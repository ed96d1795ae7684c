"""A message comes out of a stream as it went in, however the stream is cut into pieces."""

import socket
import threading

import jax
import numpy as np
import pytest

from jaxpp._program import Message
from jaxpp.runtime.transport._frames import (
    SMALL,
    EndOfStream,
    FrameReader,
    Header,
    Layout,
    Unpacker,
    send_frame,
)


def payload(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read_message(reader):
    header = reader.header()
    if header.nbytes <= SMALL:
        return header, reader.take(header.nbytes)
    buffer = np.empty(header.nbytes, np.uint8)
    reader.take_into(buffer.data)
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
    reader = FrameReader(wire)
    for header, data in sent:
        assert read_message(reader) == (header, data.tobytes())
    assert reader.header() is None
    wire.close()
    theirs.close()


def test_a_stream_that_ends_within_a_message_is_an_error():
    ours, theirs = socket.socketpair()
    ours.sendall(Header(0, 0, 0, 64).pack() + bytes(10))
    ours.close()
    reader = FrameReader(theirs)
    assert reader.header() == Header(0, 0, 0, 64)
    with pytest.raises(EndOfStream):
        reader.take(64)
    theirs.close()


def test_what_was_unpacked_from_a_small_message_does_not_read_its_bytes():
    x = jax.numpy.arange(6, dtype="float32").reshape(2, 3)
    layout = Layout.of(Message(0, 0, 1, ("x",), ("edge",), (x.aval,)))
    buffer = bytearray(np.asarray(x).tobytes().ljust(layout.nbytes, b"\0"))
    (array,) = Unpacker(layout, jax.devices()[0])(buffer)
    buffer[:] = bytes(len(buffer))
    np.testing.assert_array_equal(array, x, strict=True)
