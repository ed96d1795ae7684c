"""Traces a step to one whose constraints name axes alone, all of them automatic.

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

from jaxpp import _compat, jaxprs
from jaxpp._specs import Spec, axes_of, explicit_axes, only, partition_spec, spec_of
from jaxpp.jaxprs import Atom, Eqn, Jaxpr, Var


def automatic(mesh: AbstractMesh) -> AbstractMesh:
    """Makes the explicit axes of a mesh automatic."""
    types = (AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    return mesh.update(axis_types=tuple(types))


def trace(
    fun: Callable, types: Any, specs: Sequence[Spec | None], inside: AbstractMesh | None
) -> jaxprs.Traced:
    """Traces a step, at arguments of some types and specs; its explicit axes become automatic.

    Raises:
        ValueError: a constraint is over a mesh of its own, or a sum is left `unreduced`.
    """
    with _compat.numbered_errors():
        if inside is None:
            traced = jaxprs.trace(fun, types)
        else:
            with jax.sharding.use_abstract_mesh(inside):
                traced = jaxprs.trace(fun, _with_types(types, specs, inside))
            if explicit_axes(inside):
                jaxpr = with_automatic_axes(traced.jaxpr)
                traced = dataclasses.replace(traced, jaxpr=jaxpr)
        check_constraints(traced.jaxpr, inside)
        return traced


def _with_types(types: Any, specs: Sequence[Spec | None], inside: AbstractMesh) -> Any:
    """Puts into the types of arguments how they are split over the explicit axes of a rank."""
    if not (explicit := explicit_axes(inside)):
        return types
    leaves, tree = jtu.tree_flatten(types)
    rest = iter(specs)

    def typed(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        split = partition_spec(only(next(rest) or (), explicit))
        kind = _compat.memory_kind(x)
        return x.update(sharding=NamedSharding(inside, split, memory_kind=kind))

    return jtu.tree_unflatten(tree, map(typed, leaves))


def with_automatic_axes(jaxpr: Any) -> Any:
    """Replaces the explicit axes in the types of a jaxpr, open or closed, by constraints.

    Raises:
        ValueError: an array is a sum of which each device holds a part (`unreduced`).
    """
    return retype(jaxpr, _retyped, _rewritten)


def retype(jaxpr: Any, new: Callable[[Var], Var], rule: Callable[[Eqn], jaxprs.Replacement]) -> Any:
    """Rewrites a jaxpr, open or closed, by a rule; `new` makes its new inputs."""
    opened = jaxprs.opened(jaxpr)
    known = jaxprs.Substitution((v, new(v)) for v in opened.invars)
    eqns = jaxprs.rewritten(opened.eqns, rule, known)
    outvars, invars = (list(map(known, atoms)) for atoms in (opened.outvars, opened.invars))
    return _compat.with_equations(jaxpr, eqns, outvars, invars)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Changes the jaxprs, the meshes and the shardings over meshes in a parameter."""
    if isinstance(value, (*_compat.JaxprTypes, AbstractMesh, NamedSharding)):
        return change(value)
    if type(value) is tuple:  # not one with names
        return tuple(mapped(v, change) for v in value)
    return [mapped(v, change) for v in value] if type(value) is list else value


#: The primitives that make an array out of nothing; JAX itself gives them a sharding.
_MADE = frozenset({"broadcast_in_dim", "iota"})

#: The parameters by which equations that compute say how their result is to be split.
_WANTED = ("out_sharding", "sharding")


