"""A table of two directions has each stage on two ranks, and gives the same results."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import testing
from jaxpp._program import Run
from jaxpp.schedules import ForwardOnly, Kind, Schedule, ScheduleError, Task
from tests.helpers import assert_same, mesh_of

RANKS, M = 4, 6


@dataclasses.dataclass(frozen=True)
class BothWays(Schedule):
    """The first half of the microbatches goes down the ranks, the other half up: GPipe twice.

    With `split`, the backwards of the second half are in halves, and the others whole.
    """

    split: bool = False

    def placement(self, num_ranks):
        down = tuple(range(num_ranks))
        return (down, down[::-1])

    def direction_of(self, num_ranks, num_microbatches):
        return [int(i >= num_microbatches // 2) for i in range(num_microbatches)]

    def orders(self, num_ranks, num_microbatches):
        half = num_microbatches // 2
        for rank in range(num_ranks):
            stages = [rank] * half + [num_ranks - 1 - rank] * (num_microbatches - half)
            order = [Task(Kind.F, s, i) for i, s in enumerate(stages)]
            for i, s in enumerate(stages):
                halves = (Kind.I, Kind.W) if self.split and i >= half else (Kind.B,)
                order += [Task(kind, s, i) for kind in halves]
            yield order


WS = list(jax.random.normal(jax.random.key(0), (RANKS, 4, 4)) / 2)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
BOTH = pytest.mark.parametrize("schedule", [BothWays(), BothWays(split=True)], ids=str)


def data(step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1 + step), (12, 4))


def loss_fn(ws, x):
    """Four layers, the last of which reads the first one's weight too; rows as an extra output."""
    rows = x
    for i, w in enumerate([*ws[:-1], ws[-1] + ws[0].T]):
        rows = jaxpp.pipeline_enter_stage(rows) if i else rows
        rows = jnp.tanh(rows @ w)
    return jnp.mean(rows**2), rows


def largest(ws, x):
    return jnp.max(jnp.abs(loss_fn(ws, x)[1]))


def step_of(grad_fn):
    def step(ws, opt_state, x):
        (loss, rows), grads = grad_fn(ws, x)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, ws)
        return optax.apply_updates(ws, updates), opt_state, loss, rows

    return step


GRAD = jax.value_and_grad(loss_fn, has_aux=True)


def scheduled(schedule, rows="concat"):
    staged = jax.value_and_grad(jaxpp.wrap_forward(loss_fn), has_aux=True)
    grad_fn = jaxpp.microbatch(staged, M, reduce=(("mean", rows), "mean"))
    return jaxpp.schedule(grad_fn, schedule)


def after_three_steps(step) -> Any:
    ws, opt_state = WS, OPTIMIZER.init(WS)
    for i in range(3):
        ws, opt_state, loss, rows = step(ws, opt_state, data(i))
    return ws, opt_state, loss, rows


@BOTH
def test_the_step_is_that_of_one_device(schedule):
    step = step_of(scheduled(schedule))
    placed = after_three_steps(jaxpp.place(step, mesh_of(RANKS)))
    shared = after_three_steps(jaxpp.place(step, mesh_of(RANKS, shared=True)))
    assert_same(placed, shared)
    plain = after_three_steps(jax.jit(step_of(GRAD)))
    unplaced = after_three_steps(jax.jit(step))
    for other in (plain, unplaced):
        chex.assert_trees_all_close(jax.device_get(placed), jax.device_get(other), atol=1e-6)


@BOTH
def test_both_copies_of_a_stage_hold_the_same(schedule):
    ws, opt_state, *_ = after_three_steps(jaxpp.place(step_of(scheduled(schedule)), mesh_of(RANKS)))
    moments = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.shape == WS[0].shape]
    assert len(moments) == 2 * RANKS
    for stage, tree in enumerate(zip(ws, moments[:RANKS], moments[RANKS:], strict=True)):
        for leaf in tree:
            # The first weight is read by the last stage as well, which is on the same two ranks.
            assert {d.id for d in leaf.sharding.device_set} == {stage, RANKS - 1 - stage}
            one, other = (np.asarray(shard.data) for shard in leaf.addressable_shards)
            np.testing.assert_array_equal(one, other)


@BOTH
def test_gradients_are_summed_once_a_step_and_no_parameter_moves(schedule):
    lowered = jaxpp.place(step_of(scheduled(schedule)), mesh_of(RANKS)).lower(
        WS, OPTIMIZER.init(WS), data(0)
    )
    testing.assert_no_transfers_of(lowered, WS)
    testing.assert_no_transfers_of(lowered, 1)
    assert testing.count_sends(lowered, "edge") == 2 * (RANKS - 1) * M
    # Two ranks of each stage exchange their parts; the tied weight has two more parts, and the
    # rows of the two directions, which leave by different ranks, are put together.
    gradients = [
        name
        for program in lowered.programs
        for send in program.sends
        for name, kind in zip(send.message.names, send.message.kinds, strict=True)
        if kind == "gradient"
    ]
    rows = sum("F3" in name for name in gradients)
    assert rows <= 2
    assert len(gradients) - rows == 2 * RANKS + 2


