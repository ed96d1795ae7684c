"""Traces have what Perfetto needs: each task once, in slices that touch but do not overlap."""

import collections
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    DualPipe,
    Interleaved1F1B,
    OneFOneB,
    Timeline,
    ZeroBubbleH1,
    simulate,
    to_trace,
)
from jaxpp.schedules._trace_events import FIRST_THREAD


def events_of(timelines, path, **options):
    to_trace(timelines, path, **options)
    by_phase = collections.defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


@given(
    st.sampled_from([OneFOneB(), Interleaved1F1B(2), ZeroBubbleH1(), DualPipe()]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.floats(0.01, 3.0),
    st.floats(0.01, 3.0),
)
def test_every_task_is_one_slice_and_slices_do_not_overlap(
    tmp_path_factory, schedule, half, more, forward, latency
):
    p, m = 2 * half, 4 * half + 2 * more
    table = schedule.table(p * schedule.stages_per_rank, m)
    timeline = simulate(table, Costs(forward=forward, latency=latency))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    events = events_of(timeline, path, unit="ms")
    slices = {event["name"]: event for event in events["X"]}
    assert len(events["X"]) == len(table.tasks) == len(slices)
    for span in timeline.spans:
        event = slices[str(span.task)]
        assert (event["tid"] - FIRST_THREAD) % p == span.rank
        assert event["ts"] == pytest.approx(1e3 * span.start, abs=0.0626)
        assert event["ts"] + event["dur"] == pytest.approx(1e3 * span.end, abs=0.0626)
        assert event["args"]["kind"] == str(span.task.kind)
        assert event["args"]["stage"] == span.task.stage
        assert event["args"]["microbatch"] == span.task.microbatch
    threads = collections.defaultdict(list)
    for event in events["X"]:
        threads[event["tid"]].append(event)
    for own in threads.values():
        own.sort(key=lambda event: event["ts"])
        for before, after in zip(own, own[1:], strict=False):
            for turn in (int, round):  # as a reader may make nanoseconds of microseconds
                end = turn(before["ts"] * 1000) + turn(before["dur"] * 1000)
                assert end <= turn(after["ts"] * 1000)


def test_threads_are_named_and_sorted_by_rank(tmp_path):
    events = events_of(simulate(DualPipe().table(4, 8)), tmp_path / "trace.json")
    names = {e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    sorting = [e for e in events["M"] if e["name"] == "thread_sort_index"]
    order = {e["tid"]: e["args"]["sort_index"] for e in sorting}
    assert [names[tid] for tid in sorted(order, key=order.__getitem__)] == [
        name for r in range(4) for name in (f"rank {r}", f"rank {r}, at the same time")
    ]
    assert {event["tid"] for event in events["X"]} == set(names)
    assert {event["args"]["direction"] for event in events["X"]} == {0, 1}


def test_no_thread_has_the_number_of_a_process(tmp_path):
    # Perfetto would draw it, and thread 0 of that process, as one, and drop what overlaps.
    timelines = {str(p): simulate(OneFOneB().table(p, 8)) for p in (2, 3, 4)}
    events = events_of(timelines, tmp_path / "trace.json")
    processes = {event["pid"] for event in events["X"]}
    assert processes == {0, 1, 2} and not {e["tid"] for e in events["X"]} & processes


@pytest.mark.parametrize(
    ("schedule", "p", "m", "hops"),
    [
        (OneFOneB(), 4, 6, 2 * 3 * 6),
        (Interleaved1F1B(2), 4, 8, 2 * 7 * 8),
        (DualPipe(), 4, 8, 2 * 3 * 8),
        (OneFOneB(), 1, 3, 0),
    ],
)
def test_each_transfer_is_an_arrow_from_slice_to_slice(tmp_path, schedule, p, m, hops):
    timeline = simulate(schedule.table(p * schedule.stages_per_rank, m), Costs(latency=0.5))
    events = events_of(timeline, tmp_path / "trace.json")
    begins, ends = ({event["id"]: event for event in events[phase]} for phase in "sf")
    assert len(begins) == len(events["s"]) == hops and begins.keys() == ends.keys()
    for arrow, begin in begins.items():
        source, target = (_slice_at(events["X"], event) for event in (begin, ends[arrow]))
        assert (source["tid"] - target["tid"]) % p
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        step = target["args"]["stage"] - source["args"]["stage"]
        assert step == (1 if source["args"]["kind"] == "F" else -1)
        assert source["ts"] + source["dur"] <= target["ts"]
    assert not events_of(timeline, tmp_path / "none.json", transfers=False)["s"]


def _slice_at(slices, event):
    (found,) = (
        own
        for own in slices
        if own["tid"] == event["tid"] and own["ts"] <= event["ts"] < own["ts"] + own["dur"]
    )
    return found


def test_counters_are_what_ranks_hold(tmp_path):
    timeline = simulate(ZeroBubbleH1().table(4, 8))
    counters = collections.defaultdict(list)
    for event in events_of(timeline, tmp_path / "trace.json", unit="us")["C"]:
        counters[event["name"]].append((event["ts"], event["args"]["held"]))
    for rank, peak in enumerate(timeline.peak_memory):
        steps = counters[f"memory of rank {rank}"]
        assert steps == [(0.0, 0.0), *timeline.memory_over_time(rank)]
        assert max(held for _, held in steps) == peak
        assert steps[-1][1] == 0


def test_several_timelines_are_several_processes(tmp_path):
    table = OneFOneB().table(2, 3)
    simulated = simulate(table)
    measured = Timeline(table, simulated.starts, simulated.ends)
    timelines = {"measured": measured, "simulated": simulated}
    events = events_of(timelines, tmp_path / "trace.json", unit="s")
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "simulated"}
    assert collections.Counter(e["pid"] for e in events["X"]) == {0: 12, 1: 12}
    ids = [event["id"] for event in events["s"]]
    assert len(ids) == len(set(ids)) == 12
    assert max(event["ts"] + event["dur"] for event in events["X"]) == 12e6


def test_a_unit_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unit is one of 's', 'ms', 'us', got 'minutes'"):
        to_trace(simulate(OneFOneB().table(1, 1)), tmp_path / "x.json", unit="minutes")  # pyright: ignore[reportArgumentType]
