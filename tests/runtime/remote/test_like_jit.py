"""What a step on worker processes has in common with `jax.jit`: constants, types, contexts."""

import jax
import pytest

import jaxpp
from tests.helpers import assert_close
from tests.transforms.place import closed_over, result_types
from tests.transforms.test_contexts import CONTEXTS, batch, loss, placed, plain
from tests.transforms.two_layers import WEIGHTS


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.mark.parametrize("fate", closed_over.FATES)
@pytest.mark.parametrize("where", ["plainly", "in_a_loop"])
def test_a_step_keeps_what_it_closed_over(mesh, where, fate):
    closed_over.check(mesh, where, fate)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("scalar", ["float", "int", "weak vector", "np.float64"])
def test_results_keep_their_types_as_they_are_fed_back(mesh, scalar, x64):
    with jax.enable_x64(x64):
        result_types.check(mesh, scalar, "bfloat16")


@pytest.mark.parametrize("name", ["set_mesh", "debug_key_reuse", "transfer_guard", "enable_x64"])
def test_a_context_holds_as_it_does_for_jit(mesh, name):
    run, plainly, data, again = placed(lambda: mesh)(loss), plain(loss), batch(), batch()
    with CONTEXTS[name]():
        got, want = run(WEIGHTS, data), plainly(WEIGHTS, again)
    assert_close(jaxpp.gather(got), want)
