"""Random numbers do not depend on how a step is run: schedule, cut, number of ranks."""

import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp

WIDTH, LAYERS, BATCH, MICROBATCHES, RATE = 16, 4, 12, 3, 0.4

KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}
SCHEDULES = {
    "1f1b": (1, jaxpp.schedules.OneFOneB()),
    "interleaved_1f1b": (2, jaxpp.schedules.Interleaved1F1B(2)),
    "zb_h1": (1, jaxpp.schedules.ZeroBubbleH1()),
    "gpipe": (1, jaxpp.schedules.GPipe()),
}


def per_microbatch(make_key):
    """A key for each microbatch, split for the layers."""

    def draw(keys):
        return jax.random.split(keys[0], LAYERS)

    return draw, (jax.random.split(make_key(1), MICROBATCHES),), (0,)


def folded(make_key):
    """One key, folded with the number of the microbatch and of the layer."""

    def draw(key, index):
        own = jax.random.fold_in(key, index[0])
        return [jax.random.fold_in(own, layer) for layer in range(LAYERS)]

    return draw, (make_key(1), jnp.arange(MICROBATCHES)), (None, 0)


def per_layer(make_key):
    """A key for each layer, folded with the number of the microbatch."""

    def draw(keys, index):
        return [jax.random.fold_in(keys[layer], index[0]) for layer in range(LAYERS)]

    return draw, (jax.random.split(make_key(1), LAYERS), jnp.arange(MICROBATCHES)), (None, 0)


def per_example(make_key):
    """A key for each example, split for the layers; drawn by `vmap`."""

    def draw(keys):
        return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, LAYERS))(keys), 0, 1)

    return draw, (jax.random.split(make_key(1), BATCH),), (0,)


STYLES = {f.__name__: f for f in (per_microbatch, folded, per_layer, per_example)}


def draw_mask(key, shape, style: str):
    if style == "per_example":
        return jax.vmap(lambda k: jax.random.bernoulli(k, 1 - RATE, shape[1:]))(key)
    return jax.random.bernoulli(key, 1 - RATE, shape)


def make_params():
    return [
        jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5
        for k in jax.random.split(jax.random.key(0), LAYERS)
    ]


X = jax.random.normal(jax.random.key(2), (BATCH, WIDTH))


def make_loss(draw, style: str, cuts=()):
    """A loss whose layers drop features, and the masks that they used."""

    def loss(params, x, *random):
        masks = []
        for layer, key in enumerate(draw(*random)):
            if layer in cuts:
                x = jaxpp.pipeline_enter_stage(x)
            masks.append(draw_mask(key, x.shape, style))
            x = x + jnp.where(masks[-1], jnp.tanh(x @ params[layer]) / (1 - RATE), 0.0)
        return jnp.mean(x**2), masks

    return loss


REDUCE = (("mean", "concat"), "mean")


def run(style: str, keys: str, schedule: str | None = None, ranks: int = 2, cuts=None):
    """Loss, masks and gradients: of the plain loop, or scheduled and placed."""
    draw, random, axes = STYLES[style](KEYS[keys])
    options: Any = dict(in_axes=(None, 0, *axes), reduce=REDUCE)
    if schedule is None:
        fun = jax.value_and_grad(make_loss(draw, style), has_aux=True)
        return jax.jit(jaxpp.microbatch(fun, MICROBATCHES, **options))(make_params(), X, *random)
    stages_per_rank, order = SCHEDULES[schedule]
    stages = ranks * stages_per_rank
    if cuts is None:
        cuts = tuple(LAYERS // stages * s for s in range(1, stages))
    loss = make_loss(draw, style, cuts)
    if not cuts:
        loss = jaxpp.split_stages(loss, stages)
    fun = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    fun = jaxpp.schedule(jaxpp.microbatch(fun, MICROBATCHES, **options), order)
    step = jaxpp.place(fun, jaxpp.MpmdMesh((ranks,)))
    return step(make_params(), X, *random)


plain = functools.cache(run)

DEFAULT = {
    ("per_microbatch", "typed", "1f1b"),
    ("per_microbatch", "raw", "zb_h1"),
    ("folded", "typed", "interleaved_1f1b"),
    ("folded", "raw", "1f1b"),
    ("per_layer", "typed", "zb_h1"),
    ("per_layer", "raw", "interleaved_1f1b"),
    ("per_example", "typed", "1f1b"),
    ("per_example", "raw", "1f1b"),
}
MATRIX = [
    pytest.param(*config, marks=[] if config in DEFAULT else [pytest.mark.slow])
    for config in itertools.product(STYLES, KEYS, SCHEDULES)
]


@pytest.mark.parametrize(("style", "keys", "schedule"), MATRIX)
def test_dropout_is_the_same_for_every_schedule(style, keys, schedule):
    chex.assert_trees_all_equal(run(style, keys, schedule), plain(style, keys))


@pytest.mark.more
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        (2, (1,)),
        pytest.param(2, (3,), marks=pytest.mark.slow),
        (4, (1, 2, 3)),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, (), id="automatic"),
    ],
)
def test_dropout_is_the_same_for_every_cut_and_number_of_ranks(keys, ranks, cuts):
    got = run("folded", keys, "1f1b", ranks, cuts)
    chex.assert_trees_all_equal(got, plain("folded", keys))


