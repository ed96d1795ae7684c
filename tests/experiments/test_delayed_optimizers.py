"""What feeding back adds to updates, and the table that the script prints."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from experiments import delayed_optimizers
from tests.scripts import load_script


def test_feedback_adds_the_newest_update_to_the_sum_of_all():
    optimizer = optax.adamw(1e-2)
    corrected = delayed_optimizers.with_feedback(optimizer)
    params = jnp.arange(4.0)
    states = optimizer.init(params), corrected.init(params)
    plain, fed_back = [], []
    for key in jax.random.split(jax.random.key(0), 5):
        grads = jax.random.normal(key, (4,))
        update, plain_state = optimizer.update(grads, states[0], params)
        other, corrected_state = corrected.update(grads, states[1], params)
        states = plain_state, corrected_state
        plain.append(update)
        fed_back.append(other)
        chex.assert_trees_all_close(sum(fed_back), sum(plain) + plain[-1], rtol=1e-5, atol=1e-7)


def test_delays_cost_and_feedback_gives_back(capsys):
    script = load_script("experiments.delayed_optimizers")
    script.main(optimizers=["adamw"], rates=["0.01"], steps=300, seeds=2)
    row = capsys.readouterr().out.splitlines()[-1]
    name, rate, *found = (cell.strip() for cell in row.strip("|").split("|"))
    without, delayed, corrected = map(float, found)
    assert (name, rate) == ("adamw", "0.01")
    assert without < corrected < delayed


def test_a_delay_is_that_of_the_gradients():
    """The second step of a delayed run reads the weights of the first."""
    first, delayed = (
        delayed_optimizers.losses(optax.sgd(0.1), delay, steps=3, seeds=1)[0] for delay in (0, 1)
    )
    assert float(first[0]) == pytest.approx(float(delayed[0]))
    assert float(first[1]) != pytest.approx(float(delayed[1]), rel=1e-6)
