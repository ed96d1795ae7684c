"""The laws that hold for any function: what the transforms may not change, and what a step may do.

Each is tested over models, schedules, numbers of microbatches, ranks and stages per rank. The
default run has a selection in which every pair of these occurs; `pytest -m slow` runs all others,
or as many of them as `JAXPP_LAWS` says, drawn by `JAXPP_SEED`.
"""

import dataclasses
import functools
import itertools
import os
import random

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp import testing
from jaxpp._program import Free, Receive, Run, Send
from tests import models
from tests.helpers import assert_close_sums, mesh_of, train_step_of

# The large epsilon keeps the noise of gradients near zero from being blown up to a whole step.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))

SCHEDULES = {
    "1f1b": ((1,), lambda v: jaxpp.schedules.OneFOneB()),
    "gpipe": ((1, 2), jaxpp.schedules.GPipe),
    "eager_1f1b": ((1,), lambda v: jaxpp.schedules.Eager1F1B()),
    "interleaved_1f1b": ((2,), jaxpp.schedules.Interleaved1F1B),  # of one stage it is 1F1B
    "zb_h1": ((1,), lambda v: jaxpp.schedules.ZeroBubbleH1()),
    "forward_only": ((1, 2), jaxpp.schedules.ForwardOnly),
}


@functools.cache
def make_case(name: str, dtype=jnp.float32) -> models.Case:
    return models.CASES[name](dtype)


def init_optimizer(model):
    return OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


train_step = functools.partial(train_step_of, OPTIMIZER)


@functools.cache
def plain_step(name: str, dtype=jnp.float32):
    """The train step of one device, with the whole batch at once."""
    return eqx.filter_jit(train_step(eqx.filter_value_and_grad(make_case(name, dtype).loss)))


@functools.cache
def plain_loss(name: str):
    return eqx.filter_jit(make_case(name).loss)


def staged(case: models.Case, num_stages: int):
    return jaxpp.wrap_forward(jaxpp.split_stages(case.loss, num_stages=num_stages))


def pipelined(case: models.Case, schedule, num_stages: int, num_microbatches: int):
    """The scheduled loss, and its gradient where the schedule has a backward."""
    fun = staged(case, num_stages)
    if not isinstance(schedule, jaxpp.schedules.ForwardOnly):
        fun = eqx.filter_value_and_grad(fun)
    fun = jaxpp.microbatch(fun, num_microbatches, in_axes=case.in_axes)
    return jaxpp.schedule(fun, schedule)


def place_train_step(case, schedule, num_stages, num_microbatches, ranks, *, shared=False):
    grad_fn = pipelined(case, schedule, num_stages, num_microbatches)
    return jaxpp.place(train_step(grad_fn), mesh_of(ranks, shared), donate_argnums=(0, 1))


pytestmark = pytest.mark.cases(2)

# ---- the matrix ---------------------------------------------------------------------------------

MATRIX = [
    (model, schedule, m, ranks, v)
    for model, schedule in itertools.product(models.CASES, SCHEDULES)
    for m, ranks, v in itertools.product((1, 2, 3, 8), (2, 4), SCHEDULES[schedule][0])
]


BY_SIZE = ("control_flow", "encoder_decoder", "mlp", "tied", "mixture_of_experts", "gpt")


def _pairs(config):
    return set(itertools.combinations(enumerate(config), 2))


def _covering(matrix):
    """A selection, chosen greedily, in which every pair of values of the matrix occurs."""
    left = set().union(*map(_pairs, matrix))
    chosen = []
    while left:
        # Of equals one of few stages, a small model, and several microbatches.
        best = max(
            matrix,
            key=lambda c: (len(_pairs(c) & left), -c[3] * c[4], -BY_SIZE.index(c[0]), c[2] == 3),
        )
        left -= _pairs(best)
        chosen.append(best)
    return chosen


COVERING = _covering(MATRIX)


def _draw(matrix, number, seed):
    return random.Random(seed).sample(matrix, number)


