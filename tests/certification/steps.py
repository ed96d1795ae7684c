"""Small placed steps, each with its arguments, that have between them what a step can have."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import jaxpp
from jaxpp import schedules
from tests import models
from tests.helpers import mesh_of

WIDTH = 4


def _arrays(*shapes):
    """Random arrays."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _weights(number):
    return _arrays(*[(WIDTH, WIDTH)] * number)


def _data(rows):
    return _arrays((rows, WIDTH), (rows, WIDTH))


def looped(loss, schedule, microbatches, **options):
    """Value and gradient of a loss, microbatch after microbatch, on a schedule."""
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux="reduce" in options)
    options = {"in_axes": (None, 0, 0), **options}
    return jaxpp.schedule(jaxpp.microbatch(grad, microbatches, **options), schedule)


def _updated(weights, momentum, grads):
    """Momentum, with gradients that are clipped by their norm: all ranks need all gradients."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1), momentum, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum


def trained(loss, schedule, microbatches, weights, data, ranks, donate_argnums=(0, 1), **options):
    """A train step of a loss: new weights, momentum, and what the loop gives."""
    loop = looped(loss, schedule, microbatches, **options)

    def step(weights, momentum, *data):
        value, grads = loop(weights, *data)
        return *_updated(weights, momentum, grads), value

    placed = jaxpp.place(step, mesh_of(ranks, shared=True), donate_argnums=donate_argnums)
    return placed, (weights, jax.tree.map(lambda w: w + 1, weights), *data)


def layers(schedule, stages=3, ranks=3, microbatches=4, **options):
    """Layers, each with a weight, cut into stages."""

    def loss(weights, x, y):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    loss = jaxpp.split_stages(loss, num_stages=stages)
    data = _data(2 * microbatches)
    return trained(loss, schedule, microbatches, _weights(4), data, ranks, **options)


def tied(schedule, **options):
    """A weight that the first and the last stage read, and an output beside the loss."""

    def loss(w, x, y):
        turned = w["a"].T
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ turned + x))
        h = jaxpp.pipeline_enter_stage(jnp.sin(h @ w["b"]))
        return jnp.mean((h @ turned - y) ** 2), jnp.abs(h).max()

    weights = dict(zip("ab", _weights(2), strict=True))
    reduce = (("mean", "max"), "mean")
    return trained(loss, schedule, 3, weights, _data(6), 3, reduce=reduce, **options)


def stacked(schedule):
    """A scan over stacked layers, with a penalty on them."""

    def loss(w, x, y):
        x, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x @ w["first"], w["layers"])
        return jnp.mean((x @ w["last"] - y) ** 2) + 0.1 * jnp.sum(w["layers"] ** 2)

    first, last, *layers = _weights(8)
    weights = {"first": first, "layers": jnp.stack(layers), "last": last}
    return trained(jaxpp.split_stages(loss, num_stages=3), schedule, 3, weights, _data(6), 3)


def rows_of_an_array():
    """A stack of which each stage reads a row, and none the second: its gradient is zeros."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[2] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, x, y):
        _, grads = loop(w, x, y)
        first = jax.lax.pad(grads[:1], 0.0, ((0, 2, 0), (0, 0, 0), (0, 0, 0)))
        return w - 0.1 * (grads + (first + 0.5)), jnp.sum(grads)

    return jaxpp.place(step, mesh_of(2, shared=True)), (np.stack(_weights(3)), *_data(4))


def scan_in_a_stage():
    """A scan with two carries, one of which starts in the stage, and a weight that it reads."""

    def loss(w, x, y):
        def layer(carry, own):
            h, mean = carry
            h = jnp.tanh(h @ own + mean @ w["whole"])
            return (h, 0.5 * mean + jnp.sin(h)), None

        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["first"]))
        (h, _), _ = jax.lax.scan(layer, (h, jnp.zeros_like(h)), w["layers"])
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ w["last"] - y) ** 2)

    first, last, whole, *layers = _weights(6)
    weights = {"first": first, "layers": jnp.stack(layers), "last": last, "whole": whole}
    return trained(loss, schedules.ZeroBubbleH1(), 3, weights, _data(6), 3)


