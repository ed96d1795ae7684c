"""Deferred initialisation on ranks of several devices: each makes its shards, to the eager bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp

AXES = ("mpmd", "data", "model")
MESHES = [(2, 1, 1), (2, 2, 1), (2, 1, 2)]
WIDTH = 96
X = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
RULES = [
    (r"columns|stacked_columns|cast|jitted|source", P(None, "model")),
    (r"rows|divided|summed|zeros|product", P("model")),
    (r"both", P("data", "model")),
]


@jax.jit
def times_its_sum(x):
    return x * x.sum()


def make(key):
    """Arrays that XLA makes in many ways; of some the bits depend on how a sum is computed."""
    keys = list(jax.random.split(key, 9))
    square = (WIDTH, WIDTH)
    source = jax.random.normal(keys[0], square)
    return {
        "columns": jax.random.normal(keys[1], square) * 0.7 / 3.0,
        "rows": jax.random.uniform(keys[2], square, minval=-0.3),
        "both": jax.nn.initializers.lecun_normal()(keys[3], square),
        "whole": jax.random.truncated_normal(keys[4], -2.0, 2.0, square),
        "cast": jax.random.normal(keys[5], square).astype(jnp.bfloat16).astype(jnp.float32),
        "jitted": times_its_sum(jax.random.normal(keys[6], square)),
        "divided": source / source.sum(axis=0),
        "summed": jax.random.normal(keys[7], square).sum(axis=1),
        "product": source @ source,
        "source": source,
        "zeros": jnp.zeros(WIDTH),
        "stacked_columns": jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(
            jax.random.split(keys[8], WIDTH)
        ),
    }


def compiled_step(shape, make):
    ranks = shape[AXES.index("mpmd")]

    def loss_fn(weights, x):
        first, *others = weights.values()
        x = x * first.sum()
        x = jaxpp.pipeline_enter_stage(x) if ranks > 1 else x
        return jnp.mean(x) * sum(w.sum() for w in others)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=ranks))
    step = jaxpp.place(
        jaxpp.schedule(jaxpp.microbatch(jax.grad(staged), 2), jaxpp.schedules.OneFOneB()),
        jaxpp.MpmdMesh(shape, AXES),
        in_specs=(RULES, P("data")),
    )
    return step.lower(jax.eval_shape(make, jax.random.key(0)), X).compile()


@pytest.fixture(scope="module")
def expected():
    return make(jax.random.key(3))


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2), (1, 1, 2), *(pytest.param(s, marks=pytest.mark.slow) for s in MESHES)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_each_array_is_made_in_its_shards_to_the_same_bits(expected, shape):
    compiled = compiled_step(shape, make)
    got = compiled.initialize(make, jax.random.key(3))
    for name, want in expected.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want), err_msg=name)
        sharding = compiled.input_shardings[0][name]
        assert got[name].sharding.is_equivalent_to(sharding, want.ndim), name
