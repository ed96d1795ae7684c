"""Partitions the body of a microbatch loop into the tasks of each stage.

The calls of outlined stages are the anchors: forward calls are in F tasks, transposed ones in B
tasks. Equations around them join a task by dependence: what a task reads joins the first task that
reads it, what only leaves the loop (a loss, an accumulation) joins the last task it depends on.
What depends on no microbatch is computed before the loop, or repeated where it costs nothing.
"""

import dataclasses
import itertools
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.schedules import Kind
from jaxpp.transforms import _costs, _loop, _marks, _split_backward, _stages


@dataclasses.dataclass(frozen=True)
class Partition:
    """A loop's tasks, and what goes around it.

    `hoisted` makes further constants from the loop's constants, before the loop. Carry i of the
    loop body is the sum of the carries `summands[i]` of the tasks; carries after the body's own
    begin with zeros.
    """

    tasks: _loop.LoopTasks
    hoisted: _jaxprs.Part
    hoisted_from: tuple[int, ...]
    summands: tuple[tuple[int, ...], ...]
    zeros: tuple[Any, ...]


def partition(
    body: jex.ClosedJaxpr, num_consts: int, num_carry: int, split: bool
) -> Partition:
    """Partitions a loop body into tasks.

    Args:
        body: the jaxpr of one iteration; it takes constants, carries and slices, and gives
            carries and results.
        num_consts: how many of its inputs are constants.
        num_carry: how many of its inputs and outputs are carries.
        split: whether the backward is split into I and W.

    Raises:
        ValueError: if the body is not a forward and a backward pass over the stages.
    """
    flow = _label_calls(body)
    eqns, position, outvars, num_stages = flow.eqns, flow.position, flow.outvars, flow.num_stages
    consts = flow.invars[:num_consts]
    carries = flow.invars[num_consts : num_consts + num_carry]
    xs = flow.invars[num_consts + num_carry :]

    eqns, position, hoisted = _hoist(eqns, position, outvars, [*carries, *xs], consts)
    consts = [*consts, *hoisted.outputs]
    eqns, position, carries, outvars, summands, sums = _split_shared_sums(
        eqns, position, carries, outvars, num_carry
    )
    repeatable = _repeatable(eqns, position, carries, xs)
    position = _place_glue(eqns, position, repeatable, num_stages)

    nodes = _collect(eqns, position, repeatable, carries, outvars, num_stages)
    num_new = len(carries)
    ys = outvars[num_new:]
    bodies = _bodies(nodes, consts, carries, xs, outvars[:num_new], ys, num_stages, split)
    tasks = _loop.LoopTasks(
        tuple(bodies), num_stages, len(consts), num_new, len(ys), frozenset(sums)
    )
    return Partition(
        tasks,
        hoisted,
        tuple(flow.invars.index(v) for v in hoisted.inputs),
        tuple(summands),
        tuple(v.aval for v in carries[num_carry:]),
    )


def _repeatable(eqns, position, carries, xs) -> list[bool]:
    """Which equations are computed wherever they are read, not sent.

    What depends on no microbatch, and what comes from a microbatch's slices without a stage.
    """
    varying = _jaxprs.descendants(eqns, [*carries, *xs])
    staged = [
        v
        for e, p in zip(eqns, position, strict=True)
        if p is not None
        for v in e.outvars
        if v in varying
    ]
    from_stages = _jaxprs.descendants(eqns, [*staged, *carries])
    return [
        not e.effects
        and (
            not any(v in varying for v in e.outvars)
            or (p is None and not any(v in from_stages for v in e.outvars))
        )
        for e, p in zip(eqns, position, strict=True)
    ]


@dataclasses.dataclass
class _Flow:
    """A loop body without stage calls, and the position of the task of each equation."""

    invars: list[Any]
    eqns: list[Any]
    position: list[int | None]
    outvars: list[Any]
    num_stages: int


