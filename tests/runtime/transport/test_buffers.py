"""Memory is used again when nothing reads it any more, and not before."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.runtime.arrays._types import ArrayType, from_host
from jaxpp.runtime.transport._buffers import REUSED_FROM, BufferPool
from tests.runtime.transport.ranks import connected, message


@pytest.mark.parametrize("nbytes", [1, 100, REUSED_FROM - 1, REUSED_FROM, REUSED_FROM + 1])
def test_a_buffer_is_aligned_and_can_be_written(nbytes):
    buffer = BufferPool().take(nbytes)
    assert buffer.shape == (nbytes,) and buffer.ctypes.data % 64 == 0
    buffer[:] = 7


def test_a_buffer_is_used_again_once_nothing_views_it():
    pool = BufferPool()
    buffer = pool.take(REUSED_FROM)
    pointer = buffer.ctypes.data
    view = buffer[64:].view(np.float32).reshape(-1, 4)[1:]
    del buffer
    gc.collect()
    assert pool.kept == 0 and pool.take(REUSED_FROM).ctypes.data != pointer
    del view
    pointers = {pool.take(REUSED_FROM).ctypes.data for _ in range(2)}
    assert pool.kept and pointer in pointers | {pool.take(REUSED_FROM).ctypes.data}


def test_an_array_holds_its_buffer():
    pool = BufferPool()
    buffer = pool.take(REUSED_FROM)
    buffer[:] = 0
    array = from_host(buffer, ArrayType((REUSED_FROM // 4,), "float32"), jax.devices()[0])
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data
    del buffer
    gc.collect()
    assert pool.kept == 0
    del array
    jnp.zeros(1).block_until_ready()
    gc.collect()
    assert pool.kept == REUSED_FROM


def test_no_more_is_kept_than_the_limit():
    pool = BufferPool(limit=3 * REUSED_FROM)
    buffers = [pool.take(REUSED_FROM) for _ in range(10)]
    del buffers
    assert pool.kept == 3 * REUSED_FROM
    pool.clear()
    assert pool.kept == 0


def test_a_buffer_comes_back_while_another_is_taken():
    pool = BufferPool()
    buffer = pool.take(REUSED_FROM)
    with pool._lock:
        del buffer  # on the thread that has the lock
    assert pool.kept == 0
    pool.take(REUSED_FROM)


def test_threads_never_share_a_buffer():
    pool, wrong = BufferPool(), []

    def use(mark):
        for _ in range(100):
            buffer = pool.take(REUSED_FROM)
            buffer[::4096] = mark
            if not (buffer[::4096] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.kept <= 8 * REUSED_FROM


def stress(count, size):
    """Sends messages of different values, each read by a computation that is still to run."""

    @jax.jit
    def reduce(x, y):
        return jax.lax.fori_loop(0, 3, lambda i, s: s + jnp.sum(x + y[: x.size] * i), 0)

    with connected(2) as (a, b):
        layout = [jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.int32)]
        messages = [message(layout, tag) for tag in range(count)]
        b.expect(messages)
        results = []
        for what in messages:
            host = np.full(size, what.tag, np.int32)
            a.send([jnp.asarray(host), jnp.asarray(host + 1)], what)
            x, y = b.receive(what)
            results.append(reduce(x, y))  # and the arrays go before it has run
            del x, y
        n = np.arange(count)
        wanted = ((3 * n + 3 * (n + 1)) * size).astype(np.int32)
        np.testing.assert_array_equal(np.array(results), wanted)
        return b._pool.kept


@pytest.mark.more
def test_computations_read_what_was_sent():
    assert stress(150, REUSED_FROM // 8) > 0


@pytest.mark.slow
def test_computations_read_what_was_sent_thousands_of_times():
    stress(3000, REUSED_FROM // 8)
    stress(200, 2 * REUSED_FROM)
