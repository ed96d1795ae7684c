"""What surrounds the loop of a step is placed by inference, and moves no parameter."""

import collections
from typing import Any, NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp

WIDTH, BATCH, MICROBATCHES, STEPS = 8, 8, 2, 3


class Block(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        self.bias = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (WIDTH,))

    def __call__(self, x):
        return jnp.tanh(x @ self.weight + self.bias)


class Net(eqx.Module):
    blocks: list[Block]

    def __init__(self, key=None, depth=3):
        self.blocks = [
            Block(k) for k in jax.random.split(jax.random.key(0) if key is None else key, depth)
        ]

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x if i == 0 else jaxpp.pipeline_enter_stage(x))
        return x


def loss_fn(model, x):
    return jnp.mean((model(x) - 0.5) ** 2)


def batches(steps=STEPS):
    return [jax.random.normal(jax.random.key(100 + i), (BATCH, WIDTH)) for i in range(steps)]


def pipelined(fun, *, schedule=None, in_axes=(None, 0), reduce="mean"):
    """A value-and-grad, or a forward function, of staged code as a scheduled loop."""
    loop = jaxpp.microbatch(fun, MICROBATCHES, in_axes=in_axes, reduce=reduce)
    return jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())


class Plain(NamedTuple):
    """How a step differentiates without pipelining."""

    schedule: Any = None

    def value_and_grad(self, loss, reduce=None, in_axes=None, **kwargs):
        return eqx.filter_value_and_grad(loss, **kwargs)

    def forward(self, fun, **_):
        return fun


class Piped(NamedTuple):
    """How a step differentiates as a pipeline."""

    schedule: Any = None

    def value_and_grad(self, loss, *, reduce="mean", in_axes=(None, 0), **kwargs):
        grad = eqx.filter_value_and_grad(jaxpp.wrap_forward(loss), **kwargs)
        return pipelined(grad, schedule=self.schedule, reduce=reduce, in_axes=in_axes)

    def forward(self, fun, *, reduce="mean", in_axes=(None, 0)):
        return pipelined(
            jaxpp.wrap_forward(fun),
            schedule=jaxpp.schedules.ForwardOnly(),
            reduce=reduce,
            in_axes=in_axes,
        )


def sent(step):
    """How many arrays of each kind a placed step sends."""
    return collections.Counter(
        kind for program in step.programs for send in program.sends for kind in send.message.kinds
    )


def copy(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if eqx.is_array(x) else x, tree)


def train(step, carry, data):
    """Runs a step `(carry, batch) -> (carry, metrics)` over the data."""
    carry, seen = copy(carry), []
    for batch in data:
        carry, metrics = step(carry, batch)
        seen.append(metrics)
    return eqx.filter((carry, seen), eqx.is_array)


def as_numbers(tree):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )


def check(
    make, carry, data=None, *, ranks=3, rtol=1e-5, atol=1e-6, allowed=(), donate=True, piped=None
):
    """A step placed on ranks does what it does on one device, and sends only what it must.

    `make` takes `Plain()` or `Piped()` and gives the step. Returns the placed step and its results.
    """
    data = batches() if data is None else data
    expected = train(eqx.filter_jit(make(Plain())), carry, data)
    step = make(piped or Piped())
    step = jaxpp.place(step, jaxpp.MpmdMesh((ranks,)), donate_argnums=(0,) if donate else ())
    results = train(step, carry, data)
    chex.assert_trees_all_equal_shapes_and_dtypes(results, expected)
    chex.assert_trees_all_close(as_numbers(results), as_numbers(expected), rtol=rtol, atol=atol)
    assert set(sent(step)) <= {"edge", "gradient", "scalar", *allowed}, step.as_text()
    return step, results


def with_optimizer(optimizer, loss=loss_fn):
    """A train step over `(model, optimizer state)`."""

    def make(how):
        grad_fn = how.value_and_grad(loss)

        def step(carry, x):
            model, state = carry
            value, grads = grad_fn(model, x)
            updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
            return (eqx.apply_updates(model, updates), state), value

        return step

    return make


def start(optimizer, model=None):
    model = Net() if model is None else model
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


# ---- optimizers ---------------------------------------------------------------------------------


