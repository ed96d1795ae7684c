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
    writer = _BodyWriter(body)
    for node in _collect(body):
        writer.node(node, table.splits_backward)
    body = dataclasses.replace(body, consts=tuple(writer.consts))
    folds = {i: body.folds[v] for i, v in enumerate(body.carries) if v in body.folds}
    sizes = len(body.consts), len(body.carries), len(body.ys)
    return _loop.LoopTasks(tuple(writer.bodies), table, *sizes, folds), body


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
    repeatable = _repeatable(body)
    position = [None if r else p for p, r in zip(body.position, repeatable, strict=True)]
    # An equation that tasks read joins the first of these tasks.
    first_reader: dict[Any, int] = {}
    for i in reversed(range(len(body.eqns))):
        eqn = body.eqns[i]
        if position[i] is None and not repeatable[i]:
            found = [first_reader[v] for v in eqn.outvars if v in first_reader]
            position[i] = min(found, default=None)
        if (own := position[i]) is not None:
            for v in _jaxprs.variables(eqn.invars):
                first_reader[v] = min(first_reader.get(v, own), own)
    # One whose results only leave the loop joins the last task it depends on, or the last forward.
    made_at: dict[Any, int] = {}
    for i, eqn in enumerate(body.eqns):
        if repeatable[i]:
            continue
        latest = max((made_at.get(v, -1) for v in _jaxprs.variables(eqn.invars)), default=-1)
        own = position[i]
        if own is None:
            own = position[i] = latest if latest >= 0 else body.num_stages - 1
        if latest > own:
            raise ValueError(
                f"schedule: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} of "
                f"{body.task_name(own)} reads a value of {body.task_name(latest)}, which comes "
                f"after it: the loop body is not one forward and one backward pass over the stages."
            )
        made_at.update(dict.fromkeys(eqn.outvars, own))
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


@dataclasses.dataclass(frozen=True)
class _Node:
    """A task before it is a jaxpr: its equations, and its results.

    `sent` are the values that other tasks read, `left` those that are results of the loop.
    """

    position: int
    eqns: list[Any]
    sent: list[Any]
    left: list[Any]


def _collect(body: Body) -> list[_Node]:
    """Makes the nodes, in the order of their positions.

    Each holds the equations without a position that it needs. The last forward also makes the
    results of the loop that no task makes.
    """
    owner, made = body.owner(), body.maker()
    results = dict.fromkeys(_jaxprs.variables(body.outputs))
    loose = [v for v in results if v in made and v not in owner]
    positions = range(2 * body.num_stages)
    nodes = []
    for position in positions:
        more = loose if position == body.num_stages - 1 else []
        nodes.append(_Node(position, body.equations_at(position, more), [], [*more]))
    read = [{v for e in node.eqns for v in _jaxprs.variables(e.invars)} for node in nodes]
    _check_carries(body, read, owner)
    for node in nodes:
        elsewhere = set().union(*(r for p, r in enumerate(read) if p != node.position))
        mine = [v for e in node.eqns for v in e.outvars if owner.get(v) == node.position]
        node.sent.extend(v for v in mine if v in elsewhere)
        node.left.extend(v for v in mine if v in results)
    return nodes


def _check_carries(body: Body, read: Sequence[set[Any]], owner: dict[Any, int]) -> None:
    made = body.maker()
    for carry, out in zip(body.carries, body.carry_outs, strict=True):
        reading = [position for position, variables in enumerate(read) if carry in variables]
        writer = None if _jaxprs.is_literal(out) else owner.get(out)
        if reading and reading != [writer]:
            line = "" if writer is None else _compat.at_source_line(body.eqns[made[out]])
            raise ValueError(
                f"schedule: a value carried from one microbatch to the next is read by "
                f"{' and '.join(map(body.task_name, reading))}, but made by "
                f"{'none of them' if writer is None else body.task_name(writer)}{line}; only the "
                f"task that makes it, and those after it, can read it."
            )