def aux_and_keys():
    """Outputs that are combined in all ways, and random keys that are sliced."""

    def loss(w, batch, keys):
        x, y = batch
        h = jnp.tanh(x @ w[0])
        h = jaxpp.pipeline_enter_stage(jnp.where(jax.random.bernoulli(keys[0], 0.5, h.shape), h, 0))
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h @ w[1]))
        out = h @ w[2]
        aux = {"max": jnp.abs(out).max(), "rows": out, "first": h[0], "count": (out > 0).sum()}
        return jnp.mean((out - y) ** 2), {**aux, "least": -jnp.abs(h).max(), "last": h[1]}

    names = {"max": "max", "rows": "concat", "first": "stack", "count": "sum"}
    reduce = (("mean", {**names, "least": "max", "last": "last"}), "mean")
    data = [tuple(_data(8)), jax.random.split(jax.random.key(1), 4)]
    return trained(loss, schedules.ZeroBubbleH1(), 4, _weights(3), data, 3, reduce=reduce)


def model(name, schedule, stages=4, ranks=4, policy=None):
    """The gradient of a model of the tests."""
    case = models.CASES[name]()
    loss = jaxpp.split_stages(case.loss, num_stages=stages)
    grad = eqx.filter_value_and_grad(jaxpp.wrap_forward(loss, policy=policy))
    loop = jaxpp.schedule(jaxpp.microbatch(grad, 3, in_axes=case.in_axes), schedule)
    return jaxpp.place(loop, mesh_of(ranks, shared=True)), (case.model, *case.data(0))


def outside():
    """The gradient of a loss of a whole loop, by its slices too, that has two outputs."""

    def outputs(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2), jnp.sum(jnp.sin(h))

    fun = jaxpp.wrap_forward(outputs)
    loop = jaxpp.microbatch(fun, 3, in_axes=(None, 0, 0), reduce=("mean", "sum"))

    def loss(w, x, y):
        mean, total = loop(w, x, y)
        return 3 * mean + 0.5 * total

    grad = jax.value_and_grad(loss, argnums=(0, 1))
    scheduled = jaxpp.schedule(grad, schedules.OneFOneB())
    return jaxpp.place(scheduled, mesh_of(2, shared=True)), (_weights(2), *_data(6))


