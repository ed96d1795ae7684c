"""A table with recomputations gives the same bits, with fewer activations kept."""

import random

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback

import jaxpp
import jaxpp.testing
from jaxpp import schedules
from jaxpp._program import Run
from jaxpp.schedules import FromTable, Kind, Recompute, Task, by_name
from tests.helpers import assert_same, mesh_of
from tests.transforms.tasks.test_schedule import GRAD, STAGES, STATES, WS, X, stateful

LAYERS, M = 4, 8
OPTIMIZER = optax.adamw(1e-2)
PARAMS = [
    {name: jax.random.normal(key, shape) / 2
     for key, (name, shape) in zip(
         jax.random.split(jax.random.key(i), 3),
         {"in": (4, 8), "out": (8, 4), "scale": (4,)}.items(), strict=True)}
    for i in range(LAYERS)
]  # fmt: skip


def data(step):
    return jax.random.normal(jax.random.key(100 + step), (16, 5, 4))


def loss_fn(params, x):
    """Residual blocks with a norm; the last also reads what the first one makes, and its weight."""
    first = None
    for i, p in enumerate(params):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        h = x - x.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * p["scale"]
        x = x + jax.nn.gelu(h @ p["in"]) @ p["out"]
        first = x if i == 0 else first
    return jnp.mean((x + first @ params[0]["in"] @ params[0]["out"]) ** 2), x.sum((1, 2))


def placed(schedule, mesh, policy=None):
    staged = jaxpp.wrap_forward(loss_fn, policy=policy)
    grad = jax.value_and_grad(staged, has_aux=True)
    grad_fn = jaxpp.schedule(
        jaxpp.microbatch(grad, M, reduce=(("mean", "concat"), "mean")), schedule
    )

    def step(params, opt_state, x):
        loss, grads = grad_fn(params, x)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    return jaxpp.place(step, mesh)


def trained(schedule, mesh, policy=None):
    step = placed(schedule, mesh, policy)
    params, opt_state = PARAMS, OPTIMIZER.init(PARAMS)
    losses = []
    for i in range(2):
        params, opt_state, *rest = step(params, opt_state, data(i))
        losses.append(rest)
    return step, jax.device_get((params, opt_state, losses))


def some(table, seed):
    """The table with recomputations for any half of its stages' microbatches, at any place."""
    chosen = random.Random(seed)
    table = table.with_recomputation(lambda task: chosen.random() < 0.5)
    ranks = []
    for order in map(list, table.ranks):
        for task in [task for task in order if task.kind is Kind.R]:
            forward = order.index(Task(Kind.F, task.stage, task.microbatch))
            at = order.index(task)
            place = chosen.randint(forward + 1, at)
            if not table.overlaps:
                order.insert(place, order.pop(at))
        ranks.append(tuple(order))
    return schedules.Table(
        tuple(ranks), table.num_stages, table.num_microbatches, table.placement,
        table.stage_inputs, table.overlaps, table.direction_of,
    )  # fmt: skip


