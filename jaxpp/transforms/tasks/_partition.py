"""Partitions the body of a microbatch loop into the tasks of each stage.

The calls of outlined stages are the anchors: forward calls are in F tasks, transposed ones in B
tasks. An equation outside of these calls joins a task by dependence: the first task that reads its
results, or, if they only leave the loop (a loss, an accumulation), the last task that it depends
on. An equation that depends on no microbatch runs before the loop, or, if it costs nothing, in each
task that reads it.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp.schedules import Kind, Table
from jaxpp.transforms.stacked import Bounds
from jaxpp.transforms.tasks import _accumulators, _invariants, _loop, _split_backward, _stacked_sums
from jaxpp.transforms.tasks._body import Body, read_body


@dataclasses.dataclass(frozen=True)
class Partition:
    """A loop's tasks, and the computations before and after the loop.

    The tasks have more constants than the loop: the carries `kept`, which no microbatch changes,
    and then the results of `hoisted`, which runs before the loop and reads the constants
    `hoisted_from`. Carry i of the loop is cut into rows at `cuts[i]`, if that is not None. After
    the cuts, carry i is the sum of the carries `summands[i]` of the tasks; the carries of the tasks
    that are new have the types `zeros`, and begin with zeros.
    """

    tasks: _loop.LoopTasks
    kept: tuple[int, ...]
    hoisted: _jaxprs.Part
    hoisted_from: tuple[int, ...]
    cuts: tuple[Bounds | None, ...]
    summands: tuple[tuple[int, ...], ...]
    zeros: tuple[Any, ...]


def partition(jaxpr: jex.ClosedJaxpr, num_consts: int, num_carry: int, table: Table) -> Partition:
    """Partitions a loop body into tasks.

    Args:
        jaxpr: one iteration; it takes constants, carries and slices, and gives carries and results.
        num_consts: the number of its inputs that are constants.
        num_carry: the number of its inputs, and of its outputs, that are carries.
        table: the table of the loop; it says whether the backward is split into I and W.

    Raises:
        ValueError: if the body is not a forward and a backward pass over the stages.
    """
    stacked = _stacked_sums.split_stacked_sums(read_body(jaxpr, num_consts, num_carry))
    opened, kept = _with_kept_carries(_accumulators.hand_through_zeros(stacked.body))
    num_carry = len(opened.carries)
    body, hoisted = _invariants.hoist(opened)
    sums = _accumulators.split_shared_sums(body)
    body = sums.body
    body = _keep_carries(_place_glue(body, _repeatable(body)))
    repeatable = [p is None for p in body.position]
    tasks = _loop.LoopTasks(
        tuple(_bodies(body, _collect(body, repeatable), table.splits_backward)),
        table,
        len(body.consts),
        len(body.carries),
        len(body.ys),
        sums.folds,
    )
    return Partition(
        tasks,
        kept,
        hoisted,
        tuple(opened.consts.index(v) for v in hoisted.inputs),
        stacked.cuts,
        sums.summands,
        tuple(v.aval for v in body.carries[num_carry:]),
    )


# ---- equations in no task, or in several --------------------------------------------------------


def _needed(eqns: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Gives the equations that outputs need."""
    return [e for e, k in zip(eqns, _jaxprs.ancestors(eqns, outputs), strict=True) if k]


def _repeatable(body: Body) -> list[bool]:
    """Tells for each equation whether each task that reads its results repeats it.

    So it is if the equation depends on no microbatch; or if it is in no stage's call, and depends
    on slices of a microbatch, but on no stage or carry.
    """
    varying = _jaxprs.descendants(body.eqns, [*body.carries, *body.xs])
    staged = [v for e, p in body.placed() if p is not None for v in e.outvars if v in varying]
    from_stages = _jaxprs.descendants(body.eqns, [*staged, *body.carries])

    def is_repeatable(eqn, position) -> bool:
        if eqn.effects:
            return False
        if not any(v in varying for v in eqn.outvars):
            return True
        return position is None and not any(v in from_stages for v in eqn.outvars)

    return [is_repeatable(e, p) for e, p in body.placed()]


