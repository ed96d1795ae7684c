"""Splits the backward of a stage in two: input gradients, for which others wait, and the rest.

The split is by dependence: I holds the equations that the cotangents of the stage's inputs need, W
all others. Calls are inlined first. A scan of which I needs only some results becomes two scans;
the second reads values of the first, stacked over the iterations. So the transposed scan over the
layers of a stage becomes one that carries the cotangent, and one without a carry that makes the
weight gradients. (JAX had the same split as `lax.scan(..., _split_transpose=True)`.)
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var
from jaxpp.schedules import Kind
from jaxpp.transforms.tasks._loop import Grouped, ScheduledLoop, in_flow


def split_backwards(loop: ScheduledLoop) -> ScheduledLoop:
    """Gives the second half of each backward a task of its own, if the schedule has those.

    The first half also makes the carries that it reads: its next microbatch may come before this
    one's second half.
    """
    if not loop.table.splits_backward:
        return loop
    opened: list[Grouped] = []
    for eqn, key in loop.grouped:
        if key is not None and key.kind is Kind.B:
            opened += [(e, key._replace(kind=Kind.I)) for e in inline_all([eqn])]
        else:
            opened.append((eqn, key))
    loop = loop.with_equations(opened)
    readers, becomes = loop.readers(), loop.becomes()
    grouped = [[pair] for pair in opened]
    backwards = {key for _, key in opened if key is not None and key.kind is Kind.I}
    for key in sorted(backwards, key=in_flow):
        numbers = [i for i, (_, other) in enumerate(opened) if other == key]
        eqns = [opened[i][0] for i in numbers]
        wanted = [v for e in eqns for v in e.outvars if readers.get(v, set()) - {key}]
        results = set(jaxprs.results_of(eqns))
        while True:
            halves = _halves(eqns, wanted)
            first = (e for half in halves for e, late in half if not late)
            read = jaxprs.operands_of(first)
            outs = [becomes[v] for v in loop.carries if v in read]
            more = [v for v in jaxprs.variables(outs) if v in results and v not in wanted]
            if not more:
                break
            wanted += more
        second = key._replace(kind=Kind.W)
        for i, half in zip(numbers, halves, strict=True):
            grouped[i] = [(e, second if late else key) for e, late in half]
    return _without_constants(loop.with_equations(itertools.chain(*grouped)))


def _without_constants(loop: ScheduledLoop) -> ScheduledLoop:
    """Lets each task repeat what depends on no microbatch: what costs something is hoisted."""
    varying = jaxprs.descendants(loop.eqns, [*loop.carries, *loop.xs])
    return loop.with_equations(
        (e, key if e.effects or any(v in varying for v in e.outvars) else None)
        for e, key in loop.grouped
    )


def split_backward(eqns: Sequence[Eqn], wanted: Iterable[Atom]) -> tuple[list[Eqn], list[Eqn]]:
    """Splits equations into those that the wanted variables need, and the others.

    Args:
        eqns: equations in order.
        wanted: the variables that the first half must make.

    Returns:
        The equations of both halves, in order; the second may read variables of the first.
    """
    halves = list(itertools.chain(*_halves(inline_all(eqns), wanted)))
    first, second = ([e for e, late in halves if late is half] for half in (False, True))
    return first, second


def _halves(eqns: Sequence[Eqn], wanted: Iterable[Atom]) -> list[list[tuple[Eqn, bool]]]:
    """Finds for each equation those in its place, and whether they are in the second half."""
    needed = set(jaxprs.variables(wanted))
    found: list[list[tuple[Eqn, bool]]] = []
    for eqn in reversed(eqns):
        wants = [v in needed for v in eqn.outvars]
        mine, rest = ([eqn], []) if any(wants) else ([], [eqn])
        if eqn.primitive.name == "scan" and any(wants) and not all(wants):
            mine, rest = _split_scan(eqn, wants)
        found.append([*((e, False) for e in mine), *((e, True) for e in rest)])
        needed.update(jaxprs.operands_of(mine))
    return found[::-1]


def inline_all(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Inlines every call of some equations; the variables that they make stay the same."""
    outputs = [v for e in eqns for v in e.outvars if not isinstance(v, jex.DropVar)]
    part = jaxprs.part(list(eqns), outputs)
    flat = jaxprs.inline(part.jaxpr, lambda e: True)
    return jaxprs.with_results(flat.eqns, flat.jaxpr.outvars, outputs)


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan equation with its body opened: the body's inputs and outputs by their kind."""

    eqn: Eqn
    consts: Sequence[Var]
    carries: Sequence[Var]
    xs: Sequence[Var]
    eqns: Sequence[Eqn]
    carry_outs: Sequence[Atom]
    ys: Sequence[Atom]


