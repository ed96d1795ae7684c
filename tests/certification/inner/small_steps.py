"""Small placed steps with what an edit inside a computation can break; each with its arguments.

Activations are square, so that an edit of an axis keeps a type.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import schedules
from tests.helpers import mesh_of

WIDTH, SLICES = 4, 2
ROWS = SLICES * WIDTH


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def weights(number):
    return arrays(*[(WIDTH, WIDTH)] * number)


def batch(number=1):
    return arrays(*[(ROWS, WIDTH)] * number, seed=1)


def grads(loss, schedule=None, **options):
    """Value and gradient of a loss by its first argument."""
    has_aux = options.pop("has_aux", False)
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=has_aux)
    loop = jaxpp.microbatch(grad, SLICES, **options)
    return jaxpp.schedule(loop, schedule or schedules.OneFOneB())


def outputs(fun, reduce, **options):
    """The outputs of a function of weights and data, which no gradient follows."""
    loop = jaxpp.microbatch(jaxpp.wrap_forward(fun), SLICES, reduce=reduce, **options)
    return jaxpp.schedule(loop, schedules.ForwardOnly())


def placed(step, *args, mesh=None, **options) -> tuple[Any, tuple]:
    return jaxpp.place(step, mesh or mesh_of(2, shared=True), **options), args


def inside_mesh(axis):
    return jaxpp.MpmdMesh((2, 2), ("mpmd", axis), devices=jax.devices()[:4])


def trained():
    """Momentum, and gradients that are clipped by their global norm; the ends are tied."""

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w["tied"]) * w["scale"])
        return jnp.mean((jnp.sin(h @ w["own"]) @ w["tied"].T - y) ** 2)

    grad = grads(loss, schedules.ZeroBubbleH1(), in_axes=(None, 0, 0))

    def step(w, m, rate, x, y):
        value, g = grad(w, x, y)
        norm = jnp.sqrt(sum(jnp.sum(own * own) for own in jax.tree.leaves(g)))
        m = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1), m, g)
        return jax.tree.map(lambda w, m: w - rate * m, w, m), m, rate * 0.9, value

    tied, own = weights(2)
    w = {"tied": tied, "own": own, "scale": own[0]}
    moments = jax.tree.map(lambda w: w + 1, w)
    return placed(step, w, moments, jnp.asarray(0.1), *batch(2))


def stacked():
    """A scan over stacked layers, each a checkpoint, cut into stages."""

    def loss(w, x):
        def layer(h, own):
            return jax.checkpoint(lambda h: jnp.tanh(h @ own) - 0.5 * h)(h), None

        x, _ = jax.lax.scan(layer, x @ w["first"], w["layers"])
        return jnp.mean(x**2) + 0.1 * jnp.sum(w["layers"] ** 2)

    first, *layers = weights(5)
    grad = grads(jaxpp.split_stages(loss, num_stages=2))

    def step(w, x):
        value, g = grad(w, x)
        norm = jnp.sqrt(sum(jnp.sum(own * own) for own in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / norm, w, g), value

    return placed(step, {"first": first, "layers": jnp.stack(layers)}, *batch())


def half_precision():
    """Weights in float32, layers in bfloat16, and a scale of the loss that follows infinities."""

    def loss(w, scale, x):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16))
        h = jaxpp.pipeline_enter_stage(h) @ w[1].astype(jnp.bfloat16)
        h = jnp.maximum(h, 0) + jnp.sum(h, -1, keepdims=True) * jnp.bfloat16(0.1)
        return jnp.mean(h.astype(jnp.float32) ** 2) * scale

    grad = grads(loss, in_axes=(None, None, 0))

    def step(w, scale, x):
        value, g = grad(w, scale, x)
        g = [own / scale for own in g]
        fine = functools.reduce(jnp.logical_and, [jnp.isfinite(own).all() for own in g])
        w = [jnp.where(fine, own - 0.1 * d, own) for own, d in zip(w, g, strict=True)]
        return w, jnp.where(fine, scale * 2, scale / 2), value / scale, w[0].astype(jnp.float16)

    return placed(step, weights(2), jnp.float32(8), *batch())


def narrow_weights():
    """Weights and layers in bfloat16, whose gradients are added up in float32."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean(jnp.sin(h @ w[1]).astype(jnp.float32) ** 2)

    grad = grads(loss)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (weights(2), *batch()))
    return placed(lambda w, x: grad(w, x), *narrow)


