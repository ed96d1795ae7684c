"""The programs of the ranks: instructions over numbered slots; data only."""

import contextvars
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.extend.core as jex
from jax.sharding import AbstractMesh

from jaxpp._specs import Spec

#: The axis of a mesh along which its ranks are.
PIPELINE_AXIS = "mpmd"


class Role(enum.StrEnum):
    """What an argument is to a step."""

    PARAMETER = "parameter"  # read by a stage, the same for all microbatches
    OPTIMIZER = "optimizer"  # handed on to the next step, and read by no stage
    BATCH = "batch"  # read in slices, one for each microbatch
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """What an executable computes; ranks that compute the same thing share one.

    `donated` are the positions of the inputs whose memory the outputs may take; `in_specs` and
    `out_specs` say how inputs and outputs are split over the axes inside a rank, if it has any.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    donated: tuple[int, ...]
    in_specs: tuple[Spec, ...] = ()
    out_specs: tuple[Spec, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Runs computation number `computation`; `label` names the task or the part of the step."""

    computation: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What one send carries: for each array its origin, kind, shape, dtype, and how it is split.

    A kind is `"edge"` (between stages), `"gradient"` (of a shared parameter), `"scalar"`,
    `"argument"` (an input of the step that another rank holds) or `"gathered"` (anything else).
    """

    tag: int
    source: int
    target: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    avals: tuple[Any, ...]
    specs: tuple[Spec, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the message."""
        return sum(a.size * getattr(a.dtype, "itemsize", 4) for a in self.avals)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Sends slots to another rank; does not wait."""

    slots: tuple[int, ...]
    message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Receive:
    """Receives a message into slots; waits until it has been sent."""

    slots: tuple[int, ...]
    message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drops slots after their last use."""

    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Waits until slots have been computed: what only they were computed from is gone by then."""

    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fed:
    """Stands for an array that ranks in other processes load themselves.

    `batch` is what is loaded, `index` the number of the array among its leaves.
    """

    batch: Any
    index: int
    aval: Any


Instruction = Run | Send | Receive | Free | Wait


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What one rank runs in a step.

    `inputs` and `outputs` pair the numbers of the step's flat arguments and results with slots;
    `constants` pairs slots with values that are there before the step.
    """

    rank: int
    stages: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    num_slots: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, Any], ...]

    @property
    def sends(self) -> tuple[Send, ...]:
        """The sends of the program, in order."""
        return tuple(i for i in self.instructions if isinstance(i, Send))


@dataclasses.dataclass(frozen=True)
class Bundle:
    """All programs of a step, and what they share.

    `in_avals` and `out_avals` are the types of the step's flat arguments and results, and
    `arg_names` the paths of the arguments. `donated` are the arguments that the step consumes.

    A stacked array is several flat arguments or results, each some of its rows: `in_cuts` and
    `out_cuts` have, for each array of the caller, where its rows are cut, `(0, 2, 4)`, or None
    where it is whole. Empty, all are whole.

    Where a rank is a mesh of its own, `inside` is that mesh without its devices, and `in_specs`,
    `out_specs` say how flat arguments and results are split over it; constants are whole.
    `roles` says what each flat argument is to the step.
    """

    programs: tuple[Program, ...]
    computations: tuple[Computation, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    arg_names: tuple[str, ...]
    donated: frozenset[int]
    in_cuts: tuple[tuple[int, ...] | None, ...] = ()
    out_cuts: tuple[tuple[int, ...] | None, ...] = ()
    inside: AbstractMesh | None = None
    in_specs: tuple[Spec, ...] = ()
    out_specs: tuple[Spec, ...] = ()
    roles: tuple[Role, ...] = ()

    def as_text(self) -> str:
        """The programs, one instruction a line."""
        lines = []
        for program in self.programs:
            stages = ", ".join(map(str, program.stages))
            lines.append(f"rank {program.rank} (stages {stages}):")
            lines.extend(f"  {self._line(i)}" for i in program.instructions)
        return "\n".join(lines)

    def _line(self, instruction: Instruction) -> str:
        match instruction:
            case Run(number, inputs, outputs, label):
                donated = self.computations[number].donated
                shown = " ".join(f"{s}!" if i in donated else f"{s}" for i, s in enumerate(inputs))
                return (
                    f"run {label} ({self.computations[number].name}): {shown} -> {_join(outputs)}"
                )
            case Send(slots, message):
                return f"send {_join(slots)} to rank {message.target}: {_what(message)}"
            case Receive(slots, message):
                return f"receive {_join(slots)} from rank {message.source}: {_what(message)}"
            case Free(slots):
                return f"free {_join(slots)}"
            case Wait(slots):
                return f"wait for {_join(slots)}"


def _join(slots: Sequence[int]) -> str:
    return " ".join(map(str, slots))


def _what(message: Message) -> str:
    return ", ".join(
        f"{kind} {name} {aval.str_short()}"
        for kind, name, aval in zip(message.kinds, message.names, message.avals, strict=True)
    )


class Step(Protocol):
    """A step on a mesh."""

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs it on its flat arguments."""
        ...

    def input_shardings(self) -> list[Any]:
        """Where it reads each of them; None for one that it does not read."""
        ...

    def describe(self) -> Any:
        """What each rank holds, sends and reduces: a `jaxpp.runtime.Description`."""
        ...


class Mesh(Protocol):
    """What runs programs: one rank for each index of the pipeline axis."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def inside(self) -> AbstractMesh | None:
        """The mesh of each rank without its devices; None where a rank is one device."""
        ...

    def load(self, bundle: Bundle) -> Step:
        """Compiles a step, and gives the function that runs it on flat arguments."""
        ...


#: Makes the mesh for a number of ranks where `place` is given none; the runtime sets it.
default_mesh: contextvars.ContextVar[Callable[[int], Mesh]] = contextvars.ContextVar("default_mesh")
