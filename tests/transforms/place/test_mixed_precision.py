"""float32 parameters and narrower arithmetic: where casts run, what sums are in, loss scaling."""

import collections
import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import jaxprs, precision, testing
from jaxpp._program import Run
from tests.helpers import assert_close_sums, assert_same

WIDTH, VOCABULARY, BATCH, MICROBATCHES = 16, 12, 24, 4
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
RANKS = 2
SCHEDULES = {
    "1f1b": (1, jaxpp.schedules.OneFOneB()),
    "interleaved_1f1b": (2, jaxpp.schedules.Interleaved1F1B(2)),
    "zb_h1": (1, jaxpp.schedules.ZeroBubbleH1()),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def make_model(tied: bool = False):
    """A residual net over tokens: an embedding, four layers (stacks of one), and a head."""
    keys = iter(jax.random.split(jax.random.key(0), 10))
    layers = [jax.random.normal(next(keys), (1, WIDTH, WIDTH)) / WIDTH**0.5 for _ in range(4)]
    embed = jax.random.normal(next(keys), (VOCABULARY, WIDTH))
    head = {} if tied else {"head": jax.random.normal(next(keys), (VOCABULARY, WIDTH))}
    return {"embed": embed, "layers": layers, **head}


def data(step: int):
    keys = jax.random.split(jax.random.key(step + 1))
    return tuple(jax.random.randint(k, (BATCH,), 0, VOCABULARY) for k in keys)


def apply_layer(layer, h):
    for w in layer:
        h = h + jnp.tanh(h @ w)
    return h


def make_loss(num_stages: int = 2, apply=apply_layer):
    """The cross-entropy, in float32, of a net that computes in its parameters' dtype."""

    def loss(model, tokens, targets):
        h = model["embed"][tokens]
        for i, layer in enumerate(model["layers"]):
            if i > 0 and i % (4 // num_stages) == 0:
                h = jaxpp.pipeline_enter_stage(h)
            h = apply(layer, h)
        logits = (h @ model.get("head", model["embed"]).T).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1))

    return loss


def casting(loss, dtype=BF16, cast=precision.cast):
    return lambda model, *batch: loss(cast(model, dtype), *batch)


def microbatched(loss, *, wrapped: bool = True, **options):
    loss = jaxpp.wrap_forward(loss) if wrapped else loss
    return jaxpp.microbatch(jax.value_and_grad(loss), MICROBATCHES, in_axes=(None, 0, 0), **options)


def train_step(grad_fn, cast=lambda model: model):
    """Gradient descent; the gradients are results too."""

    def step(model, *batch):
        loss, gradients = grad_fn(cast(model), *batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), model, gradients)
        return new, loss, gradients

    return step


def place(step, **options):
    return jaxpp.place(step, jaxpp.MpmdMesh((RANKS,)), donate_argnums=0, **options)


# ---- where casts run ----------------------------------------------------------------------------


def count_casts(bundle, dtype=BF16):
    """For each rank, how often the arrays of parameters' shapes are narrowed: (in tasks, else)."""
    sizes = {VOCABULARY * WIDTH, WIDTH * WIDTH}

    def casts(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive.name == "convert_element_type":
                made = e.outvars[0].aval
                yield made.size if made.dtype == dtype and made.size in sizes else 0
            for inner in jaxprs.sub_jaxprs(e):
                yield from casts(inner)

    counts = []
    for program in bundle.programs:
        count = collections.Counter()
        for run in program.instructions:
            if isinstance(run, Run):
                is_task = run.label[0] in "FBIW" and run.label[1].isdigit()
                count[is_task] += sum(casts(bundle.computations[run.computation].jaxpr.jaxpr))
        counts.append((count[True], count[False]))
    return counts


def scanned(layer, h):
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w.astype(BF16)), None), h, layer)[0]


def cast_where_used(layer, h):
    return apply_layer(layer.astype(BF16), h)