def matrices(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def by_shape(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
CLIP_ADAMW = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(SCHEDULE))
ADAM = optax.adam(1e-2)
MOMENTUM = optax.sgd(0.1, momentum=0.9, nesterov=True)
OPTIMIZERS = {
    "momentum": MOMENTUM,
    "adamw_mask": optax.adamw(SCHEDULE, weight_decay=0.1, mask=matrices),
    "clip_adamw": CLIP_ADAMW,
    "adaptive_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.zero_nans(), optax.sgd(0.1)),
    "lion": optax.lion(1e-2, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "prodigy": optax.contrib.prodigy(),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "partition": optax.partition({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, by_shape),
    "multi_steps": optax.MultiSteps(CLIP_ADAMW, every_k_schedule=2),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
}


@pytest.mark.more
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    optimizer = OPTIMIZERS[name]
    check(with_optimizer(optimizer), start(optimizer))


@pytest.mark.more
def test_apply_if_finite_skips_a_step():
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 3)
    data = batches(4)
    data[1] = data[1].at[0, 0].set(jnp.nan)
    _, ((_, state), _) = check(with_optimizer(optimizer), start(optimizer), data)
    assert int(state.total_notfinite) == 1


@pytest.mark.more
def test_the_same_bits_for_any_number_of_ranks():
    """Placement is by stage, so that it does not matter how many stages a rank has."""
    model = Tied((0, 1, 3), (0, 3))
    results = []
    for stages_per_rank in (1, 2, 4):
        how = Piped(jaxpp.schedules.Interleaved1F1B(stages_per_rank))
        step = jaxpp.place(with_optimizer(CLIP_ADAMW)(how), jaxpp.MpmdMesh((4 // stages_per_rank,)))
        results.append(train(step, start(CLIP_ADAMW, model), batches()))
    chex.assert_trees_all_equal(*results)


# ---- state and metrics around the loop ----------------------------------------------------------


def test_average_of_parameters_by_hand():
    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(carry, x):
            model, average, count = carry
            loss, grads = grad_fn(model, x)
            model = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)
            decay = jnp.minimum(0.9, (1.0 + count) / (10.0 + count))
            average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, model)
            return (model, average, count + 1), loss

        return step

    check(make, (Net(), copy(Net()), jnp.int32(0)))


def test_dynamic_loss_scale():
    def make(how):
        def scaled(model_and_scale, x):
            model, scale = model_and_scale
            return loss_fn(model, x) * jax.lax.stop_gradient(scale)

        grad_fn = how.value_and_grad(scaled)

        def step(carry, x):
            model, scale, good = carry
            loss, (grads, _) = grad_fn((model, scale), x)
            grads = jax.tree.map(lambda g: g / scale, grads)
            finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
            new = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)
            model = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, model)
            good = jnp.where(finite, good + 1, 0)
            grown = jnp.where(good % 2 == 0, scale * 2, scale)
            scale = jnp.where(finite, grown, scale / 2)
            return (model, scale, good), (loss / scale, finite)

        return step

    data = batches(4)
    data[1] = data[1].at[0, 0].set(jnp.inf)
    _, ((_, scale, _), seen) = check(make, (Net(), jnp.float32(8.0), jnp.int32(0)), data)
    assert [bool(finite) for _, finite in seen] == [True, False, True, True]
    assert float(scale) == 8.0


def test_rate_that_follows_the_loss():
    """A scalar of the state that the last stage's loss decides, and every stage reads."""

    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(carry, x):
            model, rate, best = carry
            loss, grads = grad_fn(model, x)
            model = jax.tree.map(lambda p, g: p - rate * g, model, grads)
            rate = jnp.where(loss > best, 0.5 * rate, rate)
            return (model, rate, jnp.minimum(best, loss)), loss

        return step

    _, ((_, rate, _), _) = check(make, (Net(), jnp.float32(0.1), jnp.float32(jnp.inf)), batches(6))
    assert float(rate) < 0.1


def test_cond_around_the_update():
    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(model, x):
            loss, grads = grad_fn(model, x)
            model = jax.lax.cond(
                loss > 0.4,
                lambda: jax.tree.map(lambda p, g: p - 0.1 * g, model, grads),
                lambda: jax.tree.map(lambda p: 0.9 * p, model),
            )
            return model, loss

        return step

    check(make, Net())


def test_metrics():
    def make(how):
        def loss(model, batch):
            x, label = batch
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return losses.mean(), (logits.argmax(-1) == label).mean()

        grad_fn = how.value_and_grad(loss, has_aux=True)

        def step(model, batch):
            (loss, accuracy), grads = grad_fn(model, batch)
            norms = jax.tree.map(jnp.linalg.norm, grads)
            updates = jax.tree.map(lambda g: -0.1 * g, grads)
            model = eqx.apply_updates(model, updates)
            metrics = {
                "loss": loss,
                "perplexity": jnp.exp(loss),
                "accuracy": accuracy,
                "grad_norm": optax.tree.norm(grads),
                "param_norm": optax.tree.norm(model),
                "ratio": optax.tree.norm(updates) / optax.tree.norm(model),
                "largest": jnp.max(
                    jnp.stack([jnp.max(jnp.abs(n)) for n in jax.tree.leaves(norms)])
                ),
                "norms": norms,
                "constant": jnp.ones(()),
                "seen": x_sum(batch),
            }
            return model, metrics

        def x_sum(batch):
            return batch[0].sum()

        return step

    data = [
        (x, jax.random.randint(jax.random.key(i), (BATCH,), 0, WIDTH))
        for i, x in enumerate(batches())
    ]
    check(make, Net(), data)


@pytest.mark.more
def test_values_computed_before_the_loop_and_used_after_it():
    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(carry, x):
            model, count = carry
            x = (x - x.mean()) / x.std()
            norm = optax.tree.norm(model)
            model = jax.tree.map(lambda p: p / (1 + norm), model)
            loss, grads = grad_fn(model, x)
            rate = 0.1 / (1.0 + count)
            model = jax.tree.map(lambda p, g: (p - rate * g) * (1 + norm), model, grads)
            return (model, count + 1), (loss, norm, x.max())

        return step

    check(make, (Net(), jnp.int32(0)))


@pytest.mark.more
def test_gradient_of_a_regularised_loss():
    def make(how):
        def loss(model, x):
            penalty = sum(jnp.sum(b.weight**2) for b in model.blocks)
            return loss_fn(model, x) + 1e-2 * penalty

        grad_fn = how.value_and_grad(loss)

        def step(model, x):
            value, grads = grad_fn(model, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value

        return step

    check(make, Net())


def test_switch_between_updates():
    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(carry, x):
            model, count = carry
            loss, grads = grad_fn(model, x)
            branches = [
                lambda: jax.tree.map(lambda p, g: p - 0.1 * g, model, grads),
                lambda: model,
                lambda: jax.tree.map(lambda p, g: p - 0.01 * jnp.sign(g), model, grads),
            ]
            return (jax.lax.switch(count % 3, branches), count + 1), loss

        return step

    check(make, (Net(), jnp.int32(0)), batches(4))


# ---- the number of loops ------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
def test_no_loop(donate):
    def make(_):
        def step(model, x):
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), loss

        return step

    step, _ = check(make, Net(), ranks=1, donate=donate)
    assert not sent(step)


def test_forward_of_stages_without_a_loop():
    forward = jaxpp.wrap_forward(lambda model, x: model(x))
    step = jaxpp.place(forward, jaxpp.MpmdMesh((3,)))
    x = batches(1)[0]
    chex.assert_trees_all_close(step(Net(), x), Net()(x), rtol=1e-5, atol=1e-6)
    assert sent(step) == {"edge": 2}


def test_training_and_evaluation_in_one_step():
    def make(how):
        grad_fn = how.value_and_grad(loss_fn)
        eval_fn = how.forward(loss_fn)

        def step(model, batch):
            train_x, eval_x = batch
            loss, grads = grad_fn(model, train_x)
            model = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)
            return model, (loss, eval_fn(model, eval_x))

        return step

    data = list(zip(batches(), reversed(batches()), strict=True))
    check(make, Net(), data)


