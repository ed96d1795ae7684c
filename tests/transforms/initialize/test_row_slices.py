"""Rows of an initialiser's results: the bits of the whole, without the whole."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp import jaxprs
from jaxpp.transforms.initialize import _initialize

LAYERS, CUTS = 5, (0, 2, 5)


def linear(key):
    weight, bias = jax.random.split(key)
    return {
        "weight": jax.random.normal(weight, (7, 5)) * 0.7 / 3.0,
        "bias": jax.random.uniform(bias, (5,), minval=-0.1, maxval=0.3),
        "zero": jnp.zeros((3, 2), jnp.bfloat16),
        "steps": jnp.arange(4) * 2,
    }


def various(key):
    weight = jax.random.truncated_normal(key, -2.0, 2.0, (9, 11))
    return {
        "normalised": weight / jnp.sqrt(jnp.sum(weight**2, axis=0)),
        "product": jnp.tanh(weight @ jnp.ones((11, 2))),
        "orthogonal": jax.nn.initializers.orthogonal()(key, (4, 4)),
        "branch": jax.lax.cond(jax.random.bernoulli(key), jnp.sin, jnp.cos, jnp.arange(3.0)),
        "scalar": jax.random.normal(jax.random.fold_in(key, 3)),
    }


def vmapped(make):
    return lambda key: jax.vmap(make)(jax.random.split(key, LAYERS))


def mapped(make):
    return lambda key: jax.lax.map(make, jax.random.split(key, LAYERS))


def jitted(make):
    return lambda key: jax.jit(jax.vmap(make))(jax.random.split(key, LAYERS))


def joined(make):
    """Layers that are made one by one, and some that are dropped again."""

    def init_fn(key):
        layers = [make(k) for k in jax.random.split(key, LAYERS - 2)]
        first = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
        more = jax.vmap(make)(jax.random.split(jax.random.fold_in(key, 1), LAYERS))
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y[2:4]]), first, more)

    return init_fn


def state_of(make):
    """Parameters, a cast copy, and moments."""

    def init_fn(key):
        params = vmapped(make)(key)
        half = jax.tree.map(lambda x: (x * 0.5 + 1).astype(jnp.bfloat16), params)
        return params, half, jax.tree.map(jnp.zeros_like, params)

    return init_fn


def parts_and_whole(init_fn, key):
    traced = jaxprs.trace(init_fn, (key,))
    cuts = [CUTS] * len(traced.jaxpr.jaxpr.outvars)
    jaxpr, blamed = _initialize.with_parts(traced.jaxpr, cuts)
    whole = jax.tree.leaves(init_fn(key))
    return jaxpr, {traced.output_paths()[n]: eqn for n, eqn in blamed.items()}, whole


SLOW = pytest.mark.slow


@pytest.mark.more
@pytest.mark.parametrize(
    ("init_fn", "make_key"),
    [
        pytest.param(vmapped(linear), jax.random.PRNGKey, id="vmapped"),
        pytest.param(jitted(linear), jax.random.key, id="jitted"),
        pytest.param(joined(linear), jax.random.key, id="joined"),
        pytest.param(vmapped(various), jax.random.key, id="various", marks=SLOW),
        pytest.param(mapped(linear), jax.random.key, id="mapped", marks=SLOW),
        pytest.param(state_of(linear), jax.random.key, id="state", marks=SLOW),
        pytest.param(jitted(various), jax.random.PRNGKey, id="various-jitted", marks=SLOW),
    ],
)
def test_parts_are_rows_of_the_whole(monkeypatch, request, init_fn, make_key):
    monkeypatch.setattr(_initialize, "SMALL", 0)
    jaxpr, _, whole = parts_and_whole(init_fn, make_key(3))
    parts = iter(jex.jaxpr_as_fun(jaxpr)(make_key(3)))
    for array in whole:
        for low, high in ((0, 2), (2, 5)):
            part = next(parts)
            assert part.dtype == array.dtype
            if "jitted" in request.node.name:  # a part of a jitted function may round otherwise
                np.testing.assert_allclose(part, array[low:high], rtol=1e-6, atol=1e-6)
            else:
                np.testing.assert_array_equal(part, array[low:high])


def arrays_of(jaxpr):
    """All arrays in a jaxpr, in its calls too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for inner in jaxprs.sub_jaxprs(eqn):
            yield from arrays_of(inner)


@pytest.mark.parametrize(
    "init_fn", [vmapped(linear), jitted(linear), joined(linear), state_of(linear)]
)
def test_no_array_of_all_layers_is_made(init_fn):
    jaxpr, blamed, _ = parts_and_whole(init_fn, jax.random.key(0))
    keep = jaxprs.ancestors(jaxpr.eqns, jaxpr.jaxpr.outvars)
    needed = jaxpr.jaxpr.replace(eqns=[e for e, k in zip(jaxpr.eqns, keep, strict=True) if k])
    largest = max(a.size for a in arrays_of(needed))
    assert largest == 3 * 7 * 5
    assert not blamed


def test_what_needs_all_rows_is_named(monkeypatch):
    monkeypatch.setattr(_initialize, "SMALL", 0)

    def init_fn(key):
        weights = vmapped(linear)(key)["weight"]
        return {
            "centred": weights - weights.mean(0),
            "sorted": jnp.sort(weights, 0),
            "own": weights,
        }

    _, blamed, _ = parts_and_whole(init_fn, jax.random.key(0))
    assert {path: eqn.primitive.name for path, eqn in blamed.items()} == {
        "['centred']": "sub",
        "['sorted']": "sort",
    }
