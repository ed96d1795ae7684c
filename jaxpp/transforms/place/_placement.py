"""Places the equations around the loops: which stage computes what.

Placement is by stage, not by rank, so that the same segments run (and compile, and round) whatever
the number of ranks. An equation runs where its largest pinned operand lives. A variable is pinned
if it derives from a loop's results, or from an argument that a loop reads. The rest (step counters,
optimizer state before it meets a gradient) is computed wherever it is needed.

An effect (a print, a callback) happens once, where the largest value that it reads is. All ordered
effects of a step are on one rank, in their order.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn, Var, union
from jaxpp.transforms._step import Step
from jaxpp.transforms.place._segments import Phases, Place, outline_segments
from jaxpp.transforms.stages import is_stage_call, stage_of_call
from jaxpp.transforms.tasks import ScheduledLoop, is_loop, operand_stages, result_stages


def place_equations(step: Step) -> Step:
    """Gives arguments, results and equations their stages; the step is then segments and loops.

    Raises:
        ValueError: if several tasks have effects whose order counts.
    """
    placer = _Placer(step)
    placer.place()
    return outline_segments(placer.settled(), placer.flow, placer.place_of)


def _size(var) -> int:
    return getattr(var.aval, "size", 1)


class _Placer:
    """Finds the places of equations and variables."""

    def __init__(self, step: Step):
        self.step = step
        self.flow = Phases(step)
        self.eqns = self.flow.eqns
        self.args = list(step.jaxpr.jaxpr.invars)
        self.number = {v: n for n, v in enumerate(self.args)}
        self.outs = list(step.jaxpr.jaxpr.outvars)
        #: The places that run each equation, but for loops and what is repeated where it is read.
        self.place_of: dict[int, Place] = {}
        #: The places of loops, and of stages outside of them, that read variables computed there.
        self.demanded = self._demanded()
        #: The places of arguments that loops read, and of the results of placed equations.
        self.pinned = {v: p for v, p in self.demanded.items() if v not in self.flow.maker}
        #: The places that need the other arguments.
        self.wanted: dict[Var, Place] = {}
        self.ordered_place = _ordered_place(self.flow)

    def place(self) -> None:
        """Places the equations, in an order in which they can run."""
        for i in self.flow.order:
            self._place(i)
        self._want(self.flow.up({}, self._reader_places))
        self._settle_effects()
        self._settle_outputs()

    def _demanded(self) -> dict[Var, Place]:
        """Finds where loops read what depends on no loop, directly or through other equations."""
        results = [v for i in self.flow.loops for v in self.eqns[i].outvars]
        depends = jaxprs.descendants(self.eqns, results)

        def is_repeated(i: int) -> bool:
            eqn = self.eqns[i]
            return not (_is_computed_once(eqn) or _reduces_to_scalar(eqn) or is_loop(eqn)) and (
                depends.isdisjoint(eqn.outvars)
            )

        def rule(i: int, near: list[Place]) -> Place | dict[Var, Place] | None:
            if (places := _reading_stages(self.eqns[i])) is not None:
                return places
            return union(near) if near and is_repeated(i) else None

        found = self.flow.up({}, rule)
        makers = ((v, self.flow.maker.get(v)) for v in found)
        return {
            v: found[v] for v, i in makers if v not in depends and (i is None or is_repeated(i))
        }

    def _reader_places(self, i: int, near: list[Place]) -> Place | dict[Var, Place] | None:
        """Finds the places that read an equation's operands."""
        if is_loop(self.eqns[i]):
            return operand_stages(self.eqns[i])
        return self.place_of.get(i) or (union(near) if near else None)

    def settled(self) -> Step:
        """Returns the step with the stages of its arguments and results."""
        homes = {v: self._argument_place(v) or frozenset() for v in self.args}
        for v in self.outs:
            if v in homes and not homes[v]:  # an argument that is only handed back
                homes[v] = frozenset({0})
        results = []
        for v, result in zip(self.outs, self.step.results, strict=True):
            home = homes[v] if v in homes else self.pinned[v]
            state = None if result.becomes is None else homes[self.args[result.becomes]]
            results.append(dataclasses.replace(result, stages=state or home))
        arguments = tuple(
            dataclasses.replace(argument, stages=homes[v])
            for v, argument in zip(self.args, self.step.arguments, strict=True)
        )
        return dataclasses.replace(self.step, arguments=arguments, results=tuple(results))

    def _argument_place(self, var) -> Place | None:
        return self.pinned.get(var) or self.wanted.get(var)

    def _place(self, i: int) -> None:
        eqn = self.eqns[i]
        if is_loop(eqn):
            self.pinned.update(zip(eqn.outvars, result_stages(eqn), strict=True))
            return
        if (call := stage_of_call(eqn)) is not None:
            self._pin(i, frozenset({call[0]}))
            return
        if any(v in self.demanded or self.step.fact(v).anywhere for v in eqn.outvars):
            return
        candidates = [(v, p) for v in jaxprs.variables(eqn.invars) if (p := self._home(v))]
        if not candidates:
            return
        if eqn.effects:
            self._pin_effect(i, max(candidates, key=lambda c: _size(c[0]))[1])
            return
        if any(self.step.fact(v).gathered for v in eqn.outvars):
            self._pin(i, union(p for _, p in candidates))
            return
        largest = max(_size(v) for v, _ in candidates)
        places = [p for v, p in candidates if _size(v) == largest]
        if largest > 1:
            # Equally large arrays of several stages (the parts of a shared gradient) are combined
            # on all of them.
            self._pin(i, union(places))
            self._widen(eqn, self.place_of[i])
        elif max(map(_size, eqn.outvars)) <= len(candidates):
            self._pin(i, places[0])
        # Else scalars reach an array that is free (a frozen parameter's gradient), and go to it.

    def _widen(self, eqn, place: Place) -> None:
        """Computes the arrays that an equation reads on all of its place, from loops' results on.

        So ranks send the parts of a shared gradient, and not sums or updates of the parts.
        """
        stack = jaxprs.variables(eqn.invars)
        while stack:
            var = stack.pop()
            i = self.flow.maker.get(var)
            if i not in self.place_of or _size(var) == 1 or place <= self.place_of[i]:
                continue
            operands = jaxprs.variables(self.eqns[i].invars)
            # A sum makes less to send, and has the same place whatever the number of its addends.
            sums = self.eqns[i].primitive.name == "reduce_sum"
            smaller = sums or any(_size(v) > _size(var) for v in operands)
            if smaller or _is_computed_once(self.eqns[i]):
                continue
            self._pin(i, self.place_of[i] | place)
            stack.extend(operands)

    def _pin(self, i: int, place: Place) -> None:
        self.place_of[i] = place
        self.pinned.update((v, place) for v in self.eqns[i].outvars)

    def _pin_effect(self, i: int, place: Place) -> None:
        """Pins an equation with an effect to one stage."""
        if i in self.flow.ordered:
            place = self.ordered_place = self.ordered_place or place
        self._pin(i, frozenset({min(place)}))

    def _home(self, var) -> Place | None:
        """Finds the place of a pinned variable, or of one that a loop demands; None for others."""
        return self.pinned.get(var) or self.demanded.get(var)

    def _want(self, places: Mapping[Var, Place]) -> None:
        """Notes the places that need arguments which no loop reads."""
        for var, place in places.items():
            if var not in self.flow.maker and var not in self.pinned:
                self.wanted[var] = self.wanted.get(var, frozenset()) | place

    def _want_at(self, i: int) -> None:
        """Notes that a newly placed equation needs the arguments that it is computed from."""
        behind = self.flow.behind(self.flow.reads[i], self.is_fixed)
        self._want({v: self.place_of[i] for v, _ in behind})

    def is_fixed(self, i: int) -> bool:
        """Tells whether an equation has a place, or is a loop."""
        return i in self.place_of or i in self.flow.loops

    def _settle_effects(self) -> None:
        """Pins each effect that reads no placed value: to the place that wants its arguments."""
        left = [i for i, e in enumerate(self.eqns) if e.effects and not self.is_fixed(i)]
        for i in left:
            self._pin_effect(i, self._place_of_roots(jaxprs.variables(self.eqns[i].invars)))
        for i in left:
            self._want_at(i)

    def _settle_outputs(self) -> None:
        """Places each unplaced result with the argument that it becomes, or is made from."""
        for var, result in zip(self.outs, self.step.results, strict=True):
            if jaxprs.is_literal(var) or var in self.pinned or var not in self.flow.maker:
                continue
            i, place = self.flow.maker[var], None
            if result.becomes is not None:
                place = self._argument_place(self.args[result.becomes])
            self._pin(i, place or self._place_of_roots([var]))
            self._want_at(i)

    def _place_of_roots(self, variables: Sequence[Var]) -> Place:
        """Finds a place for variables: that of the largest argument they are computed from."""
        roots = [v for var in variables for v in self._roots(var)]
        return next((p for v in roots if (p := self._argument_place(v))), frozenset({0}))

    def _roots(self, var: Var) -> list[Var]:
        """Finds the arguments that an unplaced variable is computed from, largest first."""
        found = [v for v, i in self.flow.behind([var]) if i is None]
        return sorted(found, key=lambda v: (-_size(v), self.number[v]))


