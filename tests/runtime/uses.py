"""Results of a placed step, and what people do with them: what comes out on each mesh.

The results are a tied parameter, which two ranks hold, and a stack of layers, cut between them. So
on the mesh of this process they are an array on two devices and a `StackedArray`, and on a remote
mesh a `RemoteArray` and a `StackedArray` of these.
"""

import copy
import io
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

OPTIMIZER = optax.adam(1e-2)


def loss_fn(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["tied"], params["stack"])
    return jnp.mean((h @ params["tied"].T) ** 2)


def train_step():
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=2))
    grad_fn = jaxpp.microbatch(jax.value_and_grad(staged), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(params, state, x):
        _, grads = grad_fn(params, x)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state

    return step


def start():
    tied, stack = jax.random.split(jax.random.key(0))
    params = {
        "tied": jax.random.normal(tied, (4, 4)),
        "stack": jax.random.normal(stack, (4, 4, 4)),
    }
    return params, OPTIMIZER.init(params), jnp.ones((8, 4))


def results(mesh):
    """The parameters and the optimizer state after a step on a mesh."""
    return jaxpp.place(train_step(), mesh)(*start())


def check_evaluation(mesh, params) -> Any:
    """Checks that a placed forward function needs no loop: each stage runs on its rank.

    Returns the value, as the mesh gives it.
    """
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=2))
    evaluate = jaxpp.place(staged, mesh)
    x = start()[2]
    value = evaluate(params, x)
    np.testing.assert_allclose(jaxpp.gather(value), loss_fn(jaxpp.gather(params), x), rtol=1e-6)
    assert jaxpp.testing.count_sends(evaluate) == jaxpp.testing.count_sends(evaluate, "edge") == 1
    return value


def save_and_restore(checkpointer, tree, folder):
    """Saves a tree with a checkpointer of Orbax, and restores it."""
    ocp = pytest.importorskip("orbax.checkpoint")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if checkpointer == "CheckpointManager":
        with ocp.CheckpointManager(folder) as manager:
            manager.save(0, args=ocp.args.StandardSave(jaxpp.gather(tree)))
            manager.wait_until_finished()
            return manager.restore(0, args=ocp.args.StandardRestore(like))
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder / "state", jaxpp.gather(tree))
        saver.wait_until_finished()
        return saver.restore(folder / "state", like)


def check_checkpoint(checkpointer, mesh, state, folder):
    """Checks that a gathered state is saved bit for bit, and that training goes on from it."""
    restored = save_and_restore(checkpointer, state, folder)
    chex.assert_trees_all_equal(restored, jaxpp.gather(state), strict=True)
    step = jaxpp.place(train_step(), mesh)
    batch = start()[2]
    after = [jaxpp.gather(step(*before, batch)) for before in (restored, state)]
    chex.assert_trees_all_equal(*after, strict=True)


CHECKPOINTERS = ("StandardCheckpointer", "CheckpointManager")


def serialised(params):
    """Writes the leaves to a file, and reads them back onto plain arrays."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, params)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, start()[0]))


def text(params):
    """Writes the parameters in all ways; returns nothing, for the text is the mesh's own."""
    assert all(map(len, (str(params), repr(params), eqx.tree_pformat(params))))
    assert all(f"{x}" for x in jax.tree.leaves(params))


def compared(compare):
    return lambda params: compare(params, jax.tree.map(jnp.asarray, params))


# What comes out: what comes out of the same for plain arrays, an error that names `gather`, or, of
# plain arrays on different devices, the error of JAX that names the devices.
WORKS = None
REFUSES = r"jaxpp\.gather"
DEVICES = "incompatible devices"

