"""Code of other libraries, as it is, gives as a pipeline what it gives on one device."""

import importlib

import jax
import numpy as np
import pytest

import jaxpp
from jaxpp.schedules import Interleaved1F1B, OneFOneB, ZeroBubbleH1

MICROBATCHES = 4

SCHEDULES = [OneFOneB(), Interleaved1F1B(), ZeroBubbleH1()]
DEPENDENCIES = {
    "plain_functions": "optax",
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "dm_haiku": "haiku",
}
#: What runs by default: each library once, and each schedule; `pytest -m slow` runs the rest.
DEFAULT = {
    ("plain_functions", "Interleaved1F1B"),
    ("flax_linen", "OneFOneB"),
    ("flax_nnx", "OneFOneB"),
    ("dm_haiku", "ZeroBubbleH1"),
}


def example_of(library):
    pytest.importorskip(DEPENDENCIES[library])
    return importlib.import_module(f"experiments.libraries.{library}").EXAMPLE


def points():
    for library in DEPENDENCIES:
        for schedule in SCHEDULES:
            name = type(schedule).__name__
            marks = [] if (library, name) in DEFAULT else [pytest.mark.slow]
            yield pytest.param(library, schedule, id=f"{library}-{name}", marks=marks)


def assert_close(got, want):
    """Each leaf close to the other's, as a share of its largest magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, y), x in zip(leaves, jax.tree.leaves(got), strict=True):
        if hasattr(y, "dtype") and jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        rtol = 1e-5 if np.issubdtype(y.dtype, np.floating) else 0
        # A gradient that is zero but for rounding (of a key's bias) has no magnitude of its own.
        atol = rtol * (np.abs(y).max(initial=0) + 1e-2)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("library", "schedule"), list(points()))
def test_three_steps_are_those_of_one_device(library, schedule):
    # The optimizer is Adam, whose first moment after a step is the gradient, times a constant: what
    # is compared are gradients, the parameters, and the state of the model.
    example = example_of(library)
    sizes = 2 * schedule.stages_per_rank, MICROBATCHES
    step = jaxpp.place(example.make_train_step(schedule, *sizes), jaxpp.MpmdMesh((2,)))
    plain_step = jax.jit(example.make_train_step(None, *sizes))
    state = plain_state = example.make_state(sizes[0])
    for number in range(3):
        batch = example.draw_batch(number, MICROBATCHES)
        state, loss = step(state, batch)
        plain_state, plain_loss = plain_step(plain_state, batch)
        assert_close((state, loss), (plain_state, plain_loss))
