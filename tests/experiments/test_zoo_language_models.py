"""The zoo's language models are those that were published, and run unchanged as pipelines."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from experiments.models import gpt2, language, llama, mixtral
from jaxpp.schedules import Interleaved1F1B, OneFOneB, ZeroBubbleH1
from tests.helpers import assert_close

TIME = 8
VOCABULARY = 19
BATCH = 8
MICROBATCHES = 4
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A model's class, its loss, a tiny configuration of it, and whether it takes dropout keys."""

    model: Callable[..., Any]
    loss_fn: Callable[..., jax.Array]
    config: Any
    dropout: bool = False

    def shapes(self, layers=2, **options):
        """The model with shapes and dtypes in place of arrays."""
        config = dataclasses.replace(self.config, layers=layers)
        return eqx.filter_eval_shape(self.model, config, **options, key=jax.random.key(0))

    def make(self, layers=2):
        """The model with other values than its initial ones, which take long to compile."""
        rng = np.random.default_rng(0)

        def draw(path, shape):
            scales = "norm" in jax.tree_util.keystr(path) and path[-1].name == "weight"
            return jnp.asarray(scales + 0.3 * rng.normal(size=shape.shape), shape.dtype)

        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: draw(path, leaf) if is_shape(leaf) else leaf, self.shapes(layers)
        )

    def make_stacked(self, layers=2, remat=False):
        """The same model with its layers in one module."""
        structure = jax.tree.structure(self.shapes(layers, stacked=True, remat=remat))
        return structure.unflatten(jax.tree.leaves(stacked(self.make(layers))))

    def data(self, step):
        """Tokens and dropout keys that are others in each step."""
        tokens = np.random.default_rng(step).integers(VOCABULARY, size=(BATCH, TIME + 1))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), step), BATCH)
        return (jnp.asarray(tokens, jnp.int32), *([keys] if self.dropout else []))


def is_shape(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def stacked(model):
    """The model's tree with arrays that have an axis of layers in place of a tuple of layers."""
    blocks = jax.tree.map(
        lambda *layers: jnp.stack(layers) if eqx.is_array(layers[0]) else layers[0], *model.blocks
    )
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


LLAMA = dict(layers=2, width=16, heads=4, kv_heads=2, head_width=6, mlp_width=24)
ZOO = {
    "gpt2": Zoo(
        gpt2.GPT2, gpt2.loss_fn, gpt2.Config(2, 16, 2, TIME, VOCABULARY, dropout=0.1), dropout=True
    ),
    "llama": Zoo(llama.Llama, llama.loss_fn, llama.Config(**LLAMA, vocabulary=VOCABULARY)),
    "mistral": Zoo(
        llama.Llama, llama.loss_fn, llama.Config(**LLAMA, vocabulary=VOCABULARY, window=3)
    ),
    "mixtral": Zoo(
        mixtral.Mixtral,
        mixtral.loss_fn,
        mixtral.Config(**LLAMA, vocabulary=VOCABULARY, experts=4, balance=0.1),
    ),
}


# ---- as pipelines -------------------------------------------------------------------------------


class Opening(eqx.Module):
    """A block that opens a stage: how one annotates a model without a change to its code."""

    block: Any

    def __call__(self, x, **keywords):
        return self.block(jaxpp.pipeline_enter_stage(x), **keywords)


def by_path(loss_fn, stages):
    return jaxpp.split_stages(loss_fn, at=[f"blocks.{n}" for n in range(1, stages)])


def automatically(loss_fn, stages):
    return jaxpp.split_stages(loss_fn, num_stages=stages)


def by_annotation(loss_fn, stages):
    def annotated(model, *data):
        first, *others = model.blocks
        blocks = (first, *map(Opening, others))
        return loss_fn(eqx.tree_at(lambda model: model.blocks, model, blocks), *data)

    return jaxpp.split_stages(annotated, num_stages=stages)


CUTS = {"path": by_path, "automatic": automatically, "annotation": by_annotation}
SCHEDULES = {
    "1f1b": OneFOneB(),
    "interleaved_1f1b": Interleaved1F1B(stages_per_rank=2),
    "zb_h1": ZeroBubbleH1(),
}
# Each cut and schedule at least once, and each model here or as stacked layers; the rest is slow.
SELECTION = [
    ("llama", "annotation", "interleaved_1f1b"),
    ("mistral", "automatic", "1f1b"),
]


def product_of(selection, *values):
    """Cases for all combinations of the values, of which those not selected are slow."""
    return [
        pytest.param(*case, marks=[] if case in selection else [pytest.mark.slow])
        for case in itertools.product(*values)
    ]


def train_step_of(grad_fn):
    # Gradients that are zero but for roundings (of the keys' biases) must not become whole steps.
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))

    def train_step(model, opt_state, *data):
        loss, grads = grad_fn(model, *data)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss, grads

    return optimizer, train_step


