"""A setting is all that a plan follows from; a choice is a cut and a placement in it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict

from jaxpp._messages import check_number
from jaxpp.planning.search._layers import Layers, sums
from jaxpp.schedules import (
    Costs,
    Kind,
    Machine,
    Memory,
    Table,
    Task,
    Timeline,
    Windows,
    joined,
    simulate,
)


class Options(TypedDict, total=False):
    """The machine that a plan is for.

    Attributes:
        memory_limit: the bytes that a device of a rank has, for parameters, what goes with them,
            activations, the batch, messages, and what tasks need while they run; by default no
            limit. From costs alone, `plan_layers` counts no batch and no messages.
        state_bytes: the bytes that a rank holds for each byte of parameters: the parameters, their
            gradients and the optimizer's state. Adam has 4, or 5 for bfloat16 parameters, whose
            gradients add up in float32.
        latency: what a message takes whatever its size.
        bandwidth: the bytes of messages that go from one rank to another in a unit of time.
        overhead: the share of a message's time for which it keeps the rank that sends it from its
            tasks; the rank that receives it is kept as long. It is 0 where links work beside
            devices, and up to 0.5 where the cores that run tasks move messages, too.
        speed: the speed of a rank, or of each rank; tasks take their time divided by it.
        replicas: the number of replicas, each with devices and microbatches of its own.
        reduction_bandwidth: the bytes of gradients that a device exchanges with its replicas in a
            unit of time, once a step.
        memory_bandwidth: the bytes that an update of the parameters reads or writes in a unit of
            time.
        zero: 1 or 3 where `place(zero1=)` or `place(zero3=)` splits the state over the replicas,
            each on devices of its own; `state_bytes` count the whole state. The plan then chooses
            windows of `Gather` and `Reduce`, too. By default 0.
    """

    memory_limit: float
    state_bytes: float
    latency: float
    bandwidth: float
    overhead: float
    speed: float | Sequence[float]
    replicas: int
    reduction_bandwidth: float
    memory_bandwidth: float
    zero: int


@dataclasses.dataclass(frozen=True)
class Choice(Windows):
    """A cut, the placement of its stages, the form of backwards, and what stages keep.

    Args:
        cuts: the first layer of each stage, and the number of layers.
        placement: for each direction, the rank of each stage.
        halves: whether backwards are run as their halves.
        ways: for each stage, what becomes of its activations before its backward: they are kept,
            `""`, computed again, `"R"`, or in the memory of the host meanwhile, `"O"`; by default
            all are kept.
        ahead: how many tasks ahead they are loaded from there, as in `jaxpp.schedules.Offload`.
        fuse: which tasks become one computation, as for `jaxpp.place(fuse=)`.
        held: see `jaxpp.schedules.Windows`; with None each task gathers what it reads itself.
        reduces: see `jaxpp.schedules.Windows`.
    """

    cuts: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    halves: bool = True
    ways: tuple[str, ...] = ()
    ahead: int = 1
    fuse: Literal["none", "pairs", "chains"] = "none"

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) - 1

    @property
    def units(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(b - a for a, b in itertools.pairwise(self.cuts))

    def stages_that(self, way: str) -> list[int]:
        """Returns the stages whose activations are computed again, `"R"`, or offloaded, `"O"`."""
        return [stage for stage, own in enumerate(self.ways) if own == way]


#: The kinds of number of a plan, those of all records of a machine.
_NUMBERS = {
    "an integer of at least 1": ("ranks", "microbatches", "replicas", "steps", "tries"),
    "an integer": ("seed",),
    "a positive number": ("memory_limit", "bandwidth", "reduction_bandwidth", "memory_bandwidth"),
    "a finite number of at least 0": ("state_bytes", "latency"),
    "a share from 0 to 0.5": ("overhead",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The machine of a plan, and the steps of a program: see `jaxpp.planning.PlanOptions`.

    A record of it has the number of `ranks`, too.
    """

    memory_limit: float = math.inf
    state_bytes: float = 4.0
    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0
    speed: float | Sequence[float] = 1.0
    replicas: int = 1
    reduction_bandwidth: float = math.inf
    memory_bandwidth: float = math.inf
    steps: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        given, ranks = vars(self), vars(self)["ranks"]
        for kind, names in _NUMBERS.items():
            for name in (name for name in names if name in given):
                check_number("plan", name, given[name], kind)
        speed = self.speed
        speeds = tuple(speed) if isinstance(speed, Iterable) else (speed,) * ranks
        for rank, own in enumerate(speeds):
            check_number("plan", f"speed of rank {rank}", own, "a positive number")
        object.__setattr__(self, "speed", tuple(map(float, speeds)))
        if self.zero not in (0, 1, 3):
            raise ValueError(
                f"plan: zero is 0, 1 or 3, got {self.zero!r}; ZeRO-2 is zero=1 with "
                f"schedules.Reduce, which a plan with zero=1 tries."
            )
        if self.zero and self.steps > 1:
            raise ValueError(
                f"plan: steps={self.steps} is for state that is not split, got zero={self.zero}; "
                f"leave one of them out."
            )
        if self.zero and self.replicas == 1:
            raise ValueError(
                f"plan: zero={self.zero} splits state over replicas; give replicas=, the number of "
                f"devices on the axis that splits it."
            )
        if len(speeds) != ranks:
            raise ValueError(
                f"plan: speed is one number or one for each rank, got {len(speeds)} for {ranks} "
                f"ranks."
            )

    @property
    def machine(self) -> dict[str, Any]:
        """The fields of the machine, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Ranks)}

    @functools.cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each rank."""
        assert isinstance(self.speed, tuple)
        return self.speed


