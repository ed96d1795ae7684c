"""`schedule`: what it partitions, what it keeps, and what it rejects."""

import copy
import dataclasses
import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import jaxpp
import jaxpp.testing
from jaxpp import jaxprs, schedules
from jaxpp._program import Run
from jaxpp.schedules import ForwardOnly, Kind, OneFOneB, ScheduleError, Table, Task, ZeroBubbleH1
from jaxpp.transforms.tasks import _loop
from jaxpp.transforms.tasks._partition import STAGE_PASSES, TABLE_PASSES
from tests.transforms import two_layers

M = 3
STAGES = 3
WS = tuple(0.5 * jax.random.normal(jax.random.key(0), (STAGES, 4, 4)))
X = jax.random.normal(jax.random.key(1), (6, 4))


def loss_fn(ws, x):
    for i, w in enumerate(ws):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


GRAD = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), M)
LOSS = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M)


def loops_of(fun, *args):
    """The scheduled loops in a function's jaxpr."""
    return [e for e in jax.make_jaxpr(fun)(*args).eqns if _loop.is_loop(e)]


def loop_of(fun, *args):
    (loop,) = loops_of(fun, *args)
    return _loop.ScheduledLoop.of(loop)


def keys_of(loop):
    """The kinds and stages of a loop's tasks."""
    return [task.params["key"] for task in loop.tasks]


def accumulating(loop):
    """The kind and stage of the task that makes each carry, of those that do not pass through."""
    maker = {v: task.params["key"] for task in loop.tasks for v in task.outvars}
    return sorted(maker[v] for v in loop.carry_outs if v in maker)


def assert_same(fun, plain, *args, rtol=1e-6):
    chex.assert_trees_all_close(jax.jit(fun)(*args), jax.jit(plain)(*args), rtol=rtol, atol=1e-7)


# ---- what it makes ------------------------------------------------------------------------------


def test_a_scheduled_function_shows_its_name_and_its_schedule():
    scheduled = jaxpp.schedule(GRAD, OneFOneB())
    assert repr(scheduled) == "<loss_fn scheduled by OneFOneB()>"
    assert getattr(scheduled, "__name__", None) == "loss_fn"


def test_the_tasks_of_a_function_that_is_gone_are_gone():
    body = weakref.ref(loop_of(jaxpp.schedule(GRAD, OneFOneB()), WS, X).body)
    gc.collect()
    assert body() is None


def test_a_step_is_lowered_and_run_by_the_table_of_its_trace():
    calls = []

    class Counted:
        def table(self, num_stages, num_microbatches):
            calls.append((num_stages, num_microbatches))
            return OneFOneB().table(num_stages, num_microbatches)

    counted: Any = Counted()
    mesh = jaxpp.MpmdMesh((STAGES,), devices=[jax.devices()[0]] * STAGES)
    step = jaxpp.place(jaxpp.schedule(GRAD, counted), mesh)
    step(WS, X)
    assert calls == [(STAGES, M)]


@pytest.mark.parametrize(
    ("schedule", "kinds"), [(OneFOneB(), "FB"), (ZeroBubbleH1(), "FIW"), (ForwardOnly(), "F")]
)
def test_each_stage_has_a_task_of_each_kind(schedule, kinds):
    fun = LOSS if kinds == "F" else GRAD
    found = set(keys_of(loop_of(jaxpp.schedule(fun, schedule), WS, X)))
    wanted = {(Kind(k), s) for k in kinds for s in range(STAGES)}
    # The first stage has no input to differentiate, and so no I; its W does it all.
    assert wanted - {(Kind.I, 0)} <= found <= wanted


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
def test_a_task_depends_on_its_neighbours(schedule):
    loop = loop_of(jaxpp.schedule(GRAD, schedule), WS, X)
    back = Kind.I if schedule == ZeroBubbleH1() else Kind.B
    assert set(loop.dependencies[Kind.F, 1]) == {(Kind.F, 0)}
    assert set(loop.dependencies[back, 1]) >= {(Kind.F, 1), (back, 2)}


def test_a_scheduled_function_can_be_differentiated_and_vmapped():
    fun = jaxpp.schedule(LOSS, ForwardOnly())
    assert_same(jax.grad(fun), jax.grad(loss_fn), WS, X)
    xs = jnp.stack([X, 2 * X])
    in_axes = (None, 0)
    assert_same(jax.vmap(fun, in_axes), jax.vmap(loss_fn, in_axes), WS, xs)


def with_predictions(ws, x):
    """The loss and its gradient, a mean and a prediction for each example."""

    def loss(ws, x):
        y = x
        for i, w in enumerate(ws):
            y = jaxpp.pipeline_enter_stage(y) if i else y
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2), (jnp.max(y), y)

    return jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)(ws, x)