def assert_pipeline_is_the_model(zoo, split, schedule, model):
    """Gradients, and three steps with Adam and clipping, equal those of one device."""
    axes = (None, *(0 for _ in zoo.data(0)))
    grad_fn = eqx.filter_value_and_grad(jaxpp.wrap_forward(split))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(grad_fn, MICROBATCHES, in_axes=axes), schedule)
    optimizer, train_step = train_step_of(grad_fn)
    step = jaxpp.place(train_step, jaxpp.MpmdMesh((RANKS,)), donate_argnums=(0, 1))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    jaxpp.testing.assert_computes_the_function(step, model, opt_state, *zoo.data(0))
    _, reference = train_step_of(eqx.filter_value_and_grad(zoo.loss_fn))
    # Adam divides by gradients, some of which are hardly more than their roundings.
    jaxpp.testing.assert_matches_single_device(
        step, reference, model, opt_state, data=zoo.data, steps=3, rtol=5e-5, atol=1e-6
    )


@pytest.mark.parametrize(("name", "cut", "schedule"), product_of(SELECTION, ZOO, CUTS, SCHEDULES))
def test_a_pipeline_is_the_model(name, cut, schedule):
    zoo, stages = ZOO[name], RANKS * SCHEDULES[schedule].stages_per_rank
    split = CUTS[cut](zoo.loss_fn, stages)
    assert_pipeline_is_the_model(zoo, split, SCHEDULES[schedule], zoo.make(layers=stages))


# ---- how layers are held ------------------------------------------------------------------------


def test_stacked_layers_have_the_initial_values_of_a_list():
    def make(stacked):
        return language.make_blocks(
            lambda key: eqx.nn.Linear(3, 2, key=key), 2, stacked=stacked, key=jax.random.key(0)
        )

    layers = make(stacked=False)
    assert isinstance(layers, tuple)
    expected = jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
    chex.assert_trees_all_equal(make(stacked=True), expected, strict=True)


@pytest.mark.parametrize(("name", "remat"), product_of([("gpt2", True)], ZOO, [False, True]))
def test_stacked_layers_have_the_gradients_of_a_list(name, remat):
    zoo = ZOO[name]
    grad_fn = eqx.filter_jit(eqx.filter_value_and_grad(zoo.loss_fn))
    loss, grads = grad_fn(zoo.make(), *zoo.data(0))
    actual = grad_fn(zoo.make_stacked(remat=remat), *zoo.data(0))
    chex.assert_trees_all_close(actual[0], loss, rtol=1e-6)
    assert_close(jax.tree.leaves(actual[1]), jax.tree.leaves(stacked(grads)))


@pytest.mark.parametrize(
    ("name", "remat", "schedule"),
    product_of([("mixtral", True, "zb_h1")], ZOO, [False, True], SCHEDULES),
)
def test_a_pipeline_of_stacked_layers_is_the_model(name, remat, schedule):
    zoo, stages = ZOO[name], RANKS * SCHEDULES[schedule].stages_per_rank
    model = zoo.make_stacked(5, remat)  # stages of unequal numbers of layers
    split = automatically(zoo.loss_fn, stages)
    assert_pipeline_is_the_model(zoo, split, SCHEDULES[schedule], model)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, 32])
def test_stacked_layers_make_no_longer_programs(layers):
    config = dataclasses.replace(
        gpt2.CONFIGS["gpt2_124m"],
        vocabulary=64, context=8, width=8, heads=2, layers=layers, dropout=0.0,
    )  # fmt: skip
    cuts = [f"blocks.{n * layers // 4}" for n in (1, 2, 3)]
    sizes = []
    for stacked, cut in [(True, {"num_stages": 4}), (False, {"at": cuts})]:
        model = gpt2.GPT2(config, stacked=stacked, key=jax.random.key(0))
        loss = jaxpp.wrap_forward(jaxpp.split_stages(gpt2.loss_fn, **cut))
        optimizer, step = train_step_of(
            jaxpp.schedule(
                jaxpp.microbatch(eqx.filter_value_and_grad(loss), 4, in_axes=(None, 0)), OneFOneB()
            )
        )
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        tokens = jax.ShapeDtypeStruct((8, 9), jnp.int32)
        lowered = jaxpp.place(step, jaxpp.MpmdMesh((4,))).lower(model, state, tokens)
        programs = sum(len(program.instructions) for program in lowered.programs)
        sizes.append((programs, len(lowered.bundle.computations)))
    assert sizes[0][0] <= sizes[1][0] and sizes[0][1] <= sizes[1][1], sizes


