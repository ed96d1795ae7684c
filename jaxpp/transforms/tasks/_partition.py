"""Partitions the body of a microbatch loop into the tasks of each stage.

The calls of outlined stages are the anchors: forward calls are in F tasks, transposed ones in B
tasks. An equation outside of these calls joins a task by dependence: the first task that reads its
results, or, if they only leave the loop (a loss, an accumulation), the last task that it depends
on. An equation that depends on no microbatch runs before the loop, or, if it costs nothing, in each
task that reads it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp._groups import Cluster, Flow, outline
from jaxpp.schedules import Kind, Table
from jaxpp.transforms.tasks import (
    _accumulators,
    _free_carries,
    _invariants,
    _loop,
    _split_backward,
    _stacked_sums,
)
from jaxpp.transforms.tasks._body import Body


def partition(body: Body, table: Table) -> tuple[_loop.LoopTasks, Body]:
    """Partitions a loop body into tasks.

    Args:
        body: the body as it was traced.
        table: the table of the loop; it says whether the backward is split into I and W.

    Returns:
        The tasks, and the body that they are parts of, after all of `PASSES`.

    Raises:
        ValueError: if the body is not a forward and a backward pass over the stages.
    """
    for run in PASSES:
        body = run(body)
    bodies, consts = _write(body, table.splits_backward)
    body = dataclasses.replace(body, consts=tuple(consts))
    folds = {i: body.folds[v] for i, v in enumerate(body.carries) if v in body.folds}
    sizes = len(body.consts), len(body.carries), len(body.ys)
    return _loop.LoopTasks(tuple(bodies), table, *sizes, folds), body


# ---- equations in no task, or in several --------------------------------------------------------


def _repeatable(body: Body) -> list[bool]:
    """Tells for each equation whether each task that reads its results repeats it.

    So it is if the equation depends on no microbatch; or if it is in no stage's call, and depends
    on slices of a microbatch, but on no stage or carry.
    """
    varying = _jaxprs.descendants(body.eqns, [*body.carries, *body.xs])
    from_stages = body.from_stages(body.carries)

    def is_repeatable(eqn, position) -> bool:
        if eqn.effects:
            return False
        if not any(v in varying for v in eqn.outvars):
            return True
        return position is None and not any(v in from_stages for v in eqn.outvars)

    return [is_repeatable(e, p) for e, p in body.placed()]


def start_with_zeros(body: Body) -> Body:
    """Puts zeros in place of carries that no microbatch reads: no rank needs their first values.

    An example is the average that a BatchNorm gives for evaluation.
    """
    read = body.read()
    zeros = {v: jnp.zeros(v.aval.shape, v.aval.dtype) for v in body.carries if v not in read}
    return dataclasses.replace(body, values={**body.values, **zeros})


def keep_constants(body: Body) -> Body:
    """Makes the carries that each microbatch hands on unchanged (a random key) constants."""
    read = {v for e in body.eqns for v in _jaxprs.variables(e.invars)}.union(
        _jaxprs.variables(body.ys)
    )
    pairs = zip(body.carries, body.carry_outs, strict=True)
    kept = [carry for carry, out in pairs if out is carry and carry in read]
    known = _jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in kept)
    return body.with_equations(
        [(known.rename(e), p) for e, p in body.placed()],
        consts=(*body.consts, *map(known, kept)),
        ys=tuple(map(known, body.ys)),
        values={**body.values, **{known(v): body.values[v] for v in kept}},
    )


# ---- the task of an equation --------------------------------------------------------------------


def place_glue(body: Body) -> Body:
    """Gives a task to each equation that is not repeated by each task that reads its results."""
    flow, repeatable = Flow(body.eqns), _repeatable(body)
    position = [None if r else p for p, r in zip(body.position, repeatable, strict=True)]

    def first_reader(i: int, near: list[int]) -> int | None:
        """Puts an equation that tasks read into the first of these tasks."""
        if position[i] is None and not repeatable[i]:
            position[i] = min(near, default=None)
        return position[i]

    def last_source(i: int, near: list[int]) -> int | None:
        """Puts one whose results only leave the loop into the last task it depends on."""
        if repeatable[i]:
            return None
        own = position[i]
        if own is None:
            own = position[i] = max(near, default=body.num_stages - 1)
        if (latest := max(near, default=own)) > own:
            raise ValueError(
                f"schedule: the `{body.eqns[i].primitive.name}`"
                f"{_compat.at_source_line(body.eqns[i])} of {body.task_name(own)} reads a value of "
                f"{body.task_name(latest)}, which comes after it: the loop body is not one forward "
                f"and one backward pass over the stages."
            )
        return own

    flow.up({}, first_reader, min)
    flow.down({}, last_source)
    return body.with_equations(zip(body.eqns, position, strict=True))


def keep_carries(body: Body) -> Body:
    """Makes the task that writes a carry hand the carry's old value on to later tasks that read it.

    By the time they run, the carry may have the value of a later microbatch. An example is a
    layer's state that the backward reads. A new value that no task makes, such as a flag that is
    set to a constant, is made by the first task that reads the carry.
    """
    owner, readers = body.owner(), body.readers()
    placed, outs = list(body.placed()), list(body.carry_outs)
    copies: list[tuple[Any, int]] = []
    #: For each carry that is handed on, the task that writes it, and the copy that others read.
    kept: dict[Any, tuple[int, Any]] = {}
    for i, (carry, out) in enumerate(zip(body.carries, body.carry_outs, strict=True)):
        reading = readers.get(carry, set())
        writer = None if _jaxprs.is_literal(out) else owner.get(out)
        if reading and writer is None and out is not carry:
            writer, outs[i] = min(reading), _jaxprs.fresh_var(carry)
            placed += [(e, writer) for e in _jaxprs.splice(jnp.copy, [out], [outs[i]])]
        is_last = writer is not None and reading <= {writer} and carry not in body.ys
        if writer is None or is_last or min(reading, default=writer) < writer:
            continue
        kept[carry] = writer, _jaxprs.fresh_var(carry)
        copies += [(e, writer) for e in _jaxprs.splice(jnp.copy, [carry], [kept[carry][1]])]

    def read(v, position):
        writer, before = (None, v) if _jaxprs.is_literal(v) else kept.get(v, (None, v))
        return v if writer == position else before

    placed = [(e.replace(invars=[read(v, p) for v in e.invars]), p) for e, p in placed]
    ys = tuple(read(v, None) for v in body.ys)
    return body.with_equations([*copies, *placed], carry_outs=tuple(outs), ys=ys)


#: The passes that a body goes through before its tasks are collected, in order.
PASSES: tuple[Callable[[Body], Body], ...] = (
    start_with_zeros,
    _stacked_sums.split_stacked_sums,
    _accumulators.hand_through_zeros,
    keep_constants,
    _invariants.hoist,
    _free_carries.carry_before,
    _accumulators.split_shared_sums,
    place_glue,
    keep_carries,
)


# ---- tasks as jaxprs ----------------------------------------------------------------------------


def _clusters(body: Body) -> list[Cluster]:
    """Makes the tasks as clusters; the last forward also makes the results that no task makes."""
    flow = Flow(body.eqns, body.outputs)
    position = {i: p for i, p in enumerate(body.position) if p is not None}
    results = dict.fromkeys(_jaxprs.variables(body.outputs))
    loose = [v for v in results if v in flow.maker and flow.maker[v] not in position]
    clusters = outline(flow, position, {body.num_stages - 1: loose})
    readers: dict[Any, list[int]] = {}
    for cluster in clusters:
        for v in dict.fromkeys(v for e in cluster.eqns for v in _jaxprs.variables(e.invars)):
            readers.setdefault(v, []).append(cluster.group)
    for carry, out in zip(body.carries, body.carry_outs, strict=True):
        reading = readers.get(carry, [])
        writer = None if _jaxprs.is_literal(out) else position.get(flow.maker.get(out, -1))
        if reading and reading != [writer]:
            line = "" if writer is None else _compat.at_source_line(body.eqns[flow.maker[out]])
            raise ValueError(
                f"schedule: a value carried from one microbatch to the next is read by "
                f"{' and '.join(map(body.task_name, reading))}, but made by "
                f"{'none of them' if writer is None else body.task_name(writer)}{line}; only the "
                f"task that makes it, and those after it, can read it."
            )
    return clusters


def _halves(cluster: Cluster, body: Body) -> tuple[Cluster, Cluster]:
    """Splits a backward into what makes the values that are sent, and the rest.

    The first half also makes the carries that it reads: its next microbatch may come before this
    one's second half. To the second half it hands on the carry's old value.
    """
    pairs = zip(body.carries, body.carry_outs, strict=True)
    own = {carry: out for carry, out in pairs if out in cluster.left}
    early: list[Any] = []
    while True:
        first, second = _split_backward.split_backward(cluster.eqns, [*cluster.sent, *early])
        read, again = (
            {v for e in half for v in _jaxprs.variables(e.invars)} for half in (first, second)
        )
        more = [out for carry, out in own.items() if carry in read and out not in early]
        if not more:
            break
        early += more
    both = [carry for carry in own if carry in read and carry in again]
    known = _jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in both)
    copies = [e for v in known.of for e in _jaxprs.splice(jnp.copy, [v], [known(v)])]
    first, second = [*copies, *first], list(map(known.rename, second))
    free = _from_constants(first, body.consts)
    repeated = [v for e in second for v in _jaxprs.variables(e.invars) if v in free]
    pure = [e for e in first if all(v in free for v in e.outvars)]
    second = [*_jaxprs.needed(pure, repeated), *second]
    late = [v for v in cluster.left if v not in early]
    read = {v for e in second for v in _jaxprs.variables(e.invars)}.union(late)
    kept = [v for e in first for v in e.outvars if v in read and v not in free]
    sent = list(dict.fromkeys([*cluster.sent, *kept]))
    return (
        Cluster(cluster.group, first, sent, early, []),
        Cluster(cluster.group, second, [], late, []),
    )


def _write(body: Body, splits: bool) -> tuple[list[_loop.TaskBody], list[Any]]:
    """Makes the jaxprs of the tasks, and finds the constants that they read."""
    last_forward, made = body.num_stages - 1, {v for e in body.eqns for v in e.outvars}
    refs = {v: _loop.Ref("carry", i) for i, v in enumerate(body.carries)}
    refs.update((v, _loop.Ref("x", i)) for i, v in enumerate(body.xs))
    #: The refs of the loop's results; those that no equation makes leave with the last forward.
    given: dict[Any, list[_loop.Ref]] = {}
    loose: list[tuple[Any, _loop.Ref]] = []
    for source, variables in (("carry", body.carry_outs), ("y", body.ys)):
        for i, v in enumerate(variables):
            if source == "carry" and v is body.carries[i]:
                continue
            if _jaxprs.is_literal(v) or v not in made:
                loose.append((v, _loop.Ref(source, i)))
            else:
                given.setdefault(v, []).append(_loop.Ref(source, i))
    tasks: list[tuple[Kind, Cluster]] = []
    for cluster in _clusters(body):
        if cluster.group <= last_forward:
            tasks.append((Kind.F, cluster))
        elif not splits:
            tasks.append((Kind.B, cluster))
        else:
            tasks += zip((Kind.I, Kind.W), _halves(cluster, body), strict=True)
    numbers, consts, bodies = itertools.count(), [], []
    for kind, cluster in tasks:
        for v in cluster.sent:
            if v not in refs:
                refs[v] = _loop.Ref("value", next(numbers))
        outputs = [(v, refs[v]) for v in cluster.sent]
        outputs += [(v, ref) for v in [*cluster.wanted, *cluster.left] for ref in given[v]]
        outputs += loose if cluster.group == last_forward and kind is Kind.F else []
        atoms = [v for v, _ in outputs]
        kept = _jaxprs.needed(cluster.eqns, atoms)
        if not outputs and not kept:
            continue
        stage = body.stage(cluster.group)
        part = _jaxprs.part(kept, atoms, f"{kind}{stage}")
        for v in part.inputs:
            if v not in refs:
                refs[v] = _loop.Ref("const", len(consts))
                consts.append(v)
        bodies.append(
            _loop.TaskBody(
                kind,
                stage,
                part.jaxpr,
                tuple(refs[v] for v in part.inputs),
                tuple(ref for _, ref in outputs),
                kind is not Kind.F and cluster.group in body.recomputing,
            )
        )
    return bodies, consts


def _from_constants(eqns: Sequence[Any], consts: Sequence[Any]) -> set[Any]:
    """Finds the variables that depend on constants alone: what costs something has been hoisted."""
    known = set(consts)
    for e in eqns:
        if not e.effects and all(v in known for v in _jaxprs.variables(e.invars)):
            known.update(e.outvars)
    return known.difference(consts)
