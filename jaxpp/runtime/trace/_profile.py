"""Reads the runs of computations from JAX's own profile, and finds which dispatch each was of."""

import dataclasses
import pathlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxpp.runtime.executor import Copier
from jaxpp.runtime.trace._clock import CLOCK_EVENT
from jaxpp.runtime.trace._records import RunRecord

#: A run may be seen to start so long before its dispatch, in nanoseconds: clocks are not exact.
_SLACK = 200_000


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A compiled computation on the devices of a rank, as JAX's profile names both."""

    name: str
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A run of a module on a device; times are nanoseconds since the profile's clock event.

    `number` is that of the launch: each launch of an executable has the next one. `module` is empty
    where the device had nothing to do.
    """

    module: str
    device: int
    number: int
    start: int
    end: int


def module_of(executable: Any) -> Module | None:
    """Finds how JAX's profile names an executable; None where the profile does not have its runs.

    It has no copies between memories, and what it has of other devices than CPUs was never checked.
    """
    if isinstance(executable, Copier):
        return None
    loaded = executable.runtime_executable()
    devices = loaded.local_devices()
    if any(device.platform != "cpu" for device in devices):
        return None
    return Module(loaded.hlo_modules()[0].name, tuple(d.local_hardware_id for d in devices))


def read_profile(folder: pathlib.Path) -> list[ProfiledRun]:
    """Reads the runs of the last profile in a folder that `jax.profiler.start_trace` wrote to.

    Each operation has the module, the device and the number of its run. An event of its own, with
    the number and the device alone, ends with the run.
    """
    names: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    zero = 0.0
    with warnings.catch_warnings():  # one of JAX's, taken for an error, would end the process
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, stats, start, end in _events(folder):
            if name == CLOCK_EVENT:
                zero = start
            if "run_id" not in stats or "device_ordinal" not in stats:
                continue
            key = stats["device_ordinal"], stats["run_id"]
            earliest, latest = spans.get(key, (start, end))
            spans[key] = min(earliest, start), max(latest, end)
            if "hlo_module" in stats:
                names[key] = stats["hlo_module"]
    return [
        ProfiledRun(names.get(key, ""), *key, round(start - zero), round(end - zero))
        for key, (start, end) in spans.items()
    ]


def _events(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any], float, float]]:
    """Yields the name, the attributes, the start and the end of each event of the last profile."""
    path = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda p: p.stat().st_mtime_ns)
    profile = jax.profiler.ProfileData.from_file(str(path))  # its parts do not keep it alive
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                start = event.start_ns
                yield event.name, dict(event.stats), start, start + event.duration_ns


def match(
    dispatches: Sequence[tuple[Module, RunRecord]], profiled: Sequence[ProfiledRun], zero: int
) -> tuple[list[RunRecord], list[str]]:
    """Finds the times of dispatches in a profile.

    The launches of a module on the devices of a rank have the order of their dispatches, also where
    ranks share the devices. A run that does not start because an earlier one has failed is not in
    the profile; the numbers of the launches tell which.

    Args:
        dispatches: the module and the record of each, in their order.
        profiled: the runs of the profile.
        zero: the time of the profile's clock event by the clock of the process.

    Returns:
        The records with their times, and what kept others from being known.
    """
    by_module: dict[Module, list[RunRecord]] = defaultdict(list)
    for module, record in dispatches:
        by_module[module].append(record)
    known: list[RunRecord] = []
    errors: list[str] = []
    for module, records in by_module.items():
        runs = _joined(module, profiled)
        unnamed = [run for run in profiled if not run.module and run.device in module.devices]
        if not runs and len(unnamed) >= len(records):
            known += records  # it gives its arguments back: the device has nothing to do
            continue
        places = _places(runs, [record.dispatched - zero for record in records])
        known += [
            dataclasses.replace(records[n], start=zero + run.start, end=zero + run.end)
            for n, run in zip(places, runs, strict=False)
        ]
        if len(places) < len(records):
            errors.append(
                f"JAX's profile has {len(runs)} of {len(records)} runs of {module.name} on device "
                f"{', '.join(map(str, module.devices))}, and the times of {len(places)} are known"
            )
    return known, errors


def _joined(module: Module, profiled: Sequence[ProfiledRun]) -> list[ProfiledRun]:
    """Returns the runs of a module, from their start on its first device to the end on its last."""
    runs: dict[int, ProfiledRun] = {}
    for run in profiled:
        if run.module == module.name and run.device in module.devices:
            before = runs.get(run.number, run)
            start, end = min(before.start, run.start), max(before.end, run.end)
            runs[run.number] = dataclasses.replace(run, start=start, end=end)
    return sorted(runs.values(), key=lambda run: run.start)


def _places(runs: Sequence[ProfiledRun], dispatched: Sequence[float]) -> list[int]:
    """Finds for each run, in the order of starts, which dispatch it was; empty where unknown.

    The launches of one executable are numbered one after the other, so a gap is a run that did not
    start. Launches of several executables of one name are taken in order, if all are there.
    """
    numbers = [run.number for run in runs]
    first = min(numbers, default=0)
    for skipped in range(len(dispatched) - max(numbers, default=0) + first):
        places = [number - first + skipped for number in numbers]
        if all(r.start >= dispatched[n] - _SLACK for r, n in zip(runs, places, strict=True)):
            return places
    return list(range(len(runs))) if len(runs) == len(dispatched) else []
