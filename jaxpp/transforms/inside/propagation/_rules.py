"""The rules of sharding propagation, which find the specs of a jaxpr's values from its inputs'.

They say what XLA's own propagation would, but on the jaxpr, so that a step has the same programs on
every mesh and in every schedule. A spec is never wrong; if a value is less split than it could be,
XLA only moves more than it needs to. The source of the rules is Shardy's propagation
(openxla.org/shardy/propagation) and, before it, GSPMD (Xu et al., arXiv 2105.04663, section 3.5).
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _jaxprs
from jaxpp._specs import axes_of, replicated
from jaxpp.transforms.inside.propagation import _holders
from jaxpp.transforms.inside.propagation._dimensions import found_again, shape_of
from jaxpp.transforms.inside.propagation._holders import Outputs
from jaxpp.transforms.inside.propagation._specs import (
    MaybeSpec,
    Sizes,
    merge,
    of_type,
    overlay,
    pinned,
    reshaped,
)
from jaxpp.transforms.tasks import Ref

_ROUNDS = 2  # forward and back, after which the models of experiments/ change no more


def propagate(
    jaxpr: jex.ClosedJaxpr, specs: Sequence[MaybeSpec], sizes: Sizes
) -> dict[Any, MaybeSpec]:
    """Finds the spec of each variable of a jaxpr, forward from the specs of its inputs.

    A dimension that is split in one operand and whole in another is split in the result. If two
    operands disagree, the larger one wins, or the first of two of one size. Equations without a
    rule give values that are whole.

    Args:
        jaxpr: a closed jaxpr; its constants count as values that may be split in any way.
        specs: one for each of its inputs, or `None` where it may be any.
        sizes: the number of devices along each axis.

    Returns:
        a spec, or `None` where it may be any, for each input and each variable that its equations
        make (not those inside calls and loops).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((4, 8)), jnp.ones((8, 6)))
        >>> batch, columns = (("data",), ()), ((), ("model",))
        >>> propagate(jaxpr, [batch, columns], {"data": 2, "model": 2})[jaxpr.jaxpr.outvars[0]]
        (('data',), ('model',))
    """
    known: dict[Any, MaybeSpec] = {}
    _forward(_opened(jaxpr), known, specs, sizes, functools.partial(_made, sizes=sizes))
    return known


def output_specs(
    jaxpr: jex.ClosedJaxpr, specs: Sequence[MaybeSpec], sizes: Sizes
) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs: as `propagate` finds them, then by their uses.

    An output that is used as well (a residual) is split where its uses split it: a dropout's mask
    is drawn for each head where the heads are.

    Returns:
        a spec, or `None` where it may be any, for each output; literals are whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: (x.sum(1), jnp.zeros(3)))(jnp.ones((4, 8)))
        >>> output_specs(jaxpr, [(("data",), ())], {"data": 2})
        [(('data',),), None]
    """
    opened = _opened(jaxpr)
    known: dict[Any, MaybeSpec] = {}
    for _ in range(_ROUNDS):
        _forward(opened, known, specs, sizes, functools.partial(output_specs, sizes=sizes))
        _backward(opened, known, sizes, {*opened.invars, *opened.constvars})
    return _of_outputs(opened, known)


def made_whole(jaxpr: jex.ClosedJaxpr, specs: Sequence[MaybeSpec], sizes: Sizes) -> list[Any]:
    """Finds the equations, also inside calls and loops, that make values whole for want of a rule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(jnp.fft.fft(x)))(jnp.ones((4, 8)))
        >>> [e.primitive.name for e in made_whole(jaxpr, [(("data",), ())], {"data": 2})]
        ['fft']
    """
    found: dict[int, Any] = {}

    def outputs(inner, specs):
        opened, known = _opened(inner), {}
        _forward(opened, known, specs, sizes, outputs)
        for eqn in opened.eqns:
            axes = [a for s in _of_operands(eqn, known) for a in axes_of(s or ())]
            if any(sizes[a] > 1 for a in axes) and not _has_rule(eqn):
                found[id(eqn)] = eqn
        return _of_outputs(opened, known)

    outputs(jaxpr, specs)
    return list(found.values())


