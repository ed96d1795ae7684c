"""What a process reads of its launcher, and how the processes compare what they do."""

import stat
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp._program import Fed
from jaxpp.runtime.arrays import ArrayType
from jaxpp.runtime.launched import _agreement, _course, _environment
from jaxpp.runtime.launched._course import At, Called, Course, LoadedArray
from jaxpp.runtime.launched._environment import Position, find_position, find_secret, visible_gpus
from jaxpp.runtime.launched._group import LaunchedGroup
from jaxpp.runtime.launched._watch import LaunchedWatch
from jaxpp.runtime.site import Failure, Given, Member
from jaxpp.runtime.site._feed import Batch
from tests.runtime.launched import jobs


@pytest.mark.parametrize("launcher", ["torchrun", "mpich", "jax_itself"])
def test_the_place_of_a_process_is_what_its_launcher_says(launcher):
    own = {k: str(v) for k, v in jobs.LAUNCHERS[launcher](1, 4, 29500).items()}
    place = find_position(own)
    assert (place.number, place.count, place.host, place.port) == (1, 4, "127.0.0.1", 29501)
    assert place.on_host == ((0, 1) if launcher == "jax_itself" else (1, 4))


@pytest.mark.parametrize("launcher", ["slurm", "open_mpi"])
def test_jax_detects_the_place(launcher, monkeypatch):
    for name, value in jobs.LAUNCHERS[launcher](1, 4, 77).items():
        monkeypatch.setenv(name, str(value))
    place = find_position()
    assert (place.number, place.count, place.on_host) == (1, 4, (1, 4))
    assert place.host in ("localhost", "127.0.0.1")


def test_srun_may_set_the_variables_of_pmi_too(monkeypatch):
    """As with `--mpi=pmi2`: these say who a process is, and JAX where the processes meet."""
    pmi = {"PMI_RANK": "2", "PMI_SIZE": "4"}
    for name, value in (jobs.slurm(1, 4, 77) | pmi).items():
        monkeypatch.setenv(name, str(value))
    place = find_position()
    assert (place.number, place.count, place.host) == (2, 4, "localhost") and place.port > 60000


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "2"}, "is process 2 of 2; processes are counted from 0"),
        ({"WORLD_SIZE": "0"}, "is process 1 of 0"),
        ({"MASTER_PORT": "tcp"}, "meet at '127.0.0.1:tcp', which is not HOST:PORT"),
        ({"MASTER_PORT": "70000"}, "meet at '127.0.0.1:70000', which is not HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "meet at 'host', which is not HOST:PORT"),
    ],
)
def test_what_a_launcher_cannot_mean_is_refused(variables, told):
    own = {k: str(v) for k, v in jobs.torchrun(1, 2, 29500).items()} | variables
    with pytest.raises(ValueError, match=told):
        find_position(own)


def test_a_process_that_no_launcher_has_started_is_told_of_them(monkeypatch):
    monkeypatch.setattr(_environment._compat, "detect_cluster", lambda: None)
    with pytest.raises(ValueError, match="no launcher has started .*torchrun.*MpmdMesh runs all"):
        find_position({})
    with pytest.raises(ValueError, match="process 1 of 2, .* set MASTER_ADDR and MASTER_PORT"):
        find_position({"PMI_RANK": "1", "PMI_SIZE": "2"})


def test_a_number_of_ranks_that_cannot_be_divided_is_refused(monkeypatch):
    for name, value in jobs.torchrun(0, 3, 29500).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="4 ranks evenly .* and 3 have been started"):
        jaxpp.LaunchedMpmdMesh((4,))


@pytest.mark.parametrize(
    ("on_host", "needed", "given", "found"),
    [
        ((0, 1), 4, None, ""),
        ((1, 4), 1, None, "1"),
        ((1, 2), 2, "4,5,6,7", "2,3"),
        ((3, 4), 1, "0", ""),
        ((1, 2), 2, "4,5", ""),
    ],
)
def test_the_processes_of_a_host_share_its_gpus(on_host, needed, given, found):
    own = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(Position(0, 8, on_host=on_host), needed, own) == found