def pytest_generate_tests(metafunc):
    if "config" in metafunc.fixturenames:
        rest = [c for c in MATRIX if c not in COVERING]
        if number := os.environ.get("JAXPP_LAWS"):
            rest = _draw(rest, int(number), os.environ.get("JAXPP_SEED", ""))
        marks = [(c, ()) for c in COVERING] + [(c, pytest.mark.slow) for c in rest]
        params = [pytest.param(c, id="-".join(map(str, c)), marks=m) for c, m in marks]
        metafunc.parametrize("config", params)


def test_every_model_meets_every_schedule_on_two_ranks_or_more():
    assert {c[:2] for c in COVERING} == set(itertools.product(models.CASES, SCHEDULES))
    assert min(c[3] for c in MATRIX) >= 2


def test_a_seed_draws_the_same_again_and_another_seed_draws_others():
    first, again, other = (_draw(MATRIX, 60, seed) for seed in ("1", "1", "2"))
    assert first == again != other and len(set(first)) == 60


@functools.lru_cache(64)
def placed(config, shared: bool = False):
    """The step of a point of the matrix, and the plain one: placed step, reference, arguments."""
    name, schedule, num_microbatches, ranks, stages_per_rank = config
    case, schedule = make_case(name), SCHEDULES[schedule][1](stages_per_rank)
    grad_fn = pipelined(case, schedule, ranks * stages_per_rank, num_microbatches)
    if config[1] == "forward_only":
        return jaxpp.place(grad_fn, mesh_of(ranks, shared)), plain_loss(name), (case.model,)
    step = jaxpp.place(train_step(grad_fn), mesh_of(ranks, shared), donate_argnums=(0, 1))
    return step, plain_step(name), (case.model, init_optimizer(case.model))


@functools.lru_cache(64)
def lowered(config):
    step, _, args = placed(config)
    return step.lower(*args, *make_case(config[0]).data(0))


# ---- law 1: the transforms keep values, and commute with grad and vmap --------------------------

CUTS = {
    "split_stages": lambda fun: jaxpp.split_stages(fun, num_stages=3),
    "wrap_forward": lambda fun: jaxpp.wrap_forward(jaxpp.split_stages(fun, num_stages=3)),
}


@functools.cache
def plain_value_and_grad(name: str):
    case = make_case(name)
    return eqx.filter_jit(eqx.filter_value_and_grad(case.loss))(case.model, *case.data(0))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", models.CASES)
def test_a_cut_function_has_the_value_and_gradient_of_the_plain_one(name, cut):
    case = make_case(name)
    cut_fun = eqx.filter_jit(eqx.filter_value_and_grad(CUTS[cut](case.loss)))
    assert_close_sums(cut_fun(case.model, *case.data(0)), plain_value_and_grad(name), 1e-6)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["mlp", "encoder_decoder"])
def test_the_gradient_can_be_cut_too(name, cut):
    case = make_case(name)
    cut_gradient = eqx.filter_jit(CUTS[cut](eqx.filter_value_and_grad(case.loss)))
    assert_close_sums(cut_gradient(case.model, *case.data(0)), plain_value_and_grad(name), 1e-6)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["encoder_decoder", "control_flow"])
def test_a_cut_commutes_with_vmap(name, cut):
    case = make_case(name)
    batches = jax.tree.map(lambda *xs: jnp.stack(xs), *(case.data(i) for i in range(3)))

    def mapped(fun):
        return lambda model, *data: jax.vmap(functools.partial(fun, model))(*data)

    want = eqx.filter_jit(mapped(case.loss))(case.model, *batches)
    for fun in (mapped(CUTS[cut](case.loss)), CUTS[cut](mapped(case.loss))):
        assert_close_sums(eqx.filter_jit(fun)(case.model, *batches), want, 1e-6)


@functools.cache
def plain_loop(name: str):
    case = make_case(name)
    loop = jaxpp.microbatch(eqx.filter_value_and_grad(case.loss), 3, in_axes=case.in_axes)
    return eqx.filter_jit(loop)(case.model, *case.data(0))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", models.CASES)
def test_a_scheduled_function_has_the_values_of_the_plain_loop(name, schedule):
    case = make_case(name)
    scheduled = eqx.filter_jit(pipelined(case, SCHEDULES[schedule][1](1), 4, 3))
    assert_close_sums(scheduled(case.model, *case.data(0)), plain_loop(name), 1e-6)


