"""The types of a step's results as its scalar is any kind of number; on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from tests.transforms import two_layers

#: The scalars, by name. A bool of Python is static in a placed step.
SCALARS = {
    "float": lambda: 0.5,
    "weak": lambda: jnp.asarray(0.5),
    "int": lambda: 2,
    "complex": lambda: 0.5j,
    "np.float32": lambda: np.float32(0.5),
    "np.float64": lambda: np.float64(0.5),
    "np.int64": lambda: np.int64(2),
    "np.bool": lambda: np.bool_(True),
    "array of NumPy": lambda: np.array(0.5),
    "weak int": lambda: jnp.asarray(2),
    "weak vector": lambda: jnp.broadcast_to(jnp.asarray(0.5), (1,)),
    "strong": lambda: jnp.float32(0.5),
    "bfloat16": lambda: jnp.bfloat16(0.5),
    "int8": lambda: jnp.int8(2),
}


def step_of(grad_fn):
    """A step whose learning rate decays in it."""

    def step(weights, rate, x):
        value, grads = grad_fn(weights, x)
        real = jnp.real(rate) if jnp.iscomplexobj(rate) else rate
        updated = [w - real * g for w, g in zip(weights, grads, strict=True)]
        numbers = [
            value,
            value * rate,
            rate + 1,
            rate,
            jnp.where(value > 0, rate, 1.0),
            3.0 * value,
        ]
        return updated, rate * 0.9, numbers

    return step


def types(tree):
    return jax.tree.map(lambda x: (x.dtype, x.weak_type, x.shape), tree)


def check(mesh, scalar, dtype, steps=3):
    """Checks that results have the types that `jax.jit` gives, as they are fed back."""
    placed = jaxpp.place(step_of(two_layers.scheduled()), mesh)
    plain = jax.jit(step_of(two_layers.accumulated()))
    weights, x = jax.tree.map(lambda a: a.astype(dtype), (two_layers.WEIGHTS, two_layers.X))
    got = want = (weights, SCALARS[scalar](), None)
    for _ in range(steps):
        got, want = placed(*got[:2], x), plain(*want[:2], x)
        assert types(got) == types(want)
        assert types(jaxpp.gather(got)) == types(want)
