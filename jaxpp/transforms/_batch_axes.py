"""Splits the slices of a microbatch loop over the axes that the batch is split over."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, axes_of, partition_spec
from jaxpp.transforms import _loop, _sharding_rules


def split_slices(
    jaxpr: jex.ClosedJaxpr, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> tuple[jex.ClosedJaxpr, tuple[str, ...]]:
    """Splits each microbatch over all replicas, rather than giving each replica some microbatches.

    A batch that is split along its first dimension becomes, as microbatches, an array that is split
    along the microbatches; a loop over them needs each of them split.

    Args:
        jaxpr: the whole step, flat.
        specs: of its arguments.
        sizes: the axes inside a rank.

    Returns:
        The step, and the axes that its microbatches are split over along their first dimension.
    """
    known = _sharding_rules.propagate(jaxpr, specs, sizes)
    axes: dict[str, None] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if _loop.is_loop(eqn):
            tasks = eqn.params["tasks"]
            first = tasks.num_consts + tasks.num_carry
            operands = list(eqn.invars)
            for n, v in enumerate(operands[first:], first):
                spec = None if _jaxprs.is_literal(v) else known.get(v)
                if spec is None or len(spec) < 2:
                    continue
                if spec[0]:
                    spec = _moved(spec, v.aval.shape, sizes)
                    operands[n] = _jaxprs.fresh_var(v)
                    eqns.append(_constraint(v, spec).replace(invars=[v], outvars=[operands[n]]))
                axes.update(dict.fromkeys(spec[1]))
            eqn = eqn.replace(invars=operands)
        eqns.append(eqn)
    return _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars), tuple(axes)


def _moved(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """The spec with the axes of the first dimension at the second, as far as they divide it."""
    own = spec[1]
    for axis in spec[0]:
        if (
            axis not in axes_of(spec[1:])
            and shape[1] % (sizes[axis] * math.prod(sizes[a] for a in own)) == 0
        ):
            own = (*own, axis)
    return ((), own, *spec[2:])


def _constraint(var, spec: Spec):
    """The equation that splits a variable; under the abstract mesh of a rank."""
    split = partition_spec(spec)
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, split))(var.aval).eqns[0]