PREDICT = functools.partial(
    jaxpp.microbatch, with_predictions, reduce=(("mean", ("max", "concat")), "mean")
)
STACKED_WS = tuple(jnp.stack([w, 2 * w]) for w in WS)
STACKED_X = jnp.stack([X, 2 * X], axis=1)


@pytest.mark.parametrize(
    ("schedule", "number", "ranks"),
    [(OneFOneB(), 3, 3), (ZeroBubbleH1(), 3, 3), (schedules.Chimera(), 6, None)],
    ids=["1f1b", "zb_h1", "chimera"],
)
@pytest.mark.parametrize(
    ("args", "in_axes"),
    [
        ((WS, STACKED_X), (None, 1)),
        ((STACKED_WS, X), (0, None)),
        (((STACKED_WS[0], *WS[1:]), STACKED_X), ((0, None, None), 1)),
    ],
    ids=["data", "weights", "both"],
)
def test_a_vmapped_scheduled_function_keeps_its_schedule(args, in_axes, schedule, number, ranks):
    if ranks is None:  # an even number of ranks
        args = (args[0][:2], args[1])
        in_axes = (in_axes[0][:2] if isinstance(in_axes[0], tuple) else in_axes[0], in_axes[1])
    fun = PREDICT(number)
    scheduled = jax.vmap(jaxpp.schedule(fun, schedule), in_axes)
    assert len(loops_of(scheduled, *args)) == 1
    assert_same(scheduled, jax.vmap(fun, in_axes), *args)
    placed = jaxpp.place(scheduled, jaxpp.MpmdMesh((len(args[0]),)))
    chex.assert_trees_all_close(
        jax.device_get(placed(*args)), jax.vmap(fun, in_axes)(*args), rtol=1e-6, atol=1e-7
    )


def test_what_is_the_same_for_a_whole_batch_is_not_repeated_in_its_schedule():
    xs = jnp.stack([X, 2 * X])
    (loop,) = loops_of(jax.vmap(jaxpp.schedule(GRAD, OneFOneB()), (None, 0)), WS, xs)
    consts = loop.invars[: loop.params["num_consts"]]
    assert [v.aval.shape for v in consts] == [w.shape for w in WS]


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda fun: lambda ws, x: jax.jvp(lambda ws: fun(ws, x), (ws,), (ws,)),
        lambda fun: jax.grad(lambda ws, x: fun(ws, x)[0]),
    ],
    ids=["jvp", "grad"],
)
def test_a_schedule_that_is_lost_by_differentiation_is_an_error_of_place(differentiate):
    fun = differentiate(jaxpp.schedule(GRAD, OneFOneB()))
    assert_same(fun, differentiate(jax.value_and_grad(loss_fn)), WS, X, rtol=1e-5)
    message = r"loop at \S*test_schedule.py:\d+ was differentiated, or checkified, and has no"
    with pytest.raises(ValueError, match=message):
        jaxpp.place(fun, jaxpp.MpmdMesh((STAGES,)))(WS, X)


def test_a_loop_of_which_nothing_is_read_is_an_error_of_place():
    def step(ws, x):
        jaxpp.schedule(GRAD, OneFOneB())(ws, x)
        return jax.tree.map(lambda w: w + 1, ws)

    message = r"nothing reads what the scheduled loop at \S*test_schedule.py:\d+ computes"
    with pytest.raises(ValueError, match=message):
        jaxpp.place(step, jaxpp.MpmdMesh((STAGES,)))(WS, X)


def test_a_loop_of_which_nothing_is_read_is_left_out_of_a_step_with_another():
    def step(ws, x, fun):
        fun(ws, 2 * x)
        loss, grads = fun(ws, x)
        return jax.tree.map(lambda w, g: w - g, ws, grads), loss

    placed = jaxpp.place(
        lambda ws, x: step(ws, x, jaxpp.schedule(GRAD, OneFOneB())), jaxpp.MpmdMesh((STAGES,))
    )
    assert placed.lower(WS, X).as_text().count("run F0.0") == 1
    jaxpp.testing.assert_matches_single_device(placed, lambda ws, x: step(ws, x, GRAD), WS, X)


def test_a_print_in_a_loop_of_which_nothing_is_read_is_printed(capfd):
    def printing(ws, x):
        y = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        jax.debug.print("rows {}", y.shape[0])
        return jnp.mean((y @ ws[1]) ** 2)

    def step(ws, x):
        fun = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(printing)), M)
        jaxpp.schedule(fun, OneFOneB())(ws, x)
        return jax.tree.map(lambda w: w + 1, ws)

    jaxpp.place(step, jaxpp.MpmdMesh((2,)))(WS[:2], X)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n") == ["rows 2"] * M + [""]


def test_the_gradient_of_the_mean_loss_is_scheduled_too():
    fun = jax.value_and_grad(jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M))
    scheduled = jaxpp.schedule(fun, OneFOneB())
    assert {kind for kind, _ in keys_of(loop_of(scheduled, WS, X))} == {Kind.F, Kind.B}
    assert_same(scheduled, jax.value_and_grad(loss_fn), WS, X)


