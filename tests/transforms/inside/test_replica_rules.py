"""The sums over examples are found."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpp import _jaxprs
from jaxpp._specs import replicated
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside.replicas import _rules
from jaxpp.transforms.inside.replicas._rules import Replicas

REPLICAS = Replicas(("data",), {"data": 2, "model": 2})
NUMBERS = ("NHWC", "HWIO", "NHWC")


def convolve(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS, **options)


def flat(fun, args):
    return _jaxprs.inline(_jaxprs.trace(fun, args).jaxpr, lambda e: True)


def weights_of_convolution(x, w):
    return jax.vjp(lambda w: convolve(x, w), w)[1](convolve(x, w))[0]


BATCH = (("data",), ())
WHOLE = ((), ())
SUMS = {
    "reduction": (lambda x: jnp.sum(x, 0), [((4, 3), BATCH)], {0: 0}),
    "reduction_of_others": (lambda x: jnp.sum(x, 1), [((4, 3), BATCH)], {}),
    "unequal": (lambda x: jnp.sum(x, 0), [((3, 3), BATCH)], {}),
    "within": (lambda x: jnp.sum(x, 0), [((4, 3), (("data", "model"), ()))], {0: 0}),
    "outside": (lambda x: jnp.sum(x, 0), [((4, 3), (("model", "data"), ()))], {}),
    "product": (lambda x, y: x.T @ y, [((4, 3), BATCH), ((4, 5), BATCH)], {0: 1, 1: 0}),
    "product_with_whole": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        [((4, 3), BATCH), ((4, 5), WHOLE)],
        {0: 0, 1: 0},
    ),
    "product_of_examples": (
        lambda x, y: jnp.einsum("bi,bi->b", x, y),
        [((4, 3), BATCH), ((4, 3), BATCH)],
        {},
    ),
    "scatter": (
        lambda i, u: jnp.zeros((7, 3)).at[i].add(u),
        [((4,), (("data",),)), ((4, 3), BATCH)],
        {1: 0, 2: 0},
    ),
    "convolution": (
        weights_of_convolution,
        [((4, 5, 5, 2), (("data",), (), (), ())), ((3, 3, 2, 6), replicated(4))],
        {0: 0, 1: 0},
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_examples_are_found(name):
    fun, arguments, expected = SUMS[name]
    dtypes = [jnp.int32 if name == "scatter" and not n else jnp.float32 for n in range(2)]
    args = [jax.ShapeDtypeStruct(s, d) for (s, _), d in zip(arguments, dtypes, strict=False)]
    jaxpr = flat(fun, args)
    specs = [spec for _, spec in arguments]
    known = propagation.propagate(jaxpr, specs, REPLICAS.sizes)
    found = [_rules.summed_dimensions(e, known, REPLICAS) for e in jaxpr.eqns]
    assert [f for f in found if f] == ([expected] if expected else [])
