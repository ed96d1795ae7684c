"""The GPT of the experiments is a causal language model that learns."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from experiments.models import gpt, sliced_gpt
from jaxpp._program import Run
from jaxpp.schedules import Seq1F1B
from tests.helpers import assert_close

CONTEXT = 12
WIDTH = 16
SETTINGS: dict[str, Any] = dict(layers=1, width=WIDTH, heads=2, context=CONTEXT)


def make_shapes(**overrides):
    """A model with shapes and dtypes in place of arrays."""
    return eqx.filter_eval_shape(gpt.GPT, **(SETTINGS | overrides), key=jax.random.key(0))


def arrays_of(model):
    return [x for x in jax.tree.leaves(model) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]


@functools.cache
def make_model():
    """The one model whose arrays the tests share: to draw them takes the longest."""
    return eqx.filter_jit(gpt.GPT)(**SETTINGS, key=jax.random.key(0))


def with_dropout(model, probability):
    def probabilities(model):
        return [model.dropout.p, *(block.dropout.p for block in model.blocks)]

    return eqx.tree_at(probabilities, model, replace_fn=lambda _: probability)


def tied(model):
    return eqx.tree_at(lambda model: model.head, model, None)


def random_tokens(*shape):
    return jnp.asarray(np.random.default_rng(1).integers(gpt.NUM_BYTES, size=shape), jnp.int32)


def logits_of(model, tokens, key=None):
    return np.asarray(_logits(model, tokens, key))


@eqx.filter_jit
def _logits(model, tokens, key):
    return model(tokens, key=key)


@pytest.mark.parametrize("variant", [lambda model: model, tied], ids=["untied", "tied"])
def test_a_later_byte_does_not_change_earlier_logits(variant):
    model, tokens = variant(make_model()), random_tokens(CONTEXT)
    before = logits_of(model, tokens)
    for position in range(CONTEXT):
        changed = tokens.at[position].set((tokens[position] + 1) % gpt.NUM_BYTES)
        after = logits_of(model, changed)
        np.testing.assert_array_equal(before[:position], after[:position])
        assert np.all(np.any(before[position:] != after[position:], axis=-1))


def test_the_loss_is_the_mean_over_sequences_and_positions():
    model, tokens = make_model(), random_tokens(3, CONTEXT + 1)
    logits = np.stack([logits_of(model, sequence[:-1]) for sequence in tokens])
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(
        log_probabilities, np.asarray(tokens)[:, 1:, None], axis=-1
    ).mean()
    np.testing.assert_allclose(eqx.filter_jit(gpt.loss_fn)(model, tokens), expected, rtol=1e-5)
    assert abs(expected - np.log(gpt.NUM_BYTES)) < 0.5  # an untrained model knows nothing


def test_dropout_is_decided_by_the_key_of_each_sequence():
    model = with_dropout(make_model(), 0.5)
    tokens = jnp.broadcast_to(random_tokens(CONTEXT), (3, CONTEXT))
    first, second = jax.random.split(jax.random.key(2))
    keys = jnp.stack([first, second, first])
    logits = np.asarray(jax.jit(jax.vmap(lambda x, key: model(x, key=key)))(tokens, keys))
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.array_equal(logits[0], logits[1])


def test_nothing_is_dropped_without_a_key_or_without_dropout():
    tokens, key = random_tokens(CONTEXT), jax.random.key(3)
    expected = logits_of(make_model(), tokens)
    np.testing.assert_array_equal(logits_of(with_dropout(make_model(), 0.5), tokens), expected)
    np.testing.assert_array_equal(logits_of(make_model(), tokens, key), expected)


def test_a_tied_model_has_one_matrix_less():
    sizes = [sum(x.size for x in arrays_of(make_shapes(tied=t))) for t in (False, True)]
    assert sizes[0] - sizes[1] == gpt.NUM_BYTES * WIDTH


def test_a_tied_embedding_learns_from_both_its_uses():
    tokens = jnp.full((1, CONTEXT + 1), 7)
    gradient = eqx.filter_jit(eqx.filter_grad(gpt.loss_fn))(tied(make_model()), tokens)
    # As the input only byte 7 is used; as the output, all bytes are.
    assert np.any(np.asarray(gradient.embed.weight), axis=1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_and_logits_have_the_dtype_and_the_loss_is_float32(dtype):
    model, tokens = make_shapes(dtype=dtype), random_tokens(2, CONTEXT + 1)
    assert {x.dtype for x in arrays_of(model)} == {jnp.dtype(dtype)}
    assert eqx.filter_eval_shape(model, tokens[0, :-1]).dtype == dtype
    assert eqx.filter_eval_shape(gpt.loss_fn, model, tokens).dtype == jnp.float32


def test_the_loss_falls():
    model, tokens = make_model(), random_tokens(4, CONTEXT + 1)
    optimizer = optax.adam(2e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state):
        loss, grads = eqx.filter_value_and_grad(gpt.loss_fn)(model, tokens)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(30):
        model, opt_state, loss = step(model, opt_state)
        losses.append(float(loss))
    assert losses[0] > 5 and losses[-1] < 2.5


def test_blocks_have_paths():
    paths = jax.tree_util.tree_flatten_with_path(make_shapes(layers=2))[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    assert "blocks.1.attention.qkv.weight" in names


def test_heads_must_divide_width():
    with pytest.raises(ValueError, match="width=16 and heads=3"):
        make_shapes(heads=3)


def sliced(slices, groups):
    return functools.partial(sliced_gpt.loss_fn, slices=slices, groups=groups)


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_slices_of_a_sequence_give_the_loss_of_the_whole(slices):
    model, tokens = make_model(), random_tokens(2, CONTEXT + 1)
    whole = eqx.filter_jit(eqx.filter_value_and_grad(gpt.loss_fn))(model, tokens)
    parts = eqx.filter_jit(eqx.filter_value_and_grad(sliced(slices, 1)))(model, tokens)
    assert_close(parts, whole)


def test_slices_form_the_stages_of_the_sequence_schedule():
    model, tokens = make_shapes(layers=2), random_tokens(4, CONTEXT + 1)
    grad_fn = eqx.filter_value_and_grad(jaxpp.wrap_forward(sliced(3, 2)))
    grad_fn = jaxpp.microbatch(grad_fn, 2, in_axes=(None, 0))
    schedule = Seq1F1B(slices=3)
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    lowered = jaxpp.place(jaxpp.schedule(grad_fn, schedule), mesh).lower(model, tokens)
    order = [str(task) for task in schedule.table(6, 2).ranks[0]]
    labels = [i.label for i in lowered.programs[0].instructions if isinstance(i, Run)]
    assert [label for label in labels if label[0] in "FB"] == order
    # Hidden features go from rank to rank and nothing else: no keys, values, or bytes.
    sent = {aval.shape for p in lowered.programs for s in p.sends for aval in s.message.avals}
    assert {shape for shape in sent if len(shape) > 1} <= {
        (2, CONTEXT // 3, WIDTH),
        (CONTEXT, WIDTH),
    }


@pytest.mark.parametrize(
    ("slices", "groups", "message"),
    [(5, 1, "12 bytes do not divide into 5 slices; .* of 10"), (2, 3, "1 blocks do not make 3")],
)
def test_slices_that_do_not_fit_are_errors(slices, groups, message):
    with pytest.raises(ValueError, match=message):
        sliced(slices, groups)(make_model(), random_tokens(1, CONTEXT + 1))
