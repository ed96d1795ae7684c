"""Checks what a step says of devices: constraints and `shard_map`s name axes alone."""

from typing import Any

import jax.extend.core as jex
from jax.sharding import AbstractMesh

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _loop


def check_constraints(jaxpr: jex.ClosedJaxpr, inside: AbstractMesh | None) -> None:
    """Checks that constraints leave it to each rank which devices they mean.

    Args:
        jaxpr: the step.
        inside: the mesh of every rank without its devices; None where each is one device.

    Raises:
        ValueError: a constraint, or a `shard_map`, is over a mesh of its own.
    """
    for eqn in jaxpr.eqns:
        mesh = _mesh_of(eqn)
        if mesh is not None and not isinstance(mesh, AbstractMesh):
            axes = "none" if inside is None else f"{inside.axis_names}"
            raise ValueError(
                f"place: the `{eqn.primitive.name}`{_compat.at_source_line(eqn)} is over a mesh of "
                f"its own, {mesh}, whose devices may be another rank's. Name axes alone, with a "
                f"PartitionSpec (and leave out shard_map's mesh): they are those of the rank that "
                f"runs it. The mesh has these axes inside a rank: {axes}."
            )
        tasks = [b.jaxpr for b in eqn.params["tasks"].bodies] if _loop.is_loop(eqn) else []
        for inner in (*_jaxprs.sub_jaxprs(eqn), *tasks):
            check_constraints(inner, inside)


def _mesh_of(eqn: Any) -> Any | None:
    """The mesh that an equation names; None where it names none."""
    if eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        return getattr(sharding, "mesh", sharding)
    return eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
