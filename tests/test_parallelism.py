"""A step is the same on every mesh: pipeline, data, tensor and expert parallelism, and ZeRO-1."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.models import gpt2, llama, mixtral, parallel
from jaxpp.schedules import GPipe, OneFOneB, ZeroBubbleH1, ZeroBubbleH2

TIME, VOCABULARY, BATCH, MICROBATCHES, STEPS = 8, 20, 16, 4, 3
AXES = ("mpmd", "data", "model")
MESHES = [
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1),
]  # fmt: skip
WHOLE = (2, 2, 2)

# With Adam's usual epsilon of 1e-8, its first updates are as large for a gradient that is zero but
# for roundings (that of GPT-2's key biases) as for any other, and compare nothing but roundings.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A model's class, its loss, and a tiny configuration of it."""

    model: Any
    loss_fn: Any
    config: Any

    def sized(self, layers):
        return dataclasses.replace(self.config, layers=layers)

    def make(self, layers):
        """The model with other values than its initial ones, which take long to compile."""
        rng = np.random.default_rng(0)
        shapes = eqx.filter_eval_shape(self.model, self.sized(layers), key=jax.random.key(0))

        def draw(path, leaf):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            scales = "norm" in jax.tree_util.keystr(path) and path[-1].name == "weight"
            return jnp.asarray(scales + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

        return jax.tree_util.tree_map_with_path(draw, shapes)

    def data(self, step):
        """Tokens, and for a model with dropout a key for each sequence, others in each step."""
        tokens = np.random.default_rng(step).integers(VOCABULARY, size=(BATCH, TIME + 1))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), step), BATCH)
        dropout = getattr(self.config, "dropout", 0.0)
        return (jnp.asarray(tokens, jnp.int32), *([keys] if dropout else []))


LLAMA = dict(
    layers=2, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, vocabulary=VOCABULARY
)
ZOO = {
    "gpt2": Zoo(gpt2.GPT2, gpt2.loss_fn, gpt2.Config(2, 16, 4, TIME, VOCABULARY, dropout=0.1)),
    "llama": Zoo(llama.Llama, llama.loss_fn, llama.Config(**LLAMA)),
    "mixtral": Zoo(
        mixtral.Mixtral, mixtral.loss_fn, mixtral.Config(**LLAMA, experts=4, balance=0.1)
    ),
}


def init(zoo, layers):
    model = zoo.make(layers)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def train_step_of(grad_fn):
    def train_step(model, opt_state, *data):
        loss, grads = grad_fn(model, *data)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def microbatched(zoo, loss_fn):
    in_axes = (None, *(0 for _ in zoo.data(0)))
    return jaxpp.microbatch(eqx.filter_value_and_grad(loss_fn), MICROBATCHES, in_axes=in_axes)


def trained(step, zoo, layers):
    """The state after some steps, and the loss of each."""
    state, losses = init(zoo, layers), []
    for n in range(STEPS):
        *state, loss = step(*state, *zoo.data(n))
        losses.append(np.asarray(loss))
    return state, losses


@functools.cache
def on_one_device(name, layers):
    zoo = ZOO[name]
    step = eqx.filter_jit(train_step_of(microbatched(zoo, zoo.loss_fn)))
    return trained(step, zoo, layers)


@functools.cache
def placed(name, shape, schedule, zero1, experts):
    """The step on a mesh, and the number of the model's layers."""
    zoo, ranks = ZOO[name], shape[AXES.index("mpmd")]
    layers = max(2, ranks)
    at = [f"blocks.{layers * n // ranks}" for n in range(1, ranks)]
    cut = dict(at=at) if at else dict(num_stages=1)
    staged = jaxpp.wrap_forward(jaxpp.split_stages(zoo.loss_fn, **cut))
    rules = parallel.rules("model", experts=experts)
    step = jaxpp.place(
        train_step_of(jaxpp.schedule(microbatched(zoo, staged), schedule)),
        jaxpp.MpmdMesh(shape, AXES),
        donate_argnums=(0, 1),
        in_specs=(rules, rules, *(P("data") for _ in zoo.data(0))),
        zero1=zero1,
    )
    return step, layers


def on_mesh(name, shape, schedule=OneFOneB(), zero1=(), experts=None):  # noqa: B008
    return _on_mesh(name, shape, schedule, zero1, experts)


@functools.cache
def _on_mesh(name, *options):
    step, layers = placed(name, *options)
    return trained(step, ZOO[name], layers)


