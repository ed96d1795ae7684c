"""How the tests of the transforms look at stages."""

import chex
import equinox as eqx
import jax
import pytest

from jaxpp import jaxprs
from jaxpp.transforms.stages import _stages


@pytest.fixture(scope="session")
def stages_of():
    """The stages that the marks in a function make, at given arguments."""

    def read(fun, *args):
        return _stages.read_stages(jaxprs.trace(fun, args).jaxpr)

    return read


@pytest.fixture(scope="session")
def primitives_of(stages_of):
    """The names of the primitives of each stage, in order; those repeated in it too."""

    def read(fun, *args):
        stages = stages_of(fun, *args)
        parts = stages.parts
        return [[eqn.primitive.name for eqn in part.jaxpr.eqns] for part in parts]

    return read


@pytest.fixture(scope="session")
def edges_of(stages_of):
    """The (source, target, shape) of each value that goes from one stage to another."""

    def read(fun, *args):
        stages = stages_of(fun, *args)
        parts = stages.parts
        made = {v: k for k, part in enumerate(parts) for v in part.outputs}
        edges = [
            (made[v], k, v.aval.shape)
            for k, part in enumerate(parts)
            for v in part.inputs
            if v in made
        ]
        return sorted(edges)

    return read


@pytest.fixture(scope="session")
def arguments_of(stages_of):
    """The shapes of the program's arguments that each stage reads."""

    def read(fun, *args):
        stages = stages_of(fun, *args)
        invars = set(stages.jaxpr.jaxpr.invars)
        parts = stages.parts
        return [sorted(v.aval.shape for v in part.inputs if v in invars) for part in parts]

    return read


@pytest.fixture(scope="session")
def assert_same():
    """Asserts that a transformed function computes what the plain one does, bitwise under jit."""

    def check(transformed, plain, *args):
        got = eqx.filter_jit(transformed)(*args)
        want = eqx.filter_jit(plain)(*args)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        chex.assert_trees_all_equal(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array))

    return check
