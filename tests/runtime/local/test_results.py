"""Results on the mesh of this process: what JAX, Equinox, optax and chex do with them."""

import jax
import pytest

import jaxpp
from tests.runtime import uses

pytestmark = pytest.mark.cases(len(uses.USES))


@pytest.fixture(scope="module")
def mesh():
    return jaxpp.MpmdMesh((2,))


@pytest.fixture(scope="module")
def state(mesh):
    return uses.results(mesh)


def test_they_are_on_several_devices(state):
    params, _ = state
    assert params["tied"].devices() == set(jax.devices()[:2])
    assert isinstance(params["stack"], jaxpp.StackedArray)


def test_a_forward_function_takes_them_and_runs_each_stage_on_its_rank(mesh, state):
    assert uses.check_evaluation(mesh, state[0]).devices() == {jax.devices()[1]}


@pytest.mark.parametrize(("use", "outcome", "_"), uses.USES.values(), ids=uses.USES)
def test_a_use_works_or_names_the_way_out(use, outcome, _, state):
    uses.check(use, outcome, state[0])


@pytest.mark.parametrize("checkpointer", uses.CHECKPOINTERS)
def test_orbax_saves_them_gathered(checkpointer, mesh, state, tmp_path):
    uses.check_checkpoint(checkpointer, mesh, state, tmp_path)