def arrays_of(tree):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_close(got, want):
    """Equal up to 1e-5 of each entry, or of its array's largest."""
    for x, y in zip(arrays_of(got), arrays_of(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max(initial=0))


def assert_same_training(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert len({float(loss) for loss in want[1]}) == STEPS
    assert_close(got[0][0], want[0][0])


def selection(cases, chosen):
    """The cases as parameters of a test; those that are not chosen are slow."""
    return [
        pytest.param(*c, id=name_of(*c), marks=() if c in chosen else pytest.mark.slow)
        for c in cases
    ]


def name_of(*case):
    """Such as `gpt2-2x2x2-OneFOneB`."""
    words = []
    for part in case:
        numbers = isinstance(part, tuple) and all(isinstance(n, int) for n in part)
        if numbers:
            words.append("x".join(map(str, part)))
        else:
            parts = part if isinstance(part, tuple) else (part,)
            words += [p if isinstance(p, str) else type(p).__name__ for p in parts]
    return "-".join(word for word in words if word)


# ---- the same training on every mesh -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    selection(
        [(name, shape) for name in ZOO for shape in MESHES],
        [("gpt2", WHOLE)],
    ),
)
def test_a_training_is_that_of_one_device(name, shape):
    # GPT-2 has dropout: which features are dropped does not depend on the mesh either.
    assert_same_training(on_mesh(name, shape), on_one_device(name, max(2, shape[0])))


def test_dropout_takes_part():
    zoo = ZOO["gpt2"]
    model, (tokens, keys) = zoo.make(2), zoo.data(0)
    losses = eqx.filter_jit(jax.vmap(zoo.loss_fn, (None, None, 0)))(
        model, tokens, jnp.stack([keys, keys[::-1]])
    )
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("name", "shape", "schedules"),
    selection(
        [
            (name, shape, kind)
            for name in ZOO
            for shape in MESHES
            for kind in [(OneFOneB(), GPipe()), (ZeroBubbleH1(), ZeroBubbleH2())]
        ],
        [("gpt2", WHOLE, (OneFOneB(), GPipe()))],
    ),
)
def test_schedules_of_one_kind_agree_bitwise(name, shape, schedules):
    (first, losses), (second, others) = (on_mesh(name, shape, s) for s in schedules)
    for x, y in zip(arrays_of((first, losses)), arrays_of((second, others)), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis"),
    selection(
        [(s, a) for s in [(1, 1, 2), (2, 1, 2), (2, 2, 1), WHOLE] for a in ("model", "data")],
        [((1, 1, 2), "model")],
    ),
)
def test_experts_over_an_axis_of_choice(shape, axis):
    got = on_mesh("mixtral", shape, experts=axis)
    assert_same_training(got, on_one_device("mixtral", 2))
    weight = got[0][0].blocks[0].mixture.experts.up.weight
    parts = shape[AXES.index(axis)]
    assert {s.data.shape[0] for s in weight.addressable_shards} == {weight.shape[0] // parts}


# ---- ZeRO-1 --------------------------------------------------------------------------------------


def bytes_by_device(tree):
    """The bytes of a tree's arrays on each device; scalars, such as counts, are left out."""
    found = {}
    for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)):
        for shard in x.addressable_shards if x.ndim else ():
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


@pytest.mark.parametrize(
    ("name", "shape"),
    selection(
        [(n, s) for n in ZOO for s in [(1, 2, 1), (2, 2, 1), WHOLE, (4, 2, 1)]], [("gpt2", WHOLE)]
    ),
)
def test_zero1_divides_the_optimizer_state(name, shape):
    (model, opt_state), losses = split = on_mesh(name, shape, zero1="data")
    (whole_model, whole_opt_state), _ = on_mesh(name, shape)
    assert_same_training(split, on_one_device(name, max(2, shape[0])))
    assert bytes_by_device(model) == bytes_by_device(whole_model)
    replicas = shape[AXES.index("data")]
    whole = bytes_by_device(whole_opt_state)
    assert len(whole) == np.prod(shape)
    assert {d: n * replicas for d, n in bytes_by_device(opt_state).items()} == whole


# ---- initial values ------------------------------------------------------------------------------


@functools.cache
def initial_values(name, layers):
    return initialiser(name, layers)(jax.random.key(7))


def initialiser(name, layers):
    def make(key):
        model = ZOO[name].model(ZOO[name].sized(layers), key=key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    return make


@pytest.mark.parametrize(
    ("name", "shape", "zero1"),
    selection(
        [(n, s, z) for n in ZOO for s in MESHES for z in ((), "data")],
        [],  # tests/transforms/test_initialize_inside.py has a smaller model
    ),
)
def test_initial_values_do_not_depend_on_the_mesh(name, shape, zero1):
    step, layers = placed(name, shape, OneFOneB(), zero1, None)
    make = initialiser(name, layers)
    state = eqx.filter_eval_shape(make, jax.random.key(7))
    compiled = step.lower(*state, *ZOO[name].data(0)).compile()
    state = compiled.initialize(make, jax.random.key(7))
    for x, y in zip(arrays_of(state), arrays_of(initial_values(name, layers)), strict=True):
        np.testing.assert_array_equal(x, y)
    wanted = jax.tree.leaves(compiled.input_shardings[: len(state)])
    for x, sharding in zip(jax.tree.leaves(eqx.filter(state, eqx.is_array)), wanted, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
