"""CPU devices for the ranks, before JAX starts; GPU tests skip themselves where there is none."""

import gc

import jax
import pytest

from jaxpp.runtime import _compile

jax.config.update("jax_num_cpu_devices", 8)


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
