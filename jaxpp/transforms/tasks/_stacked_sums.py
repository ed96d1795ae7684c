"""Accumulates the gradient of a parameter that is stacked over layers in parts, one a stage.

Each stage reads some rows of such a parameter. So differentiation pads each stage's gradient with
zeros, and adds the padded gradients up. With one accumulator for each part, each stage accumulates
its own rows, and nothing else.
"""

import itertools
from typing import Any

import jax

from jaxpp import _jaxprs, _primitives
from jaxpp.transforms.stacked import (
    Bounds,
    Classes,
    Splitter,
    merge_bounds,
    num_rows,
    pad_interval,
    part_vars,
    rows_of,
    takes_some_rows,
)
from jaxpp.transforms.tasks._body import WHOLE, Body


def split_stacked_sums(body: Body) -> Body:
    """Divides a sum over rows that several stages make: the rows of each get an accumulator."""
    body = _open_calls(body)
    bounds = _bounds(body)
    cuts = [bounds.get(v) for v in body.carries]
    if not any(cuts):
        return body
    given = {v: part_vars(v, bounds[v]) for v in body.carries if v in bounds}
    rules = dict(enumerate(map(rows_of, body.eqns)))
    splitter = Splitter(bounds, rules, given)
    splitter.rewrite(body.eqns)
    carries, carry_outs, joins, values = [], [], [], {}
    for carry, out, cut in zip(body.carries, body.carry_outs, cuts, strict=True):
        if cut is None:
            parts, outs, join = [carry], [splitter.whole(out)], WHOLE
        else:
            parts, outs = given[carry], splitter.solid_parts(out, cut)
            join = len(parts), lambda *rows: jax.lax.concatenate(rows, 0)
            for part, rows in zip(parts, itertools.pairwise(cut), strict=True):
                values[part] = jax.lax.slice_in_dim(body.values[carry], *rows)
        carries += parts
        carry_outs += outs
        joins.append(join)
    ys = tuple(splitter.whole(v) for v in body.ys)
    # New equations have no position: they join a task by dependence later.
    placed = [(e, None if n is None else body.position[n]) for e, n in splitter.eqns]
    keep = _jaxprs.ancestors([e for e, _ in placed], (*carry_outs, *ys))
    placed = [p for p, k in zip(placed, keep, strict=True) if k]
    changes = {"carries": tuple(carries), "carry_outs": tuple(carry_outs), "ys": ys}
    return body.divided(placed, joins, values, **changes)


def _bounds(body: Body) -> dict[Any, Bounds]:
    """Finds where carries, and the values added to them, are cut: by what stages pad with zeros."""
    classes = Classes(body.eqns, zip(body.carries, body.carry_outs, strict=True))
    found: dict[Any, dict[tuple[int, int], set[int]]] = {}
    for eqn, position in body.placed():
        interval = pad_interval(eqn)
        if interval is None or position is None:
            continue
        if interval != (0, num_rows(eqn.outvars[0])):
            known = found.setdefault(classes.of(eqn.outvars[0]), {})
            known.setdefault(interval, set()).add(body.stage(position))
    carried = {classes.of(v) for v in body.carries}
    cuts = {
        own: merge_bounds(num_rows(own), intervals)
        for own, intervals in found.items()
        if own in carried and len(intervals) > 1 and len(set().union(*intervals.values())) > 1
    }
    made = (v for e in body.eqns for v in e.outvars)
    variables = [*body.consts, *body.carries, *made]
    return {v: cuts[own] for v in variables if (own := classes.of(v)) in cuts}


def _open_calls(body: Body) -> Body:
    """Opens calls that take rows of an array, or pad rows with zeros.

    A stage that is rematerialised is such a call. Its backward is a program of its own, so that XLA
    cannot merge the recomputation with the forward even if the call is open.
    """

    def touches_rows(eqn) -> bool:
        if eqn.primitive.name in _primitives.CUSTOM_RULES or _jaxprs.called_jaxpr(eqn) is None:
            return False
        for inner in (inner for sub in _jaxprs.sub_jaxprs(eqn) for inner in sub.eqns):
            if takes_some_rows(inner) or pad_interval(inner) or touches_rows(inner):
                return True
        return False

    known = _jaxprs.Substitution()
    placed: list[tuple[Any, int | None]] = []
    for eqn, position in body.placed():
        eqn = known.rename(eqn)
        if not touches_rows(eqn):
            placed.append((eqn, position))
            continue
        opened = _jaxprs.inline(_jaxprs.part([eqn], eqn.outvars).jaxpr, touches_rows)
        placed.extend((e, position) for e in opened.eqns)
        known.of.update(zip(eqn.outvars, opened.jaxpr.outvars, strict=True))
    return body.renamed(placed, known)