CASES = [("interleaved_1f1b", 2), ("1f1b", 4), ("zb_h1", 4), ("dualpipe", 4), ("chimera", 4),
         ("gpipe(stages_per_rank=4)", 1), ("zb_v", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_gradients_are_the_same_bits(optimized, name, ranks):
    mesh, table = mesh_of(ranks), by_name(name).table(LAYERS, M)
    plain, want = trained(FromTable(table), mesh)
    for own in (Recompute(name), FromTable(some(table, 0)), FromTable(some(table, 1))):
        step, got = trained(own, mesh)
        assert_same(got, want)
        # What is computed again is sent nowhere.
        assert jaxpp.testing.count_sends(step) == jaxpp.testing.count_sends(plain)


def test_recomputations_may_stand_at_any_place():
    places = {
        order.index(task) - order.index(Task(Kind.F, task.stage, task.microbatch))
        for seed in range(4)
        for order in some(by_name("1f1b").table(LAYERS, M), seed).ranks
        for task in order
        if task.kind is Kind.R
    }
    assert len(places) > 3


@pytest.mark.more
def test_a_stage_with_a_policy_keeps_little_to_recompute(optimized):
    policy, mesh = jax.checkpoint_policies.nothing_saveable, mesh_of(LAYERS)
    _, want = trained(by_name("1f1b"), mesh, policy)
    _, got = trained(Recompute("1f1b"), mesh, policy)
    assert_same(got, want)


# ---- what is computed again ---------------------------------------------------------------------


def runs_of(step, *args):
    """The labels and the computations of each rank's runs."""
    programs = step.lower(*args).bundle.programs
    return [
        {i.label: i.computation for i in p.instructions if isinstance(i, Run)} for p in programs
    ]


def test_a_recomputation_runs_the_forward_of_its_stage():
    """The same program, so that it makes the same bits, and needs no compilation."""
    mesh = mesh_of(LAYERS)
    step, _ = trained(Recompute("1f1b", stages=[1]), mesh)
    for rank, labels in enumerate(runs_of(step, PARAMS, OPTIMIZER.init(PARAMS), data(0))):
        again = {label for label in labels if label[0] == "R"}
        assert again == ({f"R1.{m}" for m in range(M)} if rank == 1 else set())
        assert {labels[label] for label in again} <= {
            number for label, number in labels.items() if label[0] == "F"
        }


def test_what_is_computed_again_is_dropped():
    """Of all microbatches but one a rank keeps the inputs of its stage alone."""
    mesh = mesh_of(LAYERS)
    peaks = []
    for name in ("gpipe", "jaxpp.schedules:Recompute(schedule='gpipe')"):
        step, _ = trained(by_name(name), mesh)
        arguments = PARAMS, OPTIMIZER.init(PARAMS), data(0)
        prediction = jaxpp.predict(step, *arguments, costs=schedules.Costs())
        peaks.append([peak.bytes["activations"] for peak in prediction.peaks])
    assert all(2 * after < before for before, after in zip(*peaks, strict=True))


@pytest.mark.more
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_what_a_stage_carries_is_handed_on_once(optimized, name):
    """Its forward reads the state before it is replaced, and keeps what depends on it."""
    step, again = (
        jaxpp.place(stateful(schedule), mesh_of(STAGES))
        for schedule in (by_name(name), Recompute(name))
    )
    assert_same(jax.device_get(again(WS, STATES, X)), jax.device_get(step(WS, STATES, X)))
    labels = {label for own in runs_of(again, WS, STATES, X) for label in own}
    assert {f"R{stage}.{m}" for stage in range(STAGES) for m in range(3)} <= labels


def test_what_a_stage_prints_is_printed_once(capfd):
    def loss(ws, x):
        y = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        jax.debug.print("rows {}", y.shape[0])
        return jnp.mean(jnp.sin(y @ ws[1]) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 3)
    step = jaxpp.place(jaxpp.schedule(grad, Recompute("1f1b")), mesh_of(2))
    got = jax.device_get(step(WS[:2], X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n") == ["rows 2"] * 3 + [""]
    assert any(label == "R1.2" for own in runs_of(step, WS[:2], X) for label in own)
    want = jaxpp.place(jaxpp.schedule(grad, by_name("1f1b")), mesh_of(2))(WS[:2], X)
    assert_same(got, jax.device_get(want))


def test_a_value_from_an_effect_is_kept():
    """A callback is called once, and the backward reads what it gave to the forward."""
    calls = []

    def host(x):
        calls.append(None)
        return x * len(calls)

    def loss(ws, x):
        y = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        ordered = io_callback(host, y, jax.lax.stop_gradient(y))
        return jnp.mean(jnp.sin(y @ ws[1]) * ordered)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 3)
    jax.device_get(jaxpp.place(jaxpp.schedule(grad, Recompute("1f1b")), mesh_of(2))(WS[:2], X))
    assert len(calls) == 3


def test_on_one_device_nothing_is_computed_again():
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn), has_aux=True), M,
                            reduce=(("mean", "concat"), "mean"))  # fmt: skip
    plain, again = (jaxpp.schedule(grad, s) for s in (by_name("1f1b"), Recompute("1f1b")))
    texts = [jax.jit(fun).lower(PARAMS, data(0)).as_text() for fun in (plain, again)]
    assert texts[0] == texts[1]


@pytest.mark.more
def test_a_batch_of_recomputations():
    fun = jax.vmap(jaxpp.schedule(GRAD, Recompute("1f1b")), (None, 0))
    xs = jnp.stack([X, 2 * X])
    step = jaxpp.place(fun, mesh_of(STAGES))
    got = jax.device_get(step(WS, xs))
    want = jaxpp.place(jax.vmap(jaxpp.schedule(GRAD, by_name("1f1b")), (None, 0)), mesh_of(STAGES))(
        WS, xs
    )
    assert_same(got, jax.device_get(want))
    assert any(label == "R0.0" for own in runs_of(step, WS, xs) for label in own)
