"""Further small placed steps: numbers, replicas, loops and updates of kinds that are rare."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import schedules
from tests import models
from tests.certification.steps import WIDTH, layers, looped
from tests.helpers import mesh_of

RNG = np.random.default_rng(1)


def arrays(*shapes):
    """Random arrays."""
    return [RNG.normal(size=shape).astype(np.float32) for shape in shapes]


def weights(number):
    return arrays(*[(WIDTH, WIDTH)] * number)


def descended(params, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def on(ranks):
    return mesh_of(ranks, shared=True)


# ---- replicas -----------------------------------------------------------------------------------


def replicas(schedule, count=2, devices=None, microbatches=2, in_order=True, **options):
    """Replicas with the statistics of a BatchNorm, and outputs that are combined in all ways.

    With `devices`, each rank has so many, among which the replicas are divided. With `in_order`,
    microbatches carry the statistics.
    """

    def loss(w, state, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["first"]))
        mean = h.mean(0)
        new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "seen": state["seen"] + 1}
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), h - mean, w["layers"][:1])
        h = jaxpp.pipeline_enter_stage(h)
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), h, w["layers"][1:])
        h = jaxpp.pipeline_enter_stage(h) @ w["first"].T
        ways = {"rows": h, "greatest": jnp.abs(h).max(), "last": h[0], "each": h[0, 0]}
        return jnp.mean((h - y) ** 2), (new, ways)

    state = {"mean": jnp.ones(WIDTH), "seen": jnp.int32(1)}
    reduce = {"rows": "concat", "greatest": "max", "last": "last", "each": "stack"}
    own: Any = {"in_axes": (None, "carry", 0, 0), "reduce": (("mean", ("carry", reduce)), "mean")}
    own["merge"] = ((None, ({"mean": None, "seen": "max"}, None)), None)
    if not in_order:
        reduce["last"] = "sum"
        own = {"in_axes": (None, None, 0, 0), "reduce": (("mean", ("max", reduce)), "mean")}
    loop = looped(loss, schedule, microbatches, replicas=count, **own)

    def step(w, momentum, state, x, y):
        (value, (state, ways)), grads = loop(w, state, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1), momentum, grads)
        return descended(w, momentum), momentum, state, value, ways

    mesh: Any = on(4)
    if devices is not None:
        mesh = jaxpp.MpmdMesh((4, devices), ("mpmd", "data"), devices=jax.devices()[:devices] * 4)
        options["in_specs"] = (None, None, None, P("data"), P("data"))
    first, *stack = weights(3)
    w = {"first": first, "layers": np.stack(stack)}
    args = (
        w,
        jax.tree.map(lambda x: x + 1, w),
        state,
        *arrays(*[(2 * microbatches * count, WIDTH)] * 2),
    )
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), **options), args


def shared_examples():
    """Microbatches whose examples are divided among the devices of a rank."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2)

    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"), devices=jax.devices()[:4])
    specs = None, P("data"), P("data")
    step = jaxpp.place(looped(loss, schedules.OneFOneB(), 2), mesh, in_specs=specs)
    return step, (weights(2), *arrays(*[(8, WIDTH)] * 2))


# ---- numbers ------------------------------------------------------------------------------------


def integers():
    """Integers and truth values that are combined; the greatest of the integers is negative."""

    def loss(w, x, n):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        ways = {
            "greatest": -1 - jnp.abs(n).max(),
            "any": (h > 2).any(),
            "small": n.astype(jnp.int8).sum(dtype=jnp.int8),
        }
        return jnp.mean((h @ w[1]) ** 2), {**ways, "half": (h > 0).sum()}

    reduce = {"greatest": "max", "any": "max", "small": "sum", "half": "sum"}
    loop = looped(loss, schedules.OneFOneB(), 2, reduce=(("mean", reduce), "mean"))
    args = weights(2), *arrays((4, WIDTH)), RNG.integers(1, 100, (4, 2), np.int32)
    return jaxpp.place(loop, on(2)), args


