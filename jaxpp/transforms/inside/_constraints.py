"""Makes sharding constraints, and checks those of a step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, partition_spec
from jaxpp._typing import Jaxpr


def constraint(var: Any, spec: PartitionSpec, result: Any) -> Any:
    """Makes an equation that splits a variable, under the abstract mesh that is set.

    Args:
        var: the variable, of the type of `result`.
        spec: the axes to split each dimension over.
        result: the variable of the result.
    """
    (eqn,) = _jaxprs.splice(lambda x: jax.lax.with_sharding_constraint(x, spec), [var], [result])
    return eqn


def split_operands(eqn: Any, specs: Mapping[int, Spec]) -> list[Any]:
    """Splits some operands of an equation as their specs say: makes the equations that do so, too.

    Args:
        eqn: the equation.
        specs: the specs, by the numbers of the operands.
    """
    operands, eqns = list(eqn.invars), []
    for n, spec in specs.items():
        operands[n] = _jaxprs.fresh_var(eqn.invars[n])
        eqns.append(constraint(eqn.invars[n], partition_spec(spec), operands[n]))
    return [*eqns, eqn.replace(invars=operands)]


def check_constraints(jaxpr: jex.ClosedJaxpr | Jaxpr, inside: AbstractMesh | None) -> None:
    """Checks that constraints name axes alone, and no devices.

    Args:
        jaxpr: the step.
        inside: the mesh of every rank without its devices; None where each is one device.

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
        for inner in _jaxprs.sub_jaxprs(eqn):
            check_constraints(inner, inside)


def _mesh_of(eqn: Any) -> Any | None:
    """Returns the mesh that an equation names; None where it names none."""
    if eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        return getattr(sharding, "mesh", sharding)
    if shardings := _jaxprs.shardings_of(eqn):
        return getattr(shardings[0], "mesh", shardings[0])
    return eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
