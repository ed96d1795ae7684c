"""Partitions the body of a microbatch loop into the tasks of each stage.

The calls of outlined stages are the anchors: forward calls are in F tasks, transposed ones in B
tasks. An equation outside of these calls joins a task by dependence: the first task that reads its
results, or, if they only leave the loop (a loss, an accumulation), the last task that it depends
on. An equation that depends on no microbatch runs before the loop, or, if it costs nothing, in each
task that reads it.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _specs
from jaxpp._groups import Cluster, Flow, outline
from jaxpp._typing import Atom, Eqn, Var
from jaxpp.schedules import Kind, Table
from jaxpp.transforms.tasks import _accumulators, _hoisting, _loop, _split_backward
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def partition(loop: MicrobatchLoop, table: Table) -> tuple[_loop.ScheduledLoop, MicrobatchLoop]:
    """Makes the tasks of a loop that has been through all `PASSES`; also gives the loop of them.

    Raises:
        ValueError: if the body is not a forward and a backward pass over the stages.
    """
    tasks, results = _write(loop)
    known = {*loop.carries, *loop.xs, *(v for task in tasks for v in task.outvars)}
    read = dict.fromkeys(v for task in tasks for v in task.invars if v not in known)
    loop = dataclasses.replace(loop, consts=tuple(read))
    invars = [*loop.consts, *loop.carries, *loop.xs]
    body = _compat.make_closed_jaxpr(invars, results, tasks)
    folds = tuple(map(loop.folds.get, loop.carries))
    return _loop.ScheduledLoop(body, len(read), folds, table, loop.reverse), loop


# ---- equations in no task, or in several --------------------------------------------------------


def _repeatable(loop: MicrobatchLoop) -> list[bool]:
    """Tells for each equation whether each task that reads its results repeats it.

    So it is if the equation depends on no microbatch; or if it is in no stage's call, and depends
    on slices of a microbatch, but on no stage or carry.
    """
    varying = _jaxprs.descendants(loop.eqns, [*loop.carries, *loop.xs])
    from_stages = loop.from_stages(loop.carries)

    def is_repeatable(eqn, position) -> bool:
        if eqn.effects:
            return False
        if not any(v in varying for v in eqn.outvars):
            return True
        return position is None and not any(v in from_stages for v in eqn.outvars)

    return [is_repeatable(e, p) for e, p in loop.placed()]


def start_with_zeros(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Puts zeros in place of carries that no microbatch reads: no rank needs their first values.

    An example is the average that a BatchNorm gives for evaluation.
    """
    read = loop.read()
    unread = [v for v in loop.carries if v not in read]
    eqns, zeros = _jaxprs.record(lambda: [_specs.filled(v.aval, 0) for v in unread], [])
    operands = {**loop.operands, **dict(zip(unread, zeros, strict=True))}
    return dataclasses.replace(loop, operands=operands, before=(*loop.before, *eqns))