def tied_in_float16():
    """A weight in float16 that two stages read, whose gradients are added up in float32."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h @ w[1]))
        return jnp.mean((h @ w[0].T - y).astype(jnp.float32) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 3, accumulator_dtype=jnp.float32)
    args = weights(2), *arrays(*[(6, WIDTH)] * 2)
    return jaxpp.place(loop, on(3)), jax.tree.map(lambda x: x.astype(jnp.float16), args)


def wrapping():
    """Numbers of eight bits from two stages, whose sum wraps before it is made wide."""

    def counts(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        first = (100 * h).astype(jnp.int8).sum(dtype=jnp.int8)
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h @ w[1]))
        return first, (100 * h).astype(jnp.int8).sum(dtype=jnp.int8)

    def of_slice(w, x):
        first, second = jaxpp.wrap_forward(counts)(w, x)
        return (first + second).astype(jnp.int32)

    loop = jaxpp.microbatch(of_slice, 3, reduce="sum")
    loop = jaxpp.schedule(loop, schedules.ForwardOnly())
    return jaxpp.place(loop, on(3)), (weights(2), *arrays((6, WIDTH)))


def complex_numbers():
    """Weights that are complex, and their gradients."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean(jnp.abs(h @ w[1] - y) ** 2)

    loop = looped(loss, schedules.ZeroBubbleH1(), 3)

    def step(w, x, y):
        value, grads = loop(w, x, y)
        return descended(w, jax.tree.map(jnp.conj, grads)), value

    w = [a + 1j * b for a, b in zip(weights(2), weights(2), strict=True)]
    return jaxpp.place(step, on(2), donate_argnums=0), (w, *arrays(*[(6, WIDTH)] * 2))


def scaled_half_precision():
    """Float16 with a scale of the loss, which a step with an overflow halves and else leaves."""

    def loss(w, scale, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y).astype(jnp.float32) ** 2) * scale

    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    loop = jaxpp.microbatch(
        grad, 2, in_axes=(None, None, 0, 0), accumulator_dtype=(None, jnp.float32)
    )
    loop = jaxpp.schedule(loop, schedules.OneFOneB())

    def step(w, scale, x, y):
        half = jax.tree.map(lambda w: w.astype(jnp.float16), w)
        value, grads = loop(half, scale, x, y)
        grads = jax.tree.map(lambda g: g / scale, grads)
        fine = jnp.stack([jnp.isfinite(g).all() for g in grads]).all()
        w = jax.tree.map(lambda w, n: jnp.where(fine, n, w), w, descended(w, grads))
        return w, jnp.where(fine, scale, scale / 2), value / scale

    x, y = (a.astype(np.float16) for a in arrays(*[(4, WIDTH)] * 2))
    args = weights(2), np.float32(1024), x, y
    return jaxpp.place(step, on(2), donate_argnums=(0, 1)), args


