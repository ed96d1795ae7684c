"""Which equation belongs to which stage, read off the marks in a jaxpr.

- What a mark depends on belongs to the stage that the mark closes, or to an earlier one.
- What depends on a mark belongs to the stage that was open where it was written, as far as the
  rule above allows.
- What depends on arguments alone (a weight's transform, a mask) belongs to the earliest stage that
  reads it; where it is a scalar (a weight's norm), to the stage that reads the argument, so that
  the scalar travels and not the argument.
- What depends on no argument at all (positions, causal masks) is repeated where it is read.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _marks


@dataclasses.dataclass(frozen=True)
class Stages:
    """A flat jaxpr without marks, and the stage of each equation (None: repeated where read)."""

    jaxpr: jex.ClosedJaxpr
    stage_of: tuple[int | None, ...]
    num_stages: int
    names: tuple[str | None, ...]


def has_marks(jaxpr) -> bool:
    """Whether a mark stands anywhere in a jaxpr."""
    return any(_jaxprs.contains(eqn, _marks.is_enter) for eqn in jaxpr.eqns)


def expose_marks(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Brings marks inside calls to the top: calls are inlined, checkpoints cut in two at a mark."""

    def inlinable(eqn):
        return eqn.primitive.name not in _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS and (
            _jaxprs.contains(eqn, _marks.is_enter)
        )

    jaxpr = _jaxprs.inline(jaxpr, inlinable)
    eqns: list[Any] = []
    known = _jaxprs.Substitution()
    for eqn in jaxpr.eqns:
        eqn = known.rename(eqn)
        if _marks.is_enter(eqn) or not _jaxprs.contains(eqn, _marks.is_enter):
            eqns.append(eqn)
        elif eqn.primitive.name in _jaxprs.CHECKPOINTS:
            cut, results = _cut_checkpoint(eqn)
            eqns.extend(cut)
            known.of.update(zip(eqn.outvars, results, strict=True))
        else:
            raise ValueError(
                f"A stage is entered inside a `{eqn.primitive.name}`{_at(eqn)}, which cannot be "
                f"cut there: its body is one unit. Enter the stage before or after it, "
                f"or write the loop over layers in Python."
            )
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)


def _at(eqn) -> str:
    line = _compat.source_line(eqn)
    return f" at {line}" if line else ""


def _cut_checkpoint(eqn) -> tuple[list[Any], list[Any]]:
    """A checkpoint with marks inside as one checkpoint per stage, the marks between them."""
    inner, results = _jaxprs.inline_call(eqn, eqn.invars)
    part = _jaxprs.part(inner, results)
    exposed = expose_marks(part.jaxpr)
    eqns: list[Any] = []
    group: list[Any] = []

    def close(rest: Sequence[Any]):
        if not group:
            return
        later = {v for e in rest for v in e.invars if not _jaxprs.is_literal(v)}
        later.update(v for v in exposed.jaxpr.outvars if not _jaxprs.is_literal(v))
        outputs = [v for e in group for v in e.outvars if v in later]
        body = _jaxprs.part(group, outputs)
        params = dict(eqn.params)
        params["jaxpr"] = _compat.with_closed_type(body.jaxpr, params["jaxpr"])
        eqns.append(eqn.replace(invars=list(body.inputs), outvars=outputs, params=params))
        # The body has binders of the same names as the variables outside, which is harmless.
        group.clear()

    for i, e in enumerate(exposed.eqns):
        if _marks.is_enter(e):
            close(exposed.eqns[i:])
            eqns.append(e)
        else:
            group.append(e)
    close([])
    return eqns, list(exposed.jaxpr.outvars)