def _with_kept_carries(body: Body) -> tuple[Body, tuple[int, ...]]:
    """Makes the carries that each microbatch hands on unchanged (a random key) constants.

    Also gives the numbers of these carries.
    """
    read = {v for e in body.eqns for v in _jaxprs.variables(e.invars)}
    read.update(_jaxprs.variables(body.ys))
    pairs = enumerate(zip(body.carries, body.carry_outs, strict=True))
    kept = tuple(i for i, (carry, out) in pairs if out is carry and carry in read)
    known = _jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in [body.carries[i] for i in kept])
    placed = [(known.rename(e), p) for e, p in body.placed()]
    consts = (*body.consts, *known.of.values())
    return body.with_equations(placed, consts=consts, ys=tuple(map(known, body.ys))), kept


# ---- the task of an equation --------------------------------------------------------------------


def _place_glue(body: Body, repeatable: Sequence[bool]) -> Body:
    """Gives a task to each equation that is not repeated."""
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


def _keep_carries(body: Body) -> Body:
    """Makes the task that writes a carry hand the carry's old value on to later tasks that read it.

    By the time they run, the carry may have the value of a later microbatch. An example is a
    layer's state that the backward reads. A new value that no task makes, such as a flag that is
    set to a constant, is made by the first task that reads the carry.
    """
    owner = {v: p for e, p in body.placed() if p is not None for v in e.outvars}
    readers: dict[Any, set[int]] = {}
    for e, p in body.placed():
        if p is not None:
            for v in _jaxprs.variables(e.invars):
                readers.setdefault(v, set()).add(p)
    first, last, outs = [], [], list(body.carry_outs)
    kept: dict[Any, tuple[int, Any]] = {}
    for i, (carry, out) in enumerate(zip(body.carries, body.carry_outs, strict=True)):
        writer = None if _jaxprs.is_literal(out) else owner.get(out)
        reading = readers.get(carry, set())
        if reading and writer is None and out is not carry:
            writer, outs[i] = min(reading), _jaxprs.fresh_var(carry)
            last += [(e, writer) for e in _jaxprs.splice(jnp.copy, [out], [outs[i]])]
        if writer is None or min(reading, default=writer) < writer:
            continue
        if reading - {writer} or carry in body.ys:
            kept[carry] = writer, _jaxprs.fresh_var(carry)
            first += [(e, writer) for e in _jaxprs.splice(jnp.copy, [carry], [kept[carry][1]])]

    def read(v, position):
        writer, before = (None, v) if _jaxprs.is_literal(v) else kept.get(v, (None, v))
        return v if writer == position else before

    placed = [
        (e.replace(invars=[read(v, p) for v in e.invars]), p) for e, p in [*body.placed(), *last]
    ]
    ys = tuple(read(v, None) for v in body.ys)
    return body.with_equations([*first, *placed], carry_outs=tuple(outs), ys=ys)


@dataclasses.dataclass(frozen=True)
class _Node:
    """A task before it is a jaxpr: its equations, and its results.

    `sent` are the values that other tasks read, `left` those that are results of the loop.
    """

    position: int
    eqns: list[Any]
    sent: list[Any]
    left: list[Any]