@pytest.mark.parametrize("keys", KEYS)
def test_masks_are_those_drawn_by_hand(keys):
    (_, masks), _ = plain("folded", keys)
    for layer, mask in enumerate(masks):
        for i, rows in enumerate(np.split(np.asarray(mask), MICROBATCHES)):
            key = jax.random.fold_in(jax.random.fold_in(KEYS[keys](1), i), layer)
            np.testing.assert_array_equal(rows, jax.random.bernoulli(key, 1 - RATE, rows.shape))


@pytest.mark.more
@pytest.mark.parametrize("keys", KEYS)
def test_with_a_key_for_each_example_masks_are_those_of_the_whole_batch(keys):
    draw, random, _ = per_example(KEYS[keys])
    whole = jax.value_and_grad(make_loss(draw, "per_example"), has_aux=True)
    (loss, masks), gradients = whole(make_params(), X, *random)
    (got, got_masks), got_gradients = plain("per_example", keys)
    chex.assert_trees_all_equal(got_masks, masks)
    chex.assert_trees_all_close((got, got_gradients), (loss, gradients), rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_another_key_would_be_seen():
    (_, masks), _ = plain("folded", "typed")
    (_, others), _ = plain("per_layer", "typed")
    assert all((a != b).any() for a, b in zip(masks, others, strict=True))


@pytest.mark.more
@pytest.mark.parametrize("keys", KEYS)
def test_a_key_that_the_step_hands_on_stays_the_single_devices(keys):
    draw, random, axes = folded(KEYS[keys])

    def train(loss, transform):
        fun = jax.value_and_grad(transform(loss), has_aux=True)
        fun = jaxpp.microbatch(fun, MICROBATCHES, in_axes=(None, 0, *axes), reduce=REDUCE)
        if transform is jaxpp.wrap_forward:
            fun = jaxpp.schedule(fun, jaxpp.schedules.OneFOneB())

        def step(params, key, x, index):
            key, own = jax.random.split(key)
            (_, masks), gradients = fun(params, x, own, index)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), key, masks

        return step

    ours = jaxpp.place(
        train(make_loss(draw, "folded", (2,)), jaxpp.wrap_forward), jaxpp.MpmdMesh((2,))
    )
    theirs = jax.jit(train(make_loss(draw, "folded"), lambda f: f))
    got, want = (make_params(), random[0]), (make_params(), random[0])
    for _ in range(3):
        *got, masks = ours(*got, X, random[1])
        *want, wanted = theirs(*want, X, random[1])
        chex.assert_trees_all_equal((got[0], masks), (want[0], wanted))
        assert got[1].dtype == want[1].dtype
        np.testing.assert_array_equal(jax.random.key_data(got[1]), jax.random.key_data(want[1]))


@pytest.mark.parametrize("folds", ["number", "numbers"])
def test_a_key_is_folded_on_ranks_of_several_devices(folds):
    """JAX 0.10.2 refuses a `fold_in` of arrays that are typed under two meshes."""

    def masks(key):
        numbers = jnp.arange(2) if folds == "numbers" else jnp.full(2, 3)
        own = jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers)[0]
        own = jax.random.fold_in(own, 1)
        return jax.random.bernoulli(own, RATE, (WIDTH,))

    def loss(params, x):
        h = jaxpp.pipeline_enter_stage(x * params["scale"] * masks(params["key"]))
        return jnp.mean((h * masks(params["key"])) ** 2), h

    params = {"scale": jnp.full(WIDTH, 2.0), "key": jax.random.key(5)}

    def step(transform):
        def fun(params, x):
            own = lambda scale: transform(loss)({**params, "scale": scale}, x)  # noqa: E731
            return jax.value_and_grad(own, has_aux=True)(params["scale"])

        return jaxpp.microbatch(fun, 2, reduce=(("mean", "concat"), "mean"))

    x = jnp.ones((8, WIDTH))
    scheduled = jaxpp.schedule(step(jaxpp.wrap_forward), jaxpp.schedules.OneFOneB())
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    (_, got), _ = jaxpp.place(scheduled, mesh)(params, x)
    (_, want), _ = step(lambda f: f)(params, x)
    chex.assert_trees_all_equal(got, want)
