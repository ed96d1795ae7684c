"""The Ray session that a mesh's workers run in."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ray

#: Seconds within which a Ray session has to accept a connection, before it counts as gone.
CONNECT_TIMEOUT = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """A Ray session that this process has joined; `leave` it in the end.

    Args:
        address: `host:port` of the session.
        started: whether it is a session of our own on this machine, started by `join`.
    """

    address: str
    started: bool


@dataclasses.dataclass
class _Joined:
    """The session that `join` has opened in this process, and the number of its users."""

    session: Session | None = None
    users: int = 0


_joined = _Joined()
_lock = threading.Lock()


def join_session(address: str | None = None) -> Session:
    """Joins the Ray session that is there, or starts one on this machine.

    A process is in one session at a time. It takes the first of these that there is: the session
    that it is in already; `address`; the environment variable `RAY_ADDRESS`; the session that
    `ray start` has left on this machine; a session of our own, which ends with the last `leave` or
    with this process.

    Args:
        address: `host:port` of a session, `"auto"` for one that `ray start` has left on this
            machine, or `"local"` for one of our own.

    Raises:
        ConnectionError: if there is no session at the address, within `CONNECT_TIMEOUT` seconds.
        ValueError: if this process is in another session already.
    """
    with _lock:
        if ray.is_initialized():
            session = _session_of_this_process(address)
        else:
            session = _open(address or os.environ.get("RAY_ADDRESS") or None)
            _joined.session, _joined.users = session, 0
        if session is _joined.session:
            _joined.users += 1
        return session


def leave_session(session: Session) -> None:
    """Leaves a session; the last user to leave closes it, if `join` has opened it.

    A session that was running before goes on: closing only ends this process's connection to it.
    """
    with _lock:
        if session is not _joined.session:
            return
        _joined.users -= 1
        if _joined.users <= 0:
            _joined.session = None
            if ray.is_initialized():
                ray.shutdown()


def _session_of_this_process(address: str | None) -> Session:
    current = ray.get_runtime_context().gcs_address
    session = _joined.session
    if session is None or session.address != current:
        session = Session(current, started=False)
    if address not in (None, "auto", "local") and _resolve(address) != _resolve(current):
        raise ValueError(
            f"A process is in one Ray session at a time, and this one is in that at {current}: "
            f"{address} was asked for. Call ray.shutdown() first, or leave the address out."
        )
    return session


def _open(address: str | None) -> Session:
    if address is not None and "://" in address:
        raise ValueError(
            f"The driver has to run on a node of the Ray session, got the Ray Client address "
            f"{address!r}. Start a node here with `ray start --address=HOST:PORT` and give "
            f"HOST:PORT, or submit the script with `ray job submit`."
        )
    if address in (None, "auto"):
        found = _address_of_ray_start()
        if found is not None and not accepts(found):
            if address is None:
                warnings.warn(
                    f"The Ray session at {found}, started here with `ray start`, does not answer; "
                    f"starting one for this process. `ray stop` forgets the old one.",
                    stacklevel=4,
                )
            found = None
        if found is None and address == "auto":
            raise ConnectionError(
                "There is no Ray session on this machine. Start one with `ray start --head`, or "
                "give address='local' (or RAY_ADDRESS=local) for one of the process's own."
            )
        # Ray looks the address up again: it turns on its token authentication by itself only for a
        # session that it has found itself.
        return _connect(None) if found is not None else _start()
    if address == "local":
        return _start()
    if not accepts(address):
        raise ConnectionError(
            f"No Ray session answers at {address} within {CONNECT_TIMEOUT:g} s. Start one with "
            f"`ray start --head`, correct RAY_ADDRESS, or use RAY_ADDRESS=local for a session of "
            f"the process's own."
        )
    return _connect(address)


def _connect(address: str | None) -> Session:
    try:
        _init(address=address)
    except ConnectionError as error:
        if "AuthenticationError" not in repr(error.__cause__):
            raise
        raise ConnectionError(
            f"{error}: it wants another token than this process has, or one at all. Copy "
            f"~/.ray/auth_token from its head node, and set RAY_AUTH_MODE=token."
        ) from error
    return Session(ray.get_runtime_context().gcs_address, started=False)


def _start() -> Session:
    _init(address="local", include_dashboard=False, num_cpus=(os.cpu_count() or 1) + 1)
    return Session(ray.get_runtime_context().gcs_address, started=True)


def _init(**arguments: Any) -> None:
    """Calls `ray.init` without its messages, and leaves the caller's SIGTERM handler in place.

    Linux ends the processes of a new session when the thread that started them ends
    (`PR_SET_PDEATHSIG`). So the call runs on the main thread, or on a thread that stays.
    """

    def init() -> None:
        with warnings.catch_warnings():
            # JAX warns of a fork among threads; this is safe, because the child only calls exec.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(logging_level=logging.ERROR, **arguments)

    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        init()  # Ray's own handler exits, which ends the session; a caller's own handler must stay
        if handler not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, handler)
    else:
        _call_in_lasting_thread(init)


def _call_in_lasting_thread(function: Callable[[], None]) -> None:
    """Calls a function in a thread that lasts as long as the process."""
    done, errors = threading.Event(), []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        done.set()
        if not errors:
            threading.Event().wait()

    threading.Thread(target=run, name="jaxpp-ray-session", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]


def _address_of_ray_start() -> str | None:
    """Finds the address of the session that `ray start` has left on this machine, in Ray's file."""
    directory = os.environ.get("RAY_TMPDIR") or "/tmp"
    try:
        with open(os.path.join(directory, "ray", "ray_current_cluster")) as file:
            return file.read().strip() or None
    except OSError:
        return None


def accepts(address: str) -> bool:
    """Tells whether something accepts connections at an address; Ray itself would try for minutes.

    Args:
        address: `host:port`.
    """
    host, port = _split(address)
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"A Ray address is HOST:PORT, 'auto' or 'local', got {address!r}.")
    return host.strip("[]"), int(port)


def _resolve(address: str) -> tuple[str, int]:
    host, port = _split(address)
    with contextlib.suppress(OSError):
        if host in ("localhost", "127.0.0.1"):  # Ray goes by the node's address
            return ray.util.get_node_ip_address(), port
        host = socket.gethostbyname(host)
    return host, port
