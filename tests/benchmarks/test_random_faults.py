"""The table of random faults tells what went wrong, and each kind of fault is told from others."""

import errno
import json
import socket

import pytest

from benchmarks import faults
from benchmarks.faults import Fault, TaskError
from jaxpp.runtime import RankError
from tests.scripts import load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return load_script("benchmarks.random_faults")


def test_all_kinds_come_in_turn_and_a_run_is_the_same_again():
    found = [Fault.random(seed, 3) for seed in range(300)]
    assert [fault.kind for fault in found[: len(faults.KINDS)]] == list(faults.KINDS)
    assert found == [Fault.random(seed, 3) for seed in range(300)]
    assert {f.rank for f in found if f.kind == "kill"} == {0, 1, 2}
    assert all(abs(f.rank - f.peer) == 1 for f in found if f.kind == "link")


def error_of(kind, rank=1):
    host = socket.gethostname()
    message = f"rank {rank} on {host}: this task does not work; connection"
    error = RankError(message, rank=rank, host=host, reason="its process has died")
    error.__cause__ = TaskError("this task does not work")
    return error


def test_an_error_that_is_not_of_the_fault_is_refused():
    faults.check_error(Fault("kill", 1, 0, 0.0), error_of("kill"), "")
    faults.check_error(Fault("raise", 1, 0, 0.0), error_of("raise"), "")
    faults.check_error(Fault("line", 1, 0, 0.0), error_of("line"), "")
    faults.check_error(Fault("interrupt", 1, 0, 0.0), KeyboardInterrupt(), "")
    for kind, rank, error in [
        ("kill", 0, error_of("kill")),
        ("stop", 1, error_of("kill")),
        ("memory", 1, error_of("raise")),
        ("feed", 1, error_of("raise")),
        ("link", 1, error_of("link")),  # it does not name the other end
        ("disk", 1, OSError(errno.EIO, f"rank 1 {socket.gethostname()} checkpoints")),
        ("interrupt", 1, error_of("kill")),
        ("kill", 1, KeyboardInterrupt()),
    ]:
        with pytest.raises(AssertionError):
            faults.check_error(Fault(kind, rank, 0, 0.0, peer=2), error, "")


def test_the_table_counts_what_went_wrong(script, capsys):
    well = [{"kind": "kill", "error": e, "restart": 1.0} for e in (0.1, 0.2, 0.6)]
    bad = [{"kind": "feed", "failed": what} for what in ("wrong", "hangs", "losses", "losses")]
    assert script.module.show(well + bad) == {"wrong": 1, "hangs": 1, "losses": 2}
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["kill"] == ["3", "200", "600", "1.00", "1.00", "0", "0", "0"]
    assert lines["feed"] == ["4", "1", "1", "2"]
    assert lines["all"][0] == "7"


def test_a_run_that_takes_too_long_is_a_hang_and_one_with_another_end_is_a_loss(
    script, monkeypatch
):
    class Bench:
        class mesh:  # noqa: N801
            num_ranks = 3

    script.flags.mark_as_parsed()
    for what, error in (("hangs", faults.Hang()), ("losses", AssertionError("another bit"))):

        def run(*_, error=error):
            raise error

        monkeypatch.setattr(faults, "run_with_fault", run)
        assert script.module.one_run(Bench(), 0)["failed"] == what


@pytest.mark.slow
def test_a_run_of_each_kind(script, tmp_path, capsys):
    script.main(count=len(faults.KINDS), json=str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == list(faults.KINDS)
    assert "all" in capsys.readouterr().out
