"""The equations that are taken for additive are, and the sums over examples are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpp import _jaxprs
from jaxpp._specs import replicated
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside.replicas import _rules
from jaxpp.transforms.inside.replicas._rules import Replicas

REPLICAS = Replicas(("data",), {"data": 2, "model": 2})
NUMBERS = ("NHWC", "HWIO", "NHWC")
MASK = np.arange(6).reshape(2, 3) % 2 == 0
AT = np.array([[0], [2]])


def convolve(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS, **options)


ADDITIVE = {
    "add": (lax.add, [(2, 3), (2, 3)]),
    "sub": (lax.sub, [(2, 3), (2, 3)]),
    "neg": (lax.neg, [(2, 3)]),
    "mul": (lax.mul, [(2, 3), (2, 3)]),
    "mul_second": (lambda x: jnp.arange(6.0).reshape(2, 3) * x, [(2, 3)]),
    "div": (lambda x: x / 3.7, [(2, 3)]),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)), [(2, 3)]),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [(2, 3), (2, 5)]),
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.complex64), [(2, 3)]),
    "copy": (jnp.copy, [(2, 3)]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(2, 3)]),
    "dot_general": (lax.dot, [(2, 3), (3, 4)]),
    "conv_general_dilated": (convolve, [(2, 5, 5, 3), (3, 3, 3, 4)]),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (1, 2)), [(2, 3)]),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (jnp.int32(1), 0)),
        [(2, 3), (1, 2)],
    ),
    "gather": (lambda x: x[jnp.asarray(AT)], [(3, 3)]),
    "pad": (lambda x, y: lax.pad(x, y, [(1, 0, 0), (0, 2, 1)]), [(2, 3), ()]),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 23), [(2, 3)]),
    "reduce_sum": (lambda x: jnp.sum(x, 1), [(2, 3)]),
    "reduce_window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
        [(2, 3)],
    ),
    "reshape": (lambda x: lax.reshape(x, (3, 2)), [(2, 3)]),
    "rev": (lambda x: lax.rev(x, (1,)), [(2, 3)]),
    "scatter-add": (lambda x, y: x.at[jnp.asarray(AT[:, 0])].add(y), [(3, 3), (2, 3)]),
    "select_n": (lambda x, y: lax.select(jnp.asarray(MASK), x, y), [(2, 3), (2, 3)]),
    "slice": (lambda x: lax.slice(x, (0, 1), (2, 3)), [(2, 3)]),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [(2, 1)]),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), [(2, 3)]),
}


def flat(fun, args):
    return _jaxprs.inline(_jaxprs.trace(fun, args).jaxpr, lambda e: True)


@pytest.mark.parametrize("name", ADDITIVE)
def test_what_is_taken_for_additive_is(name):
    fun, shapes = ADDITIVE[name]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    traced = _jaxprs.trace(fun, args)
    jaxpr = _jaxprs.inline(traced.jaxpr, lambda e: True)
    inputs = jaxpr.jaxpr.invars[traced.num_closed_over :]
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == name.removesuffix("_second")]
    operands = _rules.additive_operands(eqn, inputs[-1:] if "second" in name else inputs)
    assert len(operands) > 0
    moved = [any(eqn.invars[i] is v for i in operands) for v in inputs]
    assert any(moved)
    shares = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in args]
    one = [s if m else x for s, x, m in zip(shares, args, moved, strict=True)]
    other = [x - s if m else x for s, x, m in zip(shares, args, moved, strict=True)]
    np.testing.assert_allclose(fun(*one) + fun(*other), fun(*args), rtol=1e-5, atol=1e-5)


def test_every_additive_primitive_is_checked():
    known = {*_rules._TOGETHER, *_rules._PRODUCTS, "div", "convert_element_type"}
    # These do nothing to the values.
    same = {"add_any", "copy_p", "expand_dims", "name", "sharding_constraint", "real", "imag"}
    assert {name.removesuffix("_second") for name in ADDITIVE} == known - same


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (jnp.exp, jnp.float32),
        (jnp.abs, jnp.float32),
        (lambda x: lax.max(x, jnp.ones_like(x)), jnp.float32),
        (lambda x: lax.integer_pow(x, 2), jnp.float32),
        (lambda x: 1.0 / x, jnp.float32),
        (lambda x: lax.convert_element_type(x, jnp.int32), jnp.float32),
        (lambda x: lax.div(x, jnp.full_like(x, 2)), jnp.int32),
        (lambda x: lax.convert_element_type(x, jnp.float32), jnp.bool_),
        (lambda x: lax.reduce_max(x, (0,)), jnp.float32),
        (lambda x: lax.sort(x), jnp.float32),
    ],
)
def test_what_is_not_additive_is_refused(fun, dtype):
    jaxpr = flat(fun, [jax.ShapeDtypeStruct((4,), dtype)])
    (x,) = jaxpr.jaxpr.invars
    (eqn,) = [e for e in jaxpr.eqns if any(v is x for v in e.invars)]
    assert not any(eqn.invars[i] is x for i in _rules.additive_operands(eqn, {x}))


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
