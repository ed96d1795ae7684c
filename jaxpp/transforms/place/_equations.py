"""A step's equations around its loops, by number: what each reads, and what comes before what."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp.transforms._step import Step
from jaxpp.transforms.tasks import is_loop

#: The stages that run an equation, or read a variable.
Place = frozenset[int]

#: Stands for what an ordered effect hands on to the next one.
_ORDER = object()


class Equations:
    """The equations of a step.

    `reads` has for each the variables that it reads, with those of its guard; `maker` for each
    variable the number of its equation; `loops` the numbers of the loops; `ordered` those of the
    equations (loops too) whose effects keep their order; and `phase` the first loop that needs each
    equation, the number of loops where none does. Placement fills `place_of`: the stages that run
    each equation, but for loops, and for equations that are repeated where they are needed.
    """

    def __init__(self, step: Step):
        self.all = step.jaxpr.eqns
        guards = step.guards
        self.reads = [
            [
                *_jaxprs.variables(e.invars),
                *dict.fromkeys(v for out in e.outvars for v, _ in guards.get(out, ())),
            ]
            for e in self.all
        ]
        self.maker = {v: i for i, e in enumerate(self.all) for v in e.outvars}
        self.loops = [i for i, e in enumerate(self.all) if is_loop(e)]
        self.ordered = [i for i, e in enumerate(self.all) if _compat.is_ordered(e)]
        self.place_of: dict[int, Place] = {}
        self.phase = self._phases()
        #: The order in which placed equations can run: each loop after its phase.
        self.order = sorted(range(len(self.all)), key=lambda i: (self.phase[i], i in self.loops, i))

    def _phases(self) -> list[int]:
        last = len(self.loops)
        phase = [last] * len(self.all)
        needed: dict[Any, int] = {}
        for i in reversed(range(len(self.all))):
            after = [_ORDER] if i in self.ordered else []
            own = min((needed.get(v, last) for v in [*self.all[i].outvars, *after]), default=last)
            if i in self.loops:
                own = min(own, self.loops.index(i))
            phase[i] = own
            for v in [*self.reads[i], *after]:
                needed[v] = min(needed.get(v, last), own)
        for n, i in enumerate(self.loops):  # a loop comes after every loop before it
            phase[i] = n
        return phase

    def is_fixed(self, i: int) -> bool:
        """Tells whether an equation has a place, or is a loop."""
        return i in self.place_of or i in self.loops

    def behind(
        self, variables: Iterable[Any], ends: Callable[[int], bool]
    ) -> Iterator[tuple[Any, int | None]]:
        """Walks back from variables, each with the number of its equation, if one makes it.

        `ends` tells which equations the walk does not go behind.
        """
        stack, seen = list(variables), set()
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            i = self.maker.get(var)
            yield var, i
            if i is not None and not ends(i):
                stack.extend(self.reads[i])
