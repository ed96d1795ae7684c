"""Writes a timeline for TensorBoard's profile plugin.

The plugin reads `plugins/profile/<run>/<host>.xplane.pb`: an `XSpace` of the file xplane.proto of
OpenXLA's repository (xla/tsl/profiler/protobuf), which has the field numbers below. The trace
viewer shows planes as processes, and lines as threads.
"""

import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence

from jaxpp.schedules._drawing._trace_events import Event

#: The plugin shows planes of hosts and devices, and custom planes, whose names begin with this.
_PREFIX = "/device:CUSTOM:"


def write(events: Sequence[Event], folder: pathlib.Path, zero_unix_ns: int) -> pathlib.Path:
    """Writes the slices among events; arrows are left out.

    Args:
        events: of a timeline.
        folder: what TensorBoard gets as its `--logdir`.
        zero_unix_ns: when the time 0 of the events was, in nanoseconds since 1970.

    Returns:
        The path of the file.
    """
    run = time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(zero_unix_ns / 1e9))
    path = folder / "plugins" / "profile" / run / "jaxpp.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_xspace(events, zero_unix_ns))
    return path


def to_xspace(events: Sequence[Event], zero_unix_ns: int) -> bytes:
    """Gives the slices among events as the bytes of an `XSpace`."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return b"".join(
        _nested(1, _plane(pid, name, [e for e in events if e["pid"] == pid], zero_unix_ns))
        for pid, name in processes.items()
    )


def _plane(pid: int, name: str, events: Sequence[Event], zero_unix_ns: int) -> bytes:
    """Makes an `XPlane`: id 1, name 2, lines 3, names of events 4, names of their stats 5."""
    slices = [e for e in events if e["ph"] == "X"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names = _numbered(e["name"] for e in slices)
    stats = _numbered(key for e in slices for key in e["args"])
    parts = [_number(1, pid + 1), _nested(2, _PREFIX + name)]
    for tid, title in threads.items():
        # An `XLine`: id 1, name 2, start in nanoseconds 3, events 4.
        line = [_number(1, tid + 1), _nested(2, title), _number(3, zero_unix_ns)]
        line += [_nested(4, _event(e, names, stats)) for e in slices if e["tid"] == tid]
        parts.append(_nested(3, *line))
    for field, known in ((4, names), (5, stats)):
        for title, n in known.items():
            # A map's entry: key 1, value 2; the value: id 1, name 2.
            parts.append(
                _nested(field, _number(1, n), _nested(2, _number(1, n), _nested(2, title)))
            )
    return b"".join(parts)


def _event(event: Event, names: Mapping[str, int], stats: Mapping[str, int]) -> bytes:
    """Makes an `XEvent`: name 1, offset 2 and duration 3 in picoseconds, stats 4."""
    parts = [
        _number(1, names[event["name"]]),
        _number(2, max(0, round(1e6 * event["ts"]))),
        _number(3, round(1e6 * event["dur"])),
    ]
    # An `XStat`: name 1, a string 5.
    parts += [
        _nested(4, _number(1, stats[key]), _nested(5, str(value)))
        for key, value in event["args"].items()
    ]
    return b"".join(parts)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: n for n, name in enumerate(dict.fromkeys(names), 1)}


def _number(field: int, value: int) -> bytes:
    """Makes a field that is a number: seven bits a byte, the lowest first."""
    return _varint(field << 3) + _varint(value)


def _nested(field: int, *parts: bytes | str) -> bytes:
    """Makes a field that is a string or a message: its length, then its bytes."""
    content = b"".join(p.encode() if isinstance(p, str) else p for p in parts)
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)
