"""Tracing in each process of a mesh; the functions get their `process` from `apply`."""

import os
import pathlib
import time
from typing import Any

import jax

from jaxpp.runtime.trace._recorder import Recorder, Records, clock

#: The event of JAX's profiles that has the time of the driver's clock; see `merge_traces`.
CLOCK_EVENT = "jaxpp clock"


def check(process: Any, directory: str | None) -> str:
    """Gives the reason why a process cannot be traced; empty where it can.

    Args:
        process: the process.
        directory: where JAX's profile goes, without the number of the rank; None for no profile.
    """
    if process.recorder is not None:
        return f"rank {process.rank} is traced already"
    return "" if directory is None else unwritable(profile_folder(directory, process.rank))


def start(process: Any, directory: str | None, offset_ns: int, host: str) -> None:
    """Starts to record, with JAX's profiler too where there is a directory.

    Args:
        process: the process.
        directory: where the profile goes, without the number of the rank; None for no profile.
        offset_ns: what the process's clock is behind that of the driver.
        host: names the driver's clock.
    """
    if directory is not None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each call of a Python function would be an event
        folder = profile_folder(directory, process.rank)
        jax.profiler.start_trace(folder, profiler_options=options)
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


def settle(process: Any) -> None:
    """Waits until all calls have been computed in this process."""
    if process.recorder is not None:
        process.recorder.settle()


def stop(process: Any, profiled: bool) -> Records:
    """Ends the recording, and returns the records; JAX's profiler writes its files."""
    recorder = process.recorder
    process.recorder = process.transport.recorder = None
    records = Records((), (), ()) if recorder is None else recorder.stop()
    if profiled:
        jax.profiler.stop_trace()
    return records


def profile_folder(directory: str, rank: int) -> str:
    """Gives the folder of a rank's profile."""
    return f"{directory}-{rank}"


def unwritable(folder: str | os.PathLike[str]) -> str:
    """Makes a folder; returns the reason why it cannot be written to, empty where it can."""
    probe = pathlib.Path(folder, f".jaxpp-{os.getpid()}")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return f"cannot write to {os.fspath(folder)!r}: {error.strerror or error}"
    return ""
