"""Sharding propagation: finds the specs of a jaxpr's values from those of its inputs.

A spec is never wrong; if a value is less split than it could be, XLA only moves more than it needs
to.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _jaxprs
from jaxpp._dimensions import found_again, shape_of
from jaxpp._specs import axes_of, replicated
from jaxpp._typing import Jaxpr
from jaxpp.transforms.inside.propagation import _rules
from jaxpp.transforms.inside.propagation._rules import Outputs
from jaxpp.transforms.inside.propagation._specs import MaybeSpec, Sizes, merge, of_type, reshaped

_CONSTRAINTS = frozenset({"sharding_constraint", "shard_map"})
_SPLITTERS = _CONSTRAINTS | {"pipeline_loop"}
_ROUNDS = 2  # forward and back, after which the models of experiments/ change no more


def propagate(
    jaxpr: jex.ClosedJaxpr | Jaxpr, specs: Sequence[MaybeSpec], sizes: Sizes
) -> dict[Any, MaybeSpec]:
    """Finds the spec of each variable of a jaxpr, forward from the specs of its inputs.

    A dimension that is split in one operand and whole in another is split in the result. If two
    operands disagree, the larger one wins, or the first of two of one size. Equations without a
    rule give values that are whole.

    Args:
        jaxpr: a jaxpr, open or closed; its constants count as values that may be split in any way.
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
    _forward(_jaxprs.opened(jaxpr), known, specs, functools.partial(_made, sizes=sizes), sizes)
    return known


def output_specs(
    jaxpr: jex.ClosedJaxpr | Jaxpr, specs: Sequence[MaybeSpec], sizes: Sizes
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
    opened = _jaxprs.opened(jaxpr)
    if _is_whole(opened, specs):
        return _of_whole(opened, specs)
    known: dict[Any, MaybeSpec] = {}
    for _ in range(_ROUNDS):
        _forward(opened, known, specs, functools.partial(output_specs, sizes=sizes), sizes)
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
        opened, known = _jaxprs.opened(inner), {}
        if _is_whole(opened, specs):
            return _of_whole(opened, specs)
        _forward(opened, known, specs, outputs, sizes)
        for eqn in opened.eqns:
            axes = [a for s in _of_atoms(eqn.invars, known) for a in axes_of(s or ())]
            if any(sizes[a] > 1 for a in axes) and eqn.primitive.name not in _rules.RULES:
                found[id(eqn)] = eqn
        return _of_outputs(opened, known)

    outputs(jaxpr, specs)
    return list(found.values())


def _made(jaxpr, specs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs, forward only."""
    opened = _jaxprs.opened(jaxpr)
    if _is_whole(opened, specs):
        return _of_whole(opened, specs)
    return _of_outputs(opened, propagate(opened, specs, sizes))


def _of_atoms(atoms, known) -> list[MaybeSpec]:
    return [None if _jaxprs.is_literal(v) else known[v] for v in atoms]


def _of_outputs(opened, known) -> list[MaybeSpec]:
    return [
        replicated(len(shape_of(v))) if _jaxprs.is_literal(v) else known[v] for v in opened.outvars
    ]


def _forward(
    opened, known: dict[Any, MaybeSpec], specs: Sequence[MaybeSpec], outputs: Outputs, sizes: Sizes
) -> None:
    """Adds to `known` the specs of a jaxpr's variables, from operands to results."""
    known.update(dict.fromkeys(opened.constvars))
    for var, spec in zip(opened.invars, specs, strict=True):
        known[var] = of_type(spec, var, sizes)
    for eqn in opened.eqns:
        results = _rules.results(eqn, _of_atoms(eqn.invars, known), outputs, sizes)
        for var, spec in zip(eqn.outvars, results, strict=True):
            known[var] = of_type(merge([known.get(var), spec]), var, sizes)


# ---- where nothing is split ---------------------------------------------------------------------


def _is_whole(opened, specs: Sequence[MaybeSpec]) -> bool:
    """Tells whether no value of a jaxpr is split: no input is, and no equation splits one."""
    if any(spec and any(spec) for spec in specs):
        return False
    return not any(_jaxprs.contains(eqn, _splits) for eqn in opened.eqns)


def _splits(eqn) -> bool:
    return eqn.primitive.name in _SPLITTERS or bool(_jaxprs.shardings_of(eqn))


def _of_whole(opened, specs: Sequence[MaybeSpec]) -> list[MaybeSpec]:
    """Finds the specs of the outputs of a jaxpr that splits nothing."""
    given = [v for v, spec in zip(opened.invars, specs, strict=True) if spec]
    whole = _jaxprs.descendants(opened.eqns, given)
    return [
        replicated(len(shape_of(v))) if _jaxprs.is_literal(v) or v in whole else None
        for v in opened.outvars
    ]


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
    """Returns the specs that an equation's operands would have, were they made of its results."""
    results, nothing = [known[v] for v in eqn.outvars], [None] * len(eqn.invars)
    old, new = [[shape_of(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
    name = eqn.primitive.name
    if _jaxprs.called_jaxpr(eqn) is not None:
        return _wanted_by_call(eqn, known, sizes)
    if name == "reshape":
        return [results[0] and reshaped(results[0], new[0], old[0], sizes), *nothing[1:]]
    if name in _rules.EACH or name == "sharding_constraint":
        return results if old == new else nothing
    found = found_again(eqn)
    if found is None:
        return nothing
    entries: dict[int | None, tuple[str, ...]] = dict(enumerate(merge(results) or ()))
    # A dimension that is summed is split in one operand as it is in the other.
    for dimensions, spec in zip(found, _of_atoms(eqn.invars, known), strict=True):
        for to, axes in zip(dimensions, spec or (), strict=False):
            if to is not None and to >= len(new[0]):
                entries[to] = entries.get(to) or axes
    return [tuple(entries.get(to, ()) for to in dimensions) for dimensions in found]


def _wanted_by_call(eqn, known, sizes: Sizes) -> list[MaybeSpec]:
    opened: Any = _jaxprs.opened(_jaxprs.called_jaxpr(eqn))
    inside = propagate(opened, _of_atoms(eqn.invars, known), sizes)
    for var, outer in zip(opened.outvars, eqn.outvars, strict=True):
        if not _jaxprs.is_literal(var):
            inside[var] = of_type(merge([inside[var], known[outer]]), var, sizes)
    _backward(opened, inside, sizes, opened.constvars)
    return [inside[v] for v in opened.invars]
