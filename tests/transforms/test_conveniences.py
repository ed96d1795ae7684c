"""`accumulate_grads` and `pipelined` are the transforms, under the names of JaxPP's users."""

import functools
import inspect
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import _spellings
from jaxpp.schedules import Eager1F1B, OneFOneB
from tests.helpers import assert_close

COUNT, SIZE, WIDTH = 4, 3, 4
PARAMS = [jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(jax.random.key(0), 2)]
STACKED = jax.random.normal(jax.random.key(1), (COUNT, SIZE, WIDTH))
FLAT = STACKED.reshape(COUNT * SIZE, WIDTH)


def loss_fn(params, x):
    """A loss with predictions, its stages marked as in the README of JaxPP."""
    for stage, w in enumerate(params):
        x = jaxpp.pipeline_enter_stage(x, f"stage_{stage}", stage)
        x = jnp.tanh(x @ w)
    return jnp.mean((x - 1) ** 2), x


def gradients_of(params):
    staged = jaxpp.wrap_forward(loss_fn)
    return functools.partial(jax.value_and_grad(staged, has_aux=True), params)


def one_by_one():
    """What `gradients_of` gives for each microbatch, plainly."""
    grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    results = [grad_fn(PARAMS, x) for x in STACKED]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def test_values_are_stacked_and_gradients_summed():
    values, grads = one_by_one()
    got = jaxpp.accumulate_grads(gradients_of(PARAMS), STACKED, schedule=OneFOneB())
    assert_close(got, (values, jax.tree.map(lambda g: g.sum(0), grads)))


@pytest.mark.parametrize(
    "order", [lambda x: x, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
def test_gradients_may_come_first(order):
    """As in the first README of JaxPP: `return grad, (loss, predictions)`; and two more leaves."""

    def microbatch_grad(x):
        (loss, predictions), grads = order(gradients_of(PARAMS))(x)
        return grads, (loss, predictions, 4, "static")

    (losses, predictions), grads = one_by_one()
    got, values = jaxpp.accumulate_grads(microbatch_grad, STACKED, schedule=OneFOneB())
    *values, fours, static = values
    assert (fours.tolist(), static) == ([4] * len(STACKED), "static")
    assert_close((got, values), (jax.tree.map(lambda g: g.sum(0), grads), [losses, predictions]))


def test_a_parameter_without_a_gradient_is_no_value():
    """Its zeros come out of no backward."""

    def fun(x):
        value, (grads, zeros) = jax.value_and_grad(
            lambda both, x: jaxpp.wrap_forward(loss_fn)(both[0], x)[0]
        )((PARAMS, jnp.ones(3)), x)
        return value, (zeros, grads)

    losses, (zeros, grads) = jaxpp.accumulate_grads(fun, STACKED, schedule=OneFOneB())
    assert losses.shape == (COUNT,) and zeros.tolist() == [0.0, 0.0, 0.0]
    assert [g.shape for g in grads] == [p.shape for p in PARAMS]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda v, g: (v, g, g), "returns 3 results, 2 of which"),
        (lambda v, g: g, "returns 1 results, 1 of which"),
        (lambda v, g: ((v, g[0].sum()), g), "returns 2 results, 2 of which"),
        (lambda v, g: v, "returns 2 results, 0 of which"),
    ],
)
def test_results_that_are_not_told_apart_need_reductions(results, message):
    def fun(x):
        return results(*gradients_of(PARAMS)(x))

    with pytest.raises(ValueError, match=f"{message}.*reduce="):
        jaxpp.accumulate_grads(fun, STACKED, schedule=OneFOneB())


@pytest.mark.parametrize("axis", [1, -1])
def test_any_axis_may_count_the_microbatches(axis):
    want = jaxpp.accumulate_grads(gradients_of(PARAMS), STACKED, schedule=OneFOneB())
    batch = jnp.moveaxis(STACKED, 0, axis)
    got = jaxpp.accumulate_grads(gradients_of(PARAMS), batch, schedule=OneFOneB(), axis=axis)
    assert_close(got, want)


