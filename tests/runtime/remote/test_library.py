"""An error names a task by its stage and the user's line in the step of its call."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.runtime.site._carried import Packed
from jaxpp.runtime.site._programs import Library

W, X = [jnp.eye(2), jnp.ones((2, 2))], jnp.ones((4, 2))


def squares(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    return jnp.mean(jnp.square(h @ w[1]))


def cubes(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.sin(x @ w[0]))
    return jnp.mean((h @ w[1]) ** 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_the_stages_and_lines_of_the_tasks_of_each_step(rank):
    library = Library(lambda value: value, Packed.of)
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    for loss in (squares, cubes):
        grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
        step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        lines = library.loading(library.add(step.lower(W, X).bundle), rank).lines
        first = loss.__code__.co_firstlineno + 1
        for task in ("F{}.0", "F{}.1"):
            assert lines[task.format(rank)] == f"stage {rank}, {__file__}:{first + rank}"
        assert f"F{1 - rank}.0" not in lines and "receive of h from rank 0" not in lines
