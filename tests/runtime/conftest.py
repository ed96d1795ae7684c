import logging
import shutil
import signal
import tempfile

import pytest


@pytest.fixture(autouse=True)
def ctrl_c():
    """Lets SIGINT interrupt a test, also where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def ray_node():
    """A node of Ray for all modules: to start one takes 9 s of a processor.

    Its folder is its own, so that nobody else finds the session there and joins it.
    """
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    settings = {"num_cpus": 16, "include_dashboard": False, "temp_dir": folder}
    node = Cluster(initialize_head=True, head_node_args=settings)
    yield node.address
    node.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_session(ray_node):
    """A Ray session of this machine for the meshes of a module, which join it."""
    import ray

    ray.init(address=ray_node, logging_level=logging.WARNING)
    yield
    ray.shutdown()
