"""Assigns each equation of a jaxpr to a stage, by the marks in the jaxpr.

- An equation that a mark depends on belongs to the stage that the mark closes, or an earlier one.
- Any other equation belongs to the stage that was open where it was written.
- But an equation that only prepares arguments (a weight's transform, a mask) belongs to the
  earliest stage that reads it. If it makes a scalar (a weight's norm), or only a result (the next
  count of a counter), it belongs to the stage that reads the argument, which then does not travel.
- If a mark is put on a slice of an argument (the next part of a sequence), the stage that the mark
  opens takes the slice. So a stage that begins with data of its own waits for no other stage.
- An equation that depends on no argument (positions, causal masks) is repeated where it is read.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _checkpoints, _compat, _jaxprs, _primitives
from jaxpp.transforms.stages import _marks


@dataclasses.dataclass(frozen=True)
class Stages:
    """A flat jaxpr without marks, and the stage of each equation.

    The stage is None for an equation that is repeated where it is read.
    """

    jaxpr: jex.ClosedJaxpr
    stage_of: tuple[int | None, ...]
    num_stages: int
    names: tuple[str | None, ...]


def has_marks(jaxpr) -> bool:
    """Tells whether a mark stands anywhere in a jaxpr."""
    return any(_jaxprs.contains(eqn, _marks.is_enter) for eqn in jaxpr.eqns)


def _refuse_marks_inside(jaxpr: jex.ClosedJaxpr) -> None:
    for eqn in jaxpr.eqns:
        if not _marks.is_enter(eqn) and _jaxprs.contains(eqn, _marks.is_enter):
            raise ValueError(
                f"A stage is entered inside a `{eqn.primitive.name}`{_compat.at_source_line(eqn)}, "
                f"which cannot be cut there: {_why_not(eqn)} Enter the stage before or after it, "
                f"or write the loop over layers in Python."
            )


def _why_not(eqn) -> str:
    if eqn.primitive.name != "scan":
        return "its body is one unit."
    return (
        f"its body is the same program for each of {eqn.params['length']} iterations. Drop the mark"
        f" and cut between them: split_stages(fun, num_stages), or at=['blocks.2'] where it goes "
        f"over the layers of `blocks`."
    )


def read_stages(
    jaxpr: jex.ClosedJaxpr, checkpoints: _checkpoints.Checkpoints | None = None
) -> Stages:
    """Assigns each equation of a jaxpr to a stage by the marks in it.

    A checkpoint that has marks inside becomes one in each stage; so does an open checkpoint.
    """
    if checkpoints is None:
        jaxpr, checkpoints = _checkpoints.open_calls(
            jaxpr, lambda e: _jaxprs.contains(e, _marks.is_enter)
        )
    _refuse_marks_inside(jaxpr)
    jaxpr = _expose_preparations(jaxpr)
    chain = argument_chains(jaxpr)
    opens = _number_marks(jaxpr, chain)
    num_stages = max(opens.values(), default=0) + 1
    eqns = jaxpr.eqns
    from_args = _jaxprs.descendants(eqns, jaxpr.jaxpr.invars)
    constant = [not e.effects and not any(v in from_args for v in e.outvars) for e in eqns]
    latest = _latest(jaxpr, opens, num_stages)
    stage: list[int | None] = [None] * len(eqns)

    written, made_in = 0, dict.fromkeys(jaxpr.jaxpr.invars, 0)
    for i, eqn in enumerate(eqns):
        earliest = max(
            (made_in.get(v, 0) for v in eqn.invars if not _jaxprs.is_literal(v)), default=0
        )
        if _marks.is_enter(eqn):
            written = opens[i]
            if earliest >= max(opens[i], 1):
                raise ValueError(
                    f"Stage {opens[i]} is entered{_compat.at_source_line(eqn)} with a value of "
                    f"stage {earliest}: the cuts are out of order. Number the stages in the order "
                    f"the data flows."
                )
            made_in.update((v, opens[i]) for v in eqn.outvars)
        elif not (chain[i] or constant[i]):
            if earliest > latest[i]:
                raise ValueError(
                    f"The `{eqn.primitive.name}`{_compat.at_source_line(eqn)} reads a value of "
                    f"stage {earliest}, but stage {latest[i] + 1}, which is entered later, needs "
                    f"its result: this cut puts a consumer before its producer. Move the mark, or "
                    f"number the stages in the order the data flows."
                )
            stage[i] = k = min(max(written, earliest), latest[i])
            made_in.update((v, k) for v in eqn.outvars)

    _place_chains(jaxpr, opens, chain, stage, num_stages)
    marks = [(opens[i], e) for i, e in enumerate(eqns) if _marks.is_enter(e)]
    names = {k: e.params["name"] for k, e in marks}
    if num_stages > 1 and num_stages - 1 not in stage:
        last = max(i for i in opens if opens[i] == num_stages - 1)
        raise ValueError(
            f"Nothing is computed in the last stage, {num_stages - 1}, which is entered"
            f"{_compat.at_source_line(eqns[last])}: a mark opens the stage of what reads its "
            f"result. Drop it, or put it before what the stage is to compute."
        )
    flat, kept = dissolve_marks(jaxpr)
    outvars = flat.jaxpr.outvars
    closed = _checkpoints.close(flat.eqns, [stage[i] for i in kept], checkpoints, outvars)
    flat = _compat.make_closed_jaxpr(flat.jaxpr.invars, outvars, [e for e, _ in closed])
    return Stages(
        flat,
        tuple(k for _, k in closed),
        num_stages,
        tuple(names.get(k) for k in range(num_stages)),
    )


def _expose_preparations(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Opens calls that prepare several arguments at once (a jitted cast of all parameters).

    So each stage prepares the arguments that it reads.
    """
    while True:
        prepares = argument_chains(jaxpr)
        made = {
            v
            for e, prepare in zip(jaxpr.eqns, prepares, strict=True)
            if prepare and len(e.outvars) > 1 and e.primitive.name == "jit"
            for v in e.outvars
        }
        if not made:
            return jaxpr
        jaxpr = _jaxprs.inline(jaxpr, lambda e: any(v in made for v in e.outvars))  # noqa: B023


