"""Loss conventions: means, sums, weighted means, metrics, auxiliary losses of several stages."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import testing

pytestmark = pytest.mark.usefixtures("optimized")

WIDTH, LAYERS, BATCH, TIME, MICROBATCHES, RANKS = 16, 4, 12, 6, 3, 2
SCHEDULES = {
    "1f1b": (1, jaxpp.schedules.OneFOneB()),
    "interleaved_1f1b": (2, jaxpp.schedules.Interleaved1F1B(2)),
    "zb_h1": (1, jaxpp.schedules.ZeroBubbleH1()),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def make_params():
    return [
        jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5
        for k in jax.random.split(jax.random.key(0), LAYERS)
    ]


KEYS = jax.random.split(jax.random.key(1), 3)
X = jax.random.normal(KEYS[0], (BATCH, TIME, WIDTH))
Y = jax.random.randint(KEYS[1], (BATCH, TIME), 0, WIDTH)
# Of the tokens of a sequence some are padding; one microbatch (the last) has nothing else.
LENGTHS = jax.random.randint(KEYS[2], (BATCH,), 0, TIME + 1).at[-BATCH // MICROBATCHES :].set(0)
MASK = (jnp.arange(TIME) < LENGTHS[:, None]).astype(jnp.float32)


def enter(layer: int, num_stages: int, values):
    if layer > 0 and layer % (LAYERS // num_stages) == 0:
        return jaxpp.pipeline_enter_stage(values)
    return values


def token_losses(num_stages: int, params, x, y):
    """The cross-entropy of each token, and the logits."""
    for layer, w in enumerate(params):
        x = enter(layer, num_stages, x)
        x = x + jnp.tanh(x @ w)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], axis=-1)
    return -chosen[..., 0], x


def run(make, schedule: str | None, in_axes, reduce, args, *, after=lambda result: result):
    """What `after` makes of a function's gradient by microbatches: placed, or of the plain loop.

    `make(num_stages)` gives the function, whose first result is the loss and the second aux.
    """
    options = dict(in_axes=in_axes, reduce=reduce)
    if schedule is None:
        fun = jax.value_and_grad(make(1), has_aux=True)
        return jax.jit(lambda *a: after(jaxpp.microbatch(fun, MICROBATCHES, **options)(*a)))(*args)
    stages_per_rank, order = SCHEDULES[schedule]
    fun = jaxpp.wrap_forward(make(RANKS * stages_per_rank))
    fun = jaxpp.microbatch(jax.value_and_grad(fun, has_aux=True), MICROBATCHES, **options)
    fun = jaxpp.schedule(fun, order)
    step = jaxpp.place(lambda *a: after(fun(*a)), jaxpp.MpmdMesh((RANKS,)))
    assert not testing.count_sends(step.lower(*args), "gathered")
    return step(*args)


# ---- penalties ----------------------------------------------------------------------------------


@pytest.mark.more
@schedules
def test_a_penalty_on_a_parameter_of_two_stages(schedule):
    """Its gradient has three terms: one of each stage, and that of the penalty."""

    def make(num_stages):
        def loss(params, x, y):
            losses, _ = token_losses(num_stages, [*params[:-1], params[0]], x, y)
            return jnp.mean(losses) + 0.1 * jnp.sum(params[0] ** 2), ()

        return loss

    args = (make_params(), X, Y)
    got = run(make, schedule, (None, 0, 0), "mean", args)
    want = jax.jit(jax.value_and_grad(make(1), has_aux=True))(*args)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


# ---- weighted means -----------------------------------------------------------------------------


def sum_and_count(num_stages: int):
    """A sum of token losses; the number of tokens is aux."""

    def loss(params, x, y, mask):
        losses, _ = token_losses(num_stages, params, x, y)
        return jnp.sum(losses * mask), jnp.sum(mask)

    return loss


def divided(result):
    (total, count), gradients = result
    return total / count, jax.tree.map(lambda g: g / count, gradients)


@pytest.mark.more
def test_a_python_count_is_summed_over_the_microbatches():
    """A mean of all tokens, of their sum and their number, which the shape of a batch says."""

    def make(num_stages):
        def loss(params, x, y):
            x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0]))
            losses = -jax.nn.log_softmax(x @ params[1])[..., 0] * y
            return jnp.sum(losses), losses.size

        return loss

    args = (make_params()[:RANKS], X, Y)
    got = run(make, "1f1b", (None, 0, 0), "sum", args, after=divided)
    whole = divided(jax.jit(jax.value_and_grad(make(1), has_aux=True))(*args))
    chex.assert_trees_all_close(got, whole, rtol=1e-5, atol=1e-6)


def share_of_the_batch(num_stages: int):
    """A sum of token losses over the number of tokens in the whole batch, which is an argument."""

    def loss(params, count, x, y, mask):
        losses, _ = token_losses(num_stages, params, x, y)
        return jnp.sum(losses * mask) / count, ()

    return loss


def weighted_mean(recipe: str, schedule: str | None):
    params = make_params()
    if recipe == "divide-after":
        args, axes = (params, X, Y, MASK), (None, 0, 0, 0)
        return run(sum_and_count, schedule, axes, "sum", args, after=divided)
    args, axes = (params, jnp.sum(MASK), X, Y, MASK), (None, None, 0, 0, 0)
    return run(
        share_of_the_batch,
        schedule,
        axes,
        "sum",
        args,
        after=lambda result: (result[0][0], result[1]),
    )


@functools.cache
def whole_weighted_mean():
    def loss(params):
        losses, _ = token_losses(1, params, X, Y)
        return jnp.sum(losses * MASK) / jnp.sum(MASK)

    return jax.value_and_grad(loss)(make_params())


@pytest.mark.parametrize(
    ("recipe", "schedule"),
    [
        ("divide-after", "1f1b"),
        ("divide-after", "interleaved_1f1b"),
        ("divide-after", "zb_h1"),
        ("divide-before", "1f1b"),
        pytest.param("divide-before", "interleaved_1f1b", marks=pytest.mark.slow),
        pytest.param("divide-before", "zb_h1", marks=pytest.mark.slow),
    ],
)
def test_a_weighted_mean_is_that_of_the_whole_batch(recipe, schedule):
    got = weighted_mean(recipe, schedule)
    chex.assert_trees_all_close(got, whole_weighted_mean(), rtol=1e-5, atol=1e-6)
    if recipe == "divide-before":  # where XLA divides by a scalar, it may multiply by the inverse
        chex.assert_trees_all_equal(got, weighted_mean(recipe, None))


def test_a_mean_of_means_is_not():
    def loss(params, x, y, mask):
        losses, _ = token_losses(1, params, x, y)
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    got = jaxpp.microbatch(loss, MICROBATCHES, in_axes=(None, 0, 0, 0))(make_params(), X, Y, MASK)
    assert abs(float(got) - float(whole_weighted_mean()[0])) > 0.01


def test_a_differentiated_sum_gives_the_same():
    def total(params):
        summed = jaxpp.microbatch(
            sum_and_count(1), MICROBATCHES, in_axes=(None, 0, 0, 0), reduce="sum"
        )
        return summed(params, X, Y, MASK)

    (value, count), gradients = jax.value_and_grad(total, has_aux=True)(make_params())
    got = divided(((value, count), gradients))
    chex.assert_trees_all_close(got, whole_weighted_mean(), rtol=1e-5, atol=1e-6)


# ---- means, sums, metrics -----------------------------------------------------------------------


def with_metrics(reduction, num_stages: int):
    def loss(params, x, y):
        losses, logits = token_losses(num_stages, params, x, y)
        metrics = {
            "correct": jnp.sum(jnp.argmax(logits, axis=-1) == y),
            "per_example": losses.mean(axis=1),
            "worst": losses.max(),
            "bytes": jnp.int32(2**24 + 1),
        }
        return reduction(losses), metrics

    return loss


METRICS = {"correct": "sum", "per_example": "concat", "worst": "max", "bytes": "sum"}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if quick else pytest.mark.slow)
        for kind in ("mean", "sum")
        for schedule in SCHEDULES
        for quick in [(kind == "mean") == (schedule == "interleaved_1f1b")]
    ],
)
def test_means_and_sums_with_metrics(kind, schedule):
    reduction = {"mean": jnp.mean, "sum": jnp.sum}[kind]
    make = functools.partial(with_metrics, reduction)
    args, axes = (make_params(), X, Y), (None, 0, 0)
    got = run(make, schedule, axes, ((kind, METRICS), kind), args)
    chex.assert_trees_all_equal(got, run(make, None, axes, ((kind, METRICS), kind), args))
    want = jax.value_and_grad(make(1), has_aux=True)(*args)
    want[0][1]["bytes"] = jnp.int32(MICROBATCHES * (2**24 + 1))  # no float32 could count so far
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    assert 0 < int(got[0][1]["correct"]) < BATCH * TIME


# ---- several stages -----------------------------------------------------------------------------


def with_auxiliary_losses(num_stages: int):
    """Each layer adds a penalty on its activations to the loss, and reports it."""

    def loss(params, x, y):
        penalties, total, ones = [], jnp.zeros(()), jnp.zeros(())
        for layer, w in enumerate(params):
            x, total, ones = enter(layer, num_stages, (x, total, ones))
            x = x + jnp.tanh(x @ w)
            penalties.append(jnp.mean(x**2))
            total = total + penalties[-1]
            ones = ones + jnp.mean(x > 0)
        main = -jnp.mean(jax.nn.log_softmax(x)[..., 0] * y)
        # Truncated in each microbatch: the sum is no sum of the stages' parts.
        return main + 0.1 * total, {"each": penalties, "ones": ones.astype(jnp.int32)}

    return loss


@pytest.mark.more
@schedules
def test_auxiliary_losses_of_several_stages(schedule):
    args, axes = (make_params(), X, Y), (None, 0, 0)
    reduce = (("mean", {"each": "mean", "ones": "sum"}), "mean")
    got = run(with_auxiliary_losses, schedule, axes, reduce, args)
    chex.assert_trees_all_equal(got, run(with_auxiliary_losses, None, axes, reduce, args))
    (loss, aux), gradients = jax.value_and_grad(with_auxiliary_losses(1), has_aux=True)(*args)
    chex.assert_trees_all_close(
        (got[0][0], got[0][1]["each"], got[1]), (loss, aux["each"], gradients), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_less(0, got[0][1]["ones"])


@pytest.mark.more
def test_each_stages_metric_stays_on_its_rank():
    def loss(params, x):
        h = jnp.tanh(x @ params[0])
        first = jnp.mean(h, axis=(1, 2))
        h = jaxpp.pipeline_enter_stage(h)
        return jnp.mean((h @ params[1]) ** 2), {"first": first, "last": jnp.mean(h, axis=(1, 2))}

    fun = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    fun = jaxpp.microbatch(fun, MICROBATCHES, reduce=(("mean", "concat"), "mean"))
    fun = jaxpp.schedule(fun, jaxpp.schedules.OneFOneB())
    step = jaxpp.place(fun, jaxpp.MpmdMesh((RANKS,)))
    params = make_params()[:2]
    lowered = step.lower(params, X)
    assert testing.count_sends(lowered) == testing.count_sends(lowered, "edge") == 2 * MICROBATCHES
    chex.assert_trees_all_close(
        step(params, X)[0][1], jax.jit(loss)(params, X)[1], rtol=1e-5, atol=1e-6
    )