def _rewritten(eqn: Eqn) -> jaxprs.Replacement:
    """Returns the equations that take the place of one, and its new results."""
    for v in eqn.outvars:
        if "unreduced" in str(getattr(v.aval, "sharding", "")):
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} leaves a sum "
                f"unreduced, {v.aval}, which a pipelined step cannot hold. Reduce it, with "
                f"jax.sharding.reshard or an out_sharding without `unreduced`; gradients over "
                f"examples are summed once a step as it is."
            )
    results = [_retyped(v) for v in eqn.outvars]
    if "dst_sharding" in eqn.params:  # the equation only moves an array
        moved = _constraint(eqn, eqn.invars[0], eqn.params["dst_sharding"], results[0])
        return [moved], results
    new = eqn.replace(outvars=results)
    if eqn.primitive.name == "sharding_constraint":
        return [_automatic(new)], results
    wanted = [eqn.params[name] for name in _WANTED if _is_explicit(eqn.params.get(name))]
    if not wanted:
        return [_automatic(new)], results
    new = new.replace(params={k: None if k in _WANTED else v for k, v in eqn.params.items()})
    split = axes_of(spec_of(wanted[0].spec, len(results[0].aval.shape)))
    says_nothing = eqn.primitive.name in _MADE or AxisType.Auto in wanted[0].mesh.axis_types
    if says_nothing and not split:
        return [_automatic(new)], results
    free = jaxprs.fresh_var(results[0])
    first = new.replace(outvars=[free])
    return [_automatic(first), _constraint(eqn, free, wanted[0], results[0])], results


def _automatic(eqn: Eqn) -> Eqn:
    params = {k: mapped(v, _changed) for k, v in eqn.params.items()}
    return _compat.under_mesh(eqn.replace(params=params), automatic)


def _changed(value: Any) -> Any:
    if isinstance(value, AbstractMesh):
        return automatic(value)
    if not isinstance(value, NamedSharding):
        return with_automatic_axes(value)
    if not isinstance(value.mesh, AbstractMesh):
        return value
    return NamedSharding(automatic(value.mesh), value.spec, memory_kind=value.memory_kind)


def _retyped(var: Var) -> Var:
    """Makes a new variable whose type does not say how it is split."""
    sharding: Any = getattr(var.aval, "sharding", None)
    if not _is_explicit(sharding):
        return jaxprs.fresh_var(var)
    whole = PartitionSpec(*[None] * len(var.aval.shape))
    return Var(var.aval.update(sharding=NamedSharding(automatic(sharding.mesh), whole)))


def _is_explicit(sharding: Any) -> bool:
    """Tells whether a sharding is over a mesh with explicit axes, and so a part of types."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _constraint(eqn: Eqn, operand: Atom, wanted: NamedSharding, result: Var) -> Eqn:
    """Makes a constraint that splits a variable as an equation's result was to be split.

    A type says nothing of automatic axes, so the constraint leaves open what they split.
    """
    mesh = automatic(wanted.mesh.abstract_mesh)
    entries: Sequence[Any] = tuple(wanted.spec)
    if AxisType.Auto in wanted.mesh.axis_types:
        entries = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    with jax.sharding.use_abstract_mesh(mesh):
        split = constraint(operand, PartitionSpec(*entries), result)
    return split.replace(source_info=eqn.source_info)


# ---- constraints ---------------------------------------------------------------------------------


def constraint(var: Atom, spec: PartitionSpec, result: Var) -> Eqn:
    """Makes an equation that splits a variable, under the abstract mesh that is set."""
    (eqn,) = jaxprs.splice(lambda x: jax.lax.with_sharding_constraint(x, spec), [var], [result])
    return eqn


def check_constraints(jaxpr: jex.ClosedJaxpr | Jaxpr, inside: AbstractMesh | None) -> None:
    """Checks that constraints name axes alone, and no devices.

    Raises:
        ValueError: a constraint, a `shard_map`, or a sharding that a `jax.jit` gives its arguments
            and results, is over a mesh with devices.
    """
    for eqn in jaxpr.eqns:
        mesh = _mesh_of(eqn)
        if mesh is not None and not isinstance(mesh, AbstractMesh):
            axes = "none" if inside is None else f"{inside.axis_names}"
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} is over a mesh of "
                f"its own, {mesh}, whose devices may be another rank's. Name axes alone, with a "
                f"PartitionSpec in jax.lax.with_sharding_constraint (and leave out shard_map's "
                f"mesh): they are those of the rank that runs it. The mesh has these axes inside a "
                f"rank: {axes}."
            )
        for inner in jaxprs.sub_jaxprs(eqn):
            check_constraints(inner, inside)


def _mesh_of(eqn: Eqn) -> Any | None:
    """Returns the mesh that an equation names; None where it names none."""
    if eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        return getattr(sharding, "mesh", sharding)
    if shardings := jaxprs.shardings_of(eqn):
        return getattr(shardings[0], "mesh", shardings[0])
    return eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
