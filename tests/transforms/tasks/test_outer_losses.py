"""A loss over the whole batch, of what a pipeline made of it microbatch by microbatch.

The forwards of all microbatches come first, then the loss. Then a loop of forwards and backwards
follows the schedule's table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp import testing
from jaxpp._program import Run
from jaxpp.schedules import (
    DualPipe,
    ForwardOnly,
    Interleaved1F1B,
    Kind,
    OneFOneB,
    ScheduleError,
    Table,
    Task,
    ZeroBubbleH1,
)
from jaxpp.transforms.tasks import is_loop
from tests.helpers import assert_close, assert_same, mesh_of

RANKS, LAYERS, M, WIDTH = 2, 4, 4, 4
KEYS = jax.random.split(jax.random.key(0), 4)
WS = list(jax.random.normal(KEYS[0], (LAYERS, WIDTH, WIDTH)) / 2)
STATES = list(jax.random.normal(KEYS[1], (LAYERS, WIDTH)))
XS = jax.random.normal(KEYS[2], (2, 2 * M, WIDTH))


def layers(ws, states, x, num_stages):
    """The output of the layers, and the state that each hands to the next microbatch."""
    new = []
    for i, (w, state) in enumerate(zip(ws, states, strict=True)):
        x = jaxpp.pipeline_enter_stage(x) if i and i % (LAYERS // num_stages) == 0 else x
        x = jnp.tanh(x @ w + state)
        new.append(0.5 * state + 0.5 * jnp.mean(x, 0))
    return x, new


class LogSumExp:
    """An operator of the user's, whose order counts: it rounds."""

    def init(self, x):
        return jnp.full(x.shape, -jnp.inf)

    def combine(self, acc, x):
        return jnp.logaddexp(acc, x)

    def finish(self, acc, num_microbatches):
        return acc


@dataclasses.dataclass(frozen=True)
class Loss:
    """A function of a microbatch's output, how it is combined, and what becomes of it then."""

    of_slice: Callable[[Any], Any]
    reduce: Any
    outer: Callable[[Any], Any]


def contrast(y):
    """Each row is told from all other rows of the batch."""
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(4 * y @ jnp.roll(y, 1, 1).T)))


def hardest(y):
    return jnp.max(jnp.mean(y**2, -1))


LOSSES = {
    "contrastive": Loss(lambda y: y, "concat", contrast),
    "balance": Loss(lambda y: jnp.mean(jax.nn.softmax(y), 0), "mean", lambda p: jnp.sum(p * p)),
    "hardest": Loss(hardest, "max", lambda e: e),
    "operator": Loss(lambda y: jax.nn.logsumexp(y, 0), LogSumExp(), lambda e: jnp.sum(e**2)),
}


@dataclasses.dataclass(frozen=True)
class OneAtATime:
    """Not a `Schedule`: any hashable object with a table will do."""

    def table(self, num_stages, num_microbatches):
        kinds = (Kind.F, Kind.B)
        ranks = [
            tuple(Task(kind, s, m) for m in range(num_microbatches) for kind in kinds)
            for s in range(num_stages)
        ]
        return Table(tuple(ranks), num_stages, num_microbatches)


SCHEDULES: dict[str, Any] = {
    "1f1b": OneFOneB(),
    "zb_h1": ZeroBubbleH1(),
    "interleaved": Interleaved1F1B(2),
    "dualpipe": DualPipe(),
    "own": OneAtATime(),
}


def stages_of(schedule):
    return RANKS * getattr(schedule, "stages_per_rank", 1)


def value_and_grad(loss: Loss, num_stages, staged=jaxpp.wrap_forward):
    """The loss of the whole batch and its gradient, microbatch by microbatch, without a state."""

    def of_slice(ws, x):
        return loss.of_slice(layers(ws, STATES, x, num_stages)[0])

    loop = jaxpp.microbatch(staged(of_slice), M, reduce=loss.reduce)
    return jax.value_and_grad(lambda ws, x: loss.outer(loop(ws, x)))


def plain(loss: Loss):
    """The same of the whole batch at once, untransformed."""
    return jax.value_and_grad(lambda ws, x: loss.outer(loss.of_slice(layers(ws, STATES, x, 1)[0])))


def after_two_steps(grad_fn, params, place=jax.jit):
    """What two steps of gradient descent on distinct batches make."""

    def step(params, x):
        loss, grads = grad_fn(params, x)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    step, losses = place(step), []
    for x in XS:
        params, loss = step(params, x)
        losses.append(loss)
    return jax.device_get((params, losses))


def placed(shared=False):
    return lambda step: jaxpp.place(step, mesh_of(RANKS, shared))


