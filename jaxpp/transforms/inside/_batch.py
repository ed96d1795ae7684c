"""Splits the batch over the devices of a rank: into replicas, or the examples of each microbatch.

What has a row for each replica is split over an axis inside a rank. A task runs on the rows of a
device, by `jax.shard_map` over that axis alone, so that it has no collective over the axis. The
values of replicas are combined after the loop, by one collective for each of them: as `jax.pmap`
and PyTorch's DistributedDataParallel do (Li et al., VLDB 2020) with gradient accumulation.

Where a loop has no replicas, each task is an SPMD program whose devices share the examples of a
microbatch, and sums over them, such as gradients, are made by a collective in the task.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp import _compat, jaxprs
from jaxpp._program import Role
from jaxpp._specs import Spec, as_weak_as, axes_of, only, partition_spec, replicated
from jaxpp.jaxprs import Eqn, Var
from jaxpp.schedules import Kind
from jaxpp.transforms._step import Inside, Step
from jaxpp.transforms.inside._assign import scattered
from jaxpp.transforms.inside._automatic_axes import constraint, mapped, retype
from jaxpp.transforms.inside._shardy import MaybeSpec, variable_specs
from jaxpp.transforms.stages import call_as, called_as
from jaxpp.transforms.tasks import ScheduledLoop, is_loop

#: Combines the values of two replicas, and those of several devices, by a collective; None
#: where they are gathered: an all-reduce of a maximum may drop NaN, which `jnp.maximum` keeps.
_COMBINE: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "sum": (jnp.add, jax.lax.psum),
    "max": (jnp.maximum, None),
}


def is_reduction(eqn: Eqn) -> bool:
    """Tells whether an equation combines the values of replicas, number by number.

    The derivative of such an equation, which has its name, does not.
    """
    if called_as(eqn, "merge_") not in _COMBINE or not len(eqn.invars) == len(eqn.outvars) == 1:
        return False
    return eqn.invars[0].aval.shape[1:] == eqn.outvars[0].aval.shape != eqn.invars[0].aval.shape


# ---- tasks of replicas ---------------------------------------------------------------------------


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
        rows = [x for x, has_row in zip(operands, has_rows, strict=True) if has_row]

        def of_replica(rows):
            rest = iter(rows)
            given = (next(rest) if r else x for x, r in zip(operands, has_rows, strict=True))
            return jaxprs.run(jaxpr, *given)

        if replicas == devices:
            return [y[None] for y in of_replica([jax.lax.squeeze(x, (0,)) for x in rows])]
        return jax.lax.scan(lambda _, given: (None, of_replica(given)), None, rows)[1]

    if devices == 1 or inside is None:
        return local
    split = PartitionSpec(inside.replicas)
    return jax.shard_map(
        local,
        in_specs=tuple(split if has_row else PartitionSpec() for has_row in has_rows),
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

    def rule(eqn: Eqn) -> jaxprs.Replacement:
        if eqn.primitive.name == "shard_map" and axis in jaxprs.manual_axes(eqn):
            raise ValueError(
                f"place: the shard_map{_compat.at_source_line(eqn)} is over {axis!r}, and so are "
                f"the replicas of microbatch(..., replicas=), each of which has devices of its own "
                f"along it. Leave the axis out of the shard_map, or leave out replicas: then the "
                f"devices along {axis!r} share each microbatch."
            )
        results = list(map(retyped, eqn.outvars))
        params = {k: mapped(v, without_axis) for k, v in eqn.params.items()}
        new = eqn.replace(params=params, outvars=results)
        return [_compat.under_mesh(new, _manual_along(axis))], results

    def retyped(var: Var) -> Var:
        sharding = getattr(var.aval, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return jaxprs.fresh_var(var)
        return Var(var.aval.update(sharding=without_axis(sharding)))

    def without_axis(value: Any) -> Any:
        if isinstance(value, AbstractMesh):
            return _manual_along(axis)(value)
        if not isinstance(value, NamedSharding):
            return _over_others(value, axis)
        if not isinstance(value.mesh, AbstractMesh):
            return value
        return NamedSharding(_manual_along(axis)(value.mesh), _without(axis, value.spec))

    return retype(jaxpr, retyped, rule)


@functools.cache
def _manual_along(axis: str) -> Callable[[AbstractMesh], AbstractMesh]:
    """Returns the function that makes an axis of a mesh manual."""

    def change(mesh: AbstractMesh) -> AbstractMesh:
        if mesh.empty or axis not in mesh.axis_names:
            return mesh
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        return mesh.update(axis_types=tuple(AxisType.Manual if n == axis else t for n, t in pairs))

    return change


def _without(axis: str, spec: PartitionSpec, whole: Any = None) -> PartitionSpec:
    """Leaves an axis out of a spec; `whole` is the entry of what no axis splits then."""

    def kept(entry: Any) -> Any:
        if not isinstance(entry, str | tuple):
            return entry or whole
        axes = (entry,) if isinstance(entry, str) else entry
        return tuple(a for a in axes if a != axis) or whole

    return PartitionSpec(*map(kept, spec))


# ---- the reduction over replicas -----------------------------------------------------------------


def reduce_replicas(step: Step) -> Step:
    """Combines the values of replicas by collectives between their devices.

    Optimizer state that is split over the replicas (ZeRO) gets the sums of gradients scattered.
    """
    inside = step.inside
    if inside is None or not any(map(is_reduction, step.jaxpr.eqns)):
        return step
    known: Mapping[Var, MaybeSpec] = {}
    if inside.zero[Role.OPTIMIZER] == (inside.replicas,):
        rows = jaxprs.operands_of(filter(is_reduction, step.jaxpr.eqns))
        known = variable_specs(step.jaxpr, rows, [a.spec for a in step.arguments], inside.sizes)
    calls: dict[Hashable, Eqn] = {}  # those of equal arrays are one
    eqns: list[Eqn] = []
    for eqn in step.jaxpr.eqns:
        if not is_reduction(eqn) or num_devices(inside, eqn.invars[0].aval.shape[0]) == 1:
            eqns.append(eqn)
            continue
        how = str(called_as(eqn, "merge_"))
        (rows,), (total,) = jaxprs.variables(eqn.invars), eqn.outvars
        dimension = _scattered_dimension(how, rows, total, known, inside)
        key = how, dimension, rows.aval
        if key not in calls:
            reduce = _reduction(how, inside.replicas, dimension)
            call = functools.partial(call_as, f"merge_{how}", reduce)
            (calls[key],) = jax.make_jaxpr(lambda rows, call=call: call((rows,)))(rows.aval).eqns
        new = calls[key]
        eqns.append(new.replace(invars=[rows], outvars=[total], source_info=eqn.source_info))
    jaxpr = _compat.with_equations(step.jaxpr, eqns, step.jaxpr.jaxpr.outvars)
    return dataclasses.replace(step, jaxpr=jaxpr)


def _scattered_dimension(
    how: str, rows: Var, total: Var, known: Mapping[Var, MaybeSpec], inside: Inside
) -> int | None:
    """Finds the dimension along which a sum is scattered, as its state is; None for none."""
    if how != "sum" or rows not in known:
        return None
    given = known[rows] or replicated(rows.aval.ndim)
    spec = only(given[1:], [a for a in inside.sizes if a != inside.replicas])
    target = scattered(spec, total.aval.shape, (inside.replicas,), inside.sizes)
    pairs = enumerate(zip(target or (), spec, strict=False))
    return next((n for n, (after, before) in pairs if after != before), None)


def _reduction(how: str, axis: str, dimension: int | None) -> Callable[[jax.Array], jax.Array]:
    """Makes the function that combines rows, which are split over the axis of the replicas."""
    (combine, collective), whole = _COMBINE[how], PartitionSpec()
    of_devices = functools.partial(
        jax.shard_map, in_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False
    )

    def part(rows):
        summed = functools.reduce(combine, list(rows))
        if collective is None:
            return summed[None]
        if dimension is not None:
            total = jax.lax.psum_scatter(summed, axis, scatter_dimension=dimension, tiled=True)
        else:
            total = collective(summed, axis)
        return as_weak_as(rows, total)

    if collective is not None:
        scattered = PartitionSpec(*[None] * (dimension or 0), axis)
        return of_devices(part, out_specs=whole if dimension is None else scattered)

    def gathered(rows):
        parts = of_devices(part, out_specs=PartitionSpec(axis))(rows)
        others = [PartitionSpec.UNCONSTRAINED] * (parts.ndim - 1)
        parts = jax.lax.with_sharding_constraint(parts, PartitionSpec(None, *others))
        return functools.reduce(combine, list(parts))

    return gathered


# ---- examples that devices share -----------------------------------------------------------------


def split_examples(step: Step) -> Step:
    """Splits each microbatch over all devices, rather than giving each some microbatches.

    A batch that is split along its examples becomes, by a reshape to microbatches, an array that is
    split along the microbatches; a loop over microbatches needs each of them split. The pass also
    notes the axes of the examples in `Inside.examples`. Of the slices of replicas each device has
    those of its replica, also where types say that an explicit axis splits the examples.
    """
    inside = step.inside
    if inside is None or not any(map(is_loop, step.jaxpr.eqns)):
        return step
    jaxpr = _left_to_replicas(step.jaxpr, inside.replicas)
    if not any(map(_shares_examples, jaxpr.eqns)):
        return dataclasses.replace(step, jaxpr=jaxpr)
    specs = [a.spec for a in step.arguments]
    known = variable_specs(jaxpr, _slices_read(jaxpr.eqns), specs, inside.sizes)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    axes: dict[str, None] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        operands = list(eqn.invars)
        sliced = len(ScheduledLoop.of(eqn).xs) if _shares_examples(eqn) else 0
        for n, v in list(enumerate(operands))[len(operands) - sliced :]:
            if jaxprs.is_literal(v) or (spec := known[v]) is None or len(spec) < 2:
                continue
            dimension, new = _split(v, spec, maker, known, inside.sizes)
            axes |= dict.fromkeys(new[dimension])
            if new != spec:
                operands[n] = result = jaxprs.fresh_var(v)
                eqns.append(constraint(v, partition_spec(new), result))
        eqns.append(eqn.replace(invars=operands))
    examples = tuple(a for a in axes if inside.sizes[a] > 1)
    inside = dataclasses.replace(inside, examples=examples)
    jaxpr = _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)
    return dataclasses.replace(step, jaxpr=jaxpr, inside=inside)


def cost_of_sharing(step: Step) -> str:
    """Says what it costs that devices share the examples of a microbatch; empty if it is little."""
    if step.inside is None or not (axes := step.inside.examples):
        return ""
    for eqn in filter(_shares_examples, step.jaxpr.eqns):
        keys = (task.params["key"] for task in ScheduledLoop.of(eqn).tasks)
        if any(key.kind in (Kind.B, Kind.W) for key in keys):
            count = math.prod(step.inside.sizes[a] for a in axes)
            return (
                f"the microbatches{_compat.at_source_line(eqn)} are split over {', '.join(axes)}: "
                f"each backward task has an all-reduce of its gradients over {count} devices. "
                f"microbatch(..., replicas={count}) has one a step; without it, means and "
                f"statistics are those of the examples of all these devices."
            )
    return ""


#: The primitives that lie between a batch and its slices.
_SLICING = ("reshape", "transpose", "sharding_constraint")


def _left_to_replicas(jaxpr: jex.ClosedJaxpr, axis: str) -> jex.ClosedJaxpr:
    """Leaves the axis of the replicas out of the constraints of their slices."""
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    changed: dict[Var, Eqn] = {}
    for loop in (e for e in jaxpr.eqns if is_loop(e) and e.params["replicas"] > 1):
        scheduled = ScheduledLoop.of(loop)
        given = scheduled.num_consts + scheduled.num_carry * scheduled.num_directions
        for v in jaxprs.variables(loop.invars[given:]):
            found: list[tuple[Var, Eqn]] = []
            while v in maker and maker[v].primitive.name in _SLICING:
                eqn, (operand, *_) = maker[v], maker[v].invars
                if eqn.primitive.name == "sharding_constraint":
                    asked = eqn.params["sharding"].spec
                    spec = _without(axis, asked, PartitionSpec.UNCONSTRAINED)
                    found.append((v, constraint(operand, spec, v)))
                elif eqn.primitive.name == "reshape":  # what was found is no longer of the batch
                    changed.update(found)
                    found = []
                v = operand
    eqns = [changed.get(e.outvars[0], e) if e.outvars else e for e in jaxpr.eqns]
    return _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)


def _shares_examples(eqn: Eqn) -> bool:
    return is_loop(eqn) and eqn.params["replicas"] == 1


def _slices_read(eqns: Sequence[Eqn]) -> list[Var]:
    """Returns the arrays of slices that loops without replicas read."""
    found: list[Var] = []
    for eqn in filter(_shares_examples, eqns):
        first = len(eqn.invars) - len(ScheduledLoop.of(eqn).xs)
        found += jaxprs.variables(eqn.invars[first:])
    return found


def _split(
    v: Var,
    spec: Spec,
    maker: Mapping[Var, Eqn],
    known: Mapping[Var, MaybeSpec],
    sizes: Mapping[str, int],
) -> tuple[int, Spec]:
    """Finds the dimension of the examples in slices, and their spec, whole along microbatches.

    The slices are a batch whose dimension of examples was reshaped to microbatches and examples,
    and whose dimension of microbatches was then moved to the front.
    """
    eqn, axis, over = maker.get(v), 0, spec[0]
    if eqn is not None and eqn.primitive.name == "transpose":
        axis = eqn.params["permutation"][0]
        (moved,) = jaxprs.variables(eqn.invars)
        eqn = maker.get(moved)
    if eqn is None or eqn.primitive.name != "reshape":
        axis = 0
    else:
        (whole,) = jaxprs.variables(eqn.invars)
        batch = known.get(whole)
        if batch and len(batch) == len(spec) - 1:
            over = batch[axis]
    entries, dimension = [(), *spec[1:]], axis + 1
    for name in over:
        parts = sizes[name] * math.prod(sizes[a] for a in entries[dimension])
        if name not in axes_of(tuple(entries)) and v.aval.shape[dimension] % parts == 0:
            entries[dimension] = (*entries[dimension], name)
    return dimension, tuple(entries)
