"""Delayed steps on a launched mesh, in a program each and all in one: the same bits."""

import jax
import numpy as np

import jaxpp
from jaxpp.schedules import OneFOneB
from tests.runtime.launched.jobs import Job
from tests.transforms.tasks.test_delay import ADAMW, by_hand, grad_fn, run


def test_launched_processes_give_the_bits_of_the_plain_loop_that_is_delayed(tmp_path):
    Job(2, "delayed", tmp_path).succeed()
    one = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    expected = run(jaxpp.place(by_hand(grad_fn(OneFOneB()), ADAMW, 1), one), 1)
    for name in ("calls", "program"):
        for process in range(2):
            found = np.load(tmp_path / f"{name}{process}.npz").values()
            for own, other in zip(found, jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(own, other, strict=True)
