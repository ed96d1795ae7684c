"""The backward of a stage in two halves: input gradients, which others wait for, and the rest.

The split is by dependence: I holds what the cotangents of the stage's inputs need, W everything
else. Calls are inlined first; a scan of which I needs only some results becomes two scans, the
second reading what it needs of the first, stacked over the iterations.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, _jaxprs


def split_backward(eqns: Sequence[Any], wanted: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits equations into those that the wanted variables need, and the others.

    Args:
        eqns: equations in order.
        wanted: the variables that the first half must make.

    Returns:
        The equations of both halves, in order; the second may read variables of the first.
    """
    eqns = inline_all(eqns)
    needed = {v for v in wanted if not _jaxprs.is_literal(v)}
    first: list[Any] = []
    second: list[Any] = []
    for eqn in reversed(eqns):
        wants = [v in needed for v in eqn.outvars]
        if not any(wants):
            second.append(eqn)
            continue
        mine, rest = [eqn], []
        if eqn.primitive.name == "scan" and not all(wants):
            mine, rest = _split_scan(eqn, wants)
        first.extend(reversed(mine))
        second.extend(reversed(rest))
        needed.update(v for e in mine for v in e.invars if not _jaxprs.is_literal(v))
    return first[::-1], second[::-1]


def inline_all(eqns: Sequence[Any]) -> list[Any]:
    """Equations with every call inlined; the variables they make stay the same."""
    outputs = [v for e in eqns for v in e.outvars if not isinstance(v, jex.DropVar)]
    part = _jaxprs.part(list(eqns), outputs)
    flat = _jaxprs.inline(part.jaxpr, lambda e: True)
    return _named_as(flat, outputs)


