"""The Ray session that a mesh's workers run in."""

import concurrent.futures
import dataclasses
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.util.client

from jaxpp._warn import warn
from jaxpp.runtime.remote._interrupts import uninterrupted

#: Seconds within which a Ray session has to accept a connection, before it counts as gone.
CONNECT_TIMEOUT = 3.0


@dataclasses.dataclass(eq=False)
class Session:
    """A Ray session that this process has joined; `leave_session` it in the end.

    Args:
        address: `host:port` of the session.
        started: whether it is a session of our own on this machine, started by `join_session`.
        users: how many have joined it and not left it yet.
    """

    address: str
    started: bool
    users: int = 0


#: The session that `join_session` has opened in this process.
_opened: Session | None = None
_lock = threading.Lock()


def join_session() -> Session:
    """Joins the Ray session that is there, or starts one on this machine.

    A process is in one session at a time. It takes the first of these that there is: the session
    that it is in already; the environment variable `RAY_ADDRESS` (`host:port`; `"auto"` for the one
    that `ray start` has left on this machine, `"local"` for one of our own); the session that
    `ray start` has left; a session of our own, which ends with the last `leave_session` or with
    this process. A Ctrl-C waits until Ray has started, for it would leave processes behind.

    Raises:
        ConnectionError: if there is no session at `RAY_ADDRESS`, within `CONNECT_TIMEOUT` seconds.
        ValueError: if the driver is, or would be, on no node of the session (Ray Client).
    """
    global _opened
    session = None
    try:
        with _lock, uninterrupted():
            if not ray.is_initialized():
                session = _opened = _open(os.environ.get("RAY_ADDRESS") or None)
            elif ray.util.client.ray.is_connected():
                raise _not_on_a_node("this process is connected to one by Ray Client (`ray://`)")
            else:
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
            if ray.is_initialized():
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


def _open(address: str | None) -> Session:
    if address == "local":
        return _start()
    if address not in (None, "auto"):
        if "://" in address:
            raise _not_on_a_node(f"RAY_ADDRESS is the Ray Client address {address!r}")
        if not answers(address):
            raise ConnectionError(
                f"No Ray session answers at {address} within {CONNECT_TIMEOUT:g} s. Start one with "
                f"`ray start --head`, correct RAY_ADDRESS, or use RAY_ADDRESS=local for a session "
                f"of the process's own."
            )
        return _init(started=False, address=address)
    found = _address_of_ray_start()
    if found is not None and answers(found):
        # Ray looks the address up again: it turns on its token authentication by itself only for a
        # session that it has found itself.
        return _init(started=False, address=None)
    if address == "auto":
        raise ConnectionError(
            "There is no Ray session on this machine. Start one with `ray start --head`, or use "
            "RAY_ADDRESS=local for one of the process's own."
        )
    if found is not None:
        warn(
            f"The Ray session at {found}, started here with `ray start`, does not answer; "
            f"starting one for this process. `ray stop` forgets the old one."
        )
    return _start()


def _not_on_a_node(what: str) -> ValueError:
    return ValueError(
        f"The driver has to run on a node of the Ray session, but {what}. Start a node here with "
        f"`ray start --address=HOST:PORT` and set RAY_ADDRESS=HOST:PORT (after ray.shutdown(), if "
        f"there was a ray.init), or submit the script with `ray job submit`."
    )


def _start() -> Session:
    # Ray's own 15 lets the workers starve while anything else computes on this host.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cpus = (os.cpu_count() or 1) + 1
    return _init(started=True, address="local", include_dashboard=False, num_cpus=cpus)


def _init(started: bool, **arguments: Any) -> Session:
    """Calls `ray.init` without its messages, and leaves the caller's SIGTERM handler in place.

    Linux ends the processes of a new session when the thread that started them ends
    (`PR_SET_PDEATHSIG`). So the call runs on the main thread, or on a thread that stays.
    """

    def init() -> None:
        with warnings.catch_warnings():
            # JAX warns of a fork among threads; this is safe, because the child only calls exec.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(logging_level=logging.ERROR, **arguments)

    handler = signal.getsignal(signal.SIGTERM)
    try:
        if threading.current_thread() is not threading.main_thread():
            _call_in_lasting_thread(init)
        else:  # Ray's own handler exits, which ends the session; a caller's own handler must stay
            init()
            if handler not in (signal.SIG_DFL, None):
                signal.signal(signal.SIGTERM, handler)
    except ConnectionError as error:
        if "AuthenticationError" not in repr(error.__cause__):
            raise
        raise ConnectionError(
            f"{error}: it wants another token than this process has, or one at all. Copy "
            f"~/.ray/auth_token from its head node, and set RAY_AUTH_MODE=token."
        ) from error
    return Session(ray.get_runtime_context().gcs_address, started)


def _call_in_lasting_thread(function: Callable[[], None]) -> None:
    """Calls a function in a thread that lasts as long as the process."""
    outcome = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)
        else:
            threading.Event().wait()

    threading.Thread(target=run, name="jaxpp-ray-session", daemon=True).start()
    outcome.result()


def _address_of_ray_start() -> str | None:
    """Finds the address of the session that `ray start` has left on this machine, in Ray's file."""
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    return file.read_text().strip() or None if file.exists() else None


def answers(address: str) -> bool:
    """Tells whether something accepts connections at an address; Ray itself would try for minutes.

    Args:
        address: `host:port`.

    Raises:
        ValueError: if it is not of this form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"A Ray address is HOST:PORT, 'auto' or 'local', got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True