def keep_constants(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Makes the carries that each microbatch hands on unchanged (a random key) constants."""
    read = _jaxprs.operands_of(loop.eqns, loop.ys)
    pairs = zip(loop.carries, loop.carry_outs, strict=True)
    kept = [carry for carry, out in pairs if out is carry and carry in read]
    known = _jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in kept)
    return loop.with_equations(
        [(known.rename(e), p) for e, p in loop.placed()],
        consts=(*loop.consts, *map(known, kept)),
        ys=tuple(map(known, loop.ys)),
        operands={**loop.operands, **{known(v): loop.operands[v] for v in kept}},
    )


# ---- the task of an equation --------------------------------------------------------------------


def place_glue(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Gives a task to each equation that is not repeated by each task that reads its results."""
    flow, repeatable = Flow(loop.eqns), _repeatable(loop)
    position = [None if r else p for p, r in zip(loop.position, repeatable, strict=True)]

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
            own = position[i] = max(near, default=None)
        if own is not None and (latest := max(near, default=own)) > own:
            raise ValueError(
                f"schedule: the `{loop.eqns[i].primitive.name}`"
                f"{_compat.at_source_line(loop.eqns[i])} of {loop.task_name(own)} reads a value of "
                f"{loop.task_name(latest)}, which comes after it: the loop body is not one forward "
                f"and one backward pass over the stages."
            )
        return own

    flow.up({}, first_reader, min)
    flow.down({}, last_source)
    flow.up({}, first_reader, min)  # of what depends on carries alone
    placed = [
        loop.num_stages - 1 if p is None and not r else p
        for p, r in zip(position, repeatable, strict=True)
    ]
    return loop.with_equations(zip(loop.eqns, placed, strict=True))


def keep_carries(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Makes the task that writes a carry hand the carry's old value on to later tasks that read it.

    By the time they run, the carry may have the value of a later microbatch. An example is a
    layer's state that the backward reads. A new value that no task makes, such as a flag that is
    set to a constant, is made by the first task that reads the carry.
    """
    owner, readers = loop.owner(), loop.readers()
    placed, outs = list(loop.placed()), list(loop.carry_outs)
    copies: list[tuple[Eqn, int | None]] = []
    #: For each carry that is handed on, the task that writes it, and the copy that others read.
    kept: dict[Var, tuple[int, Var]] = {}
    for i, (carry, out) in enumerate(zip(loop.carries, loop.carry_outs, strict=True)):
        reading = readers.get(carry, set())
        writer = None if _jaxprs.is_literal(out) else owner.get(out)
        if reading and writer is None and out is not carry:
            writer, outs[i] = min(reading), (made := _jaxprs.fresh_var(carry))
            placed += [(e, writer) for e in _jaxprs.splice(jnp.copy, [out], [made])]
        is_last = writer is not None and reading <= {writer} and carry not in loop.ys
        if writer is None or is_last or min(reading, default=writer) < writer:
            continue
        kept[carry] = writer, _jaxprs.fresh_var(carry)
        copies += [(e, writer) for e in _jaxprs.splice(jnp.copy, [carry], [kept[carry][1]])]

    def read(v, position):
        writer, before = (None, v) if _jaxprs.is_literal(v) else kept.get(v, (None, v))
        return v if writer == position else before

    placed = [(e.replace(invars=[read(v, p) for v in e.invars]), p) for e, p in placed]
    ys = tuple(read(v, None) for v in loop.ys)
    return loop.with_equations([*copies, *placed], carry_outs=tuple(outs), ys=ys)


#: The passes that a loop goes through before its tasks are made, in order.
PASSES: tuple[Callable[[MicrobatchLoop], MicrobatchLoop], ...] = (
    start_with_zeros,
    _accumulators.split_stacked_sums,
    _accumulators.hand_through_zeros,
    keep_constants,
    _hoisting.hoist,
    _hoisting.carry_before,
    _accumulators.split_shared_sums,
    place_glue,
    _split_backward.split_backwards,
    keep_carries,
)


# ---- tasks as jaxprs ----------------------------------------------------------------------------


def _clusters(loop: MicrobatchLoop) -> list[Cluster]:
    """Makes the tasks as clusters; the last forward also makes the results that no task makes."""
    flow = Flow(loop.eqns, loop.outputs)
    position = {i: p for i, p in enumerate(loop.position) if p is not None}
    results = dict.fromkeys(_jaxprs.variables(loop.outputs))
    loose = [v for v in results if v in flow.maker and flow.maker[v] not in position]
    clusters = outline(flow, position, {loop.num_stages - 1: loose})
    readers: dict[Var, list[int]] = {}
    for cluster in clusters:
        for v in dict.fromkeys(v for e in cluster.eqns for v in _jaxprs.variables(e.invars)):
            readers.setdefault(v, []).append(cluster.group)
    for carry, out in zip(loop.carries, loop.carry_outs, strict=True):
        reading = readers.get(carry, [])
        maker = flow.maker_of(out)
        writer = None if maker is None else position.get(maker)
        if reading and reading != [writer]:
            line = "" if maker is None else _compat.at_source_line(loop.eqns[maker])
            raise ValueError(
                f"schedule: a value carried from one microbatch to the next is read by "
                f"{' and '.join(map(loop.task_name, reading))}, but made by "
                f"{'none of them' if writer is None else loop.task_name(writer)}{line}; only the "
                f"task that makes it, and those after it, can read it."
            )
    return clusters


def _write(loop: MicrobatchLoop) -> tuple[list[Eqn], list[Atom]]:
    """Makes the equations of the tasks, and the variables of the results of a microbatch."""
    made = set(_jaxprs.results_of(loop.eqns))
    results = list(loop.outputs)
    #: The numbers of the results that are a variable; those that no equation makes leave with the
    #: last forward.
    given: dict[Var, list[int]] = {}
    loose: list[int] = []
    for n, v in enumerate(results):
        if n < len(loop.carries) and v is loop.carries[n]:
            continue
        if _jaxprs.is_literal(v) or v not in made:
            loose.append(n)
        else:
            given.setdefault(v, []).append(n)
    recomputing = {loop.stage(p) for p in loop.recomputing}

    def on_one_device(cluster: Cluster) -> tuple[int, int]:
        """The halves of a backward run one after the other."""
        p = cluster.group
        return p if p < 2 * loop.num_stages else p - loop.num_stages, p

    tasks = []
    for cluster in sorted(_clusters(loop), key=on_one_device):
        key = _loop.Key(loop.kind(cluster.group), loop.stage(cluster.group))
        numbers = [n for v in [*cluster.wanted, *cluster.left] for n in given[v]]
        numbers += loose if cluster.group == loop.num_stages - 1 else []
        atoms = [*cluster.sent, *(loop.outputs[n] for n in numbers)]
        kept = _jaxprs.needed(cluster.eqns, atoms)
        if not atoms and not kept:
            continue
        part = _jaxprs.part(kept, atoms, str(key))
        for n in numbers:
            results[n] = _jaxprs.fresh_var(results[n])
        outvars = [*cluster.sent, *(results[n] for n in numbers)]
        recomputes = key.kind is not Kind.F and key.stage in recomputing
        tasks.append(_loop.make_task(key, part.jaxpr, part.inputs, outvars, recomputes))
    return tasks, results