def _label_calls(body: jex.ClosedJaxpr) -> _Flow:
    """The body with stage calls inlined; each of their equations has its task's position.

    Positions are 0..S-1 for F of stage 0..S-1 and S..2S-1 for B of stage S-1..0.
    """

    def holds_calls(eqn):
        return not _marks.is_stage_call(eqn) and _jaxprs.contains(eqn, _marks.is_stage_call)

    flat = _jaxprs.inline(body, holds_calls)
    found = [s for e in flat.eqns if (s := _marks.stage_of_call(e))]
    for eqn in flat.eqns:
        if holds_calls(eqn):
            raise ValueError(
                f"schedule: stages are called inside a `{eqn.primitive.name}` at "
                f"{_compat.source_line(eqn)}; a schedule needs them directly in the microbatch loop."
            )
    sizes = sorted({n for _, n in found})
    if len(sizes) > 1:
        raise ValueError(
            f"schedule: one microbatch loop calls functions of {' and '.join(map(str, sizes))} stages; "
            f"split them alike, or give each a loop of its own."
        )
    num_stages = sizes[0]
    known = _jaxprs.Substitution()
    eqns: list[Any] = []
    position: list[int | None] = []
    for eqn in flat.eqns:
        eqn = known.rename(eqn)
        if (call := _marks.stage_of_call(eqn)) is None:
            eqns.append(eqn)
            position.append(None)
            continue
        stage = call[0]
        where = 2 * num_stages - 1 - stage if _marks.is_backward_call(eqn) else stage
        inner, results = _jaxprs.inline_call(eqn, eqn.invars)
        part = _jaxprs.part(inner, results)
        clean, _ = _stages.dissolve_marks(part.jaxpr)
        eqns.extend(clean.eqns)
        position.extend([where] * len(clean.eqns))
        known.of.update(
            (o, known(r)) for o, r in zip(eqn.outvars, clean.jaxpr.outvars, strict=True)
        )
    outvars = [known(v) for v in flat.jaxpr.outvars]
    return _Flow(flat.jaxpr.invars, eqns, position, outvars, num_stages)


def _hoist(eqns, position, outvars, varying_inputs, consts):
    """Takes out of the loop what depends on constants alone, but for what costs nothing."""
    varying = _jaxprs.descendants(eqns, varying_inputs)
    from_consts = _jaxprs.descendants(eqns, consts)
    worth = [
        not e.effects
        and not any(v in varying for v in e.outvars)
        and any(v in from_consts for v in e.outvars)
        and _costs.flops(e) > 0
        for e in eqns
    ]
    made = {v for e, w in zip(eqns, worth, strict=True) if w for v in e.outvars}
    read = {
        v
        for e, w in zip(eqns, worth, strict=True)
        if not w
        for v in e.invars
        if not _jaxprs.is_literal(v)
    } | {v for v in outvars if not _jaxprs.is_literal(v)}
    outputs = [v for e in eqns for v in e.outvars if v in made and v in read]
    keep = _jaxprs.ancestors([e for e in eqns if not e.effects], outputs)
    pure = [e for e in eqns if not e.effects]
    hoisted = _jaxprs.part([e for e, k in zip(pure, keep, strict=True) if k], outputs, "hoisted")
    rest = [(e, p) for e, p, w in zip(eqns, position, worth, strict=True) if not w]
    return [e for e, _ in rest], [p for _, p in rest], hoisted


_ADDS = frozenset({"add", "add_any"})


def _split_shared_sums(eqns, position, carries, outvars, num_carry):
    """Gives a sum of contributions of several stages one accumulator for each stage.

    So that the gradient of a shared parameter is accumulated apart, and summed once.
    """
    maker = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    readers: dict[Any, int] = {}
    for e in eqns:
        for v in e.invars:
            if not _jaxprs.is_literal(v):
                readers[v] = readers.get(v, 0) + 1
    for v in outvars:
        if not _jaxprs.is_literal(v):
            readers[v] = readers.get(v, 0) + 1
    eqns, position = list(eqns), list(position)
    carries, new_outvars = list(carries), list(outvars[:num_carry])
    extra_carries, extra_outs, drop = [], [], set()
    summands, sums = [], set()
    at = _last_position(eqns, position)
    appended = []
    for j in range(num_carry):
        summands.append([j])
        out, carry = outvars[j], carries[j]
        if _jaxprs.is_literal(out) or out not in maker or readers.get(carry) != 1:
            continue
        i = maker[out]
        if eqns[i].primitive.name not in _ADDS or carry not in eqns[i].invars:
            continue
        x = next((v for v in eqns[i].invars if v is not carry), None)
        if x is None:
            continue
        sums.add(j)
        leaves, inner = [], []

        def flatten(v):
            k = None if _jaxprs.is_literal(v) else maker.get(v)
            if (
                k is not None
                and position[k] is None
                and eqns[k].primitive.name in _ADDS
                and readers[v] == 1
            ):
                inner.append(k)
                for w in eqns[k].invars:
                    flatten(w)
            else:
                leaves.append(v)

        flatten(x)
        groups: dict[int, list[Any]] = {}
        for v in leaves:
            groups.setdefault(-1 if _jaxprs.is_literal(v) else at.get(v, -1), []).append(v)
        if len(groups) < 2:
            continue
        drop.update([i, *inner])
        for n, group in enumerate(groups.values()):
            if n == 0:
                acc, target, number = carry, out, j
            else:
                acc, target = _jaxprs.fresh_var(carry), _jaxprs.fresh_var(out)
                number = num_carry + len(extra_carries)
                extra_carries.append(acc)
                extra_outs.append(target)
                summands[j].append(number)
            sums.add(number)
            total = group[0]
            for v in group[1:]:
                partial = _jaxprs.fresh_var(v)
                appended.append(eqns[i].replace(invars=[total, v], outvars=[partial]))
                total = partial
            appended.append(eqns[i].replace(invars=[acc, total], outvars=[target]))
    kept = [(e, p) for k, (e, p) in enumerate(zip(eqns, position, strict=True)) if k not in drop]
    eqns = [*(e for e, _ in kept), *appended]
    position = [*(p for _, p in kept), *([None] * len(appended))]
    outvars = [*new_outvars, *extra_outs, *outvars[num_carry:]]
    return eqns, position, [*carries, *extra_carries], outvars, [tuple(s) for s in summands], sums