def with_outputs(ws, x):
    for i, w in enumerate(ws):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        x = jnp.tanh(x @ w)
    return {"best": jnp.max(x), "loss": jnp.mean(x**2), "norm": jnp.mean(x), "rows": x.sum(1)}


OUTPUTS = {"best": "max", "loss": "mean", "norm": "mean", "rows": "concat"}


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
@pytest.mark.parametrize(
    ("of", "loops"),
    [
        (lambda out: out["loss"], 1),
        (lambda out: out["norm"], 1),
        (lambda out: out["loss"] ** 2 + out["norm"], 1),
        (lambda out: jnp.mean(out["rows"] ** 2), 2),
        (lambda out: out["best"], 2),
        (lambda out: out["best"] * out["loss"] + jnp.mean(out["rows"] ** 2), 2),
    ],
    ids=["first", "second", "both", "rows", "best", "all"],
)
def test_the_gradient_of_any_output_is_scheduled(of, loops, schedule):
    """Where it depends on the outputs of each microbatch, a loop of forwards makes them before."""

    def step(fun):
        return lambda ws, x: jax.value_and_grad(lambda ws: of(fun(ws, x)))(ws)

    scheduled = jaxpp.schedule(
        step(jaxpp.microbatch(jaxpp.wrap_forward(with_outputs), M, reduce=OUTPUTS)), schedule
    )
    found = loops_of(scheduled, WS, X)
    assert len(found) == loops
    *before, last = [[kind for kind, _ in keys_of(_loop.ScheduledLoop.of(e))] for e in found]
    assert before == [[Kind.F] * STAGES] * (loops - 1) and last.count(Kind.F) == STAGES
    assert_same(scheduled, step(with_outputs), WS, X, rtol=1e-5)
    placed = jaxpp.place(scheduled, jaxpp.MpmdMesh((STAGES,)))
    jaxpp.testing.assert_matches_single_device(
        placed, step(with_outputs), WS, X, num_state=0, rtol=1e-5
    )


@pytest.mark.more
@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
@pytest.mark.parametrize(
    "gradient",
    [
        jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), M),
        jax.grad(jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M)),
    ],
    ids=["inside", "outside"],
)
def test_the_derivative_of_a_gradient_along_a_direction_is_scheduled(gradient, schedule):
    def along(grad):
        return lambda ws, x: jax.jvp(lambda ws: grad(ws, x), (ws,), (jax.tree.map(jnp.cos, ws),))

    scheduled = jaxpp.schedule(along(gradient), schedule)
    placed = jaxpp.place(scheduled, jaxpp.MpmdMesh((STAGES,)))
    want = jax.jit(along(jax.grad(loss_fn)))(WS, X)
    chex.assert_trees_all_close(jax.device_get(placed(WS, X)), want, rtol=1e-4, atol=1e-6)


def test_the_gradient_by_an_integer_comes_out_of_a_placed_step():
    def loss(params, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params["ws"][0]))
        return jnp.mean((x @ params["ws"][1]) ** 2) * params["n"]

    params = {"n": jnp.int32(3), "ws": WS[:2]}
    fun = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss), allow_int=True), M)
    placed = jaxpp.place(jaxpp.schedule(fun, OneFOneB()), jaxpp.MpmdMesh((2,)))
    got = placed(params, X)
    want = jax.jit(jax.value_and_grad(loss, allow_int=True))(params, X)
    assert got[1]["n"].dtype == want[1]["n"].dtype == jax.dtypes.float0
    chex.assert_trees_all_close(jax.device_get(got[1]["ws"]), want[1]["ws"], rtol=1e-5)


def test_two_loops_of_one_function_are_both_scheduled():
    def two(ws, x):
        loss, first = GRAD(ws, x)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, ws, first)
        return loss, GRAD(moved, 2 * x)

    scheduled = jaxpp.schedule(two, OneFOneB())
    assert len(loops_of(scheduled, WS, X)) == 2
    assert_same(scheduled, two, WS, X)
    placed = jaxpp.place(scheduled, jaxpp.MpmdMesh((STAGES,)))
    jaxpp.testing.assert_matches_single_device(placed, two, WS, X, num_state=0)


def test_what_is_computed_before_a_loop_stays_before_it():
    scheduled = jaxpp.schedule(lambda ws, x: GRAD(ws, jnp.cos(x)), OneFOneB())
    names = [e.primitive.name for e in jax.make_jaxpr(scheduled)(WS, X).eqns]
    assert names.index("cos") < names.index("pipeline_loop")


