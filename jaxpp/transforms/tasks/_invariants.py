"""Hoists equations that depend on no microbatch: they are computed once a step, before the loop.

A model's cast of its float32 parameters to a narrower type is the common case. It may stand inside
a call: a jitted layer, a checkpoint that would compute it again in each backward, a scan over
layers that casts each slice.
"""

from collections.abc import Sequence
from typing import Any

from jaxpp import _compat, _flops, _jaxprs, _primitives
from jaxpp._typing import Eqn, Var
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def hoist(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Computes the equations that depend on constants alone, and cost something, before the loop.

    Their results are further constants of the loop.
    """
    loop = _Opener(loop).opened()
    find = _Invariance(loop)
    out = []
    for e in loop.eqns:
        find.note(e)
        out.append(find.is_worth_hoisting(e))
    rest = loop.with_equations([p for p, o in zip(loop.placed(), out, strict=True) if not o])
    read = rest.read()
    outputs = [v for e, o in zip(loop.eqns, out, strict=True) if o for v in e.outvars if v in read]
    made = _jaxprs.needed([e for e in loop.eqns if not e.effects], outputs)
    made, known = _merge_equal(made)
    outputs = list(dict.fromkeys(map(known, outputs)))
    hoisted = _jaxprs.part(made, outputs)
    operands = [loop.operands[v] for v in hoisted.inputs]
    before, results = _jaxprs.inline_body(hoisted.jaxpr, operands)
    return rest.renamed(
        [(known.rename(e), p) for e, p in rest.placed()],
        known,
        consts=(*loop.consts, *outputs),
        operands={**loop.operands, **dict(zip(outputs, results, strict=True))},
        before=(*loop.before, *before),
    )


class _Invariance:
    """The variables that change from microbatch to microbatch, and those made of constants."""

    def __init__(self, loop: MicrobatchLoop):
        self.varying = {*loop.carries, *loop.xs}
        self.constant = set(loop.consts)

    def note(self, eqn) -> None:
        """Notes the results of an equation; the equations come in order."""
        read = _jaxprs.variables(eqn.invars)
        if eqn.effects or any(v in self.varying for v in read):
            self.varying.update(eqn.outvars)
        elif any(v in self.constant for v in read):
            self.constant.update(eqn.outvars)

    def is_worth_hoisting(self, eqn) -> bool:
        return any(v in self.constant for v in eqn.outvars) and _flops.flops(eqn) > 0


class _Opener:
    """Brings equations that depend on constants alone out of the calls and scans of a loop."""

    def __init__(self, loop: MicrobatchLoop):
        self.loop = loop
        self.find = _Invariance(loop)

    def opened(self) -> MicrobatchLoop:
        return self.loop.rewritten(self._open)

    def _open(self, eqn: Eqn) -> _jaxprs.Replacement | None:
        """Returns what takes the place of an equation."""
        name = eqn.primitive.name
        varies = any(v in self.find.varying for v in _jaxprs.variables(eqn.invars))
        if varies and not eqn.effects and not _jaxprs.shardings_of(eqn):
            if name in _primitives.PLAIN_CALLS or name in _primitives.CHECKPOINTS:
                return self._open_call(eqn)
            if name == "scan":
                return self._open_scan(eqn)
        self.find.note(eqn)
        return None

    def _open_call(self, eqn: Eqn) -> _jaxprs.Replacement | None:
        known = _jaxprs.Substitution()
        inner, results = _jaxprs.inline_call(eqn, eqn.invars)
        inner, results = _jaxprs.rewritten(inner, self._open, known), list(map(known, results))
        worth = [v for e in inner if self.find.is_worth_hoisting(e) for v in e.outvars]
        if not worth:
            self.find.note(eqn)
            return None
        if eqn.primitive.name in _primitives.PLAIN_CALLS:
            return inner, results
        before = _jaxprs.needed([e for e in inner if not e.effects], worth)
        after = [e for e in inner if not any(e is b for b in before)]
        made = {v for e in after for v in e.outvars}
        pairs = list(zip(eqn.outvars, results, strict=True))
        kept = [(v, r) for v, r in pairs if r in made]
        part = _jaxprs.part(after, [r for _, r in kept])
        jaxpr = _compat.with_closed_type(part.jaxpr, eqn.params["jaxpr"])
        checkpoint = eqn.replace(
            invars=list(part.inputs),
            outvars=[v for v, _ in kept],
            params={**eqn.params, "jaxpr": jaxpr},
        )
        self.find.note(checkpoint)
        return [*before, checkpoint], [v if r in made else r for v, r in pairs]

    def _open_scan(self, eqn: Eqn) -> _jaxprs.Replacement:
        """Casts an operand of a scan before the scan, where the scan only reads it to cast it."""
        closed = eqn.params["jaxpr"]
        num_consts, num_carry = _compat.scan_parts(eqn)
        inputs, operands = list(closed.jaxpr.invars), list(eqn.invars)
        body, before = list(closed.eqns), []
        for i, (var, operand) in enumerate(zip(inputs, operands, strict=True)):
            carried = num_consts <= i < num_consts + num_carry
            if carried or _jaxprs.is_literal(operand) or operand not in self.find.constant:
                continue
            readers = [e for e in body if var in _jaxprs.variables(e.invars)]
            if len(readers) != 1 or var in _jaxprs.variables(closed.jaxpr.outvars):
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
            self.find.note(e)
        return [*before, eqn], eqn.outvars


def _merge_equal(eqns: Sequence[Any]) -> tuple[list[Any], _jaxprs.Substitution]:
    """Drops repeated equations: a forward and a backward pass may cast the same weight."""
    first: dict[Any, Eqn] = {}

    def rule(eqn):
        one = _jaxprs.part([eqn], eqn.outvars)
        # The loop may still be differentiated: calls with other derivative rules are not equal.
        key = _jaxprs.structure(one.jaxpr, differentiable=True), one.inputs
        same = first.setdefault(key, eqn)
        return None if same is eqn else ([], same.outvars)

    known = _jaxprs.Substitution()
    return _jaxprs.rewritten(eqns, rule, known), known
