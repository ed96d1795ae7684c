"""Arrays in parts: leaves like any other, for the training loop, checkpoints and other steps."""

import pickle
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.runtime import StackedArray, StackedSharding

WIDTH, LAYERS = 4, 5
OPTIMIZER = optax.adam(1e-2, eps=1e-2)


def loss_of(bounds):
    def loss(params, x):
        for k, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            x = jaxpp.pipeline_enter_stage(x) if k else x
            part = jax.lax.slice_in_dim(params["w"], low, high)
            x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, part)
        return jnp.mean((x @ params["head"]) ** 2)

    return loss


def params():
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    return {"w": w, "head": jax.random.normal(jax.random.key(1), (WIDTH, 2))}


def batch(i=0):
    return jax.random.normal(jax.random.key(10 + i), (4, WIDTH))


def train_step(grad):
    def step(params, state, x) -> Any:
        loss, grads = grad(params, x)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def placed(bounds, mesh=None, donate=(0, 1)):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_of(bounds))), 2)
    step = train_step(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
    return jaxpp.place(step, mesh or jaxpp.MpmdMesh((len(bounds) - 1,)), donate_argnums=donate)


def state_of(bounds, mesh=None):
    start = params()
    return placed(bounds, mesh)(start, OPTIMIZER.init(start), batch())[:2]


def stack():
    value = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    devices = jax.devices()
    return StackedArray(
        [jax.device_put(value[:2], devices[0]), jax.device_put(value[2:], devices[1])]
    ), value


def test_it_is_an_array_with_a_value():
    x, value = stack()
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, len(x)) == (
        (5, 3),
        np.float32,
        2,
        15,
        60,
        5,
    )
    assert eqx.is_array(x) and eqx.is_inexact_array(x) and isinstance(x, jax.Array)
    assert jax.tree.leaves({"x": x}) == [x]
    assert x.bounds == (0, 2, 5) and repr(x) == "StackedArray(float32[5,3] in rows 0:2, 2:5)"
    assert x.sharding == StackedSharding((0, 2, 5), tuple(p.sharding for p in x.parts))
    assert x.devices() == set(jax.devices()[:2])
    jax.block_until_ready(x)
    for fetched in (np.asarray(x), jax.device_get(x), jnp.asarray(x), x.copy(), x.tolist()):
        np.testing.assert_array_equal(np.asarray(fetched), value)
    np.testing.assert_array_equal(x[3] + 2 * x[1], value[3] + 2 * value[1])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(x)), value)
    x.delete()
    assert x.is_deleted() and all(p.is_deleted() for p in x.parts)
    assert "deleted" in repr(x)


def test_operators_and_methods_put_the_parts_together():
    x, value = stack()
    np.testing.assert_allclose(x.mean(axis=0), value.mean(axis=0))
    np.testing.assert_allclose(np.mean(x, axis=0), np.mean(value, axis=0))
    np.testing.assert_array_equal(x.T @ x.reshape(5, 3), value.T @ value)
    np.testing.assert_array_equal(x.at[0].set(x[1]), value[[1, 1, 2, 3, 4]])
    np.testing.assert_array_equal(divmod(x, x + 1)[1], divmod(value, value + 1)[1])
    for function in (jnp.mean, jax.lax.exp, jax.jit(jnp.sum)):
        with pytest.raises(ValueError, match=r"in parts, on several devices. Gather it"):
            function(x)


def test_a_step_takes_it_back_without_a_move():
    step = placed((0, 2, 5), donate=())
    start = params()
    first, state, _ = step(start, OPTIMIZER.init(start), batch())
    assert [p.devices() for p in first["w"].parts] == [{d} for d in jax.devices()[:2]]
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(first)
    local: Any = step._cache[0]._run
    flat = local.flat(jax.tree.leaves((first, state, batch(1))))
    assert {id(p) for p in first["w"].parts} <= {id(x) for x in flat}