def _open_scan(eqn) -> _Scan:
    num_consts, num_carry = _compat.scan_parts(eqn)
    opened = jaxprs.bind_constants(*jaxprs.without_constants(eqn.params["jaxpr"]))
    invars, outvars = opened.jaxpr.invars, opened.jaxpr.outvars
    return _Scan(
        eqn,
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        invars[num_consts + num_carry :],
        inline_all(opened.eqns),
        outvars[:num_carry],
        outvars[num_carry:],
    )


def _split_scan(eqn, wants: Sequence[bool]) -> tuple[list[Eqn], list[Eqn]]:
    """Splits a scan in two: one for the wanted results, and one for the others that reads it."""
    scan = _open_scan(eqn)
    num_carry = len(scan.carries)
    my_ys = [v for v, w in zip(scan.ys, wants[num_carry:], strict=True) if w]
    other_ys = [v for v, w in zip(scan.ys, wants[num_carry:], strict=True) if not w]
    mine, first, second = _wanted_carries(scan, wants[:num_carry], my_ys)
    others = [j for j in range(num_carry) if j not in mine]
    if not others and not other_ys:
        return [eqn], []
    wanted = jaxprs.variables([*(scan.carry_outs[j] for j in others), *other_ys])
    kept = [scan.carries[j] for j in mine]
    lacking = [scan.carries[j] for j in others]
    first, second = _keep_less(first, second, wanted, kept, lacking)
    crossing = _crossing(first, second, wanted, kept)

    def results(carried: Sequence[int], wanted: bool) -> list[Var]:
        ys = zip(eqn.outvars[num_carry:], wants[num_carry:], strict=True)
        return [*(eqn.outvars[j] for j in carried), *(v for v, w in ys if w == wanted)]

    outer = dict(zip([*scan.consts, *scan.carries, *scan.xs], eqn.invars, strict=True))
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    becomes = [(scan.carries[j], scan.carry_outs[j]) for j in mine]
    run, inputs = scan_of(first, dict(becomes), scan.xs, [*my_ys, *crossing], **params)
    mine_eqns, values = jaxprs.record(run, [outer[v] for v in inputs])
    named = results(mine, True)
    outer.update(zip(crossing, values[len(named) :], strict=True))
    mine_eqns = jaxprs.with_results(mine_eqns, values[: len(named)], named)
    becomes = [(scan.carries[j], scan.carry_outs[j]) for j in others]
    run, inputs = scan_of(second, dict(becomes), [*scan.xs, *crossing], other_ys, **params)
    return mine_eqns, jaxprs.splice(run, [outer[v] for v in inputs], results(others, False))


def _wanted_carries(
    scan: _Scan, wants: Sequence[bool], ys: Sequence[Atom]
) -> tuple[list[int], list[Eqn], list[Eqn]]:
    """Finds the carries that wanted results depend on, over any number of iterations.

    Also gives the body in two halves, the first of which makes these carries and the wanted `ys`.
    """
    mine = [j for j, w in enumerate(wants) if w]
    while True:
        wanted = jaxprs.variables([*(scan.carry_outs[j] for j in mine), *ys])
        first, second = split_backward(scan.eqns, wanted)
        read = jaxprs.operands_of(first, wanted)
        grown = [j for j, v in enumerate(scan.carries) if j in mine or v in read]
        if grown == mine:
            return mine, first, second
        mine = grown


