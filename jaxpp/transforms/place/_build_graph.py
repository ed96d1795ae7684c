"""Builds the graph of a placed step: the tasks of its loops, and the segments around them."""

import itertools
from collections.abc import Hashable, Iterable

from jaxpp import _compat, jaxprs
from jaxpp._program import REDUCTION
from jaxpp.jaxprs import Eqn
from jaxpp.transforms._step import Step
from jaxpp.transforms.graph import Body, GraphTask, GraphValue, TaskGraph
from jaxpp.transforms.place._build_loop import LoopTasks
from jaxpp.transforms.place._segments import is_segment
from jaxpp.transforms.place._values import Values
from jaxpp.transforms.stages import stage_of_call
from jaxpp.transforms.tasks import is_loop


def build(step: Step) -> TaskGraph:
    """Builds the graph of a step whose equations are placed.

    Raises:
        ValueError: if its loops disagree on the stages or on their ranks.
    """
    builder = _StepGraph(step)
    for eqn in step.jaxpr.eqns:
        if id(eqn) not in builder.reduced:
            (builder.segment if is_segment(eqn) else builder.loop)(eqn)
    return builder.graph()


def _directions(eqns: Iterable[Eqn]) -> tuple[tuple[int, ...], ...]:
    """Finds for each direction the ranks of the stages; a loop may have only the first ones."""
    found = sorted({e.params["table"].directions for e in eqns if is_loop(e)}, key=len)
    for ranks in found[:-1]:
        if ranks != found[-1][: len(ranks)]:
            raise ValueError(
                f"place: the loops of one step put their stages on different ranks: "
                f"{ranks} and {found[-1]}; give them schedules with the same number of stages "
                f"and the same placement, such as ForwardOnly(like=...) for an evaluation."
            )
    if found:
        return found[-1]
    inner = [e for eqn in eqns for e in eqn.params["jaxpr"].eqns]
    calls = [c for e in inner if (c := stage_of_call(e)) is not None]
    return (tuple(range(max((n for _, n in calls), default=1))),)


