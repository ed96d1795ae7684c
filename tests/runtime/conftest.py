import pytest


@pytest.fixture(scope="module")
def ray_session():
    """A Ray session of this machine for the meshes of a module, which join it."""
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()