LAYERS = {
    "plain": apply_layer,
    "cast-in-the-layer": cast_where_used,
    "cast-in-a-jitted-layer": jax.jit(cast_where_used),
    "cast-in-a-checkpointed-layer": jax.checkpoint(cast_where_used),  # pyright: ignore
    "cast-in-both": jax.checkpoint(jax.jit(cast_where_used)),  # pyright: ignore
    "cast-in-a-scan": scanned,
    "cast-in-a-checkpointed-scan": jax.checkpoint(scanned),  # pyright: ignore
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_parameter_is_cast_once_a_step_and_rank(layer):
    model = make_model()

    def cast(model, dtype):
        whole = precision.cast(model, dtype)
        return whole if layer == "plain" else {**whole, "layers": model["layers"]}

    loss = casting(make_loss(2, LAYERS[layer]), cast=cast)
    schedule = jaxpp.schedules.OneFOneB()
    step = place(train_step(jaxpp.schedule(microbatched(loss), schedule)))
    one_rank = VOCABULARY * WIDTH + 2 * WIDTH * WIDTH
    assert count_casts(step.lower(model, *data(0)).bundle) == [(0, one_rank), (0, one_rank)]


@schedules
@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_each_rank_casts_its_own_parameters(schedule, inside, jitted):
    model = make_model()
    stages_per_rank, schedule = SCHEDULES[schedule]
    cast = precision.cast
    if jitted:
        cast = jax.jit(cast, static_argnums=1)
    loss = make_loss(RANKS * stages_per_rank)
    if inside:
        loss = casting(loss, cast=cast)
    outer = (lambda model: model) if inside else (lambda model: cast(model, BF16))
    lowered = place(train_step(jaxpp.schedule(microbatched(loss), schedule), outer)).lower(
        model, *data(0)
    )
    one_rank = VOCABULARY * WIDTH + 2 * WIDTH * WIDTH
    if not inside:  # the sums of its gradients, which are in float32, too
        one_rank *= 2
    assert count_casts(lowered.bundle) == [(0, one_rank), (0, one_rank)]
    testing.assert_no_transfers_of(lowered, 0)
    assert testing.count_sends(lowered) == testing.count_sends(lowered, "edge")


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_tied_parameters_gradients_are_sent_once_a_step(inside):
    loss = casting(make_loss()) if inside else make_loss()
    outer = (lambda model: model) if inside else (lambda m: precision.cast(m, BF16))
    step = train_step(jaxpp.schedule(microbatched(loss), jaxpp.schedules.OneFOneB()), outer)
    lowered = place(step).lower(make_model(tied=True), *data(0))
    assert testing.count_sends(lowered, "gradient") == 2
    sent = [s.message for p in lowered.bundle.programs for s in p.sends]
    shapes = {a.shape for m in sent for k, a in zip(m.kinds, m.avals, strict=True) if k == "edge"}
    assert shapes == {(BATCH // MICROBATCHES, WIDTH)}


# ---- results ------------------------------------------------------------------------------------

POLICIES = {
    "inside": dict(inside=True),
    "outside": dict(inside=False),
    "outside-accumulated-in-float32": dict(inside=False, accumulator_dtype=jnp.float32),
    "inside-accumulated-in-bfloat16": dict(inside=True, accumulator_dtype=(None, BF16)),
}


@functools.cache
def policy_steps(policy: str, schedule: str, dtype=BF16):
    """The placed step of a policy, and the single device's: by microbatches, and on the whole."""
    options = dict(POLICIES[policy])
    inside = options.pop("inside")
    stages_per_rank, order = SCHEDULES[schedule]

    def make(loss, **more):
        return microbatched(casting(loss, dtype) if inside else loss, **options, **more)

    cast = (lambda m: m) if inside else (lambda m: precision.cast(m, dtype))
    grad_fn = jaxpp.schedule(make(make_loss(RANKS * stages_per_rank)), order)
    whole = jax.value_and_grad(casting(make_loss(1), dtype) if inside else make_loss(1))
    return (
        place(train_step(grad_fn, cast)),
        jax.jit(train_step(make(make_loss(1), wrapped=False), cast)),
        jax.jit(train_step(whole, cast)),
    )


def slow_unless(condition, *values):
    return pytest.param(*values, marks=[] if condition else [pytest.mark.slow])


MATRIX = [
    slow_unless(dtype == BF16 and (schedule == "1f1b" or policy == "inside"), *config)
    for config in [(p, s, d) for p in POLICIES for s in SCHEDULES for d in (BF16, F16)]
    for policy, schedule, dtype in [config]
]


@pytest.mark.parametrize(("policy", "schedule", "dtype"), MATRIX)
def test_a_step_is_that_of_the_single_device_by_microbatches(policy, schedule, dtype):
    placed, plain, _ = policy_steps(policy, schedule, dtype)
    testing.assert_matches_single_device(
        placed, plain, make_model(), data=data, num_state=1, bitwise=True
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_is_that_of_the_single_device_on_the_whole_batch(policy):
    placed, _, whole = policy_steps(policy, "1f1b")
    got, want = placed(make_model(), *data(0)), whole(make_model(), *data(0))
    # Gradients that are accumulated in another type are of that type.
    got, want = (jax.tree.map(lambda x: x.astype(F32), tree) for tree in (got, want))
    assert_close_sums(got, want, 2e-2)


@pytest.mark.more
@pytest.mark.parametrize("policy", ["inside", "outside-accumulated-in-float32"])
def test_tied_parameters_differ_in_rounding_alone(policy):
    placed, plain, _ = policy_steps(policy, "1f1b")
    testing.assert_matches_single_device(
        placed, plain, make_model(tied=True), data=data, num_state=1, rtol=1e-2
    )


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.more
def test_a_cast_equinox_model_is_cut_at_its_modules():
    keys = jax.random.split(jax.random.key(0), 4)
    model = Net([eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys])
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))

    def loss(model, x):
        model = precision.cast(model, BF16)
        return jnp.mean(jax.vmap(model)(x.astype(BF16)).astype(jnp.float32) ** 2)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, at=["layers.2"]))
    reference = jaxpp.microbatch(eqx.filter_value_and_grad(loss), MICROBATCHES)
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), MICROBATCHES)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    got = jaxpp.place(grad_fn, jaxpp.MpmdMesh((RANKS,)))(model, x)
    chex.assert_trees_all_equal(
        eqx.filter(got, eqx.is_array), eqx.filter(jax.jit(reference)(model, x), eqx.is_array)
    )