def loop_specs(eqn, specs: Sequence[MaybeSpec], sizes: Sizes) -> dict[Ref, MaybeSpec]:
    """Finds the specs of all values that the tasks of a scheduled loop read and make.

    Args:
        eqn: the equation of the loop.
        specs: the specs of its operands; slices have a leading dimension of microbatches here.
        sizes: the number of devices along each axis.

    Returns:
        a spec, or `None` where it may be any, by reference: of a slice, that of one microbatch. An
        accumulator's spec is the same before and after each task.
    """
    return _holders.loop_specs(eqn, specs, functools.partial(_made, sizes=sizes))


def _made(jaxpr, specs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs, forward only."""
    return _of_outputs(_opened(jaxpr), propagate(jaxpr, specs, sizes))


def _opened(jaxpr):
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def _of_outputs(opened, known) -> list[MaybeSpec]:
    return [
        replicated(len(shape_of(v))) if _jaxprs.is_literal(v) else known[v] for v in opened.outvars
    ]


# ---- from operands to results -------------------------------------------------------------------


def _forward(opened, known: dict[Any, MaybeSpec], specs, sizes: Sizes, outputs: Outputs) -> None:
    """Adds to `known` the specs of a jaxpr's variables, from operands to results."""
    known.update(dict.fromkeys(opened.constvars))
    for var, spec in zip(opened.invars, specs, strict=True):
        known[var] = of_type(spec, var, sizes)
    for eqn in opened.eqns:
        results = _results(eqn, _of_operands(eqn, known), sizes, outputs)
        for var, spec in zip(eqn.outvars, results, strict=True):
            known[var] = of_type(merge([known.get(var), spec]), var, sizes)


def _of_operands(eqn, known) -> list[MaybeSpec]:
    return [None if _jaxprs.is_literal(v) else known[v] for v in eqn.invars]


def _results(eqn, specs, sizes: Sizes, outputs: Outputs) -> list[MaybeSpec]:
    """Finds the specs of an equation's results; `outputs` finds those of a jaxpr inside."""
    name = eqn.primitive.name
    if name in _holders.HOLDERS:
        results = _holders.HOLDERS[name](eqn, specs, outputs)
    elif _jaxprs.called_jaxpr(eqn) is not None:
        results = _holders.call(eqn, specs, outputs)
    elif name in _RULES:
        results = _RULES[name](eqn, specs, sizes)
    elif not any(specs):  # all free, or scalars
        results = [None] * len(eqn.outvars)
    elif (found := found_again(eqn)) is not None:
        results = [_combine(eqn, found, specs, len(shape_of(v))) for v in eqn.outvars]
    else:
        results = [replicated(len(shape_of(v))) for v in eqn.outvars]
    return [of_type(s, v, sizes) for s, v in zip(results, eqn.outvars, strict=True)]


def _has_rule(eqn) -> bool:
    known = eqn.primitive.name in _holders.HOLDERS or eqn.primitive.name in _RULES
    return known or _jaxprs.called_jaxpr(eqn) is not None or found_again(eqn) is not None


def _combine(eqn, found, specs: Sequence[MaybeSpec], ndim: int) -> MaybeSpec:
    """Moves each operand's axes to the dimensions of the result where its own are found again."""
    order = sorted(range(len(specs)), key=lambda i: -math.prod(shape_of(eqn.invars[i])))
    return overlay(
        ndim,
        (
            (to, axes)
            for i in order
            if specs[i] is not None
            for to, axes in zip(found[i], specs[i] or (), strict=True)
            if to is not None
        ),
    )


def _reshape(eqn, specs, sizes) -> list[MaybeSpec]:
    if specs[0] is None or eqn.params.get("dimensions") is not None:
        return [specs[0] and replicated(len(shape_of(eqn.outvars[0])))]
    return [reshaped(specs[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), sizes)]


def _sharding_constraint(eqn, specs, sizes) -> list[MaybeSpec]:
    return [pinned(specs[0], eqn.params["sharding"], eqn.invars[0])]


def _each(eqn, specs, sizes) -> list[MaybeSpec]:
    """Gives each result the spec of its operand, one of the last, in dimensions of the same size.

    Under `vmap`, a collective that sums over devices also sums over dimensions.
    """
    summed = [a for a in eqn.params.get("axes", ()) if not isinstance(a, str)]
    skipped = len(eqn.invars) - len(eqn.outvars)
    results: list[MaybeSpec] = []
    for var, operand, spec in zip(eqn.outvars, eqn.invars[skipped:], specs[skipped:], strict=True):
        old, new = shape_of(operand), shape_of(var)
        if spec is not None:
            kept = [
                (n, e) for d, (n, e) in enumerate(zip(old, spec, strict=True)) if d not in summed
            ]
            if len(kept) != len(new):
                kept = [(n, ()) for n in new]
            spec = tuple(e if n == m else () for (n, e), m in zip(kept, new, strict=True))
        results.append(spec)
    return results


def _free(eqn, specs, sizes) -> list[MaybeSpec]:
    return [None] * len(eqn.outvars)


_EACH = """
    all_gather all_gather_invariant module_call optimization_barrier pcast pipeline_enter_stage
    pmax pmin ppermute psum psum_invariant pvary reduce_scatter
""".split()

_CONSTRAINTS = frozenset({"sharding_constraint", "shard_map"})

_RULES: dict[str, Callable[[Any, Sequence[MaybeSpec], Sizes], list[MaybeSpec]]] = {
    **dict.fromkeys(_EACH, _each),
    **dict.fromkeys(["empty", "iota", "rng_bit_generator", "rng_uniform"], _free),
    "reshape": _reshape,
    "sharding_constraint": _sharding_constraint,
}


# ---- from results to operands -------------------------------------------------------------------


def _backward(opened, known: dict[Any, MaybeSpec], sizes: Sizes, fixed: Collection) -> None:
    """Splits variables as their uses split them, but for those that are fixed or constrained."""
    constrained = (v for e in opened.eqns if e.primitive.name in _CONSTRAINTS for v in e.outvars)
    fixed = {*fixed, *constrained}
    for eqn in reversed(opened.eqns):
        for var, wanted in zip(eqn.invars, _wanted(eqn, known, sizes), strict=True):
            if not _jaxprs.is_literal(var) and var not in fixed and wanted and any(wanted):
                known[var] = of_type(merge([known[var], wanted]), var, sizes)


def _wanted(eqn, known, sizes: Sizes) -> Sequence[MaybeSpec]:
    """Gives the specs that an equation's operands would have, were they made of its results."""
    results, nothing = [known[v] for v in eqn.outvars], [None] * len(eqn.invars)
    old, new = [[shape_of(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
    name = eqn.primitive.name
    if _jaxprs.called_jaxpr(eqn) is not None:
        return _wanted_by_call(eqn, known, sizes)
    if name == "reshape":
        return [results[0] and reshaped(results[0], new[0], old[0], sizes), *nothing[1:]]
    if name in _EACH or name == "sharding_constraint":
        return results if old == new else nothing
    found = found_again(eqn)
    if found is None:
        return nothing
    result, wanted = merge(results), nothing
    if result is not None:
        wanted = [tuple(() if to is None else result[to] for to in operand) for operand in found]
    return _summed_alike(eqn, wanted, known) if name == "dot_general" else wanted


def _summed_alike(eqn, wanted, known) -> list[MaybeSpec]:
    """Splits a summed dimension of each operand of a product as the other operand has it."""
    specs = _of_operands(eqn, known)
    both = []
    for mine, theirs in ((0, 1), (1, 0)):
        contracted = eqn.params["dimension_numbers"][0]
        summed: list[tuple[str, ...]] = [()] * len(shape_of(eqn.invars[mine]))
        for d, other in zip(contracted[mine], contracted[theirs], strict=True):
            summed[d] = (specs[theirs] or {other: ()})[other]
        both.append(merge([wanted[mine], tuple(summed)]))
    return both


def _wanted_by_call(eqn, known, sizes: Sizes) -> list[MaybeSpec]:
    opened: Any = _opened(_jaxprs.called_jaxpr(eqn))
    inside = propagate(opened, _of_operands(eqn, known), sizes)
    for var, outer in zip(opened.outvars, eqn.outvars, strict=True):
        if not _jaxprs.is_literal(var):
            inside[var] = of_type(merge([inside[var], known[outer]]), var, sizes)
    _backward(opened, inside, sizes, opened.constvars)
    return [inside[v] for v in opened.invars]