def _ordered_place(flow: Phases) -> Place | None:
    """Finds the stage whose tasks have ordered effects; None if no task has any.

    Raises:
        ValueError: if several tasks have ordered effects, or if one has that runs its microbatches
            in another order.
    """
    found: dict[str, int] = {}

    def note(name: str, stage: int, eqn: Eqn, order: Sequence[int]) -> None:
        found[name] = stage
        if len(found) > 1 or list(order) != sorted(order):
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} is in {name} "
                f"and has to keep its order, but a pipeline runs tasks of several microbatches "
                f"and stages side by side. Keep the ordered effects of stages in one task, or "
                f"give them ordered=False."
            )

    for eqn in (flow.eqns[i] for i in flow.ordered):
        if (call := stage_of_call(eqn)) is not None:
            note(f"stage {call[0]}", call[0], eqn, ())
        elif is_loop(eqn):
            loop = ScheduledLoop.of(eqn)
            for task, d in itertools.product(loop.tasks, range(loop.num_directions)):
                key, stage = task.params["key"], loop.stage_number(task.params["key"].stage, d)
                for e in filter(_compat.is_ordered, task.params["jaxpr"].eqns):
                    for rank in loop.table.ranks:
                        microbatches = [t.microbatch for t in rank if (t.kind, t.stage) == key]
                        note(f"{key.kind}{stage}", stage, e, microbatches)
    return frozenset(found.values()) or None


def _reading_stages(eqn) -> dict[Var, Place] | None:
    """Finds the stages that read the operands of a loop, or of a stage's call; None for others."""
    if is_loop(eqn):
        return operand_stages(eqn)
    call = stage_of_call(eqn)
    return call and dict.fromkeys(jaxprs.variables(eqn.invars), frozenset({call[0]}))


def _is_computed_once(eqn) -> bool:
    """Tells whether an equation is never repeated on the ranks that read its results."""
    return bool(eqn.effects) or is_stage_call(eqn)


def _reduces_to_scalar(eqn) -> bool:
    return all(_size(v) == 1 for v in eqn.outvars) and any(
        _size(v) > 1 for v in jaxprs.variables(eqn.invars)
    )