def mean_outside():
    """The gradient of a loop's mean, which is added up in another dtype than the weights'."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1]).astype(jnp.float32) ** 2)

    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), 3, accumulator_dtype=jnp.float32)
    scheduled = jaxpp.schedule(jax.value_and_grad(loop), schedules.OneFOneB())
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (weights(2), *arrays((6, WIDTH))))
    return jaxpp.place(scheduled, on(2)), args


def outside(dtype=jnp.bfloat16):
    """The gradient of a loss of the last rows, and of all, whose gradients are of another dtype."""

    def outputs(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = jnp.tanh(h @ w[1])
        return h[0], h

    loop = jaxpp.microbatch(
        jaxpp.wrap_forward(outputs),
        3,
        reduce=("last", "concat"),
        accumulator_dtype=(None, "float32"),
    )

    def loss(w, x):
        last, rows = loop(w, x)
        return jnp.sum((jnp.sin(last) * rows[2]).astype(jnp.float32))

    scheduled = jaxpp.schedule(jax.value_and_grad(loss), schedules.OneFOneB())
    args = jax.tree.map(lambda x: jnp.asarray(x, dtype), (weights(2), *arrays((6, WIDTH))))
    return jaxpp.place(scheduled, on(2)), args


def last_and_mean():
    """The gradient of a loss of the last rows, and of a mean."""

    def outputs(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = jnp.tanh(h @ w[1])
        return h[0], jnp.mean(h**2)

    loop = jaxpp.microbatch(jaxpp.wrap_forward(outputs), 3, reduce=("last", "mean"))

    def loss(w, x):
        last, mean = loop(w, x)
        return jnp.sum(jnp.sin(last)) + mean

    scheduled = jaxpp.schedule(jax.value_and_grad(loss), schedules.OneFOneB())
    return jaxpp.place(scheduled, on(2)), (weights(2), *arrays((6, WIDTH)))


# ---- loops --------------------------------------------------------------------------------------


def by_hand(schedule, microbatches=3, in_order=True, reverse=False):
    """A loop that a user writes: gradients are added to some, or subtracted, and rows are kept.

    With `in_order`, it also gives a state from microbatch to microbatch, and that before each.
    """

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["tied"]))
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), h, w["layers"][:1])
        h = jaxpp.pipeline_enter_stage(h)
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), h, w["layers"][1:])
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ w["tied"].T) ** 2)

    def loop(w, grads, x):
        def body(carry, x):
            grads, ones, state = carry
            value, own = jax.value_and_grad(jaxpp.wrap_forward(loss))(w, x)
            new = {
                "tied": (jnp.subtract if in_order else jnp.add)(grads["tied"], own["tied"]),
                "layers": grads["layers"] + own["layers"],
            }
            ones = ones + jnp.cos(jnp.zeros(WIDTH))
            if not in_order:
                return (new, ones, state), value
            return (new, ones, 0.5 * state + value), (value, state)

        start = grads, jnp.zeros(WIDTH), jnp.float32(3)
        return jax.lax.scan(body, start, x, reverse=reverse)

    loop = jaxpp.schedule(loop, schedule)
    tied, *stack = weights(3)
    w = {"tied": tied, "layers": np.stack(stack)}
    grads = jax.tree.map(lambda x: x + 1, w)
    return jaxpp.place(loop, on(4)), (w, grads, *arrays((microbatches, 2, WIDTH)))


def alike_but_for_rules():
    """Stages that are one function but for derivative rules, with results of one type."""
    twice, thrice = models.with_backward(2), models.with_backward(3)

    def loss(w, x, y):
        a, b = x, y
        for own, rule in zip(w, (twice, thrice, twice), strict=True):
            a, b = jaxpp.pipeline_enter_stage((a, b)) if own is not w[0] else (a, b)
            a, b = rule(a @ own), jnp.sin(b @ own)
        a, b = jaxpp.pipeline_enter_stage((a, b))
        return jnp.mean((a - 2 * b) ** 2)

    loop = looped(loss, schedules.ZeroBubbleH1(), 4)
    return jaxpp.place(loop, on(4)), (weights(3), *arrays(*[(8, WIDTH)] * 2))


def dropout():
    """Stages that differ in the key that they take, in a number, and in an array closed over."""
    known = list(map(jnp.asarray, weights(4)))

    def loss(w, x, keys):
        for n, own in enumerate(w):
            x = jaxpp.pipeline_enter_stage(x) if n else x
            key = jax.random.fold_in(keys[n], n)
            kept = jax.random.bernoulli(key, 0.5, x.shape)
            x = jnp.where(kept, jnp.tanh(x @ own + x @ known[n]) @ known[n + 1], 0)
        return jnp.mean(jaxpp.pipeline_enter_stage(x) ** 2)

    def of_slice(w, x, keys):
        return jax.value_and_grad(jaxpp.wrap_forward(loss))(w, x, keys[0])

    loop = jaxpp.microbatch(of_slice, 3, in_axes=(None, 0, 0))
    loop = jaxpp.schedule(loop, schedules.Recompute(schedules.OneFOneB()))
    args = weights(3), *arrays((6, WIDTH)), jax.random.split(jax.random.key(1), (3, 3))
    return jaxpp.place(loop, on(4)), args


def both_directions():
    """Rows of all microbatches, which take two directions through the ranks."""

    def loss(w, x, y):
        h = x
        for n, own in enumerate(w):
            h = jaxpp.pipeline_enter_stage(h) if n else h
            h = jnp.tanh(h @ own)
        return jnp.mean((h - y) ** 2), {"rows": h, "each": h[0], "greatest": h.max()}

    reduce = {"rows": "concat", "each": "stack", "greatest": "max"}
    loop = looped(loss, schedules.DualPipe(), 4, reduce=(("mean", reduce), "mean"))
    return jaxpp.place(loop, on(2)), (weights(2), *arrays(*[(8, WIDTH)] * 2))


class Fading:
    """A sum in which each value counts half of the one after it; replicas count twice as much."""

    def init(self, x):
        return jnp.ones(x.shape, x.dtype)

    def combine(self, acc, x):
        return 0.5 * acc + x

    def finish(self, acc, num_microbatches):
        return acc / num_microbatches

    def merge(self, acc, other):
        return acc + 2 * other


def operators(count=1):
    """Outputs that an operator of the user's combines."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = h @ w[1]
        return jnp.mean((h - y) ** 2), h[0]

    reduce = (("mean", Fading()), "mean")
    loop = looped(loss, schedules.OneFOneB(), 3, reduce=reduce, replicas=count)
    return jaxpp.place(loop, on(2)), (weights(2), *arrays(*[(6 * count, WIDTH)] * 2))


def _clip(g):
    return jax.lax.clamp(jnp.float32(-0.1), g, jnp.float32(0.1))


