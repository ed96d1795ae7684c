"""The programs of the ranks: instructions over numbered slots; data only."""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.extend.core as jex
from jax.sharding import AbstractMesh

from jaxpp._specs import Spec
from jaxpp.schedules import Task

#: The axis of a mesh along which its ranks are.
PIPELINE_AXIS = "mpmd"


class Role(enum.StrEnum):
    """The role of an argument in a step."""

    PARAMETER = "parameter"  # read by a stage, the same for all microbatches
    OPTIMIZER = "optimizer"  # handed on to the next step, and read by no stage
    BATCH = "batch"  # read in slices, one for each microbatch
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """The computation of an executable; ranks that compute the same share one.

    `donated` are the positions of the inputs whose memory the outputs may take. `in_specs` and
    `out_specs` say how inputs and outputs are split over the axes inside a rank, if it has any.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    donated: tuple[int, ...]
    in_specs: tuple[Spec, ...] = ()
    out_specs: tuple[Spec, ...] = ()

    def __repr__(self):
        return f"Computation({self.name!r}, {counted(len(self.jaxpr.eqns), 'equation')})"


#: The label of a run that combines what replicas have, once a step.
REDUCTION = "reduce"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Runs computation number `computation`; `label` names the task or the part of the step.

    `task` is the task of a loop that it is, None for a part around the loops, and `loop` the number
    of the loop. In a step of several loops, `task` numbers the stages of each on from those of the
    loops before: behind a loop of two stages, `F2.0` is the forward of a second loop's stage 0.
    `others` are the tasks that run together with it, in the same computation.
    """

    computation: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    label: str
    task: Task | None = None
    loop: int = 0
    others: tuple[Task, ...] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks that it is."""
        return (self.task, *self.others) if self.task else ()

    @property
    def lane(self) -> str:
        """The resource of its device that it takes: `"compute"`, or `"copy"`.

        A device runs a collective when it has run what was dispatched before.
        """
        return "copy" if self.task and self.task.kind.lane == "copy" else "compute"


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """The arrays that one send carries: of each its origin, kind, shape, dtype and spec.

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
    """Waits until slots have been computed: then the values that only they needed are freed."""

    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fed:
    """Stands for an array that ranks in other processes load themselves.

    `batch` is the pytree that is loaded, `index` the number of the array among its leaves.
    """

    batch: Any
    index: int
    aval: Any


Instruction = Run | Send | Receive | Free | Wait


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The program that one rank runs in a step.

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

    def __repr__(self):
        stages = ", ".join(map(str, self.stages))
        instructions = counted(len(self.instructions), "instruction")
        return f"Program(rank {self.rank}, stages {stages}: {instructions})"

    @property
    def sends(self) -> tuple[Send, ...]:
        """The sends of the program, in order."""
        return tuple(i for i in self.instructions if isinstance(i, Send))


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """A flat argument of a step: an array that the step takes, or some rows of one.

    Args:
        path: the path of the array: `[0]['w']`.
        aval: its type.
        array: the number of the array among those of the caller.
        rows: the first row that it has of that array, and the first after them; None for all.
        role: its role in the step.
        donated: whether the step consumes it.
        fed: whether the ranks that read it load it themselves.
        spec: how it is split inside a rank.
        stages: the stages that read it.
    """

    path: str
    aval: Any
    array: int
    rows: tuple[int, int] | None = None
    role: Role = Role.OTHER
    donated: bool = False
    fed: bool = False
    spec: Spec = ()
    stages: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The path of the array, with the rows if it has some of them: `[0]['w'][0:2]`."""
        return self.path if self.rows is None else f"{self.path}[{self.rows[0]}:{self.rows[1]}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A flat result of a step: an array that the step gives, or some rows of one.

    Args:
        aval: its type.
        array: the number of the array among those of the caller.
        rows: the first row that it has of that array, and the first after them; None for all.
        becomes: the number of the argument of the next call that it becomes; None for none.
        spec: how it is split inside a rank; None where that is open.
        stages: the stages that it is left on.
    """

    aval: Any
    array: int
    rows: tuple[int, int] | None = None
    becomes: int | None = None
    spec: Spec | None = None
    stages: frozenset[int] = frozenset()


