"""The driver names a task by the user's line in the step of its call."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.runtime.site._carried import Packed
from jaxpp.runtime.site._programs import REMEMBERED, Library

W, X = [jnp.eye(2), jnp.ones((2, 2))], jnp.ones((4, 2))


def squares(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    return jnp.mean(jnp.square(h @ w[1]))


def cubes(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.sin(x @ w[0]))
    return jnp.mean((h @ w[1]) ** 3)


@pytest.fixture
def library():
    """The program cache of two ranks, with the steps of both losses: numbers 0 and 3."""
    library = Library(lambda value: value, Packed.of)
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    for loss in (squares, cubes):
        grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
        step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        number = library.add(step.lower(W, X).bundle)
        library.called(len(library._lines) + 1, number)
    return library


@pytest.mark.parametrize("task", ["F0.0", "F1.1"])
def test_a_task_has_the_line_of_the_step_that_was_called(library, task):
    for call, loss in ((1, squares), (2, cubes)):
        line = loss.__code__.co_firstlineno + 1 + int(task[1])
        assert library.describe(call, task) == f" (stage {task[1]}, {__file__}:{line})"
    assert library.describe(-1, "F0.0") == ""  # no call is known
    assert library.describe(2, "receive of h from rank 0") == ""


def test_a_step_that_is_removed_while_it_runs_has_its_lines(library):
    for number in list(library._steps):
        library.remove(number)
    library.removals()
    assert f":{cubes.__code__.co_firstlineno + 1})" in library.describe(2, "F0.1")


def test_the_lines_of_the_last_calls_are_kept_and_no_others(library):
    number = next(iter(library._steps))
    for call in range(3, 3 + REMEMBERED):
        library.called(call, number)
    assert len(library._lines) == REMEMBERED
    assert library.describe(2, "F0.0") == ""