def argument_chains(jaxpr: jex.ClosedJaxpr) -> list[bool]:
    """Tells for each equation whether it only prepares arguments: a cast, a mask, a norm.

    Such an equation reads one argument, or several if it is light, directly or through other such
    equations. If all are such (a program of elementwise operations), none counts as preparation.
    """
    varying = _jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    # The argument that a prepared value was computed from, or None where there are several.
    source: dict[Any, Any] = {v: v for v in jaxpr.jaxpr.invars}
    chain, others = [], 0
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if not _jaxprs.is_literal(v) and v in varying]
        sources = {source.get(v) for v in read}
        one = sources.pop() if len(sources) == 1 else None
        light = one is not None or not _jaxprs.contains(eqn, _is_heavy)
        simple = light and not eqn.effects and not _marks.is_enter(eqn)
        chain.append(bool(read) and simple and all(v in source for v in read))
        if chain[-1]:
            source.update((v, one) for v in eqn.outvars)
        elif read:
            others += 1
    return chain if others else [False] * len(chain)


def _is_heavy(eqn) -> bool:
    return eqn.primitive.name in _primitives.HEAVY


def _latest(jaxpr, opens: dict[int, int], num_stages: int) -> list[int]:
    """Finds the last stage in which each equation may stand: before all marks that depend on it."""
    eqns = jaxpr.eqns
    latest_of: dict[Any, int] = {}
    latest = [num_stages - 1] * len(eqns)
    for i in reversed(range(len(eqns))):
        bound = min(
            (latest_of.get(v, num_stages - 1) for v in eqns[i].outvars), default=num_stages - 1
        )
        if _marks.is_enter(eqns[i]):
            bound = max(opens[i] - 1, 0)
        latest[i] = bound
        for v in eqns[i].invars:
            if not _jaxprs.is_literal(v):
                latest_of[v] = min(latest_of.get(v, bound), bound)
    return latest


