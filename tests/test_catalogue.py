"""Every schedule of the catalogue trains: a step on its ranks is, bitwise, a step on one device.

Each schedule is trained once, and of `pytest -m slow` with an odd number of microbatches, too. At
all other sizes it is proven that its ranks do what one device does, operation by operation.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from experiments.models import gpt, sliced_gpt
from jaxpp.schedules import CATALOGUE, Kind, Recompute, Schedule, Seq1F1B, Task, by_name
from tests.helpers import assert_close_sums, assert_same

BLOCKS, WIDTH, CONTEXT, STEPS = 8, 8, 6, 2
MICROBATCHES = (4, 6, 8, 9, 16)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
TRAINING = [name for name in CATALOGUE if name != "forward_only"]
# With two ranks, schedules of one stage a rank train nothing new.
SIZES = [(name, 4) for name in TRAINING] + [
    (name, 2) for name in TRAINING if by_name(name).stages_per_rank > 1
]


@dataclasses.dataclass(frozen=True)
class OneAtATime(Schedule):
    """One rank, and one microbatch after the other: what one device would do."""

    stages_per_rank: int = 1
    split: bool = False

    def orders(self, num_ranks, num_microbatches):
        assert num_ranks == 1
        stages = range(self.stages_per_rank)
        halves = (Kind.I, Kind.W) if self.split else (Kind.B,)
        yield [
            task
            for i in range(num_microbatches)
            for task in (
                *(Task(Kind.F, s, i) for s in stages),
                *(Task(kind, s, i) for s in reversed(stages) for kind in halves),
            )
        ]


@functools.cache
def state():
    model = eqx.filter_jit(gpt.GPT)(
        layers=BLOCKS, width=WIDTH, heads=2, context=CONTEXT, key=jax.random.key(0)
    )
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def batch(step: int, num_microbatches: int):
    shape = (2 * num_microbatches, CONTEXT + 1)
    return np.random.default_rng(step).integers(gpt.NUM_BYTES, size=shape, dtype=np.int32)


def loss_of(slices: int | None, groups: int):
    """The loss, on slices of the sequences where there are any."""
    if slices is None:
        return gpt.loss_fn
    return functools.partial(sliced_gpt.loss_fn, slices=slices, groups=groups)


def step_of(grad_fn):
    def step(model, opt_state, tokens):
        loss, grads = grad_fn(model, tokens)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss, grads

    return step


def staged(loss, slices: int | None, num_stages: int):
    if slices is None:
        first = [round(stage * BLOCKS / num_stages) for stage in range(1, num_stages)]
        loss = jaxpp.split_stages(loss, at=[f"blocks.{n}" for n in first])
    return jaxpp.wrap_forward(loss)


def scheduled(schedule, slices, groups: int, num_stages: int, num_microbatches: int):
    loss = staged(loss_of(slices, groups), slices, num_stages)
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(loss), num_microbatches, in_axes=(None, 0))
    return jaxpp.schedule(grad_fn, schedule)


def trained(step, num_microbatches: int):
    """What a step makes after a few: the model, the optimizer's state, the loss, the gradients."""
    model, opt_state = state()
    for i in range(STEPS):
        model, opt_state, loss, grads = step(model, opt_state, batch(i, num_microbatches))
    return [np.asarray(x) for x in jax.tree.leaves((model, opt_state, loss, grads))]


@functools.cache
def on_one_device(
    slices: int | None, groups: int, num_stages: int, num_microbatches: int, split: bool
):
    schedule = OneAtATime(num_stages, split)
    grad_fn = scheduled(schedule, slices, groups, num_stages, num_microbatches)
    step = jaxpp.place(step_of(grad_fn), jaxpp.MpmdMesh((1,)))
    return trained(step, num_microbatches)


@functools.cache
def plain(num_microbatches: int):
    step = eqx.filter_jit(step_of(eqx.filter_value_and_grad(loss_of(None, 1))))
    return trained(step, num_microbatches)


def cases(sizes):
    return [
        pytest.param(name, ranks, m, marks=() if (ranks, m) == (4, 8) else (pytest.mark.slow,))
        for name, ranks, m in sizes
    ]


TRAINED = [(*size, m) for size in SIZES for m in (8, 9)]
#: A transformer on slices of its sequences takes half a minute to prove.
PROVEN = [
    (name, ranks, m)
    for name, ranks in SIZES
    for m in MICROBATCHES
    if name != "seq1f1b" or (ranks, m) == (4, 8)
]


