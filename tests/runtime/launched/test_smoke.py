"""A launched job of two processes: the part of these tests that each run has."""

import re

import jax
import numpy as np

import jaxpp
from tests.runtime.launched import script
from tests.runtime.launched.jobs import Job


def expected(case):
    shape, names = script.axes_of(case)
    count = int(np.prod(shape))
    return script.train(case, jaxpp.MpmdMesh(shape, names, devices=jax.devices()[:count]))


def check_bitwise(folder, case, count):
    losses, state = expected(case)
    for number in range(count):
        found = list(np.load(folder / f"{number}.npz").values())
        assert found[0].tolist() == losses
        for one, other in zip(found[1:], state, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_steps_are_bitwise_those_of_the_local_mesh_and_callbacks_run_with_their_ranks(tmp_path):
    outputs = Job(2, "callbacks", tmp_path).succeed()
    check_bitwise(tmp_path, "callbacks", 2)
    for number, output in enumerate(outputs):
        stages = re.findall(r"stage (\d) in (\d+)", output)
        assert len(stages) == script.STEPS * script.MICROBATCHES
        assert {stage for stage, _ in stages} == {str(number)} and len(set(stages)) == 1
