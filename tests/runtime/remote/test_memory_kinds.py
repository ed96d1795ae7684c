"""Memory kinds on worker processes: as on the local mesh, over either transport; in checkpoints."""

import jax
import numpy as np
import pytest

import jaxpp
from tests.helpers import assert_same, mesh_of
from tests.transforms import two_layers
from tests.transforms.place import test_memory_kinds as local
from tests.transforms.place import test_offload as offload


@pytest.fixture(scope="module", params=["auto", pytest.param("jax", marks=pytest.mark.slow)])
def mesh(ray_session, request):
    with jaxpp.RemoteMpmdMesh((2,), transport=request.param) as mesh:
        yield mesh


def state_of(place):
    around, loss, policy, args, _ = local.CASES["momentum"]
    step = place(around(local.loop_of(loss, policy, jaxpp.schedules.OneFOneB())))
    return step, step.initialize(lambda: args()[:2], rest=(two_layers.X,))


@pytest.mark.more
@pytest.mark.parametrize(
    "case", ["momentum, donated", "compute_on", "weights", "batch", "edge", "dots"]
)
def test_workers_do_as_jit_with_results_in_the_same_memory(mesh, case):
    local.check(mesh, case)


def test_workers_offload_and_load_to_the_same_bits(mesh):
    """Two stages keep what their backward reads in host memory meanwhile."""
    grads = [
        local.loop_of(two_layers.loss, None, schedule)
        for schedule in (jaxpp.schedules.GPipe(), jaxpp.schedules.Offload("gpipe"))
    ]
    args = local.WEIGHTS, local.X
    want = jaxpp.place(grads[0], mesh_of(2))(*args)
    step = jaxpp.place(grads[1], mesh)
    assert_same(jaxpp.gather(step(*args)), want)
    text = step.lower(*args).as_text()
    assert "run O0.0" in text and "run L1.0" in text and "wait for" in text


@pytest.mark.more
def test_workers_offload_a_stack_beside_a_policy(mesh):
    own = offload.placed_stack(jaxpp.schedules.Offload("gpipe"), mesh, names=["h"])
    plain = offload.placed_stack(jaxpp.schedules.GPipe(), names=["h"])
    assert_same(jaxpp.gather(own(*offload.STACK)), plain(*offload.STACK))
    # The first rank keeps nothing but the batch and what the policy offloads.
    away, before = ([r.host_bytes for r in step.describe().ranks] for step in (own, plain))
    assert away[0] == before[0] > 0 and away[1] > before[1] > 0


def test_state_is_made_saved_and_loaded_in_its_memory(mesh, tmp_path):
    step, (weights, momentum) = state_of(lambda fun: jaxpp.place(fun, mesh))
    assert set(local.kinds_of(jaxpp.gather(momentum))) == {"pinned_host"}
    _, momentum, _ = step(weights, momentum, two_layers.X)
    nbytes = [sum(m.nbytes for m in momentum if rank in m.ranks) for rank in range(2)]
    assert [
        rank.host_bytes >= n > 0 for rank, n in zip(step.describe().ranks, nbytes, strict=True)
    ] == [True] * 2
    jaxpp.save_state(tmp_path / "a", momentum)
    here = jaxpp.load_state(tmp_path / "a", jaxpp.gather(momentum))
    there = jaxpp.load_state(tmp_path / "a", momentum)
    for loaded in (here, jaxpp.gather(there)):
        assert set(local.kinds_of(loaded)) == {"pinned_host"}
        assert_same(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, momentum))
    step(weights, there, two_layers.X)
