"""Where a program is cut: at named scopes, or by balance."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _balance, _costs, _marks, _modules, _stages

# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(jaxpr: jex.ClosedJaxpr, names: Sequence[str]) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`."""
    flat, sunk = sink_argument_chains(_inline_plain_calls(jaxpr))
    positions = []
    for name in names:
        position = next((i for i, e in enumerate(flat.eqns) if _in_scope(e, name)), None)
        if position is None:
            nested = next((e for e in flat.eqns if _contains_scope(e, name)), None)
            if nested is not None and nested.primitive.name in _jaxprs.CHECKPOINTS:
                position = flat.eqns.index(nested)
                inner = next(_jaxprs.sub_jaxprs(nested)).eqns
                if not _in_scope(inner[0], name):
                    nested, position = inner[0], None
            if position is None and nested is not None:
                raise ValueError(
                    f"The scope {name!r} is inside a `{nested.primitive.name}` at "
                    f"{_compat.source_line(nested)}, whose body is one unit: no cut can be made there."
                )
        if position is None:
            raise ValueError(f"No equation is under jax.named_scope({name!r}); {_modules.known(_scopes(flat))}")
        while position > 0 and flat.eqns[position - 1] in sunk:
            position -= 1
        positions.append(position)
    if positions != sorted(positions):
        order = [n for _, n in sorted(zip(positions, names, strict=True))]
        raise ValueError(f"The cuts {list(names)} are out of order: they run in the order {order}.")
    if len(set(positions)) < len(positions):
        raise ValueError(f"Two of the cuts {list(names)} are at the same equation; drop one of them.")
    return insert_marks(flat, positions, names)


def _scope_path(eqn) -> str:
    return str(eqn.source_info.name_stack)


def _in_scope(eqn, name: str) -> bool:
    return re.search(rf"(^|[/(]){re.escape(name)}($|[/)])", _scope_path(eqn)) is not None


def _contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: _in_scope(e, name))


def _scopes(jaxpr) -> list[str]:
    return list(dict.fromkeys(s for e in jaxpr.eqns if (s := _scope_path(e))))


# ---- balance ------------------------------------------------------------------------------------


def cut_balanced(
    jaxpr: jex.ClosedJaxpr, num_stages: int, cost: _costs.Cost, is_whole: Callable[[str], Any]
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    Equations for whose name stack `is_whole` gives the same key are not cut apart.
    """
    flat, sunk = sink_argument_chains(_inline_plain_calls(jaxpr))
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    free = [not any(v in varying for v in e.outvars) for e in flat.eqns]
    eqns = [e for e, f in zip(flat.eqns, free, strict=True) if not f]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    units = [is_whole(_scope_path(e)) for e in eqns]
    last = {u: i for i, u in enumerate(units) if u is not None}
    open_until = -1
    for i in range(1, len(eqns)):
        open_until = max(open_until, last.get(units[i - 1], -1))
        if eqns[i - 1] in sunk or i <= open_until:
            crossing[i] = float("inf")
    try:
        cuts = _balance.balanced_cuts([cost(e) for e in eqns], crossing, num_stages)
    except ValueError as error:
        raise ValueError(f"split_stages: {error}") from None
    index = {id(e): i for i, e in enumerate(flat.eqns)}
    return insert_marks(flat, [index[id(eqns[c])] for c in cuts], [None] * len(cuts))


def _crossing_bytes(jaxpr, eqns) -> list[float]:
    """For each position, the bytes of the values made before it and read from it on."""
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    change = [0.0] * (len(eqns) + 2)
    for var, i in made.items():
        if var in last:
            change[i + 1] += _costs.nbytes(var)
            change[last[var] + 1] -= _costs.nbytes(var)
    crossing, live = [], 0.0
    for i in range(len(eqns) + 1):
        live += change[i]
        crossing.append(live)
    return crossing


# ---- shared -------------------------------------------------------------------------------------


def _inline_plain_calls(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return _jaxprs.inline(
        jaxpr,
        lambda e: e.primitive.name not in _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS
        and not _marks.is_stage_call(e),
    )


class _Equations:
    """A set of equations, told apart by identity."""

    def __init__(self, eqns):
        self._ids = {id(e) for e in eqns}
        self._keep = eqns

    def __contains__(self, eqn) -> bool:
        return id(eqn) in self._ids


def sink_argument_chains(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, _Equations]:
    """Moves what is computed from arguments alone, and lightly, to just before its first reader.

    So that a weight's cast, transpose or stacking goes with the stage that reads it: no cut should
    be made right after one of the equations moved, which are returned too.
    """
    roots: dict[Any, frozenset[Any]] = {v: frozenset([v]) for v in jaxpr.jaxpr.invars}
    arguments = set(jaxpr.jaxpr.invars)
    sunk: dict[Any, Any] = {}
    order: list[Any] = []
    placed: set[int] = set()

    def place(eqn):
        stack = [eqn]
        while stack:
            top = stack[-1]
            waiting = [
                sunk[v]
                for v in top.invars
                if not _jaxprs.is_literal(v) and v in sunk and id(sunk[v]) not in placed
            ]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if id(top) not in placed:
                placed.add(id(top))
                order.append(top)

    for eqn in jaxpr.eqns:
        union = frozenset().union(*(roots[v] for v in eqn.invars if not _jaxprs.is_literal(v)))
        roots.update((v, union) for v in eqn.outvars)
        light = eqn.primitive.name not in _HEAVY and all(
            _jaxprs.is_literal(v) or v in sunk or v in arguments for v in eqn.invars
        )
        if not eqn.effects and (len(union) <= 1 or light):
            sunk.update((v, eqn) for v in eqn.outvars)
        else:
            place(eqn)
    for var in jaxpr.jaxpr.outvars:
        if not _jaxprs.is_literal(var) and var in sunk:
            place(sunk[var])
    moved = _Equations(list(sunk.values()))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


_HEAVY = frozenset(
    {"dot_general", "conv_general_dilated", "gather", "scan", "while", "cond", "dynamic_slice"}
)


def insert_marks(jaxpr, positions: Sequence[int], names: Sequence[str | None]) -> jex.ClosedJaxpr:
    """Marks all values made before and read after each position as the entrance of a stage."""
    varying = _jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    known = _jaxprs.Substitution()
    made: list[Any] = []
    eqns: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in positions:
            k = positions.index(i)
            live = [v for v in made if last.get(v, -1) >= i]
            marked = [_jaxprs.fresh_var(v) for v in live]
            eqns.append(_marks.enter_equation([known(v) for v in live], marked, k + 1, names[k]))
            known.of.update(zip(live, marked, strict=True))
        eqns.append(known.rename(eqn))
        made.extend(v for v in eqn.outvars if v in varying)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)
