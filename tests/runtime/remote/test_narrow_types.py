"""Types below a byte, such as int4, on worker processes: the results of one process."""

import jax
import pytest

import jaxpp
from tests.helpers import assert_same, mesh_of
from tests.runtime import narrow

ORDER = jaxpp.schedules.OneFOneB()


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.mark.parametrize("dtype", narrow.DTYPES)
def test_steps_are_those_of_one_process(mesh, dtype):
    step = narrow.make_step(dtype, order=ORDER)
    ways = []
    for own in (mesh, mesh_of(2)):
        placed = jaxpp.place(step, own, donate_argnums=(0, 1, 2))
        ws, frozen, state, *batch = narrow.arguments(dtype)
        rest = []
        for _ in range(3):
            ws, frozen, state, *rest = placed(ws, frozen, state, *batch)
        ways.append(jax.device_get(jaxpp.gather((ws, frozen, state, rest))))
    assert_same(*ways)
