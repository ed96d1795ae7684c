"""Writes a trace as files, a timeline for Perfetto and a picture; `merge_traces` joins several."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxpp.runtime.trace._clock import Reading
from jaxpp.runtime.trace._profile import CLOCK_EVENT
from jaxpp.runtime.trace._result import Trace, TracedMessage, TracedRun
from jaxpp.schedules import plot
from jaxpp.schedules._trace_events import (
    FIRST_THREAD,
    Event,
    make_arrow,
    make_slice,
    name_process,
    name_thread,
    read_events,
    ticks,
    write_events,
)

#: The first threads of a rank's tasks, sends and receives; several may go on at a time.
TASKS, SENDS, RECEIVES = FIRST_THREAD, 2 * FIRST_THREAD, 3 * FIRST_THREAD
#: The key of `metadata` under which a timeline has the clocks at its time 0.
METADATA = "jaxpp"


def write_trace(trace: Trace, folder: pathlib.Path, started: Reading) -> Trace:
    """Writes the files of a trace, which began at `started`; returns the trace with their paths."""
    timeline, picture = folder / "timeline.json", folder / "timeline.png"
    write_events(make_events(trace), timeline, {METADATA: dataclasses.asdict(started)})
    picture.unlink(missing_ok=True)
    trace = dataclasses.replace(trace, timeline_path=timeline)
    if trace.typical_call is None:
        return trace
    measured, simulated = (
        f"measured, call {trace.typical_call}",
        "simulated, with the measured times of tasks",
    )
    plot({measured: trace.timeline(), simulated: trace.simulated()}, picture)
    return dataclasses.replace(trace, picture_path=picture)


def make_events(trace: Trace) -> list[Event]:
    """Makes the events of a trace: a process for each rank, its runs and messages, and arrows."""
    events: list[Event] = []
    runs = {run.where: _run_slice(run) for run in trace.runs}
    sends = [_message_slice(m, "send") for m in trace.messages]
    receives = [_message_slice(m, "receive") for m in trace.messages]
    for rank in range(len(trace.device_of)):
        events += name_process(rank, f"rank {rank}")
        events += name_thread(rank, TASKS, "tasks", TASKS)
        for name, own, first in (("sends", sends, SENDS), ("receives", receives, RECEIVES)):
            slices = [event for event in own if event["pid"] == rank]
            for lane in range(_put_in_lanes(slices, first)):
                title = name + ", at the same time" * (lane > 0)
                events += name_thread(rank, first + lane, title, first + lane)
    events += [*runs.values(), *sends, *receives]
    for n, (m, *ends) in enumerate(zip(trace.messages, sends, receives, strict=True)):
        path = [runs.get(m.made_by), *ends, runs.get(m.read_by)]
        events += make_arrow(n, "message", [event for event in path if event is not None])
    return events


def _run_slice(run: TracedRun) -> Event:
    category = "+".join(str(task.kind) for task in run.tasks) or "other"
    args = {"call": run.call, "waited_us": ticks(1e6 * (run.start - run.dispatched))}
    return make_slice(run.rank, TASKS, run.label, category, 1e6 * run.start, 1e6 * run.end, args)


def _message_slice(sent: TracedMessage, side: str) -> Event:
    message = sent.message
    rank, start, end, other = {
        "send": (message.source, sent.start, sent.sent, ("to", message.target)),
        "receive": (message.target, sent.arriving, sent.end, ("from", message.source)),
    }[side]
    described = zip(message.kinds, message.names, message.avals, strict=True)
    args: dict[str, Any] = {
        "call": sent.call,
        other[0]: f"rank {other[1]}",
        "bytes": message.nbytes,
        "arrays": [f"{kind} {name} {aval.str_short()}" for kind, name, aval in described],
    }
    # A slice needs some length, so that an arrow can be bound to it.
    start, end = 1e6 * start, max(1e6 * end, 1e6 * start + 0.25)
    return make_slice(rank, 0, message.names[0], side, start, end, args)


def _put_in_lanes(slices: Sequence[Event], first: int) -> int:
    """Gives slices threads on which they do not overlap, from `first` on; returns their number."""
    free: list[float] = []
    for event in sorted(slices, key=lambda event: event["ts"]):
        lane = next((n for n, end in enumerate(free) if end <= event["ts"]), len(free))
        free[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["tid"] = first + lane
    return len(free)


# ---- several traces as one ----------------------------------------------------------------------


def merge_traces(paths: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Puts timelines and JAX's profiles into one file that ui.perfetto.dev opens.

    All times are on one clock: the driver's if one driver has started all traces, else the time of
    day, on which hosts agree as well as their clocks are synchronised.

    Args:
        paths: what `start_trace` and `stop_trace` have written: `timeline.json` files, profiles
            (`*.trace.json.gz`), or folders with either, of which the last profile counts. Each is
            a group of processes, in their order.
        path: where to write, a `.json` or `.json.gz` file.

    Raises:
        FileNotFoundError: there is no such file, or no trace in a folder.
        ValueError: no path is given, or a file is no trace, or was not made by `start_trace`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, json, pathlib, tempfile
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.schedule(jaxpp.microbatch(jax.grad(loss), 2), jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((1,))
        >>> step = jaxpp.place(grad, mesh)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mesh.start_trace(f"{folder}/run")
        ...     gradient = step(jnp.eye(2), jnp.ones((4, 2)))
        ...     trace = mesh.stop_trace()
        ...     merged = pathlib.Path(folder, "all.json")
        ...     jaxpp.merge_traces([f"{folder}/run", f"{folder}/run/profile-0"], merged)
        ...     events = json.loads(merged.read_text())["traceEvents"]
        >>> print(*[e["args"]["name"] for e in events if e["name"] == "process_name"], sep="; ")
        run/timeline.json, rank 0; profile-0, /host:CPU
    """
    files = [(file, title) for given in paths for file, title in _files(pathlib.Path(given))]
    if not files:
        raise ValueError("merge_traces needs at least one trace to merge, got none.")
    traces = [(title, *_read(file)) for file, title in files]
    one_driver = len({reading.host for _, _, reading in traces}) == 1
    zeros = [r.monotonic_ns if one_driver else r.unix_ns for _, _, r in traces]
    merged: list[Event] = []
    processes: dict[tuple[int, int], int] = {}
    arrows: dict[tuple[int, object, object], int] = {}
    for n, ((title, events, _), zero) in enumerate(zip(traces, zeros, strict=True)):
        shift = ticks((zero - min(zeros)) / 1000)
        for event in events:
            event = {**event, "pid": processes.setdefault((n, event["pid"]), len(processes))}
            if "ts" in event:
                event["ts"] += shift
            if "id" in event:
                key = (n, event.get("cat"), event["id"])
                event["id"] = arrows.setdefault(key, len(arrows))
            if event["name"] == "process_name":
                merged += name_process(event["pid"], f"{title}, {event['args']['name']}")
            elif event["name"] != "process_sort_index":
                merged.append(event)
    first = min(range(len(zeros)), key=zeros.__getitem__)
    write_events(merged, path, {METADATA: dataclasses.asdict(traces[first][2])})


