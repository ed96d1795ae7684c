"""Equal layers are one computation on all ranks, in tasks and in updates; the rest is apart."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp._program import Run
from tests.helpers import mesh_of

STAGES, WIDTH = 4, 6
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-2))


def loss(params, x):
    x = jnp.tanh(x @ params["embed"])
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params["head"]) ** 2)


def train_step(grad_fn):
    def step(params, state, x):
        value, grads = grad_fn(params, x)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = [draw(WIDTH, WIDTH) for _ in range(3 * STAGES)]
    params = {"embed": draw(3, WIDTH), "layers": layers, "head": draw(WIDTH, 2)}
    return params, OPTIMIZER.init(params), draw(8, 3)


def placed():
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, STAGES, tolerance=0.2))
    grad = jaxpp.microbatch(jax.value_and_grad(staged), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    return jaxpp.place(train_step(grad), jaxpp.MpmdMesh((STAGES,)))


@pytest.mark.more
def test_updates_of_stages_with_equal_layers_are_one_computation():
    bundle = placed().lower(*arguments()).bundle
    runs = [[i for i in p.instructions if isinstance(i, Run)] for p in bundle.programs]
    updates = [{i.computation for i in own if i.label == "update"} for own in runs]
    sizes = [len(c.jaxpr.eqns) for c in bundle.computations]
    largest = collections.Counter(max(own, key=sizes.__getitem__) for own in updates)
    assert max(largest.values()) == 2, "the two ranks in the middle alone are equal"


# ---- tasks that differ in whole numbers ---------------------------------------------------------


def dropped(fold, ws, x, keys):
    """Each example has a key, each layer one of its own: folded, or taken from an array."""

    def run(x, key):
        own = jax.random.split(key, len(ws))
        for n, w in enumerate(ws):
            key_of = jax.random.fold_in(key, n) if fold else own[n]
            x = x + jnp.where(jax.random.bernoulli(key_of, 0.8, x.shape), jnp.tanh(x @ w), 0.0)
        return x

    return jnp.mean(jax.vmap(run)(x, keys) ** 2)


@pytest.mark.more
@pytest.mark.parametrize("fold", [False, True], ids=["an array of keys", "folded keys"])
@pytest.mark.parametrize("kind", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_stages_with_dropout_are_one_computation(fold, kind, optimized):
    ws = list(0.4 * np.random.default_rng(0).normal(size=(8, 6, 6)).astype(np.float32))
    args = ws, np.ones((8, 6), np.float32), jax.random.split(kind(1), 8)
    staged = jaxpp.wrap_forward(jaxpp.split_stages(functools.partial(dropped, fold), 4))
    looped = jaxpp.microbatch(jax.value_and_grad(staged), 4, in_axes=(None, 0, 0))
    scheduled = jaxpp.schedule(looped, jaxpp.schedules.ZeroBubbleH1())
    placed = jaxpp.place(scheduled, mesh_of(4))
    lowered = placed.lower(*args)
    names = [c.name for c in lowered.bundle.computations]
    assert [n for n in names if n[0] in "FIW"] == ["F0", "F1", "F3", "I3", "I2", "W0", "W3"]
    assert lowered.certify().exact
    got = placed(*args)
    for want in (jax.jit(scheduled)(*args), jax.jit(looped)(*args)):
        assert all(map(np.array_equal, *map(jax.tree.leaves, (jaxpp.gather(got), want))))
    assert "   stage " in jaxpp.stages_as_text(staged, *args).splitlines()[3]


@pytest.mark.more
def test_only_whole_numbers_in_which_computations_differ_become_inputs():
    def part(fun):
        jaxpr = jax.make_jaxpr(fun)(jnp.ones(4), jnp.arange(4))
        return jaxprs.Part(jaxpr, tuple(jaxpr.jaxpr.invars), tuple(jaxpr.jaxpr.outvars))

    def lifted(*funs):
        return [[n.val for n in own] for _, own in jaxprs.lift_differing(list(map(part, funs)))]

    def of(scale, add, first):
        return lambda x, n: (scale * x, 7 + add * n[first : first + 2])

    assert lifted(of(2.0, 3, 0), of(2.0, 4, 0), of(3.0, 3, 0)) == [[3], [4], []]
    assert lifted(of(2.0, 3, 0), of(2.0, 3, 2)) == [[0], [2]]
    assert lifted(of(2.0, 3, 1), of(2.0, 3, 1), of(2.0, 3, 1)) == [[], [], []]
    assert lifted(lambda x, n: x**2, lambda x, n: x**3) == [[], []]
    # A power of a float to a whole number is a product for XLA, where it knows the number.
    power = [lambda x, n, k=k: jax.lax.pow(x, k) for k in (2, 3)]
    assert lifted(*power) == [[], []]
