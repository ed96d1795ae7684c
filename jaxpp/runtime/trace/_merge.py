"""`merge_traces`: puts several traces into one file, on one clock."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from jaxpp.runtime.trace._clock import Reading
from jaxpp.runtime.trace._process import CLOCK_EVENT
from jaxpp.runtime.trace._timeline import METADATA
from jaxpp.schedules._drawing._trace_events import Event, read_events, ticks, write_events

Path = str | os.PathLike[str]


def merge_traces(paths: Sequence[Path], path: Path) -> None:
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
        ...     jaxpp.merge_traces([f"{folder}/run", f"{folder}/run-0"], merged)
        ...     events = json.loads(merged.read_text())["traceEvents"]
        >>> print(*[e["args"]["name"] for e in events if e["name"] == "process_name"], sep="; ")
        run/timeline.json, rank 0; run-0, /host:CPU
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
                event["args"] = {"name": f"{title}, {event['args']['name']}"}
            elif event["name"] == "process_sort_index":
                continue
            merged.append(event)
    merged += [
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for pid in processes.values()
    ]
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
    for event in events:
        if event.get("name") == CLOCK_EVENT:
            args, elapsed = event["args"], round(1000 * event["ts"])
            monotonic, unix = int(args["monotonic_ns"]), int(args["unix_ns"])
            return events, Reading(args["host"], monotonic - elapsed, unix - elapsed)
    raise ValueError(
        f"merge_traces: {file} does not say when it was made, as traces by a mesh's start_trace "
        f"do; trace again with mesh.start_trace(directory)."
    )