def test_a_plain_batch_is_cut_into_microbatches():
    want = jaxpp.accumulate_grads(gradients_of(PARAMS), STACKED, schedule=OneFOneB())
    got = jaxpp.accumulate_grads(
        gradients_of(PARAMS), FLAT, schedule=OneFOneB(), num_microbatches=COUNT
    )
    assert_close(got, want)


def test_each_result_may_have_a_reduction_of_its_own():
    (losses, predictions), grads = one_by_one()
    got = jaxpp.accumulate_grads(
        gradients_of(PARAMS),
        STACKED,
        schedule=OneFOneB(),
        reduce=(("max", "last"), ["mean", "sum"]),
    )
    mean, total = grads[0].mean(0), grads[1].sum(0)
    assert_close(got, ((losses.max(), predictions[-1]), [mean, total]))


def test_numbers_keys_and_what_is_no_array_are_microbatches_too():
    keys = jax.random.split(jax.random.key(2), COUNT)
    batch = {"key": keys, "number": np.arange(COUNT), "name": "data"}

    def fun(part):
        assert part["name"] == "data" and part["key"].shape == part["number"].shape == ()
        x = jax.random.normal(part["key"], (SIZE, WIDTH)) + part["number"]
        return gradients_of(PARAMS)(x)

    (losses, _), _ = jaxpp.accumulate_grads(fun, batch, schedule=OneFOneB())
    plain = [
        loss_fn(PARAMS, jax.random.normal(key, (SIZE, WIDTH)) + i)[0] for i, key in enumerate(keys)
    ]
    assert_close(losses, jnp.stack(plain))


def train_step(params, batch):
    (losses, _), grads = jaxpp.accumulate_grads(gradients_of(params), batch, schedule=Eager1F1B())
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def test_a_pipelined_step_is_the_placed_one_and_donates():
    mesh = jaxpp.MpmdMesh((2,))
    step = jaxpp.pipelined(mesh=mesh, donate_argnums=0)(train_step)
    params = jax.tree.map(jnp.copy, PARAMS)
    chex.assert_trees_all_equal(
        jax.device_get(step(params, STACKED)),
        jax.device_get(jaxpp.place(train_step, mesh)(PARAMS, STACKED)),
    )
    assert all(p.is_deleted() for p in params)
    assert len(step.lower(PARAMS, STACKED).programs) == 2


def test_a_pipelined_step_may_need_the_value_of_a_number():
    step = jaxpp.pipelined(static_argnums=2)(lambda p, x, n: [train_step(p, x) for _ in range(n)])
    assert len(step(PARAMS, STACKED, 2)) == 2


def test_a_pipelined_step_needs_no_arguments():
    step = jaxpp.pipelined(train_step)
    assert_close(jax.device_get(step(PARAMS, STACKED)), jax.jit(train_step)(PARAMS, STACKED))