# ---- shared and frozen parameters ---------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, (None, 0), (0, 0)], ids=["plain", "slices", "all"])
def test_a_loop_is_a_scan_over_its_tasks(axes):
    """Each variable is made once, with the type that tasks give and take; a scan is the loop."""
    fun, args = jaxpp.schedule(GRAD, ZeroBubbleH1()), (WS, X)
    if axes is not None:
        fun = jax.vmap(fun, axes)
        args = [jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x) if axis == 0 else x
                for x, axis in zip(args, axes, strict=True)]  # fmt: skip
    jaxpr = jax.make_jaxpr(fun)(*args)
    (eqn,) = (e for e in jaxpr.eqns if _loop.is_loop(e))
    loop = _loop.ScheduledLoop.of(eqn)
    jex.check_jaxpr(loop.body.jaxpr)
    for task in loop.tasks:
        assert [v.aval for v in task.invars] == task.params["jaxpr"].in_avals
    known = {v: jnp.sin(jnp.arange(v.aval.size, dtype=v.aval.dtype)).reshape(v.aval.shape)
             for v in jaxprs.variables(eqn.invars)}  # fmt: skip
    operands = jaxprs.read(eqn.invars, known)
    n, k = loop.num_consts, loop.num_consts + loop.num_carry
    results = operands[n:k]
    for i in range(M):
        slices = [x[i] for x in operands[k:]]
        results = jex.jaxpr_as_fun(loop.body)(*operands[:n], *results, *slices)
    assert len(results) == loop.num_carry  # a loss and its gradients have no rows
    chex.assert_trees_all_close(results, _loop.loop_p.bind(*operands, **eqn.params), rtol=1e-6)


def tied_loss(ws, x):
    """Three stages; the last one reads the first one's weight, transposed."""
    return loss_fn((ws[0], ws[1], ws[0].T), x)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
def test_the_sum_of_a_tied_gradient_is_accumulated_apart(schedule):
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(tied_loss)), M)
    scheduled = jaxpp.schedule(grad, schedule)
    loop = loop_of(scheduled, WS[:2], X)
    last = Kind.W if schedule == ZeroBubbleH1() else Kind.B
    # No task waits for the other end's gradient: each carry is a sum, of one task.
    assert accumulating(loop) == [(last, 0), (last, 1), (last, 2)]
    assert len(loop.folds) == 3 and all(loop.folds)
    assert_same(scheduled, jax.grad(tied_loss), WS[:2], X)


@pytest.mark.more
def test_a_weight_may_be_read_a_thousand_times():
    """Its gradient is a sum of as many terms, and accumulated once in each stage that reads it."""

    def loss(w, x):
        for count in (1, 1000):
            x = jaxpp.pipeline_enter_stage(x) if count > 1 else x
            for _ in range(count):
                x = jax.lax.mul(x, w)
        return jnp.sum(x)

    fun = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), M)
    loop = loop_of(jaxpp.schedule(fun, OneFOneB()), jnp.ones(4), jnp.ones(4 * M))
    assert loop.num_carry == 2


def test_a_sum_that_began_as_a_number_is_a_sum():
    """The carry of such a scan is weakly typed, and converted before each addition."""
    staged = jaxpp.wrap_forward(tied_loss)

    def total(ws, x):
        def body(carry, x):
            loss, grads = jax.value_and_grad(staged)(ws, x)
            return (carry[0] + loss, jax.tree.map(lambda a, g: a + g, carry[1], grads)), None

        zeros = jax.tree.map(jnp.zeros_like, ws)
        return jax.lax.scan(body, (0.0, zeros), x.reshape(M, -1, 4))[0]

    scheduled = jaxpp.schedule(total, OneFOneB())
    assert all(loop_of(scheduled, WS[:2], X).folds)
    assert_same(scheduled, total, WS[:2], X)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1,), (2,)])
def test_frozen_stages_have_no_gradient_to_make(schedule, frozen):
    def loss(ws, x):
        ws = [jax.lax.stop_gradient(w) if i in frozen else w for i, w in enumerate(ws)]
        return loss_fn(ws, x)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), M)
    scheduled = jaxpp.schedule(grad, schedule)
    assert_same(scheduled, jax.value_and_grad(loss), WS, X)
    loop = loop_of(scheduled, WS, X)
    adding = {stage for kind, stage in accumulating(loop) if kind in (Kind.B, Kind.W)}
    assert adding == set(range(STAGES)) - set(frozen)
    if frozen == (0, 1):  # nothing before the last stage waits for a cotangent
        assert {stage for kind, stage in keys_of(loop) if kind is not Kind.F} == {2}


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
def test_a_step_with_frozen_first_stages_is_placed(schedule):
    def loss(trained, x):
        return loss_fn((*map(jax.lax.stop_gradient, WS[:2]), trained), x)

    def step(grad_fn, w, x):
        value, grad = grad_fn(w, x)
        return w - 0.1 * grad, value

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), M)
    placed = jaxpp.place(
        functools.partial(step, jaxpp.schedule(grad, schedule)), jaxpp.MpmdMesh((STAGES,))
    )
    plain = functools.partial(step, jax.value_and_grad(loss))
    jaxpp.testing.assert_matches_single_device(placed, plain, WS[2], X, num_state=1)