@BOTH
def test_a_rank_runs_the_tasks_of_both_of_its_stages(schedule):
    lowered = jaxpp.place(step_of(scheduled(schedule)), mesh_of(RANKS)).lower(
        WS, OPTIMIZER.init(WS), data(0)
    )
    table = schedule.table(RANKS, M)
    table = table.with_halves() if table.splits_backward else table
    for program, tasks in zip(lowered.programs, table.ranks, strict=True):
        assert program.stages == tuple(sorted({program.rank, RANKS - 1 - program.rank}))
        labels = [i.label for i in program.instructions if isinstance(i, Run)]
        assert [label for label in labels if label[0] in "FBIW"] == [
            str(t)
            for t in tasks
            if (t.kind, t.stage) != (Kind.I, 0)  # nothing reads its result
        ]


@pytest.mark.parametrize("rows", ["stack", "max", "sum"])
def test_other_outputs_of_the_loop_are_combined_too(rows):
    fun = scheduled(BothWays(), rows)
    want = jaxpp.microbatch(GRAD, M, reduce=(("mean", rows), "mean"))(WS, data(0))
    chex.assert_trees_all_close(jax.jit(fun)(WS, data(0)), want, atol=1e-6)
    placed = jaxpp.place(fun, mesh_of(RANKS))(WS, data(0))
    chex.assert_trees_all_close(jax.device_get(placed), jax.device_get(want), atol=1e-6)


def test_a_dropped_direction_would_be_seen():
    """The comparison above is not met by the gradients of one direction alone."""
    half = jaxpp.microbatch(GRAD, M // 2, reduce=(("mean", "concat"), "mean"))
    (_, _), want = GRAD(WS, data(0))
    (_, _), one_way = half(WS, data(0)[:6])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(one_way, want, atol=1e-6)


def test_a_loop_backwards_takes_its_slices_in_the_same_directions():
    def backwards(ws, x):
        def body(total, x):
            loss, rows = jaxpp.wrap_forward(loss_fn)(ws, x)
            return total + loss, rows

        return jax.lax.scan(body, 0.0, x.reshape(M, -1, 4), reverse=True)

    @dataclasses.dataclass(frozen=True)
    class Forwards(BothWays):
        def orders(self, num_ranks, num_microbatches):
            for order in super().orders(num_ranks, num_microbatches):
                yield [task for task in order if task.kind is Kind.F]

    fun = jaxpp.schedule(backwards, Forwards())
    want = backwards(WS, data(0))
    chex.assert_trees_all_close(jax.jit(fun)(WS, data(0)), want, atol=1e-6)
    got = jax.device_get(jaxpp.place(fun, mesh_of(RANKS))(WS, data(0)))
    chex.assert_trees_all_close(got, jax.device_get(want), atol=1e-6)


def test_a_value_carried_in_order_is_an_error():
    with pytest.raises(ScheduleError, match=r"2 directions, but the loop carries .* through F\[st"):
        jaxpp.place(scheduled(BothWays(), "last"), mesh_of(RANKS)).lower(WS, data(0))


def test_training_both_ways_and_evaluating_one_way_share_a_step():
    evaluate = jaxpp.microbatch(jaxpp.wrap_forward(largest), M, reduce="max")
    evaluate = jaxpp.schedule(evaluate, ForwardOnly())
    grad_fn = scheduled(BothWays())

    def step(ws, x):
        (loss, _), grads = grad_fn(ws, x)
        return loss, jax.tree.map(lambda w, g: w - g, ws, grads), evaluate(ws, x)

    loss, ws, most = jaxpp.place(step, mesh_of(RANKS))(WS, data(0))
    (want, _), grads = GRAD(WS, data(0))
    new = jax.tree.map(lambda w, g: w - g, WS, grads)
    got = jax.device_get((loss, ws, most))
    chex.assert_trees_all_close(got, jax.device_get((want, new, largest(WS, data(0)))), atol=1e-6)


@pytest.mark.more
def test_a_single_microbatch_takes_one_direction():
    x = data(0)
    loop = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(lambda ws, x: loss_fn(ws, x)[0])), 1
    )
    placed = jaxpp.place(jaxpp.schedule(loop, jaxpp.schedules.Chimera()), mesh_of(RANKS))
    want = jax.jit(jax.value_and_grad(lambda ws, x: loss_fn(ws, x)[0]))(WS, x)
    chex.assert_trees_all_close(jax.device_get(placed(WS, x)), jax.device_get(want), atol=1e-6)
