"""Traces a step; a step with explicit axes is rewritten to one with automatic axes.

Explicit axes (`jax.sharding.AxisType.Explicit`) put the sharding of an array into its type, and JAX
checks the types as it traces. After the trace, jaxpp knows automatic axes only: a sharding that the
user asked for, by `reshard` or an `out_sharding`, becomes a constraint. All other shardings follow
from the constraints and the arguments, as in any SPMD program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, axes_of, explicit_axes, only, partition_spec, spec_of
from jaxpp.transforms.inside._constraints import check_constraints, constraint


def automatic(mesh: AbstractMesh) -> AbstractMesh:
    """Makes the explicit axes of a mesh automatic."""
    types = (AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    return mesh.update(axis_types=tuple(types))


def trace(
    fun: Callable, types: Any, specs: Sequence[Spec | None], inside: AbstractMesh | None
) -> _jaxprs.Traced:
    """Traces a step; its explicit axes become automatic.

    Args:
        fun: the step.
        types: the types of its arguments.
        specs: the spec of each array among these; None where it is open.
        inside: the mesh of a rank without its devices; None where a rank is one device.

    Raises:
        ValueError: a constraint is over a mesh of its own, or a sum is left `unreduced`.
    """
    explicit = () if inside is None else explicit_axes(inside)
    if inside is None or not explicit:
        traced = _jaxprs.trace(fun, types)
    else:
        with jax.sharding.use_abstract_mesh(inside):
            traced = _jaxprs.trace(fun, _with_types(types, specs, inside, explicit))
        jaxpr = with_automatic_axes(traced.jaxpr)
        traced = dataclasses.replace(traced, jaxpr=jaxpr)
    check_constraints(traced.jaxpr, inside)
    return traced


def _with_types(
    types: Any, specs: Sequence[Spec | None], inside: AbstractMesh, explicit: Sequence[str]
) -> Any:
    """Puts into the types of arguments how they are split over the explicit axes of a rank."""
    leaves, tree = jtu.tree_flatten(types)
    rest = iter(specs)

    def typed(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        own = partition_spec(only(next(rest) or (), explicit))
        kind = _compat.memory_kind(x)
        return x.update(sharding=NamedSharding(inside, own, memory_kind=kind))

    return jtu.tree_unflatten(tree, map(typed, leaves))


def with_automatic_axes(jaxpr: Any) -> Any:
    """Replaces the explicit axes in the types of a jaxpr, open or closed, by constraints.

    Raises:
        ValueError: an array is a sum of which each device holds a part (`unreduced`).
    """
    opened = _jaxprs.opened(jaxpr)
    known = _jaxprs.Substitution((v, _retyped(v)) for v in opened.invars)
    eqns: list[Any] = []
    for eqn in opened.eqns:
        eqns += _rewritten(known.rename(eqn), known)
    outvars = [known(v) for v in opened.outvars]
    return _compat.with_equations(jaxpr, eqns, outvars, [known(v) for v in opened.invars])


#: The primitives that make an array out of nothing; JAX itself gives them a sharding.
_MADE = frozenset({"broadcast_in_dim", "iota"})

#: The parameters by which equations that compute say how their result is to be split.
_WANTED = ("out_sharding", "sharding")


def _rewritten(eqn: Any, known: _jaxprs.Substitution) -> list[Any]:
    """Returns the equations that take the place of one, and notes its new results in `known`."""
    for v in eqn.outvars:
        if "unreduced" in str(getattr(v.aval, "sharding", "")):
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} leaves a sum "
                f"unreduced, {v.aval}, which a pipelined step cannot hold. Reduce it, with "
                f"jax.sharding.reshard or an out_sharding without `unreduced`; gradients over "
                f"examples are summed once a step as it is."
            )
    results = [_retyped(v) for v in eqn.outvars]
    known.of.update(zip(eqn.outvars, results, strict=True))
    if "dst_sharding" in eqn.params:  # the equation only moves an array
        return [_constraint(eqn, eqn.invars[0], eqn.params["dst_sharding"], results[0])]
    own = eqn.replace(outvars=results)
    if eqn.primitive.name == "sharding_constraint":
        return [_automatic(own)]
    wanted = [eqn.params[name] for name in _WANTED if _is_explicit(eqn.params.get(name))]
    if not wanted:
        return [_automatic(own)]
    own = own.replace(params={k: None if k in _WANTED else v for k, v in eqn.params.items()})
    split = axes_of(spec_of(wanted[0].spec, len(results[0].aval.shape)))
    says_nothing = eqn.primitive.name in _MADE or AxisType.Auto in wanted[0].mesh.axis_types
    if says_nothing and not split:
        return [_automatic(own)]
    free = _jaxprs.fresh_var(results[0])
    first = own.replace(outvars=[free])
    return [_automatic(first), _constraint(eqn, free, wanted[0], results[0])]


def _automatic(eqn: Any) -> Any:
    params = {k: _value(v) for k, v in eqn.params.items()}
    return _compat.under_mesh(eqn.replace(params=params), automatic)


def _value(value: Any) -> Any:
    """Makes all axes in a parameter automatic."""
    if isinstance(value, _compat.JaxprTypes):
        return with_automatic_axes(value)
    if isinstance(value, AbstractMesh):
        return automatic(value)
    if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
        return NamedSharding(automatic(value.mesh), value.spec, memory_kind=value.memory_kind)
    if type(value) is tuple:  # not one with names
        return tuple(map(_value, value))
    return [_value(v) for v in value] if type(value) is list else value


def _retyped(var: Any) -> Any:
    """Makes a new variable whose type does not say how it is split."""
    sharding: Any = getattr(var.aval, "sharding", None)
    if not _is_explicit(sharding):
        return _jaxprs.fresh_var(var)
    whole = PartitionSpec(*[None] * len(var.aval.shape))
    return jex.Var(var.aval.update(sharding=NamedSharding(automatic(sharding.mesh), whole)))


def _is_explicit(sharding: Any) -> bool:
    """Tells whether a sharding is over a mesh with explicit axes, and so a part of types."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _constraint(eqn: Any, operand: Any, wanted: NamedSharding, result: Any) -> Any:
    """Makes a constraint that splits a variable as an equation's result was to be split.

    A type says nothing of automatic axes, so the constraint leaves open what they split.
    """
    mesh = automatic(wanted.mesh.abstract_mesh)
    entries: Sequence[Any] = tuple(wanted.spec)
    if AxisType.Auto in wanted.mesh.axis_types:
        entries = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    with jax.sharding.use_abstract_mesh(mesh):
        made = constraint(operand, PartitionSpec(*entries), result)
    return made.replace(source_info=eqn.source_info)
