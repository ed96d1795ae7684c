"""Distributes parameters that are stacked over layers: each stage has its rows of them.

A stacked parameter whose slices the stages of a loop read, its gradients, and what is updated with
them (optimizer state) come apart into parts; each part is then an argument, or a result, of its
own, and is placed with its stage as any other. What needs all rows at once gathers them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _conditionals, _loop, _parts, _rows
from jaxpp.transforms._rows import Bounds


@dataclasses.dataclass(frozen=True)
class Distributed:
    """A step with its stacked arrays in parts.

    `arguments` and `results` have for each of the step as it was where it is cut, None where it is
    whole. `floating` is what is made wherever it is read: parts of arrays that had to be whole, and
    what partial reductions give together. `gathered` are the arrays that were put together, and
    why. `guards` says when the equations of some variables run.
    """

    jaxpr: jex.ClosedJaxpr
    arguments: tuple[Bounds | None, ...]
    results: tuple[Bounds | None, ...]
    floating: frozenset[Any] = frozenset()
    gathered: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    guards: Mapping[Any, _conditionals.Guard] = dataclasses.field(default_factory=dict)

    def flat_arguments(self, numbers: Iterable[int]) -> frozenset[int]:
        """The numbers of the parts of some arguments."""
        own = _numbers(self.arguments)
        return frozenset(i for n in numbers for i in own[n])

    def of_arguments(self, values: Sequence[Any]) -> list[Any]:
        """What is known of arguments as what is known of their parts."""
        return [values[n] for n, own in enumerate(_numbers(self.arguments)) for _ in own]

    def of_results(self, values: Sequence[Any]) -> list[Any]:
        """What is known of results as what is known of their parts."""
        return [values[n] for n, own in enumerate(_numbers(self.results)) for _ in own]

    def flat_pairs(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """Pairs of results and arguments as pairs of their parts."""
        arguments, results = _numbers(self.arguments), _numbers(self.results)
        return {
            out: arg
            for n, m in pairs.items()
            if self.results[n] == self.arguments[m]
            for out, arg in zip(results[n], arguments[m], strict=True)
        }

    def flat_names(self, names: Sequence[str]) -> list[str]:
        """The names of arguments as names of their parts, with the rows."""
        return [
            name + rows
            for name, cut in zip(names, self.arguments, strict=True)
            for rows in ([""] if cut is None else [f"[{a}:{b}]" for a, b in pairwise(cut)])
        ]


def _numbers(cuts: tuple[Bounds | None, ...]) -> list[list[int]]:
    found, start = [], 0
    for bounds in cuts:
        size = 1 if bounds is None else len(bounds) - 1
        found.append(list(range(start, start + size)))
        start += size
    return found


def distribute(
    jaxpr: jex.ClosedJaxpr,
    pairs: Mapping[int, int],
    whole: frozenset[int] = frozenset(),
) -> Distributed:
    """Puts stacked arrays of a step into parts, by what the stages of its loops read and make.

    Args:
        jaxpr: the step, calls inlined.
        pairs: for results that become arguments of the next step, the number of the argument.
        whole: the numbers of arguments that stay whole.
    """
    jaxpr, bounds, guards = _choose(_slice_literals(jaxpr), pairs, whole)
    invars, outvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    if not bounds:
        return Distributed(jaxpr, (None,) * len(invars), (None,) * len(outvars))
    given = {v: _parts.part_vars(v, bounds[v]) for v in invars if v in bounds}
    rules = dict(enumerate(map(_rows.rows_of, jaxpr.eqns)))
    splitter = _parts.Splitter(bounds, rules, given, guards)
    splitter.rewrite(jaxpr.eqns)
    outs, cuts = [], []
    for v in outvars:
        cuts.append(None if _jaxprs.is_literal(v) else bounds.get(v))
        outs.extend([splitter.whole(v)] if cuts[-1] is None else splitter.solid_parts(v, cuts[-1]))
    split = _compat.make_closed_jaxpr(
        [part for v in invars for part in given.get(v, [v])], outs, [e for e, _ in splitter.eqns]
    )
    split = _compat.eliminate_dead_code(split, [True] * len(outs))
    reasons = {
        v: f"for `{eqn.primitive.name}`{_compat.at_source_line(eqn)}"
        for v, (_, eqn) in splitter.gathered.items()
    }
    arguments = tuple(bounds.get(v) for v in invars)
    return Distributed(
        split, arguments, tuple(cuts), frozenset(splitter.floating), reasons, splitter.guards
    )


def _slice_literals(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Takes rows of arrays that the step closes over at once, so that no rank is given the rest."""
    known = _jaxprs.Substitution()
    eqns = []
    for eqn in map(known.rename, jaxpr.eqns):
        if _rows.takes_some_rows(eqn) and _jaxprs.is_literal(eqn.invars[0]):
            (result,) = eqn.outvars
            value = eqn.primitive.bind(_jaxprs.literal_array(eqn.invars[0]), **eqn.params)
            known.of[result] = _jaxprs.literal(value, result.aval)
        else:
            eqns.append(eqn)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)