@pytest.mark.parametrize("name", product_of([("mistral",)], ZOO))
def test_the_loss_falls(name):
    zoo = ZOO[name]
    optimizer, train_step = train_step_of(eqx.filter_value_and_grad(zoo.loss_fn))
    step, model, losses = eqx.filter_jit(train_step), zoo.make_stacked(remat=True), []
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(40):
        model, opt_state, loss, _ = step(model, opt_state, *zoo.data(0))
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


# ---- the published architectures ----------------------------------------------------------------


def count(tree):
    return sum(x.size for x in jax.tree.leaves(tree) if is_shape(x))


# Of the released weights, as their model cards on huggingface.co count them.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_355m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1558m", 1_557_611_200),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("mistral_7b", 7_241_732_096),
        ("mixtral_8x7b", 46_702_792_704),
    ],
)
def test_published_configurations_have_their_published_size(name, parameters):
    module, model = {
        "g": (gpt2, gpt2.GPT2), "l": (llama, llama.Llama), "mis": (llama, llama.Llama),
        "mix": (mixtral, mixtral.Mixtral),
    }[name[:3] if name.startswith("mi") else name[0]]  # fmt: skip
    config = module.CONFIGS[name]
    shapes = eqx.filter_eval_shape(model, config, stacked=True, key=jax.random.key(0))
    assert count(shapes) == parameters
    logits = eqx.filter_eval_shape(
        lambda model, tokens: model(tokens), shapes, jnp.zeros(64, jnp.int32)
    )
    assert jax.tree.leaves(logits)[0].shape == (64, config.vocabulary)


def test_mixtral_uses_the_published_number_of_parameters_for_a_token():
    """ "Each token has access to 47B parameters, but only uses 13B" (arXiv 2401.04088, page 1)."""
    config = mixtral.CONFIGS["mixtral_8x7b"]
    idle = dataclasses.replace(config, experts=config.experts_per_token)
    shapes = eqx.filter_eval_shape(mixtral.Mixtral, idle, stacked=True, key=jax.random.key(0))
    assert round(count(shapes) / 1e9) == 13


@functools.cache
def all_logits(name, layers):
    model = ZOO[name].make(layers)

    def logits(tokens):
        out = model(tokens)
        return out[0] if isinstance(out, tuple) else out

    return jax.jit(jax.vmap(logits))


def changed_logits(name, layers):
    """[changed token, position]: whether a change of the token changes the position's logits."""
    tokens = np.asarray(ZOO[name].data(0)[0][0, :TIME])
    changed = tokens + np.diag(np.where(tokens < VOCABULARY - 1, 1, -1))
    logits = np.asarray(all_logits(name, layers)(np.stack([tokens, *changed])))
    return np.any(logits[1:] != logits[0], axis=-1)


@pytest.mark.parametrize(
    ("name", "layers", "reach"),
    [("gpt2", 1, TIME), ("llama", 1, TIME), ("mixtral", 1, TIME), ("mistral", 1, 3),
     ("mistral", 2, 5)],
)  # fmt: skip
def test_a_position_sees_its_window_of_the_past(name, layers, reach):
    """All of it, or of each layer the 3 tokens of the sliding window, itself included."""
    distance = np.arange(TIME) - np.arange(TIME)[:, None]
    np.testing.assert_array_equal(
        changed_logits(name, layers), (distance >= 0) & (distance < reach)
    )


def test_rotated_products_depend_on_the_distance_alone():
    """Equation 11 of arXiv 2104.09864, and another theta turns otherwise."""
    query, key = jax.random.normal(jax.random.key(0), (2, 6))
    everywhere = functools.partial(jnp.broadcast_to, shape=(TIME, 1, 6))

    def products(theta):
        q, k = (llama.rotate(everywhere(x), theta)[:, 0] for x in (query, key))
        return np.asarray(q @ k.T)

    for distance in range(1 - TIME, TIME):
        diagonal = np.diagonal(products(1e4), distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.diagonal(products(1e4)), query @ key, rtol=1e-5)
    assert abs(products(1e4) - products(1e6)).max() > 0.01


def test_grouped_heads_share_keys_and_values():
    config = ZOO["llama"].config
    every = dataclasses.replace(config, kv_heads=config.heads)
    grouped = llama.Attention(config, key=jax.random.key(0))

    def repeated(linear):
        weight = linear.weight.reshape(config.kv_heads, config.head_width, config.width)
        return jnp.repeat(weight, 2, axis=0).reshape(-1, config.width)

    full = eqx.tree_at(
        lambda attention: [attention.queries, attention.keys.weight, attention.values.weight,
                           attention.out],
        llama.Attention(every, key=jax.random.key(1)),
        [grouped.queries, repeated(grouped.keys), repeated(grouped.values), grouped.out],
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(2), (TIME, config.width))
    np.testing.assert_allclose(grouped(x), full(x), rtol=1e-5, atol=1e-7)