def _files(given: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """Finds the traces at a path, each with a title."""
    if given.is_file():
        return [(given, str(pathlib.Path(given.absolute().parent.name, given.name)))]
    found = []
    if (given / "timeline.json").is_file():
        found.append((given / "timeline.json", f"{given.name}/timeline.json"))
    profiles = sorted(given.glob("plugins/profile/*/*.trace.json.gz"))
    found += [(p, given.name) for p in profiles if p.parent == profiles[-1].parent]
    if not found:
        raise FileNotFoundError(
            f"merge_traces: there is no trace at {str(given)!r}: neither a file, nor a folder with "
            f"a timeline.json or a plugins/profile/*/*.trace.json.gz."
        )
    return found


def _read(file: pathlib.Path) -> tuple[list[Event], Reading]:
    """Reads the events of a file, and the driver's clocks at their time 0."""
    events, metadata = read_events(file)
    if METADATA in metadata:
        return events, Reading(**metadata[METADATA])
    clocks = [event for event in events if event.get("name") == CLOCK_EVENT]
    if clocks:
        last = max(clocks, key=lambda event: event["ts"])
        args, elapsed = last["args"], round(1000 * last["ts"])
        monotonic, unix = int(args["monotonic_ns"]), int(args["unix_ns"])
        return events, Reading(args["host"], monotonic - elapsed, unix - elapsed)
    raise ValueError(
        f"merge_traces: {file} does not say when it was made, as traces by a mesh's start_trace "
        f"do; trace again with mesh.start_trace(directory)."
    )
