"""Arrays that a step closes over and that go, or change, after its first call; on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from tests.helpers import assert_close
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X


def aligned():
    """A matrix of NumPy at a multiple of 64 bytes: JAX reads such memory on CPU, without a copy."""
    memory = np.zeros(256, np.uint8)
    start = -memory.ctypes.data % 64
    matrix = memory[start : start + 64].view(np.float32).reshape(4, 4)
    matrix[:] = np.arange(16).reshape(4, 4) / 16
    return matrix


def plainly(matrix, x):
    return x @ matrix


def in_a_jit(matrix, x):
    return jax.jit(lambda x: x @ matrix)(x)


def in_a_loop(matrix, x):
    return jax.lax.scan(lambda h, _: (jax.jit(lambda h: h @ matrix)(h), None), x, None, length=2)[0]


def with_a_rule(matrix, x):
    rule = jax.custom_vjp(lambda x: x @ matrix)
    rule.defvjp(lambda x: (x @ matrix, None), lambda _, g: (g @ matrix.T,))
    return rule(x)


WHERE = {f.__name__: f for f in (plainly, in_a_jit, in_a_loop, with_a_rule)}


def written(matrix):
    matrix[:] = 9


def deleted(matrix):
    matrix.delete()


def donated(matrix):
    jax.jit(lambda x: x + 1, donate_argnums=0)(matrix)


#: How an array is made of the matrix, and what becomes of it.
FATES = {
    "written": (lambda matrix: matrix, written),
    "deleted": (jnp.array, deleted),
    "donated": (jnp.array, donated),
}


def check(mesh, where, fate):
    """Checks that a step goes on with the arrays that it was traced with, as `jax.jit` does."""
    (make, end), use = FATES[fate], WHERE[where]
    matrix = make(aligned())

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(use(matrix, x) @ w[0]))
        return jnp.mean(use(matrix, h @ w[1]) ** 2)

    def step_of(grad_fn):
        def step(w, x):
            value, (first, second) = grad_fn(loss)(w, x)
            return value, [first, use(matrix, second)], matrix

        return step

    plain = jax.jit(step_of(two_layers.accumulated))
    placed = jaxpp.place(step_of(two_layers.scheduled), mesh)
    plain(WEIGHTS, X)
    placed(WEIGHTS, X)
    end(matrix)
    assert_close(jaxpp.gather(placed(WEIGHTS, X)), plain(WEIGHTS, X), rtol=1e-4)
