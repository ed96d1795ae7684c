"""Stages that are a graph: what each reads is found in the function, and schedules are told it."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
import jaxpp.testing
from jaxpp.schedules import (
    CATALOGUE,
    Costs,
    FromTable,
    Kind,
    OneFOneB,
    Recompute,
    Schedule,
    Synthesized,
    ZeroBubbleH1,
    by_name,
    check,
    from_tasks,
    simulate,
)
from jaxpp.transforms.tasks._loop import ScheduledLoop, is_loop
from tests.experiments import test_zoo_architectures as zoo
from tests.helpers import assert_same, mesh_of

WIDTH, BATCH, M = 4, 8, 4
enter = jaxpp.pipeline_enter_stage


def layers(count, seed=0):
    return tuple(jax.random.normal(jax.random.key(seed), (count, WIDTH, WIDTH)) / WIDTH**0.5)


def data(step):
    return jax.random.normal(jax.random.key(7 + step), (2, BATCH, 3, WIDTH))


def attend(queries, values):
    return jax.nn.softmax(queries @ values.mT) @ values


def towers(ws, x, y):
    """An image tower of two stages, a text tower of one, and a stage that compares."""
    seen = enter(jnp.tanh(enter(jnp.tanh(x @ ws[0])) @ ws[1]))
    read = enter(jnp.tanh(y @ ws[2]))
    return jnp.mean(jnp.tanh((seen * read) @ ws[3]) ** 2)


def vision_language(ws, x, y):
    """A text tower whose later layers attend to what an image tower gives.

    Alayrac et al., arXiv 2204.14198 (Flamingo), section 2.2.
    """
    image = enter(jnp.tanh(x @ ws[0]))
    text = enter(jnp.tanh(y @ ws[1]))
    text = enter(text + attend(text @ ws[2], image))
    return jnp.mean((text + attend(text @ ws[3], image)) ** 2)


def multi_token_prediction(ws, x, y):
    """A trunk of two stages, its loss, and a module that predicts one token more, with another.

    DeepSeek-AI, arXiv 2412.19437 (DeepSeek-V3), section 2.2.
    """
    trunk = enter(jnp.tanh(enter(jnp.tanh(x @ ws[0])) @ ws[1]))
    first = enter(jnp.mean((trunk @ ws[2] - y) ** 2))
    further = jnp.tanh(jnp.concatenate([trunk[:, :-1], y[:, 1:]], -1) @ jnp.tile(ws[3], (2, 1)))
    return first + 0.3 * jnp.mean((further @ ws[2] - y[:, 1:]) ** 2)


def attention_residuals(ws, x, y):
    """Each block reads a mixture of all earlier ones, by weights that depend on them."""
    values = [x]
    for n, w in enumerate(ws):
        weights = jax.nn.softmax(jnp.stack([jnp.mean(v @ w, -1) for v in values]), 0)
        mixed = sum(weight[..., None] * v for weight, v in zip(weights, values, strict=True))
        out = jnp.tanh(mixed @ w)
        values.append(enter(out) if n < len(ws) - 1 else out)
    return jnp.mean((values[-1] - y) ** 2)


#: What each stage reads.
GRAPHS = {
    towers: ((), (0,), (), (1, 2)),
    vision_language: ((), (), (0, 1), (0, 2)),
    multi_token_prediction: ((), (0,), (1,), (1, 2)),
    attention_residuals: ((), (0,), (0, 1), (0, 1, 2)),
}


def scheduled(loss, schedule):
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss))
    return jaxpp.schedule(jaxpp.microbatch(grad_fn, M, in_axes=(None, 0, 0)), schedule)


def loop_of(fun, *args):
    (eqn,) = (e for e in jax.make_jaxpr(fun)(*args).eqns if is_loop(e))
    return ScheduledLoop.of(eqn)


def table_of(loss, schedule):
    return loop_of(scheduled(loss, schedule), layers(len(GRAPHS[loss])), *data(0)).table


# ---- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", GRAPHS)
def test_a_table_has_what_each_stage_reads(loss):
    loop = loop_of(scheduled(loss, OneFOneB()), layers(len(GRAPHS[loss])), *data(0))
    assert loop.table.stage_inputs == found_by_tasks(loop) == GRAPHS[loss]


def is_possible(name):
    schedule = by_name(name)
    try:
        return not schedule.table(4, M).forward_only
    except ValueError:
        return False


@pytest.mark.parametrize("name", [*filter(is_possible, CATALOGUE)])
def test_each_schedule_of_the_catalogue_is_told_the_graph_and_its_order_is_sound_for_it(name):
    table = table_of(towers, by_name(name))
    assert table.stage_inputs == GRAPHS[towers]
    plain = by_name(name).table(4, M)
    assert table.ranks == (plain.with_halves() if plain.splits_backward else plain).ranks
    check(table)


def test_a_chain_is_none():
    def chain(ws, x, y):
        for w in ws[:-1]:
            x = enter(jnp.tanh(x @ w))
        return jnp.mean((x @ ws[-1] - y) ** 2)

    loop = loop_of(scheduled(chain, OneFOneB()), layers(3), *data(0))
    assert loop.table.stage_inputs is None
    assert loop.table == OneFOneB().table(3, M)


def test_a_carry_is_read_from_the_stage_that_makes_its_next_value():
    """The last stage reads the old value, which the stage before it hands on."""

    def loss(w, count, x):
        first = enter(jnp.tanh(x @ w))
        (count_on,) = enter((count + jnp.sum(x @ w),))
        return jnp.mean((first * count) ** 2), count_on

    run = jaxpp.microbatch(
        jaxpp.wrap_forward(loss), M, in_axes=(None, "carry", 0), reduce=("mean", "carry")
    )
    run = jaxpp.schedule(run, jaxpp.schedules.ForwardOnly())
    loop = loop_of(run, layers(1)[0], jnp.float32(1), data(0)[0])
    assert loop.table.stage_inputs == found_by_tasks(loop) == ((), (), (0, 1))


def found_by_tasks(loop):
    """What the forwards read, once they are tasks."""
    needs = [loop.dependencies[Kind.F, stage] for stage in range(loop.num_stages)]
    return tuple(tuple(sorted(s for kind, s in own if kind is Kind.F)) for own in needs)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()], ids=repr)
@pytest.mark.parametrize(
    ("name", "graph"),
    [("clip", ((), (0,), (), (1, 2))), ("t5", ((), (0,), (1,), (1, 2)))],
)
def test_what_stages_of_models_read_is_found(name, graph, schedule):
    case = zoo.CASES[name]
    args = zoo.start(case)[0], *case.data(0)
    assert loop_of_arrays(zoo.pipelined(case, "path", schedule, 4), args).stage_inputs == graph


def loop_of_arrays(fun, args):
    arrays, static = eqx.partition(args, eqx.is_array)
    return loop_of(lambda arrays: jax.tree.leaves(fun(*eqx.combine(arrays, static))), arrays).table


# ---- who is told --------------------------------------------------------------------------------


def test_a_schedule_of_a_user_whose_table_takes_two_numbers_is_not_told():
    class Plain:
        def table(self, num_stages, num_microbatches):
            return OneFOneB().table(num_stages, num_microbatches)

    plain: Any = Plain()
    assert table_of(towers, plain).stage_inputs == GRAPHS[towers]


@dataclasses.dataclass(frozen=True)
class Told(Schedule):
    """1F1B that says which graph it was told."""

    graph: tuple[tuple[int, ...], ...] = ()

    def for_graph(self, stage_inputs):
        return Told(stage_inputs)

    def orders(self, num_ranks, num_microbatches):
        assert self.graph == GRAPHS[towers]
        return OneFOneB().orders(num_ranks, num_microbatches)


@pytest.mark.parametrize("around", [lambda s: s, Recompute], ids=["itself", "Recompute"])
def test_a_schedule_is_told_also_inside_of_another(around):
    assert table_of(towers, around(Told())).stage_inputs == GRAPHS[towers]


def test_a_table_that_says_otherwise_gets_what_is_true():
    wrong = dataclasses.replace(OneFOneB().table(4, M), stage_inputs=((), (), (), ()))
    assert table_of(towers, FromTable(wrong)).stage_inputs == GRAPHS[towers]


def test_an_order_that_only_the_graph_allows_runs():
    """The text tower runs before the image tower, on one rank, forward and back."""
    order = ("F2", "F0", "F1", "F3", "B3", "B1", "B0", "B2")
    table = from_tasks([[f"{task}.{i}" for i in range(M) for task in order]])
    with pytest.raises(jaxpp.schedules.ScheduleError):
        check(table)
    check(table_of(towers, FromTable(table)))


# ---- the same numbers ---------------------------------------------------------------------------


def sgd(loss, schedule):
    grad_fn = scheduled(loss, schedule) if schedule else microbatches(loss)

    def step(ws, x, y):
        value, grads = grad_fn(ws, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    return step


def microbatches(loss):
    """The mean over microbatches, in a loop of Python."""

    def grad_fn(ws, x, y):
        found = [
            jax.value_and_grad(loss)(ws, *own)
            for own in zip(jnp.split(x, M), jnp.split(y, M), strict=True)
        ]
        return jax.tree.map(lambda *own: sum(own) / M, *found)

    return grad_fn


ON_TWO = Synthesized(Costs(latency=0.1), (0, 0, 1, 1), split_backward=False, evaluations=50)


@functools.cache
def results(loss, schedule, ranks):
    """The weights and losses of three steps on distinct data."""
    step = jaxpp.place(sgd(loss, schedule), mesh_of(ranks, shared=True), donate_argnums=0)
    ws, losses = layers(len(GRAPHS[loss])), []
    for n in range(3):
        ws, value = step(ws, *data(n))
        losses.append(value)
    return jaxpp.gather((ws, losses))


@pytest.mark.parametrize("loss", GRAPHS)
def test_a_graph_has_the_bits_of_any_ranks_and_any_order(loss):
    want = results(loss, OneFOneB(), 4)
    assert_same(results(loss, ON_TWO, 2), want)
    assert_same(results(loss, dataclasses.replace(ON_TWO, rank_of=(0, 1, 1, 0)), 2), want)
    one = dataclasses.replace(ON_TWO, rank_of=(0, 0, 0, 0))
    assert_same(results(loss, one, 1), want)
    jaxpp.testing.assert_matches_single_device(
        jaxpp.place(sgd(loss, ON_TWO), mesh_of(2, shared=True)),
        sgd(loss, None),
        layers(4),
        data=lambda n: tuple(data(n)),
    )


@pytest.mark.parametrize("schedule", [ON_TWO, Synthesized(rank_of=(0, 1, 1, 0))], ids=["B", "IW"])
@pytest.mark.parametrize("loss", GRAPHS)
def test_a_graph_is_proven(loss, schedule):
    step = jaxpp.place(sgd(loss, schedule), mesh_of(2, shared=True))
    jaxpp.testing.assert_computes_the_function(step, layers(4), *data(0))


# ---- sums of cotangents -------------------------------------------------------------------------


def sent_back(loss, rank_of):
    """How many arrays of a microbatch rank 1 sends to rank 0."""
    schedule = dataclasses.replace(ON_TWO, rank_of=rank_of)
    step = jaxpp.place(scheduled(loss, schedule), mesh_of(2, shared=True))
    sends = step.lower(layers(4), *data(0)).programs[1].sends
    return sum(name.endswith(".0") for send in sends for name in send.message.names)


@pytest.mark.parametrize("loss", [vision_language, attention_residuals])
def test_cotangents_of_one_value_are_added_before_they_are_sent(loss):
    """Stages 2 and 3 read two values of rank 0, or three, of which one twice."""
    assert sent_back(loss, (0, 0, 1, 1)) == 2


def three_readers(coefficients, x):
    """The first of four stages makes a value that all others read."""
    first, *others = coefficients
    value = enter(first * x)
    total = enter(others[0] * value)
    total = enter(total + others[1] * value)
    return jnp.sum(total + others[2] * value)


def test_cotangents_are_added_in_the_order_of_the_function():
    """In float32 the sum of these is 1 in the order of JAX, and 0 in the other one."""
    coefficients = tuple(map(jnp.float32, (1, 1, -1e8, 1e8)))
    late, middle, early = coefficients[3], coefficients[2], coefficients[1]
    assert (late + middle) + early != late + (middle + early)
    x = jnp.ones((2, 1))

    def loop(rank_of):
        grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(three_readers), 0), 2)
        return jaxpp.schedule(grad, dataclasses.replace(ON_TWO, rank_of=rank_of))

    want = jax.grad(three_readers)(coefficients, x[:1])
    assert want[0] == 1
    for rank_of in ((0, 1, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1)):
        got = jaxpp.place(loop(rank_of), mesh_of(2, shared=True))(coefficients, x)
        assert_same(jaxpp.gather(got), want)


def test_stages_that_wait_for_nothing_of_each_other_are_not_made_to():
    def branches(ws, x, y):
        root = enter(jnp.tanh(x @ ws[0]))
        left = enter(jnp.tanh(root @ ws[1]))
        right = enter(jnp.tanh(root @ ws[2]))
        return jnp.mean((left * right @ ws[3] - y) ** 2)

    loop = loop_of(scheduled(branches, OneFOneB()), layers(4), *data(0))
    needs, backward = loop.dependencies, Kind.B
    found = [{o for kind, o in needs[backward, s] if kind is backward} for s in range(4)]
    assert found == [{1, 2}, {3}, {3}, set()]


@pytest.mark.more
@pytest.mark.parametrize("name", ["clip", "t5"])
def test_models_have_the_bits_of_any_ranks_and_are_proven(name):
    case = zoo.CASES[name]

    def step_on(schedule, ranks):
        step = zoo.train_step(case, zoo.pipelined(case, "path", schedule, 4))
        return jaxpp.place(step, mesh_of(ranks, shared=True))

    args = (*zoo.start(case), *case.data(0))
    want = jaxpp.gather(step_on(OneFOneB(), 4)(*args))
    for rank_of in ((0, 0, 1, 1), (0, 0, 0, 0)):
        schedule = dataclasses.replace(ON_TWO, rank_of=rank_of)
        step = step_on(schedule, 1 + max(rank_of))
        assert_same(jaxpp.gather(step(*args)), want)
    jaxpp.testing.assert_computes_the_function(step_on(ON_TWO, 2), *args)


# ---- time ---------------------------------------------------------------------------------------


def test_towers_take_a_tenth_less_than_a_chain_and_a_quarter_with_an_order_of_their_own():
    """By simulation; the last is the bound of any order. Its halves alone do less for a chain."""
    costs = Costs(latency=0.1)
    times = {}
    for name, schedule in (("graph", OneFOneB()), ("synthesized", Synthesized(costs))):
        fun = jaxpp.microbatch(
            jax.value_and_grad(jaxpp.wrap_forward(towers)), 8, in_axes=(None, 0, 0)
        )
        table = loop_of(jaxpp.schedule(fun, schedule), layers(4), *data(0)).table
        times[name] = simulate(table, costs).makespan
    chain = simulate(OneFOneB().table(4, 8), costs).makespan
    assert [chain, times["graph"], times["synthesized"]] == pytest.approx([34.6, 31.0, 26.2])
    assert Synthesized(costs).synthesis(4, 8).value == pytest.approx(27.3)
    own = dataclasses.replace(Synthesized(costs), graph=GRAPHS[towers])
    assert own.synthesis(4, 8).lower_bound == pytest.approx(26.2)


def test_a_synthesized_schedule_says_which_number_of_stages_it_is_for():
    with pytest.raises(ValueError, match="rank_of for 2 stages, got 4 stages"):
        table_of(towers, Synthesized(rank_of=(0, 1)))
