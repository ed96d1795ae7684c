"""Arguments that a rank loads itself, on the rank's side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.runtime.arrays import ArrayType
from jaxpp.runtime.site._call import Input
from jaxpp.runtime.site._carried import Packed, unpacked
from jaxpp.runtime.site._feed import Batch, Loader


def taken(load, expected, leaf=0):
    """An array that `load(7)` gives, as a rank takes it for a step."""
    loader = Loader(unpacked)
    loader.load(Batch(0, 0, Packed.of(load), Packed.of(7)))
    return Input(expected, jax.devices()[0], ()).of_loaded(loader.take(0, leaf, expected))


@pytest.mark.parametrize("array", [np.arange(4.0), np.arange(4, dtype=np.float32), jnp.arange(4.0)])
def test_what_jax_makes_the_same_of_is_taken(array):
    expected = ArrayType((4,), "float32")
    found = taken(lambda n: array, expected)
    assert found.dtype == jnp.float32 and found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "given", [np.arange(4), np.arange(4.0, dtype=np.float16), jnp.arange(4.0, dtype="bfloat16")]
)
def test_another_dtype_than_the_first_is_refused(given):
    told = (
        rf"\['y'\] of type {given.dtype.name.replace('64', '32')}\[4\].*float32\[4\] the first time"
    )
    with pytest.raises(ValueError, match=told):
        taken(lambda n: {"x": np.zeros(3), "y": given}, ArrayType((4,), "float32"), leaf=1)


def test_another_kind_of_key_is_refused():
    key = jax.random.key(0, impl="rbg")
    assert (taken(lambda n: key, ArrayType.of(key)) == key).all()
    with pytest.raises(ValueError, match=r"key<rbg>\[\].*key<threefry2x32>\[\] the first time"):
        taken(lambda n: key, ArrayType.of(jax.random.key(0)))


def test_another_shape_or_fewer_arrays_are_refused():
    with pytest.raises(
        ValueError, match=r"float32\[3\].*float32\[4\] the first time.*what is left"
    ):
        taken(lambda n: np.zeros(3), ArrayType((4,), "float32"))
    with pytest.raises(ValueError, match=r"gave 1 array.*more the first time"):
        taken(lambda n: np.zeros(3), ArrayType((), "float32"), leaf=1)


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, SystemExit])
def test_what_the_function_raises_reaches_the_step(kind):
    def load(number):
        raise kind("no such batch")

    with pytest.raises(kind, match="no such batch") as caught:
        taken(load, ArrayType((4,), "float32"))
    assert "that feeds the step, called with 7" in caught.value.__notes__[0]
