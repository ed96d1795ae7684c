"""`start_trace` and `stop_trace` of any mesh."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from jaxpp._program import Bundle
from jaxpp.runtime.trace import _clock, _process, _timeline
from jaxpp.runtime.trace._clock import Offset, Processes, Reading
from jaxpp.runtime.trace._result import Trace, assemble


@dataclasses.dataclass(frozen=True)
class Session:
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
    processes: Processes,
    directory: str | os.PathLike[str],
    profiler: bool,
    running: Session | None,
) -> Session:
    """Starts to trace the processes of a mesh: all of them, or none where anything is wrong.

    Args:
        processes: those of the mesh.
        directory: where the files of the trace go; the processes' profiles go beside it.
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
    numbers = range(processes.num_ranks)
    found = [_process.unwritable(folder)]
    found += processes.apply(_process.check, {n: (profiles,) for n in numbers}).values()
    if problem := next(filter(None, found), None):
        raise OSError(f"start_trace: {problem}. Give a folder that all ranks can write to.")
    clocks = {n: _clock.measure_offset(processes, n) for n in numbers}
    started = _clock.read_clock()
    args = {n: (profiles, offset, started.host) for n, (_, offset) in clocks.items()}
    try:
        processes.apply(_process.start, args)
    except Exception:
        # Some may have started, and one not, for instance because a profile runs there already.
        processes.apply(_process.stop, {n: (False,) for n in numbers})
        raise
    return Session(folder, profiler, started, clocks)


def stop_trace(processes: Processes, session: Session | None, device_of: Sequence[int]) -> Trace:
    """Ends a trace, and writes its files.

    Args:
        processes: those of the mesh.
        session: the trace that goes on; whatever happens, it has ended after this.
        device_of: for each rank, the number of its device.

    Raises:
        RuntimeError: no trace goes on.
    """
    if session is None:
        raise RuntimeError(
            "stop_trace: the mesh is not traced; call start_trace(directory) first, on this mesh."
        )
    numbers = range(processes.num_ranks)
    # Once the work of all has ended, no message is under way.
    processes.apply(_process.settle, {n: () for n in numbers})
    records = processes.apply(_process.stop, {n: (session.profiler,) for n in numbers})
    offsets = {n: Offset((session.clocks[n], _clock.measure_offset(processes, n))) for n in numbers}
    trace = assemble(records, offsets, session.started.monotonic_ns, session.steps, device_of)
    if session.profiler:
        folders = (_process.profile_folder(str(session.directory), n) for n in numbers)
        trace = dataclasses.replace(trace, profile_paths=tuple(map(pathlib.Path, folders)))
    return _timeline.write_trace(trace, session.directory, session.started)