def test_two_gradients_of_one_step():
    """The second where the first has led (sharpness-aware minimisation)."""

    def make(how):
        grad_fn = how.value_and_grad(loss_fn)

        def step(model, x):
            loss, grads = grad_fn(model, x)
            norm = optax.tree.norm(grads)
            worse = jax.tree.map(lambda p, g: p + 0.05 * g / norm, model, grads)
            worst, grads = grad_fn(worse, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), (loss, worst)

        return step

    check(make, Net())


@pytest.mark.more
def test_adversaries():
    """Two optimizers and three loops in one step, each loop of another schedule."""

    class Pair(eqx.Module):
        generator: Net
        discriminator: Net

    def discriminator_loss(discriminator, fake, x):
        scores = discriminator(jnp.concatenate([fake, x], axis=-1).reshape(-1, WIDTH)).mean(-1)
        return jnp.mean(scores.reshape(-1, 2) * jnp.array([1.0, -1.0]))

    def generator_loss(pair, x):
        for ours, theirs in zip(pair.generator.blocks, pair.discriminator.blocks, strict=True):
            x = theirs(ours(x))
            if ours is not pair.generator.blocks[-1]:
                x = jaxpp.pipeline_enter_stage(x)
        return -jnp.mean(x)

    def make(how):
        d_grad = how.value_and_grad(discriminator_loss, in_axes=(None, 0, 0))
        g_grad = how._replace(schedule=jaxpp.schedules.GPipe()).value_and_grad(generator_loss)
        generate = how.forward(lambda model, x: model(x), reduce="concat")

        def step(carry, x):
            pair, g_state, d_state = carry
            d_loss, grads = d_grad(pair.discriminator, generate(pair.generator, x), x)
            updates, d_state = ADAM.update(grads, d_state)
            pair = eqx.tree_at(
                lambda p: p.discriminator, pair, eqx.apply_updates(pair.discriminator, updates)
            )
            g_loss, grads = g_grad(pair, x)
            updates, g_state = MOMENTUM.update(grads.generator, g_state)
            pair = eqx.tree_at(
                lambda p: p.generator, pair, eqx.apply_updates(pair.generator, updates)
            )
            return (pair, g_state, d_state), (d_loss, g_loss)

        return step

    pair = Pair(Net(), Net(jax.random.key(5)))
    g_state = MOMENTUM.init(eqx.filter(pair.generator, eqx.is_array))
    d_state = ADAM.init(eqx.filter(pair.discriminator, eqx.is_array))
    # What the generator makes leaves the last stage and enters the first.
    step, _ = check(make, (pair, g_state, d_state), allowed={"gathered"})
    assert sent(step)["gathered"] == 1