def test_the_secret_of_a_user_is_made_once_and_only_the_user_can_read_it(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXPP_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    secret, (path,) = find_secret(), tmp_path.iterdir()
    assert secret == find_secret() and len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        find_secret()
    monkeypatch.setenv("JAXPP_SECRET", "of the job")
    assert find_secret() == b"of the job"


# ---- agreement ----------------------------------------------------------------------------------


def text(scale=1.0, constant=1.0):
    table = jnp.full(3, constant)
    mesh = jaxpp.MpmdMesh((1,), devices=jax.devices()[:1])
    step = jaxpp.place(lambda x: scale * x + table, mesh)
    return _agreement.text_of(step.lower(jnp.ones(3)).bundle)


def test_the_same_step_has_the_same_text_though_it_is_traced_again():
    assert _agreement.digest_of(text()) == _agreement.digest_of(text())


@pytest.mark.parametrize("other", [{"scale": 2.0}, {"constant": 2.0}])
def test_a_step_that_differs_has_another_text(other):
    texts = {0: text(), 1: text(), 2: text(**other)}
    assert _agreement.digest_of(texts[0]) != _agreement.digest_of(texts[2])
    told = _agreement.first_difference(texts)
    assert told.startswith("process 2 differs from process 0 first in ")
    assert "\n  process 0: " in told and "\n  process 2: " in told


def called(process, *digests):
    """A process that has made calls with these hashes, and comes to no meeting yet."""
    done = tuple(Called(process, n, digest) for n, digest in enumerate(digests, 1))
    return At(0, len(digests), "", done)


def heard(*each, count=2):
    errors = []
    course = Course(count, lambda number, error: errors.append((number, str(error))))
    for number, at in each:
        course.hear(number, at)
    return errors


def test_processes_that_do_the_same_in_any_order_are_at_one():
    assert not heard(
        (0, At(0, 0, "saves")), (1, At(0, 0)), (1, At(0, 0, "saves")), (1, At(1, 3)),
        (0, At(1, 2)), (1, At(1, 3, "fetches")), (0, At(1, 3)), (0, At(1, 3, "fetches")),
    )  # fmt: skip


@pytest.mark.parametrize(
    "each",
    [
        [(0, At(0, 1, "saves")), (1, At(0, 1, "fetches"))],
        [(0, At(0, 1, "saves")), (1, At(0, 2, "saves"))],
        [(0, At(0, 1, "saves")), (1, At(0, 2))],
        [(1, At(0, 1, "saves")), (0, At(0, 2))],
        [(0, called(0, 5, 6)), (1, called(1, 5, 7))],
        [(1, At(0, 3, "saves", called(1, 5, 6, 7).done)), (0, called(0, 5, 8))],
        [(1, called(1, 5)), (0, called(0, 4)), (1, At(0, 2, "", (Called(1, 2, 6),)))],
    ],
)
def test_who_does_otherwise_is_found(each):
    ((number, told),) = heard(*each)
    assert number == 1 and "process 0" in told and "process 1" in told


def test_who_is_ahead_with_the_same_calls_does_the_same():
    assert not heard((1, called(1, 5, 6, 7)), (0, At(0, 0)), (0, called(0, 5)))


def loaded(*each):
    return At(0, 0, done=tuple(LoadedArray(*own) for own in each))


def test_ranks_that_load_other_values_are_found(monkeypatch):
    same = [(0, loaded((0, 1, 0, 7), (0, 2, 0, 8))), (1, loaded((3, 2, 0, 8), (3, 1, 0, 7)))]
    assert not heard(*same, (1, loaded((3, 2, 1, 9))))  # an array that no other rank has read
    ((number, told),) = heard(*same, (1, loaded((2, 1, 0, 6))))
    assert number == 1 and "ranks 0 and 2 have loaded other values of array 0 of batch 1 " in told
    assert len(heard((0, loaded((0, 1, 0, 7), (1, 1, 0, 6))))) == 1  # of one process, too
    monkeypatch.setattr(_course, "KEPT", 1)  # the first one is not known any more
    assert not heard(*same[:1], (1, loaded((3, 1, 0, 6))))


def test_a_call_is_marked_by_its_step_and_its_arguments():
    large, other = np.zeros(10**6, np.float32), np.ones(10**6, np.float32)

    def marks(step, *arguments, value=0):
        fed = Fed(Batch(0, 0, None, value), 0, None)
        types = [ArrayType.of(jnp.asarray(x)) for x in arguments]
        return _agreement.digest_of_call(step, [*map(Given.of, arguments, types), fed])

    assert marks(1, large, 0.1) == marks(1, large.copy(), 0.1)
    others = [marks(2, large, 0.1), marks(1, other, 0.1), marks(1, large, 0.2)]
    others.append(marks(1, large, 0.1, value=1))
    assert marks(1, large, 0.1) not in others and len({*others}) == 4


def test_process_0_may_be_silent_while_it_waits_for_those_that_come_late():
    members = [Member(0, (0,)), Member(1, (1,))]
    watch = LaunchedWatch(None, members, 2.0, 300.0)
    assert not watch.why_dead(members[0], 310.0)  # it tells who has not come after 300
    assert watch.why_dead(members[0], 330.0) == "its host does not answer"


def test_the_others_hear_of_a_failure_before_the_watch_ends_the_work():
    heard: list[Any] = []
    group: Any = object.__new__(LaunchedGroup)
    group.place = Position(1, 2)
    group.hub = types.SimpleNamespace(tell=lambda news: heard.append(("others", *news)))
    group._watch = types.SimpleNamespace(report=lambda *what: heard.append(("watch", *what)))
    failure = Failure.of(ValueError("no such file"), 1, -1, "the script")
    group.report(1, failure)
    assert heard == [("others", "fails", 1, failure), ("watch", 1, failure)]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_several_processes_the_one_that_differs_from_the_others_is_named(odd):
    texts = {n: [("argument 0", "y" if n == odd else "x")] for n in (2, 0, 1)}
    told = _agreement.first_difference(texts)
    assert told.startswith(f"process {odd} differs from process {0 if odd else 1} first in")
    assert told.endswith(f"process {odd}: y")