#: For each use what comes out on the mesh of this process, and on a remote mesh.
USES = {
    "jit": (jax.jit(lambda p: jax.tree.map(jnp.sin, p)), REFUSES, REFUSES),
    "jit of a step": (lambda p: jax.jit(train_step())(p, *start()[1:]), REFUSES, REFUSES),
    "filter_jit": (eqx.filter_jit(lambda p: jnp.sum(p["stack"])), REFUSES, REFUSES),
    "scan": (lambda p: jax.lax.scan(lambda c, w: (c, w), 0, p["stack"]), REFUSES, REFUSES),
    "jnp of all": (lambda p: jax.tree.map(jnp.isfinite, p), REFUSES, REFUSES),
    "jnp of two": (lambda p: jnp.stack([p["tied"], p["stack"][0]]), DEVICES, REFUSES),
    "device_put": (lambda p: jax.device_put(p, jax.devices()[0]), REFUSES, REFUSES),
    "device_get": (jax.device_get, WORKS, WORKS),
    "gather": (jaxpp.gather, WORKS, WORKS),
    "asarray": (lambda p: jax.tree.map(jnp.asarray, p), WORKS, WORKS),
    "array": (lambda p: jax.tree.map(jnp.array, p), WORKS, WORKS),
    "tree_equal": (compared(eqx.tree_equal), DEVICES, REFUSES),
    "norm": (optax.tree.norm, DEVICES, REFUSES),
    "norm of gathered": (lambda p: optax.tree.norm(jaxpp.gather(p)), WORKS, WORKS),
    "tree.map": (lambda p: jax.tree.map(lambda x: 2 * x, p), WORKS, REFUSES),
    "tree.map of types": (lambda p: jax.tree.map(lambda x: (x.shape, x.dtype), p), WORKS, WORKS),
    "printing": (text, WORKS, WORKS),
    "pickling": (lambda p: pickle.loads(pickle.dumps(p)), WORKS, REFUSES),
    "copy": (lambda p: jax.tree.map(copy.copy, p), WORKS, REFUSES),
    "deepcopy": (copy.deepcopy, WORKS, REFUSES),
    "chex close": (compared(chex.assert_trees_all_close), WORKS, WORKS),
    "chex equal": (compared(chex.assert_trees_all_equal), WORKS, WORKS),
    "chex shapes": (compared(chex.assert_trees_all_equal_shapes_and_dtypes), WORKS, WORKS),
    "serialise": (serialised, WORKS, WORKS),
    "shards": (lambda p: jax.tree.map(lambda x: x.addressable_shards, p), REFUSES, REFUSES),
    "eval_shape": (lambda p: jax.eval_shape(train_step(), p, *start()[1:]), WORKS, WORKS),
    "make_jaxpr": (lambda p: str(jax.make_jaxpr(loss_fn)(p, start()[2])), WORKS, WORKS),
    "filter_eval_shape": (lambda p: eqx.filter_eval_shape(loss_fn, p, start()[2]), WORKS, WORKS),
    "zeros_like": (lambda p: jax.tree.map(jnp.zeros_like, p), WORKS, WORKS),
    "optimizer.init": (OPTIMIZER.init, WORKS, WORKS),
}

#: Uses of one array, as above: of an array on two devices or a `RemoteArray`, and of a stack.
USES_OF_ONE = {
    "+": (lambda x: x + 1, WORKS, WORKS, REFUSES),
    "*": (lambda x: 2 * x, WORKS, WORKS, REFUSES),
    "[]": (lambda x: x[0], WORKS, WORKS, REFUSES),
    "divmod": (lambda x: divmod(x, 2), WORKS, WORKS, REFUSES),
    "list": (list, WORKS, WORKS, REFUSES),
    ".mean": (lambda x: x.mean(), WORKS, WORKS, REFUSES),
    ".T": (lambda x: x.T, WORKS, WORKS, REFUSES),
    ".at": (lambda x: x.at[0].set(1), WORKS, WORKS, REFUSES),
    "np.mean": (np.mean, WORKS, WORKS, REFUSES),
    "np.sum": (np.sum, WORKS, WORKS, REFUSES),
    "np.any": (np.any, WORKS, WORKS, REFUSES),
    "np.exp": (np.exp, WORKS, WORKS, WORKS),
    "np.ravel": (np.ravel, WORKS, WORKS, WORKS),
    "np.argmax": (np.argmax, WORKS, WORKS, WORKS),
    "jnp.mean": (jnp.mean, WORKS, REFUSES, REFUSES),
    "jnp.exp": (jnp.exp, WORKS, REFUSES, REFUSES),
    "lax.exp": (jax.lax.exp, WORKS, REFUSES, REFUSES),
    "jit": (jax.jit(jnp.sum), WORKS, REFUSES, REFUSES),
    "grad": (jax.grad(jnp.sum), WORKS, REFUSES, REFUSES),
    "vmap": (jax.vmap(jnp.sum), WORKS, REFUSES, REFUSES),
    "norm": (optax.tree.norm, WORKS, WORKS, REFUSES),
}
for _name, (_use, _tied, _stack, _remote) in USES_OF_ONE.items():
    USES[f"tied: {_name}"] = (lambda p, use=_use: use(p["tied"]), _tied, _remote)
    USES[f"stack: {_name}"] = (lambda p, use=_use: use(p["stack"]), _stack, _remote)


def check(use, outcome, params):
    """Checks that a use of parameters comes out as the table says."""
    if outcome is not WORKS:
        with pytest.raises((TypeError, ValueError), match=outcome):
            use(params)
        return
    plain = jax.tree.map(jnp.asarray, jax.device_get(params))
    jax.tree.map(assert_same, use(params), use(plain))


def assert_same(got, want):
    if eqx.is_array_like(want):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    else:
        assert got == want