def test_loops_with_other_stages_are_an_error():
    train = pipelined(eqx.filter_value_and_grad(jaxpp.wrap_forward(loss_fn)))
    evaluate = pipelined(
        jaxpp.wrap_forward(lambda m, x: m(m(x)).mean()), schedule=jaxpp.schedules.ForwardOnly()
    )
    step = jaxpp.place(lambda m, x: (train(m, x), evaluate(m, x)))
    with pytest.raises(ValueError, match="loops of one step put their stages on different ranks"):
        step.lower(Net(), batches()[0])


@pytest.mark.parametrize("reduce", ["concat", "stack", "mean", "sum", "max", "last"])
def test_forward_only(reduce):
    def per_example(model, x):
        return jnp.sum(model(x) ** 2, axis=-1)

    model, x = Net(), batches()[0]
    loop = pipelined(
        jaxpp.wrap_forward(per_example), schedule=jaxpp.schedules.ForwardOnly(), reduce=reduce
    )
    slices = jax.vmap(per_example, (None, 0))(model, x.reshape(MICROBATCHES, -1, WIDTH))
    expected = {
        "concat": lambda: slices.reshape(-1),
        "stack": lambda: slices,
        "mean": lambda: slices.mean(0),
        "sum": lambda: slices.sum(0),
        "max": lambda: slices.max(0),
        "last": lambda: slices[-1],
    }[reduce]()
    step = jaxpp.place(loop, jaxpp.MpmdMesh((3,)))
    chex.assert_trees_all_close(step(model, x), expected, rtol=1e-6)
    assert set(sent(step)) == {"edge"}


# ---- stages without gradients -------------------------------------------------------------------