def perceptron(weights, x):
    for n, weight in enumerate(weights):
        with jax.named_scope(f"layer_{n}"):
            x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


@pytest.mark.parametrize(("name", "ranks", "num_microbatches"), cases(PROVEN))
def test_a_schedule_is_proven_to_do_what_one_device_does(name, ranks, num_microbatches):
    schedule = by_name(name)
    num_stages = ranks * schedule.stages_per_rank
    if isinstance(schedule, Seq1F1B):
        loss, model = staged(loss_of(schedule.slices, ranks), schedule.slices, num_stages), state()
        data = batch(0, num_microbatches)
    else:
        loss = jaxpp.wrap_forward(jaxpp.split_stages(perceptron, num_stages=num_stages))
        model = [jnp.eye(4)] * num_stages
        model, data = (model, OPTIMIZER.init(model)), jnp.ones((2 * num_microbatches, 4))
    grad_fn = eqx.filter_value_and_grad(loss)
    grad_fn = jaxpp.microbatch(grad_fn, num_microbatches, in_axes=(None, 0))
    mesh = jaxpp.MpmdMesh((ranks,), devices=jax.devices()[:1] * ranks)
    step = jaxpp.place(step_of(jaxpp.schedule(grad_fn, schedule)), mesh)
    if schedule.broken_rule(ranks, num_microbatches):
        with pytest.raises(ValueError, match=r"needs .*, got .*; use \d+.* (microbatches|ranks)"):
            jaxpp.certify(step, *model, data)
        return
    certificate = jaxpp.certify(step, *model, data)
    assert certificate.exact and not certificate.undecided


@pytest.mark.parametrize(("name", "ranks", "num_microbatches"), cases(TRAINED))
def test_a_schedule_trains_as_one_device(name, ranks, num_microbatches):
    schedule = by_name(name)
    num_stages = ranks * schedule.stages_per_rank
    slices = schedule.slices if isinstance(schedule, Seq1F1B) else None
    grad_fn = scheduled(schedule, slices, ranks, num_stages, num_microbatches)
    step = jaxpp.place(step_of(grad_fn), jaxpp.MpmdMesh((ranks,)))
    if schedule.broken_rule(ranks, num_microbatches):
        with pytest.raises(ValueError, match=r"needs .*, got .*; use \d+.* (microbatches|ranks)"):
            step(*state(), batch(0, num_microbatches))
        return
    got = trained(step, num_microbatches)
    table = schedule.table(num_stages, num_microbatches)
    if len(table.directions) == 1:
        want = on_one_device(slices, ranks, num_stages, num_microbatches, table.splits_backward)
    else:  # sums its gradients in two parts: the same on one device
        shared = jaxpp.MpmdMesh((ranks,), devices=jax.devices()[:1] * ranks)
        step = jaxpp.place(step_of(grad_fn), shared)
        want = trained(step, num_microbatches)
    assert_same(got, want)
    assert_close_sums(got, plain(num_microbatches), least=1.0)


def test_recomputations_change_no_bit():
    """On the last rank either, whose forward accumulates the loss."""
    grad_fn = scheduled(Recompute("zb_h1", microbatches=range(1, 8)), None, 1, 4, 8)
    step = jaxpp.place(step_of(grad_fn), jaxpp.MpmdMesh((4,)))
    assert_same(trained(step, 8), on_one_device(None, 4, 4, 8, True))


@pytest.mark.slow
def test_a_wrong_gradient_would_be_seen():
    """One bias whose gradient has the wrong sign fails both comparisons."""
    want = on_one_device(None, 1, 1, 4, False)
    grad_fn = scheduled(OneAtATime(), None, 1, 1, 4)

    def wrong(model, tokens):
        loss, grads = grad_fn(model, tokens)
        return loss, eqx.tree_at(lambda m: m.blocks[3].mlp.up.bias, grads, replace_fn=jnp.negative)

    got = trained(jaxpp.place(step_of(wrong), jaxpp.MpmdMesh((1,))), 4)
    assert any(not np.array_equal(x, y) for x, y in zip(got, want, strict=True))
    assert any(np.abs(x - y).max() > 1e-5 for x, y in zip(got, plain(4), strict=True))
