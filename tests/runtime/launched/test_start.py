"""How processes meet, where something is in the way: all end soon, and say what it is."""

import concurrent.futures
import contextlib
import dataclasses
import re
import socket
import threading
import time
from typing import Any

import pytest

from jaxpp.runtime.launched import _hub
from jaxpp.runtime.launched._environment import Position
from jaxpp.runtime.launched._hub import Hub
from jaxpp.runtime.transport import Door, _handshake
from tests.runtime.launched import jobs


def hub(number, port, host="127.0.0.1"):
    return Hub(Position(number, 2, host, port), lambda *_: None, lambda _: None)


@contextlib.contextmanager
def program(says):
    """Another program that has a port: it sends something and closes, or is silent with None."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    with connection:
                        connection.sendall(says)

        if says is not None:
            threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-x\r\n", b"\0\0\0\4what", None])
def test_where_another_program_has_the_port_all_end_soon_and_say_so(says, monkeypatch):
    monkeypatch.setattr(_handshake, "HANDSHAKE_TIMEOUT", 0.2)
    with program(says) as port:
        with pytest.raises(RuntimeError, match=f"process 0 cannot listen at port {port} .*in use"):
            hub(0, port).join(b"secret", 30.0)
        before = time.monotonic()
        told = rf"process 1 is not let in by what listens at 127.0.0.1 port {port}: .*give the job "
        with pytest.raises(RuntimeError, match=told):
            hub(1, port).join(b"secret", 30.0)
        assert time.monotonic() - before < 10


@pytest.mark.parametrize("secret", [b"secret", b"another"])
def test_a_process_that_another_job_does_not_let_in_says_so(secret):
    door = Door("hub", secret, None, lambda *_: False)
    try:
        told = "is not let in by .* another secret or not 2 processes, or has let in another "
        with pytest.raises(RuntimeError, match=f"{told}process 1; or it is"):
            hub(1, door.addresses.tcp[1]).join(b"secret", 30.0)
    finally:
        door.close()


@pytest.mark.parametrize("place", [Position(1, 3), Position(2, 3)])
def test_processes_that_are_told_of_other_numbers_of_processes_do_not_meet(place):
    port = jobs.free_port()
    place = dataclasses.replace(place, port=port)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        first = threads.submit(hub(0, port).join, b"secret", 3.0)
        with pytest.raises(RuntimeError, match="another secret or not 3 processes"):
            Hub(place, lambda *_: None, lambda _: None).join(b"secret", 30.0)
        with pytest.raises(RuntimeError, match="of 2 processes, .1. have not come"):
            first.result()


def test_who_cannot_find_the_name_of_a_host_yet_waits_for_it(monkeypatch):
    port, known = jobs.free_port(), threading.Event()
    real: Any = socket.getaddrinfo

    def find(host, *args, **kwargs):
        if host == "localhost" and not known.is_set():  # as a pod that has no address yet
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", find)
    with pytest.raises(RuntimeError, match="not found process 0 at localhost .*not known"):
        hub(1, port, "localhost").join(b"secret", 0.5)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        both = [threads.submit(hub(n, port, "localhost").join, b"secret", 30.0) for n in (0, 1)]
        time.sleep(0.3)
        known.set()
        assert [each.result() for each in both] == ["127.0.0.1", "127.0.0.1"]


def test_who_waits_says_for_whom(monkeypatch, capsys):
    monkeypatch.setattr(_hub, "NOTICE", 0.2)
    port = jobs.free_port()
    with pytest.raises(RuntimeError, match="process 1 of 2 has not found process 0 .*within 0.5 s"):
        hub(1, port).join(b"secret", 0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"jaxpp: process 1 .* port {port}: .*refused.*; waits up to 0.5 s", line)
    told = "of 2 processes, .1. have not come to process 0 at 192.0.2.1 port"  # of nobody: RFC 5737
    with pytest.raises(RuntimeError, match=told):
        hub(0, port, "192.0.2.1").join(b"secret", 0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "192.0.2.1" in line and "which is no address of this host; waits" in line


def test_a_job_whose_port_is_taken_ends_in_all_processes(tmp_path, monkeypatch):
    with program(b"") as port:
        monkeypatch.setattr(jobs, "free_port", lambda: port - 1)  # they meet behind it
        before = time.monotonic()
        first, second = jobs.Job(2, "faulty", tmp_path, "none").wait(50)
        assert first[0] == second[0] == 1 and time.monotonic() - before < 40  # start_timeout: 60
    assert f"process 0 cannot listen at port {port}" in first[1]
    assert "process 1 is not let in by what listens" in second[1]
