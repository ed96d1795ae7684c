"""Runs replicas on devices of their own: a task on its row of each value, and one reduction.

What has a row for each replica is split over an axis inside a rank. A task runs on the rows of a
device, by `jax.shard_map` over that axis alone, so that it has no collective over the axis. The
values of replicas are combined after the loop, by one collective for each of them: as `jax.pmap`
and PyTorch's DistributedDataParallel do (Li et al., VLDB 2020) with gradient accumulation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp import _compat, _jaxprs
from jaxpp._program import Role
from jaxpp._specs import only, replicated
from jaxpp._typing import Eqn, Var
from jaxpp.transforms._step import Inside, Step
from jaxpp.transforms.inside import _propagation
from jaxpp.transforms.inside._assign import scattered
from jaxpp.transforms.inside._automatic_axes import mapped, retype
from jaxpp.transforms.stages import call_merge, merge_of_call

#: How the values of two replicas are combined, and those of several devices.
_COMBINE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (jnp.add, jax.lax.psum),
    "max": (jnp.maximum, jax.lax.pmax),
}


def is_reduction(eqn: Eqn) -> bool:
    """Tells whether an equation combines the values of replicas, number by number."""
    return merge_of_call(eqn) in _COMBINE


# ---- tasks --------------------------------------------------------------------------------------


def on_rows(
    jaxpr: jex.ClosedJaxpr, has_rows: Sequence[bool], replicas: int, inside: Inside | None
) -> Callable[..., Sequence[Any]]:
    """Makes of the computation of a replica that of all, on devices of their own.

    Args:
        jaxpr: the computation of one replica.
        has_rows: for each of its inputs, whether it has a row for each replica; the others are the
            same for all.
        replicas: the number of replicas.
        inside: the axes inside a rank; None where a rank is one device, which runs one replica
            after the other.

    Returns:
        A function of arrays; its results have rows.

    Raises:
        ValueError: the number of devices does not divide that of the replicas, or the computation
            is itself spread over their axis.
    """
    devices = num_devices(inside, replicas)
    if devices > 1 and inside is not None:
        jaxpr = _over_others(jaxpr, inside.replicas)

    def local(*operands):
        rows = [x for x, own in zip(operands, has_rows, strict=True) if own]

        def one(rows):
            rest = iter(rows)
            given = (next(rest) if r else x for x, r in zip(operands, has_rows, strict=True))
            return _jaxprs.run(jaxpr, *given)

        if replicas == devices:
            return [y[None] for y in one([jax.lax.squeeze(x, (0,)) for x in rows])]
        return jax.lax.scan(lambda _, own: (None, one(own)), None, rows)[1]

    if devices == 1 or inside is None:
        return local
    split = PartitionSpec(inside.replicas)
    return jax.shard_map(
        local,
        in_specs=tuple(split if own else PartitionSpec() for own in has_rows),
        out_specs=split,
        axis_names={inside.replicas},
        check_vma=False,
    )


def num_devices(inside: Inside | None, replicas: int) -> int:
    """Returns the number of devices of a rank that have replicas of their own.

    Raises:
        ValueError: it does not divide the number of replicas.
    """
    devices = 1 if inside is None else inside.sizes.get(inside.replicas, 1)
    if replicas % devices:
        raise ValueError(
            f"place: the mesh has {devices} devices along {inside and inside.replicas!r}, which do "
            f"not divide the {replicas} replicas of microbatch(..., replicas={replicas}). Give it "
            f"a multiple of {devices}, or the axis {math.gcd(devices, replicas)} devices, or name "
            f"another axis: place(..., replica_axis=)."
        )
    return devices


def _over_others(jaxpr: Any, axis: str) -> Any:
    """Leaves an axis to `shard_map`, in a jaxpr that was traced without: a replica has none of it.

    What the jaxpr splits over the axis is whole in each replica: it has its own examples alone.
    """

    def rule(eqn: Eqn) -> _jaxprs.Replacement:
        if eqn.primitive.name == "shard_map" and axis in _manual_axes(eqn):
            raise ValueError(
                f"place: the shard_map{_compat.at_source_line(eqn)} is over {axis!r}, and so are "
                f"the replicas of microbatch(..., replicas=), each of which has devices of its own "
                f"along it. Leave the axis out of the shard_map, or leave out replicas: then the "
                f"devices along {axis!r} share each microbatch."
            )
        results = list(map(retyped, eqn.outvars))
        params = {k: mapped(v, without_axis) for k, v in eqn.params.items()}
        own = eqn.replace(params=params, outvars=results)
        return [_compat.under_mesh(own, _manual_along(axis))], results

    def retyped(var: Var) -> Var:
        sharding = getattr(var.aval, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return _jaxprs.fresh_var(var)
        return Var(var.aval.update(sharding=without_axis(sharding)))

    def without_axis(value: Any) -> Any:
        if isinstance(value, AbstractMesh):
            return _manual_along(axis)(value)
        if not isinstance(value, NamedSharding):
            return _over_others(value, axis)
        if not isinstance(value.mesh, AbstractMesh):
            return value
        entries = [_entry_without(e, axis) for e in value.spec]
        return NamedSharding(_manual_along(axis)(value.mesh), PartitionSpec(*entries))

    return retype(jaxpr, retyped, rule)


def _manual_axes(eqn: Eqn) -> Any:
    params = eqn.params
    return params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))


@functools.cache
def _manual_along(axis: str) -> Callable[[AbstractMesh], AbstractMesh]:
    """Returns the function that makes an axis of a mesh manual."""

    def change(mesh: AbstractMesh) -> AbstractMesh:
        if mesh.empty or axis not in mesh.axis_names:
            return mesh
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        return mesh.update(axis_types=tuple(AxisType.Manual if n == axis else t for n, t in pairs))

    return change


def _entry_without(entry: Any, axis: str) -> Any:
    if not isinstance(entry, str | tuple):
        return entry  # None, or one that is left open
    own = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a != axis)
    return own if len(own) > 1 else own[0] if own else None


# ---- the reduction ------------------------------------------------------------------------------


def reduce_replicas(step: Step) -> Step:
    """Combines the values of replicas by collectives between their devices.

    Optimizer state that is split over the replicas (ZeRO) gets the sums of gradients scattered.
    """
    inside = step.inside
    if inside is None or not any(map(is_reduction, step.jaxpr.eqns)):
        return step
    known: _propagation.Known = {}
    if inside.zero[Role.OPTIMIZER] == (inside.replicas,):
        specs = [a.spec for a in step.arguments]
        known = _propagation.propagate(step.jaxpr, specs, inside.sizes)
    made: dict[Hashable, Eqn] = {}  # those of equal arrays are one
    eqns: list[Eqn] = []
    for eqn in step.jaxpr.eqns:
        how = merge_of_call(eqn)
        if how not in _COMBINE or num_devices(inside, eqn.invars[0].aval.shape[0]) == 1:
            eqns.append(eqn)
            continue
        (rows,), (total,) = _jaxprs.variables(eqn.invars), eqn.outvars
        dimension = _scattered_dimension(how, rows, total, known, inside)
        key = how, dimension, rows.aval
        if key not in made:
            reduce = _reduction(how, inside.replicas, dimension)
            (made[key],) = jax.make_jaxpr(functools.partial(_call, reduce, how))(rows.aval).eqns
        new = made[key]
        eqns.append(new.replace(invars=[rows], outvars=[total], source_info=eqn.source_info))
    jaxpr = _compat.with_equations(step.jaxpr, eqns, step.jaxpr.jaxpr.outvars)
    return dataclasses.replace(step, jaxpr=jaxpr)


def _call(reduce: Callable[[jax.Array], jax.Array], how: str, rows: jax.Array) -> jax.Array:
    return call_merge(reduce, how, (rows,))


def _scattered_dimension(
    how: str, rows: Var, total: Var, known: _propagation.Known, inside: Inside
) -> int | None:
    """Finds the dimension along which a sum is scattered, as its state is; None for none."""
    if how != "sum" or rows not in known:
        return None
    given = known[rows] or replicated(rows.aval.ndim)
    spec = only(given[1:], [a for a in inside.sizes if a != inside.replicas])
    target = scattered(spec, total.aval.shape, (inside.replicas,), inside.sizes)
    pairs = enumerate(zip(target or (), spec, strict=False))
    return next((n for n, (own, before) in pairs if own != before), None)


def _reduction(how: str, axis: str, dimension: int | None) -> Callable[[jax.Array], jax.Array]:
    """Makes the function that combines rows, which are split over the axis of the replicas."""
    (combine, collective), whole = _COMBINE[how], PartitionSpec()

    def part(rows):
        own = functools.reduce(combine, list(rows))
        if dimension is not None:
            return jax.lax.psum_scatter(own, axis, scatter_dimension=dimension, tiled=True)
        return collective(own, axis)

    return jax.shard_map(
        part,
        in_specs=PartitionSpec(axis),
        out_specs=whole if dimension is None else PartitionSpec(*[None] * dimension, axis),
        axis_names={axis},
        check_vma=False,
    )
