"""Ranks in one process, or in several, joined by a transport."""

import contextlib
import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from jaxpp._program import Message
from jaxpp.runtime.transport import SocketTransport

SECRET = b"the secret of the tests"


def message(arrays, tag=0, source=0, target=1):
    """What says that some arrays go from one rank to another."""
    avals = tuple(a.aval if isinstance(a, jax.Array) else a for a in arrays)
    names = tuple(f"x{n}" for n in range(len(arrays)))
    return Message(tag, source, target, names, ("edge",) * len(arrays), avals)


def blocked(function, *args):
    """Calls a function on a thread; gives what waits for its result, or raises its error."""
    outcome = {}

    def run():
        try:
            outcome["result"] = function(*args)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait(timeout=10.0):
        thread.join(timeout)
        assert not thread.is_alive(), "it still waits"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return wait


@contextlib.contextmanager
def failing_array():
    """An array whose computation runs for a moment, and then fails."""

    def fail(x):
        raise ValueError("no such luck")

    x = jnp.ones((256, 256))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, a: a @ a * 1e-3, x))
    failing = jax.jit(lambda x: jax.pure_callback(fail, x, x)).lower(x).compile()
    yield failing(slow(x))
    # JAX raises the error of the last callback once more at exit: so let another one be the last.
    jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x))(x).block_until_ready()


def resources():
    """The threads and file descriptors of this process."""
    gc.collect()
    threads = {t.name for t in threading.enumerate() if not t.name.startswith("Dummy")}
    return threads, psutil.Process().num_fds()


def join(ranks):
    """Connects some ranks."""
    for transport in ranks:
        transport.connect({r: t.addresses for r, t in enumerate(ranks)})


def renew(ranks):
    """Replaces some ranks, as a restart does, and connects them."""
    for n, old in enumerate(ranks):
        old.close(timeout=0)
        ranks[n] = SocketTransport(old.homes, SECRET + b" again", kind=old._kind)
    join(ranks)


@contextlib.contextmanager
def unconnected(count=2, kinds: Any = "auto", secret=SECRET):
    """Some ranks, each on a device of its own."""
    ranks = [
        SocketTransport({rank: jax.devices()[rank % 8]}, secret, kind=kinds)
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for transport in ranks:
            transport.close()


@contextlib.contextmanager
def connected(count=2, kinds: Any = "auto"):
    """Some ranks, each on a device of its own, which know each other."""
    with unconnected(count, kinds) as ranks:
        join(ranks)
        for transport in ranks:
            transport.begin(1)
        yield ranks
