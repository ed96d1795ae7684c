"""The random models: what is equal by the laws of one has one fingerprint, and nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._fingerprints import Fingerprints
from jaxpp.certification._terms import Terms

ROWS, COLUMNS = 3, 4
TYPES = (
    jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
    jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32),
)


def fingerprints_of(*functions, **options):
    """The fingerprints of functions of the same arguments, in one model."""
    terms = Terms()
    arguments = [terms.term("argument", (n,), (), t.shape, "float32") for n, t in enumerate(TYPES)]
    evaluator, model = Evaluator(terms), Fingerprints(terms, **options)
    return [model.of(evaluator.run(jax.make_jaxpr(fun)(*TYPES), arguments)[0]) for fun in functions]


#: Equal for all floating-point numbers, but for the order of sums.
STRICTLY = {
    "sums in another order": (lambda a, b, w: a + b + a, lambda a, b, w: a + (a + b)),
    "a difference": (lambda a, b, w: a - b, lambda a, b, w: -b + a),
    "rows in parts": (
        lambda a, b, w: jnp.concatenate([a, b]).sum(0),
        lambda a, b, w: a.sum(0) + b.sum(0),
    ),
    "a transpose of a sum": (lambda a, b, w: (a + b).T, lambda a, b, w: b.T + a.T),
    "a maximum": (
        lambda a, b, w: jnp.maximum(jnp.maximum(a, b), a),
        lambda a, b, w: jnp.maximum(b, a),
    ),
    "a choice of sums": (
        lambda a, b, w: jnp.where(a > 0, a + b, w[:3] + w[1:]),
        lambda a, b, w: jnp.where(a > 0, b, w[:3]) + jnp.where(a > 0, a, w[1:]),
    ),
    "a function of equal values": (
        lambda a, b, w: jnp.tanh(a + b),
        lambda a, b, w: jnp.tanh(b + a),
    ),
}

#: Equal over the real numbers, and not for all floating-point numbers.
REALLY = {
    "a product with a sum": (lambda a, b, w: (a + b) @ w, lambda a, b, w: b @ w + a @ w),
    "a factor out of a product": (lambda a, b, w: (3 * a) @ w, lambda a, b, w: 3 * (a @ w)),
    "a mean": (lambda a, b, w: a.sum() / 12, lambda a, b, w: (a / 12).sum()),
    "a quotient": (lambda a, b, w: a / b / b[0, 0], lambda a, b, w: a / (b * b[0, 0])),
    "a square": (lambda a, b, w: a**2, lambda a, b, w: a * a),
    "nothing of it": (lambda a, b, w: a, lambda a, b, w: a + 0 * jnp.log(b)),
    "what cancels": (lambda a, b, w: a, lambda a, b, w: a + b - b),
    "what cancels with itself": (lambda a, b, w: a, lambda a, b, w: a + a - a),
    "a quotient of itself": (lambda a, b, w: a, lambda a, b, w: a * (b / b)),
    "twice the half": (lambda a, b, w: a, lambda a, b, w: (a * 2) / 2),
}
#: Equal but for casts.
ROUNDED = {
    "a cast that rounds": (
        lambda a, b, w: a,
        lambda a, b, w: a.astype(jnp.bfloat16).astype(jnp.float32),
    ),
    "a sum in a narrow type": (
        lambda a, b, w: a.astype(jnp.bfloat16).astype(jnp.float32) + b.astype(jnp.bfloat16),
        lambda a, b, w: (a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)).astype(jnp.float32),
    ),
    "a cast of a sum": (
        lambda a, b, w: (a + b).astype(jnp.bfloat16),
        lambda a, b, w: a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16),
    ),
}

DIFFERENT = {
    "operands of a difference": (lambda a, b, w: a - b, lambda a, b, w: b - a),
    "a product and its transpose": (lambda a, b, w: w @ a.T, lambda a, b, w: w.T @ a.T),
    "factors in another order": (lambda a, b, w: w @ w.T, lambda a, b, w: w.T @ w),
    "one row for another": (lambda a, b, w: a[0], lambda a, b, w: a[1]),
    "rows in another order": (lambda a, b, w: a, lambda a, b, w: a[::-1]),
    "a term twice": (lambda a, b, w: a + b, lambda a, b, w: a + b + b),
    "a sum over another axis": (lambda a, b, w: w.sum(0), lambda a, b, w: w.sum(1)),
    "another function": (lambda a, b, w: jnp.sin(a), lambda a, b, w: jnp.cos(a)),
    "a function of a sum": (
        lambda a, b, w: jnp.tanh(a + b),
        lambda a, b, w: jnp.tanh(a) + jnp.tanh(b),
    ),
    "another case": (
        lambda a, b, w: jnp.where(a > 0, a, b),
        lambda a, b, w: jnp.where(a > 0, b, a),
    ),
    "another comparison": (
        lambda a, b, w: jnp.where(a > 0, a, b),
        lambda a, b, w: jnp.where(a >= 0, a, b),
    ),
    "a maximum and a minimum": (lambda a, b, w: a.max(), lambda a, b, w: a.min()),
    "a transpose in another shape": (
        lambda a, b, w: a.T.reshape(3, 4),
        lambda a, b, w: a.reshape(4, 3).T,
    ),
    "elements at other places": (lambda a, b, w: w, lambda a, b, w: w.T),
    "whole numbers through a narrow type": (
        lambda a, b, w: jnp.sum(a > 0).astype(jnp.float32),
        lambda a, b, w: jnp.sum(a > 0).astype(jnp.bfloat16).astype(jnp.float32),
    ),
    "a whole number that wraps": (
        lambda a, b, w: (a.astype(jnp.int8) - b.astype(jnp.int8)).astype(jnp.int32),
        lambda a, b, w: a.astype(jnp.int8).astype(jnp.int32) - b.astype(jnp.int8),
    ),
    "a truth value that is a half": (
        lambda a, b, w: (a > 0).any().astype(jnp.float32) == 0.5,
        lambda a, b, w: (a > 0).any().astype(jnp.float32) == 0,
    ),
    "a truth value that is no number": (
        lambda a, b, w: (a > 0).any().astype(jnp.float32) == jnp.nan,
        lambda a, b, w: (a > 0).any().astype(jnp.float32) == 0,
    ),
    "parts of complex numbers": (
        lambda a, b, w: jnp.imag(a + 1j * b) * jnp.real(a - 2j * b),
        lambda a, b, w: jnp.real(a + 1j * b) * jnp.imag(a - 2j * b),
    ),
    "elements that are filled in": (
        lambda a, b, w: (
            a[0].at[jnp.array([0, 9])].get(mode="fill", fill_value=5.0)
            + b[0].at[jnp.array([0, 9])].get(mode="fill", fill_value=5.0)
        ),
        lambda a, b, w: (a + b)[0].at[jnp.array([0, 9])].get(mode="fill", fill_value=5.0),
    ),
}

STRICT = {"strict": True}
REAL = {"strict": False}
UNROUNDED = {"strict": False, "rounding": False}


@pytest.mark.parametrize(
    ("name", "options", "is_equal"),
    [
        *[(name, options, True) for name in STRICTLY for options in (STRICT, REAL)],
        *[(name, STRICT, False) for name in REALLY],
        *[(name, options, True) for name in REALLY for options in (REAL, UNROUNDED)],
        *[(name, options, False) for name in ROUNDED for options in (STRICT, REAL)],
        *[(name, UNROUNDED, True) for name in ROUNDED],
        *[(name, UNROUNDED, False) for name in DIFFERENT],
    ],
)
def test_what_is_equal_by_the_laws_of_a_model_has_one_fingerprint(name, options, is_equal):
    pair = {**STRICTLY, **REALLY, **ROUNDED, **DIFFERENT}[name]
    one, other = fingerprints_of(*pair, **options)
    assert (one == other) == is_equal


@pytest.mark.parametrize("name", [*STRICTLY, *REALLY])
def test_the_pairs_are_equal_in_numbers(name):
    a, b, w = (jnp.exp(jax.random.normal(jax.random.key(n), t.shape)) for n, t in enumerate(TYPES))
    one, other = (fun(a, b, w) for fun in {**STRICTLY, **REALLY}[name])
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_zero_is_told_from_nothing_if_it_is_asked_for():
    """0 + -0 is 0."""
    pair = (lambda a, b, w: a + jnp.zeros_like(a), lambda a, b, w: a)
    for zeros in (True, False):
        one, other = fingerprints_of(*pair, strict=True, zeros=zeros)
        assert (one == other) == (not zeros)


@pytest.mark.parametrize(
    "shape", [(2, 3), (3, 3), (2, 3, 4), (3, 3, 3), (2, 3, 4, 5), (3, 3, 3, 3)]
)
def test_transposes_of_sums_compose_and_differ(shape):
    terms = Terms()
    model = Fingerprints(terms, strict=True)

    def argument(name, shape):
        return terms.term("argument", (name,), (), shape, "float32")

    def add(a, b):
        return terms.elementwise(terms.op("add", (), a.shape, "float32"), [a, b])

    x = argument("x", shape)
    permutations = list(itertools.permutations(range(len(shape))))
    assert len({model.of(terms.transpose(x, p)) for p in permutations}) == len(permutations)
    for p, q in itertools.product(permutations, permutations):
        first = terms.transpose(x, p)
        y = argument("y", first.shape)
        once = terms.transpose(x, [p[i] for i in q])
        both = terms.transpose(add(first, y), q)
        assert model.of(both) == model.of(add(once, terms.transpose(y, q)))