def _collect(body: Body, repeatable: Sequence[bool]) -> list[_Node]:
    """Makes the nodes, in the order of their positions; each holds the equations repeated in it."""
    owner = {v: p for e, p in body.placed() if p is not None for v in e.outvars}
    made = body.maker()
    results = dict.fromkeys(_jaxprs.variables(body.outputs))
    eqns_of, loose_of = [], []
    for position in range(2 * body.num_stages):
        # Results that no task makes leave with the last forward.
        last_forward = position == body.num_stages - 1
        loose = [v for v in results if v in made and v not in owner] if last_forward else []
        own = [p == position for p in body.position]
        needed = {v for e, o in zip(body.eqns, own, strict=True) if o for v in e.invars
                  if not _jaxprs.is_literal(v)}.union(loose)  # fmt: skip
        for i in reversed(range(len(body.eqns))):
            if repeatable[i] and any(v in needed for v in body.eqns[i].outvars):
                own[i] = True
                needed.update(_jaxprs.variables(body.eqns[i].invars))
        eqns_of.append([e for e, o in zip(body.eqns, own, strict=True) if o])
        loose_of.append(loose)
    read = [{v for e in eqns for v in _jaxprs.variables(e.invars)} for eqns in eqns_of]
    _check_carries(body, read, owner)
    nodes = []
    for position, (eqns, loose) in enumerate(zip(eqns_of, loose_of, strict=True)):
        elsewhere = set().union(*read[:position], *read[position + 1 :])
        mine = [v for e in eqns for v in e.outvars if owner.get(v) == position]
        sent = [v for v in mine if v in elsewhere]
        nodes.append(_Node(position, eqns, sent, [*loose, *(v for v in mine if v in results)]))
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


# ---- tasks as jaxprs ----------------------------------------------------------------------------


def _bodies(body: Body, nodes: Sequence[_Node], split: bool) -> list[_loop.TaskBody]:
    writer = _BodyWriter(body)
    for node in nodes:
        stage, recomputes = body.stage(node.position), node.position in body.recomputing
        if node.position < body.num_stages:
            writer.add(Kind.F, stage, node.eqns, node.sent, node.left)
        elif not split:
            writer.add(Kind.B, stage, node.eqns, node.sent, node.left, recomputes)
        else:
            first, second = _split_backward.split_backward(node.eqns, node.sent)
            free = _from_constants(first, body.consts)
            again = [v for e in second for v in _jaxprs.variables(e.invars) if v in free]
            pure = [e for e in first if all(v in free for v in e.outvars)]
            second = [*_needed(pure, again), *second]
            needed = {v for e in second for v in _jaxprs.variables(e.invars)}.union(node.left)
            kept = [v for e in first for v in e.outvars if v in needed and v not in free]
            sent = list(dict.fromkeys([*node.sent, *kept]))
            writer.add(Kind.I, stage, first, sent, [], recomputes)
            writer.add(Kind.W, stage, second, [], node.left, recomputes)
    return writer.bodies


def _from_constants(eqns: Sequence[Any], consts: Sequence[Any]) -> set[Any]:
    """Finds the variables that depend on constants alone: what costs something has been hoisted."""
    known = set(consts)
    for e in eqns:
        if not e.effects and all(v in known for v in _jaxprs.variables(e.invars)):
            known.update(e.outvars)
    return known.difference(consts)


class _BodyWriter:
    """Makes jaxprs of tasks, and numbers the values between them."""

    def __init__(self, body: Body):
        self.bodies: list[_loop.TaskBody] = []
        self._num_stages = body.num_stages
        self._numbers = itertools.count()
        self._refs: dict[Any, _loop.Ref] = {}
        for source, variables in (("const", body.consts), ("carry", body.carries), ("x", body.xs)):
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

    def add(self, kind: Kind, stage: int, eqns, sent, left, recomputes=False) -> None:
        """Adds a task that makes values for other tasks, and results of the loop."""
        for v in sent:
            if v not in self._refs:
                self._refs[v] = _loop.Ref("value", next(self._numbers))
        given = [(v, self._refs[v]) for v in sent]
        given += [(v, ref) for v in left for ref in self._results[v]]
        if kind is Kind.F and stage == self._num_stages - 1:
            given += self._loose
        outputs = [v for v, _ in given]
        kept = _needed(eqns, outputs)
        if not given and not kept:
            return
        part = _jaxprs.part(kept, outputs, f"{kind}{stage}")
        inputs = tuple(self._refs[v] for v in part.inputs)
        refs = tuple(ref for _, ref in given)
        body = _loop.TaskBody(kind, stage, part.jaxpr, inputs, refs, recomputes)
        self.bodies.append(body)
