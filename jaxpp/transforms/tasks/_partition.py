"""Partitions the body of a microbatch loop into the tasks of each stage.

The calls of outlined stages are the anchors: forward calls are in F tasks, transposed ones in B
tasks. An equation outside of these calls joins a task by dependence: the first task that reads its
results, or, if they only leave the loop (a loss, an accumulation), the last task that it depends
on. An equation that depends on no microbatch runs before the loop, or, if it costs nothing, in each
task that reads it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jaxpp import _compat, _specs, jaxprs
from jaxpp.jaxprs import Atom, Cluster, Eqn, Flow, Var, outline
from jaxpp.schedules import Kind
from jaxpp.transforms.tasks import _accumulators, _hoisting, _split_backward
from jaxpp.transforms.tasks._loop import Grouped, Key, ScheduledLoop, in_flow, make_task


def partition(loop: ScheduledLoop) -> ScheduledLoop:
    """Makes the tasks of a loop that has been through all passes.

    Raises:
        ValueError: if the body is not a forward and a backward pass over the stages.
    """
    tasks, results = _write(loop)
    known = {*loop.carries, *loop.xs, *(v for task in tasks for v in task.outvars)}
    read = dict.fromkeys(v for task in tasks for v in task.invars if v not in known)
    return loop.with_equations(
        ((task, task.params["key"]) for task in tasks),
        consts=tuple(read),
        carry_outs=tuple(results[: loop.num_carry]),
        ys=tuple(results[loop.num_carry :]),
    )


# ---- equations in no task, or in several --------------------------------------------------------


def _repeatable(loop: ScheduledLoop) -> list[bool]:
    """Tells for each equation whether each task that reads its results repeats it.

    So it is if the equation depends on no microbatch; or if it is in no stage's call, and depends
    on slices of a microbatch, but on no stage or carry.
    """
    varying = jaxprs.descendants(loop.eqns, [*loop.carries, *loop.xs])
    staged = [v for e, key in loop.grouped if key for v in e.outvars if v in varying]
    from_stages = jaxprs.descendants(loop.eqns, [*staged, *loop.carries])
    return [
        not e.effects and (varying if key else varying & from_stages).isdisjoint(e.outvars)
        for e, key in loop.grouped
    ]


def start_with_zeros(loop: ScheduledLoop) -> ScheduledLoop:
    """Puts zeros in place of carries that no microbatch reads: no rank needs their first values.

    An example is the average that a BatchNorm gives for evaluation.
    """
    read = loop.read()
    unread = [v for v in loop.carries if v not in read]
    eqns, zeros = jaxprs.record(lambda: [_specs.filled(v.aval, 0) for v in unread], [])
    outside = {**loop.outside, **dict(zip(unread, zeros, strict=True))}
    return dataclasses.replace(loop, outside=outside, before=(*loop.before, *eqns))


def keep_constants(loop: ScheduledLoop) -> ScheduledLoop:
    """Makes the carries that each microbatch hands on unchanged (a random key) constants."""
    read = jaxprs.operands_of(loop.eqns, loop.ys)
    kept = [carry for carry, out in loop.becomes().items() if out is carry and carry in read]
    known = jaxprs.Substitution((v, jaxprs.fresh_var(v)) for v in kept)
    return loop.with_equations(
        [(known.rename(e), key) for e, key in loop.grouped],
        consts=(*loop.consts, *map(known, kept)),
        ys=tuple(map(known, loop.ys)),
        outside={**loop.outside, **{known(v): loop.outside[v] for v in kept}},
    )


# ---- the task of an equation --------------------------------------------------------------------


def sum_cotangents(loop: ScheduledLoop) -> ScheduledLoop:
    """Adds cotangents of one value in the last task that makes one, if it waits for the others.

    So stages of one rank send their sum. It is the sum that JAX adds up, in its order. Stages that
    wait for nothing of each other go on so: there the task adds that reads the sum. Where ranks
    have their stages plays no part, so that it changes no bits.
    """
    owner, behind = loop.owner(), {}

    def waits(key: Key, other: Key) -> bool:
        """Tells whether a task reads what depends on another one."""
        if other not in behind:
            results = jaxprs.results_of(e for e, of in loop.grouped if of == other)
            after = jaxprs.descendants(loop.eqns, results)
            behind[other] = {of for e, of in loop.grouped if not after.isdisjoint(e.outvars)}
        return key in behind[other]

    grouped = []
    for eqn, key in loop.grouped:
        if key is None and eqn.primitive.name == "add_any":
            sources = {owner.get(v) for v in jaxprs.variables(eqn.invars)}
            makers = {k for k in sources if k and k.kind is Kind.B}
            last = max(makers, default=None, key=in_flow)
            if last and makers == sources and all(waits(last, k) for k in makers - {last}):
                key = owner[eqn.outvars[0]] = last
        grouped.append((eqn, key))
    return loop.with_equations(grouped)


def place_glue(loop: ScheduledLoop) -> ScheduledLoop:
    """Gives a task to each equation that is not repeated by each task that reads its results."""
    flow, repeatable = Flow(loop.eqns), _repeatable(loop)
    task_of = [None if r else key for (_, key), r in zip(loop.grouped, repeatable, strict=True)]
    first, last = (functools.partial(choose, key=in_flow) for choose in (min, max))

    def first_reader(i: int, near: list[Key]) -> Key | None:
        """Puts an equation that tasks read into the first of these tasks."""
        if task_of[i] is None and not repeatable[i]:
            task_of[i] = first(near, default=None)
        return task_of[i]

    def last_source(i: int, near: list[Key]) -> Key | None:
        """Puts one whose results only leave the loop into the last task it depends on."""
        if repeatable[i]:
            return None
        task = task_of[i]
        if task is None:
            task = task_of[i] = last(near, default=None)
        if task and in_flow(latest := last(near, default=task)) > in_flow(task):
            raise ValueError(
                f"schedule: the `{loop.eqns[i].primitive.name}`"
                f"{_compat.at_source_line(loop.eqns[i])} of {_task_text(task)} reads a value of "
                f"{_task_text(latest)}, which comes after it: the loop body is not one forward "
                f"and one backward pass over the stages."
            )
        return task

    flow.up({}, first_reader, lambda *near: first(near))
    flow.down({}, last_source)
    flow.up({}, first_reader, lambda *near: first(near))  # of what depends on carries alone
    grouped = [
        (e, key or (None if r else loop.last_forward))
        for e, key, r in zip(loop.eqns, task_of, repeatable, strict=True)
    ]
    return loop.with_equations(grouped)


def _task_text(key: Key) -> str:
    """Names a task for an error message."""
    return f"{key.kind} of stage {key.stage}"


def keep_carries(loop: ScheduledLoop) -> ScheduledLoop:
    """Makes the task that writes a carry hand the carry's old value on to later tasks that read it.

    By the time they run, the carry may have the value of a later microbatch. An example is a
    layer's state that the backward reads. A new value that no task makes, such as a flag that is
    set to a constant, is made by the first task that reads the carry.
    """
    owner, readers = loop.owner(), loop.readers()
    grouped, outs = list(loop.grouped), list(loop.carry_outs)
    copies: list[Grouped] = []
    #: For each carry that is handed on, the task that writes it, and the copy that others read.
    kept: dict[Var, tuple[Key, Var]] = {}
    for i, (carry, out) in enumerate(loop.becomes().items()):
        reading = readers.get(carry, set())
        first = min(reading, default=None, key=in_flow)
        writer = None if jaxprs.is_literal(out) else owner.get(out)
        if first and writer is None and out is not carry:
            writer, outs[i] = first, (copied := jaxprs.fresh_var(carry))
            grouped += [(e, writer) for e in jaxprs.splice(jnp.copy, [out], [copied])]
        is_last = writer is not None and reading <= {writer} and carry not in loop.ys
        if writer is None or is_last or (first and in_flow(first) < in_flow(writer)):
            continue
        kept[carry] = writer, jaxprs.fresh_var(carry)
        copies += [(e, writer) for e in jaxprs.splice(jnp.copy, [carry], [kept[carry][1]])]

    def read(v, key):
        writer, before = (None, v) if jaxprs.is_literal(v) else kept.get(v, (None, v))
        return v if writer == key else before

    grouped = [(e.replace(invars=[read(v, key) for v in e.invars]), key) for e, key in grouped]
    ys = tuple(read(v, None) for v in loop.ys)
    return loop.with_equations([*copies, *grouped], carry_outs=tuple(outs), ys=ys)


#: The passes by which each equation of a loop gets a stage, in order; then the schedule is asked.
STAGE_PASSES: tuple[Callable[[ScheduledLoop], ScheduledLoop], ...] = (
    start_with_zeros,
    _accumulators.split_stacked_sums,
    _accumulators.hand_through_zeros,
    keep_constants,
    _hoisting.hoist,
    _accumulators.split_shared_sums,
    sum_cotangents,
    place_glue,
)
#: The passes of a loop that has its table, before its tasks are made.
TABLE_PASSES: tuple[Callable[[ScheduledLoop], ScheduledLoop], ...] = (
    _split_backward.split_backwards,
    keep_carries,
)


# ---- tasks as jaxprs ----------------------------------------------------------------------------


def _clusters(loop: ScheduledLoop) -> list[Cluster[Key]]:
    """Makes the tasks as clusters; the last forward also makes the results that no task makes."""
    flow = Flow(loop.eqns, loop.outputs)
    task_of = {i: key for i, (_, key) in enumerate(loop.grouped) if key}
    results = dict.fromkeys(jaxprs.variables(loop.outputs))
    loose = [v for v in results if v in flow.maker and flow.maker[v] not in task_of]
    clusters = outline(flow, task_of, {loop.last_forward: loose})
    readers: dict[Var, list[Key]] = {}
    for cluster in sorted(clusters, key=lambda cluster: in_flow(cluster.group)):
        for v in dict.fromkeys(v for e in cluster.eqns for v in jaxprs.variables(e.invars)):
            readers.setdefault(v, []).append(cluster.group)
    for carry, out in loop.becomes().items():
        reading = readers.get(carry, [])
        maker = flow.maker_of(out)
        writer = None if maker is None else task_of.get(maker)
        if reading and reading != [writer]:
            raise _carried_apart(loop, carry, reading, maker, writer)
    return clusters


def _carried_apart(
    loop: ScheduledLoop,
    carry: Var,
    reading: Sequence[Key],
    maker: int | None,
    writer: Key | None,
) -> ValueError:
    """Makes the error for a state that a task reads which is not the one that makes the next."""
    reader = next(e for e in loop.eqns if carry in jaxprs.variables(e.invars))
    line = "" if maker is None else _compat.at_source_line(loop.eqns[maker])
    return ValueError(
        f"schedule: a value {carry.aval.str_short()} that is carried from one microbatch to the "
        f"next is read by {' and '.join(map(_task_text, reading))}"
        f"{_compat.at_source_line(reader)}, but made by "
        f"{'none of them' if writer is None else _task_text(writer)}{line}; only the task that "
        f"makes it, and those after it, can read it. Make it where it is read, or cut elsewhere: "
        f"split_stages(at=...); what depends on no stage, such as a weight that falls from "
        f"microbatch to microbatch, compute for all of them before, and give it in slices."
    )


def _write(loop: ScheduledLoop) -> tuple[list[Eqn], list[Atom]]:
    """Makes the equations of the tasks, and the variables of the results of a microbatch."""
    computed = set(jaxprs.results_of(loop.eqns))
    results = list(loop.outputs)
    #: The numbers of the results that are a variable; those that no equation makes leave with the
    #: last forward.
    given: dict[Var, list[int]] = {}
    loose: list[int] = []
    for n, v in enumerate(results):
        if n < len(loop.carries) and v is loop.carries[n]:
            continue
        if jaxprs.is_literal(v) or v not in computed:
            loose.append(n)
        else:
            given.setdefault(v, []).append(n)

    def on_one_device(cluster: Cluster[Key]) -> tuple[tuple[int, int], bool]:
        """The halves of a backward run one after the other."""
        second = cluster.group.kind is Kind.W
        return in_flow(cluster.group._replace(kind=Kind.I) if second else cluster.group), second

    tasks = []
    for cluster in sorted(_clusters(loop), key=on_one_device):
        key = cluster.group
        numbers = [n for v in [*cluster.wanted, *cluster.left] for n in given[v]]
        numbers += loose if key == loop.last_forward else []
        atoms = [*cluster.sent, *(loop.outputs[n] for n in numbers)]
        kept = jaxprs.needed(cluster.eqns, atoms)
        if not atoms and not kept:
            continue
        part = jaxprs.part(kept, atoms, str(key))
        for n in numbers:
            results[n] = jaxprs.fresh_var(results[n])
        outvars = [*cluster.sent, *(results[n] for n in numbers)]
        recomputes = key.kind is not Kind.F and key.stage in loop.recomputing
        tasks.append(make_task(key, part.jaxpr, part.inputs, outvars, recomputes))
    return tasks, results
