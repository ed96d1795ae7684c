"""The examples of `examples/extend/`, all at once, give the same bits on worker processes."""

import jax
import pytest

import jaxpp
from jaxpp.schedules import DualPipe, Interleaved1F1B, OneFOneB, Recompute, ZeroBubbleH1
from tests.examples.test_extend import OPTIMIZER, WS, M, X, examples, loss_fn, step_of  # noqa: F401
from tests.helpers import assert_same, mesh_of

SCHEDULES = (
    Interleaved1F1B(2), ZeroBubbleH1(), OneFOneB(), DualPipe(), Recompute(OneFOneB()), "pipefisher"
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.mark.cases(len(SCHEDULES))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_worker_processes_give_the_bits_of_this_process(examples, mesh, schedule):  # noqa: F811
    curvature = examples["pipefisher"]
    if schedule == "pipefisher":
        schedule = curvature.PipeFisher()
    ws = WS[: 2 * schedule.stages_per_rank]
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), M)
    edited = examples["int8_edges"].int8_edges(jaxpp.schedule(grad, schedule))
    if not isinstance(schedule, Recompute | curvature.PipeFisher):  # these read what was packed
        edited = examples["pack"].pack(edited, [0])
    edited = examples["gradient_norms"].gradient_norms(edited)
    edited = curvature.curvature(edited)

    def both(ws, x):
        (result, norms), factors = edited(ws, x)
        return result, {"norms": norms, "factors": factors}

    found = []
    for own in (mesh_of(2, shared=True), mesh):
        step = examples["early_update"].early_update(jaxpp.place(step_of(both, True), own))
        found.append(jax.device_get(step(ws, OPTIMIZER.init(ws), X)))
    assert_same(found[1], found[0])