def check(grad_fn, want, params):
    """Compares a scheduled gradient, placed, with one device to the bit, and with the plain one."""
    got = after_two_steps(grad_fn, params, placed())
    assert_same(got, after_two_steps(grad_fn, params, placed(shared=True)))
    assert_close(got, after_two_steps(grad_fn, params))
    assert_close(got, after_two_steps(want, params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [
        ("contrastive", "1f1b"),
        ("contrastive", "dualpipe"),
        ("contrastive", "own"),
        ("balance", "zb_h1"),
        ("hardest", "interleaved"),
        ("hardest", "dualpipe"),
        ("operator", "zb_h1"),
        ("operator", "dualpipe"),
    ],
)
def test_a_loss_over_the_whole_batch_is_scheduled(loss, schedule):
    loss, schedule = LOSSES[loss], SCHEDULES[schedule]
    grad_fn = jaxpp.schedule(value_and_grad(loss, stages_of(schedule)), schedule)
    check(grad_fn, plain(loss), WS)


def test_the_backward_of_a_last_stage_may_read_its_input_alone():
    """As that of a linear stage does, whose forward keeps nothing."""

    def encode(ws, x):
        return jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0])) @ ws[1]

    loop = jaxpp.microbatch(jaxpp.wrap_forward(encode), M, reduce="concat")
    grad_fn = jax.value_and_grad(lambda ws, x: contrast(loop(ws, x)))
    got = placed()(jaxpp.schedule(grad_fn, OneFOneB()))(WS[:2], XS[0])
    want = jax.jit(jax.value_and_grad(lambda ws, x: contrast(encode(ws, x))))(WS[:2], XS[0])
    assert_close(jax.device_get(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_the_gradient_by_a_parameter_that_no_stage_reads(schedule):
    """The loop hands zeros through, for a temperature that the outer loss reads, and for none."""

    def of_slice(params, x):
        y, _ = layers(params["ws"], STATES, x, RANKS)
        return jnp.mean(y**2), y

    def loss(params, made):
        value, rows = made
        return value + contrast(params["temperature"] * rows)

    params = {"ws": WS, "temperature": jnp.float32(0.5), "none": jnp.float32(1)}
    loop = jaxpp.microbatch(jaxpp.wrap_forward(of_slice), M, reduce=("mean", "concat"))
    grad_fn = jax.value_and_grad(lambda params, x: loss(params, loop(params, x)))
    want = jax.value_and_grad(lambda params, x: loss(params, of_slice(params, x)))
    got = placed()(jaxpp.schedule(grad_fn, SCHEDULES[schedule]))(params, XS[0])
    assert_close(jax.device_get(got), jax.jit(want)(params, XS[0]), rtol=1e-4, atol=1e-5)


# ---- a state that a microbatch hands to the next -------------------------------------------------


def with_memory(num_stages):
    """A loss of all rows and of the last state: the gradient goes back through all microbatches."""

    def of_slice(ws, states, x):
        return layers(ws, states, x, num_stages)

    loop = jaxpp.microbatch(
        jaxpp.wrap_forward(of_slice), M, in_axes=(None, "carry", 0), reduce=("concat", "carry")
    )
    return jax.value_and_grad(lambda params, x: outer(*loop(params[0], params[1], x)))


def outer(rows, states):
    return contrast(rows) + sum(jnp.sum(state**2) for state in states)


def loop_with_memory(params, x):
    """The same by a loop of Python."""
    ws, states = params
    rows = []
    for one in jnp.split(x, M):
        y, states = layers(ws, states, one, 1)
        rows.append(y)
    return outer(jnp.concatenate(rows), states)


@pytest.mark.more
@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved"])
def test_the_gradient_goes_back_through_what_is_carried(schedule):
    """In a backward that is split, the half that others wait for reads it, and makes the next."""
    schedule = SCHEDULES[schedule]
    grad_fn = jaxpp.schedule(with_memory(stages_of(schedule)), schedule)
    check(grad_fn, jax.value_and_grad(loop_with_memory), (WS, STATES))


def test_a_gradient_through_what_is_carried_has_one_direction():
    grad_fn = jaxpp.schedule(with_memory(RANKS), DualPipe())
    with pytest.raises(ScheduleError, match="in 2 directions, .*test_outer_losses.py.* in order"):
        jax.eval_shape(grad_fn, (WS, STATES), XS[0])


# ---- what runs when ------------------------------------------------------------------------------


def test_all_forwards_come_before_the_loss_and_the_table_after_it():
    schedule = OneFOneB()
    grad_fn = jaxpp.schedule(value_and_grad(LOSSES["contrastive"], RANKS), schedule)
    lowered = placed()(grad_fn).lower(WS, XS[0])
    tables = [s.table(RANKS, M) for s in (ForwardOnly(like=schedule), schedule)]
    for rank, program in enumerate(lowered.programs):
        labels = [i.label for i in program.instructions if isinstance(i, Run)]
        ran = [label for label in labels if "." in label]
        assert ran == [str(task) for table in tables for task in table.ranks[rank]]
    # The outputs of the first loop, and their cotangents, stay on the rank of the last stage.
    assert testing.count_sends(lowered) == testing.count_sends(lowered, "edge") == 3 * M


@pytest.mark.more
def test_it_may_be_vmapped():
    grad_fn = jaxpp.schedule(value_and_grad(LOSSES["hardest"], RANKS), OneFOneB())
    ws = jax.tree.map(lambda w: jnp.stack([w, -w]), WS)
    over = (0, None)
    got = placed()(jax.vmap(grad_fn, over))(ws, XS[0])
    want = jax.jit(jax.vmap(plain(LOSSES["hardest"]), over))(ws, XS[0])
    assert_close(jax.device_get(got), want, rtol=1e-4, atol=1e-5)


# ---- loops of the same kind ----------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("times", [1, 2])
def test_what_the_user_checkpoints_is_computed_again_in_its_backward(times):
    def checkpointed(fun):
        staged = jaxpp.wrap_forward(fun)
        for _ in range(times):
            staged = jax.checkpoint(staged)
        return staged

    loss = LOSSES["contrastive"]
    grad_fn = jaxpp.schedule(value_and_grad(loss, RANKS, checkpointed), OneFOneB())
    loops = [e for e in jax.make_jaxpr(grad_fn)(WS, XS[0]).eqns if is_loop(e)]
    tasks = [[task.params for task in e.params["body"].eqns] for e in loops]
    again = [{str(p["key"]) for p in own if p["recomputes"]} for own in tasks]
    assert again == [set(), {"B0", "B1"}]
    got = placed()(grad_fn)(WS, XS[0])
    assert_close(jax.device_get(got), plain(loss)(WS, XS[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["zb_h1", "dualpipe"])
def test_what_no_stage_makes_is_read_by_all_in_slices_and_cannot_be_carried(schedule):
    """Each microbatch counts less than the one before, in every stage."""

    def of_slice(scale, ws, states, x):
        scales = [scale * state for state in states]
        return jnp.mean(layers(ws, scales, x, RANKS)[0] ** 2)

    staged = jax.value_and_grad(jaxpp.wrap_forward(of_slice), 1)

    def carrying(ws, scale, x):
        return staged(scale, ws, STATES, x), 0.5 * scale

    loop = jaxpp.microbatch(carrying, M, in_axes=(None, "carry", 0), reduce=("mean", "carry"))
    with pytest.raises(ValueError, match="compute for all of them before, and give it in slices"):
        jaxpp.schedule(loop, SCHEDULES[schedule])(WS, jnp.ones(()), XS[0])

    def sliced(ws, scale, x):
        return staged(scale[0], ws, STATES, x)

    loop = jaxpp.microbatch(sliced, M, in_axes=(None, 0, 0))
    grad_fn = jaxpp.schedule(loop, SCHEDULES[schedule])

    def want(ws, scales, x):
        def mean(ws):
            parts = zip(scales, jnp.split(x, M), strict=True)
            return sum(of_slice(scale, ws, STATES, part) for scale, part in parts) / M

        return jax.value_and_grad(mean)(ws)

    args = WS, 0.5 ** jnp.arange(M), XS[0]
    assert_close(jax.device_get(placed()(grad_fn)(*args)), jax.jit(want)(*args))


def test_a_carry_that_both_halves_of_a_backward_read():
    """A scale of the loss that follows the gradients of the last stage."""

    def of_slice(ws, x):
        return jnp.mean(layers(ws, STATES, x, RANKS)[0] ** 2)

    def scaled(loss):
        def one(ws, scale, x):
            value, pullback = jax.vjp(lambda ws: loss(ws, x), ws)
            grads = jax.tree.map(lambda g: g / scale, pullback(scale)[0])
            return (value, grads), scale / (1 + jnp.sum(grads[-1] ** 2))

        return one

    def want(ws, scale, x):
        results = []
        for part in jnp.split(x, M):
            result, scale = scaled(of_slice)(ws, scale, part)
            results.append(result)
        return jax.tree.map(lambda *xs: sum(xs) / M, *results), scale

    staged = scaled(jaxpp.wrap_forward(of_slice))
    loop = jaxpp.microbatch(staged, M, in_axes=(None, "carry", 0), reduce=("mean", "carry"))
    args = WS, jnp.float32(2), XS[0]
    got = placed()(jaxpp.schedule(loop, ZeroBubbleH1()))(*args)
    assert_close(jax.device_get(got), jax.jit(want)(*args))
