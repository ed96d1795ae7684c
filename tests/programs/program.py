"""A random program as data: what `draw` makes of a seed, what is shrunk, run and printed."""

import dataclasses
from typing import Any

import jaxpp
from tests.programs.operations import Operation, walk

S = jaxpp.schedules

#: By name: the stages on each rank, and the schedule.
SCHEDULES: dict[str, tuple[int, Any]] = {
    "ForwardOnly": (1, S.ForwardOnly()),
    "ForwardOnly2": (2, S.ForwardOnly(2)),
    "GPipe": (1, S.GPipe()),
    "GPipe2": (2, S.GPipe(2)),
    "OneFOneB": (1, S.OneFOneB()),
    "Eager1F1B": (1, S.Eager1F1B()),
    "Interleaved1F1B": (2, S.Interleaved1F1B(2)),
    "InterleavedZeroBubble": (2, S.InterleavedZeroBubble(2)),
    "ZeroBubbleH1": (1, S.ZeroBubbleH1()),
    "ZeroBubbleH2": (1, S.ZeroBubbleH2()),
    "ZeroBubbleV": (2, S.ZeroBubbleV()),
    "VHalf": (2, S.VHalf()),
    "OneFOneBV": (2, S.OneFOneBV()),
    "DualPipe": (1, S.DualPipe()),
    "DualPipeV": (2, S.DualPipeV()),
    "Chimera": (1, S.Chimera()),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage: the stages whose rows it reads (none: the batch), and its lines."""

    reads: tuple[int, ...]
    lines: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """A result of the loss function beside the loss: `kind` says what, `reduce` how it combines."""

    name: str
    kind: str
    reduce: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the step: under which configuration, and how many examples a microbatch has."""

    context: str = "none"
    examples: int = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """A train step, and how it is run."""

    seed: int
    stages: tuple[Stage, ...]
    cuts: str  # "marks", "numbers" or "automatic"
    policy: str | None  # of `wrap_forward`; "outside" is a `jax.checkpoint` around it
    around: str  # what is around the whole forward: "nothing", "jit", "checkpoint"
    params: str  # the pytree of the parameters: "dict", "list", "nested"
    half_weights: bool  # whether some parameters are bfloat16
    loss: str
    penalty: bool  # a penalty on all parameters, in the loss
    place_of_loss: int  # where the loss is among the outputs
    container: str  # of the outputs: "tuple" or "dict"
    outputs: tuple[Output, ...]
    loops: tuple[str, ...]  # "inside" or "outside" for training, "eval"
    optimizer: str
    gradients: bool  # whether the step gives back its gradients
    effects: tuple[str, ...]  # around the loop
    returned: tuple[str, ...]  # what the step gives back beside its state and its results
    jitted: bool  # whether the loops are called under `jax.jit`
    donated: bool
    flat: bool  # whether the state is several arguments
    schedule: str
    ranks: int
    shared: bool  # whether the ranks share a device
    microbatches: int
    calls: tuple[Call, ...]

    @property
    def num_stages(self) -> int:
        return self.ranks * SCHEDULES[self.schedule][0]

    @property
    def weights(self) -> dict[str, str]:
        """The parameters: the kind of each, by name."""
        return {
            op.weight: op.rule.weight for op in self.operations() if op.weight and op.rule.weight
        }

    def operations(self) -> list[Operation]:
        return list(walk(op for stage in self.stages for op in stage.lines))

    def text(self) -> str:
        """The program, to be read."""
        lines = [
            f"# program {self.seed}: {self.schedule}, {self.ranks} ranks"
            f"{' that share a device' if self.shared else ''}, {self.microbatches} microbatches",
            f"params = {self.params} of {self.weights}{', some bfloat16' * self.half_weights}",
            f"def loss(params, data):  # cuts: {self.cuts}, policy: {self.policy}, "
            f"around: {self.around}",
        ]
        for number, stage in enumerate(self.stages):
            read = ", ".join(f"stage{j}" for j in stage.reads) or "data['x']"
            lines.append(f"    # stage {number}\n    h = enter({read})")
            lines += [line for op in stage.lines for line in op.lines("    ")]
        outputs = [f"{o.name}={o.kind}/{o.reduce}" for o in self.outputs]
        outputs.insert(self.place_of_loss, f"loss={self.loss}{' + penalty' * self.penalty}")
        lines.append(f"    return {self.container}({', '.join(outputs)})")
        lines.append(
            f"def step({'*' * self.flat}state, data):  # donated: {self.donated}\n"
            f"    loops: {', '.join(self.loops)}; optimizer: {self.optimizer}; "
            f"returns gradients: {self.gradients}, {', '.join(self.returned) or 'nothing else'}; "
            f"effects: {', '.join(self.effects) or 'none'}{'; loops under jit' * self.jitted}"
        )
        lines.append(
            f"calls: {', '.join(f'{c.examples} examples, {c.context}' for c in self.calls)}"
        )
        return "\n".join(lines)
