import logging
import os
import signal

import pytest

os.environ["RAY_DEDUP_LOGS"] = "0"  # as a mesh has it; it is read as Ray is imported


@pytest.fixture(autouse=True)
def ctrl_c():
    """Lets SIGINT interrupt a test, also where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def ray_session():
    """A Ray session of this machine for the meshes of a module, which join it."""
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()
