"""Results have the dtype and the weak type that `jax.jit` gives them."""

import jax
import pytest

from tests.helpers import mesh_of
from tests.transforms.place import result_types


@pytest.mark.cases(2)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scalar", result_types.SCALARS)
def test_results_keep_their_types_as_they_are_fed_back(scalar, dtype, x64):
    with jax.enable_x64(x64):
        result_types.check(mesh_of(2), scalar, dtype)
