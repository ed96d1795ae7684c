"""`start_trace` and `stop_trace` of any mesh, and what they let its processes do."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxpp._program import Bundle
from jaxpp.runtime.trace import _clock, _timeline
from jaxpp.runtime.trace._clock import CLOCK_EVENT, Offset, Reading
from jaxpp.runtime.trace._recorder import Recorder, Records, clock
from jaxpp.runtime.trace._result import Trace, assemble


@dataclasses.dataclass(frozen=True)
class Tracing:
    """A running trace.

    Args:
        directory: where its files go.
        profiler: whether JAX's profiler records, too.
        started: what the clocks of this process said at its start.
        clocks: for each process a time, and what its clock was then behind that of this process.
        steps: the programs of each step that is called, by its number; the mesh adds them.
    """

    directory: pathlib.Path
    profiler: bool
    started: Reading
    clocks: dict[int, tuple[int, int]]
    steps: dict[int, Bundle] = dataclasses.field(default_factory=dict)


def start_trace(
    mesh: Any,
    directory: str | os.PathLike[str],
    profiler: bool,
    running: Tracing | None,
) -> Tracing:
    """Starts to trace the processes of a mesh: all of them, or none where anything is wrong.

    Args:
        mesh: its `num_ranks` processes, in which `apply` runs functions.
        directory: where the files of the trace go, the processes' profiles among them.
        profiler: whether JAX's profiler records, too.
        running: the trace of the mesh that goes on, if any.

    Raises:
        RuntimeError: a trace goes on already.
        OSError: the directory cannot be written to, here or where a process is.
    """
    if running is not None:
        raise RuntimeError(
            f"start_trace: the mesh is traced already, into {str(running.directory)!r}; call "
            f"stop_trace first."
        )
    folder = pathlib.Path(directory).absolute()
    profiles = str(folder) if profiler else None
    numbers = range(mesh.num_ranks)
    found = [_unwritable(folder)]
    found += mesh.apply(_check, {n: (profiles,) for n in numbers}).values()
    if problem := next(filter(None, found), None):
        raise OSError(f"start_trace: {problem}. Give a folder that all ranks can write to.")
    clocks = {n: _clock.measure_offset(mesh, n) for n in numbers}
    started = _clock.read_clock()
    args = {n: (profiles, offset, started.host) for n, (_, offset) in clocks.items()}
    try:
        mesh.apply(_start, args)
    except Exception:
        # Some may have started, and one not, for instance because a profile runs there already.
        mesh.apply(_stop, {n: (False,) for n in numbers})
        raise
    return Tracing(folder, profiler, started, clocks)


def stop_trace(mesh: Any, tracing: Tracing | None, device_of: Sequence[int]) -> Trace:
    """Ends a trace, and writes its files.

    Args:
        mesh: its `num_ranks` processes, in which `apply` runs functions.
        tracing: the trace that goes on; whatever happens, it has ended after this.
        device_of: for each rank, the number of its device.

    Raises:
        RuntimeError: no trace goes on.
    """
    if tracing is None:
        raise RuntimeError(
            "stop_trace: the mesh is not traced; call start_trace(directory) first, on this mesh."
        )
    numbers = range(mesh.num_ranks)
    # Once the work of all has ended, no message is under way.
    mesh.apply(_settle, {n: () for n in numbers})
    records = mesh.apply(_stop, {n: (tracing.profiler,) for n in numbers})
    offsets = {n: Offset((tracing.clocks[n], _clock.measure_offset(mesh, n))) for n in numbers}
    trace = assemble(records, offsets, tracing.started.monotonic_ns, tracing.steps, device_of)
    if tracing.profiler:
        folders = tuple(pathlib.Path(_profile_of(tracing.directory, n)) for n in numbers)
        trace = dataclasses.replace(trace, profile_paths=folders)
    return _timeline.write_trace(trace, tracing.directory, tracing.started)


def _profile_of(directory: str | os.PathLike[str], number: int) -> str:
    """Names the folder for JAX's profile of a process, in that of the trace."""
    return os.path.join(directory, f"profile-{number}")


# ---- in a process, which `apply` gives to each function ------------------------------------------


def _check(process: Any, directory: str | None) -> str:
    """Returns the reason why a process cannot be traced; empty where it can."""
    if process.recorder is not None:
        return f"rank {process.rank} is traced already"
    return "" if directory is None else _unwritable(_profile_of(directory, process.rank))


def _start(process: Any, directory: str | None, offset_ns: int, host: str) -> None:
    """Starts to record, with JAX's profiler too where there is a directory.

    The process's clock is `offset_ns` behind that of the driver, which `host` names.
    """
    if directory is not None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each call of a Python function would be an event
        profile = _profile_of(directory, process.rank)
        jax.profiler.start_trace(profile, profiler_options=options)
        # The profile's own times count from its start, which it does not record otherwise.
        with jax.profiler.TraceAnnotation(
            CLOCK_EVENT,
            host=host,
            monotonic_ns=str(clock() + offset_ns),
            unix_ns=str(time.time_ns()),
            rank=str(process.rank),
        ):
            pass
    process.recorder = process.transport.recorder = Recorder()


def _settle(process: Any) -> None:
    """Waits until all calls have been computed in this process."""
    if process.recorder is not None:
        process.recorder.settle()


def _stop(process: Any, profiled: bool) -> Records:
    """Ends the recording, and returns the records; JAX's profiler writes its files."""
    recorder = process.recorder
    process.recorder = process.transport.recorder = None
    records = Records((), (), ()) if recorder is None else recorder.stop()
    if profiled:
        jax.profiler.stop_trace()
    return records


def _unwritable(folder: str | os.PathLike[str]) -> str:
    """Makes a folder; returns the reason why it cannot be written to, empty where it can."""
    probe = pathlib.Path(folder, f".jaxpp-{os.getpid()}")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return f"cannot write to {os.fspath(folder)!r}: {error.strerror or error}"
    return ""
