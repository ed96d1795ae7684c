"""Outlines the placed equations of a step: each segment becomes one equation.

A segment is a set of equations of one place, one phase and one level that runs as one computation.
The phase is the loop that the segment comes before; the level counts the transfers before it.
Equations that have no place are repeated in each segment that needs them.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp.transforms._step import Step
from jaxpp.transforms.place import _alike, _conditionals
from jaxpp.transforms.place._equations import Equations, Place
from jaxpp.transforms.tasks import LoopTasks, operand_stages

#: The primitive of a segment; its parameters are its jaxpr, its stages and its label.
segment_p = jex.Primitive("segment")
segment_p.multiple_results = True


def is_segment(eqn) -> bool:
    """Tells whether an equation is a segment."""
    return eqn.primitive is segment_p


def outline(step: Step, equations: Equations) -> Step:
    """Puts placed equations into segments; gives a step of segments and loops alone.

    A loop reads its first accumulators, and after its other operands the buffers of its results,
    from segments that make them anew every step, since the loop consumes them.

    Args:
        step: the step.
        equations: its equations, which have places.
    """
    outliner = _Outliner(step, equations)
    for phase in range(len(equations.loops) + 1):
        outliner.segments(phase)
        if phase < len(equations.loops):
            outliner.loop(equations.loops[phase])
    closed = step.jaxpr.jaxpr
    jaxpr = _compat.make_closed_jaxpr(closed.invars, closed.outvars, outliner.eqns)
    return dataclasses.replace(step, jaxpr=jaxpr)


class _Outliner:
    """Adds segments and loops in order."""

    def __init__(self, step: Step, equations: Equations):
        self.step = step
        self.equations = equations
        #: The placed equations that each one reads, directly or through unplaced ones.
        self.sources = {i: _placed_sources(equations, i) for i in equations.place_of}
        self.levels = _levels(equations, self.sources)
        #: The numbers of the equations that read each variable; None stands for the caller.
        self.readers: dict[Any, set[int | None]] = {}
        everything = [*enumerate(equations.reads), (None, step.jaxpr.jaxpr.outvars)]
        for i, read in everything:
            for v in _jaxprs.variables(read):
                self.readers.setdefault(v, set()).add(i)
        self.eqns: list[Any] = []

    def segments(self, phase: int) -> None:
        """Adds the segments of a phase, level after level."""
        label = "prepare" if phase < len(self.equations.loops) else "update"
        members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i in sorted(self.equations.place_of):
            if self.equations.phase[i] == phase:
                key = self.levels[i], tuple(sorted(self.equations.place_of[i]))
                members.setdefault(key, []).append(i)
        parts = [(place, numbers) for (_, place), numbers in sorted(members.items())]
        for place, numbers in self._divided(parts):
            self._add(frozenset(place), *self._part(numbers), label)

    def _divided(self, segments: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
        """Divides large segments of a phase, where stages then share computations."""
        eqns = [self.equations.all[i] for _, numbers in segments for i in numbers]
        if any(e.effects or any(v in self.step.guards for v in e.outvars) for e in eqns):
            return segments

        def like(numbers: Sequence[int]) -> Any:
            eqns = (self.equations.all[i] for i in numbers)
            return tuple((e.primitive, *(v.aval for v in e.outvars)) for e in eqns)

        segments = [(place, part) for place, own in segments for part in self._early(own)]
        return _alike.divide(segments, self.sources.__getitem__, like)

    def _early(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Divides a large segment: what other places wait for comes first."""
        first, own = numbers[0], set(numbers)
        phase, place = self.equations.phase, self.equations.place_of

        def is_waited_for(i: int) -> bool:
            readers = {j for v in self.equations.all[i].outvars for j in self.readers.get(v, ())}
            return any(
                j in place and phase[j] == phase[first] and place[j] != place[first]
                for j in readers
            )

        early: set[int] = set()
        for i in reversed(numbers):
            if i in early or is_waited_for(i):
                early.add(i)
                early.update(own & self.sources[i])
        late = [i for i in numbers if i not in early]
        if not early or len(late) < _alike.WORTH:
            return [numbers]
        return [sorted(early), late]

    def _part(self, numbers: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Gives equations, with those that they need, and the variables that others read."""
        inside = set(numbers)
        outputs = [
            v
            for i in numbers
            for v in self.equations.all[i].outvars
            if not inside.issuperset(self.readers.get(v, ()))
        ]
        return self._needed(numbers, [], outputs), outputs

    def _add(self, place: Place, eqns: Sequence[Any], outputs: Sequence[Any], label: str) -> None:
        part = _jaxprs.part(eqns, outputs)
        params = {"jaxpr": part.jaxpr, "stages": tuple(sorted(place)), "label": label}
        self.eqns.append(
            eqns[0].replace(
                primitive=segment_p,
                invars=list(part.inputs),
                outvars=list(part.outputs),
                params=params,
                effects=part.jaxpr.effects,
            )
        )

    def _needed(
        self, members: Iterable[int], variables: Iterable[Any], outputs: Collection[Any]
    ) -> list[Any]:
        """Gives equations in order and under their guards.

        Args:
            members: the numbers of placed equations.
            variables: variables without a place, which these equations are to make, too.
            outputs: the variables that are read outside.
        """
        starts = [*variables, *(v for i in members for v in self.equations.reads[i])]
        numbers = set(members).union(
            i
            for _, i in self.equations.behind(starts, self.equations.is_fixed)
            if i is not None and not self.equations.is_fixed(i)
        )
        eqns = [self.equations.all[i] for i in sorted(numbers)]
        return _conditionals.close_conditionals(eqns, outputs, self.step.guards)

    def _is_free(self, var: Any) -> bool:
        """Tells whether an equation without a place makes a variable."""
        return var in self.equations.maker and not self.equations.is_fixed(
            self.equations.maker[var]
        )

    # ---- loops ----------------------------------------------------------------------------------

    def loop(self, i: int) -> None:
        """Adds a loop, after the segments that make its operands where the loop reads them."""
        eqn = self.equations.all[i]
        tasks: LoopTasks = eqn.params["tasks"]
        carries = slice(tasks.num_consts, tasks.num_consts + tasks.num_carry)
        known = self._make_operands(eqn, carries)
        invars = list(map(known, eqn.invars))
        invars[carries] = eqn.invars[carries]
        buffers: list[Any] = [None] * tasks.num_ys
        # Literal operands, and the first accumulators, are made anew by each stage.
        starts: dict[int, list[tuple[Any, Any]]] = {}
        for body in tasks.bodies:
            for ref in body.outputs:
                source = None
                if ref.source == "carry":
                    n = carries.start + ref.index
                    source, invars[n] = invars[n], _jaxprs.fresh_var(eqn.outvars[ref.index])
                    target = invars[n]
                elif ref.source == "y":
                    target = _jaxprs.fresh_var(eqn.outvars[tasks.num_carry + ref.index])
                    buffers[ref.index] = target
                else:
                    continue
                starts.setdefault(body.stage, []).append((source, target))
        for stage in sorted(starts):
            self._start(frozenset({stage}), starts[stage])
        self.eqns.append(eqn.replace(invars=[*invars, *buffers]))

    def _make_operands(self, eqn: Any, carries: slice) -> _jaxprs.Substitution:
        """Computes the operands of a loop that have no place where the loop reads them."""
        known = _jaxprs.Substitution()
        places = operand_stages(eqn)
        by_place: dict[Place, list[Any]] = {}
        read = [*eqn.invars[: carries.start], *eqn.invars[carries.stop :]]
        for var in dict.fromkeys(_jaxprs.variables(read)):
            if var in places and self._is_free(var):
                by_place.setdefault(places[var], []).append(var)
        for place, variables in by_place.items():
            eqns = self._needed([], variables, variables)
            made = _jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in variables)
            known.of.update(made.of)
            self._add(place, _renamed(eqns, made), list(map(made, variables)), "prepare")
        return known

    def _start(self, place: Place, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Makes the first accumulators of a stage; each has memory of its own."""
        needed = [v for v, _ in pairs if v is not None and not _jaxprs.is_literal(v)]
        eqns = self._needed([], [v for v in needed if self._is_free(v)], needed)
        local = {v for e in eqns for v in e.outvars}
        rename = _jaxprs.Substitution()
        extra = []
        for source, target in pairs:
            if source is None:
                zeros = lambda a=target.aval: jnp.zeros(a.shape, a.dtype)  # noqa: E731
                extra += _jaxprs.splice(zeros, [], [target])
            elif _jaxprs.is_literal(source) or source not in local or source in rename.of:
                extra += _jaxprs.splice(jax.lax.optimization_barrier, [source], [target])
            else:
                rename.of[source] = target
        self._add(place, _renamed([*eqns, *extra], rename), [t for _, t in pairs], "start")


def _renamed(eqns: Iterable[Any], known: _jaxprs.Substitution) -> list[Any]:
    """Renames what equations read and make."""
    return [known.rename(e).replace(outvars=[known(v) for v in e.outvars]) for e in eqns]


def _levels(equations: Equations, sources: Mapping[int, set[int]]) -> dict[int, int]:
    """Gives each placed equation a level: the last that its consumers in its phase allow."""
    level: dict[int, int] = {}
    consumers: dict[int, list[int]] = {}
    phase, place_of = equations.phase, equations.place_of
    order = [i for i in equations.order if i in place_of]
    for i in order:
        level[i] = 0
        for j in sources[i]:
            if phase[j] == phase[i]:
                apart = place_of[j] != place_of[i]
                level[i] = max(level[i], level[j] + apart)
                consumers.setdefault(j, []).append(i)
    last: dict[tuple[int, Place], int] = {}
    for i, n in level.items():
        key = (phase[i], place_of[i])
        last[key] = max(last.get(key, 0), n)
    for i in reversed(order):
        level[i] = min(
            (level[c] - (place_of[c] != place_of[i]) for c in consumers.get(i, ())),
            default=last[phase[i], place_of[i]],
        )
    return level


def _placed_sources(equations: Equations, i: int) -> set[int]:
    """Finds the placed equations that an equation reads, directly or through unplaced ones."""
    ordered = equations.ordered if i in equations.ordered else []
    walk = equations.behind(equations.reads[i], equations.is_fixed)
    found = [*(j for j in ordered if j < i), *(j for _, j in walk)]
    return equations.place_of.keys() & found
