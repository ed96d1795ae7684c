"""A kind of task is one record: whatever deals with tasks takes a new one as it takes the old."""

import copy
import pickle
import subprocess
import sys

import pytest

from jaxpp.schedules import (
    Costs,
    Kind,
    Memory,
    OneFOneB,
    ScheduleError,
    Task,
    check,
    from_csv,
    from_tasks,
    plot,
    simulate,
    stage_dependencies,
    to_csv,
    to_text,
    to_trace,
)

D = Kind("D", "unload", after="F", cost=0.5, holds=-1)
J = Kind("J", "reload", after="D", makes="F", cost=0.5, holds=1, colours=("#999999", "#dddddd"))
TABLE = from_tasks([["F0.0", "D0.0", "F0.1", "J0.0", "B0.0", "B0.1"]])


def test_a_kind_is_its_letter_and_there_once():
    assert Kind("D") is D and D == "D" and f"{D}" == "D" and hash(D) == hash("D")
    assert Kind("D", "unload", after="F", cost=0.5, holds=-1) is D
    assert list(Kind)[:10] == list("FBIWROLGHS") and D in Kind


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("D", "other"), "'D' is the kind 'unload' already.*another letter"),
        (("x", "lower"), "one capital letter, got 'x'"),
        (("ABC", "word"), "one capital letter"),
        (("Z",), "'Z' is no kind of task; the kinds are F, B, I, W, R, .*a title"),
    ],
)
def test_what_is_no_kind_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Kind(*arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"of_stage": True, "makes": "F"}, "X .odd. is of_stage, but makes what F does.* not of_"),
        ({"makes": "G"}, "X .odd. is not of_stage, but makes what G does, which is of_stage; give"),
        ({"takes": "BIW"}, "X .odd. takes the sums of B, I and W, so that it is of_stage=True"),
        ({"takes": "B", "makes": "G", "of_stage": True}, "takes the sums of B, .* makes nothing"),
        ({"takes": "!", "of_stage": True}, "'!' is no kind of task"),
    ],
)
def test_a_kind_that_no_task_could_be_of_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Kind("X", "odd", **fields)
    assert "X" not in Kind or Kind("X").title != "odd"


@pytest.mark.more
def test_a_kind_survives_copies_and_is_known_to_a_process_that_did_not_make_it():
    task = Task(J, 3, 4)
    assert copy.deepcopy(task).kind is J and pickle.loads(pickle.dumps(task)) == task
    code = "import pickle, sys; t = pickle.load(sys.stdin.buffer); print(t, t.kind.title)"
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(task), capture_output=True, check=True
    )
    assert found.stdout.decode().split() == ["J3.4", "reload"]


def test_a_task_of_an_unknown_kind_is_no_task():
    assert Task.from_text("J3.4") == Task(J, 3, 4)
    assert Task.from_text("Z3.4") is None


def test_the_checker_reads_what_comes_before():
    check(TABLE)
    for wrong, words in (
        (["D0.0", "F0.0", "B0.0"], r"D\[stage 0.* comes before F"),
        (["F0.0", "D0.0", "B0.0", "J0.0"], r"B\[stage 0.* comes before J"),
        (["F0.0", "J0.0", "D0.0", "B0.0"], r"J\[stage 0.* comes before D"),
    ):
        with pytest.raises(ScheduleError, match=words):
            check(from_tasks([wrong]))


def test_a_backward_needs_what_stands_in_for_its_forward():
    needs = stage_dependencies(TABLE)
    assert needs[Kind.B, 0] == (("F", 0), ("J", 0)) and needs[J, 0] == (("D", 0),)


def test_times_and_memory_come_from_the_record_unless_a_model_says_otherwise():
    spans = {str(span.task): span.end - span.start for span in simulate(TABLE).spans}
    assert (spans["D0.0"], spans["J0.0"], spans["B0.1"]) == (0.5, 0.5, 2.0)
    costs = Costs(other={D: 3.0, J: [7.0]})
    assert costs.of(Task(D, 0, 0)) == 3.0 and costs.divided(2).of(Task(J, 0, 0)) == 3.5
    assert Costs.measured({(D, 0): 4.0, (Kind.F, 0): 1.0}).of(Task(D, 0, 1)) == 4.0
    assert TABLE.peak_in_flight() == (2,) and Memory().peaks(TABLE) == (2.0,)
    plain = from_tasks([[t for t in TABLE.ranks[0] if t.kind in "FB"] for _ in range(1)])
    assert Memory().peaks(plain) == (2.0,)
    kept = Memory(other={D: 0.0, J: 0.0})
    assert kept.held(TABLE, 0) == [1.0, 1.0, 2.0, 2.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="cost of unload of D"):
        Costs(other={D: -1.0}).of(Task(D, 0, 0))


def test_text_pictures_and_files_have_it(tmp_path):
    timeline = simulate(TABLE, Costs(other={D: 1.0, J: 1.0}))
    assert to_text(timeline, colour=False).splitlines()[0] == "rank 0 | F0 D0 F1 J0 B0 == B1 =="
    to_trace(timeline, tmp_path / "kinds.json")
    assert '"D0.0"' in (tmp_path / "kinds.json").read_text()
    assert from_csv(to_csv(TABLE)).ranks == TABLE.ranks and "0J0" in to_csv(TABLE)
    pytest.importorskip("matplotlib")
    plot(timeline, tmp_path / "kinds.png")


def test_the_kinds_of_a_table_are_its_own():
    assert OneFOneB().table(2, 2).kinds == {Kind.F, Kind.B}