@pytest.mark.parametrize(
    ("batch", "axis", "message"),
    [
        ({"x": STACKED, "y": STACKED[:2]}, 0, r"differs: batch\['x'\]: 4, batch\['y'\]: 2"),
        (STACKED, 3, r"shape \(4, 3, 4\) and no axis 3"),
        ([], 0, "no array to slice"),
    ],
)
def test_a_batch_that_cannot_be_sliced_is_an_error(batch, axis, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.accumulate_grads(gradients_of(PARAMS), batch, schedule=OneFOneB(), axis=axis)


def test_a_loss_without_stages_of_its_own_is_an_error_that_says_what_to_add():
    fun = functools.partial(jax.value_and_grad(loss_fn, has_aux=True), PARAMS)
    with pytest.raises(ValueError, match="apply wrap_forward"):
        jaxpp.accumulate_grads(fun, STACKED, schedule=OneFOneB())


def test_a_mesh_is_given_by_name():
    with pytest.raises(ValueError, match="mesh is given by name"):
        jaxpp.pipelined(jaxpp.MpmdMesh((2,)))  # pyright: ignore[reportArgumentType]


def test_an_index_is_a_microbatch():
    def of_number(i):
        return gradients_of(PARAMS)(jax.lax.dynamic_index_in_dim(STACKED, i, keepdims=False))

    got = jaxpp.accumulate_grads(of_number, jnp.arange(COUNT), schedule=OneFOneB())
    assert_close(got, jaxpp.accumulate_grads(gradients_of(PARAMS), STACKED, schedule=OneFOneB()))


def test_results_of_all_kinds_leave_the_loop_as_a_tuple():
    def outputs(x):
        (loss, predictions), grads = gradients_of(PARAMS)(x)
        return grads, predictions, loss, predictions

    (losses, predictions), grads = one_by_one()
    got = jaxpp.accumulate_grads(
        outputs, STACKED, schedule=OneFOneB(), reduce=("sum", "stack", "max", "last")
    )
    total = jax.tree.map(lambda g: g.sum(0), grads)
    assert_close(got, (total, predictions, losses.max(), predictions[-1]))


def test_a_mark_after_the_last_stage_asks_for_another_rank():
    @jaxpp.wrap_forward
    def loss(w, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    @jaxpp.pipelined(mesh=jaxpp.MpmdMesh((2,)))
    def step(w, batch):
        fun = functools.partial(jax.value_and_grad(loss), w)
        return jaxpp.accumulate_grads(fun, batch, schedule=OneFOneB())

    with pytest.raises(ValueError, match="3 ranks"):
        step(PARAMS[0], STACKED)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Eager1F1B", r"use jaxpp\.schedules\.Eager1F1B, whose number of stages is read off"),
        ("Std1F1B", r"use jaxpp\.schedules\.OneFOneB\(\)"),
        ("treduce", r"use jaxpp\.accumulate_grads"),
        ("pipe_split", r"use jaxpp\.pipeline_enter_stage"),
        ("nothing_like_it", r"module 'jaxpp' has no attribute 'nothing_like_it'\.$"),
    ],
)
def test_names_of_other_systems_are_errors_that_name_ours(name, ours):
    with pytest.raises(AttributeError, match=ours):
        getattr(jaxpp, name)
    assert not hasattr(jaxpp, name)


@pytest.mark.parametrize(
    ("fun", "given", "ours"),
    [
        (jaxpp.place, dict(out_shardings=None), r"^place\(\).*'out_shardings'; use out_specs"),
        (jaxpp.place, dict(in_shardings=None), "use in_specs"),
        (jaxpp.place, dict(donate_argnames="w"), "use donate_argnums"),
        (jaxpp.pipelined, dict(static_argnames="w"), r"^pipelined\(\).*use static_argnums"),
        (jaxpp.pipelined, dict(mpmd_mesh=None), "use mesh"),
        (jaxpp.accumulate_grads, dict(batch=1, schedule=1, operation=0), "use reduce, such as"),
        (jaxpp.accumulate_grads, dict(batch=1, schedule=1, out_shardings=0), "use out_specs of"),
        (jaxpp.microbatch, dict(num_microbatches=2, out_axes=0), "use reduce"),
        (jaxpp.place, dict(nothing_like_it=0), "'nothing_like_it'$"),
    ],
)
def test_arguments_of_other_systems_are_errors_that_name_ours(fun, given, ours):
    with pytest.raises(TypeError, match=ours):
        fun(jnp.sum, **given)


def test_our_own_arguments_are_known_by_their_names():
    for fun in (jaxpp.accumulate_grads, jaxpp.microbatch, jaxpp.pipelined, jaxpp.place):
        assert not set(inspect.signature(fun).parameters) & set(_spellings._ARGUMENTS)


@pytest.mark.more
def test_a_worker_process_does_without_what_only_a_driver_needs():
    """It starts a fifth faster."""
    pytest.importorskip("ray")
    script = "import sys, jaxpp.runtime.site._process; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    there = set(done.stdout.split())
    assert "jaxpp.runtime.executor" in there
    assert not there & {"optax", "jaxpp.transforms", "jaxpp.planning", "jaxpp.certification"}
