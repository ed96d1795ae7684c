"""Computes before a loop what no stage has to make in each microbatch.

That is what depends on no microbatch: it is computed once a step. A model's cast of its float32
parameters to a narrower type is the common case. It may stand inside a call: a jitted layer, a
checkpoint that would compute it again in each backward, a scan over layers that casts each slice.
"""

from collections.abc import Sequence
from typing import Any

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn, Var, primitives
from jaxpp.transforms.tasks._loop import ScheduledLoop


def hoist(loop: ScheduledLoop) -> ScheduledLoop:
    """Computes the equations that depend on constants alone, and cost something, before the loop.

    Their results are further constants of the loop.
    """
    loop = loop.rewritten(_Invariance(loop).opened)
    find = _Invariance(loop)
    out = []
    for e in loop.eqns:
        find.note(e)
        out.append(find.is_worth_hoisting(e))
    rest = loop.with_equations(pair for pair, o in zip(loop.grouped, out, strict=True) if not o)
    read = rest.read()
    outputs = [v for e, o in zip(loop.eqns, out, strict=True) if o for v in e.outvars if v in read]
    needed = jaxprs.needed([e for e in loop.eqns if not e.effects], outputs)
    needed, known = _merge_equal(needed)
    outputs = list(dict.fromkeys(map(known, outputs)))
    hoisted = jaxprs.part(needed, outputs)
    operands = [loop.outside[v] for v in hoisted.inputs]
    before, results = jaxprs.inline_body(hoisted.jaxpr, operands)
    return rest.renamed(
        [(known.rename(e), key) for e, key in rest.grouped],
        known,
        consts=(*loop.consts, *outputs),
        outside={**loop.outside, **dict(zip(outputs, results, strict=True))},
        before=(*loop.before, *before),
    )


class _Invariance:
    """The variables that change from microbatch to microbatch, and those made of constants."""

    def __init__(self, loop: ScheduledLoop):
        self.varying = {*loop.carries, *loop.xs}
        self.constant = set(loop.consts)

    def note(self, eqn) -> None:
        """Notes the results of an equation; the equations come in order."""
        read = jaxprs.variables(eqn.invars)
        if eqn.effects or any(v in self.varying for v in read):
            self.varying.update(eqn.outvars)
        elif any(v in self.constant for v in read):
            self.constant.update(eqn.outvars)

    def is_worth_hoisting(self, eqn) -> bool:
        return any(v in self.constant for v in eqn.outvars) and jaxprs.flops(eqn) > 0

    def opened(self, eqn: Eqn) -> jaxprs.Replacement | None:
        """Brings equations that depend on constants alone out of a call or a scan."""
        name = eqn.primitive.name
        varies = any(v in self.varying for v in jaxprs.variables(eqn.invars))
        if varies and not eqn.effects and not jaxprs.shardings_of(eqn):
            if name in primitives.PLAIN_CALLS or name in primitives.CHECKPOINTS:
                return self._open_call(eqn)
            if name == "scan":
                return self._open_scan(eqn)
        self.note(eqn)
        return None

    def _open_call(self, eqn: Eqn) -> jaxprs.Replacement | None:
        known = jaxprs.Substitution()
        inner, results = jaxprs.inline_call(eqn, eqn.invars)
        inner, results = jaxprs.rewritten(inner, self.opened, known), list(map(known, results))
        worth = jaxprs.results_of(filter(self.is_worth_hoisting, inner))
        if not worth:
            self.note(eqn)
            return None
        if eqn.primitive.name in primitives.PLAIN_CALLS:
            return inner, results
        before = jaxprs.needed([e for e in inner if not e.effects], worth)
        after = [e for e in inner if not any(e is b for b in before)]
        results_after = set(jaxprs.results_of(after))
        pairs = list(zip(eqn.outvars, results, strict=True))
        kept = [(v, r) for v, r in pairs if not jaxprs.is_literal(r) and r in results_after]
        part = jaxprs.part(after, [r for _, r in kept])
        jaxpr = _compat.with_closed_type(part.jaxpr, eqn.params["jaxpr"])
        checkpoint = eqn.replace(
            invars=list(part.inputs),
            outvars=[v for v, _ in kept],
            params={**eqn.params, "jaxpr": jaxpr},
        )
        self.note(checkpoint)
        inside = {v for v, _ in kept}
        return [*before, checkpoint], [v if v in inside else r for v, r in pairs]

    def _open_scan(self, eqn: Eqn) -> jaxprs.Replacement:
        """Casts an operand of a scan before the scan, where the scan only reads it to cast it."""
        closed = eqn.params["jaxpr"]
        num_consts, num_carry = _compat.scan_parts(eqn)
        inputs, operands = list(closed.jaxpr.invars), list(eqn.invars)
        body, before = list(closed.eqns), []
        for i, (var, operand) in enumerate(zip(inputs, operands, strict=True)):
            carried = num_consts <= i < num_consts + num_carry
            if carried or jaxprs.is_literal(operand) or operand not in self.constant:
                continue
            readers = [e for e in body if var in jaxprs.variables(e.invars)]
            if len(readers) != 1 or var in jaxprs.variables(closed.jaxpr.outvars):
                continue
            cast = readers[0]
            if cast.primitive.name != "convert_element_type":
                continue
            whole = operand.aval.update(dtype=cast.outvars[0].aval.dtype, weak_type=False)
            operands[i], inputs[i] = Var(whole), cast.outvars[0]
            before.append(cast.replace(invars=[operand], outvars=[operands[i]]))
            body = [e for e in body if e is not cast]
        if before:
            jaxpr = _compat.with_equations(closed, body, closed.jaxpr.outvars, inputs)
            eqn = eqn.replace(invars=operands, params={**eqn.params, "jaxpr": jaxpr})
        for e in (*before, eqn):
            self.note(e)
        return [*before, eqn], eqn.outvars


def _merge_equal(eqns: Sequence[Eqn]) -> tuple[list[Eqn], jaxprs.Substitution]:
    """Drops repeated equations: a forward and a backward pass may cast the same weight."""
    first: dict[Any, Eqn] = {}

    def rule(eqn):
        single = jaxprs.part([eqn], eqn.outvars)
        # The loop may still be differentiated: calls with other derivative rules are not equal.
        key = jaxprs.structure(single.jaxpr, differentiable=True), single.inputs
        same = first.setdefault(key, eqn)
        return None if same is eqn else ([], same.outvars)

    known = jaxprs.Substitution()
    return jaxprs.rewritten(eqns, rule, known), known