#: The rows at which an array is cut, with 0 and the number of rows: `(0, 2, 4)`; None for whole.
Cut = tuple[int, ...] | None


def cuts_of(records: Sequence[Argument] | Sequence[Result]) -> tuple[Cut, ...]:
    """Finds where each array of the caller is cut into flat arguments, or results.

    Example:
        >>> parts = [Result(None, 0, (0, 2)), Result(None, 0, (2, 4)), Result(None, 1)]
        >>> cuts_of(parts)
        ((0, 2, 4), None)
    """
    return tuple(
        None if own[0].rows is None else (0, *(r.rows[1] for r in own if r.rows))
        for _, group in itertools.groupby(records, key=lambda r: r.array)
        if (own := list(group))
    )


@dataclasses.dataclass(frozen=True)
class Bundle:
    """All programs of a step, their computations, and the step's arguments and results.

    Where a rank is a mesh of its own, `inside` is that mesh without its devices; constants are
    whole on it. `notes` are what a reader of the programs should know, a line each.
    """

    programs: tuple[Program, ...]
    computations: tuple[Computation, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    inside: AbstractMesh | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self):
        return f"{type(self).__name__}({self.summary})"

    @property
    def summary(self) -> str:
        """The numbers of ranks, instructions and computations, as a line."""
        instructions = sum(len(p.instructions) for p in self.programs)
        return (
            f"{counted(len(self.programs), 'rank')}: {counted(instructions, 'instruction')}, "
            f"{counted(len(self.computations), 'computation')}"
        )

    @functools.cached_property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step consumes."""
        return tuple(n for n, a in enumerate(self.arguments) if a.donated)

    def as_text(self) -> str:
        """Writes the programs as text, one instruction a line."""
        lines = [f"note: {note}" for note in self.notes]
        for program in self.programs:
            stages = ", ".join(map(str, program.stages))
            lines.append(f"rank {program.rank} (stages {stages}):")
            lines.extend(f"  {self._line(i)}" for i in program.instructions)
        return "\n".join(lines)

    def _line(self, instruction: Instruction) -> str:
        match instruction:
            case Run(number, inputs, outputs, label):
                own = self.computations[number]
                shown = " ".join(
                    f"{s}!" if i in own.donated else f"{s}" for i, s in enumerate(inputs)
                )
                return f"run {label} ({own.name}): {shown} -> {_join(outputs)}"
            case Send(slots, message):
                return f"send {_join(slots)} to rank {message.target}: {_what(message)}"
            case Receive(slots, message):
                return f"receive {_join(slots)} from rank {message.source}: {_what(message)}"
            case Free(slots):
                return f"free {_join(slots)}"
            case Wait(slots):
                return f"wait for {_join(slots)}"


def counted(number: int, what: str) -> str:
    """Counts things.

    Example:
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {what}{'s'[: number != 1]}"


def _join(slots: Sequence[int]) -> str:
    return " ".join(map(str, slots))


def _what(message: Message) -> str:
    return ", ".join(
        f"{kind} {name} {aval.str_short()}"
        for kind, name, aval in zip(message.kinds, message.names, message.avals, strict=True)
    )


class LoadedStep(Protocol):
    """A step on a mesh."""

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the step on its flat arguments."""
        ...

    def input_shardings(self) -> list[Any]:
        """Returns the sharding with which it reads each argument; None for one it does not read."""
        ...

    def inspect(self) -> Sequence[Any]:
        """Returns for each rank its devices, its axes, and XLA's analysis of what it runs."""
        ...

    def describe(self) -> Any:
        """Tells what each rank holds, sends and reduces: a `jaxpp.runtime.Description`."""
        ...


class Mesh(Protocol):
    """Runs programs: one rank for each index of the pipeline axis."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def inside(self) -> AbstractMesh | None:
        """The mesh of each rank without its devices; None where a rank is one device."""
        ...

    def load(self, bundle: Bundle) -> LoadedStep:
        """Compiles a step, and gives the function that runs it on flat arguments."""
        ...


#: The functions that the rooms above give to `place`, by name: `"mesh"` makes the mesh for a number
#: of ranks if `place` is given none, `"mesh_of"` makes it of a shape and devices, `"certify"`
#: proves a lowered step, and `"device"` finds the figures of a device by its name.
PROVIDED: dict[str, Callable[..., Any]] = {}