class _StepGraph:
    """Adds tasks in order."""

    def __init__(self, step: Step):
        self.step = step
        self.directions = _directions(step.jaxpr.eqns)
        #: The rank of each stage, in one direction after the other.
        self.ranks_of = [rank for ranks in self.directions for rank in ranks]
        inside = step.jaxpr.jaxpr
        #: For each result that becomes an argument of the next call, the variable of that argument.
        self.before = {inside.outvars[n]: inside.invars[i] for n, i in step.pairs.items()}
        self.values = Values(step)
        self.bodies: dict[Hashable, Body] = {}
        self.tasks: list[GraphTask] = []
        self.loop_number = itertools.count()
        self.stages_before = 0  # of the loops so far
        #: The segments that tasks of a loop do, by their identities.
        self.reduced: set[int] = set()

    def ranks(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks of some stages."""
        return tuple(sorted({self.ranks_of[s] for s in stages}))

    def graph(self) -> TaskGraph:
        """Makes the graph of all tasks added so far."""
        arguments = [self.values.current[v] for v in self.step.jaxpr.jaxpr.invars]
        results = [self.values.current[v] for v in self.step.jaxpr.jaxpr.outvars]

        def with_ranks(values, records):
            ranks = (self.ranks(record.stages) for record in records)
            return tuple(zip(values, ranks, strict=True))

        homes_of = list(zip(*self.directions, strict=True))
        return TaskGraph(
            tuple(self.tasks),
            with_ranks(arguments, self.step.arguments),
            with_ranks(results, self.step.results),
            tuple(
                tuple(s for s, ranks in enumerate(homes_of) if rank in ranks)
                for rank in range(max(self.ranks_of) + 1)
            ),
        )

    def loop(self, eqn: Eqn) -> None:
        """Adds the tasks of a loop."""
        ranks, number = self.ranks_of, next(self.loop_number)
        before, reductions = self.stages_before, self._reductions(eqn)
        loop = LoopTasks(eqn, number, before, ranks, self.values, self.bodies, reductions)
        self.tasks = (
            _late(self.tasks, loop.tasks()) if loop.reductions else [*self.tasks, *loop.tasks()]
        )
        self.stages_before += loop.loop.num_stages

    def _reductions(self, loop: Eqn) -> dict[int, list[Eqn]]:
        """Finds the segments that combine results of a loop, by the stages whose tasks do it."""
        found: dict[int, list[Eqn]] = {}
        table = loop.params["table"]
        stages = {task.stage for task in table.tasks if task.kind.takes}
        for eqn in filter(is_segment, self.step.jaxpr.eqns):
            (stage, *others) = eqn.params["stages"]
            reduces = eqn.params["label"] == REDUCTION and not others
            if reduces and stage % table.num_stages in stages and {*eqn.invars} <= {*loop.outvars}:
                found.setdefault(stage, []).append(eqn)
                self.reduced.add(id(eqn))
        return found

    # ---- segments -------------------------------------------------------------------------------

    def segment(self, eqn: Eqn) -> None:
        """Adds a segment on each rank of its stages."""
        label, stages = eqn.params["label"], eqn.params["stages"]
        maker = {v: e for e in eqn.params["jaxpr"].eqns for v in e.outvars}
        for v in eqn.outvars:
            call = stage_of_call(maker[v]) if v in maker else None
            kind = "gathered" if call is None else "edge"
            self.values.add(v, kind, f"{label} {_origin(maker.get(v))}")
        part, constants = jaxprs.lift_arrays(self._in_pairs(eqn))
        inputs = tuple(map(self.values.operand, [*part.inputs, *constants]))
        outputs = tuple(map(self.values.operand, part.outputs))
        name = f"{label}_{'_'.join(map(str, stages))}"
        key = jaxprs.structure(part.jaxpr)
        if key not in self.bodies:
            self.bodies[key] = Body(name, jaxprs.with_copied_constants(part.jaxpr), None)
        body = self.bodies[key]
        for rank in self.ranks(stages):
            self.tasks.append(GraphTask(rank, body, inputs, outputs, label))

    def _in_pairs(self, eqn: Eqn) -> jaxprs.Part:
        """A segment's jaxpr, in which new values, and the old ones they replace, come first.

        JAX gives the memory of donated inputs to outputs of the same type in their order: so each
        new value takes the place of its own old one, and XLA has nothing to copy.
        """
        inside, read = jaxprs.opened(eqn.params["jaxpr"]), jaxprs.variables(eqn.invars)
        new = [n for n, v in enumerate(eqn.outvars) if self.before.get(v) in read]
        old = list(dict.fromkeys(read.index(self.before[eqn.outvars[n]]) for n in new))
        outputs = [*new, *(n for n in range(len(eqn.outvars)) if n not in new)]
        inputs = [*old, *(n for n in range(len(read)) if n not in old)]
        jaxpr = _compat.make_closed_jaxpr(
            [inside.invars[n] for n in inputs], [inside.outvars[n] for n in outputs], inside.eqns
        )
        return jaxprs.Part(
            jaxpr, tuple(read[n] for n in inputs), tuple(eqn.outvars[n] for n in outputs)
        )


def _late(before: Iterable[GraphTask], tasks: Iterable[GraphTask]) -> list[GraphTask]:
    """Puts what makes the first values of accumulators right before the tasks that read them."""
    order: list[GraphTask] = []
    starts: dict[GraphValue, GraphTask] = {}
    for task in (*before, *tasks):
        if task.label == "start" and not task.inputs:
            starts.update(dict.fromkeys(task.outputs, task))
            continue
        for start in dict.fromkeys(starts[v] for v in task.inputs if v in starts):
            order.append(start)
            for value in start.outputs:
                del starts[value]
        order.append(task)
    return [*order, *dict.fromkeys(starts.values())]


def _origin(eqn) -> str:
    """Says which equation made a value, and where in the user's code."""
    if eqn is None:
        return "value"
    call = stage_of_call(eqn)
    name = eqn.primitive.name if call is None else f"stage {call[0]}"
    return name + _compat.at_source_line(eqn)
