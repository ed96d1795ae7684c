"""Places the equations around the loops: which stage computes what, in which segment.

Placement is by stage, not by rank, so that the same segments run (and compile, and round) whatever
the number of ranks. An equation runs where its largest pinned operand lives. A variable is pinned
if it derives from a loop's results, or from an argument that a loop reads. The rest (step counters,
optimizer state before it meets a gradient) is computed wherever it is needed.

An effect (a print, a callback) happens once, where the largest value that it reads is. All ordered
effects of a step are on one rank, in their order.

A segment is a set of equations of one place, one phase and one level that runs as one computation.
The phase is the loop that the segment comes before; the level counts the transfers before it.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp.transforms._step import Step
from jaxpp.transforms.place import _conditionals
from jaxpp.transforms.stages import is_stage_call, stage_of_call
from jaxpp.transforms.tasks import LoopTasks, is_loop, operand_stages, result_stages

Place = frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Equations that one place runs as one computation; `part.outputs` may be read elsewhere."""

    place: Place
    part: _jaxprs.Part
    label: str


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A scheduled loop, with the variables of its operands and results.

    `carries` are the first accumulators, and `ys` are buffers for the results. Segments before the
    loop make them anew every step, since the loop consumes them.
    """

    eqn: Any
    tasks: LoopTasks
    consts: tuple[Any, ...]
    xs: tuple[Any, ...]
    carries: tuple[Any, ...]
    ys: tuple[Any, ...]
    carry_outs: tuple[Any, ...]
    y_outs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Segments and loops in an order in which they can run, and the places of the flat arguments.

    `homes` has the place of each argument, `final` each result with its place, and `directions` for
    each direction the ranks of the stages.
    """

    steps: tuple[Segment | Loop, ...]
    homes: dict[Any, Place]
    final: tuple[tuple[Any, Place], ...]
    directions: tuple[tuple[int, ...], ...]


def place_equations(step: Step) -> Placement:
    """Places the equations of a step.

    Raises:
        ValueError: if its loops disagree on the stages or on their ranks.
    """
    return _Placer(step).placement()


#: Stands for what an ordered effect hands on to the next one.
_ORDER = object()


def _size(var) -> int:
    return getattr(var.aval, "size", 1)


