"""The Ray session that a mesh's workers run in: `ray.init` joins or starts it."""

import dataclasses
import logging
import os
import signal
import socket
import threading
import warnings
from pathlib import Path
from typing import Any

import ray
import ray.util.client

from jaxpp._messages import warn
from jaxpp.runtime.site import uninterrupted

#: Seconds within which a part of a session, or a worker that is called outside a step, has to
#: answer; Ray itself tries for minutes.
ANSWER_TIMEOUT = 5.0


@dataclasses.dataclass(eq=False)
class Session:
    """A Ray session that this process has joined; `leave_session` it in the end.

    `address` is its `host:port`; `started` tells whether it is one of our own on this machine;
    `users` counts those that are in it here.
    """

    address: str
    started: bool
    users: int = 0


#: The session that `join_session` has opened in this process.
_opened: Session | None = None
_lock = threading.Lock()
#: The addresses of sessions that do not answer, of which this process has warned.
_silent: set[str] = set()


def join_session() -> Session:
    """Joins the Ray session that is there, or starts one on this machine.

    `RemoteMpmdMesh` says which. One of our own ends with the last `leave_session`, with this
    process, or with the thread that started it. A Ctrl-C waits until Ray has started.

    Raises:
        ConnectionError: if there is no session at `RAY_ADDRESS`.
        ValueError: if this process is in a session by Ray Client.
    """
    global _opened
    session = None
    try:
        with _lock, uninterrupted():
            if ray.util.client.ray.is_connected():
                raise ValueError(
                    "The driver has to run on a node of the Ray session, but this process is "
                    "connected to one by Ray Client (ray://). Start a node here with `ray start "
                    "--address=HOST:PORT`, and join it with RAY_ADDRESS=HOST:PORT, or submit the "
                    "script with `ray job submit`."
                )
            if not ray.is_initialized():
                _opened = _open()
            address = ray.get_runtime_context().gcs_address
            ours = _opened is not None and _opened.address == address
            session = _opened if ours else Session(address, started=False)
            assert session is not None
            session.users += 1
        return session
    except KeyboardInterrupt:
        if session is not None:
            leave_session(session)
        raise


def leave_session(session: Session) -> None:
    """Leaves a session; the last user to leave closes it, if `join_session` has opened it.

    A session that was running before goes on: closing only ends this process's connection to it.
    """
    global _opened
    with _lock, uninterrupted():
        session.users -= 1
        if session is _opened and session.users <= 0:
            _opened = None
            ray.shutdown()


def reopen_session(session: Session) -> None:
    """Starts a session of our own anew, which has lost its node; all that ran in it is gone.

    Raises:
        RuntimeError: if it has other users, which would find nothing of theirs in the new one.
    """
    with _lock, uninterrupted():
        if session.users > 1:
            raise RuntimeError(
                f"The Ray session of this process has lost its node, and all workers of its "
                f"{session.users} meshes with it. Shut them all down (mesh.shutdown()), make new "
                f"ones, and load the last checkpoints."
            )
        ray.shutdown()
        session.address = _start().address


def answers(address: str) -> bool:
    """Tells whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT).close()
    except (OSError, ValueError):
        return False
    return True


def _open() -> Session:
    wanted = os.environ.get("RAY_ADDRESS", "")
    address, file = wanted, _current_cluster()
    if wanted in ("", "auto"):
        address = file.read_text().strip() if file.exists() else ""
    if wanted == "local" or not (wanted or address):
        return _start()
    if address and answers(address):
        return _init(started=False)
    if wanted:
        raise ConnectionError(
            f"No Ray session answers, for RAY_ADDRESS={wanted}. Start one with `ray start --head`; "
            f"set RAY_ADDRESS to its HOST:PORT (not to ray://, since the driver has to run on one "
            f"of its nodes); or set it to local, for a session of the process's own."
        )
    if address not in _silent:
        _silent.add(address)
        warn(
            f"The Ray session at {address}, started here with `ray start`, does not answer; "
            f"starting one for this process. To forget the old one, delete {file}."
        )
    return _start()


def _current_cluster() -> Path:
    """Returns the file with the address of the session that `ray start` has left here."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")


def _start() -> Session:
    # Ray's own 15 lets the workers starve while anything else computes on this host.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The CPU above the machine's is for meshes, so that tasks of Ray may take the others.
    cpus = (os.cpu_count() or 1) + 1
    return _init(started=True, address="local", include_dashboard=False, num_cpus=cpus)


def _init(started: bool, **arguments: Any) -> Session:
    """Calls `ray.init` without its messages; the program's own handler of SIGTERM stays."""
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        # JAX warns of a fork among threads; this is safe, because the child only calls exec.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(logging_level=logging.ERROR, **arguments)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    return Session(ray.get_runtime_context().gcs_address, started)