def complex_numbers():
    """Complex layers, a transform, and real losses."""

    def loss(w, x):
        h = jax.lax.complex(x @ w["re"], x @ w["im"])
        h = jaxpp.pipeline_enter_stage(jnp.fft.fft(h) * w["c"])
        a, b = h[:2], jnp.conj(h[2:])
        crossed = jnp.real(a) * jnp.imag(b) - jnp.imag(a) * jnp.abs(b)
        return jnp.sum(jnp.real(h * jnp.conj(h))) + jnp.sum(crossed)

    re, im, c, d = weights(4)
    w = {"re": re, "im": im, "c": jax.lax.complex(c, d)}
    grad = grads(loss)

    def step(w, x):
        value, g = grad(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * jnp.conj(g), w, g), value

    return placed(step, w, *batch())


def whole_numbers():
    """Integers, bits and booleans: counts, sorts, look-ups, comparisons."""

    def fun(w, x, tokens, keep):
        h = w["table"][tokens] + x.at[tokens % WIDTH].add(1.0) * jnp.take(
            x, tokens - 1, axis=0, mode="fill", fill_value=5.0
        )
        h = jaxpp.pipeline_enter_stage(jnp.where(keep[:, None], h, -1.0))
        order = jnp.argsort(h[:, 0])
        best = jnp.argmax(h, -1)
        hash_of = (tokens * 1103515245 + 12345) ^ (tokens << 3) & 0xFFFF
        small = (tokens.astype(jnp.uint8) - jnp.uint8(3)).astype(jnp.int32)
        counts = jnp.cumsum(keep.astype(jnp.int32) * tokens)
        odd = (tokens % 2 == 1) & keep | (best > 1)
        ranks = jnp.sort(jnp.stack([h[:, 1], h[:, 2]]), axis=0)
        return {
            "count": jnp.sum(odd, dtype=jnp.int32) * 1001,
            "float": (counts[-1] * 77).astype(jnp.float32),
            "order": order,
            "hash": jnp.max(hash_of) + jnp.sum(small // 2),
            "any": jnp.any(odd) ^ jnp.all(keep),
            "sorted": ranks,
            "mean": jnp.mean(h @ w["out"]),
        }

    reduce = dict.fromkeys(["count", "float", "hash"], "sum")
    reduce |= {"order": "concat", "any": "last", "sorted": "stack", "mean": "mean"}
    loop = outputs(fun, reduce, in_axes=(None, 0, 0, 0))
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, 7, ROWS), jnp.int32)
    keep = jnp.asarray(rng.random(ROWS) < 0.7)
    (table,), (out,) = arrays((7, WIDTH)), weights(1)

    def step(w, x, tokens, keep):
        made = loop(w, x, tokens, keep)
        return made, made["count"] % 7 == jnp.max(tokens), jnp.bitwise_not(keep)

    return placed(step, {"table": table, "out": out}, *batch(), tokens, keep)