# ---- schedules of the user's own ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OneAtATime:
    """Not a `Schedule`: any hashable object with a table will do."""

    def table(self, num_stages, num_microbatches):
        return Table(
            tuple(
                tuple(Task(k, s, m) for m in range(num_microbatches) for k in (Kind.F, Kind.B))
                for s in range(num_stages)
            ),
            num_stages,
            num_microbatches,
        )


@dataclasses.dataclass(frozen=True)
class AllOnOneRank:
    """Two stages on one rank, the third on another."""

    def table(self, num_stages, num_microbatches):
        ms = range(num_microbatches)
        first = [Task(Kind.F, s, m) for m in ms for s in (0, 1)]
        first += [Task(Kind.B, s, m) for m in ms for s in (1, 0)]
        second = [Task(k, 2, m) for m in ms for k in (Kind.F, Kind.B)]
        return Table((tuple(first), tuple(second)), num_stages, num_microbatches)


@pytest.mark.parametrize(("schedule", "ranks"), [(OneAtATime(), 3), (AllOnOneRank(), 2)])
def test_a_users_schedule_is_followed(schedule, ranks):
    def step(grad_fn, ws, x):
        loss, grads = grad_fn(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    scheduled = jaxpp.schedule(GRAD, schedule)
    placed = jaxpp.place(functools.partial(step, scheduled), jaxpp.MpmdMesh((ranks,)))
    plain = functools.partial(step, jax.value_and_grad(loss_fn))
    jaxpp.testing.assert_matches_single_device(placed, plain, WS, X)
    table = schedule.table(STAGES, M)
    for program, tasks in zip(placed.programs, table.ranks, strict=True):
        labels = [i.label for i in program.instructions if isinstance(i, Run)]
        ran = [label for label in labels if label[0] in "FB" and "." in label]
        assert ran == [str(t) for t in tasks]


@dataclasses.dataclass(frozen=True)
class Changed:
    """1F1B with its table changed by a function."""

    change: Callable

    def table(self, num_stages, num_microbatches):
        return self.change(OneFOneB().table(num_stages, num_microbatches))


def with_rank(table, rank, order):
    ranks = [*table.ranks[:rank], tuple(order), *table.ranks[rank + 1 :]]
    return Table(tuple(ranks), table.num_stages, table.num_microbatches)


def without_last(table):
    return with_rank(table, 0, table.ranks[0][:-1])


def with_first_twice(table):
    return with_rank(table, 0, (table.ranks[0][0], *table.ranks[0]))


def swapped(table):
    """Ranks 1 and 2 each run a backward that the other one has further down."""
    a = [Task(Kind.F, 0, m) for m in range(M)] + [Task(Kind.B, 0, m) for m in range(M)]
    b = [Task(Kind.F, 1, 0), Task(Kind.B, 1, 0), *(Task(Kind.F, 1, m) for m in range(1, M)),
         *(Task(Kind.B, 1, m) for m in range(1, M))]  # fmt: skip
    c = [*(Task(Kind.F, 2, m) for m in range(M)), *(Task(Kind.B, 2, m) for m in range(M))]
    return Table((tuple(a), tuple(b), tuple(c)), table.num_stages, table.num_microbatches)


def for_more_stages(table):
    return OneFOneB().table(table.num_stages + 1, table.num_microbatches)


def for_more_microbatches(table):
    return OneFOneB().table(table.num_stages, table.num_microbatches + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_last, r"B\[stage 0, microbatch 2\] is missing"),
        (with_first_twice, r"F\[stage 0, microbatch 0\] of rank 0 is repeated"),
        (swapped, "the table deadlocks"),
        (for_more_stages, "a table for 4 stages and 3 microbatches, but the loop has 3 stages"),
        (for_more_microbatches, "3 stages and 4 microbatches, but the loop has 3 stages and 3"),
    ],
)
def test_a_table_that_does_not_fit_the_loop_is_rejected(change, message):
    changed: Any = Changed(change)
    with pytest.raises(ScheduleError, match=message):
        jaxpp.schedule(GRAD, changed)(WS, X)


# ---- what it rejects ----------------------------------------------------------------------------


def test_a_forward_loop_needs_a_forward_schedule():
    with pytest.raises(ScheduleError, match="only a forward pass; use ForwardOnly"):
        jaxpp.schedule(LOSS, OneFOneB())(WS, X)


def test_a_differentiated_loop_needs_a_schedule_with_a_backward():
    with pytest.raises(ScheduleError, match="no backward tasks, but the loop is differentiated"):
        jaxpp.schedule(GRAD, ForwardOnly())(WS, X)


