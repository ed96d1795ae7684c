"""Two ranks, and the check that no test leaves anything behind."""

import gc
import time

import jax.numpy as jnp
import pytest

from tests.runtime.transport.ranks import connected, resources


@pytest.fixture(params=["auto", "tcp"], ids=["unix", "tcp"])
def pair(request):
    with connected(2, request.param) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test leaves as many threads and file descriptors as there were."""
    jnp.zeros(1).block_until_ready()  # JAX has started
    gc.freeze()  # what is older is not looked through again and again
    threads, descriptors = resources()
    yield
    deadline = time.monotonic() + 2
    while resources() != (threads, descriptors) and time.monotonic() < deadline:
        time.sleep(0.02)
    left, opened = resources()
    gc.unfreeze()
    assert left <= threads
    assert opened <= descriptors
