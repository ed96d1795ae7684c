"""Reads a microbatch loop off its scan: opens the stage calls, and notes each equation's task."""

from collections.abc import Callable, Sequence

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn, Var, primitives
from jaxpp.schedules import Kind, Table
from jaxpp.transforms.stages import dissolve_marks, is_backward_call, is_stage_call, stage_of_call
from jaxpp.transforms.tasks._loop import Grouped, Key, ScheduledLoop


def read_loop(eqn: Eqn) -> ScheduledLoop:
    """Reads a scan over microbatches, and opens the stage calls in its body.

    Its table has no tasks yet: which schedule gives it follows from which stages read which.

    Raises:
        ValueError: if stages are called inside a loop or conditional, or differ in their number.
    """
    num_consts, num_carry = _compat.scan_parts(eqn)
    jaxpr, values = jaxprs.without_constants(eqn.params["jaxpr"])
    jaxpr = _compat.eliminate_dead_code(jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    num_consts += len(values)
    closed = zip(values, jaxpr.jaxpr.invars, strict=False)
    operands = [*(jaxprs.literal(value, v.aval) for value, v in closed), *eqn.invars]
    flat, again = _inline_to_calls(jaxpr)
    sizes = sorted({call[1] for e in flat.eqns if (call := stage_of_call(e))})
    if len(sizes) > 1:
        raise ValueError(
            f"schedule: one microbatch loop calls functions of "
            f"{' and '.join(map(str, sizes))} stages; split them alike, or give each a loop of its "
            f"own."
        )
    known = jaxprs.Substitution()
    grouped: list[Grouped] = []
    edges: set[Var] = set()
    recomputing: set[int] = set()
    for e in map(known.rename, flat.eqns):
        call, computed_again = stage_of_call(e), not again.isdisjoint(e.outvars)
        if call is None:
            if _rounds_nothing(e) and e.invars[0] in edges:
                known.of[e.outvars[0]] = e.invars[0]
            else:
                grouped.append((e, None))
            continue
        stage, _ = call
        key = Key(Kind.B if computed_again or is_backward_call(e) else Kind.F, stage)
        opened = jaxprs.part(*jaxprs.inline_call(e, e.invars))
        clean, _ = dissolve_marks(opened.jaxpr)
        if computed_again or jaxprs.contains(e, _recomputes):
            recomputing.add(stage)
        grouped.extend((inner, key) for inner in clean.eqns)
        known.of.update((o, known(r)) for o, r in zip(e.outvars, clean.jaxpr.outvars, strict=True))
        edges.update(jaxprs.variables(clean.jaxpr.outvars))
    invars = tuple(flat.jaxpr.invars)
    outputs = tuple(known(v) for v in flat.jaxpr.outvars)
    return ScheduledLoop(
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        invars[num_consts + num_carry :],
        tuple(grouped),
        outputs[:num_carry],
        outputs[num_carry:],
        Table((), sizes[0], eqn.params["length"]),
        eqn.params["reverse"],
        recomputing=frozenset(recomputing),
        outside=dict(zip(invars, operands, strict=True)),
        outvars=tuple(eqn.outvars),
    )


def _inline_to_calls(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, set[Var]]:
    """Brings the calls of stages to the top of a loop's body.

    Also gives the results of the equations that a checkpoint computes again for a backward in it.
    Where a stage in the checkpoint reads the forward of an earlier one, they are forwards of the
    loop, for the earlier one's backward comes later. So it is for the gradient of a loss over the
    batch.
    """
    again: set[Var] = set()

    def holds_calls(eqn: Eqn) -> bool:
        return not is_stage_call(eqn) and jaxprs.contains(eqn, is_stage_call)

    def opening(computed_again: bool) -> Callable[[Eqn], jaxprs.Replacement | None]:
        def rule(eqn: Eqn) -> jaxprs.Replacement | None:
            if not holds_calls(eqn):
                again.update(eqn.outvars if computed_again else ())
                return None
            if jaxprs.called_jaxpr(eqn) is None:
                raise ValueError(
                    f"schedule: stages are called inside a `{eqn.primitive.name}`"
                    f"{_compat.at_source_line(eqn)}; a schedule needs them directly in the "
                    f"microbatch loop."
                )
            called, results = jaxprs.inline_call(eqn, eqn.invars)
            is_again = False
            if _recomputes(eqn):
                inner = jaxprs.inline(jaxprs.part(called, results).jaxpr, holds_calls).eqns
                is_again = any(map(is_backward_call, inner)) and not _are_chained(inner)
            known = jaxprs.Substitution()
            eqns = jaxprs.rewritten(called, opening(computed_again or is_again), known)
            return eqns, map(known, results)

        return rule

    return jaxprs.rewrite(jaxpr, opening(False)), again


def _are_chained(eqns: Sequence[Eqn]) -> bool:
    """Tells whether a stage reads a value that the forward of an earlier stage makes."""
    behind: dict[Var, set[int]] = {}
    for eqn in eqns:
        stages = set().union(*(behind.get(v, ()) for v in jaxprs.variables(eqn.invars)))
        if (call := stage_of_call(eqn)) is not None:
            if any(stage < call[0] for stage in stages):
                return True
            if not is_backward_call(eqn):
                stages.add(call[0])
        behind.update(dict.fromkeys(eqn.outvars, stages))
    return False


def _recomputes(eqn) -> bool:
    """Tells whether an equation is the backward of a checkpoint: it computes its forward again."""
    return eqn.primitive.name in primitives.CHECKPOINTS and eqn.params["differentiated"]


def _rounds_nothing(eqn) -> bool:
    """Tells whether an equation rounds a value to its own dtype, as checkpoints do to keep one."""
    if eqn.primitive.name != "reduce_precision":
        return False
    kind = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)