def test_a_loop_that_runs_backwards_hands_its_state_backwards():
    ws, loss = chain(2)
    x = jax.random.normal(jax.random.key(4), (6, 4))

    def backwards(ws, x):
        def body(state, x):
            value = jaxpp.wrap_forward(loss)(ws, x)
            return 0.5 * state + value, value

        return jax.lax.scan(body, 0.0, x.reshape(3, 2, 4), reverse=True)

    scheduled = jaxpp.schedule(backwards, jaxpp.schedules.ForwardOnly())
    want = jax.jit(backwards)(ws, x)
    assert_close_sums(jax.jit(scheduled)(ws, x), want)
    assert_close_sums(jaxpp.place(scheduled, mesh_of(2))(ws, x), want)


# ---- law 2: microbatches change nothing but memory ----------------------------------------------


@pytest.mark.parametrize("name", models.CASES)
def test_the_mean_gradient_of_microbatches_is_that_of_the_batch(name):
    assert_close_sums(plain_loop(name), plain_value_and_grad(name), 1e-5)


@pytest.mark.parametrize(
    ("name", "num_microbatches"), [*((n, 3) for n in models.CASES), ("mlp", 1)]
)
def test_the_gradient_of_a_mean_over_microbatches_is_that_of_the_batch(name, num_microbatches):
    case = make_case(name)
    loop = jaxpp.microbatch(case.loss, num_microbatches, in_axes=case.in_axes)
    got = eqx.filter_jit(eqx.filter_value_and_grad(loop))(case.model, *case.data(0))
    assert_close_sums(got, plain_value_and_grad(name), 1e-5)


def temporary_bytes(fun, *args) -> int:
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_microbatching_the_gradient_or_the_loss_takes_the_memory_of_one_microbatch():
    ws, loss = chain(8)
    x = jnp.ones((8192, 4))
    whole = temporary_bytes(jax.value_and_grad(loss), ws, x)
    inside = temporary_bytes(jaxpp.microbatch(jax.value_and_grad(loss), 8), ws, x)
    outside = temporary_bytes(jax.value_and_grad(jaxpp.microbatch(loss, 8)), ws, x)
    assert inside < whole / 4
    assert outside < 1.1 * inside


# ---- law 3: the same results --------------------------------------------------------------------


def test_a_placed_step_gives_what_the_plain_step_gives(config):
    step, reference, args = placed(config)
    testing.assert_matches_single_device(step, reference, *args, data=make_case(config[0]).data)


def test_a_placed_step_gives_the_same_bits_on_one_device(config):
    step, _, args = placed(config)
    shared, *_ = placed(config, shared=True)
    data = make_case(config[0]).data
    testing.assert_matches_single_device(step, shared, *args, data=data, bitwise=True)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages_per_rank"),
    [("gpipe", 4, 1), ("eager_1f1b", 4, 1), ("interleaved_1f1b", 2, 2), ("gpipe", 1, 4)],
)
@pytest.mark.parametrize("name", ["tied", "encoder_decoder"])
def test_tables_that_split_the_backward_alike_give_the_same_bits(
    name, schedule, ranks, stages_per_rank
):
    one, _, args = placed((name, "1f1b", 3, 4, 1))
    other, *_ = placed((name, schedule, 3, ranks, stages_per_rank))
    testing.assert_matches_single_device(other, one, *args, data=make_case(name).data, bitwise=True)


def trained(step, case: models.Case):
    """The model after three steps, on copies."""
    model = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, case.model)
    opt_state = init_optimizer(model)
    for i in range(3):
        model, opt_state, _ = step(model, opt_state, *case.data(i))
    return model


@pytest.mark.parametrize(
    "name", ["mlp", "tied", pytest.param("mixture_of_experts", marks=pytest.mark.slow)]
)
def test_a_step_in_bfloat16_is_as_close_as_its_resolution(name):
    case = make_case(name, jnp.bfloat16)
    step = place_train_step(case, jaxpp.schedules.OneFOneB(), 2, 3, 2)
    resolution = float(jnp.finfo(jnp.bfloat16).resolution)
    plain = trained(plain_step(name, jnp.bfloat16), case)
    assert_close_sums(trained(step, case), plain, resolution)
    with pytest.raises(AssertionError):  # the steps went further than that
        assert_close_sums(case.model, plain, resolution)