# ---- what sums are in ---------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_are_in_the_accumulators_dtype(reduce):
    x = jnp.ones(64, BF16).at[0].set(256.0)  # 256 + 1 is 256 in bfloat16
    count = 1 if reduce == "sum" else 64

    def total(**options):
        return jaxpp.microbatch(jnp.sum, 64, in_axes=0, reduce=reduce, **options)(x)

    wide = jnp.float32(256.0 + 63.0) / count
    assert_same(total(accumulator_dtype=None), jnp.asarray(256.0 / count, BF16))
    assert_same(total(), wide.astype(BF16))
    assert_same(total(accumulator_dtype="auto"), total())
    assert_same(total(accumulator_dtype=jnp.float32), wide)


@pytest.mark.parametrize(
    ("dtype", "value"), [(F16, 3e4), (jnp.float8_e4m3fn, 240.0), (jnp.float8_e5m2, 4e4)]
)
def test_a_mean_does_not_overflow_before_it_is_divided(dtype, value):
    x = jnp.full(4, value, dtype)
    mean = functools.partial(jaxpp.microbatch, lambda x: x[0], 4, in_axes=0)
    assert_same(mean()(x), x[0])
    assert not jnp.isfinite(mean(accumulator_dtype=None)(x).astype(F32))


ONES = jnp.ones(8, BF16).at[3].set(256.0)  # their sum is 263; in bfloat16, in any order, 260


class Total:
    """A sum of the user's."""

    def init(self, x):
        return jnp.zeros(x.shape, x.dtype)

    def combine(self, acc, x):
        return acc + x

    def finish(self, acc, num_microbatches):
        return acc


def product(w, x):
    return jnp.sum(x * w)


def gradient(fun, reduce, of=lambda result: result, **options):
    def loss(w, *args):
        return of(jaxpp.microbatch(fun, 8, reduce=reduce, **options)(w, *args)).astype(F32)

    return jax.grad(loss)


SUMS = {
    "inside": lambda **o: jaxpp.microbatch(jax.grad(product), 8, reduce="sum", **o),
    "outside": lambda **o: gradient(product, "sum", **o),
    "rows": lambda **o: gradient(lambda w, x: x * w, "concat", jnp.sum, **o),
    "operator": lambda **o: gradient(product, Total(), **o),
    "both": lambda **o: gradient(
        lambda w, x: (product(w, x) / 2, x * w),
        ("sum", "concat"),
        lambda r: r[0] + r[1].sum() / 2,
        **o,
    ),
    "carried": lambda **o: (
        lambda w, x: gradient(
            lambda w, seen, x: (product(w, x), seen + 1),
            ("sum", "carry"),
            lambda r: r[0],
            in_axes=(None, "carry", 0),
            **o,
        )(w, 0, x)
    ),
}


