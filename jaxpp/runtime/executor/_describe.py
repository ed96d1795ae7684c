"""`describe`: what each rank of a placed step holds and sends."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxpp import _messages
from jaxpp._compat import memory_kind
from jaxpp._program import Bundle, Program, Role
from jaxpp.runtime.executor._memory import (
    HOST,
    Inspected,
    array_bytes,
    format_bytes,
    held_bytes,
    over_time,
)


@dataclasses.dataclass(frozen=True)
class RankDescription:
    """The share of one rank in a placed step: what it holds and sends.

    All bytes are those of one device, but for `sent_bytes`.

    Args:
        rank: its number.
        stages: the stages that it runs.
        devices: its devices, as JAX writes them.
        parameters: the number of parameters that its stages read, over all of its devices.
        parameter_bytes: what they take.
        optimizer_bytes: what the optimizer's state takes: all that the step hands on to the next
            one, and that no stage reads.
        accumulator_bytes: what gradients and other accumulators take, at their most.
        activation_bytes: what the tasks of microbatches keep for later ones, and what has been
            received, at its most.
        temporary_bytes: what XLA needs beside arrays while it runs a computation, at its most.
        peak_bytes: all that there is at once, at its most. Arguments count from the start to the
            end of the step, unless a computation takes their memory. On an `MpmdMesh` the two
            messages that came last count, too.
        host_bytes: what arrays in the memory of the host take, at their most; they count nowhere
            else.
        sent_bytes: by the rank that it sends to, the bytes of a step, from all devices together.
    """

    rank: int
    stages: tuple[int, ...]
    devices: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int
    activation_bytes: int
    temporary_bytes: int
    peak_bytes: int
    host_bytes: int
    sent_bytes: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Description:
    """A placed step, rank by rank: what each holds and sends; shown as a table.

    Args:
        ranks: a description of each.
        notes: what else is known of the step, a line each.

    Example:
        >>> figures = 4, 16, 32, 16, 8, 0, 72, 0
        >>> one = RankDescription(0, (0,), ("cpu:0",), *figures, {1: 64})
        >>> print(str(Description((one,))).splitlines()[1])
        0     0       cpu:0    4           32 B       16 B          8 B          0 B        72 B ...
    """

    ranks: tuple[RankDescription, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> str:
        """Returns the description as JSON: an object with lists `ranks` and `notes`, as here."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def _repr_html_(self) -> str:
        return _messages.html_table(_HEADER, map(_row, self.ranks), " ".join([_NOTE, *self.notes]))

    def __str__(self) -> str:
        rows = [[cell.split("\n") for cell in row] for row in (_HEADER, *map(_row, self.ranks))]
        widths = [max(map(len, itertools.chain(*column))) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(map(str.ljust, cells, widths)).rstrip()
            for row in rows
            for cells in itertools.zip_longest(*row, fillvalue="")
        ]
        return "\n".join([*lines, _NOTE, *self.notes])


_HEADER = (
    "rank", "stages", "devices", "parameters", "optimizer", "accumulators", "activations",
    "temporary", "at once", "on the host", "sent to",
)  # fmt: skip
_NOTE = (
    "Bytes are those of one device, at their most; those sent are of a rank's devices together, in "
    "a step."
)


def _row(rank: RankDescription) -> tuple[str, ...]:
    return (
        str(rank.rank),
        ", ".join(map(str, rank.stages)) or "-",
        "\n".join(rank.devices),
        f"{rank.parameters:,}\n{format_bytes(rank.parameter_bytes)}",
        format_bytes(rank.optimizer_bytes),
        format_bytes(rank.accumulator_bytes),
        format_bytes(rank.activation_bytes),
        format_bytes(rank.temporary_bytes),
        format_bytes(rank.peak_bytes),
        format_bytes(rank.host_bytes),
        "\n".join(f"{to}: {format_bytes(n)}" for to, n in rank.sent_bytes.items()) or "-",
    )


def describe(bundle: Bundle, ranks: Sequence[Inspected], notes: Sequence[str] = ()) -> Description:
    """Describes a step, of whose ranks each has been inspected."""
    held = held_bytes(bundle, ranks)
    peaks = [Counter[str]() for _ in ranks]
    for rank, peak in enumerate(peaks):
        for _, now in over_time(h for h in held if h.rank == rank):
            peak |= now | Counter({"all": now.total() - now[HOST]})
    each = zip(bundle.programs, ranks, peaks, strict=True)
    return Description(tuple(_describe_rank(bundle, *own) for own in each), tuple(notes))


def _describe_rank(
    bundle: Bundle, program: Program, rank: Inspected, peaks: Mapping[str, int]
) -> RankDescription:
    read = [bundle.arguments[n] for n, _ in program.inputs]
    held: Counter[Role] = Counter()
    for own in read:
        if memory_kind(own.aval) is None:
            held[own.role] += array_bytes(own.aval, own.spec, rank.axes)
    sent: Counter[int] = Counter()
    for send in program.sends:
        sent[send.message.target] += send.message.nbytes
    return RankDescription(
        program.rank,
        program.stages,
        rank.devices,
        sum(own.aval.size for own in read if own.role is Role.PARAMETER),
        held[Role.PARAMETER],
        held[Role.OPTIMIZER],
        peaks["accumulators"],
        peaks["activations"],
        peaks["temporary"],
        peaks["all"],
        peaks[HOST],
        dict(sorted(sent.items())),
    )
