"""Where a program is cut: at named scopes, or by balance."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _balance, _costs, _marks, _modules, _stages

# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], modules: Sequence[str]
) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`.

    `modules` could have been named too, and are listed where a name is unknown.
    """
    inlined, _ = _stages.dissolve_marks(_inline_plain_calls(jaxpr))
    flat, sunk = sink_argument_chains(inlined)
    positions = []
    for name in names:
        position = next((i for i, e in enumerate(flat.eqns) if _in_scope(e, name)), None)
        if position is None:
            nested = next((e for e in flat.eqns if _contains_scope(e, name)), None)
            if nested is not None and not _starts_with_scope(nested, name):
                raise ValueError(
                    f"The scope {name!r} is inside a `{nested.primitive.name}`"
                    f"{_compat.at_source_line(nested)}, whose body is one unit: no cut can be made "
                    f"there."
                )
            if nested is None:
                raise ValueError(_no_scope(name, flat, modules))
            position = flat.eqns.index(nested)
        while position > 0 and flat.eqns[position - 1] in sunk:
            position -= 1
        positions.append(position)
    if positions != sorted(positions):
        order = [n for _, n in sorted(zip(positions, names, strict=True))]
        raise ValueError(f"The cuts {list(names)} are out of order: they run in the order {order}.")
    if len(set(positions)) < len(positions):
        raise ValueError(
            f"Two of the cuts {list(names)} are at the same equation; drop one of them."
        )
    return insert_marks(flat, positions, names)


def _scope_path(eqn) -> str:
    return str(eqn.source_info.name_stack)


def _in_scope(eqn, name: str) -> bool:
    return re.search(rf"(^|[/(]){re.escape(name)}($|[/)])", _scope_path(eqn)) is not None


def _contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: _in_scope(e, name))


def _starts_with_scope(eqn, name: str) -> bool:
    """Whether an equation is a checkpoint of which the scope holds the first equation."""
    return eqn.primitive.name in _jaxprs.CHECKPOINTS and any(
        _in_scope(sub.eqns[0], name) for sub in _jaxprs.sub_jaxprs(eqn) if sub.eqns
    )


def _no_scope(name: str, jaxpr, modules: Sequence[str]) -> str:
    if name.startswith(_modules.WHOLE):
        return (
            f"{name.removeprefix(_modules.WHOLE)!r} cannot stay whole: the function never calls it."
        )
    scopes = list(dict.fromkeys(s for e in jaxpr.eqns if (s := _scope_path(e))))
    named = (
        f"No module of the first argument is called {name!r} ({_modules.listed(modules)}), and n"
        if modules
        else "N"
    )
    return f"{named}o equation is under jax.named_scope({name!r}) ({_modules.listed(scopes)})."


# ---- balance ------------------------------------------------------------------------------------


def cut_balanced(
    jaxpr: jex.ClosedJaxpr,
    num_stages: int,
    cost: _costs.Cost,
    whole: Sequence[str],
    modules: Sequence[str],
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    No cut is made between equations under one of the scopes `whole` that follow each other.
    """
    flat, sunk = sink_argument_chains(_inline_plain_calls(jaxpr))
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    free = [not any(v in varying for v in e.outvars) for e in flat.eqns]
    eqns = [e for e, f in zip(flat.eqns, free, strict=True) if not f]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    for i, eqn in enumerate(eqns):
        if eqn in sunk:
            crossing[i + 1] = float("inf")
    for name in whole:
        runs = list(_runs_in_scope(eqns, sunk, name))
        if not runs:
            raise ValueError(_no_scope(name, flat, modules))
        for first, last in runs:
            crossing[first + 1 : last + 1] = [float("inf")] * (last - first)
    try:
        cuts = _balance.balanced_cuts([cost(e) for e in eqns], crossing, num_stages)
    except ValueError as error:
        raise ValueError(f"split_stages: {error}") from None
    index = {id(e): i for i, e in enumerate(flat.eqns)}
    return insert_marks(flat, [index[id(eqns[c])] for c in cuts], [None] * len(cuts))


def _runs_in_scope(eqns, sunk, name: str) -> Iterator[tuple[int, int]]:
    """The first and last position of each run of equations under a scope, but for those moved."""
    run = None
    for i, eqn in enumerate(eqns):
        if eqn in sunk:
            continue
        if _in_scope(eqn, name):
            run = (i if run is None else run[0], i)
        elif run is not None:
            yield run
            run = None
    if run is not None:
        yield run


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
        lambda e: (
            e.primitive.name not in _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS
            and not _marks.is_stage_call(e)
        ),
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

    for eqn, moves in zip(jaxpr.eqns, _stages.argument_chains(jaxpr), strict=True):
        if moves:
            sunk.update((v, eqn) for v in eqn.outvars)
        else:
            place(eqn)
    for var in jaxpr.jaxpr.outvars:
        if not _jaxprs.is_literal(var) and var in sunk:
            place(sunk[var])
    moved = _Equations(list(sunk.values()))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


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