def _twice(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0 + jnp.sin(y_ref[...])


def _sums(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.maximum(x_ref[...], 0.25)


def kernels():
    """Pallas kernels, of which one adds up blocks."""
    # JAX 0.12 has a further setting from the first kernel on: a step lowered before has another.
    plain = pl.pallas_call(
        _twice, out_shape=jax.ShapeDtypeStruct((1,), jnp.float32), interpret=True
    )
    jax.jit(plain).lower(jnp.ones(1), jnp.ones(1))

    def fun(w, x):
        shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        h = x @ w[0]
        h = pl.pallas_call(_twice, out_shape=shape, interpret=True, name="twice")(h, x)
        h = jaxpp.pipeline_enter_stage(h)
        total = pl.pallas_call(
            _sums,
            grid=(2,),
            in_specs=[pl.BlockSpec((2, WIDTH), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((2, WIDTH), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((2, WIDTH), jnp.float32),
            interpret=True,
            name="sums",
        )(h @ w[1])
        return jnp.mean(total**2), h

    loop = outputs(fun, ("mean", "concat"))
    return placed(lambda w, x: loop(w, x), weights(2), *batch())


#: What callbacks have seen, in order: of those that are ordered, and of the others.
SEEN: dict[str, list[Any]] = {"ordered": [], "unordered": []}


def _see(kind, name, *values):
    SEEN[kind].append((name, *map(np.array, values)))


def _see_and_give(kind, name, value):
    _see(kind, name, value)
    return np.asarray(value) * np.float32(0.5)


def _time():
    """How often it has been called in a run."""
    SEEN["ordered"].append(("time",))
    return np.float32(SEEN["ordered"].count(("time",)))


def callbacks():
    """Prints and callbacks, ordered and not: in stages, branches and loops, and around them."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def fun(w, x):
        h = jnp.tanh(x @ w[0])
        jax.debug.print("positive {}", jnp.sum(h > 0))
        h = jaxpp.pipeline_enter_stage(h)
        low, high = h[0, 0], h[1, 1]
        jax.lax.cond(
            low > high,
            lambda a: jax.debug.callback(functools.partial(_see, "unordered", "first"), a),
            lambda a: jax.debug.callback(functools.partial(_see, "unordered", "other"), a + 1),
            low,
        )

        def body(i):
            jax.debug.callback(functools.partial(_see, "unordered", "loop"), i, high)
            return i + 1

        jax.lax.while_loop(lambda i: i < 3, body, jnp.int32(0))

        def one(c, row):
            jax.debug.callback(functools.partial(_see, "unordered", "scan"), jnp.sum(row))
            return c + jnp.sin(row), c

        c, _ = jax.lax.scan(one, h[0], h @ w[1])
        half = io_callback(functools.partial(_see_and_give, "unordered", "half"), scalar, c[0])
        return jnp.mean(h @ w[1]) + half * jnp.sum(c)

    loop = outputs(fun, "mean")

    def step(w, x):
        see = functools.partial(_see, "ordered")
        io_callback(functools.partial(see, "before"), None, x[0, 0], ordered=True)
        value = loop(w, x)
        io_callback(functools.partial(see, "after"), None, value, ordered=True)
        jax.debug.callback(functools.partial(see, "last"), jnp.sum(x), ordered=True)
        give = functools.partial(_see_and_give, "ordered", "given")
        given = io_callback(give, scalar, value + 1, ordered=True)
        return value, given

    return placed(step, weights(2), *batch())


def control_flow():
    """Branches, a switch, loops that end when something is small, and an update in a branch."""

    def loss(w, flag, x):
        h = jnp.tanh(x @ w[0])
        h = jax.lax.cond(flag > 0.5, lambda h: jnp.sin(h), lambda h: h * 0.5, h)
        h = jaxpp.pipeline_enter_stage(h)
        kinds = [lambda h: h, lambda h: h.T, lambda h: -h]
        h = jax.lax.switch(jnp.sum(x > 0).astype(jnp.int32) % 4, kinds, h)

        def one(carry, row):
            own, count = carry
            own = jnp.where(row > 0, own + row, own * row)
            return (own, count + jnp.int32(row[0] > 0)), own - row

        (last, count), rows = jax.lax.scan(one, (h[0], jnp.int32(0)), h @ w[1], reverse=True)
        return jnp.mean(rows**2) + jnp.sum(last) * count.astype(jnp.float32)

    grad = grads(loss, in_axes=(None, None, 0))

    def step(w, flag, steps, x):
        value, g = grad(w, flag, x)

        def shrink(state):
            d, n = state
            return d * 0.5, n + 1

        d, n = jax.lax.while_loop(
            lambda s: (jnp.sum(s[0] ** 2) > 0.01) & (s[1] < 8), shrink, (g[0], jnp.int32(0))
        )
        fine = jnp.isfinite(value) & (steps % 2 == 0)
        new = jax.lax.cond(fine, lambda: [w[0] - d, w[1] - 0.1 * g[1]], lambda: list(w))
        total = jax.lax.fori_loop(0, 3, lambda i, t: t * 1.5 + i, jnp.float32(0))
        return new, steps + 1, n, value + total

    return placed(step, weights(2), jnp.float32(1), jnp.int32(4), *batch())


def recurrences():
    """Loops that are too long to be unrolled: of several carries, in one another, with effects."""
    see = functools.partial(_see, "unordered")

    def one(carry, row):
        a, b, c, n = carry
        a, b = jnp.sin(b * row[0]), a + row
        c = jax.lax.cond(n % 3 == 0, lambda c: c * 0.5, lambda c: c + a, c)
        return (a, b, c, n + 2), (a - b, n)

    def loss(w, x):
        h = jnp.tanh(x @ w[0])
        rows = jnp.tile(h, (3, 1))
        start = h[0], h[1], jnp.zeros(WIDTH), jnp.int32(1)
        (a, b, c, n), (ys, counts) = jax.lax.scan(one, start, rows)
        h = jaxpp.pipeline_enter_stage(h + a * b - c)

        def outer(c, own):
            d, _ = jax.lax.scan(lambda d, _: (d * own + w[1][0], None), c, None, length=9)
            return jnp.tanh(d), d[0]

        d, firsts = jax.lax.scan(outer, c, jnp.tile(ys, (1, 1)), reverse=True)
        h = (h + d) @ w[1]
        return jnp.mean(h**2) + jnp.sum(firsts) * n.astype(jnp.float32) + counts[3]

    grad = grads(loss)

    def step(w, m, x):
        value, g = grad(w, x)

        def newton(state):
            y, t, k = state
            jax.debug.callback(functools.partial(see, "newton"), k)
            return jnp.tanh(y * (1.5 - 0.5 * t * y * y)), t * 0.99, k + 1

        y, t, k = jax.lax.while_loop(lambda s: s[2] < 10, newton, (m[0], value, jnp.int32(0)))

        def noted(c, row):
            jax.debug.callback(functools.partial(see, "row"), row[0])
            io_callback(functools.partial(_see, "ordered", "before"), None, c[0], ordered=True)
            time = io_callback(_time, jax.ShapeDtypeStruct((), jnp.float32), ordered=True)
            return c * 0.9 + row, (c, time)

        c, (before, times) = jax.lax.scan(noted, m[1], jnp.tile(g[0], (3, 1)))
        total = jax.lax.fori_loop(0, 20, lambda i, s: s + i * t, jnp.float32(0))
        bits = jax.lax.fori_loop(0, 9, lambda i, s: (s << 1) ^ i, k)
        w = [own - 0.1 * d for own, d in zip(w, g, strict=True)]
        return w, [y, c], value + total, before, bits, times[3], times[7:9]

    return placed(step, weights(2), list(arrays((WIDTH,), (WIDTH,))), *batch())


@jax.custom_vjp
def _rounded(x):
    return jnp.round(x * 4) / 4


_rounded.defvjp(lambda x: (_rounded(x), x), lambda x, ct: (jnp.where(jnp.abs(x) < 1, ct, 0),))


@jax.custom_jvp
def _soft(x, y):
    return jnp.log1p(jnp.exp(x)) - y


_soft.defjvp(lambda xs, ts: (_soft(*xs), jax.nn.sigmoid(xs[0]) * ts[0] - ts[1]))


def derivative_rules():
    """Functions with derivative rules, calls, names and checkpoints."""

    @jax.jit
    def layer(h, w):
        return checkpoint_name(_soft(_rounded(h @ w), h), "kept")

    def loss(w, x, y):
        h = jaxpp.pipeline_enter_stage(jax.checkpoint(layer)(x, w[0]))
        logits = layer(h, w[1])
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jax.nn.softmax(y) * logits, -1))

    grad = grads(loss, schedules.Recompute(schedules.OneFOneB()), in_axes=(None, 0, 0))

    def step(w, x, y):
        value, g = grad(w, x, y)
        return [own - 0.1 * d for own, d in zip(w, g, strict=True)], value

    return placed(step, weights(2), *batch(2))


def random_keys():
    """Dropout by keys that are sliced, split and folded, and noise of a constant key."""

    def loss(w, x, keys):
        one, other = jax.random.split(keys[0])
        h = jnp.tanh(x @ w[0])
        h = jnp.where(jax.random.bernoulli(one, 0.5, h.shape), h / 0.5, 0)
        h = jaxpp.pipeline_enter_stage(h)
        h = h @ w[1] + jax.random.uniform(jax.random.fold_in(other, 3), h.shape)
        h = h * jax.random.gamma(one, 2.0, (WIDTH,))
        order = jax.random.randint(other, (WIDTH,), 0, WIDTH)
        return jnp.mean(h[order] ** 2), jax.random.bits(one, (WIDTH,), jnp.uint32)

    grad = grads(loss, has_aux=True, in_axes=(None, 0, 0), reduce=(("mean", "concat"), "mean"))

    def step(w, x, key):
        key, own = jax.random.split(key)
        (value, bits), g = grad(w, x, jax.random.split(own, SLICES))
        return [a - 0.1 * d for a, d in zip(w, g, strict=True)], value, bits, key

    return placed(step, weights(2), *batch(), jax.random.key(3))


def offloaded():
    """Activations that go to the host and come back, and a state that stays there."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean(jnp.sin(jnp.tanh(h @ w[1]) @ w[2]) ** 2)

    grad = grads(loss, schedules.Offload("1f1b"))

    def step(w, m, x):
        value, g = grad(w, x)
        m = [jax.device_put(own, jax.memory.Space.Device) for own in m]
        m = [0.9 * own + d for own, d in zip(m, g, strict=True)]
        w = [own - 0.1 * d for own, d in zip(w, m, strict=True)]
        return w, [jax.device_put(own, jax.memory.Space.Host) for own in m], value

    return placed(step, weights(3), weights(3), *batch())


def replicas(zero=None):
    """Replicas of the pipeline, each with a part of the batch; ZeRO if it is asked for."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        made = h @ w[1]
        return jnp.mean(made**2), (jnp.max(made), jnp.sum(made > 0))

    grad = grads(loss, has_aux=True, replicas=2, reduce=(("mean", ("max", "sum")), "mean"))

    def step(w, m, x):
        (value, (most, count)), g = grad(w, x)
        norm = jnp.sqrt(sum(jnp.sum(own * own) for own in g))
        m = [0.9 * own + d / jnp.maximum(norm, 1) for own, d in zip(m, g, strict=True)]
        return [a - 0.1 * d for a, d in zip(w, m, strict=True)], m, value, most, count

    options: dict[str, Any] = {} if zero is None else {zero: "data"}
    args = weights(2), weights(2), *arrays((2 * ROWS, WIDTH))
    return placed(
        step, *args, mesh=inside_mesh("data"), in_specs=(None, None, P("data")), **options
    )


def gathered():
    """A weight that is split over devices, and made whole in a `shard_map`."""

    def whole(w):
        return jax.shard_map(
            lambda w: jax.lax.all_gather(w * 2, "model", tiled=True) + 1,
            in_specs=P("model"), out_specs=P(), axis_names={"model"}, check_vma=False,
        )(w)  # fmt: skip

    def fun(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ whole(w["a"])))
        return jnp.mean((h @ w["b"]) ** 2)

    loop = outputs(fun, "mean")
    a, b = weights(2)
    specs = {"a": P("model"), "b": P()}, P()
    return placed(
        lambda w, x: loop(w, x), {"a": a, "b": b}, *batch(), mesh=inside_mesh("model"),
        in_specs=specs,
    )  # fmt: skip


def ring():
    """Shards that are passed on in a ring, after the loop."""

    def passed_on(x):
        def one(a):
            return jax.lax.ppermute(a, "ring", [(i, (i + 1) % 4) for i in range(4)]) - jnp.sin(a)

        return jax.shard_map(one, in_specs=P("ring"), out_specs=P("ring"))(x)

    def loss(w, x):
        return jnp.mean((jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    grad = grads(loss)

    def step(w, x):
        value, g = grad(w, x)
        return passed_on(g[0]) @ w[0], value

    mesh = jaxpp.MpmdMesh((2, 4), ("mpmd", "ring"), devices=jax.devices()[:8])
    return placed(step, weights(2), *batch(), mesh=mesh)


def exchanged(check_vma=True):
    """All collectives, in stages of a loop and in loops of their own."""

    def mixed(x):
        def one(a):
            number = jax.lax.axis_index("model").astype(jnp.float32)
            total = jax.lax.psum(jnp.sin(a) * (number + 1), "model")
            most = jax.lax.pmax(jax.lax.stop_gradient(a), "model")
            turned = jax.lax.ppermute(a, "model", [(0, 1), (1, 0)])
            other = jax.lax.all_to_all(a, "model", split_axis=1, concat_axis=0, tiled=True)
            other = jax.lax.all_to_all(other * number, "model", 0, 1, tiled=True)
            part = jax.lax.psum_scatter(jnp.cos(a), "model", scatter_dimension=1, tiled=True)
            every = jax.lax.all_gather(part, "model", axis=1, tiled=True)
            return total * turned + other - most + every

        split = P("model")
        return jax.shard_map(one, in_specs=split, out_specs=split, check_vma=check_vma)(x)

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(mixed(jnp.tanh(x @ w[0])))
        return jnp.mean((h @ w[1]) ** 2)

    loop = outputs(loss, "mean")
    return placed(lambda w, x: loop(w, x), weights(2), *batch(), mesh=inside_mesh("model"))


def moved_elements():
    """Operations that move elements, or add up those in windows, of which some rows are taken."""

    def fun(w, x, y, at):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        both = jnp.concatenate([h, y])
        image = both.reshape(1, 1, 8, WIDTH)
        window = (1, 1, 2, 2)
        pooled = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, window, window, "VALID")
        kernel = w[1][:2, :2].reshape(1, 1, 2, 2)
        sums = jax.lax.reduce_window(both, 0.0, jax.lax.add, (3, 2), (1, 1), "SAME")
        padded = jax.lax.pad(both, 0.5, [(1, -2, 1), (0, 1, 0)])
        spread = jnp.zeros((8, WIDTH)).at[at % 8].add(h)
        written = both.at[at % 8].set(h, mode="drop").at[0].multiply(2.0)
        start = jnp.argmax(h[0]) % 3
        updated = jax.lax.dynamic_update_slice(both, h[:2], (start, 0))
        taken = jax.lax.dynamic_slice(both, (start, start % 2), (WIDTH, 2))
        pool = jax.grad(lambda a: jnp.sum(jnp.sin(jax.lax.reduce_window(
            a, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "VALID"))))(both)  # fmt: skip
        return {
            "strides": both[::2, :2] + both[1::2, 2:] * h[:, ::2],
            "pooled": pooled.reshape(-1),
            "convolved": jax.lax.conv(image, kernel, (1, 1), "SAME").reshape(8, -1)[2:4],
            "sums": sums[1:3],
            "padded": padded[::3],
            "spread": jnp.cumsum(spread, 0, )[2:5],
            "written": jnp.flip(written, 1)[1:7] - jnp.roll(updated, 1, 0)[1:7],
            "taken": taken.T @ jnp.tril(h),
            "split": jnp.split(both, 4)[1] * jnp.stack([h[0], h[1]], 1).T[:, ::-1],
            "pool": pool[:3],
            "fft": jnp.abs(jnp.fft.rfft(both, axis=0))[1:3] + jnp.abs(jnp.fft.ifft(h))[:2, :1],
            "repeated": jnp.repeat(h, 2, axis=0)[1:4] + jnp.tile(h, (1, 2))[:3, ::2],
        }  # fmt: skip

    loop = outputs(fun, "stack", in_axes=(None, 0, 0, 0))
    at = jnp.asarray([3, 1, 1, 9, 0, -1, 7, 2], jnp.int32)
    return placed(lambda *args: loop(*args), weights(2), *batch(2), at)


def solved():
    """Sorts and decompositions, of stacks and of which some rows are taken."""

    def fun(w, x, y, keys):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        both = jnp.concatenate([h, y])
        stack = jnp.stack([h @ h.T + jnp.eye(WIDTH), y @ y.T + 2 * jnp.eye(WIDTH)])
        lower = jnp.linalg.cholesky(stack)
        one = (both > 0).astype(jnp.int32)
        sorted_by, others = jax.lax.sort([one[:, 0], both[:, 1]], num_keys=1, is_stable=True)
        values, places = jax.lax.top_k(both, 2)
        return {
            "lower": lower[0] @ h,
            "solved": jax.scipy.linalg.solve_triangular(lower, stack, lower=True)[1],
            "inverse": jnp.linalg.inv(stack)[0],
            "qr": jnp.linalg.qr(stack)[0][1],
            "sorted": jnp.sort(both, 0)[:3] + jnp.sort(both, 1)[:3],
            "by": others[1:3] * sorted_by[1:3].astype(jnp.float32),
            "best": values[1:5] + places[2:6].astype(jnp.float32),
            "top": jax.lax.top_k(both, 8, axis=0)[0][:WIDTH],
            "running": jax.lax.cummax(both, 0)[2:4]
            + jax.lax.cumprod(both, 1)[:2]
            + jax.lax.cumlogsumexp(both, 1, reverse=True)[3:5],
            "least": jnp.argmin(both, 0) - jnp.argmax(both, 1)[4:],
            "bits": jax.vmap(lambda k: jax.random.bits(k, (3,)))(keys)[1:3],
            "bit": jax.vmap(jax.random.bits)(keys)[2:],
            "median": jnp.median(h, axis=1) + jnp.cumsum(one, 1)[:WIDTH, -1],
        }

    loop = outputs(fun, "stack", in_axes=(None, 0, 0, 0))
    keys = jax.random.split(jax.random.key(5, impl="rbg"), ROWS)
    return placed(lambda *args: loop(*args), weights(1), *batch(2), keys)


def optimized():
    """Adam with a count of steps, gelu, a layer norm and a clipped logit."""

    def loss(w, x):
        h = x @ w[0]
        h = (h - jnp.mean(h, -1, keepdims=True)) * jax.lax.rsqrt(
            jnp.var(h, -1, keepdims=True) + 1e-5
        )
        h = jaxpp.pipeline_enter_stage(jax.nn.gelu(h))
        logits = jnp.clip(h @ w[1], -2.0, 2.0)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    grad = grads(loss)

    def step(w, m, v, count, x):
        value, g = grad(w, x)
        count = count + 1
        m = [0.9 * a + 0.1 * d for a, d in zip(m, g, strict=True)]
        v = [0.99 * a + 0.01 * d**2 for a, d in zip(v, g, strict=True)]
        t = count.astype(jnp.float32)
        fixed = [(a / (1 - 0.9**t), b / (1 - 0.99**t)) for a, b in zip(m, v, strict=True)]
        w = [
            a - 0.01 * (b / (jnp.sqrt(c) + 1e-8) + 0.1 * a)
            for a, (b, c) in zip(w, fixed, strict=True)
        ]
        return w, m, v, count, value

    v = [own**2 for own in weights(2)]
    return placed(step, weights(2), weights(2), v, jnp.int32(2), *batch())


#: The steps, by name.
CASES: dict[str, Callable[[], tuple[Any, tuple]]] = {
    "trained": trained,
    "stacked": stacked,
    "half precision": half_precision,
    "narrow weights": narrow_weights,
    "complex numbers": complex_numbers,
    "whole numbers": whole_numbers,
    "kernels": kernels,
    "callbacks": callbacks,
    "control flow": control_flow,
    "moved elements": moved_elements,
    "solved": solved,
    "recurrences": recurrences,
    "derivative rules": derivative_rules,
    "random keys": random_keys,
    "offloaded": offloaded,
    "optimized": optimized,
    "replicas": replicas,
    "zero1": lambda: replicas("zero1"),
    "gathered": gathered,
    "ring": ring,
    "exchanged": exchanged,
    "exchanged, unchecked": lambda: exchanged(False),
}
