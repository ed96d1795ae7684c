"""A message comes out of a link as it went in, however the connection is cut into pieces."""

import socket
import threading

import numpy as np
import pytest

from jaxpp.runtime.transport._frames import SMALL, Header, Reader, to_send
from jaxpp.runtime.transport._handshake import _set_timeout

SIZES = [64, 0, SMALL, 64, SMALL + 64, 2 * SMALL, 128, 5 * SMALL, 64]


def payload(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def memory_for(header):
    return np.empty(header.nbytes, np.uint8) if header.nbytes > SMALL else None


def reader(link):
    """Reads a message at a time."""
    while True:
        for found in link.read():
            yield found.header, bytes(found.data)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Reader(theirs, memory_for)


@pytest.mark.parametrize("piece", [1, 31, 4096, None])
def test_messages_of_all_sizes_come_whole_and_in_order(ends, piece):
    end, link = ends
    ours, theirs = socket.socketpair()
    sizes = SIZES[:5] if piece == 1 else SIZES
    sent = [(Header(1, n, n, 0, size), payload(size, n)) for n, size in enumerate(sizes)]

    def write():
        for header, data in sent:
            ours.sendall(b"".join(to_send(header, [data.data] if data.size else [])))
        ours.close()

    def pass_on():
        while data := theirs.recv(piece or 1 << 20):
            end.sendall(data)
        end.close()

    for run in (write, pass_on):
        threading.Thread(target=run, daemon=True).start()
    read = reader(link)
    for header, data in sent:
        assert next(read) == (header, data.tobytes())
    with pytest.raises(EOFError):
        next(read)
    theirs.close()


@pytest.mark.parametrize("nbytes", [64, SMALL + 64])
@pytest.mark.parametrize("cut", [1, 16, 32, 40])
def test_a_thread_may_stop_within_a_message_and_another_goes_on(ends, nbytes, cut):
    ours, link = ends
    _set_timeout(link.connection, socket.SO_RCVTIMEO, 0.02)
    header, data = Header(1, 2, 3, 0, nbytes), payload(nbytes, 0).tobytes()
    whole = header.pack() + data
    ours.sendall(whole[:cut])
    for _ in range(3):  # the rest does not come within the limit of time
        assert list(link.read()) == []
    ours.sendall(whole[cut:] + whole)
    read = reader(link)
    assert next(read) == next(read) == (header, data)


@pytest.mark.parametrize("nbytes", [0, 64, SMALL + 64])
def test_a_connection_that_ends_within_a_message_is_an_error(ends, nbytes):
    ours, link = ends
    message = Header(0, 0, 0, 0, nbytes).pack() + bytes(nbytes)
    ours.sendall(message + message[: max(nbytes, 16)])
    ours.close()
    assert next(reader(link))[1] == bytes(nbytes)
    for _ in range(2):  # whichever thread reads next
        with pytest.raises(ConnectionError, match="ended within a message"):
            next(reader(link))


def test_a_header_that_is_refused_stays_refused(ends):
    ours, link = ends

    def refuse(header):
        raise ValueError(header.tag)

    link._begin = refuse
    sent = Header(0, 0, 7, 0, SMALL + 64).pack()
    for _ in range(2):
        ours.sendall(sent)
        with pytest.raises(ValueError, match="7"):
            next(reader(link))
