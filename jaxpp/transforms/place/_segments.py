"""Outlines the placed equations of a step: each segment becomes one equation.

A segment is a set of equations of one place, one phase and one level that runs as one computation,
and needs the same loops. The phase is the loop that the segment comes before; the level counts the
transfers before it.
Equations that have no place are repeated in each segment that needs them.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, _specs, jaxprs
from jaxpp._program import REDUCTION
from jaxpp.jaxprs import Atom, Eqn, Flow, Var, in_levels, outline
from jaxpp.transforms._step import Fact, Step
from jaxpp.transforms.inside import is_reduction
from jaxpp.transforms.place import _conditionals
from jaxpp.transforms.tasks import ScheduledLoop, is_loop, operand_stages

#: The primitive of a segment; its parameters are its jaxpr, its stages and its label.
segment_p = jex.Primitive("segment")
segment_p.multiple_results = True


def is_segment(eqn) -> bool:
    """Tells whether an equation is a segment."""
    return eqn.primitive is segment_p


#: The stages that run an equation, or read a variable.
Place = frozenset[int]


class Phases(Flow):
    """The equations of a step, which read the variables of their guards, too.

    `loops` has the numbers of the loops; `ordered` those of the equations (loops too) whose effects
    keep their order; `phase` the first loop that needs each equation, the number of loops where
    none does. They can run in the order of `order`: each loop after its phase.
    """

    def __init__(self, step: Step):
        guards = step.guards
        eqns, outputs = step.jaxpr.eqns, step.jaxpr.jaxpr.outvars
        super().__init__(
            eqns, outputs, lambda e: (v for o in e.outvars for v, _ in guards.get(o, ()))
        )
        self.loops = [i for i, e in enumerate(eqns) if is_loop(e)]
        self.ordered = [i for i, e in enumerate(eqns) if _compat.is_ordered(e)]
        number, last = {i: n for n, i in enumerate(self.loops)}, len(self.loops)
        self.phase: dict[int, int] = {}

        def first_loop(i: int, near: list[int]) -> int:
            order = [self.phase[j] for j in self.ordered if j > i] if i in self.ordered else []
            self.phase[i] = min([*near, *order, number.get(i, last)])
            return self.phase[i]

        self.up({}, first_loop, min)
        self.phase |= number  # a loop comes after every loop before it
        self.order = sorted(range(len(eqns)), key=lambda i: (self.phase[i], i in number, i))


def outline_segments(step: Step, flow: Phases, place_of: Mapping[int, Place]) -> Step:
    """Puts placed equations into segments; gives a step of segments and loops alone.

    A loop reads its first accumulators, and after its other operands the buffers of its results,
    from segments that make them anew every step, since the loop consumes them.

    Args:
        step: the step.
        flow: its equations.
        place_of: the places of those that are neither loops nor repeated.
    """
    outliner = _Outliner(step, flow, place_of)
    clusters = itertools.groupby(
        outline(flow, outliner.groups(), fixed=flow.loops), lambda c: c.group[0]
    )
    by_phase = {phase: list(members) for phase, members in clusters}
    for phase in range(len(flow.loops) + 1):
        for cluster in by_phase.get(phase, ()):
            label = "prepare" if phase < len(flow.loops) else "update"
            label = REDUCTION if all(map(is_reduction, cluster.eqns)) else label
            outliner.add(frozenset(cluster.group[2]), cluster.eqns, cluster.outputs, label)
        if phase < len(flow.loops):
            outliner.loop(flow.loops[phase])
    closed = step.jaxpr.jaxpr
    jaxpr = _compat.make_closed_jaxpr(closed.invars, closed.outvars, outliner.eqns)
    return dataclasses.replace(step, jaxpr=jaxpr, facts={**step.facts, **outliner.facts})


class _Outliner:
    """Adds segments and loops in order."""

    def __init__(self, step: Step, flow: Phases, place_of: Mapping[int, Place]):
        self.step = step
        self.flow = flow
        self.place_of = place_of
        self.eqns: list[Eqn] = []
        self.facts: dict[Var, Fact] = {}  # of new variables

    def groups(self) -> dict[int, tuple[int, int, tuple[int, ...]]]:
        """Gives each placed equation its phase, its segment's number in that, and its place."""
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        phase, loops = self.flow.phase, self._loops_needed()
        for n in {phase[i] for i in self.place_of}:
            placed = {i: place for i, place in self.place_of.items() if phase[i] == n}
            sources = {i: self._sources(placed, i) for i in placed}
            levels = in_levels(self.flow, placed, sources.__getitem__)
            members: dict[tuple[int, int, bool, tuple[int, ...]], list[int]] = {}
            for i in sorted(placed):
                key = (loops[i], levels[i], not self._reduces(i), tuple(sorted(placed[i])))
                members.setdefault(key, []).append(i)
            segments = [(place, numbers) for (*_, place), numbers in sorted(members.items())]
            for k, (place, numbers) in enumerate(segments):
                found |= dict.fromkeys(numbers, (n, k, place))
        return found

    def _loops_needed(self) -> dict[int, int]:
        """Finds how many loops have run when the first segment that needs an equation can run.

        So the updates after two loops are two segments, and each has all that it computes. A loop
        that reads what the loop before it makes cannot overlap with it, and counts with it as one.
        """
        number, last = dict[int, int](), 0
        for before, i in zip([None, *self.flow.loops], self.flow.loops, strict=False):
            results = () if before is None else self.flow.eqns[before].outvars
            reached = jaxprs.descendants(self.flow.eqns[:i], results)
            last += reached.isdisjoint(jaxprs.variables(self.flow.eqns[i].invars))
            number[i] = last
        needed: dict[int, int] = {}

        def last_behind(i: int, near: list[int]) -> int:
            order = [needed[j] for j in self.flow.ordered if j < i and i in self.flow.ordered]
            needed[i] = max([1, *near, *order, number.get(i, 1)])
            return needed[i]

        def first_reader(i: int, near: list[int]) -> int:
            needed[i] = max(needed[i], min(near, default=1))
            return needed[i]

        self.flow.down({}, last_behind)
        outputs = jaxprs.variables(self.step.jaxpr.jaxpr.outvars)
        self.flow.up(dict.fromkeys(outputs, 1), first_reader, min)
        return needed

    def _reduces(self, i: int) -> bool:
        """Tells whether an equation combines what replicas made in a loop: a segment of its own."""
        eqn = self.flow.eqns[i]
        return is_reduction(eqn) and self.flow.maker_of(eqn.invars[0]) in self.flow.loops

    def _sources(self, placed: Collection[int], i: int) -> set[int]:
        """Finds the placed equations that one reads, directly or through unplaced ones."""
        walk = self.flow.behind(self.flow.reads[i], self._is_fixed)
        before = [j for j in self.flow.ordered if j < i] if i in self.flow.ordered else []
        return {j for j in [*before, *(j for _, j in walk)] if j in placed}

    def add(self, place: Place, eqns: Sequence[Eqn], outputs: Sequence[Var], label: str) -> None:
        """Adds a segment of equations, which are put under their guards."""
        eqns = _conditionals.close_conditionals(eqns, outputs, self.step.guards)
        self._add(place, eqns, outputs, label)

    def _add(self, place: Place, eqns: Sequence[Eqn], outputs: Sequence[Var], label: str) -> None:
        part = jaxprs.part(eqns, outputs)
        params = {"jaxpr": part.jaxpr, "stages": tuple(sorted(place)), "label": label}
        self.eqns.append(
            eqns[0].replace(
                primitive=segment_p,
                invars=list(part.inputs),
                outvars=list(outputs),
                params=params,
                effects=part.jaxpr.effects,
            )
        )

    def _is_fixed(self, i: int) -> bool:
        return i in self.place_of or i in self.flow.loops

    def _needed(self, variables: Sequence[Var]) -> list[Eqn]:
        """Returns the equations of variables without a place, in order and under their guards."""
        behind = self.flow.behind(variables, self._is_fixed)
        numbers = sorted({i for _, i in behind if i is not None and not self._is_fixed(i)})
        eqns = [self.flow.eqns[i] for i in numbers]
        return _conditionals.close_conditionals(eqns, variables, self.step.guards)

    def _is_free(self, var: Var) -> bool:
        """Tells whether an equation without a place makes a variable."""
        return var in self.flow.maker and not self._is_fixed(self.flow.maker[var])

    # ---- loops ----------------------------------------------------------------------------------

    def loop(self, i: int) -> None:
        """Adds a loop, after the segments that make its operands where the loop reads them."""
        eqn = self.flow.eqns[i]
        loop = ScheduledLoop.of(eqn)
        count = loop.num_carry * loop.num_directions
        carries = slice(loop.num_consts, loop.num_consts + count)
        # Literal operands, and the first accumulators, are made anew by each stage; so are the
        # buffers of results, for which there are no operands yet.
        known = self._make_operands(eqn, carries)
        starts: dict[tuple[int, str], list[tuple[Atom | None, Var]]] = {}
        reduces = any(k.takes for k in loop.table.kinds)
        first: list[Any] = [*eqn.invars[carries], *[None] * (len(eqn.outvars) - count)]
        number = {result: n for n, result in enumerate(loop.results)}
        for direction, task in itertools.product(range(loop.num_directions), loop.tasks):
            kind, stage = task.params["key"]
            # A result that a kind takes, such as `S`, is made apart, later.
            of = loop.stage_number(stage, direction), str(kind) * reduces
            pairs = starts.setdefault(of, [])
            for n in (number[v, direction] for v in task.outvars if (v, direction) in number):
                source, first[n] = first[n], jaxprs.fresh_var(eqn.outvars[n])
                pairs.append((source, first[n]))
        for stage, kind in sorted(filter(starts.get, starts)):
            self._start(frozenset({stage}), starts[stage, kind])
        invars = list(map(known, eqn.invars))
        invars[carries] = first[:count]
        self.eqns.append(eqn.replace(invars=[*invars, *first[count:]]))

    def _make_operands(self, eqn: Eqn, carries: slice) -> jaxprs.Substitution:
        """Computes the operands of a loop that have no place where the loop reads them."""
        known = jaxprs.Substitution()
        places = operand_stages(eqn)
        by_place: dict[Place, list[Var]] = {}
        read = [*eqn.invars[: carries.start], *eqn.invars[carries.stop :]]
        for var in dict.fromkeys(jaxprs.variables(read)):
            if var in places and self._is_free(var):
                by_place.setdefault(places[var], []).append(var)
        for place, variables in by_place.items():
            eqns = self._needed(variables)
            new = {v: jaxprs.fresh_var(v) for v in variables}
            known.of.update(new)
            self.facts |= {new[v]: Fact(whole=self.step.fact(v).whole) for v in new}
            renamed = jaxprs.Substitution(new.items())
            self._add(
                place,
                list(map(renamed.rename_all, eqns)),
                jaxprs.variables(map(renamed, variables)),
                "prepare",
            )
        return known

    def _start(self, place: Place, pairs: Sequence[tuple[Atom | None, Var]]) -> None:
        """Makes the first accumulators of a stage; each has memory of its own."""
        needed = [v for v, _ in pairs if v is not None and not jaxprs.is_literal(v)]
        eqns = self._needed([v for v in needed if self._is_free(v)])
        local = set(jaxprs.results_of(eqns))
        rename = jaxprs.Substitution()
        extra = []
        for source, target in pairs:
            if source is None:
                zeros = lambda a=target.aval: _specs.filled(a, 0)  # noqa: E731
                extra += jaxprs.splice(zeros, [], [target])
            elif jaxprs.is_literal(source) or source not in local or source in rename.of:
                extra += jaxprs.splice(jax.lax.optimization_barrier, [source], [target])
            else:
                rename.of[source] = target
        self._add(
            place, list(map(rename.rename_all, [*eqns, *extra])), [t for _, t in pairs], "start"
        )
