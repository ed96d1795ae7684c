"""Parts of a result are the next values of arguments: by structure, by types, then by origins."""

import jax
import jax.numpy as jnp
import pytest

from jaxpp import jaxprs

A, B = jnp.zeros(2), jnp.zeros(3)


def paired(arguments, result, origins=None):
    """By the number of each argument, the numbers of the arrays that are its next value."""
    trees = dict(enumerate(jaxprs.Tree.of(arguments).children))
    found = jaxprs.next_values(trees, jaxprs.Tree.of(result), origins)
    return {key: part.numbers for key, part in found.items()}


@pytest.mark.parametrize(
    ("arguments", "result", "pairs"),
    [
        ([{"w": A}, {"w": B}], ({"w": B}, [{"w": A}]), {0: [1], 1: [0]}),
        ([{"w": A}], {"w": B}, {}),
        ([{"w": A, "n": 3}], {"w": 3, "n": A}, {}),
        ([{"w": A}, {"w": A}], ({"w": A},), {0: [0]}),
        # The larger part goes first, and what is in the other one of its type comes last.
        ([[{"w": A}], {"w": A}], ([{"w": A}], [{"w": A}], {"w": A}), {0: [0], 1: [2]}),
        ([[{"w": A}], {"w": A}], ([{"w": A}], [{"w": A}]), {0: [0], 1: [1]}),
    ],
)
def test_a_next_value_has_the_structure_and_the_types_of_its_argument(arguments, result, pairs):
    assert paired(arguments, result) == pairs


def test_of_what_is_alike_it_is_what_is_computed_from_the_argument():
    origins = [{0, 1}, {0}, {1}]
    assert paired([[A], [A]], ([A], [A], [A]), lambda: origins) == {0: [1], 1: [2]}
    assert paired([[A], [A]], ([A], [A], [A])) == {0: [0], 1: [1]}


def test_origins_are_asked_for_only_where_they_decide():
    def origins():
        raise AssertionError

    assert paired([[A], [B]], ([B], [A]), origins) == {0: [1], 1: [0]}


def test_a_class_that_takes_nothing_but_arrays_is_paired():
    @jax.tree_util.register_pytree_node_class
    class Scale:
        def __init__(self, value):
            jax.eval_shape(lambda: value)  # as jmp's scales of the loss do
            self.value = value

        def tree_flatten(self):
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    scale = Scale(A)
    assert paired([scale, None, B], (B, {"scale": scale})) == {0: [1], 2: [0]}