def _named_as(flat, outputs: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr with its results renamed to `outputs`.

    A result that is no variable of its own (an input, a literal, or given twice) gets a copy.
    """
    rename = _jaxprs.Substitution()
    inputs = set(flat.jaxpr.invars)
    copies = []
    for result, wanted in zip(flat.jaxpr.outvars, outputs, strict=True):
        if result is wanted:
            rename.of[result] = wanted
        elif _jaxprs.is_literal(result) or result in inputs or result in rename.of:
            copies.append((result, wanted))
        else:
            rename.of[result] = wanted
    eqns = [
        rename.rename(e).replace(outvars=[rename(v) for v in e.outvars]) for e in flat.eqns
    ]
    for result, wanted in copies:
        eqns.append(_copy(rename(result), wanted))
    return eqns


def _copy(source, target):
    template = jax.make_jaxpr(lambda x: jax.lax.optimization_barrier(x))(source.aval).eqns[0]
    return template.replace(invars=[source], outvars=[target])


def _split_scan(eqn, wants: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """A scan as two: one for the wanted results, and one for the others that reads it."""
    num_consts, num_carry = _compat.scan_parts(eqn)
    body = eqn.params["jaxpr"]
    opened, values = _jaxprs.without_constants(body)
    lifted = dict(zip(opened.jaxpr.invars, [jex.Literal(v, x.aval) for v, x in zip(values, opened.jaxpr.invars)], strict=False))
    renamed = _jaxprs.Substitution(lifted)
    invars = opened.jaxpr.invars[len(values) :]
    eqns = inline_all([renamed.rename(e) for e in opened.eqns])
    outvars = [renamed(v) for v in opened.jaxpr.outvars]
    consts, carries, xs = (
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        invars[num_consts + num_carry :],
    )

    # The carries that the wanted results depend on, over any number of iterations.
    mine = {j for j in range(num_carry) if wants[j]}
    while True:
        wanted = [v for j, v in enumerate(outvars) if (j in mine if j < num_carry else wants[j])]
        keep = _jaxprs.ancestors(eqns, wanted)
        read = {v for e, k in zip(eqns, keep, strict=True) if k for v in e.invars if not _jaxprs.is_literal(v)}
        read.update(v for v in wanted if not _jaxprs.is_literal(v))
        grown = mine | {j for j, v in enumerate(carries) if v in read}
        if grown == mine:
            break
        mine = grown
    if len(mine) == num_carry and all(wants[num_carry:]):
        return [eqn], []
    first, second = split_backward(eqns, wanted)
    others = [j for j in range(num_carry) if j not in mine]
    ys = range(num_carry, len(outvars))
    read_by_second = {v for e in second for v in e.invars if not _jaxprs.is_literal(v)}
    read_by_second.update(
        v
        for j, v in enumerate(outvars)
        if not _jaxprs.is_literal(v) and (j in others or (j in ys and not wants[j]))
    )
    made = [*(carries[j] for j in sorted(mine)), *(v for e in first for v in e.outvars)]
    crossing = [v for v in made if v in read_by_second]

    def scan(eqns, carried, scanned, results, operand_of):
        """The function of one scan: its operands, then its carries and stacked results."""
        part = _jaxprs.part(eqns, [*(outvars[j] for j in carried), *results])
        known = {carries[j]: n for n, j in enumerate(carried)}
        whole = [v for v in part.inputs if v in consts]
        slices = [v for v in part.inputs if v in scanned]

        def run(*operands):
            fixed = dict(zip(whole, operands, strict=False))
            stacks = operands[len(whole) : len(whole) + len(slices)]
            init = operands[len(whole) + len(slices) :]

            def step(carry, one):
                env = fixed | dict(zip(slices, one, strict=True))
                env |= {v: carry[n] for v, n in known.items()}
                outputs = _jaxprs.run(part.jaxpr, *(env[v] for v in part.inputs))
                return outputs[: len(carried)], outputs[len(carried) :]

            carry, stacked = jax.lax.scan(
                step, list(init), list(stacks), length=eqn.params["length"], reverse=eqn.params["reverse"]
            )  # fmt: skip
            return [*carry, *stacked]

        operands = [operand_of[v] for v in [*whole, *slices, *(carries[j] for j in carried)]]
        return run, operands

    outer = dict(zip(invars, eqn.invars, strict=True))
    run, operands = scan(first, sorted(mine), xs, [*(outvars[j] for j in ys if wants[j]), *crossing], outer)
    results = [*(eqn.outvars[j] for j in sorted(mine)), *(eqn.outvars[j] for j in ys if wants[j])]
    mine_eqns, stacks = _as_equations(run, operands, results, len(crossing))
    scanned = [*xs, *crossing]
    outer = outer | dict(zip(crossing, stacks, strict=True))
    for j in mine:  # read through its stack, not as a carry
        if carries[j] not in crossing:
            outer.pop(carries[j], None)
    run, operands = scan(second, others, scanned, [outvars[j] for j in ys if not wants[j]], outer)
    results = [*(eqn.outvars[j] for j in others), *(eqn.outvars[j] for j in ys if not wants[j])]
    rest_eqns, _ = _as_equations(run, operands, results, 0)
    return mine_eqns, rest_eqns


def _as_equations(run, operands, results, num_new: int) -> tuple[list[Any], list[Any]]:
    """The equations of a function of atoms whose results are named, plus `num_new` new ones."""
    traced = jax.make_jaxpr(run)(*(v.aval for v in operands))
    traced, consts = _jaxprs.without_constants(traced)
    known = [jex.Literal(c, v.aval) for c, v in zip(consts, traced.jaxpr.invars, strict=False)]
    bound = _jaxprs.Substitution(zip(traced.jaxpr.invars, [*known, *operands], strict=True))
    new = [_jaxprs.fresh_var(v) for v in traced.jaxpr.outvars[len(traced.jaxpr.outvars) - num_new :]] if num_new else []
    flat = _compat.make_closed_jaxpr(
        [v for v in dict.fromkeys(operands) if not _jaxprs.is_literal(v)],
        [bound(v) for v in traced.jaxpr.outvars],
        [bound.rename(e) for e in traced.eqns],
    )
    return _named_as(flat, [*results, *new]), new