def _choose(
    jaxpr: jex.ClosedJaxpr,
    pairs: Mapping[int, int],
    whole: frozenset[int],
) -> tuple[jex.ClosedJaxpr, dict[Any, Bounds], dict[Any, _conditionals.Guard]]:
    """Where variables are cut; conditionals over such variables are opened on the way."""
    guards: dict[Any, _conditionals.Guard] = {}
    while True:
        bounds = _bounds(jaxpr, pairs, whole)
        stuck = [
            e
            for e in jaxpr.eqns
            if e.primitive.name == "cond"
            and not e.effects
            and any(v in bounds for v in _jaxprs.variables([*e.invars, *e.outvars]))
        ]
        if not stuck:
            return jaxpr, bounds, guards
        jaxpr, guards = _conditionals.open_conditionals(jaxpr, stuck, guards, [])


def _bounds(
    jaxpr: jex.ClosedJaxpr,
    pairs: Mapping[int, int],
    whole: frozenset[int],
) -> dict[Any, Bounds]:
    eqns, invars, outvars = jaxpr.eqns, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    tied = [(outvars[o], invars[i]) for o, i in pairs.items()]
    classes = _rows.Classes(eqns, tied)
    # For each class, the intervals that stages read or make, and which stages.
    found: dict[Any, dict[tuple[int, int], frozenset[int]]] = {}

    def note(var: Any, interval: tuple[int, int], stages: frozenset[int]) -> None:
        known = found.setdefault(classes.of(var), {})
        known[interval] = known.get(interval, frozenset()) | stages

    readers = _readers(eqns)
    makers = _makers(eqns)
    for eqn in eqns:
        if _rows.takes_some_rows(eqn) and (interval := _rows.slice_interval(eqn)):
            if not _jaxprs.is_literal(eqn.invars[0]) and eqn.outvars[0] in readers:
                note(eqn.invars[0], interval, readers[eqn.outvars[0]])
        elif (intervals := _rows.concatenation_intervals(eqn)) and all(
            v in makers for v in eqn.invars if not _jaxprs.is_literal(v)
        ):
            for v, own in zip(eqn.invars, intervals, strict=True):
                stages = frozenset() if _jaxprs.is_literal(v) else makers[v]
                note(eqn.outvars[0], own, stages)
    stay = {classes.of(invars[n]) for n in whole}
    cuts = {
        own: _parts.merge_bounds(_rows.num_rows(own), intervals)
        for own, intervals in found.items()
        if own not in stay and len(intervals) > 1 and len(set(intervals.values())) > 1
    }
    variables = [*invars, *(v for e in eqns for v in e.outvars)]
    return {v: cuts[own] for v in variables if (own := classes.of(v)) in cuts}


def _makers(eqns) -> dict[Any, frozenset[int]]:
    """The stages of loops that make a variable, or the terms of a sum."""
    makers: dict[Any, frozenset[int]] = {}
    for eqn in eqns:
        read = _jaxprs.variables(eqn.invars)
        if _loop.is_loop(eqn):
            makers.update(zip(eqn.outvars, _loop.result_stages(eqn), strict=True))
        elif eqn.primitive.name == "add" and all(v in makers for v in read):
            makers[eqn.outvars[0]] = frozenset().union(*(makers[v] for v in read))
    return makers


def _readers(eqns) -> dict[Any, frozenset[int]]:
    """The stages of loops that read a variable, directly or through what is made of it."""
    readers: dict[Any, frozenset[int]] = {}
    for eqn in reversed(eqns):
        if _loop.is_loop(eqn):
            for v, stages in _loop.operand_stages(eqn).items():
                readers[v] = readers.get(v, frozenset()) | stages
            continue
        own = frozenset().union(*(readers.get(v, frozenset()) for v in eqn.outvars))
        if own:
            for v in _jaxprs.variables(eqn.invars):
                readers[v] = readers.get(v, frozenset()) | own
    return readers