def _place_chains(
    jaxpr, opens: dict[int, int], chain: Sequence[bool], stage: list[int | None], num_stages: int
) -> None:
    """Places argument chains at their first reader, or a norm where its argument is read anyway."""
    eqns, last = jaxpr.eqns, num_stages - 1
    data = _data(jaxpr)
    first = min(opens.values(), default=0)

    prepared = {v for e, c in zip(eqns, chain, strict=True) if c for v in e.outvars}
    given = prepared.union(jaxpr.jaxpr.invars)

    def read_by_mark(i: int) -> int:
        if opens[i] > first and all(v in data for v in _jaxprs.variables(eqns[i].invars)):
            return opens[i]
        return max(opens[i] - 1, 0)

    def place(homes: dict[int, int] | None) -> dict[Any, int]:
        readers: dict[Any, int] = {
            v: last for v in jaxpr.jaxpr.outvars if not _jaxprs.is_literal(v)
        }
        computed_with: set[Any] = set()  # variables that are read for more than the results
        for i in reversed(range(len(eqns))):
            for_results = False
            if _marks.is_enter(eqns[i]):
                k = read_by_mark(i)
            elif chain[i]:
                k = min((readers[v] for v in eqns[i].outvars if v in readers), default=last)
                for_results = computed_with.isdisjoint(eqns[i].outvars)
                if for_results or _makes_float_scalar(eqns[i]):
                    if homes is None:
                        continue
                    k = min(k, homes.get(i, k))
                stage[i] = k
            elif (at := stage[i]) is None:
                continue
            else:
                k = at
            read = {v: k for v in _jaxprs.variables(eqns[i].invars)}
            if _marks.is_enter(eqns[i]) and not given.issuperset(read):
                # A prepared value that is marked along with computed ones (a bias that a module is
                # called with) is read by its readers behind the mark.
                along = zip(eqns[i].invars, eqns[i].outvars, strict=True)
                along = [(v, out) for v, out in along if not _jaxprs.is_literal(v)]
                read |= {v: readers.get(out, last) for v, out in along if v in prepared}
            for v, at in read.items():
                readers[v] = min(readers.get(v, at), at)
                if not for_results:
                    computed_with.add(v)
        return readers

    readers = place(None)
    largest = {v: v for v in jaxpr.jaxpr.invars}
    homes = {}
    for i, eqn in enumerate(eqns):
        arguments = [largest[v] for v in eqn.invars if not _jaxprs.is_literal(v) and v in largest]
        if chain[i] and arguments:
            argument = max(arguments, key=lambda v: v.aval.size)
            largest.update((v, argument) for v in eqn.outvars)
            if argument in readers:
                homes[i] = readers[argument]
    place(homes)


def _data(jaxpr) -> set[Any]:
    """Finds the arguments, and the variables that are slices, reshapes or transposes of them."""
    data = set(jaxpr.jaxpr.invars)
    for eqn in jaxpr.eqns:
        read = _jaxprs.variables(eqn.invars)
        if read and all(v in data for v in read) and not _marks.is_enter(eqn):
            if eqn.primitive.name in _primitives.MOVES:
                data.update(eqn.outvars)
    return data


def _makes_float_scalar(eqn) -> bool:
    return (
        all(v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        and any(not _jaxprs.is_literal(v) and v.aval.shape != () for v in eqn.invars)
    )  # fmt: skip


def _number_marks(jaxpr, chain: Sequence[bool]) -> dict[int, int]:
    """Finds the stage that each mark opens, by the index of the mark's equation."""
    marks = [(i, e) for i, e in enumerate(jaxpr.eqns) if _marks.is_enter(e)]
    if not marks:
        return {}
    numbered = [e.params["stage"] is not None for _, e in marks]
    if any(numbered) and not all(numbered):
        i, eqn = marks[numbered.index(False)]
        raise ValueError(
            f"Some stages are numbered and the one entered{_compat.at_source_line(eqn)} is not: "
            f"give stage_id to all calls of pipeline_enter_stage, or to none."
        )
    if not numbered[0]:
        start = 0 if _is_at_start(jaxpr, marks[0][0], chain) else 1
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


def _is_at_start(jaxpr, mark: int, chain: Sequence[bool]) -> bool:
    """Tells whether a mark is on bare arguments, and all equations before it only prepare."""
    eqns = jaxpr.eqns
    varying = _jaxprs.descendants(eqns, jaxpr.jaxpr.invars)
    before = zip(eqns[:mark], chain[:mark], strict=True)
    invars = set(jaxpr.jaxpr.invars)
    return all(_jaxprs.is_literal(v) or v in invars for v in eqns[mark].invars) and all(
        prepares or not any(v in varying for v in e.outvars) for e, prepares in before
    )


def dissolve_marks(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Removes marks and edges at the top of a jaxpr; also gives the indices of the rest."""
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
    """Makes a jaxpr of a stage: of its own equations, and of those that it repeats."""
    eqns = stages.jaxpr.eqns
    own = [k == stage for k in stages.stage_of]
    needed = {
        v for i, e in enumerate(eqns) if own[i] for v in e.invars if not _jaxprs.is_literal(v)
    }
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
    """Gives the results of a program, from the values that its stages made.

    A result that depends on no argument belongs to no stage, and is computed here.
    """
    jaxpr = stages.jaxpr.jaxpr
    loose = [v for v in jaxpr.outvars if not _jaxprs.is_literal(v) and v not in values]
    if loose:
        free = [e for e, k in zip(jaxpr.eqns, stages.stage_of, strict=True) if k is None]
        keep = _jaxprs.ancestors(free, loose)
        part = _jaxprs.part([e for e, k in zip(free, keep, strict=True) if k], loose)
        values = values | dict(zip(loose, _jaxprs.run(part.jaxpr, *part.inputs), strict=True))
    return _jaxprs.read(jaxpr.outvars, values)
