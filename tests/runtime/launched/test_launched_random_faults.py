"""Launched jobs with a random fault each: all processes end in time, and name the culprit.

`JAXPP_LAUNCHED_FAULTS` is the number of jobs, `JAXPP_SEED` says which; each is the same whenever it
is run. `python -m benchmarks.launched_faults` makes many, and prints a table.
"""

import os
import random

import pytest

from benchmarks import launched_faults

JOBS = int(os.environ.get("JAXPP_LAUNCHED_FAULTS", "6"))
FIRST = random.Random(os.environ.get("JAXPP_SEED", "0")).randrange(1_000_000)


@pytest.mark.faults
@pytest.mark.parametrize("number", range(FIRST, FIRST + JOBS))
def test_a_job_ends_after_a_random_fault(number):
    row = launched_faults.one_job(number, limit=120)
    assert "failed" not in row, row


def test_all_kinds_come_in_turn_and_a_job_is_the_same_again():
    kinds, found = launched_faults.KINDS, [launched_faults.Job.random(n) for n in range(500)]
    assert [job.fault.kind for job in found[: len(kinds)]] == list(kinds)
    assert found == [launched_faults.Job.random(n) for n in range(500)]
    assert {job.victim for job in found if job.fault.kind == "kill"} == {0, 1, 2}
    for job in found:
        peer = job.fault.peer // job.ranks
        assert job.fault.kind != "link" or abs(peer - job.victim) == 1


def test_what_went_wrong_in_a_job_is_told(tmp_path, capsys):
    job = launched_faults.Job.random(0)
    (other, *_), codes = job.others, dict.fromkeys(range(job.processes), 1)
    named = "RankError: rank 0 (process 7 on here) has failed: its process has ended."
    pids = {n: 6 + (n == job.victim) for n in codes}

    def judge(codes=codes, output=named, seconds=1.0, left=(), losses=()):
        for number in job.others:
            (tmp_path / f"losses{number}").write_text("".join(losses))
        outputs = dict.fromkeys(codes, output)
        ended = launched_faults.Ended(pids, codes, outputs, seconds, list(left))
        return launched_faults.judge(job, ended, tmp_path)[0]

    right = launched_faults.undisturbed(job.processes * job.ranks)
    assert judge() == judge(losses=[f"{line}\n" for line in right]) == ""
    assert judge(losses=["0 00000000\n"]) == "losses"
    assert judge(codes | {other: None}) == judge(left=[5]) == "hangs"
    assert judge(codes | {other: 0}) == judge(output=named.replace("7", "6")) == "wrong"
    assert judge(seconds=launched_faults.LIMIT + 1) == "late"

    rows = [{"kind": "kill", "seconds": s} for s in (1.0, 2.0, 6.0)]
    rows += [{"kind": "stop", "seconds": 3.0, "failed": what} for what in ("late", "hangs")]
    assert launched_faults.show(rows) == {"late": 1, "hangs": 1}
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["kill"] == ["3", "2.0", "6.0", "0", "0", "0", "0"]
    assert lines["stop"] == ["2", "3.0", "3.0", "1", "0", "1", "0"] and lines["all"][0] == "5"