def closed_over():
    """Arrays that a step closes over, in its stages and its update, and that it gives back."""
    arrays = list(map(jnp.asarray, _weights(4)))

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0] + x @ arrays[0]))
        return jnp.mean((h @ w[1] + h @ arrays[1] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, x, y):
        value, grads = loop(w, x, y)
        new = [p - g * a for p, g, a in zip(w, grads, arrays[2:], strict=True)]
        return new, value, arrays[2], x, 1.0, w[0]

    return jaxpp.place(step, mesh_of(2, shared=True)), (_weights(2), *_data(4))


def _scaling():
    """A primitive of a user's, with a parameter that is called as one of JAX's that is ignored."""
    primitive = jex.Primitive("scaling")
    primitive.def_abstract_eval(lambda x, **_: x)
    return primitive


def alike():
    """Stages that are one function, and others that differ from it in one thing each."""
    first, second = _weights(2)
    arrays = list(map(jnp.asarray, (first, second)))
    scaling, defined_again = _scaling(), _scaling()

    @jax.jit
    def both(x):
        return jnp.sin(x), jnp.cos(x)

    @jax.jit
    def both_turned(x):
        one, other = jnp.sin(x), jnp.cos(x)
        return other, one

    functions = [
        lambda x, w: 2.0 * (x @ w),  # of a slice
        lambda x, w: 2.0 * (x @ w),
        lambda x, w: 3.0 * (x @ w),
        lambda x, w: jnp.subtract(*(jnp.sin(x), x @ w)),
        lambda x, w: jnp.subtract(*(jnp.sin(x), x @ w)[::-1]),
        lambda x, w: jnp.subtract(*both(x @ w)),
        lambda x, w: jnp.subtract(*both_turned(x @ w)),
        lambda x, w: jnp.where(x > 0, x @ w, 0.0),
        lambda x, w: jnp.where(x > 0, x @ w, -0.0),
        lambda x, w: x @ w + x @ arrays[0],
        lambda x, w: x @ w + x @ arrays[1],
        lambda x, w: x @ w + first[:2],
        lambda x, w: x @ w + second[:2],
        lambda x, w: scaling.bind(x @ w, name="one"),
        lambda x, w: scaling.bind(x @ w, name="other"),
        lambda x, w: defined_again.bind(x @ w, name="one"),
    ]

    def outputs(w, given):
        x = given
        for n, (fun, own) in enumerate(zip(functions, w, strict=True)):
            x = fun(x, own) if n == 0 else fun(jaxpp.pipeline_enter_stage(x), own)
        x = jaxpp.pipeline_enter_stage(x)
        x = jaxpp.pipeline_enter_stage(jnp.sin(x) - given)
        return jnp.cos(jaxpp.pipeline_enter_stage(jnp.sin(given) - x))

    fun = jaxpp.microbatch(jaxpp.wrap_forward(outputs), 2, in_axes=(None, 0), reduce="concat")
    fun = jaxpp.schedule(fun, schedules.ForwardOnly())
    args = _weights(len(functions)), _data(4)[0]
    return jaxpp.place(fun, mesh_of(len(functions) + 3, shared=True)), args


def before_the_loop():
    """Computations on parameters alone, which are equal but for operands and derivative rules."""
    twice, thrice = models.with_backward(2), models.with_backward(3)

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ jnp.sin(w[0]) @ twice(w[2])))
        return jnp.mean((h @ jnp.sin(w[1]) @ thrice(w[2]) - y) ** 2)

    return trained(loss, schedules.OneFOneB(), 2, _weights(3), _data(4), 2)


