"""Scans that run their body once: what they make is the same term if and only if it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._terms import Terms

pytestmark = pytest.mark.cases(20)

ROWS = 12
TYPES = (jax.ShapeDtypeStruct((ROWS, 3), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32))


def results_of(*functions):
    """The terms that functions of the same arguments give."""
    terms = Terms()
    arguments = [terms.term("argument", (n,), (), t.shape, "float32") for n, t in enumerate(TYPES)]
    evaluator = Evaluator(terms, whole=frozenset({ROWS, 7}))
    return [evaluator.run(jax.make_jaxpr(fun)(*TYPES), arguments) for fun in functions]


def scan(body, first, xs=None, length=None, reverse=False):
    return jax.lax.scan(body, first, xs, length, reverse)


def plain(x, y):
    return scan(lambda c, row: (jnp.sin(c * row), c + row), y, x)


def with_more(x, y):
    """It carries one value more, and in another order."""

    def body(carry, row):
        n, c = carry
        return (n + 1, jnp.sin(c * row)), (row, c + row)

    (_, last), (_, rows) = scan(body, (jnp.int32(0), y), x)
    return last, rows


def in_two(x, y):
    """A first scan gives what a second one adds up, from the end."""
    _, rows = scan(lambda c, row: (jnp.sin(c * row), jnp.sin(c * row)), y, x)
    return scan(lambda c, row: (c + row, None), y, jnp.cos(rows), reverse=True)[0]


def in_one(x, y):
    """As `in_two`, with the cosine in the first scan, and the numbers of the rows beside them."""
    _, rows = scan(lambda c, row: (jnp.sin(c * row), jnp.cos(jnp.sin(c * row))), y, x)
    return scan(lambda c, row: ((c[0] + row, c[1] + 1), None), (y, 0), rows, reverse=True)[0][0]


def apart(x, y):
    """Two recurrences, of which one reads the other, in two scans."""
    _, first = scan(lambda c, row: (jnp.sin(c * row), c), y, x)
    return scan(lambda d, own: (d * own, None), y, first)[0]


def together(x, y):
    def body(carry, row):
        c, d = carry
        return (jnp.sin(c * row), d * c), None

    return scan(body, (y, y), x)[0][1]


def one_way(x, y):
    """The case of an iteration reads what other iterations have chosen."""

    def body(carry, row):
        c, total = carry
        is_small = row[0] < 0
        return (
            jax.lax.cond(is_small, lambda c: c * 2, lambda c: c, c),
            jax.lax.cond(is_small, lambda t: t + c, lambda t: t, total),
        ), None

    return scan(body, (y, y), x)[0][1]


def other_way(x, y):
    def body(carry, row):
        c, total = carry
        is_small = row[0] < 0
        return (
            jax.lax.cond(is_small, lambda c: c * 2, jnp.tanh, c),
            jax.lax.cond(is_small, lambda t: t + c, lambda t: t, total),
        ), None

    return scan(body, (y, y), x)[0][1]


EQUAL = {"more": (plain, with_more), "rows": (in_two, in_one), "recurrences": (apart, together)}
DIFFERENT = {
    "another step": (plain, lambda x, y: scan(lambda c, row: (jnp.cos(c * row), c + row), y, x)),
    "another output": (plain, lambda x, y: scan(lambda c, row: (jnp.sin(c * row), c - row), y, x)),
    "another start": (plain, lambda x, y: plain(x, -y)),
    "other rows": (plain, lambda x, y: plain(-x, y)),
    "backwards": (
        plain,
        lambda x, y: scan(lambda c, row: (jnp.sin(c * row), c + row), y, x, reverse=True),
    ),
    "another number of times": tuple(
        lambda x, y, n=n: scan(lambda c, _: (jnp.sin(c), None), y, length=n)[0] for n in (ROWS, 7)
    ),
    "a row for another": (lambda x, y: plain(x, y)[1][3], lambda x, y: plain(x, y)[1][4]),
    "a case of other iterations": (one_way, other_way),
    "the other of two": tuple(
        lambda x, y, k=k: scan(lambda c, r: ((c[1], c[0] * r), None), (y, 2 * y), x)[0][k]
        for k in (0, 1)
    ),
}


def values_of(fun):
    x, y = (jax.random.normal(jax.random.key(n), t.shape) for n, t in enumerate(TYPES))
    return jax.tree.leaves(fun(x, y))


@pytest.mark.parametrize("name", EQUAL)
def test_equal_loops_are_the_same(name):
    one, other = results_of(*EQUAL[name])
    assert all(a is b for a, b in zip(one, other, strict=True))
    for a, b in zip(*map(values_of, EQUAL[name]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_loops_are_not(name):
    one, other = results_of(*DIFFERENT[name])
    assert one[-1] is not other[-1]
    values = map(values_of, DIFFERENT[name])
    assert any(not np.allclose(a, b) for a, b in zip(*values, strict=True))