def test_donation_consumes_it_and_what_it_was_cut_from():
    step = placed((0, 2, 5))
    start = jax.tree.map(jnp.copy, params())
    state: Any = OPTIMIZER.init(start)
    new, new_state, _ = step(start, state, batch())
    assert start["w"].is_deleted() and state[0].mu["w"].is_deleted()
    step(new, new_state, batch(1))
    assert new["w"].is_deleted() and new_state[0].nu["w"].is_deleted()
    with pytest.raises(ValueError, match=r"args\[0\]\['w'\] was donated"):
        step(new, new_state, batch(1))
    with pytest.raises(ValueError, match=r"args\[0\]\['w'\] was donated"):
        step(start, state, batch(1))


@pytest.mark.parametrize("bounds", [(0, 1, 5), (0, 1, 2, 5), (0, 5)], ids=str)
def test_steps_with_other_parts_take_it(bounds):
    state = state_of((0, 2, 5))
    whole = jax.device_get(state)
    got = placed(bounds)(*state, batch(1))
    want = placed(bounds)(*whole, batch(1))
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, t) for t in (got, want)))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_checkpoint_is_read_onto_other_parts_and_onto_none(tmp_path):
    state = state_of((0, 2, 5))
    jaxpp.save_state(tmp_path / "1", state)
    want = jax.tree.map(np.asarray, state)
    plain = params(), OPTIMIZER.init(params())
    other = placed((0, 1, 3, 5)).lower(*plain, batch()).compile()
    shardings = other.input_shardings[:2]
    assert shardings[0]["w"].bounds == (0, 1, 3, 5)
    loaded = jaxpp.load_state(tmp_path / "1", plain, shardings)
    assert loaded[1][0].mu["w"].bounds == (0, 1, 3, 5)
    for part, device in zip(loaded[0]["w"].parts, jax.devices()[:3], strict=True):
        assert part.devices() == {device}
    for tree in (
        loaded,
        jaxpp.load_state(tmp_path / "1", plain),
        jaxpp.load_state(tmp_path / "1", state),
    ):
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, tree), want)
    got, want = other(*loaded, batch(1)), placed((0, 1, 3, 5))(*want, batch(1))
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, t) for t in (got, want)))


def test_a_sharding_of_other_rows_is_refused(tmp_path):
    x, _ = stack()
    jaxpp.save_state(tmp_path / "1", {"x": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match="array with 5 rows"):
        jaxpp.load_state(tmp_path / "1", {"x": jnp.ones((4, 3))}, {"x": x.sharding})


def test_stacks_of_keys_and_of_weak_types():
    keys = jax.random.split(jax.random.key(0), 3)
    x = StackedArray([keys[:1], keys[1:]])
    assert jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    chex.assert_trees_all_equal(jax.random.key_data(jnp.asarray(x)), jax.random.key_data(keys))
    weak = StackedArray([jax.lax.full((2,), 1.0), jax.lax.full((1,), 1.0)])
    assert weak.weak_type == jax.lax.full((2,), 1.0).weak_type


# ---- on a remote mesh ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.mark.more  # a plain pytest starts one mesh of worker processes, that of test_smoke.py
def test_ranks_in_processes_of_their_own_hold_their_layers(mesh, tmp_path):
    """Bitwise the local mesh's values; each rank has its rows, and writes them."""
    bounds = (0, 2, 5)
    start = jax.device_get(params())
    remote = jax.device_get(OPTIMIZER.init(params()))
    step, local = placed(bounds, mesh), placed(bounds)
    got: Any = (start, remote, None)
    want: Any = (params(), OPTIMIZER.init(params()), None)
    for i in range(3):
        got, want = step(*got[:2], batch(i)), local(*want[:2], batch(i))
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, t) for t in (got, want)))
    stack = got[0]["w"]
    assert isinstance(stack, StackedArray) and not stack.is_fully_addressable
    assert [p.ranks for p in stack.parts] == [(0,), (1,)]
    with pytest.raises(TypeError, match="not in this process"):
        _ = stack + 1
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(stack)
    rows = mesh.apply(rows_held, {0: (), 1: ()})
    assert rows == {0: 3 * 2, 1: 3 * 3}  # the weights and both moments
    jaxpp.save_state(tmp_path / "1", got)
    for like in (got, want):
        loaded = jaxpp.load_state(tmp_path / "1", like)
        chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, t) for t in (loaded, got)))


def rows_held(process):
    arrays = [a for a in process.arrays.values() if a.shape[1:] == (WIDTH, WIDTH)]
    return sum(a.shape[0] for a in arrays)
