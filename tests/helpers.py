"""What tests of several folders share: comparisons, steps, meshes of this process, waiting."""

import time
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jaxpp


def assert_same(got, want):
    """Asserts that two trees are the same to the bit, and have the same types and weak types."""
    _assert_same_types(got, want)
    # To `chex.assert_trees_all_equal` all NaNs are the same number, and so are both zeros.
    chex.assert_trees_all_equal_comparator(
        lambda x, y: x.tobytes() == y.tobytes(),
        lambda x, y: f"{x} is not, to the bit, {y}",
        _values(got),
        _values(want),
    )


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    """Asserts that two trees have the same types, and that each element is close to the other."""
    _assert_same_types(got, want)
    chex.assert_trees_all_close(_values(got), _values(want), rtol=rtol, atol=atol)


def assert_close_sums(got, want, rtol=1e-5, least=0.0):
    """Asserts that two trees have the same types, and are close: sums in another order.

    Each element of a float array may be off by `rtol` of the largest magnitude in the array, or of
    `least` if that is more; all others are equal.
    """
    _assert_same_types(got, want)

    def scale(x):
        if not jnp.issubdtype(x.dtype, np.inexact):
            return np.float64(1.0)
        return np.float64(max(np.abs(x).max(initial=0), least, np.finfo(np.float32).tiny))

    got, want = _values(got), _values(want)
    scales = jax.tree.map(scale, want)
    got, want = (jax.tree.map(np.divide, tree, scales) for tree in (got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=rtol)


def _assert_same_types(got, want):
    """Asserts the same structure, types and weak types; leaves that are no arrays are equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert _type(x) == _type(y), jax.tree_util.keystr(path)


def _type(x):
    return (x.shape, x.dtype, getattr(x, "weak_type", False)) if _is_array(x) else x


def _values(tree):
    """The arrays of a tree, on the host; of random keys their bits."""

    def value(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(value, eqx.filter(tree, _is_array))


def _is_array(x):
    return hasattr(x, "dtype") and hasattr(x, "shape")


def train_step_of(optimizer, grad_fn):
    """Makes the train step of a gradient function: from a model and a state to the next ones."""

    def train_step(model, opt_state, *data) -> Any:
        loss, grads = grad_fn(model, *data)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def mesh_of(ranks: int, shared: bool = False) -> jaxpp.MpmdMesh:
    """Makes a mesh of this process: each rank has a device, or all share one."""
    return jaxpp.MpmdMesh((ranks,), devices=jax.devices()[:1] * ranks if shared else None)


def wait_until(condition, seconds: float):
    """Waits until a condition holds, or so many seconds; gives the condition's last answer."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def bytes_on(device, tree) -> int:
    """Counts the bytes that the arrays of a tree have on a device."""
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)
