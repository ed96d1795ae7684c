"""Places the equations around the loops: which stage computes what.

Placement is by stage, not by rank, so that the same segments run (and compile, and round) whatever
the number of ranks. An equation runs where its largest pinned operand lives. A variable is pinned
if it derives from a loop's results, or from an argument that a loop reads. The rest (step counters,
optimizer state before it meets a gradient) is computed wherever it is needed.

An effect (a print, a callback) happens once, where the largest value that it reads is. All ordered
effects of a step are on one rank, in their order.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp.transforms._step import Step
from jaxpp.transforms.place._equations import Equations, Place
from jaxpp.transforms.place._segments import outline
from jaxpp.transforms.stages import is_stage_call, stage_of_call
from jaxpp.transforms.tasks import is_loop, operand_stages, result_stages


def place_equations(step: Step) -> Step:
    """Gives arguments, results and equations their stages; the step is then segments and loops.

    Raises:
        ValueError: if several tasks have effects whose order counts.
    """
    placer = _Placer(step)
    placer.place()
    return outline(placer.settled(), placer.equations)


def _size(var) -> int:
    return getattr(var.aval, "size", 1)


class _Placer:
    """Finds the places of equations and variables."""

    def __init__(self, step: Step):
        self.step = step
        self.equations = Equations(step)
        self.eqns = self.equations.all
        self.loops = self.equations.loops
        self.args = list(step.jaxpr.jaxpr.invars)
        self.number = {v: n for n, v in enumerate(self.args)}
        self.outs = list(step.jaxpr.jaxpr.outvars)
        self.place_of = self.equations.place_of
        #: The places of arguments that loops read, and of the results of placed equations.
        self.pinned: dict[Any, Place] = {}
        #: The places where loops read variables that are computed there, and the numbers of the
        #: equations that make these variables.
        self.demanded: dict[Any, Place] = {}
        self.in_place: set[int] = set()
        #: The places that need the other arguments.
        self.wanted: dict[Any, Place] = {}
        self.ordered_place = _ordered_place(self.equations)

    def place(self) -> None:
        """Places the equations, in an order in which they can run."""
        self._pin_loop_arguments()
        for i in self.equations.order:
            self._place(i)
        by_place: dict[Place, list[Any]] = {}
        for i, place in self.place_of.items():
            by_place.setdefault(place, []).extend(self.equations.reads[i])
        for i in self.loops:
            for var, place in operand_stages(self.eqns[i]).items():
                by_place.setdefault(place, []).append(var)
        for place, variables in by_place.items():
            self._want(variables, place)
        self._settle_effects()
        self._settle_outputs()

    def settled(self) -> Step:
        """Gives the step with the stages of its arguments and results."""
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
            dataclasses.replace(own, stages=homes[v])
            for v, own in zip(self.args, self.step.arguments, strict=True)
        )
        return dataclasses.replace(self.step, arguments=arguments, results=tuple(results))

    def _argument_place(self, var) -> Place | None:
        return self.pinned.get(var) or self.wanted.get(var)

    def _pin_loop_arguments(self) -> None:
        """Pins the arguments that loops read, directly or through equations computed in place."""
        depends = _jaxprs.descendants(
            self.eqns, [v for i in self.loops for v in self.eqns[i].outvars]
        )

        def demand(var, place):
            stack = _jaxprs.variables([var])
            while stack:
                var = stack.pop()
                known = self.demanded.get(var, frozenset())
                if place <= known or var in depends:
                    continue
                i = self.equations.maker.get(var)
                if i is None:
                    self.pinned[var] = known | place
                elif _is_computed_once(self.eqns[i]) or _reduces_to_scalar(self.eqns[i]):
                    continue
                else:
                    self.in_place.add(i)
                    stack.extend(self.equations.reads[i])
                self.demanded[var] = known | place

        for eqn in self.eqns:
            if is_loop(eqn):
                for var, place in operand_stages(eqn).items():
                    demand(var, place)
            elif (call := stage_of_call(eqn)) is not None:
                for var in eqn.invars:
                    demand(var, frozenset({call[0]}))

    def _place(self, i: int) -> None:
        eqn = self.eqns[i]
        if is_loop(eqn):
            self.pinned.update(zip(eqn.outvars, result_stages(eqn), strict=True))
            return
        if (call := stage_of_call(eqn)) is not None:
            self._pin(i, frozenset({call[0]}))
            return
        if i in self.in_place or any(self.step.fact(v).anywhere for v in eqn.outvars):
            return
        candidates = [(v, p) for v in _jaxprs.variables(eqn.invars) if (p := self._home(v))]
        if not candidates:
            return
        if eqn.effects:
            self._pin_effect(i, max(candidates, key=lambda c: _size(c[0]))[1])
            return
        if any(self.step.fact(v).gathered for v in eqn.outvars):
            self._pin(i, frozenset().union(*(p for _, p in candidates)))
            return
        largest = max(_size(v) for v, _ in candidates)
        places = [p for v, p in candidates if _size(v) == largest]
        if largest > 1:
            # Equally large arrays of several stages (the parts of a shared gradient) are combined
            # on all of them.
            self._pin(i, frozenset().union(*places))
            self._widen(eqn, self.place_of[i])
        elif max(map(_size, eqn.outvars)) <= len(candidates):
            self._pin(i, places[0])
        # Else scalars reach an array that is free (a frozen parameter's gradient), and go to it.

    def _widen(self, eqn, place: Place) -> None:
        """Computes the arrays that an equation reads on all of its place, from loops' results on.

        So ranks send the parts of a shared gradient, and not sums or updates of the parts.
        """
        stack = _jaxprs.variables(eqn.invars)
        while stack:
            var = stack.pop()
            i = self.equations.maker.get(var)
            if i not in self.place_of or _size(var) == 1 or place <= self.place_of[i]:
                continue
            operands = _jaxprs.variables(self.eqns[i].invars)
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
        if i in self.equations.ordered:
            place = self.ordered_place = self.ordered_place or place
        self._pin(i, frozenset({min(place)}))

    def _home(self, var) -> Place | None:
        """Gives the place of a pinned variable, or of one that a loop demands; None for others."""
        return self.pinned.get(var) or self.demanded.get(var)

    def _want(self, variables: Iterable[Any], place: Place) -> None:
        """Notes that a place needs the arguments that some variables are computed from."""
        for var, i in self.equations.behind(variables, self.equations.is_fixed):
            if i is None and var not in self.pinned:
                self.wanted[var] = self.wanted.get(var, frozenset()) | place

    def _settle_effects(self) -> None:
        """Pins each effect that reads no placed value: to the place that wants its arguments."""
        left = [i for i, e in enumerate(self.eqns) if e.effects and not self.equations.is_fixed(i)]
        for i in left:
            self._pin_effect(i, self._place_of_roots(_jaxprs.variables(self.eqns[i].invars)))
        for i in left:
            self._want(self.equations.reads[i], self.place_of[i])

    def _settle_outputs(self) -> None:
        """Places each unplaced result with the argument that it becomes, or is made from."""
        for var, result in zip(self.outs, self.step.results, strict=True):
            if _jaxprs.is_literal(var) or var in self.pinned or var not in self.equations.maker:
                continue
            i, place = self.equations.maker[var], None
            if result.becomes is not None:
                place = self._argument_place(self.args[result.becomes])
            self._pin(i, place or self._place_of_roots([var]))
            self._want(self.equations.reads[i], self.place_of[i])

    def _place_of_roots(self, variables: Sequence[Any]) -> Place:
        """Finds a place for variables: that of the largest argument they are computed from."""
        roots = [v for var in variables for v in self._roots(var)]
        return next((p for v in roots if (p := self._argument_place(v))), frozenset({0}))

    def _roots(self, var) -> list[Any]:
        """Finds the arguments that an unplaced variable is computed from, largest first."""
        found = [v for v, i in self.equations.behind([var], lambda i: False) if i is None]
        return sorted(found, key=lambda v: (-_size(v), self.number[v]))


def _ordered_place(equations: Equations) -> Place | None:
    """Finds the stage whose tasks have ordered effects; None if no task has any.

    Raises:
        ValueError: if several tasks have ordered effects, or if one has that runs its microbatches
            in another order.
    """
    found: dict[str, int] = {}

    def note(name: str, stage: int, eqn: Any, order: Sequence[int]) -> None:
        found[name] = stage
        if len(found) > 1 or list(order) != sorted(order):
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} is in {name} "
                f"and has to keep its order, but a pipeline runs tasks of several microbatches "
                f"and stages side by side. Keep the ordered effects of stages in one task, or "
                f"give them ordered=False."
            )

    for eqn in (equations.all[i] for i in equations.ordered):
        if (call := stage_of_call(eqn)) is not None:
            note(f"stage {call[0]}", call[0], eqn, ())
        elif is_loop(eqn):
            tasks = eqn.params["tasks"]
            for body in tasks.bodies:
                for e in filter(_compat.is_ordered, body.jaxpr.eqns):
                    for rank in tasks.table.ranks:
                        own = [t for t in rank if (t.kind, t.stage) == (body.kind, body.stage)]
                        note(body.name, body.stage, e, [t.microbatch for t in own])
    return frozenset(found.values()) or None


def _is_computed_once(eqn) -> bool:
    """Tells whether an equation is never repeated on the ranks that read its results."""
    return bool(eqn.effects) or is_stage_call(eqn)


def _reduces_to_scalar(eqn) -> bool:
    return all(_size(v) == 1 for v in eqn.outvars) and any(
        _size(v) > 1 for v in _jaxprs.variables(eqn.invars)
    )
