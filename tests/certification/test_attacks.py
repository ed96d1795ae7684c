"""Wrong programs that a proof has once accepted: each is refuted, and the right ones are not.

This file has results, types, arguments and transforms; others have numbers and effects.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp import _compat, jaxprs
from jaxpp._program import Bundle, Run
from tests.certification.attacks import (
    WIDTH,
    X,
    grad_of,
    is_cast,
    loss_of,
    lower,
    named,
    refuses,
    skipped,
    weights,
)
from tests.helpers import mesh_of

pytestmark = pytest.mark.more


# ---- results ------------------------------------------------------------------------------------


def clipped():
    """Stacked layers, tied ends, and gradients that are clipped by their global norm."""

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x @ w["tied"], w["layers"])
        return jnp.mean((h @ w["tied"].T) ** 2)

    grad = grad_of(jaxpp.split_stages(loss, num_stages=3))

    def step(w, x):
        value, g = grad(w, x)
        norm = jnp.sqrt(sum(jnp.sum(own * own) for own in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / norm, w, g), value

    tied, *layers = weights(7)
    return lower(step, {"tied": tied, "layers": jnp.stack(layers)}, X, mesh=mesh_of(3, shared=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_result_counts_on_each_of_its_ranks(rank):
    """Also where the sums of the first rank are in another order."""
    lowered = clipped()
    bundle = lowered.bundle
    tied = next(n for n, r in enumerate(bundle.results) if r.aval.shape == (WIDTH, WIDTH))
    holders = [p.rank for p in bundle.programs if tied in dict(p.outputs)]
    assert holders == [0, 2]
    program = bundle.programs[rank]
    slot = dict(program.outputs)[tied]
    at = max(
        i for i, own in enumerate(program.instructions)
        if isinstance(own, Run) and slot in own.outputs
    )  # fmt: skip
    run: Any = program.instructions[at]
    old = bundle.computations[run.computation]
    outvars = list(old.jaxpr.jaxpr.outvars)
    k = run.outputs.index(slot)
    new = jaxprs.fresh_var(outvars[k])
    eqns = [*old.jaxpr.eqns, *jaxprs.splice(lambda v: 100.0 - v, [outvars[k]], [new])]
    outvars[k] = new
    jaxpr = _compat.make_closed_jaxpr(old.jaxpr.jaxpr.invars, outvars, eqns)
    instructions = list(program.instructions)
    instructions[at] = dataclasses.replace(run, computation=len(bundle.computations))
    programs = list(bundle.programs)
    programs[rank] = dataclasses.replace(program, instructions=tuple(instructions))
    computations = (*bundle.computations, dataclasses.replace(old, jaxpr=jaxpr))
    wrong = dataclasses.replace(bundle, computations=computations, programs=tuple(programs))
    refuses(lowered, wrong)


def stacked():
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    grad = grad_of(jaxpp.split_stages(loss, num_stages=2))

    def step(w, x):
        value, g = grad(w, x)
        return w - 0.1 * g, value

    return lower(step, jnp.stack(weights(4)), X)


def without(bundle: Bundle, n: int) -> Bundle:
    kept = [k for k in range(len(bundle.results)) if k != n]
    programs = tuple(
        dataclasses.replace(p, outputs=tuple((kept.index(k), s) for k, s in p.outputs if k != n))
        for p in bundle.programs
    )
    results = tuple(bundle.results[k] for k in kept)
    return dataclasses.replace(bundle, results=results, programs=programs)


@pytest.mark.parametrize("which", ["rows", "a whole"])
def test_each_result_is_there(which):
    lowered = stacked()
    results = lowered.bundle.results
    n = {
        "rows": next(n for n, r in enumerate(results) if r.rows and r.rows[0]),
        "a whole": next(n for n, r in enumerate(results) if not r.rows),
    }[which]
    refuses(lowered, without(lowered.bundle, n))


def test_results_have_memory_of_their_own():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, average, x):
        new = [a - 0.1 * d for a, d in zip(w, grad(w, x)[1], strict=True)]
        return new, new  # the average begins anew

    lowered = lower(step, weights(2), weights(2), X, donate_argnums=(0, 1))
    half, programs = len(lowered.bundle.results) // 2, []
    for p in lowered.bundle.programs:
        slots = dict(p.outputs)
        own = ((n, slots.get(n - half, s) if n >= half else s) for n, s in p.outputs)
        programs.append(dataclasses.replace(p, outputs=tuple(own)))
    refuses(lowered, dataclasses.replace(lowered.bundle, programs=tuple(programs)))


# ---- types --------------------------------------------------------------------------------------


def with_weak_type():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, rate, x):
        value, g = grad(w, x)
        return [a - rate * d for a, d in zip(w, g, strict=True)], rate * 0.9

    return lower(step, weights(2), jnp.asarray(0.1), X)


def test_a_record_keeps_the_weak_type_of_a_result():
    lowered = with_weak_type()
    results = tuple(
        dataclasses.replace(r, aval=r.aval.update(weak_type=False)) for r in lowered.bundle.results
    )
    refuses(lowered, dataclasses.replace(lowered.bundle, results=results))


def test_a_computation_keeps_the_weak_type_of_a_result():
    lowered = with_weak_type()
    computations = []
    for computation in lowered.bundle.computations:
        eqns, outvars = list(computation.jaxpr.eqns), list(computation.jaxpr.jaxpr.outvars)
        for k, v in enumerate(outvars):
            if getattr(v.aval, "weak_type", False):
                strong = jex_var(v.aval.update(weak_type=False), v)
                eqns += jaxprs.splice(lambda x: x + jnp.zeros((), x.dtype), [v], [strong])
                outvars[k] = strong
        jaxpr = _compat.make_closed_jaxpr(computation.jaxpr.jaxpr.invars, outvars, eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    refuses(lowered, dataclasses.replace(lowered.bundle, computations=tuple(computations)))


def jex_var(aval, like):
    return type(like)(aval)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_a_record_keeps_the_dtype_of_a_result(dtype):
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    results = list(lowered.bundle.results)
    aval = results[0].aval.update(dtype=jnp.dtype(dtype))
    results[0] = dataclasses.replace(results[0], aval=aval)
    refuses(lowered, dataclasses.replace(lowered.bundle, results=tuple(results)))


def test_a_record_keeps_the_memory_of_a_result():
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    results = list(lowered.bundle.results)
    aval = results[0].aval.update(memory_space=jax.memory.Space.Host)
    results[0] = dataclasses.replace(results[0], aval=aval)
    refuses(lowered, dataclasses.replace(lowered.bundle, results=tuple(results)))


def test_the_last_cast_of_a_result_counts():
    """Bfloat16 for float32."""
    loop = grad_of(loss_of(jnp.tanh))

    def step(w, x):
        return loop(w, x)[0].astype(jnp.bfloat16).astype(jnp.float32)

    lowered = lower(step, weights(2), X)
    refuses(lowered, skipped(lowered.bundle, is_cast("bfloat16", "float32")))


def test_memory_on_the_host_is_not_that_of_the_device():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, x):
        value, g = grad(w, x)
        return [jax.device_put(d, jax.memory.Space.Host) for d in g], value

    lowered = lower(step, weights(2), X)
    refuses(lowered, skipped(lowered.bundle, named("device_put")))


# ---- arguments ----------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """Two arrays that have one key."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("weight"), x) for x in (self.a, self.b)], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_arguments_of_one_path_are_two():
    grad = grad_of(lambda p, x: loss_of(jnp.tanh)([p.a, p.b * 2], x))
    lowered = lower(grad, Pair(*weights(2)), X)
    other = {0: 1, 1: 0}
    programs = tuple(
        dataclasses.replace(p, inputs=tuple((other.get(n, n), s) for n, s in p.inputs))
        for p in lowered.bundle.programs
    )
    refuses(lowered, dataclasses.replace(lowered.bundle, programs=programs))


def test_rows_of_an_argument_are_those_that_its_record_says():
    lowered = stacked()
    arguments = list(lowered.bundle.arguments)
    a, b = [n for n, own in enumerate(arguments) if own.rows]
    first, second = arguments[a].rows, arguments[b].rows
    arguments[a] = dataclasses.replace(arguments[a], rows=second)
    arguments[b] = dataclasses.replace(arguments[b], rows=first)
    refuses(lowered, dataclasses.replace(lowered.bundle, arguments=tuple(arguments)))


# ---- transforms ---------------------------------------------------------------------------------


def test_a_mean_that_is_a_sum_is_not_said_to_be_proven(monkeypatch):
    from jaxpp.transforms.microbatch import _reductions

    mean = dataclasses.replace(_reductions.REDUCTIONS["mean"], finish=lambda total, m: total)
    monkeypatch.setitem(_reductions.REDUCTIONS, "mean", mean)
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    try:
        certificate = lowered.certify()
    except jaxpp.Refuted:
        return
    assert "microbatch" not in certificate.transforms and certificate.undecided
