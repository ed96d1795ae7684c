"""Finds which arrays are cut alike. Each equation has a rule that joins some; loops have, too.

A scan without carries makes a row in each iteration. A loop that `jax.vmap` made of one for each
layer, such as the iteration of an optimizer (Newton-Schulz), carries all layers at once. It runs
for some layers alone if its body treats each row of what it carries apart.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var, primitives
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._rows import Bounds, Rows, scan_params, scanned


class Classes:
    """The variables in classes; equations join those of a class, so their rows are cut alike."""

    def __init__(self, eqns: Iterable[Eqn], pairs: Iterable[tuple[Atom, Atom]] = ()):
        self._above: dict[Var, Var] = {}
        for eqn in eqns:
            rule = rule_of(eqn)
            self._join([] if rule is None else rule.members(eqn))
            self._join(jaxprs.variables(scanned(eqn)))
        for pair in pairs:
            if len({v.aval.shape for v in pair}) == 1 and _rows.num_rows(pair[0]) >= 0:
                self._join(jaxprs.variables(pair))

    def _join(self, members: Sequence[Var]) -> None:
        for v in members[1:]:
            first, other = self.of(members[0]), self.of(v)
            if first is not other:
                self._above[other] = first

    def of(self, var: Var) -> Var:
        """Returns the variable that stands for the class of a variable."""
        path = []
        while var in self._above:
            path.append(var)
            var = self._above[var]
        for v in path:
            self._above[v] = var
        return var

    def bounds(
        self,
        used: Iterable[tuple[Var, tuple[int, int], frozenset[int]]],
        variables: Iterable[Var],
    ) -> dict[Var, Bounds]:
        """Cuts variables so that each interval of rows that stages use consists of whole parts.

        Args:
            used: variables, the rows of them that are read or made, and the stages that do so.
            variables: those to cut; a class that the same stages use all over stays whole.
        """
        found: dict[Var, dict[tuple[int, int], frozenset[int]]] = {}
        for var, interval, stages in used:
            known = found.setdefault(self.of(var), {})
            known[interval] = known.get(interval, frozenset()) | stages
        cuts = {
            member: tuple(sorted({0, _rows.num_rows(member)}.union(*intervals)))
            for member, intervals in found.items()
            if len(set(intervals.values())) > 1
        }
        return {v: cuts[first] for v in variables if (first := self.of(v)) in cuts}


# ---- rules --------------------------------------------------------------------------------------


def rule_of(eqn: Eqn) -> Rows | None:
    """Returns the rule of an equation; None where all rows have to be in one place."""
    if eqn.primitive.name not in ("scan", "while"):
        return _rows.from_dimensions(eqn)
    if eqn.primitive.name == "while" or _compat.scan_parts(eqn)[1]:
        return _carried_rows(eqn)
    num_consts, _ = _compat.scan_parts(eqn)
    operands = tuple(i >= num_consts for i in range(len(eqn.invars)))
    return Rows(operands, params=lambda rows: scan_params(eqn, rows))


def row_by_row(eqn: Eqn) -> Rows | None:
    """Returns the rule of an equation if no row's bits depend on the number of rows; else None."""
    rule = rule_of(eqn)
    if rule is None or rule.combine is not None:
        return None
    # The body of a scan over rows has one row, however many there are.
    body_has_rows = eqn.primitive.name != "scan" or _compat.scan_parts(eqn)[1]
    return None if body_has_rows and jaxprs.contains(eqn, _contracts) else rule


def _contracts(eqn: Eqn) -> bool:
    return eqn.primitive.name in primitives.CONTRACTIONS


# ---- loops that carry rows ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CarryingLoop:
    """A `scan` or a `while`.

    Args:
        eqn: the equation.
        carries: the numbers of the operands that are carried.
        reads: by the parameter of each of its jaxprs, the numbers of the operands that it reads.
        jaxprs: by their parameters, with all calls inlined; the body is the last.
    """

    eqn: Eqn
    carries: range
    reads: Mapping[str, Sequence[int]]
    jaxprs: Mapping[str, jex.ClosedJaxpr]

    @classmethod
    def of(cls, eqn: Eqn) -> "_CarryingLoop":
        operands = range(len(eqn.invars))
        if eqn.primitive.name == "scan":
            num_consts, num_carry = _compat.scan_parts(eqn)
            carries, reads = operands[num_consts:][:num_carry], {"jaxpr": operands}
        else:
            of_test = eqn.params["cond_nconsts"]
            carries = operands[of_test + eqn.params["body_nconsts"] :]
            test = [*operands[:of_test], *carries]
            reads = {"cond_jaxpr": test, "body_jaxpr": operands[of_test:]}
        return cls(eqn, carries, reads, {name: _flat(eqn.params[name]) for name in reads})

    @property
    def eqns(self) -> list[Eqn]:
        return [eqn for jaxpr in self.jaxprs.values() for eqn in jaxpr.eqns]

    def inputs(self, number: int) -> list[Var]:
        """Returns what stands for an operand in the jaxprs."""
        return [
            self.jaxprs[name].jaxpr.invars[numbers.index(number)]
            for name, numbers in self.reads.items()
            if number in numbers
        ]

    def carried(self) -> Iterator[tuple[list[Var], Atom]]:
        """Yields what stands for each carried value, with its next value."""
        *_, body = self.jaxprs.values()
        for number, after in zip(self.carries, body.jaxpr.outvars, strict=False):
            yield self.inputs(number), after

    def tests(self) -> list[Var]:
        """Returns the variables that tell for each row how long it is iterated, if one does."""
        *of_test, _ = [jaxprs.variables(jaxpr.jaxpr.outvars) for jaxpr in self.jaxprs.values()]
        return [v for tested in of_test for v in tested if _rows.num_rows(v) >= 0]

    def whole(self) -> Iterator[Atom]:
        """Yields variables that cannot be in parts by the rows of what is carried."""
        yield from _mixed(self.eqns)
        for before, after in self.carried():
            yield from before if jaxprs.is_literal(after) else ()
        if self.eqn.primitive.name == "scan":
            # These are in iterations, not in rows.
            (body,) = self.jaxprs.values()
            yield from body.jaxpr.invars[self.carries.stop :]
            yield from body.jaxpr.outvars[len(self.carries) :]


