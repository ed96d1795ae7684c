"""Finds which rows of arrays are made, and read, and where: by stages, and by layers."""

from collections.abc import Iterable, Iterator, Sequence

from jaxpp import jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._classes import Classes, row_by_row

#: A variable, rows of it that are made or read, and the stages that do so.
Used = tuple[Var, tuple[int, int], frozenset[int]]


def rows_used(eqns: Sequence[tuple[Eqn, int | None]], classes: Classes) -> list[Used]:
    """Finds the arrays of which stages make rows, and which rows stages read of such arrays.

    Args:
        eqns: equations, each with its stage, or None.
        classes: the classes of their variables.
    """
    used = list(_made(eqns))
    made = {classes.of(v) for v, *_ in used}
    for eqn, stage in eqns:
        if stage is not None and _rows.takes_some_rows(eqn):
            for v in jaxprs.variables(eqn.invars[:1]):
                if classes.of(v) in made and (interval := _rows.slice_interval(eqn)):
                    used.append((v, interval, frozenset({stage})))
    return used


def _made(eqns: Iterable[tuple[Eqn, int | None]]) -> Iterator[Used]:
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
            for v, own in zip(eqn.invars, intervals, strict=True):
                made_by = () if jaxprs.is_literal(v) else (stages[v],)
                yield eqn.outvars[0], own, frozenset(made_by)


def states_of_layers(
    eqns: Sequence[Eqn], state: Var, result: Atom
) -> list[tuple[Var, Atom]] | None:
    """Finds the states of layers whose states are stacked.

    Args:
        eqns: the equations, with all scans cut between their iterations.
        state: an argument.
        result: its next value.

    Returns:
        What stands for each layer's rows of the state, with its next value; None where not each
        layer reads and makes rows of its own.
    """
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    joins, passed, stack = list[Eqn](), set[Var](), jaxprs.variables([result])
    while stack:
        v = stack.pop()
        if v in passed or v not in maker:
            continue
        passed.add(v)
        rule = row_by_row(maker[v])
        if _rows.concatenation_intervals(maker[v]):
            joins.append(maker[v])
        elif rule is not None and (v, True) in rule.made(maker[v].outvars):
            stack += jaxprs.variables(rule.having(maker[v].invars))
        else:
            return None
    cuts = {tuple(_rows.concatenation_intervals(eqn) or ()) for eqn in joins}
    readers = [
        e for e in eqns if state in jaxprs.variables(e.invars) and passed.isdisjoint(e.outvars)
    ]
    read = {_rows.slice_interval(eqn): eqn.outvars[0] for eqn in readers}
    if len(cuts) != 1 or not read.keys() <= {*(intervals := cuts.pop())}:
        return None
    return [
        (read[interval], after)
        for eqn in joins
        for interval, after in zip(intervals, eqn.invars, strict=True)
        if interval in read
    ]
