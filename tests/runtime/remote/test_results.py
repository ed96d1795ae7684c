"""Results on worker processes: what JAX, Equinox, optax and chex do with them."""

from typing import Any

import chex
import jax
import pytest

import jaxpp
from tests.runtime import uses


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def state(mesh):
    return uses.results(mesh)


def test_they_are_handles(state):
    params, _ = state
    assert isinstance(params["tied"], jaxpp.RemoteArray) and params["tied"].ranks == (0, 1)
    assert isinstance(params["stack"], jaxpp.StackedArray)
    assert not params["stack"].is_fully_addressable


def test_a_forward_function_takes_them_and_runs_each_stage_on_its_rank(mesh, state):
    assert uses.check_evaluation(mesh, state[0]).ranks == (1,)


@pytest.mark.parametrize(("use", "_", "outcome"), uses.USES.values(), ids=uses.USES)
def test_a_use_works_or_names_the_way_out(use, _, outcome, state):
    uses.check(use, outcome, state[0])


def test_gathered_they_are_those_of_the_local_mesh(mesh, state):
    device = jax.devices()[3]
    gathered = jaxpp.gather(state, device)
    here = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    chex.assert_trees_all_equal(gathered, jaxpp.gather(uses.results(here)), strict=True)
    assert {d for x in jax.tree.leaves(gathered) for d in x.devices()} == {device}
    # A placed step takes them back.
    again: Any = jaxpp.place(uses.train_step(), mesh)(*gathered, uses.start()[2])
    assert isinstance(again[0]["stack"], jaxpp.StackedArray)


def test_a_donated_array_is_not_gathered(mesh):
    step = jaxpp.place(uses.train_step(), mesh, donate_argnums=(0, 1))
    params, opt_state = step(*uses.start())
    step(params, opt_state, uses.start()[2])
    with pytest.raises(ValueError, match="donated"):
        jaxpp.gather(params)


@pytest.mark.parametrize("checkpointer", uses.CHECKPOINTERS)
def test_orbax_saves_them_gathered(checkpointer, mesh, state, tmp_path):
    uses.check_checkpoint(checkpointer, mesh, state, tmp_path)
