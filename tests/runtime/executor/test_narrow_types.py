"""Types below a byte, such as int4, run where and as `jax.jit` runs them."""

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import assert_close, assert_same, mesh_of
from tests.runtime import narrow

pytestmark = pytest.mark.cases(3)
SCHEDULES = [jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()]
types = pytest.mark.parametrize("dtype", narrow.DTYPES)


def train(step, dtype):
    """Runs three steps, of which each takes the results of the one before."""
    ws, frozen, state, *batch = narrow.arguments(dtype)
    results = None
    for _ in range(3):
        ws, frozen, state, *results = step(ws, frozen, state, *batch)
    return ws, frozen, state, results


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@types
def test_steps_are_those_of_jit(dtype, schedule):
    placed = jaxpp.place(
        narrow.make_step(dtype, order=schedule), mesh_of(2), donate_argnums=(0, 1, 2)
    )
    got = train(placed, dtype)
    assert_close(got, train(jax.jit(narrow.make_step(dtype, wrap=lambda loss: loss)), dtype))
    shared = jaxpp.place(narrow.make_step(dtype, order=schedule), mesh_of(2, shared=True))
    assert_same(got, train(shared, dtype))
    chex.assert_trees_all_equal(jaxpp.gather(got), got)


@types
def test_ranks_of_several_devices_take_four_bits(dtype):
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    step = narrow.make_step(dtype, order=SCHEDULES[0])
    split = P("data")
    placed = jaxpp.place(step, mesh, in_specs=(None, split, split, split, split))
    if "2" in dtype.partition("_")[0]:  # XLA writes where it should not
        with pytest.raises(ValueError, match=f"rank of 2 CPU devices has arrays of {dtype}"):
            placed(*narrow.arguments(dtype))
        return
    assert_close(train(placed, dtype), train(jax.jit(step), dtype))


@types
def test_they_are_initialized_saved_and_loaded(dtype, tmp_path):
    args = narrow.arguments(dtype)
    placed = jaxpp.place(narrow.make_step(dtype, order=SCHEDULES[0]), mesh_of(2))

    def init():
        return narrow.arguments(dtype)[:3]

    made = placed.initialize(init, rest=args[3:])
    assert_same(made, jax.jit(init)())
    jaxpp.save_state(tmp_path / "state", made)
    shardings = tuple(placed.lower(*args).compile().input_shardings[:3])
    loaded = jaxpp.load_state(tmp_path / "state", jax.eval_shape(init), shardings)
    assert_same(loaded, made)
    assert_same(placed(*loaded, *args[3:]), placed(*args))
    assert {str(x.dtype) for x in jax.tree.leaves(loaded[1:])} == {dtype}
    assert isinstance(np.asarray(loaded[2]), np.ndarray)
