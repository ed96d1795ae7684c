"""The mesh of two workers that the tests of failures share."""

import jax
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

import jaxpp  # noqa: E402
from benchmarks import faults  # noqa: E402
from tests.helpers import assert_same  # noqa: E402
from tests.runtime.local.test_mesh import batch, step_of  # noqa: E402
from tests.runtime.remote.failures.failing import begin  # noqa: E402


@pytest.fixture(autouse=True)
def no_hanging():
    with faults.deadline(120):
        yield


@pytest.fixture(scope="module")
def shared_mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(shared_mesh):
    step = jaxpp.place(step_of(), shared_mesh, donate_argnums=(0, 1))
    jax.device_get(step(*begin(), batch()))
    return step


@pytest.fixture(scope="module")
def expected():
    """What the step gives on the mesh of one process."""
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    return jax.device_get(jaxpp.place(step_of(), mesh)(*begin(), batch()))


@pytest.fixture
def mesh(shared_mesh, step, expected):
    """The mesh; afterwards it is restarted, and has to give what it gave before."""
    yield shared_mesh
    shared_mesh.restart()
    found = jax.device_get(step(*begin(), batch()))
    assert_same(found, expected)