@pytest.mark.parametrize(
    ("fun", "missing"),
    [
        (jax.grad(loss_fn), "apply wrap_forward and microbatch first"),
        (jaxpp.microbatch(jax.grad(loss_fn), M), "apply wrap_forward and microbatch first"),
        (jax.grad(jaxpp.wrap_forward(loss_fn)), "apply microbatch first"),
    ],
)
def test_a_function_without_a_loop_over_stages_is_rejected(fun, missing):
    with pytest.raises(ValueError, match=missing):
        jaxpp.schedule(fun, OneFOneB())(WS, X)


def test_a_function_is_scheduled_once():
    with pytest.raises(ValueError, match="scheduled already"):
        jaxpp.schedule(jaxpp.schedule(GRAD, OneFOneB()), OneFOneB())(WS, X)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (OneFOneB, r"OneFOneB is not a schedule.*make one: OneFOneB\(\)"),
        ("1f1b", r"'1f1b' is not a schedule.*make one: jaxpp.schedules.by_name\('1f1b'\)"),
        (None, "None is not a schedule"),
    ],
)
def test_only_an_object_with_a_table_is_a_schedule(schedule, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.schedule(GRAD, schedule)


def test_a_loop_inside_another_loop_is_rejected():
    def repeated(ws, x):
        return jax.lax.scan(lambda c, _: (c, GRAD(ws, x)[0]), 0.0, None, length=2)[1]

    with pytest.raises(
        ValueError, match="inside a `scan` at .*test_schedule.py.*in Python: a `for`"
    ):
        jaxpp.schedule(repeated, OneFOneB())(WS, X)


def test_a_loop_inside_a_conditional_is_rejected_though_another_is_not():
    def fun(ws, x):
        loss, _ = GRAD(ws, x)
        return jax.lax.cond(loss > 0, lambda: GRAD(ws, x)[0], lambda: loss)

    with pytest.raises(ValueError, match="loop is inside a `cond` at .*test_schedule.py.*Decide"):
        jaxpp.schedule(fun, OneFOneB())(WS, X)


@pytest.mark.parametrize("given", ["argument", "closed over"])
def test_a_ref_from_outside_of_the_loop_is_rejected(given):
    def writing(ws, x, ref):
        ref[...] = jax.lax.stop_gradient(x.sum())
        return loss_fn(ws, x)

    total = jax.new_ref(jnp.zeros(()))
    if given == "argument":
        fun, in_axes, args = writing, (None, 0, None), (WS, X, total)
    else:
        fun, in_axes, args = functools.partial(writing, ref=total), (None, 0), (WS, X)
    wrapped = jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(fun)))
    grad = jaxpp.microbatch(wrapped, M, in_axes=in_axes)
    assert_same(grad, jax.value_and_grad(fun), *args)
    assert float(total[...]) == pytest.approx(float(X.sum()), rel=1e-5)
    message = r"reads or writes at \S*test_schedule.py:\d+ a jax.new_ref made outside of it"
    with pytest.raises(ValueError, match=message):
        jaxpp.schedule(grad, OneFOneB())(*args)


def test_stages_inside_a_conditional_are_rejected():
    staged = jaxpp.wrap_forward(loss_fn)

    def maybe(ws, x):
        return jax.lax.cond(jnp.sum(x) > 0, staged, lambda ws, x: jnp.sum(x), ws, x)

    with pytest.raises(ValueError, match="called inside a `cond` at .*test_schedule.py"):
        jaxpp.schedule(jaxpp.microbatch(maybe, M), ForwardOnly())(WS, X)


def test_loops_over_two_cuts_of_a_function_are_rejected():
    def both(ws, x):
        return jaxpp.wrap_forward(loss_fn)(ws, x) + jaxpp.wrap_forward(loss_fn)(ws[:2], x)

    with pytest.raises(ValueError, match="functions of 2 and 3 stages"):
        jaxpp.schedule(jaxpp.microbatch(both, M), ForwardOnly())(WS, X)


def test_a_value_carried_between_different_tasks_is_rejected():
    staged = jaxpp.wrap_forward(loss_fn)

    def scan(ws, x):
        # What the last stage makes of a microbatch enters the first stage with the next one.
        def step(last, one):
            loss = staged(ws, one + last)
            return loss, loss

        return jax.lax.scan(step, 0.0, x.reshape(M, -1, 4))[1]

    message = (
        r"read by F of stage 0 at .*test_schedule.py:\d+, but made by F of stage 2 at .*test_sched"
    )
    with pytest.raises(ValueError, match=message):
        jaxpp.schedule(scan, ForwardOnly())(WS, X)


@dataclasses.dataclass(frozen=True)
class LastFirst:
    """Runs the microbatches in reverse."""

    def table(self, num_stages, num_microbatches):
        table = ForwardOnly().table(num_stages, num_microbatches)
        return Table(
            tuple(tuple(reversed(tasks)) for tasks in table.ranks), num_stages, num_microbatches
        )