def _crossing(first, second, wanted: Sequence[Var], carries: Sequence[Var]) -> list[Var]:
    """Finds the values of the first half that the second reads, stacked over the iterations."""
    read = jaxprs.operands_of(second, wanted)
    return [v for v in [*carries, *jaxprs.results_of(first)] if v in read]


def _keep_less(
    first: Sequence[Eqn],
    second: Sequence[Eqn],
    wanted: Sequence[Var],
    carries: Sequence[Var],
    lacking: Sequence[Var],
) -> tuple[list[Eqn], list[Eqn]]:
    """Moves equations between the halves of a body, so that less is stacked between them.

    A light equation of the second half moves to the first where its results are smaller than the
    values of the first that it alone reads (the product of two factors of an activation).

    Args:
        first: the equations of the first half.
        second: the equations of the second half.
        wanted: the variables that the second half makes.
        carries: the carries of the first.
        lacking: the carries of the second, which the first cannot read.
    """
    first, second = list(first), list(second)
    absent = set(lacking).union(jaxprs.results_of(second))
    later: list[Eqn] = []
    for i, eqn in enumerate(second):
        rest = [*later, *second[i + 1 :]]
        movable = (
            _is_light(eqn)
            and not any(v in absent for v in jaxprs.variables(eqn.invars))
            and not any(v in wanted for v in eqn.outvars)
        )

        def kept(first, second):
            return sum(map(jaxprs.nbytes, _crossing(first, second, wanted, carries)))

        if movable and kept([*first, eqn], rest) < kept(first, [eqn, *rest]):
            absent.difference_update(eqn.outvars)
            first.append(eqn)
        else:
            later.append(eqn)
    return first, later


def _is_light(eqn) -> bool:
    """Tells whether an equation costs no more than to read its operands and write its results."""
    size = sum(getattr(v.aval, "size", 0) for v in [*eqn.invars, *eqn.outvars])
    loops = any(True for _ in jaxprs.sub_jaxprs(eqn))
    return not eqn.effects and not loops and jaxprs.flops(eqn) <= size


def scan_of(
    eqns: Sequence[Eqn],
    carries: Mapping[Var, Atom],
    slices: Collection[Var],
    ys: Sequence[Atom],
    **params: Any,
) -> tuple[Callable[..., list[Any]], list[Var]]:
    """Makes a scan of some equations of a body, as a function to run on atoms.

    Args:
        eqns: the equations.
        carries: the variables that the scan carries, each with what the equations make of it.
        slices: the variables of the body that are read slice by slice.
        ys: the variables to be stacked.
        **params: those of `jax.lax.scan`.

    Returns:
        The function, whose results are the last carries, then the stacks; and the variables of the
        body whose atoms outside of it are its operands.
    """
    part = jaxprs.part(eqns, [*carries.values(), *ys])
    sliced = [v for v in part.inputs if v in slices]
    whole = [v for v in part.inputs if v not in slices and v not in carries]

    def run(*operands):
        known = dict(zip(whole, operands, strict=False))
        stacks = operands[len(whole) : len(whole) + len(sliced)]

        def step(carry, slices):
            values = known | dict(zip([*carries, *sliced], [*carry, *slices], strict=True))
            outputs = jaxprs.run(part.jaxpr, *(values[v] for v in part.inputs))
            return outputs[: len(carries)], outputs[len(carries) :]

        init = operands[len(whole) + len(sliced) :]
        carry, stacked = jax.lax.scan(step, list(init), list(stacks), **params)
        return [*carry, *stacked]

    return run, [*whole, *sliced, *carries]