def with_gradient_scaled(low, label: str, factor: float):
    """A lowered step in which one task adds `factor` times a weight's gradient to the sum.

    0 drops the gradient of that microbatch, and 2 takes it twice.
    """
    bundle = low.bundle
    program = next(p for p in bundle.programs if any(r.label == label for r in runs(p)))
    run = next(r for r in runs(program) if r.label == label)
    computation = bundle.computations[run.computation]
    jaxpr = computation.jaxpr
    added = {
        frozenset(e.invars) & frozenset(jaxpr.jaxpr.invars): e.outvars[0]
        for e in jaxpr.eqns
        if e.primitive.name in ("add", "add_any") and e.outvars[0].aval.ndim == 2
    }
    donated = {jaxpr.jaxpr.invars[i]: i for i in computation.donated}
    ((sums, total), *_) = [(s, t) for s, t in added.items() if len(s) == 1 and s <= set(donated)]
    i, o = donated[next(iter(sums))], jaxpr.jaxpr.outvars.index(total)

    def scaled(*args):
        outputs = jex.jaxpr_as_fun(jaxpr)(*args)
        outputs[o] = args[i] + factor * (outputs[o] - args[i])
        return outputs

    changed = jax.make_jaxpr(scaled)(*(v.aval for v in jaxpr.jaxpr.invars))
    changed = dataclasses.replace(computation, jaxpr=changed)
    instructions = tuple(
        dataclasses.replace(r, computation=len(bundle.computations)) if r is run else r
        for r in program.instructions
    )
    programs = list(bundle.programs)
    programs[program.rank] = dataclasses.replace(program, instructions=instructions)
    bundle = dataclasses.replace(
        bundle, programs=tuple(programs), computations=(*bundle.computations, changed)
    )
    return dataclasses.replace(low, bundle=bundle)


def runs(program):
    return [i for i in program.instructions if isinstance(i, Run)]


@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("label", ["B1.2", "B3.0"])
def test_a_dropped_or_doubled_gradient_breaks_the_law(label, factor):
    config = ("encoder_decoder", "1f1b", 3, 4, 1)
    step, reference, args = placed(config)
    changed = with_gradient_scaled(lowered(config), label, factor).compile()
    data = make_case("encoder_decoder").data
    if factor == 1:  # the change itself does no harm
        testing.assert_matches_single_device(changed, reference, *args, data=data)
        return
    with pytest.raises(AssertionError, match="step 0: result"):
        testing.assert_matches_single_device(changed, reference, *args, data=data)
    with pytest.raises(AssertionError, match="every bit must be equal"):
        testing.assert_matches_single_device(changed, step, *args, data=data, bitwise=True)


# ---- law 4: what a rank holds -------------------------------------------------------------------


def activations(program, bundle) -> dict[tuple[str, str], range]:
    """From which to which instruction a rank holds what an F keeps for the backward of its stage.

    By (stage, microbatch) of each F; a range of one instruction where the F keeps nothing.
    """
    held, values, received = {}, {}, set()  # values: the F of each slot, and whether it is kept
    for index, instruction in enumerate(program.instructions):
        gone = ()
        match instruction:
            case Receive(slots):
                received.update(slots)
            case Run(number, inputs, outputs, label):
                donated = bundle.computations[number].donated
                kind, task = label[0], tuple(label[1:].split("."))
                gone = [inputs[i] for i in donated]
                if kind in "BIW":
                    values.update(
                        (s, (task, True)) for s in inputs if values.get(s, "?")[0] == task
                    )
                if kind == "F":
                    made = outputs[: len(outputs) - len(donated)]  # the rest are accumulators
                    values.update((s, (task, False)) for s in (*made, *(received & set(inputs))))
                    held[task] = range(index, index + 1)
                received -= set(inputs)
            case Free(slots):
                gone = slots
        for task, kept in (values.pop(s) for s in gone if s in values):
            if kept:
                held[task] = range(held[task].start, index)
    for task, kept in values.values():
        if kept:
            held[task] = range(held[task].start, len(program.instructions))
    return held