def read_stages(jaxpr: jex.ClosedJaxpr) -> Stages:
    """Assigns each equation of a jaxpr to a stage by the marks in it."""
    jaxpr = expose_marks(jaxpr)
    opens = _number_marks(jaxpr)
    num_stages = max(opens.values(), default=0) + 1
    eqns = jaxpr.eqns
    invars = set(jaxpr.jaxpr.invars)
    from_args = _jaxprs.descendants(eqns, invars)
    marked = [v for e in eqns if _marks.is_enter(e) for v in e.outvars]
    from_marks = _jaxprs.descendants(eqns, marked)
    depends = [any(v in from_marks for v in e.outvars) for e in eqns]
    constant = [not any(v in from_args for v in e.outvars) for e in eqns]
    latest = _latest(jaxpr, opens, num_stages)
    stage: list[int | None] = [None] * len(eqns)

    # Forward: what depends on a mark, where it was written.
    written, made_in = 0, dict.fromkeys(invars, 0)
    for i, eqn in enumerate(eqns):
        earliest = max((made_in.get(v, 0) for v in eqn.invars if not _jaxprs.is_literal(v)), default=0)
        if _marks.is_enter(eqn):
            written = opens[i]
            if earliest >= max(opens[i], 1):
                raise ValueError(
                    f"Stage {opens[i]} is entered{_at(eqn)} with a value of stage {earliest}: the cuts "
                    f"are out of order. Number the stages in the order the data flows."
                )
            made_in.update((v, opens[i]) for v in eqn.outvars)
        elif depends[i]:
            if earliest > latest[i]:
                raise ValueError(
                    f"The `{eqn.primitive.name}`{_at(eqn)} reads a value of stage {earliest}, but stage "
                    f"{latest[i] + 1}, which is entered later, needs its result: this cut puts a "
                    f"consumer before its producer. Move the mark, or number the stages in the "
                    f"order the data flows."
                )
            stage[i] = min(max(written, earliest), latest[i])
            made_in.update((v, stage[i]) for v in eqn.outvars)

    _place_argument_only(jaxpr, opens, depends, constant, stage, num_stages)
    marks = [(opens[i], e) for i, e in enumerate(eqns) if _marks.is_enter(e)]
    names = {k: e.params["name"] for k, e in marks}
    flat, kept = dissolve_marks(jaxpr)
    return Stages(
        flat,
        tuple(stage[i] for i in kept),
        num_stages,
        tuple(names.get(k) for k in range(num_stages)),
    )


def _latest(jaxpr, opens, num_stages) -> list[int]:
    """The last stage in which each equation may stand: before each mark that depends on it."""
    eqns = jaxpr.eqns
    latest_of: dict[Any, int] = {}
    latest = [num_stages - 1] * len(eqns)
    for i in reversed(range(len(eqns))):
        bound = min((latest_of.get(v, num_stages - 1) for v in eqns[i].outvars), default=num_stages - 1)
        if _marks.is_enter(eqns[i]):
            bound = max(opens[i] - 1, 0)
        latest[i] = bound
        for v in eqns[i].invars:
            if not _jaxprs.is_literal(v):
                latest_of[v] = min(latest_of.get(v, bound), bound)
    return latest


def _place_argument_only(jaxpr, opens, depends, constant, stage, num_stages) -> None:
    """Places equations that depend on arguments but on no mark."""
    eqns = jaxpr.eqns
    invars = set(jaxpr.jaxpr.invars)
    readers: dict[Any, int] = {}

    def read(var, k):
        if not _jaxprs.is_literal(var):
            readers[var] = min(readers.get(var, k), k)

    for var in jaxpr.jaxpr.outvars:
        read(var, num_stages - 1)
    scalars = []
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        if _marks.is_enter(eqn):
            k = max(opens[i] - 1, 0)
        elif depends[i]:
            k = stage[i]
        elif constant[i]:
            continue
        else:
            k = min((readers[v] for v in eqn.outvars if v in readers), default=num_stages - 1)
            if _makes_float_scalar(eqn):
                scalars.append((i, k))
                continue
            stage[i] = k
        for v in eqn.invars:
            read(v, k)
    # A scalar made of arguments: where its largest argument is read anyway.
    for i, k in scalars:
        needed = _jaxprs.ancestors(eqns[: i + 1], eqns[i].outvars)
        roots = [v for j, n in enumerate(needed) if n for v in eqns[j].invars if v in invars]
        if any(depends[j] or _marks.is_enter(eqns[j]) for j, n in enumerate(needed) if n):
            roots = []
        at_home = [readers[v] for v in sorted(roots, key=lambda v: -v.aval.size) if v in readers]
        home = min(at_home[0], k) if at_home else k
        for j, n in enumerate(needed):
            if n and stage[j] is None and not constant[j] and not _marks.is_enter(eqns[j]):
                stage[j] = home
                for v in eqns[j].invars:
                    read(v, home)