@pytest.mark.parametrize(
    "frozen, way, schedule",
    [
        ((0,), "stop_gradient", jaxpp.schedules.OneFOneB()),
        ((1,), "stop_gradient", jaxpp.schedules.OneFOneB()),
        ((2,), "stop_gradient", jaxpp.schedules.OneFOneB()),
        ((0, 1), "stop_gradient", jaxpp.schedules.ZeroBubbleH1()),
        ((0, 2), "partition", jaxpp.schedules.OneFOneB()),
        ((1, 2), "partition", jaxpp.schedules.ZeroBubbleH1()),
    ],
)
def test_frozen_stages(frozen, way, schedule):
    def freeze(model, replace):
        blocks = [replace(b) if i in frozen else b for i, b in enumerate(model.blocks)]
        return eqx.tree_at(lambda m: m.blocks, model, blocks)

    def make(how):
        def stopped(model, x):
            return loss_fn(freeze(model, jax.lax.stop_gradient), x)

        def partitioned(trained_and_rest, x):
            return loss_fn(eqx.combine(*trained_and_rest), x)

        def step(carry, x):
            model, state = carry
            if way == "stop_gradient":
                value, grads = how.value_and_grad(stopped)(model, x)
            else:
                spec = freeze(
                    jax.tree.map(lambda _: True, model), lambda b: jax.tree.map(lambda _: False, b)
                )
                trained, rest = eqx.partition(model, spec)

                def of_trained(trained, rest, x):
                    return partitioned((trained, rest), x)

                value, grads = how.value_and_grad(of_trained, in_axes=(None, None, 0))(
                    trained, rest, x
                )
                grads = eqx.combine(grads, jax.tree.map(jnp.zeros_like, rest))
            updates, state = CLIP_ADAMW.update(grads, state, model)
            return (eqx.apply_updates(model, updates), state), value

        return step

    check(make, start(CLIP_ADAMW), piped=Piped(schedule))


@pytest.mark.more
def test_stages_without_parameters():
    def loss(model, x):
        x = jaxpp.pipeline_enter_stage(jnp.sin(x))
        x = jaxpp.pipeline_enter_stage(model.blocks[0](x))
        x = jaxpp.pipeline_enter_stage(jnp.cos(x) * 2)
        return jnp.mean(x**2)

    optimizer = CLIP_ADAMW
    check(with_optimizer(optimizer, loss), start(optimizer, Net(depth=1)), ranks=4)


def test_gradients_of_one_stage_alone():
    def make(how):
        def of_block(block, model, x):
            return loss_fn(eqx.tree_at(lambda m: m.blocks[1], model, block), x)

        grad_fn = how.value_and_grad(of_block, in_axes=(None, None, 0))

        def step(model, x):
            value, grads = grad_fn(model.blocks[1], model, x)
            block = jax.tree.map(lambda p, g: p - 0.1 * g, model.blocks[1], grads)
            return eqx.tree_at(lambda m: m.blocks[1], model, block), value

        return step

    check(make, Net())


# ---- shared parameters --------------------------------------------------------------------------


class Tied(eqx.Module):
    """Blocks that share a matrix, and two blocks that share a vector of another shape."""

    blocks: list[Block]
    matrix: jax.Array
    vector: jax.Array
    matrix_in: tuple[int, ...] = eqx.field(static=True)
    vector_in: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, matrix_in, vector_in=(), depth=4):
        self.blocks = Net(depth=depth).blocks
        self.matrix = jax.random.normal(jax.random.key(7), (WIDTH, WIDTH)) / WIDTH**0.5
        self.vector = 0.1 * jax.random.normal(jax.random.key(8), (WIDTH,))
        self.matrix_in, self.vector_in = matrix_in, vector_in

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x if i == 0 else jaxpp.pipeline_enter_stage(x))
            x = x @ self.matrix if i in self.matrix_in else x
            x = x + self.vector if i in self.vector_in else x
        return x


@pytest.mark.parametrize(
    "piped, ranks",
    [
        (Piped(jaxpp.schedules.OneFOneB()), 4),
        (Piped(jaxpp.schedules.Interleaved1F1B(2)), 2),
        (Piped(jaxpp.schedules.ZeroBubbleH1()), 4),
    ],
    ids=["four ranks", "two ranks", "split backward"],
)
@pytest.mark.parametrize("matrix_in, vector_in", [((0, 2), (1, 3)), ((0, 1, 3), (0, 3))])
def test_tied_parameters(matrix_in, vector_in, piped, ranks):
    optimizer, model = CLIP_ADAMW, Tied(matrix_in, vector_in)
    (stage_ranks,) = piped.schedule.table(4, MICROBATCHES).directions
    step, _ = check(with_optimizer(optimizer), start(optimizer, model), ranks=ranks, piped=piped)
    # The part of each stage goes to each other rank that holds a copy.
    holders = [
        (len(stages), len({stage_ranks[s] for s in stages})) for stages in (matrix_in, vector_in)
    ]
    assert sent(step)["gradient"] == sum(parts * (ranks - 1) for parts, ranks in holders)