def peak_activations(bundle) -> tuple[int, ...]:
    """The most activations that each rank holds at once."""
    held = [activations(p, bundle).values() for p in bundle.programs]
    return tuple(max(sum(r.start in other for other in own) for r in own) for own in held)


def table_of(config):
    _, schedule, num_microbatches, ranks, stages_per_rank = config
    return SCHEDULES[schedule][1](stages_per_rank).table(ranks * stages_per_rank, num_microbatches)


def test_a_rank_holds_the_activations_that_the_table_says(config):
    bundle, table = lowered(config).bundle, table_of(config)
    held = [activations(p, bundle).values() for p in bundle.programs]
    if table.forward_only or all(len(r) > 1 for own in held for r in own):
        assert peak_activations(bundle) == table.peak_in_flight()
    else:  # a stage that keeps nothing, such as one linear layer of the batch
        assert np.all(np.array(peak_activations(bundle)) <= table.peak_in_flight())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_of_equal_layers_holds_an_activation(schedule):
    config = ("encoder_decoder", schedule, 8, 4, 1)
    assert peak_activations(lowered(config).bundle) == table_of(config).peak_in_flight()


def held_too_long(bundle) -> list[str]:
    """The values made in a step that their rank holds past their last use."""
    late = []
    for program in bundle.programs:
        last_use: dict[int, int] = {}  # of each slot with a value made in the step
        for index, instruction in enumerate(program.instructions):
            match instruction:
                case Receive(slots):
                    last_use.update((s, index) for s in slots)
                case Send(slots):
                    last_use.update((s, index) for s in slots if s in last_use)
                case Run(number, inputs, outputs):
                    last_use.update((s, index) for s in inputs if s in last_use)
                    for i in bundle.computations[number].donated:
                        last_use.pop(inputs[i], None)
                    last_use.update((s, index) for s in outputs)
                case Free(slots):
                    for slot in slots:
                        since = last_use.pop(slot, index)
                        between = program.instructions[since + 1 : index]
                        if any(isinstance(i, Run | Receive) for i in between):
                            late.append(f"rank {program.rank}: slot {slot} from {since} to {index}")
        kept = {slot for _, slot in program.outputs}
        late += [f"rank {program.rank}: slot {s} after the step" for s in last_use if s not in kept]
    return late


def test_a_rank_frees_what_it_made_at_the_last_use(config):
    assert not held_too_long(lowered(config).bundle)


def without_frees(bundle):
    """A bundle that frees nothing before the last instruction of each program."""
    programs = []
    for program in bundle.programs:
        frees = [i for i in program.instructions if isinstance(i, Free)]
        rest = [i for i in program.instructions if not isinstance(i, Free)]
        programs.append(dataclasses.replace(program, instructions=(*rest, *frees)))
    return dataclasses.replace(bundle, programs=tuple(programs))


def test_activations_that_are_not_freed_break_the_law():
    config = ("mlp", "1f1b", 8, 4, 1)
    bundle = without_frees(lowered(config).bundle)
    assert held_too_long(bundle)
    assert peak_activations(bundle) != peak_activations(lowered(config).bundle)


# ---- law 5: what is sent ------------------------------------------------------------------------


def test_nothing_but_edges_shared_gradients_and_scalars_is_sent(config):
    bundle = lowered(config).bundle
    sent = {kind for p in bundle.programs for s in p.sends for kind in s.message.kinds}
    assert {"edge"} <= sent <= {"edge", "gradient", "scalar"}
    for n, _ in enumerate(placed(config)[2]):
        testing.assert_no_transfers_of(bundle, n)


def chain(num_stages: int):
    """A chain of equal stages, marked."""
    ws = [w for w in jax.random.normal(jax.random.key(0), (num_stages, 4, 4)) / 2]

    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jaxpp.pipeline_enter_stage(x) if i else x
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return ws, loss