def two_loops():
    """Loops of other lengths and settings over the same tasks, and an update in a conditional."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        noise = jax.random.normal(jax.random.key(0), (WIDTH,))
        return jnp.mean((h @ w[1] + noise - y) ** 2)

    forward = jaxpp.microbatch(jaxpp.wrap_forward(loss), 3, in_axes=(None, 0, 0))
    forward = jaxpp.schedule(forward, schedules.ForwardOnly())
    short, long = (looped(loss, schedules.OneFOneB(), n) for n in (2, 3))

    def step(w, count, x, y):
        before = forward(w, x, y)
        with jax.threefry_partitionable(False):
            otherwise = forward(w, x, y)
        _, grads = short(w, x[:4], y[:4])
        w = jax.tree.map(jnp.subtract, w, grads)
        value, grads = long(w, x, y)
        is_fine = jnp.isfinite(value) & (count % 2 == 0)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
        w = jax.lax.cond(is_fine, lambda: new, lambda: w)
        return w, count + 1, value - before, otherwise

    args = (_weights(2), np.int32(0), *_data(6))
    return jaxpp.place(step, mesh_of(2, shared=True), donate_argnums=(0, 1)), args


def effects(schedule):
    """Effects in the stages, before the loop and after it, of which some are ordered."""

    def loss(w, x, y):
        h = jnp.tanh(x @ w[0])
        jax.debug.print("first {}", h[0, 0])
        h = jaxpp.pipeline_enter_stage(h)
        noise = io_callback(_zero, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])
        # This reads a weight alone, and happens for each microbatch all the same.
        w1 = jax.lax.stop_gradient(w[1])
        other = io_callback(_zero, jax.ShapeDtypeStruct((), jnp.float32), w1[0, 0])
        return jnp.mean((h @ (w[1] * (1 + other)) - y + noise) ** 2)

    loop = looped(loss, schedule, 2)

    def step(w, x, y):
        io_callback(_nothing, None, x[0, 0], ordered=True)
        factor = io_callback(_zero, jax.ShapeDtypeStruct((), jnp.float32), y[0, 0], ordered=True)
        value, grads = loop(w, (1 + factor) * x, y)
        jax.debug.print("loss {}", value)
        io_callback(_nothing, None, value, ordered=True)
        jax.debug.callback(_nothing, jax.tree.leaves(w)[0] + grads[1])
        return value, grads

    return jaxpp.place(step, mesh_of(2, shared=True)), (_weights(2), *_data(4))


def _zero(_):
    return jnp.float32(0)


def _nothing(_):
    return None


def carried():
    """States and a count from slice to slice, and a state that a loop hands on backwards."""

    def state_of(w, state, x):
        value, seen, count = state
        h = jnp.tanh(x @ w[0])
        new = jnp.mean(h, axis=0)
        h = jaxpp.pipeline_enter_stage(h)
        return 0.5 * value + jnp.sum(h @ w[1] * seen), new, count + 1

    fun = jaxpp.microbatch(
        jaxpp.wrap_forward(state_of), 3, in_axes=(None, "carry", 0), reduce="carry"
    )
    forwards = jaxpp.schedule(fun, schedules.ForwardOnly())

    def loss(w, x):
        return jnp.sum(jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1])

    def backwards(w, x):
        def body(state, x):
            value = jaxpp.wrap_forward(loss)(w, x)
            return 0.5 * state + value, value

        return jax.lax.scan(body, 0.0, x.reshape(3, 2, WIDTH), reverse=True)

    def step(w, x):
        state = jnp.float32(1), jnp.ones(WIDTH), jnp.int32(0)
        return backwards(w, x), forwards(w, state, x)

    backwards = jaxpp.schedule(backwards, schedules.ForwardOnly())
    return jaxpp.place(step, mesh_of(2, shared=True)), (_weights(2), _data(6)[0])


def carried_and_recomputed():
    """A state of each stage, which its forward reads before it is replaced."""

    def loss(w, states, x, y):
        h, new = x, []
        for n, (own, state) in enumerate(zip(w, states, strict=True)):
            h = jnp.tanh((h if n == 0 else jaxpp.pipeline_enter_stage(h)) @ own)
            new.append(0.5 * state + h.mean(0))
            h = jnp.sin(h * state)
        return jnp.mean((h - y) ** 2), new

    grad = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    axes, reduce = (None, "carry", 0, 0), (("mean", "carry"), "mean")
    loop = jaxpp.microbatch(grad, 3, in_axes=axes, reduce=reduce)
    loop = jaxpp.schedule(loop, schedules.Recompute(schedules.OneFOneB()))
    states = _arrays((WIDTH,), (WIDTH,))
    return jaxpp.place(loop, mesh_of(2, shared=True)), (_weights(2), states, *_data(6))


def half_precision():
    """Weights of a narrow type, whose gradients are added up in a wide one."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y).astype(jnp.float32) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2, accumulator_dtype=jnp.float32)
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (_weights(2), *_data(4)))
    return jaxpp.place(loop, mesh_of(2, shared=True)), args


def over_the_batch(schedule):
    """The gradient of a loss over the whole batch, of outputs that are combined in all ways."""

    def outputs(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = h @ w[1]
        return {"hardest": jnp.max(h), "mean": jnp.mean(h**2), "rows": h}

    reduce = {"hardest": "max", "mean": "mean", "rows": "concat"}
    loop = jaxpp.microbatch(jaxpp.wrap_forward(outputs), 2, reduce=reduce)

    def loss(w, x):
        made = loop(w, x)
        return made["hardest"] * made["mean"] + _contrast(made["rows"])

    scheduled = jaxpp.schedule(jax.value_and_grad(loss), schedule)
    return jaxpp.place(scheduled, mesh_of(2, shared=True)), (_weights(2), _data(4)[0])


def _contrast(rows):
    """Each row is told from all others."""
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(rows @ rows.T)))


