"""The GPT of the experiments is a causal language model that learns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models import gpt

CONTEXT = 12


def make_model(**overrides):
    settings = dict(layers=2, width=16, heads=2, context=CONTEXT, key=jax.random.key(0))
    return gpt.GPT(**(settings | overrides))


def random_tokens(*shape):
    return jax.random.randint(jax.random.key(1), shape, 0, gpt.NUM_BYTES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("position", [1, 5, CONTEXT - 1])
def test_a_later_byte_does_not_change_earlier_logits(position, tied):
    model = make_model(tied=tied)
    tokens = random_tokens(CONTEXT)
    changed = tokens.at[position].set((tokens[position] + 1) % gpt.NUM_BYTES)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:position], after[:position])
    for row in range(position, CONTEXT):
        assert not np.array_equal(before[row], after[row])


def test_a_shorter_sequence_gives_the_same_logits():
    model, tokens = make_model(), random_tokens(CONTEXT)
    np.testing.assert_allclose(model(tokens[:7]), model(tokens)[:7], rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_over_sequences_and_positions():
    model, tokens = make_model(), random_tokens(3, CONTEXT + 1)
    log_probabilities = [jax.nn.log_softmax(model(sequence[:-1])) for sequence in tokens]
    expected = -np.mean(
        [
            rows[np.arange(CONTEXT), sequence[1:]]
            for rows, sequence in zip(log_probabilities, tokens)
        ]
    )
    np.testing.assert_allclose(gpt.loss_fn(model, tokens), expected, rtol=1e-6)


def test_an_untrained_model_knows_nothing():
    loss = gpt.loss_fn(make_model(), random_tokens(4, CONTEXT + 1))
    assert abs(float(loss) - np.log(gpt.NUM_BYTES)) < 0.5


def test_dropout_is_decided_by_the_key_of_each_sequence():
    model = make_model(dropout=0.5)
    tokens = jnp.broadcast_to(random_tokens(CONTEXT), (3, CONTEXT))
    first, second = jax.random.split(jax.random.key(2))
    keys = jnp.stack([first, second, first])
    logits = jax.vmap(lambda sequence, key: model(sequence, key=key))(tokens, keys)
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.array_equal(logits[0], logits[1])


def test_without_a_key_nothing_is_dropped():
    tokens = random_tokens(CONTEXT)
    np.testing.assert_array_equal(make_model(dropout=0.5)(tokens), make_model()(tokens))


def test_without_dropout_the_key_does_not_matter():
    model, tokens = make_model(), random_tokens(CONTEXT)
    np.testing.assert_array_equal(model(tokens, key=jax.random.key(3)), model(tokens))


def count_parameters(model):
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


def test_a_tied_model_has_one_matrix_less():
    tied, untied = make_model(tied=True), make_model(tied=False)
    assert count_parameters(untied) - count_parameters(tied) == gpt.NUM_BYTES * 16


def test_a_tied_embedding_learns_from_both_its_uses():
    tokens = jnp.full((1, CONTEXT + 1), 7)
    gradient = jax.grad(lambda m: gpt.loss_fn(m, tokens), allow_int=True)
    tied = eqx.filter_grad(gpt.loss_fn)(make_model(tied=True), tokens).embed.weight
    untied = eqx.filter_grad(gpt.loss_fn)(make_model(tied=False), tokens).embed.weight
    assert np.count_nonzero(np.any(untied, axis=1)) == 1
    assert np.count_nonzero(np.any(tied, axis=1)) == gpt.NUM_BYTES


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_and_logits_have_the_dtype_and_the_loss_is_float32(dtype):
    model, tokens = make_model(dtype=dtype), random_tokens(2, CONTEXT + 1)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert {x.dtype for x in leaves} == {jnp.dtype(dtype)}
    assert model(tokens[0, :-1]).dtype == dtype
    assert gpt.loss_fn(model, tokens).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_falls(dtype):
    model = make_model(dtype=dtype, dropout=0.1, tied=True)
    tokens = random_tokens(4, CONTEXT + 1)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, opt_state, keys):
        loss, grads = eqx.filter_value_and_grad(gpt.loss_fn)(model, tokens, keys)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for key in jax.random.split(jax.random.key(4), (30, 4)):
        model, opt_state, loss = step(model, opt_state, key)
    assert float(loss) < 2.5


def test_blocks_have_paths():
    paths = jax.tree_util.tree_flatten_with_path(make_model())[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    assert "blocks.1.attention.qkv.weight" in names


def test_heads_must_divide_width():
    with pytest.raises(ValueError, match="width=16 and heads=3"):
        make_model(heads=3)