LAST_FIRST: Any = LastFirst()


def test_sums_and_extremes_may_be_taken_in_any_order_but_not_other_carries():
    assert_same(jaxpp.schedule(LOSS, LAST_FIRST), loss_fn, WS, X)
    largest = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M, reduce="max")
    assert_same(jaxpp.schedule(largest, LAST_FIRST), largest, WS, X)
    last = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M, reduce="last")
    with pytest.raises(ScheduleError, match="keep their order"):
        jaxpp.schedule(last, LAST_FIRST)(WS, X)


def with_state(ws, states, x):
    """Stages with running statistics that both their forward and their backward read."""
    new = []
    for i, (w, state) in enumerate(zip(ws, states, strict=True)):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        h = jnp.tanh(x @ w)
        new.append(0.9 * state + 0.1 * h)
        x = h * state
    return jnp.mean((x - 1) ** 2), tuple(new)


STATES = tuple(jax.random.normal(jax.random.key(2), (STAGES, 6 // M, 4)))


def stateful(schedule):
    grad = jax.value_and_grad(jaxpp.wrap_forward(with_state), has_aux=True)
    axes, reduce = (None, "carry", 0), (("mean", "carry"), "mean")
    return jaxpp.schedule(jaxpp.microbatch(grad, M, in_axes=axes, reduce=reduce), schedule)


def plain_stateful(ws, states, x):
    losses, total = [], None
    for one in jnp.split(x, M):
        (loss, states), grads = jax.value_and_grad(with_state, has_aux=True)(ws, states, one)
        losses.append(loss)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return (sum(losses) / M, states), jax.tree.map(lambda g: g / M, total)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()], ids=["1f1b", "zb_h1"])
def test_each_stage_carries_its_state_through_the_microbatches_in_order(schedule):
    fun = stateful(schedule)
    assert_same(fun, plain_stateful, WS, STATES, X)
    step = jaxpp.place(fun, jaxpp.MpmdMesh((STAGES,), devices=jax.devices()[:1] * STAGES))
    got, want = step(WS, STATES, X), jax.jit(fun)(WS, STATES, X)
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(want))
    # A state stays where its stage is.
    jaxpp.testing.assert_no_transfers_of(step, 1)


def test_a_state_may_become_a_constant():
    """As the flag of a running mean that has seen nothing yet, which the backward reads too."""

    def loss(ws, is_first, x):
        for i, (w, first) in enumerate(zip(ws, is_first, strict=True)):
            x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if i else x) @ w)
            x = jnp.where(first, 2 * x, x)
        return jnp.mean(x**2), (jnp.array(False),) * STAGES

    grad = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    axes, reduce = (None, "carry", 0), (("stack", "carry"), "stack")
    fun = jaxpp.schedule(jaxpp.microbatch(grad, M, in_axes=axes, reduce=reduce), OneFOneB())
    (losses, flags), grads = jax.jit(fun)(WS, (jnp.array(True),) * STAGES, X)
    assert not any(flags)
    for m, one in enumerate(jnp.split(X, M)):
        is_first = (jnp.array(m == 0),) * STAGES
        (want, _), want_grads = jax.value_and_grad(loss, has_aux=True)(WS, is_first, one)
        got = losses[m], jax.tree.map(lambda g, m=m: g[m], grads)
        chex.assert_trees_all_close(got, (want, want_grads), rtol=1e-5, atol=1e-7)


def test_a_schedule_that_reorders_what_is_carried_is_an_error_that_names_the_line():
    forward = jaxpp.microbatch(
        jaxpp.wrap_forward(with_state), M, in_axes=(None, "carry", 0), reduce=("mean", "carry")
    )
    with pytest.raises(ScheduleError, match=r"carries a value at .*test_schedule.py:\d+ through"):
        jaxpp.schedule(forward, LAST_FIRST)(WS, STATES, X)


def with_counters(ws, state, x):
    """Stages that count their calls, draw by the count, and keep what they never read."""
    counts, seen = [], []
    for i, (w, count) in enumerate(zip(ws, state["counts"], strict=True)):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        key = jax.random.fold_in(jax.random.key(i), count)
        x = jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.5, x.shape)
        counts.append(count + 1)
        seen.append(jnp.mean(x, 0))
    return jnp.mean((x - 1) ** 2), {"counts": tuple(counts), "seen": tuple(seen)}