class _Placer:
    """One run of the placement; its attributes are the facts gathered so far."""

    def __init__(self, step: Step):
        self.step = step
        self.guards = step.guards
        self.jaxpr = step.jaxpr
        self.eqns = self.jaxpr.eqns
        #: For each equation the variables that it reads, with those of its guard.
        self.reads = [
            [
                *_jaxprs.variables(e.invars),
                *dict.fromkeys(v for out in e.outvars for v, _ in self.guards.get(out, ())),
            ]
            for e in self.eqns
        ]
        self.args = list(self.jaxpr.jaxpr.invars)
        self.outs = list(self.jaxpr.jaxpr.outvars)
        self.pairs = step.pairs
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.loops = [i for i, e in enumerate(self.eqns) if is_loop(e)]
        self.tables = {i: self.eqns[i].params["tasks"].table for i in self.loops}
        self.directions = self._directions()
        self.everywhere = frozenset(range(sum(map(len, self.directions))))
        #: The places of pinned variables: arguments of loops, and results of placed equations.
        self.pinned: dict[Any, Place] = {}
        #: The places where loops read variables that are computed there, and the numbers of the
        #: equations that make these variables.
        self.demanded: dict[Any, Place] = {}
        self.in_place: set[int] = set()
        #: The places that need the other arguments.
        self.wanted: dict[Any, Place] = {}
        self.place_of: dict[int, Place] = {}
        #: The equations (loops too) whose effects keep their order, and the stage that runs them.
        self.ordered = [i for i, e in enumerate(self.eqns) if _compat.is_ordered(e)]
        self.ordered_place = self._ordered_place()
        self.phase = self._phases()

    def _directions(self) -> tuple[tuple[int, ...], ...]:
        """Finds for each direction the ranks of the stages; a loop may have only the first ones."""
        found = sorted({self.tables[i].directions for i in self.loops}, key=len)
        for own in found[:-1]:
            if own != found[-1][: len(own)]:
                raise ValueError(
                    f"place: the loops of one step put their stages on different ranks: "
                    f"{own} and {found[-1]}; give them schedules with the same number of stages "
                    f"and the same placement, such as ForwardOnly(like=...) for an evaluation."
                )
        if found:
            return found[-1]
        calls = [c for e in self.eqns if (c := stage_of_call(e)) is not None]
        return (tuple(range(max((n for _, n in calls), default=1))),)

    def _phases(self) -> list[int]:
        """Finds the first loop that needs each equation; the number of loops where none does."""
        last = len(self.loops)
        phase = [last] * len(self.eqns)
        needed: dict[Any, int] = {}
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            after = [_ORDER] if i in self.ordered else []
            own = min((needed.get(v, last) for v in [*eqn.outvars, *after]), default=last)
            if i in self.tables:
                own = min(own, self.loops.index(i))
            phase[i] = own
            for v in [*self.reads[i], *after]:
                needed[v] = min(needed.get(v, last), own)
        for n, i in enumerate(self.loops):  # a loop comes after every loop before it
            phase[i] = n
        return phase

    def _ordered_place(self) -> Place | None:
        """Finds the stage whose tasks have ordered effects; None if no task has any.

        Raises:
            ValueError: if several tasks have ordered effects, or if one has that runs its
                microbatches in another order.
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

        for i in self.ordered:
            if (call := stage_of_call(self.eqns[i])) is not None:
                note(f"stage {call[0]}", call[0], self.eqns[i], ())
            elif i in self.tables:
                for body in self.eqns[i].params["tasks"].bodies:
                    for e in filter(_compat.is_ordered, body.jaxpr.eqns):
                        for rank in self.tables[i].ranks:
                            own = [t for t in rank if (t.kind, t.stage) == (body.kind, body.stage)]
                            note(body.name, body.stage, e, [t.microbatch for t in own])
        return frozenset(found.values()) or None

    def placement(self) -> Placement:
        self._pin_loop_arguments()
        order = sorted(range(len(self.eqns)), key=lambda i: (self.phase[i], i in self.tables, i))
        for i in order:
            self._place(i)
        self._settle_effects()
        self._settle_outputs()
        levels = self._levels(order)
        steps: list[Segment | Loop] = []
        for phase in range(len(self.loops) + 1):
            label = "prepare" if phase < len(self.loops) else "update"
            keys = sorted(
                {
                    (levels[i], tuple(sorted(self.place_of[i])))
                    for i in self.place_of
                    if self.phase[i] == phase and i not in self.tables
                }
            )
            for level, place in keys:
                members = [
                    i
                    for i in sorted(self.place_of)
                    if self.phase[i] == phase
                    and i not in self.tables
                    and levels[i] == level
                    and tuple(sorted(self.place_of[i])) == place
                ]
                steps.append(self._segment(frozenset(place), members, label))
            if phase < len(self.loops):
                steps.extend(self._loop(self.loops[phase]))
        homes = {v: self.pinned.get(v) or self.wanted.get(v) or frozenset() for v in self.args}
        for v in self.outs:
            if v in homes and not homes[v]:  # an argument that is only handed back
                homes[v] = frozenset({0})
        final = []
        for n, v in enumerate(self.outs):
            home = homes[v] if v in homes else self.pinned[v]
            state = homes[self.args[self.pairs[n]]] if n in self.pairs else None
            final.append((v, state or home))
        return Placement(tuple(steps), homes, tuple(final), self.directions)

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
                i = self.maker.get(var)
                if i is None:
                    self.pinned[var] = known | place
                elif _is_computed_once(self.eqns[i]) or _reduces_to_scalar(self.eqns[i]):
                    continue
                else:
                    self.in_place.add(i)
                    stack.extend(self.reads[i])
                self.demanded[var] = known | place

        for i, eqn in enumerate(self.eqns):
            if i in self.tables:
                for var, place in operand_stages(eqn).items():
                    demand(var, place)
            elif (call := stage_of_call(eqn)) is not None:
                for var in eqn.invars:
                    demand(var, frozenset({call[0]}))

    def _place(self, i: int) -> None:
        eqn = self.eqns[i]
        if i in self.tables:
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
            i = self.maker.get(var)
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
        if i in self.ordered:
            place = self.ordered_place = self.ordered_place or place
        self._pin(i, frozenset({min(place)}))

    def _settle_effects(self) -> None:
        """Pins each effect that reads no placed value: to the place that wants its arguments."""
        settled = self.place_of.keys() | self.tables.keys()
        left = [i for i, e in enumerate(self.eqns) if e.effects and i not in settled]
        if left:
            self._collect_wanted()
        for i in left:
            roots = [r for v in _jaxprs.variables(self.eqns[i].invars) for r in self._roots(v)]
            found = (p for r in roots if (p := self.pinned.get(r) or self.wanted.get(r)))
            self._pin_effect(i, next(found, frozenset({0})))

    def _roots(self, var) -> list[Any]:
        """Finds the arguments that an unplaced variable is computed from, largest first."""
        if var not in self.maker:
            return [var]
        keep = _jaxprs.ancestors(self.eqns[: self.maker[var] + 1], [var])
        read = (
            v
            for e, k in zip(self.eqns, keep, strict=False)
            if k
            for v in _jaxprs.variables(e.invars)
        )
        return sorted(
            (v for v in dict.fromkeys(read) if v not in self.maker), key=lambda v: -_size(v)
        )

    def _home(self, var) -> Place | None:
        """Gives the place of a pinned variable, or of one that a loop demands; None for others."""
        return self.pinned.get(var) or self.demanded.get(var)

    def _settle_outputs(self) -> None:
        """Places each unplaced result with the argument that it becomes, or is made from."""
        self._collect_wanted()
        for n, var in enumerate(self.outs):
            if _jaxprs.is_literal(var) or var in self.pinned or var not in self.maker:
                continue
            place = None
            if n in self.pairs:
                arg = self.args[self.pairs[n]]
                place = self.pinned.get(arg) or self.wanted.get(arg)
            if not place:
                roots = self._roots(var)
                place = next(
                    (p for r in roots if (p := self.pinned.get(r) or self.wanted.get(r))), None
                )
            self._pin(self.maker[var], place or frozenset({0}))
            self._collect_wanted()

    def _collect_wanted(self) -> None:
        self.visited: set[tuple[Any, Place]] = set()
        for i, place in self.place_of.items():
            for var in self.reads[i]:
                self._want(var, place)
        for i in self.loops:
            for var, place in operand_stages(self.eqns[i]).items():
                self._want(var, place)

    def _want(self, var, place: Place) -> None:
        stack = [var]
        while stack:
            var = stack.pop()
            if var in self.pinned or (var, place) in self.visited:
                continue
            self.visited.add((var, place))
            if var in self.maker:
                stack.extend(self.reads[self.maker[var]])
            else:
                self.wanted[var] = self.wanted.get(var, frozenset()) | place

    def _levels(self, order: Sequence[int]) -> dict[int, int]:
        """Gives each placed equation a level: the last that its consumers in its phase allow."""
        level: dict[int, int] = {}
        consumers: dict[int, list[int]] = {}
        for i in order:
            if i not in self.place_of:
                continue
            level[i] = 0
            for j in self._placed_sources(i):
                if self.phase[j] == self.phase[i]:
                    apart = self.place_of[j] != self.place_of[i]
                    level[i] = max(level[i], level[j] + apart)
                    consumers.setdefault(j, []).append(i)
        last: dict[tuple[int, Place], int] = {}
        for i, n in level.items():
            key = (self.phase[i], self.place_of[i])
            last[key] = max(last.get(key, 0), n)
        for i in reversed([i for i in order if i in level]):
            if i in consumers:
                level[i] = min(
                    level[c] - (self.place_of[c] != self.place_of[i]) for c in consumers[i]
                )
            else:
                level[i] = last[self.phase[i], self.place_of[i]]
        return level

    def _placed_sources(self, i: int) -> set[int]:
        """Finds the placed equations that an equation reads, directly or through unplaced ones."""
        found = {j for j in self.ordered if i in self.ordered and j in self.place_of and j < i}
        stack = list(self.reads[i])
        seen = set()
        while stack:
            var = stack.pop()
            if var in seen or var not in self.maker:
                continue
            seen.add(var)
            j = self.maker[var]
            if j in self.place_of:
                found.add(j)
            elif j not in self.tables:
                stack.extend(self.reads[j])
        return found

    def _segment(self, place: Place, members: Sequence[int], label: str) -> Segment:
        """Makes a segment of placed equations, with the unplaced ones that they need."""
        read = self._read_outside(set(members))
        outputs = [v for i in members for v in self.eqns[i].outvars if v in read]
        eqns = self._equations(self._with_unplaced(members), outputs)
        return Segment(place, _jaxprs.part(eqns, outputs), label)

    def _equations(self, numbers: Iterable[int], outputs: Collection[Any]) -> list[Any]:
        """Gives equations in order and under their guards; `outputs` are those that are read."""
        eqns = [self.eqns[i] for i in sorted(numbers)]
        return _conditionals.close_conditionals(eqns, outputs, self.guards)

    def _read_outside(self, members: set[int]) -> set[Any]:
        read = set(_jaxprs.variables(self.outs))
        for i, own in enumerate(self.reads):
            if i not in members:
                read.update(own)
        return read

    def _with_unplaced(self, members: Iterable[int]) -> set[int]:
        included = set(members)
        stack = [v for i in included for v in self.reads[i]]
        while stack:
            var = stack.pop()
            i = self.maker.get(var)
            if i is None or i in included or i in self.place_of or i in self.tables:
                continue
            included.add(i)
            stack.extend(self.reads[i])
        return included

    def _loop(self, i: int) -> list[Segment | Loop]:
        """Gives a loop, after the segments that make its operands where the loop reads them."""
        eqn = self.eqns[i]
        tasks: LoopTasks = eqn.params["tasks"]
        places = operand_stages(eqn)
        nc, nk = tasks.num_consts, tasks.num_carry
        segments: list[Segment | Loop] = []
        # Unplaced operands are computed where they are read, by one segment for each place.
        by_place: dict[Place, list[Any]] = {}
        for var in dict.fromkeys(_jaxprs.variables([*eqn.invars[:nc], *eqn.invars[nc + nk :]])):
            if var in places and var in self.maker and var not in self.pinned:
                by_place.setdefault(places[var], []).append(var)
        for place, variables in by_place.items():
            eqns = self._equations(self._with_unplaced(self.maker[v] for v in variables), variables)
            segments.append(Segment(place, _jaxprs.part(eqns, variables), "prepare"))
        # Literal operands, and the first accumulators, are made anew by each stage.
        carries = list(eqn.invars[nc : nc + nk])
        ys: list[Any] = [None] * tasks.num_ys
        starts: dict[int, list[tuple[Any, Any]]] = {}
        for body in tasks.bodies:
            for ref in body.outputs:
                if ref.source == "carry":
                    fresh = _jaxprs.fresh_var(eqn.outvars[ref.index])
                    starts.setdefault(body.stage, []).append((carries[ref.index], fresh))
                    carries[ref.index] = fresh
                elif ref.source == "y":
                    out = eqn.outvars[nk + ref.index]
                    ys[ref.index] = _jaxprs.fresh_var(out)
                    starts.setdefault(body.stage, []).append((None, ys[ref.index]))
        for stage in sorted(starts):
            segments.append(self._start(frozenset({stage}), starts[stage]))
        loop = Loop(
            eqn,
            tasks,
            tuple(eqn.invars[:nc]),
            tuple(eqn.invars[nc + nk :]),
            tuple(carries),
            tuple(ys),
            tuple(eqn.outvars[:nk]),
            tuple(eqn.outvars[nk:]),
        )
        return [*segments, loop]

    def _start(self, place: Place, pairs: Sequence[tuple[Any, Any]]) -> Segment:
        """Makes the first accumulators of a stage; each has memory of its own."""
        needed = [v for v, _ in pairs if v is not None and not _jaxprs.is_literal(v)]
        makers = [self.maker[v] for v in needed if v in self.maker and v not in self.pinned]
        eqns = self._equations(self._with_unplaced(makers), needed)
        seen: set[Any] = set()
        local = {v for e in eqns for v in e.outvars}
        rename = _jaxprs.Substitution()
        extra = []
        for source, target in pairs:
            if source is None:
                extra.extend(
                    _jaxprs.splice(lambda a=target.aval: jnp.zeros(a.shape, a.dtype), [], [target])
                )
            elif _jaxprs.is_literal(source) or source not in local or source in seen:
                extra.extend(
                    _jaxprs.splice(lambda x: jax.lax.optimization_barrier(x), [source], [target])
                )
            else:
                seen.add(source)
                rename.of[source] = target
        eqns = [rename.rename(e).replace(outvars=[rename(v) for v in e.outvars]) for e in eqns]
        extra = [rename.rename(e) for e in extra]
        part = _jaxprs.part([*eqns, *extra], [t for _, t in pairs])
        return Segment(place, part, "start")


def _is_computed_once(eqn) -> bool:
    """Tells whether an equation is never repeated on the ranks that read its results."""
    return bool(eqn.effects) or is_stage_call(eqn)


def _reduces_to_scalar(eqn) -> bool:
    return all(_size(v) == 1 for v in eqn.outvars) and any(
        _size(v) > 1 for v in _jaxprs.variables(eqn.invars)
    )
