"""Reads the runs of computations from JAX's own profile, and finds which dispatch each was of."""

import pathlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpp.runtime.executor import Copier
from jaxpp.runtime.trace._result import Where

#: The event of JAX's profiles that has the time of the driver's clock; see `merge_traces`.
CLOCK_EVENT = "jaxpp clock"
#: The runs of a profile: by the name of the module (empty where the device had nothing to do) and
#: the device, for the number of each launch its start and end in nanoseconds since the profile's
#: clock event. Each launch of an executable has the next number.
Profiled = Mapping[tuple[str, int], Mapping[int, tuple[int, int]]]
#: The times at which a run was dispatched, started and ended; None where that was not seen.
Seen = tuple[int, Any, Any]
#: A run may be seen to start so long before its dispatch, in nanoseconds: clocks are not exact.
_SLACK = 200_000


class Module(NamedTuple):
    """A compiled computation on the devices of a rank, as JAX's profile names both."""

    name: str
    devices: tuple[int, ...]


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


def read_profile(folder: pathlib.Path) -> Profiled:
    """Reads the runs of the last profile in a folder that `jax.profiler.start_trace` wrote to.

    Each operation has the module, the device and the number of its run. Another event ends with it.
    """
    names: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    zero = 0.0
    with warnings.catch_warnings():  # one of JAX's, taken for an error, would end the process
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, stats, start, end in events_of(folder):
            if name == CLOCK_EVENT:
                zero = max(zero, start)
            if "run_id" in stats and "device_ordinal" in stats:
                key = stats["device_ordinal"], stats["run_id"]
                earliest, latest = spans.get(key, (start, end))
                spans[key] = min(earliest, start), max(latest, end)
                if "hlo_module" in stats:
                    names[key] = stats["hlo_module"]
    found: dict[tuple[str, int], dict[int, tuple[int, int]]] = defaultdict(dict)
    for (device, number), (start, end) in spans.items():
        name = names.get((device, number), "")
        found[name, device][number] = round(start - zero), round(end - zero)
    return found


def events_of(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any], float, float]]:
    """Yields the name, the attributes, the start and the end of each event of the last profile."""
    path = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda p: p.stat().st_mtime_ns)
    profile = jax.profiler.ProfileData.from_file(str(path))  # its parts do not keep it alive
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                start = event.start_ns
                yield event.name, dict(event.stats), start, start + event.duration_ns


def match(
    dispatches: Mapping[Module, Mapping[Where, int]], profiled: Profiled, zero: int
) -> tuple[dict[Where, Seen], list[str]]:
    """Finds the times of dispatches in a profile.

    The launches of a module on the devices of a rank have the order of their dispatches, also where
    ranks share the devices. A run that does not start because an earlier one has failed is not in
    the profile; the numbers of the launches tell which.
    Each of the `dispatches` is the time of a run; `zero` is that of the profile's clock event, by
    the clock of the process.

    Returns:
        What is known of the runs, and why others are not.
    """
    seen: dict[Where, Seen] = {}
    errors: list[str] = []
    for module, asked in dispatches.items():
        spans: dict[int, tuple[int, int]] = {}  # until all devices of a launch have ended
        for device in module.devices:
            for number, (start, end) in profiled.get((module.name, device), {}).items():
                first, last = spans.get(number, (zero + start, zero + end))
                spans[number] = min(first, zero + start), max(last, zero + end)
        unnamed = sum(len(profiled.get(("", device), {})) for device in module.devices)
        if not spans and unnamed >= len(asked):
            # It gives its arguments back: the device has nothing to do.
            seen |= {where: (dispatched, None, None) for where, dispatched in asked.items()}
            continue
        spans = dict(sorted(spans.items(), key=lambda launch: launch[1]))
        places, order = _places(spans, list(asked.values())), list(asked.items())
        for place, span in zip(places, spans.values(), strict=False):
            where, dispatched = order[place]
            seen[where] = dispatched, *span
        if len(places) < len(asked):
            errors.append(
                f"JAX's profile has {len(spans)} of {len(asked)} runs of {module.name} on device "
                f"{', '.join(map(str, module.devices))}, and the times of {len(places)} are known"
            )
    return seen, errors


def _places(launches: Mapping[int, tuple[int, int]], dispatched: Sequence[int]) -> list[int]:
    """Finds for each launch, in the order of starts, which dispatch it was; empty where unknown.

    The launches of one executable are numbered one after the other, so a gap is a run that did not
    start. Launches of several executables of one name are taken in order, if all are there.
    """
    first, last = min(launches, default=0), max(launches, default=0)
    for skipped in range(len(dispatched) - (last - first)):
        places = [number - first + skipped for number in launches]
        starts = [start for start, _ in launches.values()]
        if all(s >= dispatched[n] - _SLACK for s, n in zip(starts, places, strict=True)):
            return places
    return list(range(len(launches))) if len(launches) == len(dispatched) else []