def _last_position(eqns, position) -> dict[Any, int]:
    """For each variable, the last task that it depends on."""
    at: dict[Any, int] = {}
    for e, p in zip(eqns, position, strict=True):
        own = p if p is not None else max(
            (at.get(v, -1) for v in e.invars if not _jaxprs.is_literal(v)), default=-1
        )  # fmt: skip
        at.update((v, own) for v in e.outvars)
    return at


def _place_glue(eqns, position, repeatable, num_stages) -> list[int | None]:
    """Gives each equation that may not be repeated a task."""
    position = [None if r else p for p, r in zip(position, repeatable, strict=True)]
    anchored = list(position)
    first_reader: dict[Any, int] = {}
    for i in reversed(range(len(eqns))):
        p = anchored[i]
        if p is None and not repeatable[i]:
            p = min((first_reader[v] for v in eqns[i].outvars if v in first_reader), default=None)
            position[i] = p
        if p is not None:
            for v in eqns[i].invars:
                if not _jaxprs.is_literal(v):
                    first_reader[v] = min(first_reader.get(v, p), p)
    at: dict[Any, int] = {}
    for i, e in enumerate(eqns):
        if repeatable[i]:
            continue
        latest = max((at.get(v, -1) for v in e.invars if not _jaxprs.is_literal(v)), default=-1)
        if position[i] is None:
            position[i] = latest if latest >= 0 else num_stages - 1
        elif latest > position[i]:
            raise ValueError(
                f"schedule: the `{e.primitive.name}` at {_compat.source_line(e) or 'an unknown line'} of "
                f"{_task_name(position[i], num_stages)} reads a value of "
                f"{_task_name(latest, num_stages)}, which comes after it: the loop body is not one "
                f"forward and one backward pass over the stages."
            )
        at.update((v, position[i]) for v in e.outvars)
    return position


def _task_name(position: int, num_stages: int) -> str:
    backward = position >= num_stages
    return f"{'B' if backward else 'F'} of stage {2 * num_stages - 1 - position if backward else position}"


@dataclasses.dataclass
class _Node:
    position: int
    eqns: list[Any]
    outputs: list[Any]


def _collect(eqns, position, repeatable, carries, outvars, num_stages) -> list[_Node]:
    """The equations and outputs of each task, with what is repeated in it."""
    owner = {v: p for e, p in zip(eqns, position, strict=True) if p is not None for v in e.outvars}
    made = {v for e in eqns for v in e.outvars}
    leaves = [v for v in outvars if not _jaxprs.is_literal(v)]
    nodes = []
    for p in range(2 * num_stages):
        own = [q == p for q in position]
        # Results that no task makes leave with the last forward.
        loose = [v for v in leaves if v in made and v not in owner] if p == num_stages - 1 else []
        needed = {v for e, o in zip(eqns, own, strict=True) if o for v in e.invars if not _jaxprs.is_literal(v)}
        needed.update(loose)
        for i in reversed(range(len(eqns))):
            if repeatable[i] and any(v in needed for v in eqns[i].outvars):
                own[i] = True
                needed.update(v for v in eqns[i].invars if not _jaxprs.is_literal(v))
        mine = [e for e, o in zip(eqns, own, strict=True) if o]
        nodes.append(_Node(p, mine, loose))
    read = [
        {v for e in n.eqns for v in e.invars if not _jaxprs.is_literal(v)} for n in nodes
    ]
    for n in nodes:
        elsewhere = set().union(*(r for m, r in zip(nodes, read, strict=True) if m is not n))
        n.outputs.extend(
            v
            for e in n.eqns
            for v in e.outvars
            if owner.get(v) == n.position and (v in elsewhere or v in leaves)
        )
    for j, carry in enumerate(carries):
        reading = [n.position for n, r in zip(nodes, read, strict=True) if carry in r]
        writer = owner.get(outvars[j]) if not _jaxprs.is_literal(outvars[j]) else None
        if reading and reading != [writer]:
            raise ValueError(
                f"schedule: a value carried from one microbatch to the next is read by "
                f"{' and '.join(_task_name(p, num_stages) for p in reading)}, but made by "
                f"{_task_name(writer, num_stages) if writer is not None else 'none of them'}; only "
                f"the task that makes it can read it."
            )
    return nodes


