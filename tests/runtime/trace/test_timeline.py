"""The files of a trace are what Perfetto reads, and JAX's profile names the tasks."""

import collections
import json

import pytest

import jaxpp
from jaxpp.runtime.trace import _timeline
from tests.runtime.trace import steps


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trace of three stages under 1F1B, and the events of its timeline."""
    trace, _ = steps.traced(tmp_path_factory.mktemp("trace") / "run")
    return trace, json.loads(trace.timeline_path.read_text())


def test_each_run_and_each_end_of_a_message_is_a_slice_of_its_rank(made):
    trace, written = made
    slices = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(trace.runs) + 2 * len(trace.messages)
    found = collections.Counter((e["pid"], e["name"], e["args"]["call"]) for e in slices)
    wanted = collections.Counter((run.rank, run.label, run.call) for run in trace.runs)
    for m in trace.messages:
        for rank in (m.message.source, m.message.target):
            wanted[rank, m.message.names[0], m.call] += 1
    assert found == wanted
    runs = {(r.rank, r.label, r.call): r for r in trace.runs}
    for e in slices:
        if e["tid"] == _timeline.TASKS:
            run = runs[e["pid"], e["name"], e["args"]["call"]]
            assert e["ts"] == pytest.approx(1e6 * run.start, abs=0.0626)
            assert e["ts"] + e["dur"] == pytest.approx(1e6 * run.end, abs=0.0626)


def test_events_have_the_fields_that_readers_need(made):
    _, written = made
    assert isinstance(written["traceEvents"], list)
    fields = {"X": {"ts", "dur", "tid", "cat"}, "M": {"args"}}
    fields |= dict.fromkeys("stf", {"ts", "tid", "id", "cat"})
    for event in written["traceEvents"]:
        assert fields[event["ph"]] | {"name", "pid"} <= event.keys()
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    named = {(e["pid"], e["tid"]) for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in written["traceEvents"] if "ts" in e} <= named
    # Perfetto takes a thread 0 for the one with the number of the process.
    assert not any(thread in (0, process) for process, thread in named)


def test_slices_of_a_thread_do_not_overlap(made):
    threads = collections.defaultdict(list)
    for e in made[1]["traceEvents"]:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for own in threads.values():
        own.sort()
        assert all(a[1] <= b[0] for a, b in zip(own, own[1:], strict=False))


def test_slices_at_the_same_time_get_threads_of_their_own():
    slices = [{"ts": t, "dur": 2} for t in (0, 1, 2, 3, 10)]
    assert _timeline._put_in_lanes(slices, 5) == 2
    assert [e["tid"] for e in slices] == [5, 6, 5, 6, 5]


def test_each_arrow_goes_through_the_slices_of_a_message(made):
    trace, written = made
    slices = [e for e in written["traceEvents"] if e["ph"] == "X"]
    arrows = collections.defaultdict(list)
    for event in written["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == len(trace.messages)
    labels = {(r.call, r.rank, r.position): r.label for r in trace.runs}
    for number, own in arrows.items():
        m = trace.messages[number]
        assert [e["ph"] for e in own] == ["s", "t", "t", "f"]
        assert [e["ts"] for e in own] == sorted(e["ts"] for e in own)
        through = []
        for end in own:
            at = [
                e
                for e in slices
                if (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
            ]
            assert at, "no slice to bind to"
            through.append({e["name"] for e in at})
        name = m.message.names[0]
        wanted = [labels[m.call, m.message.source, m.maker], name, name]
        wanted.append(labels[m.call, m.message.target, m.reader])
        assert all(label in names for label, names in zip(wanted, through, strict=True))


def test_the_picture_is_there(made):
    assert made[0].picture_path.read_bytes().startswith(b"\x89PNG")


def test_a_profile_has_the_same_clock(tmp_path):
    trace, _ = steps.traced(tmp_path / "run")
    assert trace.profile_paths == (tmp_path / "run" / "profile-0",)
    jaxpp.merge_traces([tmp_path / "run", *trace.profile_paths], tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    ranks = [f"run/timeline.json, rank {n}" for n in range(3)]
    assert list(names.values()) == [*ranks, "profile-0, /host:CPU"]
    slices = [e for e in events if e["ph"] == "X"]
    runs = [e for e in slices if e.get("tid") == _timeline.TASKS and e["name"][0] in "FB"]
    first, last = min(e["ts"] for e in runs), max(e["ts"] + e["dur"] for e in runs)
    own = [e for e in slices if "Execute" in e["name"] and names[e["pid"]] not in ranks]
    # It has each call and each task, too, with the times of its dispatch.
    noted = [(e["name"], e.get("args", {})) for e in slices if names[e["pid"]] not in ranks]
    calls = [int(args["step_num"]) for name, args in noted if name == "jaxpp step"]
    assert calls == list(trace.calls)
    named = collections.Counter(
        (name, int(args["rank"]), int(args["call"]))
        for name, args in noted
        if "rank" in args and "call" in args
    )
    assert named == collections.Counter((r.label, r.rank, r.call) for r in trace.runs)
    # What the profiler saw of the tasks is where the timeline has them.
    within = [e for e in own if first - 1e3 <= e["ts"] <= last + 1e3]
    assert len(within) > 0.5 * len(own) > 10
