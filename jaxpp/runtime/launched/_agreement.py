"""Do all processes have the same step? Its text, to compare, and the first place that differs."""

import collections
import hashlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp._program import Bundle, Fed
from jaxpp.runtime.arrays import to_host
from jaxpp.runtime.site import Given, RemoteArray

#: The causes that were seen.
CAUSES = (
    "Usual causes are the order of a set, the time, a random number without a fixed seed, and the "
    "name of a host or the number of the process, in what the step closes over or builds on."
)
#: Of a large argument of a call so many of its elements are compared.
SAMPLE = 1 << 14
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def text_of(bundle: Bundle) -> list[tuple[str, str]]:
    """Writes all that a step is: lines, each with its place.

    Addresses of objects are left out, and of arrays a hash stands for the values.
    """
    found: list[tuple[str, str]] = []

    def add(place: str, what: Any) -> None:
        lines = _ADDRESS.sub("0x", what if isinstance(what, str) else repr(what)).splitlines()
        found.extend((place, line) for line in lines)

    for kind, records in (("argument", bundle.arguments), ("result", bundle.results)):
        for number, record in enumerate(records):
            add(f"{kind} {number}", record)
    for number, own in enumerate(bundle.computations):
        place = f"computation {number} ({own.name})"
        add(place, (own.donated, own.in_specs, own.out_specs))
        add(place, str(own.jaxpr))
        for value in _constants(own.jaxpr):
            add(place, f"a constant {_hashed(value)}")
    for program in bundle.programs:
        place = f"the program of rank {program.rank}"
        for instruction in program.instructions:
            add(place, instruction)
        for slot, value in program.constants:
            add(place, f"constant in slot {slot}: {_hashed(value)}")
    return found


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a jaxpr, or one inside it, holds."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        yield from (x.val for x in eqn.invars if hasattr(x, "val") and np.ndim(x.val))
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _constants(inner)


def _hashed(value: Any) -> str:
    array: Any = to_host(value) if isinstance(value, jax.Array) else np.asarray(value)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} of {digest[:16]}"


def digest_of_call(step: int, inputs: Sequence[Any]) -> int:
    """Returns a hash of a call: of the step, and for each argument of which array it is.

    Of arrays that go with the call it takes the values, of a large one the first `SAMPLE`; of what
    the ranks load, the number or the text by which they do.

    Args:
        step: the number of the step.
        inputs: the arguments, as of `Group.send_steps`.
    """
    digest = step
    for one in inputs:
        digest = zlib.crc32(_mark(one), digest)
    return digest


def _mark(one: Any) -> bytes:
    """Returns the bytes by which arguments are compared; none where only the rank knows them."""
    match one:
        case Given(data=data):
            return data if isinstance(data, bytes) else str(values_of(data)).encode()
        case RemoteArray():
            return str(one.id).encode()
        case Fed(batch=batch):
            value = batch.value
            known = isinstance(value, int | float | str)
            return f"{batch.number} {value if known else ''}".encode()
    return b""


def values_of(array: Any) -> int | None:
    """Returns a hash of an array's values, of a large one the first `SAMPLE`; None if on a GPU."""
    if isinstance(array, jax.Array) and {d.platform for d in array.devices()} != {"cpu"}:
        return None
    return zlib.crc32(np.asarray(array).reshape(-1)[:SAMPLE].tobytes())


def digest_of(text: Sequence[tuple[str, str]]) -> str:
    """Returns a hash of a text."""
    return hashlib.sha256(repr(text).encode()).hexdigest()


def first_difference(texts: Mapping[int, Sequence[tuple[str, str]]]) -> str:
    """Says which process has another text than most, or than process 0, and where it first differs.

    Example:
        >>> print(first_difference({0: [("argument 0", "x")], 1: [("argument 0", "y")]}))
        process 1 differs from process 0 first in argument 0:
          process 0: x
          process 1: y
    """
    digests = {n: digest_of(texts[n]) for n in sorted(texts)}
    counts = collections.Counter(digests.values())
    usual = max(digests, key=lambda n: counts[digests[n]])  # the first one of those
    other = next(n for n, digest in digests.items() if digest != digests[usual])
    pairs = [*texts[usual], ("its end", "")], [*texts[other], ("its end", "")]
    (place, here), (there_place, there) = next(p for p in zip(*pairs, strict=False) if p[0] != p[1])
    where = place if place == there_place else f"{place} (there {there_place})"
    start = max(0, len(os.path.commonprefix([here, there])) - 60)  # of what is shown of the lines
    lines = "".join(
        f"\n  process {n}: {'...' * bool(start)}{line[start : start + 160].strip()}"
        for n, line in ((usual, here), (other, there))
    )
    return f"process {other} differs from process {usual} first in {where}:{lines}"
