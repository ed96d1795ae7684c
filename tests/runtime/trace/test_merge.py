"""Merged traces have one clock, and processes and arrows of their own."""

import gzip
import json

import pytest

import jaxpp

ARROW = [
    {"ph": "s", "pid": 0, "tid": 0, "name": "message", "cat": "message", "id": 0, "ts": 1.0},
    {"ph": "f", "pid": 0, "tid": 0, "name": "message", "cat": "message", "id": 0, "ts": 2.0},
]


def timeline(path, host="a", monotonic_ns=0, unix_ns=0):
    events = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
        {"ph": "X", "pid": 0, "tid": 0, "name": "F0.0", "ts": 1.0, "dur": 1.0, "args": {}},
        *ARROW,
    ]
    clock = {"host": host, "monotonic_ns": monotonic_ns, "unix_ns": unix_ns}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "metadata": {"jaxpp": clock}}))
    return path


def profile(path, host="a", monotonic_ns=0, unix_ns=0, ts=0.0):
    args = {"host": host, "monotonic_ns": str(monotonic_ns), "unix_ns": str(unix_ns), "rank": "1"}
    events = [
        {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 701, "tid": 7, "name": "jaxpp clock", "ts": ts, "dur": 1, "args": args},
        {"ph": "X", "pid": 701, "tid": 7, "name": "dot", "ts": ts + 10, "dur": 1.0},
        {},
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def merged(tmp_path, *paths):
    jaxpp.merge_traces(paths, tmp_path / "all.json")
    return json.loads((tmp_path / "all.json").read_text())


def starts(trace):
    return {(e["pid"], e["name"]): e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}


def test_traces_of_one_driver_have_its_clock(tmp_path):
    one = timeline(tmp_path / "one" / "timeline.json", monotonic_ns=5_000_000, unix_ns=9)
    folder = tmp_path / "one-1"
    profile(folder / "plugins/profile/2026/host.trace.json.gz", monotonic_ns=5_100_000, ts=40.0)
    found = starts(merged(tmp_path, one, folder))
    # The profile's 40 us are the timeline's 100 us.
    assert found == {(0, "F0.0"): 1.0, (1, "jaxpp clock"): 100.0, (1, "dot"): 110.0}


def test_the_earliest_trace_is_at_0_wherever_it_stands(tmp_path):
    late = timeline(tmp_path / "late.json", monotonic_ns=7_000_000)
    early = timeline(tmp_path / "early.json", monotonic_ns=4_000_000)
    assert starts(merged(tmp_path, late, early)) == {(0, "F0.0"): 3001.0, (1, "F0.0"): 1.0}


def test_traces_of_several_drivers_have_the_clock_of_the_day(tmp_path):
    one = timeline(tmp_path / "one.json", host="a", monotonic_ns=10**15, unix_ns=1_000_000)
    two = timeline(tmp_path / "two.json", host="b", monotonic_ns=0, unix_ns=3_000_000)
    assert starts(merged(tmp_path, one, two)) == {(0, "F0.0"): 1.0, (1, "F0.0"): 2001.0}


def test_arrows_stay_apart_and_whole(tmp_path):
    paths = [timeline(tmp_path / f"{n}.json") for n in range(3)]
    arrows = [e for e in merged(tmp_path, *paths)["traceEvents"] if e["ph"] in "sf"]
    assert sorted((e["id"], e["pid"], e["ph"]) for e in arrows) == [
        (n, n, phase) for n in range(3) for phase in "fs"
    ]


def test_what_is_merged_can_be_merged_again(tmp_path):
    paths = [timeline(tmp_path / f"{n}.json", monotonic_ns=1000 * (n + 1)) for n in range(3)]
    all_at_once = starts(merged(tmp_path, *paths))
    jaxpp.merge_traces(paths[1:], tmp_path / "some.json.gz")
    assert starts(merged(tmp_path, paths[0], tmp_path / "some.json.gz")) == all_at_once


def test_only_the_last_profile_of_a_folder_counts(tmp_path):
    for n in (1, 2):
        path = tmp_path / f"run-0/plugins/profile/2026_0{n}/host.trace.json.gz"
        profile(path, monotonic_ns=1000 * n)
    assert len(starts(merged(tmp_path, tmp_path / "run-0"))) == 2


def test_what_cannot_be_merged_is_named(tmp_path):
    with pytest.raises(ValueError, match="at least one trace"):
        jaxpp.merge_traces([], tmp_path / "all.json")
    with pytest.raises(FileNotFoundError, match="no trace at '.*nowhere'"):
        jaxpp.merge_traces([tmp_path / "nowhere"], tmp_path / "all.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ValueError, match="text.json holds no trace"):
        jaxpp.merge_traces([tmp_path / "text.json"], tmp_path / "all.json")
    (tmp_path / "text.json.gz").write_text("hello")
    with pytest.raises(ValueError, match="text.json.gz holds no trace"):
        jaxpp.merge_traces([tmp_path / "text.json.gz"], tmp_path / "all.json")
    (tmp_path / "foreign.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="foreign.json does not say when it was made"):
        jaxpp.merge_traces([tmp_path / "foreign.json"], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_slices_that_touch_do_so_when_they_have_been_moved(tmp_path):
    paths = [timeline(tmp_path / f"{n}.json", monotonic_ns=12_347 * n) for n in range(3)]
    for time in starts(merged(tmp_path, *paths)).values():
        assert 8 * time == round(8 * time)  # whole nanoseconds, whoever rounds them
