"""`start_trace` and `stop_trace` of any mesh, and what they let its processes do."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax

from jaxpp._program import Bundle
from jaxpp.runtime.trace import _clock, _timeline
from jaxpp.runtime.trace._clock import Offset, Reading, assemble
from jaxpp.runtime.trace._profile import CLOCK_EVENT
from jaxpp.runtime.trace._recorder import Recorder, Records, wait_for_runs
from jaxpp.runtime.trace._result import Trace

#: The source of the times of runs: JAX's profile, or threads that wait for results.
Times = Literal["profile", "waits"]


@dataclasses.dataclass(frozen=True)
class Tracing:
    """A running trace, into a directory."""

    directory: pathlib.Path
    #: The clocks of this process at its start, and for the first rank of each process a time, and
    #: by how much its clock was then behind that of this one.
    started: Reading
    clocks: dict[int, Offset]
    #: The programs of each step that is called, by its number; the mesh adds them.
    steps: dict[int, Bundle] = dataclasses.field(default_factory=dict)


def start_trace(
    mesh: Any, directory: str | os.PathLike[str], times: Times, running: Tracing | None
) -> Tracing:
    """Starts to trace the processes of a mesh: all of them, or none where anything is wrong.

    `mesh.apply` runs functions in its processes, and `mesh.first_ranks` are a rank of each. The
    trace that is `running` there is None.

    Raises:
        RuntimeError: a trace goes on already, or JAX's profiler runs in a process.
        OSError: the directory cannot be written to, here or where a process is.
    """
    if times not in get_args(Times):
        raise ValueError(f"start_trace: times is one of {get_args(Times)}, got {times!r}.")
    if running is not None:
        raise RuntimeError(
            f"start_trace: the mesh is traced already, into {str(running.directory)!r}; call "
            f"stop_trace first."
        )
    folder = pathlib.Path(directory).absolute()
    profiles = {number: folder / f"profile-{number}" for number in mesh.first_ranks}
    found = [_unwritable(folder)]
    found += mesh.apply(_check, {n: (path,) for n, path in profiles.items()}).values()
    if problem := next(filter(None, found), None):
        raise OSError(f"start_trace: {problem}. Give a folder that all ranks can write to.")
    clocks = {n: _clock.measure_offset(mesh, n) for n in profiles}
    started = _clock.read_clock()
    args = {n: (profiles[n], times, offset, started.host) for n, (_, offset) in clocks.items()}
    try:
        mesh.apply(_start, args)
    except Exception:
        # Some may have started, and one not, for instance because a profile runs there already.
        mesh.apply(stop_recording, {n: () for n in profiles})
        raise
    return Tracing(folder, started, clocks)


def stop_trace(mesh: Any, tracing: Tracing | None, device_of: Sequence[int]) -> Trace:
    """Ends a trace, if it goes on, and writes its files; each rank has a number of its device."""
    if tracing is None:
        raise RuntimeError(
            "stop_trace: the mesh is not traced; call start_trace(directory) first, on this mesh."
        )
    profiles = {n: tracing.directory / f"profile-{n}" for n in tracing.clocks}
    # Once the work of all has ended, no message is under way.
    mesh.apply(_settle, {n: () for n in profiles})
    records = mesh.apply(stop_recording, {n: (path,) for n, path in profiles.items()})
    offsets = {n: (tracing.clocks[n], _clock.measure_offset(mesh, n)) for n in profiles}
    trace = assemble(records, offsets, tracing.started.monotonic_ns, tracing.steps, device_of)
    trace = dataclasses.replace(trace, profile_paths=tuple(profiles.values()))
    return _timeline.write_trace(trace, tracing.directory, tracing.started)


# ---- in a process, which `apply` gives to each function ------------------------------------------


def _check(process: Any, profile: pathlib.Path) -> str:
    """Returns the reason why a process cannot be traced; empty where it can."""
    traced = process.transport.recorder is not None
    return "a rank is traced already" if traced else _unwritable(profile)


def _start(process: Any, profile: pathlib.Path, times: Times, offset_ns: int, host: str) -> None:
    """Starts to record, and JAX's profiler, which writes into a folder.

    The process's clock is `offset_ns` behind that of the driver, which `host` names.
    """
    wait_for_runs()  # or the profile has runs of earlier calls
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    jax.profiler.start_trace(profile, profiler_options=options)
    recorder = Recorder(waits=times == "waits")
    # The profile's own times count from its start, which it does not record otherwise. The first
    # event takes longer, so that its time is not exact.
    for _ in range(3):
        recorder.zero, unix_ns = time.monotonic_ns(), time.time_ns()
        known = {"monotonic_ns": str(recorder.zero + offset_ns), "unix_ns": str(unix_ns)}
        with jax.profiler.TraceAnnotation(CLOCK_EVENT, host=host, **known):
            pass
    process.transport.recorder = recorder


def _settle(process: Any) -> None:
    """Waits until all calls have been computed in this process."""
    process.transport.recorder.settle()


def stop_recording(process: Any, profile: pathlib.Path | None = None) -> Records:
    """Ends the recording in a process, where one goes on; JAX's profiler writes its files."""
    recorder, process.transport.recorder = process.transport.recorder, None
    if recorder is None:
        return Records()
    jax.profiler.stop_trace()
    return recorder.stop(profile)


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
