"""The random model: what is equal over the real numbers has one fingerprint, and nothing else."""

import itertools

import pytest

from jaxpp.certification._terms import Equality, Terms


def argument(terms, name, shape):
    return terms.term("argument", (name,), (), shape, "float32")


def add(terms, a, b):
    return terms.elementwise(terms.op("add", (), a.shape, "float32"), [a, b])


@pytest.mark.parametrize(
    "shape", [(2, 3), (3, 3), (2, 3, 4), (3, 3, 3), (2, 3, 4, 5), (3, 3, 3, 3)]
)
def test_transposes_of_sums_compose_and_differ(shape):
    terms = Terms(Equality.SUMS)
    x = argument(terms, "x", shape)
    permutations = list(itertools.permutations(range(len(shape))))
    assert len({terms.transpose(x, p) for p in permutations}) == len(permutations)
    for p, q in itertools.product(permutations, permutations):
        first = terms.transpose(x, p)
        y = argument(terms, "y", first.shape)
        once = terms.transpose(x, [p[i] for i in q])
        both = terms.transpose(add(terms, first, y), q)
        assert both is add(terms, once, terms.transpose(y, q))


def test_a_transpose_is_not_that_of_the_array_in_another_shape():
    terms = Terms(Equality.SUMS)
    x = argument(terms, "x", (2, 3, 4))
    of_three = terms.reshape(terms.transpose(x, (1, 0, 2)), (4, 6))
    assert of_three is not terms.transpose(terms.reshape(x, (6, 4)), (1, 0))
