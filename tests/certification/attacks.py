"""Steps to attack, edits of their programs, and the attack itself: `refuses`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import _compat, jaxprs, schedules
from jaxpp._program import Bundle
from tests.helpers import mesh_of

WIDTH = 4


def weights(number):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(number)]


X = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)


def loss_of(first, second=lambda h: h):
    """A loss of two stages; `first` and `second` are what they do beside products."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(first(x @ w[0]))
        return jnp.mean(second(h @ w[1]) ** 2)

    return loss


def forward(fun, reduce="mean", **options):
    loop = jaxpp.microbatch(jaxpp.wrap_forward(fun), 2, reduce=reduce, **options)
    return jaxpp.schedule(loop, schedules.ForwardOnly())


def grad_of(loss, microbatches=2):
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    return jaxpp.schedule(jaxpp.microbatch(grad, microbatches), schedules.OneFOneB())


def lower(step, *args, mesh=None, **options):
    return jaxpp.place(step, mesh or mesh_of(2, shared=True), **options).lower(*args)


def refuses(lowered, edited: Bundle):
    """Asserts that the programs are certified, and that the edited ones are refuted."""
    lowered.certify(passes=False)
    assert edited != lowered.bundle
    with pytest.raises(jaxpp.Refuted):
        dataclasses.replace(lowered, bundle=edited).certify(passes=False)


# ---- edits of equations -------------------------------------------------------------------------


def named(*names):
    return lambda eqn: eqn.primitive.name in names


def edited(bundle: Bundle, wanted: Callable, change: Callable, most: int = 100) -> Bundle:
    """Puts `change(eqn)`, which gives equations, in the place of those that are wanted."""
    left, computations = most, []
    for computation in bundle.computations:
        eqns = []
        for eqn in computation.jaxpr.eqns:
            is_one = left > 0 and wanted(eqn)
            left -= is_one
            eqns += change(eqn) if is_one else [eqn]
        jaxpr = _compat.with_equations(computation.jaxpr, eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    assert left < most, "no such equation"
    return dataclasses.replace(bundle, computations=tuple(computations))


def skipped(bundle: Bundle, wanted: Callable) -> Bundle:
    """Puts the operand of equations that are wanted in the place of their results."""
    computations = []
    for computation in bundle.computations:
        inside = computation.jaxpr.jaxpr
        known, eqns = jaxprs.Substitution(), []
        for eqn in map(known.rename, inside.eqns):
            if wanted(eqn):
                known.of.update(zip(eqn.outvars, eqn.invars, strict=True))
            eqns += [] if wanted(eqn) else [known.rename(eqn)]
        eqns = list(map(known.rename, eqns))
        jaxpr = _compat.make_closed_jaxpr(inside.invars, list(map(known, inside.outvars)), eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    return dataclasses.replace(bundle, computations=tuple(computations))


def by(fun: Callable) -> Callable:
    """A change: a function of the operands in place of the equation."""
    return lambda eqn: jaxprs.splice(fun, eqn.invars, eqn.outvars, eqn)


def with_params(**params: Any) -> Callable:
    return lambda eqn: [eqn.replace(params={**eqn.params, **params})]


def on_operand(fun: Callable, k: int = 0) -> Callable:
    """A change: a function of operand `k` in place of that operand."""

    def change(eqn):
        eqns, (new,) = jaxprs.record(fun, [eqn.invars[k]])
        return [*eqns, eqn.replace(invars=[*eqn.invars[:k], new, *eqn.invars[k + 1 :]])]

    return change


def on_result(fun: Callable) -> Callable:
    def change(eqn):
        new = jaxprs.fresh_var(eqn.outvars[0])
        return [
            eqn.replace(outvars=[new, *eqn.outvars[1:]]),
            *jaxprs.splice(fun, [new], eqn.outvars[:1]),
        ]

    return change


def is_cast(old, new):
    def wanted(eqn):
        types = eqn.invars[0].aval.dtype if eqn.invars else None, eqn.outvars[:1]
        return (
            eqn.primitive.name == "convert_element_type"
            and types[0] == old
            and types[1][0].aval.dtype == new
        )

    return wanted