class _BodyWriter:
    """Makes jaxprs of tasks, and numbers the values between them and the constants they read."""

    def __init__(self, body: Body):
        self.body = body
        self.bodies: list[_loop.TaskBody] = []
        #: The constants that tasks read: none reads a stacked parameter whose slices are hoisted.
        self.consts: list[Any] = []
        self._numbers = itertools.count()
        self._refs: dict[Any, _loop.Ref] = {}
        for source, variables in (("carry", body.carries), ("x", body.xs)):
            self._refs.update((v, _loop.Ref(source, i)) for i, v in enumerate(variables))
        # The refs of the loop's results; those that no equation makes leave with the last forward.
        made = body.maker()
        self._results: dict[Any, list[_loop.Ref]] = {}
        self._loose: list[tuple[Any, _loop.Ref]] = []
        for source, variables in (("carry", body.carry_outs), ("y", body.ys)):
            for i, v in enumerate(variables):
                if source == "carry" and v is body.carries[i]:
                    continue
                ref = _loop.Ref(source, i)
                if _jaxprs.is_literal(v) or v not in made:
                    self._loose.append((v, ref))
                else:
                    self._results.setdefault(v, []).append(ref)

    def node(self, node: _Node, splits: bool) -> None:
        """Adds the task of a node, or both halves if it is a backward that is split."""
        if node.position < self.body.num_stages:
            self._add(Kind.F, node, node.eqns, node.sent, node.left)
        elif not splits:
            self._add(Kind.B, node, node.eqns, node.sent, node.left)
        else:
            first, second, early = self._halves(node)
            free = _from_constants(first, self.body.consts)
            again = [v for e in second for v in _jaxprs.variables(e.invars) if v in free]
            pure = [e for e in first if all(v in free for v in e.outvars)]
            second = [*_jaxprs.needed(pure, again), *second]
            late = [v for v in node.left if v not in early]
            read = {v for e in second for v in _jaxprs.variables(e.invars)}.union(late)
            kept = [v for e in first for v in e.outvars if v in read and v not in free]
            self._add(Kind.I, node, first, list(dict.fromkeys([*node.sent, *kept])), early)
            self._add(Kind.W, node, second, [], late)

    def _halves(self, node: _Node) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits a backward; gives the results of the loop, too, that the first half makes.

        These are the carries that the first half reads: its next microbatch may come before this
        one's second half. To the second half it hands on the carry's old value.
        """
        pairs = zip(self.body.carries, self.body.carry_outs, strict=True)
        own = {carry: out for carry, out in pairs if out in node.left}
        early: list[Any] = []
        while True:
            wanted = [*node.sent, *early]
            first, second = _split_backward.split_backward(node.eqns, wanted)
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
        return [*copies, *first], list(map(known.rename, second)), early

    def _add(self, kind: Kind, node: _Node, eqns, sent, left) -> None:
        """Adds a task that makes values for other tasks, and results of the loop."""
        for v in sent:
            if v not in self._refs:
                self._refs[v] = _loop.Ref("value", next(self._numbers))
        given = [(v, self._refs[v]) for v in sent]
        given += [(v, ref) for v in left for ref in self._results[v]]
        if node.position == self.body.num_stages - 1:
            given += self._loose
        outputs = [v for v, _ in given]
        kept = _jaxprs.needed(eqns, outputs)
        if not given and not kept:
            return
        stage = self.body.stage(node.position)
        part = _jaxprs.part(kept, outputs, f"{kind}{stage}")
        for v in part.inputs:
            if v not in self._refs:
                self._refs[v] = _loop.Ref("const", len(self.consts))
                self.consts.append(v)
        inputs, refs = tuple(self._refs[v] for v in part.inputs), tuple(ref for _, ref in given)
        recomputes = kind is not Kind.F and node.position in self.body.recomputing
        self.bodies.append(_loop.TaskBody(kind, stage, part.jaxpr, inputs, refs, recomputes))


def _from_constants(eqns: Sequence[Any], consts: Sequence[Any]) -> set[Any]:
    """Finds the variables that depend on constants alone: what costs something has been hoisted."""
    known = set(consts)
    for e in eqns:
        if not e.effects and all(v in known for v in _jaxprs.variables(e.invars)):
            known.update(e.outvars)
    return known.difference(consts)
