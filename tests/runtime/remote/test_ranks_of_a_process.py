"""Several ranks in a worker process: the same results, and what is said of them."""

import os
import signal

import jax
import pytest

import jaxpp
from jaxpp.runtime.remote import _places
from tests.helpers import assert_same
from tests.runtime.local.test_mesh import batch, init_params, start, step_of


@pytest.fixture(scope="module", params=[2, 4])
def mesh(request, ray_session):
    with jaxpp.RemoteMpmdMesh((4,), ranks_per_process=request.param) as mesh:
        yield mesh


def pid_of(rank):
    return os.getpid()


def pids(mesh):
    return mesh.apply(pid_of, {rank: () for rank in range(mesh.num_ranks)})


def begin():
    return list(start(init_params(4)))


def train(mesh, steps=3):
    step = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1), feed={3: batch})
    state, losses = begin(), []
    for number in range(steps):
        *state, loss = step(*state, number)
        losses.append(loss)
    return jax.device_get((state, losses))


def test_steps_are_bitwise_those_of_the_local_mesh(mesh):
    assert len(set(pids(mesh).values())) * (4 // len(set(pids(mesh).values()))) == 4
    assert len(set(pids(mesh).values())) < 4
    here = jaxpp.MpmdMesh((4,), devices=jax.devices()[:4])
    assert_same(train(mesh), train(here))


def test_what_another_step_reads_elsewhere_is_sent_there(mesh):
    params, *_ = jaxpp.place(step_of(), mesh)(*begin(), batch())

    def turned(params, momentum, rate, x):
        return step_of()(params[::-1], momentum, rate, x)

    here = jaxpp.MpmdMesh((4,), devices=jax.devices()[:4])
    expected = jaxpp.place(turned, here)(jax.device_get(params), *begin()[1:], batch())
    found = jaxpp.place(turned, mesh)(params, *begin()[1:], batch())
    assert_same(jax.device_get(found), jax.device_get(expected))


def test_an_error_is_of_one_rank(mesh):
    def fails(number):
        raise KeyError("no such batch")

    def broken(number):
        return fails(number) if number else batch()

    step = jaxpp.place(step_of(), mesh, feed={3: broken})
    step(*begin(), 0)
    with pytest.raises(jaxpp.RankError, match=r"^rank 0 \(process \d+ on .*that feeds the step"):
        float(step(*begin(), 1)[3])
    before = pids_after_restart(mesh)
    assert_same(train(mesh), train(jaxpp.MpmdMesh((4,), devices=jax.devices()[:4])))
    assert pids(mesh) == before


def test_a_trace_has_the_runs_and_messages_of_all_ranks(mesh, tmp_path):
    step = jaxpp.place(step_of(), mesh)
    jax.block_until_ready(step(*begin(), batch()))
    mesh.start_trace(tmp_path)
    jax.block_until_ready(step(*begin(), batch()))
    trace = mesh.stop_trace()
    assert not trace.errors and len(trace.profile_paths) == len(set(pids(mesh).values()))
    tasks = [(run.rank, run.label) for run in trace.runs if run.label[0] in "FB"]
    stages = {stage for _, label in tasks for stage in [label[1:].split(".")[0]]}
    assert len(tasks) == len(set(tasks)) and len(stages) == 4
    assert {(m.message.source, m.message.target) for m in trace.messages} >= {
        (0, 1),
        (1, 2),
        (2, 3),
    }
    assert all(m.end >= m.start for m in trace.messages)


def test_by_default_a_process_has_the_ranks_of_a_host_with_gpus(monkeypatch):
    def nodes(*gpus):
        return [{"Answers": True, "Resources": {"GPU": float(n)}} for n in gpus]

    for found, ranks, each, expected in [
        (nodes(8), 8, 1.0, 8),
        (nodes(8, 8), 16, 1.0, 8),
        (nodes(4, 4), 4, 2.0, 2),
        (nodes(6), 6, 0.5, 6),
        (nodes(3, 3), 4, 1.0, 2),
        (nodes(), 4, 1.0, 1),
    ]:
        monkeypatch.setattr(_places, "_nodes", lambda found=found: found)
        assert _places.ranks_of_a_node(ranks, each) == expected


def pids_after_restart(mesh):
    mesh.restart()
    return pids(mesh)


def test_a_death_is_of_all_ranks_of_the_process(mesh):
    before = pids(mesh)
    names = " and ".join(str(rank) for rank, pid in before.items() if pid == before[3])
    os.kill(before[3], signal.SIGKILL)
    with pytest.raises(jaxpp.RankError, match=rf"^ranks {names} \(process {before[3]} on"):
        train(mesh)
    mesh.restart()
    after = pids(mesh)
    assert {r for r in before if before[r] != after[r]} == {int(n) for n in names.split(" and ")}
    assert_same(train(mesh), train(jaxpp.MpmdMesh((4,), devices=jax.devices()[:4])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_process": 3}, "ranks_per_process=3; take a divisor of 4"),
        ({"ranks_per_process": 0}, "ranks_per_process=0"),
        ({"ranks_per_process": 2, "transport": "jax"}, "take ranks_per_process=1"),
    ],
)
def test_bad_numbers_are_refused_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.RemoteMpmdMesh((4,), **options)


def counting(rank):
    """Counts from now on what JAX compiles in the process."""
    counts = os.compilations = []  # pyright: ignore

    def note(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            counts.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)


def compilations(rank):
    """The numbers of compilations, of computations of the process, and of those of the rank."""
    (step,) = rank._steps
    own = [call for call in rank.executables(step) if call is not None]
    return len(os.compilations), len(rank.computations), len(own)  # pyright: ignore


@pytest.mark.more
def test_a_computation_of_several_ranks_is_compiled_once_in_a_process(ray_session):
    with jaxpp.RemoteMpmdMesh((4,), ranks_per_process=4) as mesh:
        mesh.apply(counting, {0: ()})
        jaxpp.place(step_of(), mesh).lower(*begin(), batch()).compile()
        found = mesh.apply(compilations, {rank: () for rank in range(4)})
        compiled, different, _ = found[3]
        assert compiled == different < sum(own for *_, own in found.values())