def contrastive(schedule, staged=jaxpp.wrap_forward, dtype=jnp.float32):
    """The gradient of a loss over the rows of the whole batch alone."""

    def rows(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.tanh(h @ w[1])

    loop = jaxpp.microbatch(staged(rows), 3, reduce="concat")

    def loss(w, x):
        return _contrast(loop(w, x).astype(jnp.float32))

    scheduled = jaxpp.schedule(jax.value_and_grad(loss), schedule)
    args = jax.tree.map(lambda x: jnp.asarray(x, dtype), (_weights(2), _data(6)[0]))
    return jaxpp.place(scheduled, mesh_of(2, shared=True)), args


def checkpointed_twice(fun):
    return jax.checkpoint(jax.checkpoint(jaxpp.wrap_forward(fun)))


def carried_backwards():
    """The gradient of a loss of the last states: it goes back from microbatch to microbatch."""

    def of_slice(w, states, x):
        new = []
        for n, (own, state) in enumerate(zip(w, states, strict=True)):
            x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if n else x) @ own + state)
            new.append(0.5 * state + jnp.mean(x, 0))
        return jnp.sum(x**2), new

    axes, reduce = (None, "carry", 0), ("sum", "carry")
    loop = jaxpp.microbatch(jaxpp.wrap_forward(of_slice), 3, in_axes=axes, reduce=reduce)

    def loss(params, x):
        w, states = params
        total, states = loop(w, states, x)
        return total + sum(jnp.sum(jnp.sin(state)) for state in states)

    grad = jaxpp.schedule(jax.value_and_grad(loss), schedules.ZeroBubbleH1())
    params = _weights(2), _arrays((WIDTH,), (WIDTH,))
    return jaxpp.place(grad, mesh_of(2, shared=True)), (params, _data(6)[0])


def scaled():
    """A scale of the loss that follows the gradients, and one for each microbatch."""

    def loss(w, fading, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0] * fading))
        return jnp.mean((jnp.tanh(h @ w[1]) @ w[2] * fading - y) ** 2)

    staged: Any = jaxpp.wrap_forward(loss)

    def of_slice(w, scale, fading, x, y):
        value, pullback = jax.vjp(lambda w: staged(w, fading, x, y), w)
        grads = jax.tree.map(lambda g: g / scale, pullback(scale)[0])
        return value, grads, scale / (1 + jnp.sum(grads[-1] ** 2))

    axes, reduce = (None, "carry", 0, 0, 0), ("mean", "mean", "carry")
    loop = jaxpp.microbatch(of_slice, 3, in_axes=axes, reduce=reduce)
    args = (_weights(3), jnp.float32(2), jnp.float32(0.5) ** jnp.arange(3), *_data(6))
    scheduled = jaxpp.schedule(loop, schedules.ZeroBubbleH1())
    return jaxpp.place(scheduled, mesh_of(2, shared=True)), args


@jax.custom_vjp
def _searching(h, w):
    """A layer whose backward looks for a row of its cotangent, by a product."""
    return jnp.tanh(h @ w)


def _search(kept, ct):
    h, w, y = kept
    d = ct * (1 - y * y)
    one, other, third = jnp.cos(d), jnp.sin(d), jnp.tanh(d)
    product = h.T @ (one - other)
    row = jax.lax.dynamic_slice_in_dim(third, jnp.argmax(product) % len(d), 1)
    return (one + other + third) @ w.T, product + row


_searching.defvjp(lambda h, w: ((y := _searching(h, w)), (h, w, y)), _search)


