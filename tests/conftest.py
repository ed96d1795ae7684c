"""CPU devices for the ranks, before JAX starts; GPU tests skip themselves where there is none.

XLA optimizes little here, for most of the time of the tests goes into that. To test what users run,
set `JAX_DISABLE_MOST_OPTIMIZATIONS=0`.
"""

import gc
import os

import jax
import pytest

from jaxpp.runtime.executor import _compile

jax.config.update("jax_num_cpu_devices", 8)
# In the environment for the processes that tests start.
fewer = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
jax.config.update("jax_disable_most_optimizations", fewer)


@pytest.fixture(scope="module")
def optimized():
    """Tests of a module compile as users do: without optimizations loops may round in another way.

    What compares to the bit a loop with the same tasks compiled one by one needs it.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if "gpu" in item.keywords]
    if gpu_tests and not any(d.platform == "gpu" for d in jax.devices()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="module", autouse=True)
def only_what_a_module_compiles_is_kept():
    """With all that a run of the tests compiles, a collection of garbage would take seconds."""
    yield
    _compile.clear_cache()
    jax.clear_caches()
    gc.collect()
