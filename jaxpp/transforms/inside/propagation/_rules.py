"""The rules of sharding propagation: they find the specs of an equation's results.

They say what XLA's own propagation would, but on the jaxpr, so that a step has the same programs on
every mesh and in every schedule. The source of the rules is Shardy's propagation
(openxla.org/shardy/propagation) and, before it, GSPMD (Xu et al., arXiv 2105.04663, section 3.5).
A rule takes the equation, the specs of its operands, `outputs(jaxpr, specs)`, which finds the specs
of the outputs of a jaxpr that the equation holds, and the number of devices along each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxpp import _compat, _dimensions, _jaxprs, _primitives
from jaxpp._dimensions import found_again, shape_of
from jaxpp._specs import Spec, only, replicated, spec_of
from jaxpp.transforms.inside.propagation._specs import (
    MaybeSpec,
    Sizes,
    merge,
    of_type,
    overlay,
    pinned,
    reshaped,
)
from jaxpp.transforms.tasks import ScheduledLoop

Outputs = Callable[[Any, Sequence[MaybeSpec]], list[MaybeSpec]]

_ROUNDS = 3  # after which a loop's carries have the specs of its body's results


def results(eqn, specs: Sequence[MaybeSpec], outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of an equation's results; they are whole for want of a rule."""
    made = RULES.get(eqn.primitive.name, _whole)(eqn, specs, outputs, sizes)
    return [of_type(s, v, sizes) for s, v in zip(made, eqn.outvars, strict=True)]


# ---- computations -------------------------------------------------------------------------------


def _whole(eqn, specs, *_) -> list[MaybeSpec]:
    return [replicated(len(shape_of(v))) if any(specs) else None for v in eqn.outvars]


def _free(eqn, *_) -> list[MaybeSpec]:
    return [None] * len(eqn.outvars)


def _combined(eqn, specs, *_) -> list[MaybeSpec]:
    """Moves each operand's axes to the dimensions of the results where its own are found again."""
    if not any(specs):  # all free, or scalars
        return _free(eqn)
    found = found_again(eqn) or []
    order = sorted(range(len(specs)), key=lambda i: -math.prod(shape_of(eqn.invars[i])))
    entries = [
        (to, axes)
        for i in order
        if specs[i] is not None
        for to, axes in zip(found[i], specs[i], strict=True)
        if to is not None
    ]
    ndims = [len(shape_of(v)) for v in eqn.outvars]
    return [overlay(n, [(to, axes) for to, axes in entries if to < n]) for n in ndims]


