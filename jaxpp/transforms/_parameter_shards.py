"""ZeRO-3: parameters split over the replicas, and gathered by each task that reads them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3. What a task gathers is gone when it ends. Gradients are accumulated whole, as without
this, since they are reduced once a step: then they are scattered to where the parameters are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, partition_spec, replicated
from jaxpp.transforms import _loop, _sharding_rules
from jaxpp.transforms._constraints import constraint


def gather_in_tasks(
    jaxpr: jex.ClosedJaxpr,
    specs: Sequence[Spec],
    whole: Sequence[Spec],
    sizes: Mapping[str, int],
) -> jex.ClosedJaxpr:
    """A step whose tasks gather the parameters that they read.

    Without it, XLA would take the axes that parameters and examples are both split over to be those
    of the parameters, and move the examples.

    Args:
        jaxpr: the whole step, flat.
        specs: how its arguments are split.
        whole: how the tasks are to have them.
        sizes: the number of devices along each axis inside a rank.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=types)
        >>> args = jnp.ones((4, 4)), jnp.ones((8, 4))
        >>> batch, split, whole = (("data",), ()), (("data",), ()), ((), ())
        >>> with jax.sharding.use_abstract_mesh(mesh):
        ...     jaxpr = jax.make_jaxpr(step)(*args)
        ...     own = gather_in_tasks(jaxpr, [split, batch], [whole, batch], mesh.shape)
        >>> (loop,) = filter(_loop.is_loop, own.eqns)
        >>> loop.params["tasks"].bodies[0].jaxpr.eqns[0].primitive.name
        'sharding_constraint'
    """
    if list(specs) == list(whole):
        return jaxpr
    split = _sharding_rules.propagate(jaxpr, specs, sizes)
    wanted = _sharding_rules.propagate(jaxpr, whole, sizes)

    def gathered(v: Any) -> Spec | None:
        """How tasks are to have what is split otherwise."""
        if _jaxprs.is_literal(v) or split[v] is None or split[v] == wanted[v]:
            return None
        return wanted[v] or replicated(v.aval.ndim)

    eqns = []
    for eqn in jaxpr.eqns:
        if _loop.is_loop(eqn):
            tasks: _loop.LoopTasks = eqn.params["tasks"]
            operands = list(eqn.invars)
            consts = {
                i: s for i, v in enumerate(operands[: tasks.num_consts]) if (s := gathered(v))
            }
            for n in range(tasks.num_consts, tasks.num_consts + tasks.num_carry):
                # What tasks write over stays as it is from task to task.
                if (spec := gathered(operands[n])) is not None:
                    own = _jaxprs.fresh_var(operands[n])
                    eqns.append(constraint(operands[n], partition_spec(spec), own))
                    operands[n] = own
            bodies = tuple(_gather(body, consts) for body in tasks.bodies)
            params = {**eqn.params, "tasks": dataclasses.replace(tasks, bodies=bodies)}
            eqn = eqn.replace(invars=operands, params=params)
        eqns.append(eqn)
    return _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)


def _gather(body: _loop.TaskBody, specs: Mapping[int, Spec]) -> _loop.TaskBody:
    """A task that gathers constants, given how it is to have them."""
    known, gathers = _jaxprs.Substitution(), []
    for ref, v in zip(body.inputs, body.jaxpr.jaxpr.invars, strict=True):
        if ref.source == "const" and ref.index in specs:
            known.of[v] = _jaxprs.fresh_var(v)
            gathers.append(constraint(v, partition_spec(specs[ref.index]), known.of[v]))
    if not gathers:
        return body
    eqns = [*gathers, *(known.rename(eqn) for eqn in body.jaxpr.eqns)]
    outvars = [known(v) for v in body.jaxpr.jaxpr.outvars]
    return dataclasses.replace(body, jaxpr=_compat.with_equations(body.jaxpr, eqns, outvars))
