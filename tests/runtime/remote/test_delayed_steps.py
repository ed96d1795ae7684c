"""Delayed steps on worker processes, in a program each and all in one: the same bits."""

import jax
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.schedules import OneFOneB, ZeroBubbleH1
from tests.transforms.tasks.test_delay import by_hand, grad_fn, run, run_in_one, step_of


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.mark.parametrize("order", [OneFOneB(), ZeroBubbleH1()])
def test_workers_give_the_bits_of_the_plain_loop_that_is_delayed(order, mesh):
    optimizer, one = optax.adamw(1e-2), jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    expected = run(jaxpp.place(by_hand(grad_fn(order), optimizer, 1), one), 1)
    delayed = jaxpp.delay(step_of(grad_fn(order), optimizer))
    for found in (run(jaxpp.place(delayed, mesh), 1), run_in_one(delayed, mesh)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
