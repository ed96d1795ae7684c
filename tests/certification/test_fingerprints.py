"""The random model: what is equal over the real numbers has one fingerprint, and nothing else."""

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


def fingerprints_of(*functions, rounding=True):
    """The fingerprints of functions of the same arguments, in one model."""
    terms = Terms()
    arguments = [terms.term("argument", (n,), (), t.shape, "float32") for n, t in enumerate(TYPES)]
    evaluator, model = Evaluator(terms), Fingerprints(terms, rounding)
    return [model.of(evaluator.run(jax.make_jaxpr(fun)(*TYPES), arguments)[0]) for fun in functions]


EQUAL = {
    "sums in another order": (lambda a, b, w: a + b + a, lambda a, b, w: a + (a + b)),
    "a zero": (lambda a, b, w: a + jnp.zeros_like(a), lambda a, b, w: a),
    "a difference": (lambda a, b, w: a - b, lambda a, b, w: -b + a),
    "a product with a sum": (lambda a, b, w: (a + b) @ w, lambda a, b, w: b @ w + a @ w),
    "a factor out of a product": (lambda a, b, w: (3 * a) @ w, lambda a, b, w: 3 * (a @ w)),
    "a mean": (lambda a, b, w: a.sum() / 12, lambda a, b, w: (a / 12).sum()),
    "a quotient": (lambda a, b, w: a / b / b[0, 0], lambda a, b, w: a / (b * b[0, 0])),
    "a square": (lambda a, b, w: a**2, lambda a, b, w: a * a),
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
        lambda a, b, w: jnp.where(a > 0, a + b, 0),
        lambda a, b, w: jnp.where(a > 0, b, 0) + jnp.where(a > 0, a, 0),
    ),
    "a function of equal values": (
        lambda a, b, w: jnp.tanh(a + b),
        lambda a, b, w: jnp.tanh(b + a),
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
    "a cast that rounds": (
        lambda a, b, w: a,
        lambda a, b, w: a.astype(jnp.bfloat16).astype(jnp.float32),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_has_one_fingerprint(name):
    one, other = fingerprints_of(*EQUAL[name])
    assert one == other
    # The pairs say what they are meant to.
    a, b, w = (jax.random.normal(jax.random.key(n), t.shape) for n, t in enumerate(TYPES))
    np.testing.assert_allclose(*(fun(a, b, w) for fun in EQUAL[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_two(name):
    one, other = fingerprints_of(*DIFFERENT[name])
    assert one != other


def test_rounding_counts_if_it_is_asked_for():
    for rounding in (True, False):
        one, other = fingerprints_of(*DIFFERENT["a cast that rounds"], rounding=rounding)
        assert (one == other) == (not rounding)


@pytest.mark.parametrize(
    "shape", [(2, 3), (3, 3), (2, 3, 4), (3, 3, 3), (2, 3, 4, 5), (3, 3, 3, 3)]
)
def test_transposes_of_sums_compose_and_differ(shape):
    terms = Terms()
    model = Fingerprints(terms, rounding=True)

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