def test_a_token_is_transformed_by_its_two_best_experts():
    config = ZOO["mixtral"].config
    mixture = mixtral.MixtureOfExperts(config, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TIME, config.width))
    actual, balance = mixture(x)
    logits = np.asarray(x @ mixture.router.weight.T)
    experts = [
        jax.tree.map(lambda leaf, e=e: leaf[e] if eqx.is_array(leaf) else leaf, mixture.experts)
        for e in range(config.experts)
    ]
    for t in range(TIME):
        second, first = np.argsort(logits[t])[-2:]
        odds = np.exp(logits[t, second] - logits[t, first])
        expected = (experts[first](x[t]) + odds * experts[second](x[t])) / (1 + odds)
        np.testing.assert_allclose(actual[t], expected, rtol=1e-5, atol=1e-7)
    load = np.mean(np.argsort(np.argsort(logits)) >= config.experts - 2, axis=0)
    probability = np.mean(np.asarray(jax.nn.softmax(logits)), axis=0)
    np.testing.assert_allclose(balance, config.experts * load @ probability, rtol=1e-6)


@pytest.mark.parametrize(("choices", "expected"), [([[0, 1], [2, 3]], 2), ([[0, 1], [0, 1]], 4)])
def test_the_balance_loss_is_least_where_the_load_is_even(choices, expected):
    choices = jax.nn.one_hot(jnp.asarray(choices), 4)
    logits = 1e3 * choices.sum(axis=1)  # each token halves its probability between its experts
    np.testing.assert_allclose(mixtral.balance_loss(logits, choices), expected, rtol=1e-6)


def test_every_layer_of_a_mixtral_adds_its_balance_loss():
    zoo = ZOO["mixtral"]
    model, (tokens,) = zoo.make(), zoo.data(0)
    logits, balance = jax.vmap(model)(tokens[:, :-1])
    assert balance.shape == (BATCH, 2) and np.all(balance > 0)
    expected = language.cross_entropy(logits, tokens[:, 1:]) + 0.1 * balance.sum() / BATCH
    np.testing.assert_allclose(zoo.loss_fn(model, tokens), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_parameters_and_logits_have_the_dtype_and_the_loss_is_float32(name):
    zoo = ZOO[name]
    key = jax.random.key(0)
    model = eqx.filter_eval_shape(zoo.model, zoo.config, dtype=jnp.bfloat16, key=key)
    arrays = [x for x in jax.tree.leaves(model) if is_shape(x)]
    assert {x.dtype for x in arrays} == {jnp.dtype(jnp.bfloat16)}
    tokens = zoo.data(0)[0]
    logits = eqx.filter_eval_shape(lambda model, x: model(x), model, tokens[0, :-1])
    assert jax.tree.leaves(logits)[0].dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(zoo.loss_fn, model, *zoo.data(0)).dtype == jnp.float32


def test_gpt2_drops_what_the_key_of_a_sequence_says():
    zoo = ZOO["gpt2"]
    model, (tokens, keys) = zoo.make(), zoo.data(0)
    same = jnp.broadcast_to(tokens[0, :-1], (3, TIME))
    logits = np.asarray(jax.jit(jax.vmap(lambda x, key: model(x, key=key)))(same, keys[:3]))
    again = np.asarray(jax.jit(lambda x, key: model(x, key=key))(same[1], keys[1]))
    assert not np.array_equal(logits[0], logits[1])
    np.testing.assert_allclose(logits[1], again, rtol=1e-4, atol=1e-5)


def test_the_residual_weights_of_gpt2_start_smaller():
    block = gpt2.Block(dataclasses.replace(ZOO["gpt2"].config, layers=8), key=jax.random.key(0))
    for weight, deviation in [
        (block.up.weight, 0.02),
        (block.attention.query_proj.weight, 0.02),
        (block.down.weight, 0.005),
        (block.attention.output_proj.weight, 0.005),
    ]:
        np.testing.assert_allclose(np.std(weight), deviation, rtol=0.15)
    assert not np.any(block.up.bias)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpt2.Config(1, width=16, heads=3), "width=16 and heads=3; use width=18"),
        (lambda: llama.Config(**{**LLAMA, "kv_heads": 3}), "heads=4 and kv_heads=3"),
        (lambda: llama.Config(**{**LLAMA, "head_width": 5}), "head_width=5"),
        (lambda: mixtral.Config(**LLAMA, experts=1), "the 1 experts, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