@pytest.mark.cases(len(SUMS))
@pytest.mark.parametrize("way", SUMS)
def test_gradients_by_narrow_parameters_are_added_up_in_float32(way):
    w = jnp.ones((), BF16)
    assert_same(SUMS[way]()(w, ONES), jnp.asarray(263.0, BF16))
    assert SUMS[way](accumulator_dtype=None)(w, ONES) < 263.0


def test_the_sums_of_several_stages_are_joined_in_float32():
    def loss(w, x):
        return jnp.sum(jaxpp.pipeline_enter_stage(x * w) + x * w)

    def placed(**options):
        grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 8, reduce="sum", **options)
        grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        return jaxpp.place(grad, jaxpp.MpmdMesh((RANKS,)))(jnp.ones((), BF16), ONES)

    assert_same(placed(), jnp.asarray(2 * 263.0, BF16))
    assert placed(accumulator_dtype=None) < 2 * 263.0


@pytest.mark.more
def test_a_description_counts_accumulators_in_their_dtype():
    def accumulators(**options):
        loss = microbatched(make_loss(), **options)
        grad_fn = jaxpp.schedule(loss, jaxpp.schedules.OneFOneB())
        step = jaxpp.place(grad_fn, jaxpp.MpmdMesh((RANKS,)))
        step(precision.cast(make_model(), BF16), *data(0))
        return [rank.accumulator_bytes for rank in step.describe().ranks]

    one_rank = VOCABULARY * WIDTH + 2 * WIDTH * WIDTH
    narrow, wide = accumulators(accumulator_dtype=None), accumulators()
    assert [b - a for a, b in zip(narrow, wide, strict=True)] == [2 * one_rank] * RANKS


def test_the_accumulators_dtype_is_a_prefix_for_floats_that_are_added():
    def outputs(x):
        total = jnp.sum(x)
        total = dict.fromkeys(("sum", "own", "auto"), total)
        return {**total, "max": jnp.max(x), "count": jnp.int32(x.size)}, x

    got = jaxpp.microbatch(
        outputs,
        4,
        in_axes=0,
        reduce=(
            {"sum": "sum", "max": "max", "count": "sum", "own": "mean", "auto": "sum"}, "concat"
        ),
        accumulator_dtype=(
            {"sum": "float32", "max": F32, "count": F32, "own": None, "auto": "auto"}, F32
        ),
    )(jnp.ones(8, BF16))  # fmt: skip
    want = ({"sum": F32, "max": BF16, "count": jnp.int32, "own": BF16, "auto": BF16}, BF16)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(jnp.dtype, want)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["auto", None, F32])
def test_gradients_outside_are_accumulated_so_too(dtype):
    loss, model = make_loss(1), precision.cast(make_model(), BF16)
    options: Any = dict(in_axes=(None, 0, 0), accumulator_dtype=dtype)
    inside = jaxpp.microbatch(jax.value_and_grad(loss), MICROBATCHES, **options)(model, *data(0))
    outside = jax.value_and_grad(jaxpp.microbatch(loss, MICROBATCHES, **options))(model, *data(0))
    # By JAX's own rule a cotangent has the dtype of what it is for.
    chex.assert_trees_all_equal_dtypes(outside[1], model)
    chex.assert_trees_all_equal(outside, (inside[0], precision.cast(inside[1], BF16)))


@pytest.mark.parametrize("dtype", [jnp.int32, bool, "narrow"])
def test_an_accumulator_is_of_floats(dtype):
    with pytest.raises(ValueError, match="accumulator_dtype holds .* no floating-point dtype"):
        jaxpp.microbatch(jnp.mean, 2, in_axes=0, accumulator_dtype=dtype)(jnp.ones(4))


def test_an_accumulators_dtype_is_a_prefix_of_the_result():
    with pytest.raises(ValueError, match="accumulator_dtype is not a prefix"):
        jaxpp.microbatch(jnp.mean, 2, in_axes=0, accumulator_dtype=(F32, F32))(jnp.ones(4))


# ---- loss scaling -------------------------------------------------------------------------------

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))


def scaled_loss_fn(num_stages: int):
    def scaled_loss(model, scale, *batch):
        return scale * casting(make_loss(num_stages), F16)(model, *batch)

    return scaled_loss