def with_skip():
    """Four stages; what the first one makes is read by the last one too."""
    ws, _ = chain(4)

    def loss(ws, x):
        first = jnp.tanh(x @ ws[0])
        x = jnp.tanh(jaxpp.pipeline_enter_stage(first) @ ws[1])
        x = jnp.tanh(jaxpp.pipeline_enter_stage(x) @ ws[2])
        x = jnp.tanh(jaxpp.pipeline_enter_stage(x) @ ws[3] + first)
        return jnp.mean(x**2)

    return ws, loss


def with_tied_ends():
    """Four stages; the last one reads the first one's weight, transposed."""
    ws, _ = chain(3)

    def loss(ws, x):
        for i, w in enumerate((*ws, ws[0].T)):
            x = jaxpp.pipeline_enter_stage(x) if i else x
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return ws, loss


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("model", "edges", "gradients"),
    [
        # Each microbatch crosses each of the 3 cuts there and back.
        (chain(4), 2 * 3 * 5, 0),
        # The skip goes from rank 0 to rank 3 as well, and its cotangent back.
        (with_skip(), 2 * (3 + 1) * 5, 0),
        # Once a step, both ends send each other their part of the tied weight's gradient.
        (with_tied_ends(), 2 * 3 * 5, 2),
    ],
    ids=["chain", "skip", "tied"],
)
def test_the_messages_of_a_step_are_those_counted_by_hand(model, edges, gradients, clip, schedule):
    ws, loss = model
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 5)
    grad_fn = jaxpp.schedule(grad_fn, SCHEDULES[schedule][1](1))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0) if clip else optax.identity(), optax.adam(1e-3)
    )

    def step(ws, opt_state, x):
        loss, grads = grad_fn(ws, x)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(ws, updates), opt_state, loss

    low = jaxpp.place(step, mesh_of(4)).lower(ws, optimizer.init(ws), jnp.ones((10, 4)))
    # The norm: each other rank sends its part to rank 0, which sends the whole back.
    scalars = 2 * 3 if clip else 0
    assert testing.count_sends(low, "edge") == edges
    assert testing.count_sends(low, "gradient") == gradients
    assert testing.count_sends(low, "scalar") == scalars
    assert testing.count_sends(low) == edges + gradients + scalars
    testing.assert_no_transfers_of(low, ws)
    testing.assert_no_transfers_of(low, 1)


# ---- law 7: what jax.jit respects ---------------------------------------------------------------


def _under(partitionable):
    def noisy(w):
        with jax.threefry_partitionable(partitionable):
            return w * jax.random.uniform(jax.random.key(0), (3, 5)).sum()

    return noisy


def _rounded(mantissa_bits):
    return lambda w: jax.lax.reduce_precision(w, 8, mantissa_bits)


def _difference(swapped):
    def difference(w):
        one, other = jnp.sin(3 * w), w
        return other - one if swapped else one - other

    return difference


def _scan(reverse):
    return lambda w: jax.lax.scan(lambda c, x: (c / 2 + x, None), w, w, reverse=reverse)[0]


ALIKE = {
    "derivative rules": (models.with_backward(2.0), models.with_backward(100.0)),
    "rules of tangents": (models.with_tangent(2.0), models.with_tangent(100.0)),
    "configuration": (_under(False), _under(True)),
    "parameters": (_rounded(3), _rounded(23)),
    "constants": (lambda w: w * np.float32(2.0), lambda w: w * np.float32(3.0)),
    "the order of operands": (_difference(swapped=False), _difference(swapped=True)),
    "the direction of a loop": tuple(
        functools.partial(
            lambda reverse, w: jax.lax.scan(
                lambda c, x: (0.5 * c + x, None), w, w, reverse=reverse
            )[0],
            reverse,
        )
        for reverse in (False, True)
    ),
}


def accumulated(loss, num_microbatches: int):
    """Value and gradient, microbatch by microbatch, with nothing of this library."""

    def grad_fn(ws, x):
        parts = [jax.value_and_grad(loss)(ws, part) for part in jnp.split(x, num_microbatches)]
        return jax.tree.map(lambda *ys: sum(ys) / num_microbatches, *parts)

    return jax.jit(grad_fn)