def changed(change):
    """Gradients that are changed in each microbatch, of a weight that two stages read."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h @ w[1]))
        return jnp.mean((h @ w[0].T - y) ** 2)

    def of_slice(w, x, y):
        value, grads = jax.value_and_grad(jaxpp.wrap_forward(loss))(w, x, y)
        return value, list(map(change, grads))

    loop = jaxpp.microbatch(of_slice, 3, in_axes=(None, 0, 0))
    loop = jaxpp.schedule(loop, schedules.OneFOneB())
    return jaxpp.place(loop, on(3)), (weights(2), *arrays(*[(6, WIDTH)] * 2))


def running_sum():
    """The gradients of a weight that two stages read, and their sum so far."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h = jaxpp.pipeline_enter_stage(jnp.tanh(h @ w[1]))
        return jnp.mean((h @ w[0].T - y) ** 2)

    def of_slice(w, total, x, y):
        value, grads = jax.value_and_grad(jaxpp.wrap_forward(loss))(w, x, y)
        return value, jnp.sum(total * grads[0]), total + grads[0]

    axes, reduce = (None, "carry", 0, 0), ("mean", "stack", "carry")
    loop = jaxpp.microbatch(of_slice, 3, in_axes=axes, reduce=reduce)
    loop = jaxpp.schedule(loop, schedules.OneFOneB())
    args = weights(2), *weights(1), *arrays(*[(6, WIDTH)] * 2)
    return jaxpp.place(loop, on(3)), args