@pytest.mark.more
def test_a_count_goes_up_in_the_stage_that_reads_it_and_what_is_never_read_needs_no_rank():
    state = {
        "counts": (jnp.zeros((), jnp.int32),) * STAGES,
        "seen": tuple(jax.random.normal(jax.random.key(3), (STAGES, 4))),
    }
    grad = jax.value_and_grad(jaxpp.wrap_forward(with_counters), has_aux=True)
    axes, reduce = (None, "carry", 0), (("mean", "carry"), "mean")
    loop = jaxpp.microbatch(grad, M, in_axes=axes, reduce=reduce)
    fun = jaxpp.schedule(loop, OneFOneB())
    step = jaxpp.place(fun, jaxpp.MpmdMesh((STAGES,), devices=jax.devices()[:1] * STAGES))
    got, want = step(WS, state, X), jax.jit(loop)(WS, state, X)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-6, atol=1e-7)
    assert [int(n) for n in got[0][1]["counts"]] == [M] * STAGES
    jaxpp.testing.assert_no_transfers_of(step, 1)


def test_an_error_is_a_value_error_too():
    assert issubclass(schedules.ScheduleError, ValueError)


@pytest.mark.more
@pytest.mark.parametrize("reduce", ["stack", "last"])
def test_what_no_task_makes_leaves_the_loop(reduce):
    def aux(ws, x):
        return loss_fn(ws, x), (jnp.float32(3), ws[1])

    gradient = jax.value_and_grad(jaxpp.wrap_forward(aux), has_aux=True)
    plain = jaxpp.microbatch(gradient, M, reduce=(("mean", (reduce, "last")), "mean"))
    scheduled = jaxpp.schedule(plain, OneFOneB())
    assert_same(scheduled, plain, WS, X)
    placed = jaxpp.place(scheduled, jaxpp.MpmdMesh((STAGES,)))
    chex.assert_trees_all_close(placed(WS, X), jax.jit(plain)(WS, X), rtol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("split", [False, True])
def test_a_carry_that_no_microbatch_changes_is_read_by_any_stage(split):
    """As the key is from which each layer folds one of its own, by a count that is carried, too."""

    def loss(w, state, x):
        key, count = state
        scale = 1 + jax.random.uniform(jax.random.fold_in(key, count), (6,))
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]) * scale)
        h = h @ w[1] * jax.random.uniform(key, (4,))
        return jnp.mean(h**2), (key, count + 1)

    def plain(w, state, x):
        values, grads = [], []
        for part in jnp.split(x, two_layers.MICROBATCHES):
            (value, state), grad = jax.value_and_grad(loss, has_aux=True)(w, state, part)
            values.append(value)
            grads.append(grad)
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
        return (sum(values) / len(values), state), mean

    staged = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    loop = jaxpp.microbatch(
        staged,
        two_layers.MICROBATCHES,
        in_axes=(None, "carry", 0),
        reduce=(("mean", "carry"), "mean"),
    )
    schedule = jaxpp.schedules.ZeroBubbleH1() if split else jaxpp.schedules.OneFOneB()
    state = jax.random.key(7), jnp.int32(3)
    args = two_layers.WEIGHTS, state, two_layers.X
    got = two_layers.place(jaxpp.schedule(loop, schedule))(*args)
    (value, (key, count)), grads = jax.jit(plain)(*args)
    assert got[0][1][0] == key and got[0][1][1] == count
    chex.assert_trees_all_close((got[0][0], got[1]), (value, grads), rtol=1e-4, atol=1e-6)


def test_the_passes_of_a_loop_are_shown_with_the_task_of_each_equation():
    """What is hoisted moves before the loop; a backward's halves get names of their own."""

    def loss(ws, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ jnp.exp(ws[0])))
        return jnp.mean((h @ ws[1]) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
    args = [jnp.eye(4), jnp.eye(4)], jax.ShapeDtypeStruct((8, 4), "float32")
    text = jaxpp.schedule(grad, ZeroBubbleH1()).passes_as_text(*args)
    names = ["traced", *(run.__name__ for run in (*STAGE_PASSES, *TABLE_PASSES))]
    assert re.findall(r"==== (\w+) \(loop 0\)", text) == names
    parts = dict(zip(names, re.split("==== .*", text)[1:], strict=True))
    assert "F0 " in parts["traced"] and "B1 " in parts["traced"] and "W1 " not in parts["traced"]
    assert "I1 " in parts["split_backwards"]
    assert "before the loop" not in parts["traced"]
    assert re.search(r"\+before the loop:(\n.*)*?= exp ", parts["hoist"])
    assert re.search(r"\+W0 .*dot_general", parts["split_backwards"])
    assert not parts["split_stacked_sums"].strip()


def test_what_a_step_has_is_asked_of_it_after_place():
    grad_fn: Any = jaxpp.schedule(lambda x: x, OneFOneB())
    with pytest.raises(
        AttributeError, match=r"no attribute 'as_text': .* step = jaxpp\.place\(fun"
    ):
        grad_fn.as_text()
    with pytest.raises(AttributeError, match="no attribute 'as_txt'[.]$"):
        grad_fn.as_txt()
    assert repr(copy.copy(grad_fn)) == repr(grad_fn)