@pytest.mark.parametrize("read", ["activations", "weights"])
@pytest.mark.parametrize("unlike", ALIKE)
def test_stages_that_differ_in_one_thing_are_not_one_computation(unlike, read):
    """Four stages of the same shape; what is done to weights is done once, before the loop."""

    def make_loss(first, second):
        def loss(ws, x):
            for w, fun in zip(ws, [first, second, first, first], strict=True):
                x = jaxpp.pipeline_enter_stage(x) if w is not ws[0] else x
                x = jnp.tanh(fun(x @ w) if read == "activations" else x @ fun(w))
            return jnp.mean((x - 0.3) ** 2)

        return loss

    ws = [jnp.eye(4) + 0.1 * w for w in jax.random.normal(jax.random.key(3), (4, 4, 4))]
    x = jax.random.normal(jax.random.key(4), (4, 4))
    first, second = ALIKE[unlike]
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(make_loss(first, second))), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    got = jaxpp.place(grad_fn, mesh_of(4))(ws, x)
    assert_close_sums(got, accumulated(make_loss(first, second), 2)(ws, x))
    with pytest.raises(AssertionError):
        assert_close_sums(got, accumulated(make_loss(first, first), 2)(ws, x))


def test_loops_of_other_lengths_are_not_one_computation():
    """Their tasks read slices of arrays of another shape."""
    ws, loss = chain(2)
    x, y = (jax.random.normal(key, (6, 4)) for key in jax.random.split(jax.random.key(4)))

    def step(ws, x, y):
        loops = [jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), m) for m in (3, 2)]
        loops = [jaxpp.schedule(loop, jaxpp.schedules.OneFOneB()) for loop in loops]
        return loops[0](ws, x), loops[1](ws, y)

    got = jaxpp.place(step, mesh_of(2))(ws, x, y[:4])
    want = accumulated(loss, 3)(ws, x), accumulated(loss, 2)(ws, y[:4])
    assert_close_sums(got, want)


def test_a_weak_type_is_another_type():
    """A float that is weakly typed leaves bfloat16 as it is."""
    ws, loss = chain(2)
    x = jax.random.normal(jax.random.key(4), (6, 4))

    def step(ws, x, scale, grad_fn):
        value, grads = grad_fn(ws, x)
        return value, grads, scale * jnp.ones(3, jnp.bfloat16)

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 3)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    placed = jaxpp.place(functools.partial(step, grad_fn=grad_fn), mesh_of(2))
    plain = jax.jit(functools.partial(step, grad_fn=jax.value_and_grad(loss)))
    dtypes = []
    for scale in (jnp.asarray(2.0), jnp.float32(2.0), jnp.asarray(3.0)):
        got = placed(ws, x, scale)
        assert_close_sums(got, plain(ws, x, scale))
        dtypes.append(got[2].dtype)
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.bfloat16]


CONTEXTS = {
    "random bits": (jax.threefry_partitionable, True, False),
    "wide types": (jax.enable_x64, True, False),
    "precision": (jax.default_matmul_precision, "highest", "bfloat16"),
}