@dataclasses.dataclass(frozen=True)
class Setting(Ranks):
    """Layers, and the machine that they are to run on; for the other fields see `Options`.

    Args:
        layers: the costs of the layers.
        ranks: the number of ranks.
        microbatches: their number.
        is_fed: whether nobody reads the gradient of what a stage is fed that reads no other one, as
            the first: all of its backward is its weight gradient.
        unit: the unit of times, such as `"s"`.
        batch: for each argument that is sliced, its bytes in a microbatch, and the layers that read
            it. Where it is given, a rank holds its batch, and messages, beside activations.
        fusing: what a step gains by each task that is in one computation with the one before it.
    """

    layers: Layers
    ranks: int
    microbatches: int
    is_fed: bool = dataclasses.field(default=False, kw_only=True)
    unit: str = dataclasses.field(default="", kw_only=True)
    batch: tuple[tuple[float, tuple[int, ...]], ...] = dataclasses.field(default=(), kw_only=True)
    fusing: float = dataclasses.field(default=0.0, kw_only=True)

    @functools.cached_property
    def sums(self) -> dict[str, list[float]]:
        """For each field of the layers, the sums of the first ones."""
        layers = self.layers
        return {
            name: sums(getattr(layers, name) or (0.0,) * layers.count)
            for name in ("forward", "input_grad", "weight_grad", "activation_bytes",
                         "parameter_bytes", "copy")
        } | {
            "backward": sums(layers.parts(False)[1]),
            "whole": sums(layers.work(False)),
            "halves": sums(layers.work(bool(layers.input_grad))),
        }  # fmt: skip

    @functools.cached_property
    def before(self) -> list[float]:
        """For each layer the time of the forwards of all that it waits for, by the longest way."""
        if not self.layers.inputs:
            return self.sums["forward"]
        found: list[float] = []
        for own in self.layers.inputs:
            found.append(max((found[n] + self.layers.forward[n] for n in own), default=0.0))
        return found

    def of_stages(self, name: str, choice: Choice) -> list[float]:
        """Returns for each stage what its layers have together of a field."""
        totals, cuts = self.sums[name], choice.cuts
        return [totals[b] - totals[a] for a, b in itertools.pairwise(cuts)]

    def times(self, choice: Choice) -> tuple[list[float], list[float], list[float]]:
        """Returns for stages the times of forwards, of what the stage before awaits, of the rest.

        A message keeps the ranks at both ends from their tasks for its overhead; it is the same for
        both directions.
        """
        forward = self.of_stages("forward", choice)
        first = self.of_stages("input_grad" if choice.halves else "backward", choice)
        rest = self.of_stages("weight_grad", choice) if choice.halves else [0.0] * len(forward)
        if self.overhead:
            around = [0.0] * len(forward)
            hops = itertools.pairwise(choice.placement[0])
            for n, ((a, b), edge) in enumerate(zip(hops, self.edges(choice), strict=True)):
                kept = self.overhead * (self.latency + edge / self.bandwidth) if a != b else 0.0
                around[n] += kept
                around[n + 1] += kept
            forward, first = (
                [a + b for a, b in zip(own, around, strict=True)] for own in (forward, first)
            )
        if self.is_fed and choice.halves:
            for stage in (s for s, own in enumerate(self.graph(choice)) if not own):
                first[stage], rest[stage] = 0.0, first[stage] + rest[stage]
        if self.zero == 3 and choice.held is None:  # each task gathers what it reads
            gathers = self.collective(choice)
            forward, first, rest = (
                [a + b if a else a for a, b in zip(own, gathers, strict=True)]
                for own in (forward, first, rest)
            )
        return forward, first, rest

    def described(self, choice: Choice) -> list[str]:
        """Says in lines which windows of gathers and reductions a choice has, if it has some."""
        held = f"of {choice.held} of a rank's stages at once" if choice.held else "before each task"
        gathers = f"gathered: parameters {'by each task' if choice.held is None else held}"
        when = "after the last backward of a stage" if choice.reduces else "after all tasks"
        return [gathers] * (self.zero == 3) + [f"reduced: gradients {when}"] * (self.zero > 0)

    def collective(self, choice: Choice) -> list[float]:
        """Returns for each stage the time to gather its parameters, or to scatter its sums."""
        other = (self.replicas - 1) / self.replicas / self.reduction_bandwidth
        return [other * own for own in self.of_stages("parameter_bytes", choice)]

    def graph(self, choice: Choice) -> tuple[tuple[int, ...], ...]:
        """Returns for each stage the stages that it reads from."""
        if not self.layers.inputs:
            return tuple((s - 1,) if s else () for s in range(choice.num_stages))
        stage_of = [s for s, count in enumerate(choice.units) for _ in range(count)]
        read: list[set[int]] = [set() for _ in choice.units]
        for layer, own in enumerate(self.layers.inputs):
            read[stage_of[layer]].update(stage_of[source] for source in own)
        return tuple(tuple(sorted(own - {s})) for s, own in enumerate(read))

    def edges(self, choice: Choice) -> list[float]:
        """Returns the bytes that go from each stage, but the last, to the next one."""
        crossing = self.layers.crossing
        return [crossing[cut - 1] if crossing else 0.0 for cut in choice.cuts[1:-1]]

    def delays(self, choice: Choice) -> list[float]:
        """Returns the time of a message from each stage, but the last, beside its overhead."""
        beside = 1 - 2 * self.overhead
        return [beside * (self.latency + edge / self.bandwidth) for edge in self.edges(choice)]

    def parameters(self, choice: Choice) -> list[float]:
        """Returns the bytes of parameters that each rank holds, each copy for itself."""
        held = [0.0] * self.ranks
        own = self.of_stages("parameter_bytes", choice)
        for stage, ranks in enumerate(zip(*choice.placement, strict=True)):
            for rank in set(ranks):
                held[rank] += own[stage]
        return held

    def resident(self, choice: Choice) -> list[float]:
        """Returns what each rank holds all the time, and its largest task while it runs."""
        copies = self.copies(choice.reduces)
        held = [copies * own for own in self.parameters(choice)]
        by_each = self.zero == 3 and choice.held is None
        whole = self.of_stages("parameter_bytes", choice)
        temporary = self.layers.temporary_bytes or (0.0,) * self.layers.count
        largest = [0.0] * self.ranks
        for ranks in choice.placement:
            for (a, b), rank, own in zip(
                itertools.pairwise(choice.cuts), ranks, whole, strict=True
            ):
                largest[rank] = max(largest[rank], by_each * own + max(temporary[a:b]))
        fed = self.fed(choice) if self.batch else [0.0] * self.ranks
        return list(map(sum, zip(held, largest, fed, strict=True)))

    def fed(self, choice: Choice) -> list[float]:
        """Returns the bytes of each rank's batch, and of the messages that wait for its tasks.

        A rank has its batch as it is given, and in microbatches. For each of its stages that reads
        from another rank, or that another one reads, a message is read, and one more waits.
        """
        stage_of = [s for s, count in enumerate(choice.units) for _ in range(count)]
        edges, graph = [*self.edges(choice), 0.0], self.graph(choice)
        held = [0.0] * self.ranks
        for ranks in choice.placement:
            for nbytes, layers in self.batch:
                for rank in {ranks[stage_of[layer]] for layer in layers}:
                    held[rank] += 2 * self.microbatches * nbytes
            for stage, sources in enumerate(graph):
                for source in sources if self.batch else ():
                    if ranks[source] != ranks[stage]:
                        held[ranks[stage]] += 2 * edges[source]
                        held[ranks[source]] += 2 * edges[source]
        return held

    def copies(self, reduces: bool) -> float:
        """Returns what a rank holds all the time for each byte of parameters.

        Of parameters, sums of gradients and the optimizer's state a device holds its part, or all.
        """
        whole = self.one_step.state_bytes
        parts = max(0.0, whole - 2.0) if self.zero else 0.0
        parts += (self.zero == 3) + (reduces and self.zero > 0)
        return max(0.0, whole - parts) + parts / self.replicas

    def update(self, choice: Choice) -> tuple[list[float], list[float]]:
        """Returns for each rank two times after its tasks: to add up gradients, and to update.

        Gradients are added up where two ranks have a stage, and with replicas, in a ring (Patarasuk
        and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009). An update reads all
        of the state, and writes all but gradients.
        """
        added, updated = [0.0] * self.ranks, [0.0] * self.ranks
        if not self.layers.parameter_bytes:
            return added, updated
        own = self.of_stages("parameter_bytes", choice)
        for stage, ranks in enumerate(zip(*choice.placement, strict=True)):
            for rank in set(ranks) if len(set(ranks)) > 1 else ():
                added[rank] += own[stage] / self.bandwidth
                updated[rank] += self.latency
        for rank, (held, speed) in enumerate(
            zip(self.parameters(choice), self.speeds, strict=True)
        ):
            added[rank] += self.reduction_seconds(held, choice.reduces)
            updated[rank] += self.update_seconds(held) / speed
        return added, updated

    def reduction_seconds(self, parameter_bytes: float, reduced: bool = False) -> float:
        """Returns the time in which replicas add up gradients of so many bytes, after the tasks.

        They send them twice round a ring, the second time as parameters with ZeRO-1, and once with
        ZeRO-3. Tasks may have done the first round.
        """
        rounds = (1 if self.zero == 3 else 2) - (reduced and self.zero > 0)
        sent = rounds * parameter_bytes * (self.replicas - 1) / self.replicas
        return sent / self.reduction_bandwidth

    def update_seconds(self, parameter_bytes: float) -> float:
        """Returns the time of an update on a rank of speed 1."""
        own = parameter_bytes / self.replicas if self.zero else parameter_bytes
        return max(0.0, 2 * self.state_bytes - 1) * own / self.memory_bandwidth

    def costs(self, choice: Choice) -> Costs:
        """Returns the costs of the stages, for `simulate`."""
        has_halves = bool(self.layers.input_grad)
        whole = dataclasses.replace(choice, halves=False)
        forward, first, rest = self.times(dataclasses.replace(choice, halves=has_halves))
        edges, beside = [*self.edges(choice), 0.0], 1 - 2 * self.overhead
        back = [max([0.0, *map(edges.__getitem__, own)]) for own in self.graph(choice)]

        def sent(task: Task) -> float:
            return edges[task.stage] if task.kind is Kind.F else back[task.stage]

        copies = tuple(self.of_stages("copy", choice)) if self.layers.copy else math.inf
        backward = tuple(self.times(whole)[1]) if has_halves and self.layers.backward else None
        moved = tuple(self.collective(choice))
        return Costs(
            tuple(forward), tuple(first), tuple(rest), backward,
            latency=beside * self.latency,
            bandwidth=self.bandwidth / beside if beside else math.inf,
            edge_bytes=sent, offload=copies, load=copies, gather=moved, reduce=moved, per="stage",
            unit=self.unit,
        )  # fmt: skip

    def memory(self, choice: Choice) -> Memory:
        """Returns what the tasks hold, for `simulate`."""
        kept = self.of_stages("activation_bytes", choice)
        # A stage that computes again keeps its input; the first one's is the batch.
        inputs = (0.0, *self.edges(choice))
        again = tuple(max(0.0, k - i) for k, i in zip(kept, inputs, strict=True))
        freed = tuple(-own for own in kept)
        whole = tuple(self.of_stages("parameter_bytes", choice))
        # The rest of the sums is there all the time.
        others = tuple(own * (self.replicas - 1) / self.replicas for own in whole)
        return Memory(
            tuple(kept), 0.0, freed, recompute=again, gather=whole, reduce=others, per="stage"
        )

    @functools.cached_property
    def one_step(self) -> "Setting":
        """The setting of a step alone, with what ranks hold where several are in one program."""
        if self.steps == 1:
            return self
        batch = tuple((self.steps * nbytes, layers) for nbytes, layers in self.batch)
        return dataclasses.replace(self, steps=1, state_bytes=self.state_bytes + 2, batch=batch)

    def time_of(self, timeline: Timeline, choice: Choice) -> float:
        """Returns the time of a step; each one of several is followed by its update."""
        after = max(map(sum, zip(*self.update(choice), strict=True)))
        return (timeline.makespan + (self.steps - 1) * after) / self.steps

    def timeline(self, table: Table, choice: Choice) -> Timeline:
        """Simulates all steps of a table; the tasks of a pair run one after the other."""
        added, updated = self.update(choice)
        machine = Machine(
            speed=self.speeds,
            resident=tuple(self.resident(choice)),
            gradient_bytes=tuple(added),  # two kinds of links: these are times
            reduction_bandwidth=1.0,
            optimizer=tuple(updated),
        )
        table = dataclasses.replace(table, stage_inputs=self.graph(choice))
        table = joined(table, self.steps) if self.steps > 1 else table
        costs, memory = self.costs(choice), self.memory(choice)
        if fused := table.fused(choice.fuse):

            def of(task: Task, whole: Costs = costs) -> float:
                return max(0.0, whole.of(task) - self.fusing * (task in fused))

            costs = dataclasses.replace(costs, **{kind.field: of for kind in map(Kind, "FBIWR")})  # pyright: ignore
        overlap = "none" if choice.fuse == "none" else "atomic"
        return simulate(table, costs, memory=memory, machine=machine, overlap=overlap)