def _reshape(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    if specs[0] is None or eqn.params.get("dimensions") is not None:
        return [specs[0] and replicated(len(shape_of(eqn.outvars[0])))]
    return [reshaped(specs[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), sizes)]


def _sharding_constraint(eqn, specs, *_) -> list[MaybeSpec]:
    return [pinned(specs[0], eqn.params["sharding"], eqn.invars[0])]


def _each(eqn, specs, *_) -> list[MaybeSpec]:
    """Gives each result the spec of its operand, one of the last, in dimensions of the same size.

    Under `vmap`, a collective that sums over devices also sums over dimensions.
    """
    summed = [a for a in eqn.params.get("axes", ()) if not isinstance(a, str)]

    def one(var, operand, spec: MaybeSpec) -> MaybeSpec:
        old, new = shape_of(operand), shape_of(var)
        kept = [d for d in range(len(old)) if d not in summed]
        if spec is None or len(kept) != len(new):
            return None if spec is None else replicated(len(new))
        return tuple(spec[d] if old[d] == n else () for d, n in zip(kept, new, strict=True))

    skipped = len(eqn.invars) - len(eqn.outvars)
    return list(map(one, eqn.outvars, eqn.invars[skipped:], specs[skipped:]))


# ---- calls and loops ----------------------------------------------------------------------------


def _call(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    return outputs(_jaxprs.called_jaxpr(eqn), specs)


def _jit(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    """Returns the specs of the results of a nested `jit`, which may have shardings of its own."""
    pinned_in = eqn.params.get("in_shardings", (None,) * len(specs))
    specs = list(map(pinned, specs, pinned_in, eqn.invars))
    results = _call(eqn, specs, outputs, sizes)
    pinned_out = eqn.params.get("out_shardings", (None,) * len(results))
    return list(map(pinned, results, pinned_out, eqn.outvars))


def _cond(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    branches = [outputs(b, specs[1:]) for b in eqn.params["branches"]]
    return [merge(results) for results in zip(*branches, strict=True)]


def _while(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    skipped, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts = specs[skipped : skipped + num_consts]

    def body(carry):
        return outputs(eqn.params["body_jaxpr"], [*consts, *carry]), None

    return _fixpoint(body, specs[skipped + num_consts :])[0]


def _scan(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    num_consts, num_carry = _compat.scan_parts(eqn)
    carry, xs = specs[num_consts:][:num_carry], specs[num_consts + num_carry :]
    return _iterated(eqn.params["jaxpr"], specs[:num_consts], carry, xs, outputs)


def _iterated(jaxpr, consts, carry, xs, outputs) -> list[MaybeSpec]:
    rows = [_row(s) for s in xs]

    def body(carry):
        results = outputs(jaxpr, [*consts, *carry, *rows])
        return results[: len(carry)], results[len(carry) :]

    carry, ys = _fixpoint(body, carry)
    return [*carry, *map(_stacked, ys)]


def _pipeline_loop(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    """Does as `_scan` for each direction; replicas are rows, which keep the axes that some have."""
    loop = ScheduledLoop.of(eqn)
    axes, num_consts = (), loop.num_consts
    if loop.replicas > 1:
        axes = next((s[0] for s in specs[num_consts:] if s and s[0]), ())
        own = [*specs[:num_consts], *(s and s[1:] for s in specs[num_consts:])]
        specs = [s and only(s, [a for a in sizes if a not in axes]) for s in own]
    given = dict(zip(loop.operands, specs, strict=True))
    consts, xs = ([given[v, None] for v in own] for own in (loop.consts, loop.xs))
    each = []
    for direction in range(loop.num_directions):
        carry = [given[v, direction] for v in loop.carries]
        each.append(_iterated(loop.body, consts, carry, xs, outputs))
    made = [s for own in zip(*each, strict=True) for s in own]
    return made if loop.replicas == 1 else [None if s is None else (axes, *s) for s in made]


def _fixpoint(body: Callable, carry: Sequence[MaybeSpec]) -> tuple[list[MaybeSpec], Any]:
    """Finds the specs of a loop's carries, and the other results of `body` for these specs."""
    carry = list(carry)
    for _ in range(_ROUNDS):
        results, rest = body(carry)
        merged = [merge(pair) for pair in zip(carry, results, strict=True)]
        if merged == carry:
            break
        carry = merged
    return carry, rest  # pyright: ignore[reportPossiblyUnboundVariable]


def _row(spec: MaybeSpec) -> MaybeSpec:
    """Returns the spec of a slice along the first dimension."""
    return None if spec is None else spec[1:]


def _stacked(spec: MaybeSpec) -> MaybeSpec:
    """Returns the spec of values stacked along a new first dimension."""
    return None if spec is None else ((), *spec)


def _shard_map(eqn, specs, outputs, sizes) -> list[MaybeSpec]:
    """Takes the `out_specs` for the `shard_map`'s own axes, and the body's specs for the others."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))
    others = [axis for axis in sizes if axis not in manual]
    inside: list[MaybeSpec] = [None] * len(eqn.outvars)
    if any(sizes[axis] > 1 for axis in others):  # else there is nothing to find
        inside = outputs(params["jaxpr"], [s and only(s, others) for s in specs])

    def both(var, outer, inner: MaybeSpec) -> Spec:
        own = spec_of(outer, len(shape_of(var)))
        return tuple(o + i for o, i in zip(own, inner or replicated(len(own)), strict=True))

    return list(map(both, eqn.outvars, params["out_specs"], inside))


#: These hand on their operands, or combine those of several devices.
EACH = """
    all_gather all_gather_invariant optimization_barrier pcast pipeline_enter_stage
    pmax pmin ppermute psum psum_invariant pvary reduce_scatter
""".split()

RULES: dict[str, Callable[..., list[MaybeSpec]]] = {
    **dict.fromkeys(_dimensions.RULES, _combined),
    **dict.fromkeys(_primitives.CALLS, _call),
    **dict.fromkeys(EACH, _each),
    **dict.fromkeys(["empty", "iota", "rng_bit_generator", "rng_uniform"], _free),
    "cond": _cond,
    "jit": _jit,
    "pipeline_loop": _pipeline_loop,
    "reshape": _reshape,
    "scan": _scan,
    "shard_map": _shard_map,
    "sharding_constraint": _sharding_constraint,
    "while": _while,
}
