"""Loops of a step overlap where they can: in the time of one table, and in the memory of each."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp._program import Run
from jaxpp.runtime.trace import dependencies_of, table_of
from jaxpp.schedules import (
    Costs,
    ForwardOnly,
    Interleaved1F1B,
    OneFOneB,
    ZeroBubbleH1,
    joined,
    simulate,
)
from jaxpp.transforms.place._join_loops import join_loops

RANKS, MICROBATCHES, STEPS = 4, 8, 3


def loss_fn(weights, x):
    for n, w in enumerate(weights):
        x = jaxpp.pipeline_enter_stage(x) if n else x
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def train_step_of(order):
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad = jaxpp.schedule(jaxpp.microbatch(grad, MICROBATCHES), order)

    def train_step(weights, x):
        loss, grads = grad(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    return train_step


def in_one(step):
    def steps(weights, batches):
        losses = []
        for x in batches:
            weights, loss = step(weights, x)
            losses.append(loss)
        return weights, losses

    return steps


def lowered(step, order, versions, steps=STEPS):
    """Some steps in one program."""
    weights = [jnp.eye(4)] * RANKS * order.stages_per_rank
    mesh = jaxpp.MpmdMesh((RANKS,), devices=[jax.devices()[0]] * RANKS)
    given = (weights,) * versions if versions else weights
    return jaxpp.place(in_one(step), mesh).lower(given, [jnp.ones((MICROBATCHES, 4))] * steps)


def rows(lowered):
    """The tasks of each rank, in order, each with the number of its loop."""
    runs = [[i for i in p.instructions if isinstance(i, Run)] for p in lowered.programs]
    return [[(run.task, run.loop) for run in own if run.task] for own in runs]


def time_of(lowered):
    dependencies = dependencies_of(lowered.bundle)
    table = table_of([[(task,) for task, _ in own] for own in rows(lowered)], dependencies)
    return simulate(table, Costs(per="stage"), dependencies=dependencies).makespan


ORDERS = [OneFOneB(), ZeroBubbleH1(), Interleaved1F1B(2)]


@pytest.mark.parametrize("order", ORDERS)
def test_delayed_steps_take_the_time_of_one_table_of_all_their_microbatches(order):
    step = train_step_of(order)
    stages = RANKS * order.stages_per_rank
    table, all_of_them = (
        simulate(order.table(stages, count), Costs(per="stage")).makespan
        for count in (MICROBATCHES, STEPS * MICROBATCHES)
    )
    assert time_of(lowered(jaxpp.delay(step), order, 2)) == all_of_them
    assert STEPS * table >= time_of(lowered(step, order, 0)) > all_of_them


@pytest.mark.parametrize("order", [OneFOneB(), Interleaved1F1B(2)])
def test_the_order_is_that_of_the_joined_table(order):
    """Where a microbatch's activations are freed at once; halves free them part by part."""
    table = joined(order.table(RANKS * order.stages_per_rank, MICROBATCHES), STEPS)
    found = rows(lowered(jaxpp.delay(train_step_of(order)), order, 2))
    for own, expected in zip(found, table.ranks, strict=True):
        loops = sorted({loop for _, loop in own})
        assert [
            (task.kind, loops.index(loop) * MICROBATCHES + task.microbatch) for task, loop in own
        ] == [(task.kind, task.microbatch) for task in expected]


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_holds_no_more_activations_for_that(order):
    delayed = jaxpp.delay(train_step_of(order))

    def activations(steps):
        made = lowered(delayed, order, 2, steps).compile()
        found = jaxpp.predict(made, costs=jaxpp.Device(1e9, 1e9))
        return [max(m.bytes.get("activations", 0) for m in own) for own in found.memory]

    assert activations(STEPS) == activations(1)


def test_more_steps_share_their_computations():
    delayed = jaxpp.delay(train_step_of(OneFOneB()))
    three, five = (lowered(delayed, OneFOneB(), 2, steps) for steps in (3, 5))
    assert len(three.bundle.computations) == len(five.bundle.computations)


def test_a_step_that_is_not_delayed_stays_in_the_order_of_its_loops():
    for own in rows(lowered(train_step_of(OneFOneB()), OneFOneB(), 0)):
        loops = [loop for _, loop in own]
        assert loops == sorted(loops)


def test_a_loop_that_reads_an_update_begins_behind_it():
    """The loop of step n reads the weights that the update of step n - 2 makes."""
    graphs = []

    def keep(graph):
        graphs.append(graph)
        return graph

    step = jaxpp.delay(train_step_of(OneFOneB()))
    mesh = jaxpp.MpmdMesh((RANKS,), devices=[jax.devices()[0]] * RANKS)
    placed = jaxpp.extend.edit_tasks(jaxpp.place(in_one(step), mesh), keep)
    weights = [jnp.eye(4)] * RANKS
    placed.lower((weights, weights), [jnp.ones((MICROBATCHES, 4))] * STEPS)
    for rank in range(RANKS):
        own = [t for t in graphs[0].tasks if t.rank == rank and t.task]
        last = max(n for n, t in enumerate(own) if t.loop == 0)
        assert last < min(n for n, t in enumerate(own) if t.loop == 2)
    again = join_loops(graphs[0])  # the order is one that it keeps
    assert [t.label for t in again.tasks] == [t.label for t in graphs[0].tasks]


def test_ordered_effects_keep_their_order(capsys):
    """The second loop could begin before the first has its gradients, were it silent."""

    def loss(weights, x, is_printed):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0]))
        if is_printed:
            jax.debug.print("forward", ordered=True)
        return jnp.mean((x @ weights[1]) ** 2)

    def loop(is_printed, transform, order):
        staged = jaxpp.wrap_forward(lambda weights, x: loss(weights, x, is_printed))
        return jaxpp.schedule(jaxpp.microbatch(transform(staged), 4), order)

    grad = loop(False, jax.grad, OneFOneB())
    evaluate = loop(True, lambda staged: staged, ForwardOnly())

    def step(weights, x):
        grads = grad(weights, x)
        jax.debug.print("gradient {}", jnp.ravel(grads[0])[0], ordered=True)
        return grads, evaluate(weights, x)

    jaxpp.place(step)([jnp.eye(2), jnp.eye(2)], jnp.zeros((4, 2)))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["gradient", "0.0", *["forward"] * 4]
