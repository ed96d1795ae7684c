"""A process that fails, ends, stops or does something else: the others end, and name it."""

import os
import re
import signal
import time

import pytest

from tests.runtime.launched.jobs import Job

#: Seconds from the fault to the end of the others: for a stopped process, `heartbeat_timeout` more.
LIMIT = 10


def started(folder, fault):
    """A job that trains, and the number of process 1."""
    job = Job(2, "faulty", folder, fault)
    end = time.monotonic() + 90
    while not all((folder / f"pid{n}").exists() for n in range(2)):
        if time.monotonic() > end or any(p.poll() is not None for p in job.processes):
            break  # what the processes say is in the test's own failure
        time.sleep(0.02)
    return job


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"])
def test_a_signal_to_one_process_ends_the_other(tmp_path, name, victim):
    job, other = started(tmp_path, "none"), 1 - victim
    before = time.monotonic()
    os.kill(job.processes[victim].pid, getattr(signal, name))
    code = job.processes[other].wait(30)
    took = time.monotonic() - before
    found = job.wait(30)
    assert code == 1 and took < LIMIT
    told = f"jaxpp.RankError: rank {victim} (process {job.processes[victim].pid} on "
    assert told in found[other][1]
    assert all(code != 0 for code, _ in found)
    if name == "SIGINT":
        assert re.search("has failed in the script: KeyboardInterrupt", found[other][1])
    print(f"{name} of process {victim}: {took:.2f} s")


@pytest.mark.parametrize("victims", [(1,), (0, 1), (0,)])
def test_an_interrupt_during_a_long_callback_ends_all_without_an_abort(tmp_path, victims):
    job = Job(2, "napping", tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "naps").exists() and time.monotonic() < end:
        time.sleep(0.02)
    before = time.monotonic()
    for victim in victims:
        os.kill(job.processes[victim].pid, signal.SIGINT)
    found = job.wait(60)
    assert time.monotonic() - before < 19  # which is before the callback ends
    for number, (code, output) in enumerate(found):
        if number in victims:  # Python ends by the signal itself, and its abort would be -6
            assert code in (1, -signal.SIGINT) and "KeyboardInterrupt" in output, output
        else:
            assert code == 1 and "has failed in the script: KeyboardInterrupt" in output, output


@pytest.mark.parametrize(
    ("fault", "codes", "told"),
    [
        ("raises", (1, 1), "rank 1 .* has failed in the script: ValueError: a bad loss: "),
        ("feed", (1, 1), "rank 0 .* has failed in the function that feeds .*: KeyError: 'no such"),
        ("alone", (1, 1), "do not make the same calls: process [01] fetches"),
        ("again", (1, 1), "do not make the same calls"),
        ("exits", (1, 1), "do not make the same calls: .* shuts the mesh down"),
        ("once_more", (1, 1), "do not make the same calls"),
        ("other", (1, 1), "do not make the same calls"),
        ("batch", (1, 1), "are not of the same step with the same arguments"),
        ("loads", (1, 1), "ranks [01] and [01] have loaded other values of array 0 of batch 5 "),
        (
            "start",
            (1, 1),
            "call 1 of process [01] and of process [01] are not of the same step",
        ),
        ("folders", (1, 1), "saves a state to .*own1"),
        ("fork", (1, -9), "rank 1 .* its process has ended"),
        ("unequal", (1, 1), "process 1 differs from process 0 first in "),
    ],
)
def test_what_a_script_does_otherwise_in_one_process_ends_all(tmp_path, fault, codes, told):
    found = Job(2, "faulty", tmp_path, fault).wait(90)
    for (code, output), wanted in zip(found, codes, strict=True):
        assert code == wanted, output
    own = [output for (_, output), wanted in zip(found, codes, strict=True) if wanted]
    assert any(re.search(told, output) for output in own), own


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", "shuts the mesh down"),
        ("a str", "rank 1 .* has failed in the script: TypeError: 'str' object cannot"),
    ],
)
def test_a_process_that_ends_before_the_others_has_failed(tmp_path, how, told):
    found = Job(2, "loose", tmp_path, how).wait(60)
    assert [code for code, _ in found] == [1, 1], found
    assert all(re.search(told, output) for _, output in found)


@pytest.mark.parametrize("errors", ["open", "closed"])
def test_a_script_that_does_not_call_the_mesh_again_is_ended(tmp_path, errors):
    first, second = Job(2, "idle", tmp_path, errors).wait(60)
    assert first[0] == second[0] == 1
    told = "this process has not called the mesh for 2 s .* LookupError: no such word"
    assert errors == "closed" or re.search(told, first[1])


def test_all_hear_of_what_cannot_be_sent(tmp_path):
    for code, output in Job(2, "unsendable", tmp_path).wait(60):
        assert code == 1 and "has to be defined outside of functions" in output, output


def test_all_hear_of_another_version(tmp_path):
    for number, (code, output) in enumerate(Job(2, "versions", tmp_path).wait(60)):
        assert code == 1
        assert re.search(rf"ValueError: .*rank {1 - number} .* has jax .* \(here ", output), output


def test_a_script_that_has_caught_a_failure_has_failed(tmp_path):
    first, second = Job(2, "caught", tmp_path).wait(60)
    assert first[0] == second[0] == 1
    assert "caught RankError" in first[1]
    assert "caught LookupError" in second[1]  # its own exception, as on the other meshes


def test_a_script_may_make_another_mesh_after_a_failure(tmp_path):
    outputs = Job(2, "caught", tmp_path, "and more").succeed()
    assert all("caught" in output for output in outputs)
    assert (tmp_path / "loss0").read_text() == (tmp_path / "loss1").read_text() != ""


@pytest.mark.parametrize("count", [2, 3])
def test_all_hear_which_process_never_starts(tmp_path, monkeypatch, count):
    monkeypatch.setenv("JAXPP_TEST_START_TIMEOUT", "8")
    for code, output in Job(count, "faulty", tmp_path, "none", started=count - 1).wait(60):
        told = f"of {count} processes, [{count - 1}] have not come to process 0 at 127.0.0.1 port"
        assert code == 1 and told in output


def test_a_process_with_another_secret_is_refused(tmp_path, monkeypatch):
    from tests.runtime.launched import jobs

    secrets = iter(["one", "another"])
    monkeypatch.setenv("JAXPP_TEST_START_TIMEOUT", "5")
    plain = jobs.environment
    monkeypatch.setattr(jobs, "environment", lambda: plain(next(secrets)))
    first, second = Job(2, "faulty", tmp_path, "none").wait(60)
    assert first[0] == second[0] == 1
    assert "do not have the same secret" in second[1] and "[1] have not come" in first[1]
