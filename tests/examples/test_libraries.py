"""Code of other libraries, as it is, gives as a pipeline what it gives on one device."""

import importlib

import jax
import pytest

import jaxpp
from jaxpp.schedules import Interleaved1F1B, OneFOneB, ZeroBubbleH1
from tests.helpers import assert_close_sums

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
    return importlib.import_module(f"examples.libraries.{library}").EXAMPLE


def points():
    for library in DEPENDENCIES:
        for schedule in SCHEDULES:
            name = type(schedule).__name__
            marks = [] if (library, name) in DEFAULT else [pytest.mark.slow]
            yield pytest.param(library, schedule, id=f"{library}-{name}", marks=marks)


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
        # A gradient that is zero but for rounding (of a key's bias) has no magnitude of its own.
        assert_close_sums((state, loss), (plain_state, plain_loss), least=1e-2)