def _makes_float_scalar(eqn) -> bool:
    return (
        all(v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        and any(not _jaxprs.is_literal(v) and v.aval.shape != () for v in eqn.invars)
    )  # fmt: skip


def _number_marks(jaxpr) -> dict[int, int]:
    """The stage that each mark opens, by the index of its equation."""
    marks = [(i, e) for i, e in enumerate(jaxpr.eqns) if _marks.is_enter(e)]
    if not marks:
        return {}
    numbered = [e.params["stage"] is not None for _, e in marks]
    if any(numbered) and not all(numbered):
        i, eqn = marks[numbered.index(False)]
        raise ValueError(
            f"Some stages are numbered and the one entered{_at(eqn)} is not: "
            f"give stage_id to all calls of pipeline_enter_stage, or to none."
        )
    invars = set(jaxpr.jaxpr.invars)
    first, eqn = marks[0]
    at_start = all(_jaxprs.is_literal(v) or v in invars for v in eqn.invars) and first == 0
    if not numbered[0]:
        start = 0 if at_start else 1
        return {i: start + n for n, (i, _) in enumerate(marks)}
    opens = {i: e.params["stage"] for i, e in marks}
    found = sorted(opens.values())
    if len(set(found)) != len(found):
        twice = next(k for k in found if found.count(k) > 1)
        where = [_compat.source_line(e) for _, e in marks if e.params["stage"] == twice]
        raise ValueError(
            f"Stage {twice} is entered {len(where)} times ({', '.join(where)}): "
            f"mark each stage once; to mark several values, pass them as one pytree."
        )
    wanted = list(range(found[0], found[0] + len(found)))
    if found != wanted or found[0] > 1:
        raise ValueError(
            f"Stages are numbered {found}, but must be numbered without gaps from 0 (the very "
            f"start) or from 1 (the first cut)."
        )
    return opens


def dissolve_marks(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Removes marks and edges at the top; also returns the indices of the equations kept."""
    known = _jaxprs.Substitution()
    eqns, kept = [], []
    for i, eqn in enumerate(jaxpr.eqns):
        if _marks.is_enter(eqn) or _marks.is_edge(eqn):
            known.of.update((o, known(v)) for o, v in zip(eqn.outvars, eqn.invars, strict=True))
        else:
            eqns.append(known.rename(eqn))
            kept.append(i)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns), kept


def stage_part(stages: Stages, stage: int) -> _jaxprs.Part:
    """One stage as a jaxpr: its own equations, and those repeated where they are read."""
    eqns = stages.jaxpr.eqns
    own = [k == stage for k in stages.stage_of]
    needed = {v for i, e in enumerate(eqns) if own[i] for v in e.invars if not _jaxprs.is_literal(v)}
    for i in reversed(range(len(eqns))):
        if stages.stage_of[i] is None and any(v in needed for v in eqns[i].outvars):
            own[i] = True
            needed.update(v for v in eqns[i].invars if not _jaxprs.is_literal(v))
    read_elsewhere = {
        v
        for e, k in zip(eqns, stages.stage_of, strict=True)
        if k is not None and k != stage
        for v in e.invars
        if not _jaxprs.is_literal(v)
    }
    read_elsewhere.update(v for v in stages.jaxpr.jaxpr.outvars if not _jaxprs.is_literal(v))
    outputs = [
        v
        for e, k in zip(eqns, stages.stage_of, strict=True)
        if k == stage
        for v in e.outvars
        if v in read_elsewhere
    ]
    return _jaxprs.part([e for i, e in enumerate(eqns) if own[i]], outputs, f"stage_{stage}")


def read_outputs(stages: Stages, values: dict[Any, Any]) -> list[Any]:
    """The results of a program from the values its stages made.

    What depends on no argument and is a result itself belongs to no stage, and is computed here.
    """
    jaxpr = stages.jaxpr.jaxpr
    loose = [v for v in jaxpr.outvars if not _jaxprs.is_literal(v) and v not in values]
    if loose:
        keep = _jaxprs.ancestors(jaxpr.eqns, loose)
        part = _jaxprs.part([e for e, k in zip(jaxpr.eqns, keep, strict=True) if k], loose)
        values = values | dict(zip(loose, _jaxprs.run(part.jaxpr, *part.inputs), strict=True))
    return [v.val if _jaxprs.is_literal(v) else values[v] for v in jaxpr.outvars]
