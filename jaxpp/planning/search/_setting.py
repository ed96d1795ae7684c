"""A setting is all that a search follows from; a choice is a cut and a placement in it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from jaxpp.planning.search._layers import Layers, sums
from jaxpp.schedules import Costs, Kind, Machine, Memory, Task


@dataclasses.dataclass(frozen=True)
class Choice:
    """A cut, the placement of its stages, and the form of backwards.

    Args:
        cuts: the first layer of each stage, and the number of layers.
        placement: for each direction, the rank of each stage.
        halves: whether backwards are run as their halves.
    """

    cuts: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    halves: bool = True

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) - 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """Layers, and the machine that they are to run on.

    Args:
        layers: the costs of the layers.
        ranks: the number of ranks.
        microbatches: their number.
        memory_limit: the bytes that a rank has.
        state_bytes: the bytes that a rank holds for each byte of parameters.
        latency: what a message takes whatever its size.
        bandwidth: the bytes that move in a unit of time.
        speed: the speed of each rank.
    """

    layers: Layers
    ranks: int
    microbatches: int
    memory_limit: float = math.inf
    state_bytes: float = 4.0
    latency: float = 0.0
    bandwidth: float = math.inf
    speed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "speed", tuple(self.speed) or (1.0,) * self.ranks)
        positive = {"ranks": self.ranks, "microbatches": self.microbatches,
                    "memory_limit": self.memory_limit, "bandwidth": self.bandwidth,
                    **{f"speed of rank {r}": own for r, own in enumerate(self.speed)}}  # fmt: skip
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(
                    f"plan_layers: the {name} is a positive number, got {value!r}; give one."
                )
        for name in ("state_bytes", "latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"plan_layers: {name} is finite and not negative, got {getattr(self, name)!r}."
                )
        if len(self.speed) != self.ranks:
            raise ValueError(
                f"plan_layers: speed is one number or one for each rank, got {len(self.speed)} "
                f"for {self.ranks} ranks."
            )
        if self.layers.count < self.ranks:
            raise ValueError(
                f"plan_layers: {self.ranks} ranks need as many layers, got {self.layers.count}; "
                f"use fewer ranks."
            )

    @functools.cached_property
    def sums(self) -> dict[bool, tuple[list[float], list[float], list[float]]]:
        """For each form of a backward, the sums of the first layers' times, part by part."""
        return {
            halves: tuple(map(sums, self.layers.parts(halves)))  # pyright: ignore
            for halves in self.layers.forms
        }

    @functools.cached_property
    def activations(self) -> list[float]:
        """The sums of what the first layers keep."""
        return sums(self.layers.activation_bytes or (0.0,) * self.layers.count)

    @functools.cached_property
    def parameters(self) -> list[float]:
        """The sums of the first layers' parameters."""
        return sums(self.layers.parameter_bytes or (0.0,) * self.layers.count)

    def of_stages(self, totals: Sequence[float], choice: Choice) -> list[float]:
        """Returns for each stage what its layers have together, from the sums of the first ones."""
        return [totals[b] - totals[a] for a, b in itertools.pairwise(choice.cuts)]

    def edges(self, choice: Choice) -> list[float]:
        """Returns the bytes that go from each stage, but the last, to the next one."""
        crossing = self.layers.crossing
        return [crossing[cut - 1] if crossing else 0.0 for cut in choice.cuts[1:-1]]

    def delays(self, choice: Choice) -> list[float]:
        """Returns the time of a message from each stage, but the last, to the next one."""
        return [self.latency + edge / self.bandwidth for edge in self.edges(choice)]

    def resident(self, choice: Choice) -> list[float]:
        """Returns what each rank holds all the time."""
        parameters = self.of_stages(self.parameters, choice)
        held = [0.0] * self.ranks
        for stages in choice.placement:
            for rank, own in zip(stages, parameters, strict=True):
                held[rank] += self.state_bytes * own
        return held

    def update(self, choice: Choice) -> list[float]:
        """Returns the time in which each rank sums the gradients of stages that two ranks have."""
        times = [0.0] * self.ranks
        if len(choice.placement) > 1 and self.layers.parameter_bytes:
            parameters = self.of_stages(self.parameters, choice)
            for own, ranks in zip(parameters, zip(*choice.placement, strict=True), strict=True):
                for rank in set(ranks) if len(set(ranks)) > 1 else ():
                    times[rank] += self.latency + own / self.bandwidth
        return times

    def costs(self, choice: Choice) -> Costs:
        """Returns the costs of the stages, for `simulate`."""
        forward, first, rest = (self.of_stages(own, choice) for own in self.sums[choice.halves])
        edges = [*self.edges(choice), 0.0]

        def sent(task: Task) -> float:
            return edges[task.stage] if task.kind is Kind.F else edges[task.stage - 1]

        return Costs(
            tuple(forward), tuple(first), tuple(rest),
            latency=self.latency, bandwidth=self.bandwidth, edge_bytes=sent, per="stage",
        )  # fmt: skip

    def memory(self, choice: Choice) -> Memory:
        """Returns what the tasks hold, for `simulate`."""
        kept = self.of_stages(self.activations, choice)
        return Memory(tuple(kept), 0.0, tuple(-own for own in kept), per="stage")

    def machine(self, choice: Choice) -> Machine:
        """Returns the ranks, for `simulate`."""
        return Machine(
            speed=self.speed,
            resident=tuple(self.resident(choice)),
            optimizer=tuple(self.update(choice)),
        )