def searched():
    """A scan in a stage whose backward has an operand that only its second half makes."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["first"]))
        h, _ = jax.lax.scan(lambda h, own: (_searching(h, own), None), h, w["layers"])
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ w["last"] - y) ** 2)

    first, last, *layers = _weights(5)
    weights = {"first": first, "layers": jnp.stack(layers), "last": last}
    return trained(loss, schedules.ZeroBubbleH1(), 2, weights, _data(6), 3)


def as_given():
    """Arguments and outputs for which the user gives an entry of each kind."""

    def loss(w, batch, *, noise, scale):
        x, y = batch["x"], batch["y"]
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x.reshape(2, WIDTH) @ w[0] + noise))
        h = h @ w[1] * scale
        aux = {"rows": h, "count": len(h), "half": jnp.sum(h), "own": jnp.sum(h), "wide": h[0]}
        return jnp.mean((h - y).astype(jnp.float32) ** 2), aux

    grad = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    aux = {"rows": "concat", "count": "sum", "half": "sum", "own": "sum", "wide": "mean"}
    loop = jaxpp.microbatch(
        lambda w, batch, scale, noise: grad(w, batch, noise=noise, scale=scale),
        2,
        in_axes=(None, {"x": 1, "y": 0}, None),
        reduce=(("mean", aux), "mean"),
        accumulator_dtype=(
            (None, {**dict.fromkeys(aux, "auto"), "own": None, "wide": "float32"}),
            "auto",
        ),
    )
    loop = jaxpp.schedule(loop, schedules.OneFOneB())
    x, y, noise = _arrays((WIDTH, 4), (4, WIDTH), (4, WIDTH))
    args = (_weights(2), {"x": x, "y": y}, np.float32(2), noise)
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), args)

    def step(w, batch, scale, noise):
        return loop(w, batch, scale=scale, noise=noise)

    return jaxpp.place(step, mesh_of(2, shared=True)), args


def accumulated():
    """Gradients that are added up, and values that are stacked, as users of JaxPP write it."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2)

    def step(w, *data):
        def of_slice(one):
            return jax.value_and_grad(jaxpp.wrap_forward(loss))(w, *one)

        return jaxpp.accumulate_grads(of_slice, data, schedule=schedules.OneFOneB())

    data = [x.reshape(3, 2, WIDTH) for x in _data(6)]
    return jaxpp.place(step, mesh_of(2, shared=True)), (_weights(2), *data)


#: The steps, by name.
CASES: dict[str, Callable[[], tuple[Any, tuple]]] = {
    "layers, ZB-H1": lambda: layers(schedules.ZeroBubbleH1()),
    "layers, interleaved": lambda: layers(schedules.Interleaved1F1B(2), 4, 2),
    "layers, DualPipe": lambda: layers(schedules.DualPipe(), 4, 4, 8),
    "layers, recomputed": lambda: layers(schedules.Recompute(schedules.OneFOneB())),
    "tied, 1F1B": lambda: tied(schedules.OneFOneB()),
    "tied, ZB-H1": lambda: tied(schedules.ZeroBubbleH1(), donate_argnums=()),
    "stacked, ZB-H1": lambda: stacked(schedules.ZeroBubbleH1()),
    "rows of an array": rows_of_an_array,
    "scan in a stage, ZB-H1": scan_in_a_stage,
    "aux and keys": aux_and_keys,
    "control flow, ZB-H1": lambda: model("control_flow", schedules.ZeroBubbleH1()),
    "control flow, recomputed": lambda: model(
        "control_flow", schedules.Recompute(schedules.OneFOneB())
    ),
    "tied in other shapes": lambda: model("tied", schedules.OneFOneB()),
    "gradient outside": outside,
    "effects": lambda: effects(schedules.OneFOneB()),
    "effects, recomputed": lambda: effects(schedules.Recompute(schedules.OneFOneB())),
    "closed over": closed_over,
    "alike": alike,
    "before the loop": before_the_loop,
    "two loops": two_loops,
    "carried": carried,
    "carried, recomputed": carried_and_recomputed,
    "half precision": half_precision,
    "as given": as_given,
    "accumulated": accumulated,
    "over the batch": lambda: over_the_batch(schedules.OneFOneB()),
    "contrastive": lambda: contrastive(schedules.OneFOneB()),
    "checkpointed twice": lambda: contrastive(schedules.OneFOneB(), checkpointed_twice),
    "contrastive, half precision": lambda: contrastive(
        schedules.ZeroBubbleH1(), dtype=jnp.bfloat16
    ),
    "carried backwards": carried_backwards,
    "scaled": scaled,
    "searched": searched,
}