def _bodies(nodes, consts, carries, xs, carry_outs, ys, num_stages, split) -> list[_loop.TaskBody]:
    refs: dict[Any, _loop.Ref] = {}
    for source, variables in (("const", consts), ("carry", carries), ("x", xs)):
        refs.update((v, _loop.Ref(source, i)) for i, v in enumerate(variables))
    made = {v for n in nodes for e in n.eqns for v in e.outvars}
    results: dict[Any, list[_loop.Ref]] = {}
    loose: list[tuple[Any, _loop.Ref]] = []
    for source, variables in (("carry", carry_outs), ("y", ys)):
        for i, v in enumerate(variables):
            if source == "carry" and v is carries[i]:
                continue
            ref = _loop.Ref(source, i)
            if _jaxprs.is_literal(v) or v not in made:  # an input as it is: the last F gives it
                loose.append((v, ref))
            else:
                results.setdefault(v, []).append(ref)
    num_values = itertools.count()
    bodies = []

    def add(kind, stage, eqns, sent, left):
        """Adds a task that makes the values `sent` to other tasks, and the loop's results `left`."""
        for v in sent:
            if v not in refs:
                refs[v] = _loop.Ref("value", next(num_values))
        given = [(v, refs[v]) for v in sent]
        given += [(v, ref) for v in left for ref in results[v]]
        if kind is Kind.F and stage == num_stages - 1:
            given += loose
        variables = [v for v, _ in given]
        keep = _jaxprs.ancestors(eqns, variables)
        kept = [e for e, k in zip(eqns, keep, strict=True) if k]
        if not given and not kept:
            return
        part = _jaxprs.part(kept, variables, f"{kind}{stage}")
        bodies.append(
            _loop.TaskBody(
                kind,
                stage,
                part.jaxpr,
                tuple(refs[v] for v in part.inputs),
                tuple(ref for _, ref in given),
            )
        )

    read_by = [{v for e in n.eqns for v in e.invars if not _jaxprs.is_literal(v)} for n in nodes]
    for n in nodes:
        forward = n.position < num_stages
        stage = n.position if forward else 2 * num_stages - 1 - n.position
        elsewhere = set().union(*(r for m, r in zip(nodes, read_by, strict=True) if m is not n))
        sent = [v for v in n.outputs if v in elsewhere]
        left = [v for v in n.outputs if v in results]
        if forward or not split:
            add(Kind.F if forward else Kind.B, stage, n.eqns, sent, left)
            continue
        first, second = _split_backward.split_backward(n.eqns, sent)
        free = _cheap(first, consts)
        second = [*_making(first, free, second), *second]
        needed = {v for e in second for v in e.invars if not _jaxprs.is_literal(v)} | set(left)
        made_first = [v for e in first for v in e.outvars if v not in free]
        crossing = [v for v in made_first if v in needed and v not in sent]
        add(Kind.I, stage, first, [*sent, *crossing], [])
        add(Kind.W, stage, second, [], left)
    return bodies


def _cheap(eqns, consts) -> set[Any]:
    """What depends on constants alone; what was worth it has been hoisted, so the rest is free."""
    known = set(consts)
    made = set()
    for e in eqns:
        if not e.effects and all(_jaxprs.is_literal(v) or v in known for v in e.invars):
            known.update(e.outvars)
            made.update(e.outvars)
    return made


def _making(eqns, invariant, readers) -> list[Any]:
    """The equations that make the invariant variables that `readers` need."""
    needed = [v for e in readers for v in e.invars if not _jaxprs.is_literal(v) and v in invariant]
    pure = [e for e in eqns if all(v in invariant for v in e.outvars)]
    return [e for e, k in zip(pure, _jaxprs.ancestors(pure, needed), strict=True) if k]