@pytest.mark.parametrize("what", CONTEXTS)
def test_a_call_under_another_configuration_is_what_jit_makes_of_it(what):
    """The precision makes no difference on a CPU, but that of the text."""
    ws, chain_loss = chain(2)
    x = jax.random.normal(jax.random.key(4), (6, 4))

    def loss(ws, x):
        return chain_loss(ws, x + jax.random.normal(jax.random.key(0), (4,)))

    def step(ws, x, grad_fn):
        value, grads = grad_fn(ws, x)
        return value, grads, jnp.arange(3.0) + jax.random.normal(jax.random.key(1), (3,))

    traces = []

    def traced(ws, x):
        traces.append(what)
        loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 3)
        return step(ws, x, jaxpp.schedule(loop, jaxpp.schedules.OneFOneB()))

    plain = jax.jit(functools.partial(step, grad_fn=jax.value_and_grad(loss)))
    placed = jaxpp.place(traced, mesh_of(2))
    context, *values = CONTEXTS[what]
    for value in values * 2:
        with context(value):
            assert_close_sums(placed(ws, x), plain(ws, x))
    assert len(traces) == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_effect_happens_as_often_as_in_the_plain_function(schedule):
    """In each stage for each microbatch; and before and after the loop, where no stage reads it."""
    seen = []

    def note(name, *values):
        jax.debug.callback(lambda *vs: seen.append((name, *map(float, vs))), *values)

    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jaxpp.pipeline_enter_stage(x) if i else x
            x = jnp.tanh(x @ w)
            note(f"stage {i}", x.sum())
        return jnp.mean(x**2)

    def make_step(loop):
        def step(ws, count, x):
            note("before", count)
            result = loop(ws, x)
            note("after", *jax.tree.leaves(jax.tree.map(jnp.sum, result)))
            return result, count + 1

        return step

    def happened(step):
        seen.clear()
        jax.block_until_ready(step(ws, jnp.asarray(7), x))
        jax.effects_barrier()
        return sorted(seen)

    ws, _ = chain(4)
    x = jax.random.normal(jax.random.key(4), (6, 4))
    per_rank = max(SCHEDULES[schedule][0])
    kind = SCHEDULES[schedule][1](per_rank)
    fun, plain = jaxpp.wrap_forward(loss), accumulated(loss, 3)
    if schedule == "forward_only":
        plain = lambda ws, x: sum(loss(ws, part) for part in jnp.split(x, 3)) / 3  # noqa: E731
    else:
        fun = jax.value_and_grad(fun)
    placed = jaxpp.schedule(jaxpp.microbatch(fun, 3), kind)
    want = happened(jax.jit(make_step(plain)))
    got = happened(jaxpp.place(make_step(placed), mesh_of(4 // per_rank)))
    assert len(want) == 4 * 3 + 2
    assert [name for name, *_ in got] == [name for name, *_ in want]
    for (_, *values), (_, *wanted) in zip(got, want, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-5)


def test_what_an_effect_gives_is_not_computed_before_the_loop():
    """It reads a weight alone, and is called for each microbatch all the same."""
    calls = []

    def double(w):
        calls.append(1)
        return 2 * np.asarray(w)

    def loss(ws, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        w = jax.lax.stop_gradient(ws[1])
        doubled = io_callback(double, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
        return jnp.mean((x @ (ws[1] * doubled)) ** 2)

    ws, _ = chain(2)
    x = jax.random.normal(jax.random.key(4), (6, 4))
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 3)
    placed = jaxpp.place(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()), mesh_of(2))
    assert_close_sums(placed(ws, x), accumulated(loss, 3)(ws, x))
    jax.effects_barrier()
    assert len(calls) == 2 * 3


@pytest.mark.parametrize("tied", [True, False])
def test_an_effect_of_a_value_on_several_ranks_happens_once(tied):
    seen = []

    def make_step(grad_fn):
        def step(ws, x):
            jax.debug.callback(lambda w: seen.append(float(np.sum(w))), ws[0] if tied else x)
            value, grads = grad_fn(ws, x)
            jax.debug.callback(lambda g: seen.append(float(np.sum(g))), grads[0])
            return value, grads

        return step

    def happened(step):
        seen.clear()
        jax.block_until_ready(step(ws, x))
        jax.effects_barrier()
        return sorted(seen)

    ws, tied_loss = with_tied_ends()
    x = jax.random.normal(jax.random.key(4), (6, 4))

    def loss(ws, x):
        return tied_loss(ws, x) + jnp.mean(x)  # the first stage and the last read the data

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 3)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    got = happened(jaxpp.place(make_step(grad_fn), mesh_of(4)))
    want = happened(jax.jit(make_step(accumulated(loss, 3))))
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ---- law 8: a proof -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [pytest.param(c, id="-".join(map(str, c)), marks=[pytest.mark.slow] * (c not in COVERING))
     for c in MATRIX],
)  # fmt: skip
def test_a_placed_step_is_proven(point):
    """All points, where the laws of numbers have a selection: nothing is compiled."""
    certificate = lowered(point).certify()
    assert not certificate.undecided
    assert certificate.exact or point[0] != "mlp", "an MLP has no sum that ranks split"