def recurrent():
    """A state that a matrix makes of the state of the microbatch before."""

    def loss(w, state, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        new = jnp.tanh(state @ w[1] + h.mean(0))
        return jnp.mean((h + new - y) ** 2), new

    axes, reduce = (None, "carry", 0, 0), (("mean", "carry"), "mean")
    loop = looped(loss, schedules.OneFOneB(), 3, in_axes=axes, reduce=reduce)
    args = weights(2), *arrays((WIDTH,), *[(6, WIDTH)] * 2)
    return jaxpp.place(loop, on(2)), args


def balanced():
    """A loss with a term of each stage, as of experts that are to be used alike; one is frozen."""

    def loss(w, x, y):
        total = 0.0
        for n, own in enumerate(w):
            x = jaxpp.pipeline_enter_stage(x) if n else x
            own = jax.lax.stop_gradient(own) if n == 1 else own
            use = jax.nn.softmax(x @ own, -1)
            x, total = jnp.tanh(x @ own) * use, total + jnp.sum(use.mean(0) ** 2)
        return jnp.mean((x - y) ** 2) + 0.01 * total, total

    loop = looped(loss, schedules.ZeroBubbleH1(), 3, reduce=(("mean", "mean"), "mean"))

    def step(w, momentum, x, y):
        (value, total), grads = loop(w, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return descended(w, momentum), momentum, value, total

    w = weights(3)
    args = w, [x + 1 for x in w], *arrays(*[(6, WIDTH)] * 2)
    return jaxpp.place(step, on(3), donate_argnums=(0, 1)), args


# ---- stacked layers, and updates ----------------------------------------------------------------


def turned():
    """Layers from the last to the first, beside ones closed over; updates that mix rows."""
    known = jnp.stack(weights(6))

    def loss(w, x, y):
        def layer(h, own):
            return jnp.tanh(h @ own[0] + h @ own[1]), h.mean(0)

        h, means = jax.lax.scan(layer, x, (w[1:5], known[2:]), reverse=True)
        return jnp.mean((h @ w[0] - y) ** 2) + jnp.sum(means * jnp.arange(4.0)[:, None])

    loop = looped(jaxpp.split_stages(loss, num_stages=2), schedules.OneFOneB(), 2)

    def step(w, x, y):
        value, g = loop(w, x, y)
        mixed = jnp.cumsum(g, 0) + g[::-1] + jnp.sort(g, 0) + jnp.concatenate([g[2:], g[:2]])
        return w - 0.1 * mixed * known, g.max(), value

    args = jnp.stack(weights(6)), *arrays(*[(4, WIDTH)] * 2)
    return jaxpp.place(step, on(2), donate_argnums=0), args


def zeros_in_part(change):
    """An update by rows that are zeros in all stages but the first."""

    def loss(w, x, y):
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x, w)
        return jnp.mean((h - y) ** 2)

    loop = looped(jaxpp.split_stages(loss, num_stages=2), schedules.OneFOneB(), 2)

    def step(w, x, y):
        value, g = loop(w, x, y)
        some = jax.lax.pad(g[:2], 0.0, ((0, 2, 0), (0, 0, 0), (0, 0, 0)))
        return w - 0.1 * change(g, some), value

    args = jnp.stack(weights(4)), *arrays(*[(4, WIDTH)] * 2)
    return jaxpp.place(step, on(2), donate_argnums=0), args


def written():
    """A step that writes new weights into its argument, and gives it back."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["a"]))
        return jnp.mean((h @ w["b"] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, x, y):
        value, grads = loop(w, x, y)
        for name in "ab":
            w[name] = w[name] - 0.1 * grads[name]
        return value, w

    w = dict(zip("ab", weights(2), strict=True))
    return jaxpp.place(step, on(2)), (w, *arrays(*[(4, WIDTH)] * 2))


def conditionals():
    """Updates in a conditional, of all stages' weights, with work in both branches."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, count, x, y):
        value, grads = loop(w, x, y)
        halved = lambda: jax.tree.map(lambda p: 0.5 * p, w)  # noqa: E731
        w = jax.lax.cond(jnp.isfinite(value), lambda: descended(w, grads), halved)
        return w, count + 1, value

    args = weights(2), np.int32(0), *arrays(*[(4, WIDTH)] * 2)
    return jaxpp.place(step, on(2), donate_argnums=(0, 1)), args


def nested():
    """An update in a conditional in a conditional, of all stages' weights, that prints."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, count, x, y):
        value, grads = loop(w, x, y)

        def descend():
            jax.debug.print("a step {}", value)
            return descended(w, grads)

        def update():
            return jax.lax.cond(jnp.isfinite(value), descend, lambda: w)

        return jax.lax.cond(count % 2 == 0, update, lambda: w), count + 1, value

    args = weights(2), np.int32(0), *arrays(*[(4, WIDTH)] * 2)
    return jaxpp.place(step, on(2), donate_argnums=(0, 1)), args


def in_order():
    """Ordered effects after a loop: a rank waits for the second, which waits for the first."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - y) ** 2)

    loop = looped(loss, schedules.OneFOneB(), 2)

    def step(w, x, y):
        value, grads = loop(w, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        io_callback(_nothing, None, norm, ordered=True)
        scale = io_callback(_one, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=True)
        scaled = sum(jnp.sum(g * scale) for g in grads)
        return [p - g * scaled for p, g in zip(w, grads, strict=True)], value

    return jaxpp.place(step, on(2)), (weights(2), *arrays(*[(4, WIDTH)] * 2))


def _nothing(_):
    return None


def _one(_):
    return jnp.float32(1)


#: The steps whose gradients JAX casts at another place than the definitions do.
ROUNDED = frozenset({"mean outside, half precision"})

#: The steps, by name.
CASES: dict[str, Callable[[], tuple[Any, tuple]]] = {
    "replicas": lambda: replicas(schedules.OneFOneB()),
    "replicas on devices": lambda: replicas(schedules.OneFOneB(), 4, 2),
    "replicas, ZeRO": lambda: replicas(schedules.ZeroBubbleH1(), 2, 2, zero1="data"),
    "replicas, DualPipe": lambda: replicas(schedules.DualPipe(), microbatches=8, in_order=False),
    "shared examples": shared_examples,
    "integers": integers,
    "tied, float16": tied_in_float16,
    "wrapping": wrapping,
    "complex": complex_numbers,
    "scaled half precision": scaled_half_precision,
    "by hand": lambda: by_hand(schedules.OneFOneB()),
    "by hand, backwards": lambda: by_hand(schedules.OneFOneB(), reverse=True),
    "by hand, DualPipe": lambda: by_hand(schedules.DualPipe(), 8, in_order=False),
    "alike but for rules": alike_but_for_rules,
    "dropout": dropout,
    "both directions": both_directions,
    "operators": operators,
    "operators, replicas": lambda: operators(2),
    "clipped": lambda: changed(_clip),
    "turned gradients": lambda: changed(lambda g: g[::-1].T),
    "running sum": running_sum,
    "recurrent": recurrent,
    "balanced": balanced,
    "turned": turned,
    "exp of zeros": lambda: zeros_in_part(lambda g, some: jnp.exp(some)),
    "one less zeros": lambda: zeros_in_part(lambda g, some: g - some),
    "zeros or others": lambda: zeros_in_part(lambda g, some: jnp.where(g > 0, g, some)),
    "written": written,
    "effects in order": in_order,
    "conditionals": conditionals,
    "nested conditionals": nested,
    "outside, half precision": outside,
    "mean outside, half precision": mean_outside,
    "last and mean": last_and_mean,
    "layers, offloaded": lambda: layers(schedules.Offload(schedules.OneFOneB())),
}