def scaled_step(grad_fn, optimizer):
    """A float16 step with a loss scale in its state."""

    def step(model, opt_state, *batch):
        scale = opt_state.scale
        loss, gradients = grad_fn(model, scale, *batch)
        updates, opt_state = optimizer.update(gradients, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss / scale, opt_state.finite

    return step


def jmp_step(grad_fn, conditional: bool):
    """The same with the loss scale of `jmp`, and with `select` or `cond`."""
    jmp = pytest.importorskip("jmp")

    def step(model, state, *batch):
        opt_state, scale = state
        loss, gradients = grad_fn(model, scale.loss_scale, *batch)
        gradients = scale.unscale(gradients)
        finite = jmp.all_finite(gradients)

        def update(model, opt_state):
            updates, opt_state = OPTIMIZER.update(gradients, opt_state, model)
            return optax.apply_updates(model, updates), opt_state

        if conditional:
            model, opt_state = jax.lax.cond(finite, update, lambda *old: old, model, opt_state)
        else:
            old = model, opt_state
            model, opt_state = jmp.select_tree(finite, update(*old), old)
        return model, (opt_state, scale.adjust(finite)), scale.unscale(loss), finite

    return step


def scaling(way: str, initial: float, period: int) -> tuple[Any, Any]:
    """Gives a function that makes a step of a gradient function, and the state it starts from."""
    if way == "ours":
        optimizer = precision.dynamic_loss_scale(OPTIMIZER, initial, period=period)
        return functools.partial(scaled_step, optimizer=optimizer), optimizer.init(make_model())
    jmp = pytest.importorskip("jmp")
    state = OPTIMIZER.init(make_model()), jmp.DynamicLossScale(jnp.float32(initial), period=period)
    return functools.partial(jmp_step, conditional=way == "jmp, cond"), state


def by_microbatches(fun, schedule=None):
    fun = jax.value_and_grad(fun if schedule is None else jaxpp.wrap_forward(fun))
    fun = jaxpp.microbatch(fun, MICROBATCHES, in_axes=(None, None, 0, 0))
    return fun if schedule is None else jaxpp.schedule(fun, schedule)


WAYS = ("ours", "jmp", "jmp, cond")
SCALING = [
    slow_unless(schedule == "1f1b" or way == "ours", schedule, way)
    for schedule in SCHEDULES
    for way in WAYS
]


@pytest.mark.more
@pytest.mark.parametrize(("schedule", "way"), SCALING)
def test_steps_that_overflow_are_skipped_on_all_ranks(schedule, way):
    stages_per_rank, schedule = SCHEDULES[schedule]
    make, opt_state = scaling(way, 2.0**15, period=2)
    step = make(by_microbatches(scaled_loss_fn(RANKS * stages_per_rank), schedule))
    placed = jaxpp.place(step, jaxpp.MpmdMesh((RANKS,)), donate_argnums=(0, 1))
    plain = jax.jit(make(by_microbatches(scaled_loss_fn(1))))
    state = make_model(), opt_state
    ours, theirs = list(jax.tree.map(jnp.copy, state)), list(state)
    seen = []
    for i in range(8):
        before = jax.tree.map(np.array, (ours[0], ours[1][0]))
        *ours, loss, finite = placed(*ours, *data(i))
        *theirs, want, wanted = plain(*theirs, *data(i))
        assert bool(finite) == bool(wanted)
        if not finite:
            chex.assert_trees_all_equal(jax.tree.map(np.asarray, (ours[0], ours[1][0])), before)
        chex.assert_trees_all_equal(ours[1][1:], theirs[1][1:])
        np.testing.assert_allclose(loss, want, rtol=1e-3)
        # Clipping adds up the squares in another order.
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)
        seen.append(bool(finite))
    assert not seen[0] and sum(seen) >= 3
    assert False in seen[seen.index(True) :]  # it has grown, and overflowed again


@pytest.mark.more
def test_the_check_is_one_reduction_of_scalars():
    make, opt_state = scaling("ours", 2.0**15, period=2000)
    step = make(by_microbatches(scaled_loss_fn(2), SCHEDULES["1f1b"][1]))
    lowered = jaxpp.place(step, jaxpp.MpmdMesh((RANKS,))).lower(make_model(), opt_state, *data(0))
    edges = testing.count_sends(lowered, "edge")
    assert testing.count_sends(lowered) == edges + testing.count_sends(lowered, "scalar")
    # The scale to the first rank, its inverse, the sums and flags, and what came of them.
    assert testing.count_sends(lowered, "scalar") <= 4