def _flat(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return jaxprs.inline(jaxprs.bind_constants(*jaxprs.without_constants(jaxpr)), lambda e: True)


def _mixed(eqns: Iterable[Eqn]) -> Iterator[Var]:
    """Yields the variables of equations but for those whose rows are treated apart."""
    for eqn in eqns:
        rule = None if eqn.effects else rule_of(eqn)
        apart = [] if rule is None or rule.combine is not None else rule.members(eqn)
        if rule is not None and any(map(jaxprs.is_literal, rule.having(eqn.invars))):
            apart = []
        yield from (v for v in jaxprs.variables([*eqn.invars, *eqn.outvars]) if v not in apart)


def _carried_rows(eqn: Eqn) -> Rows | None:
    """Makes the rule of a loop whose body treats each row of what it carries apart."""
    if not any(_rows.num_rows(v) > 1 for v in eqn.outvars):
        return None
    loop = _CarryingLoop.of(eqn)
    operands = [loop.inputs(n) for n in range(len(eqn.invars))]
    pairs = [(v, after) for before, after in loop.carried() for v in before]
    classes = Classes(
        loop.eqns, [*pairs, *((inputs[0], v) for inputs in operands for v in inputs[1:])]
    )
    whole = {classes.of(v) for v in jaxprs.variables(loop.whole())}
    apart = [v for (v, *_), _ in loop.carried() if classes.of(v) not in whole]
    _, rows = max(((v.aval.size, _rows.num_rows(v)) for v in apart), default=(0, 0))
    having = {classes.of(v) for v in apart if _rows.num_rows(v) == rows > 1}
    if not having or not all(classes.of(v) in having for v in loop.tests()):
        return None
    flags = [classes.of(inputs[0]) in having for inputs in operands]

    def params(rows: int) -> dict[str, Any]:
        changed = {
            name: _of_rows(jaxpr, lambda v: classes.of(v) in having, rows)
            for name, jaxpr in loop.jaxprs.items()
        }
        closed = {k: _compat.with_closed_type(j, eqn.params[k]) for k, j in changed.items()}
        return {**eqn.params, **closed}

    results = [flags[n] for n in loop.carries]
    results += [False for _ in eqn.outvars[len(results) :]]
    return Rows(tuple(flags), params, results=tuple(results))


def _of_rows(jaxpr: jex.ClosedJaxpr, has_rows: Callable[[Var], bool], rows: int) -> jex.ClosedJaxpr:
    """Makes a jaxpr of another number of rows of some of its variables."""
    invars = [
        _rows.rows_var(v, rows) if has_rows(v) else jaxprs.fresh_var(v) for v in jaxpr.jaxpr.invars
    ]
    known, eqns = jaxprs.Substitution(zip(jaxpr.jaxpr.invars, invars, strict=True)), []
    for eqn in jaxpr.eqns:
        new, rule = known.rename(eqn), rule_of(eqn)
        if rule is not None and any(map(has_rows, rule.members(eqn))):
            new = _rows.of_rows(eqn, rule, new.invars, rows)
        known.of.update(zip(eqn.outvars, new.outvars, strict=True))
        eqns.append(new)
    return _compat.make_closed_jaxpr(invars, list(map(known, jaxpr.jaxpr.outvars)), eqns)


# ---- which rows are made and read ----------------------------------------------------------------

#: A variable, rows of it that are made or read, and the stages that do so.
Used = tuple[Var, tuple[int, int], frozenset[int]]


def rows_used(eqns: Sequence[tuple[Eqn, int | None]], classes: Classes) -> list[Used]:
    """Finds the arrays of which stages make rows, and which rows stages read of such arrays."""
    used = list(_rows_made(eqns))
    of_stages = {classes.of(v) for v, *_ in used}
    for eqn, stage in eqns:
        if stage is not None and _rows.takes_some_rows(eqn):
            for v in jaxprs.variables(eqn.invars[:1]):
                if classes.of(v) in of_stages and (interval := _rows.slice_interval(eqn)):
                    used.append((v, interval, frozenset({stage})))
    return used


def _rows_made(eqns: Iterable[tuple[Eqn, int | None]]) -> Iterator[Used]:
    """Yields arrays, rows of them that a stage makes, and the stage.

    A stage pads its rows of a gradient with zeros. Of what layers hand on to the next microbatch,
    such as statistics, the rows of all stages are concatenated.
    """
    stages = {v: stage for eqn, stage in eqns for v in eqn.outvars if stage is not None}
    for eqn, stage in eqns:
        interval = _rows.pad_interval(eqn)
        if stage is not None and interval and interval != (0, _rows.num_rows(eqn.outvars[0])):
            yield eqn.outvars[0], interval, frozenset({stage})
        makers = [stages.get(v) for v in jaxprs.variables(eqn.invars)]
        intervals = _rows.concatenation_intervals(eqn)
        if intervals and None not in makers and len(set(makers)) > 1:
            for v, rows in zip(eqn.invars, intervals, strict=True):
                made_by = () if jaxprs.is_literal(v) else (stages[v],)
                yield eqn.outvars[0], rows, frozenset(made_by)
