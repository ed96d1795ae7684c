"""The operations of which random programs are made: each maps rows of `WIDTH` floats to such rows.

An operation may be left out, or go anywhere, so programs are drawn, and made smaller, line by line.
`number` picks a variant of it and its constants. What it does inside is its own affair: integers,
other shapes, calls, loops, effects.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tests.programs import events

WIDTH = 4
F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a program; `weight` names the parameter that it reads, if it does."""

    name: str
    number: int = 0
    weight: str | None = None
    inner: tuple["Operation", ...] = ()

    @property
    def rule(self) -> "Rule":
        return RULES[self.name]

    def lines(self, indent: str = "") -> list[str]:
        given = ["h"] + ([self.weight] if self.weight else []) + [f"number={self.number}"]
        head = f"{indent}h = {self.name}({', '.join(given)})"
        if not self.inner:
            return [head]
        return [head + ":", *(line for op in self.inner for line in op.lines(indent + "    "))]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the library of operations knows of one of them."""

    run: Callable[..., Any]
    weight: str | None = None  # the kind of the parameter that it reads
    nests: bool = False  # whether it holds other operations
    effect: bool = False
    top: bool = False  # it reads or writes what stages hand on beside the rows


WEIGHTS = {
    "matrix": (WIDTH, WIDTH),
    "vector": (WIDTH,),
    "scalar": (),
    "kernel": (2, 2, 3),
    "stack": (3, WIDTH, WIDTH),
    "table": (5, WIDTH),
}
RULES: dict[str, Rule] = {}


def operation(**facts):
    def register(run):
        RULES[run.__name__.rstrip("_")] = Rule(run, **facts)
        return run

    return register


@dataclasses.dataclass
class Scope:
    """What an operation can see beside its rows."""

    params: dict[str, Any]
    data: dict[str, Any]
    carried: dict[str, Any]  # what stages hand on beside the rows

    def weight(self, op: Operation):
        assert op.weight is not None
        w = self.params[op.weight]
        return w if w.dtype == jnp.bfloat16 else w.astype(F32)

    def key(self, op: Operation):
        return jax.random.fold_in(self.data["keys"][0], op.number)

    def run(self, ops, h):
        for op in ops:
            h = op.rule.run(h, op, self).astype(F32)
        return h

    def inner(self, op: Operation):
        """The operations inside another one as a function of rows."""
        return lambda h: self.run(op.inner, h)


def constant(op: Operation, *shape: int, salt: str = "") -> np.ndarray:
    seed = zlib.crc32(f"{op.name} {op.number} {salt}".encode())
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def choose(op: Operation, *options):
    return options[op.number % len(options)]


def concrete(op: Operation, *shape: int) -> jax.Array:
    """A constant that is an array already, not a traced value."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(constant(op, *shape))


# ---- products -----------------------------------------------------------------------------------


@operation(weight="matrix")
def linear(h, op, scope):
    return jnp.tanh(h @ scope.weight(op).astype(F32))


@operation(weight="matrix")
def linear_transposed(h, op, scope):
    return jnp.sin(h @ scope.weight(op).T)


@operation(weight="matrix")
def frozen_linear(h, op, scope):
    return jnp.tanh(h @ jax.lax.stop_gradient(scope.weight(op)))


@operation(weight="matrix")
def heads(h, op, scope):
    w = scope.weight(op).reshape(2, 2, WIDTH)
    return jnp.tanh(jnp.einsum("bhi,hij->bj", h.reshape(-1, 2, 2), w))


@operation(weight="matrix")
def attention(h, op, scope):
    scores = h @ scope.weight(op).astype(F32) @ h.T
    allowed = jnp.tri(h.shape[0], dtype=bool)
    return jax.nn.softmax(jnp.where(allowed, scores, -1e9)) @ h


@operation(weight="matrix")
def half_precision(h, op, scope):
    half = h.astype(jnp.bfloat16)
    return jnp.tanh((half @ scope.weight(op).astype(jnp.bfloat16)).astype(F32))


@operation(weight="kernel")
def conv(h, op, scope):
    y = jax.lax.conv_general_dilated(
        h.reshape(-1, 2, 2),
        scope.weight(op).astype(F32),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "OIW", "NWC"),
    )
    return jnp.tanh(y.reshape(h.shape))


@operation(weight="matrix")
def solve(h, op, scope):
    w = scope.weight(op).astype(F32)
    return jnp.tanh(jnp.linalg.solve(w @ w.T + 2 * jnp.eye(WIDTH, dtype=F32), h.T).T)


# ---- element by element -------------------------------------------------------------------------

UNARY = (
    jnp.sin, jnp.cos, jnp.tanh, jax.nn.sigmoid, jax.nn.softplus, jax.nn.gelu, jax.nn.relu,
    jax.nn.silu, jnp.abs, jnp.arctan, lambda h: jnp.sqrt(h * h + 1), lambda h: h**3 * 0.1,
    lambda h: jnp.exp(-h * h), lambda h: h / (1 + jnp.abs(h)), jax.scipy.special.erf,
    lambda h: jnp.log1p(h * h), lambda h: jnp.clip(h, -0.5, 0.7), lambda h: jnp.sign(h) + 0.1 * h,
    lambda h: jnp.where(h > 0, h, 0.2 * h), lambda h: -h, lambda h: jax.lax.rsqrt(h * h + 1),
    lambda h: jnp.expm1(0.1 * h), lambda h: jnp.maximum(h, -h), lambda h: h + jnp.floor(h) * 0.1,
    lambda h: jax.lax.reduce_precision(h, 8, 7) * 0.5 + h, lambda h: jnp.arctan2(h, 1 + h * h),
    lambda h: jnp.nan_to_num(h), lambda h: jnp.mod(h, 2.0), lambda h: jnp.exp2(-jnp.abs(h)),
)  # fmt: skip


@operation()
def unary(h, op, scope):
    return choose(op, *UNARY)(h)


@operation(weight="vector")
def scale(h, op, scope):
    return h * scope.weight(op)


@operation(weight="vector")
def bias(h, op, scope):
    return h + scope.weight(op)


@operation(weight="scalar")
def gate(h, op, scope):
    return h * jax.nn.sigmoid(scope.weight(op)) + 0.5 * h


@operation()
def closed_over(h, op, scope):
    return h + choose(op, constant(op, WIDTH), concrete(op, 1, WIDTH), np.float32(0.3))


@operation()
def shared_data(h, op, scope):
    """What is the same for all microbatches, and differs from call to call."""
    return h * choose(op, scope.data["shared"], jax.nn.softmax(scope.data["shared"]))


@operation()
def large_constant(h, op, scope):
    return h + 0.1 * jnp.take(concrete(op, 600, WIDTH), jnp.arange(h.shape[0]) * 7, axis=0)


@operation()
def weak_types(h, op, scope):
    one = jnp.asarray(1.5)  # weak
    return h * 2 + one * choose(op, 1, 0.5, True)


@operation()
def positions(h, op, scope):
    return h + 0.1 * jax.lax.broadcasted_iota(F32, h.shape, op.number % 2)


# ---- reductions, scans, orders ------------------------------------------------------------------


@operation()
def reduction(h, op, scope):
    return choose(
        op,
        lambda: h - h.mean(0),
        lambda: h - h.mean(1, keepdims=True),
        lambda: jax.nn.softmax(h),
        lambda: h - jax.nn.logsumexp(h, axis=0),
        lambda: h / (1 + jnp.abs(h).max()),
        lambda: h + jnp.prod(0.5 * h, axis=1, keepdims=True),
        lambda: h * jnp.mean(h),
        lambda: h / jnp.sqrt(1 + (h * h).sum(1, keepdims=True)),
        lambda: h + (h > 0).sum(0) * 0.1,
        lambda: jnp.where((h > 1).any(1, keepdims=True), h, 0.5 * h),
        lambda: jnp.where((h > -1).all(), h, 2 * h),
        lambda: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1),
        lambda: h + jax.lax.reduce(h, np.float32(0), jax.lax.add, (1,))[:, None] * 0.1,
    )()


@operation()
def window(h, op, scope):
    if op.number % 2:
        return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME")
    return jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 3), (1, 1), "SAME") / 3


@operation()
def cumulative(h, op, scope):
    return choose(
        op,
        lambda: jnp.cumsum(h, 1) * 0.5,
        lambda: jnp.cumsum(h, 0) * 0.5,
        lambda: jax.lax.cummax(h, 1),
        lambda: jax.lax.cumlogsumexp(h, 1),
        lambda: jnp.cumprod(0.7 * h, 1),
        lambda: jax.lax.cumsum(h, 1, reverse=True) * 0.5,
        lambda: jax.lax.associative_scan(jnp.add, h, axis=1) * 0.5,
    )()


@operation()
def order(h, op, scope):
    return choose(
        op,
        lambda: jnp.sort(h, 1),
        lambda: jnp.sort(h, 0),
        lambda: h + jax.nn.one_hot(jnp.argmax(h, 1), WIDTH),
        lambda: jnp.take_along_axis(h, jnp.argsort(h, 1)[:, ::-1], 1),
        lambda: jnp.concatenate([jax.lax.top_k(h, 2)[0], h[:, 2:]], 1),
        lambda: h - jnp.median(h, 1, keepdims=True),
        lambda: h + jnp.argmin(h, 0).astype(F32) * 0.1,
        lambda: jax.lax.sort((h, -h), num_keys=1)[1],
    )()


# ---- indices ------------------------------------------------------------------------------------


@operation(weight="table")
def embedding(h, op, scope):
    return h + scope.weight(op)[scope.data["labels"]]


@operation()
def indexing(h, op, scope):
    rows, labels = h.shape[0], scope.data["labels"] % WIDTH
    return choose(
        op,
        lambda: h[:, np.array([3, 1, 0, 2])],
        lambda: h[::-1],
        lambda: jnp.take_along_axis(h, labels[:, None], 1) + h,
        lambda: h.at[:, 1].set(0.5),
        lambda: h.at[jnp.arange(rows), labels].add(h[:, 0]),
        lambda: h.at[:, np.array([0, 2])].multiply(0.5),
        lambda: h.at[0].max(0.1),
        lambda: jax.ops.segment_sum(h, labels % rows, rows),
        lambda: jax.lax.dynamic_slice_in_dim(jnp.concatenate([h, h], 1), labels[0], WIDTH, 1),
        lambda: jax.lax.dynamic_update_slice(h, h[:1, :2], (0, labels[0] % 3)),
        lambda: h.at[:, 1:3].get() @ constant(op, 2, WIDTH),
        lambda: jnp.select([h > 1, h > 0], [h, h * h], -h),
        lambda: jax.lax.select_n(h > 0, h, 2 * h),
    )()


@operation()
def shapes(h, op, scope):
    c = constant(op, 1, 2)
    return choose(
        op,
        lambda: jnp.concatenate([h[:, 2:], jnp.broadcast_to(c, (h.shape[0], 2))], 1),
        lambda: h + jnp.concatenate([jnp.zeros(2), jnp.ones(2)]),
        lambda: h + jnp.append(np.array([0.1, 0.2], np.float32), jnp.float32([0.3, 0.4])),
        lambda: h + jnp.r_[0.5, 0.25, jnp.zeros(2)],
        lambda: h * jnp.repeat(jnp.float32([0.5, 2]), jnp.array([1, 3]), total_repeat_length=4),
        lambda: jnp.pad(h, ((0, 0), (1, 1)), constant_values=0.3)[:, 2:] @ constant(op, 4, 4),
        lambda: jax.lax.pad(h, 0.5, ((0, 0, 0), (-1, 1, 0))),
        lambda: jax.lax.pad(h, 0.5, ((0, 0, 0), (0, 0, 1)))[:, :WIDTH],
        lambda: jnp.tile(h, (1, 2))[:, 1::2],
        lambda: jnp.roll(h, 1, axis=op.number % 2),
        lambda: h.T.reshape(h.shape),
        lambda: jnp.stack([h, 2 * h]).mean(0),
        lambda: jnp.repeat(h, 2, axis=0)[1::2],
        lambda: jnp.add(*jnp.split(h, 2, axis=1)).repeat(2, axis=1),
        lambda: jnp.squeeze(h[:, None], 1),
    )()


# ---- other types --------------------------------------------------------------------------------


@operation()
def integers(h, op, scope):
    n = (h * 8).astype(jnp.int32)
    m = choose(op, n & 3, n ^ 5, n >> 1, jax.lax.population_count(n), n // 3, n % 5, -n)
    return h + 0.05 * m.astype(F32)


@operation()
def booleans(h, op, scope):
    a, b = h > 0, h < 0.5
    return jnp.where(choose(op, a ^ b, a & b, ~a | b, a == b), h, -0.5 * h)


@operation()
def empty(h, op, scope):
    nothing = h[:, :0] * 2
    return jnp.concatenate([h, nothing], 1) + nothing.sum()


@operation()
def spectrum(h, op, scope):
    return jnp.tanh(jnp.fft.rfft(h, axis=1).real @ constant(op, WIDTH // 2 + 1, WIDTH))


@operation()
def complex_numbers(h, op, scope):
    z = jax.lax.complex(h, 0.5 * h)
    return (z * z.conj()).real * 0.3 + z.imag


# ---- randomness ---------------------------------------------------------------------------------


@operation()
def dropout(h, op, scope):
    return jnp.where(jax.random.bernoulli(scope.key(op), 0.7, h.shape), h, 0.0)


@operation()
def noise(h, op, scope):
    key = scope.key(op)
    return (
        h
        + 0.1
        * choose(
            op,
            lambda: jax.random.normal(key, h.shape),
            lambda: jax.random.uniform(jax.random.split(key, 3)[1], (WIDTH,)),
            lambda: jax.random.permutation(key, jnp.arange(4.0)),
            lambda: jax.random.normal(jax.random.wrap_key_data(jax.random.key_data(key)), h.shape),
            lambda: jax.random.normal(jax.random.key(op.number), h.shape),  # a constant
            lambda: jax.random.randint(jax.random.PRNGKey(3), h.shape, 0, 5).astype(F32),
        )()
    )


# ---- calls --------------------------------------------------------------------------------------


@operation(nests=True)
def jit(h, op, scope):
    return jax.jit(scope.inner(op), inline=bool(op.number % 2))(h)


@operation(nests=True)
def jit_of_weights(h, op, scope):
    return jax.jit(lambda p, h: dataclasses.replace(scope, params=p).run(op.inner, h))(
        scope.params, h
    )


POLICIES = {
    "all": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("kept"),
}


@operation(nests=True)
def checkpoint(h, op, scope):
    policy = list(POLICIES.values())[op.number % len(POLICIES)]
    if has_complex(op.inner):
        policy = None
    return jax.checkpoint(scope.inner(op), policy=policy)(h)


@operation(nests=True)
def scope_(h, op, scope):
    with jax.named_scope(f"scope{op.number % 3}"):
        return scope.run(op.inner, h)


@operation(nests=True)
def twice(h, op, scope):
    """A function that is called twice, as a shared layer is."""
    again = jax.jit(scope.inner(op))
    return again(again(h) + 0.1 * h)


@operation(nests=True)
def cond(h, op, scope):
    taken = choose(op, h.sum() > 0, scope.data["labels"][0] % 2 == 0, jnp.abs(h).max() < 1)
    return jax.lax.cond(taken, scope.inner(op), lambda h: 0.5 * h, h)


@operation(nests=True)
def switch(h, op, scope):
    which = scope.data["labels"][0] % 3
    return jax.lax.switch(which, [scope.inner(op), lambda h: -h, lambda h: h * h * 0.2], h)


@operation(nests=True)
def fori(h, op, scope):
    return jax.lax.fori_loop(0, 2, lambda i, h: scope.run(op.inner, h) + 0.1 * i, h)


@operation(nests=True)
def scan(h, op, scope):
    def step(h, x):
        h = scope.run(op.inner, h + x)
        return h, h.sum()

    h, sums = jax.lax.scan(step, h, constant(op, 2, WIDTH), reverse=bool(op.number % 2))
    return h + 0.1 * sums.mean()


@operation()
def while_(h, op, scope):
    """A loop without a derivative, whose count depends on the data."""
    limit = jax.lax.stop_gradient(jnp.abs(h).max())
    n, _ = jax.lax.while_loop(lambda s: s[1] > 0.2, lambda s: (s[0] + 1, s[1] * 0.6), (0, limit))
    return h * (1 + 0.1 * n)


@operation(weight="stack")
def layers(h, op, scope):
    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, None

    if op.number % 3 == 1:
        layer = jax.checkpoint(layer)
    return jax.lax.scan(layer, h, scope.weight(op).astype(F32), reverse=op.number % 3 == 2)[0]


@operation(weight="stack")
def unrolled_layers(h, op, scope):
    w = scope.weight(op)
    for i in range(w.shape[0]):
        h = jnp.tanh(h @ w[i])
    return h


@operation(nests=True)
def vmap(h, op, scope):
    each = jax.vmap(lambda row: scope.run(op.inner, row[None] * jnp.ones((h.shape[0], 1), F32))[0])
    return each(h)


@operation()
def map_(h, op, scope):
    return jax.lax.map(lambda row: jnp.sin(row) * row.sum(), h)


@operation(nests=True)
def reference(h, op, scope):
    """A mutable array that is made, written and read inside a stage."""
    ref = jax.new_ref(h)
    ref[...] = scope.run(op.inner, ref[...])
    ref[0] = ref[0] * 0.5
    return ref[...]


@operation()
def inner_gradient(h, op, scope):
    """The gradient of a function of its own: the step's is a second derivative."""
    return h + 0.3 * jax.grad(lambda h: jnp.sum(jnp.sin(h) ** 2))(h)


@operation(weight="matrix")
def inner_jvp(h, op, scope):
    return jax.jvp(lambda h: jnp.tanh(h @ scope.weight(op).astype(F32)), (h,), (0.5 * h,))[1]


@operation()
def barrier(h, op, scope):
    return jax.lax.optimization_barrier((h, 2 * h))[op.number % 2]


@operation()
def named(h, op, scope):
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(jnp.sin(h), "kept")


# ---- derivatives of their own -------------------------------------------------------------------


@operation()
def own_jvp(h, op, scope):
    """A derivative that is not the true one, and differs from one number to the next."""
    wrong = 0.3 + 0.2 * op.number

    @jax.custom_jvp
    def f(h):
        return jnp.sin(h)

    f.defjvp(lambda primals, tangents: (f(*primals), wrong * tangents[0]))
    return f(h)


@operation()
def own_jvp_with_array(h, op, scope):
    slope = concrete(op, WIDTH)

    @jax.custom_jvp
    def f(h):
        return jnp.cos(h)

    f.defjvp(lambda primals, tangents: (f(*primals), slope * tangents[0]))
    return f(h)


@operation(weight="matrix")
def own_vjp(h, op, scope):
    wrong = 0.3 + 0.2 * op.number

    @jax.custom_vjp
    def f(w, h):
        return jnp.tanh(h @ w)

    f.defvjp(
        lambda w, h: (f(w, h), (w, h)),
        lambda kept, ct: (wrong * (kept[1].T @ ct), 0.5 * (ct @ kept[0].T)),
    )
    return f(scope.weight(op).astype(F32), h)


@operation()
def own_vjp_with_array(h, op, scope):
    slope = concrete(op, WIDTH)
    f = jax.custom_vjp(lambda h: 2 * h)
    f.defvjp(lambda h: (f(h), None), lambda _, ct: (slope * ct,))
    return f(h) * 0.5


@operation(weight="vector")
def own_vjp_of_weight(h, op, scope):
    """Alike in all but the rule: calls of it must not be taken for one another."""
    f = jax.custom_vjp(lambda w: 2 * w)
    wrong = 1.0 + op.number
    f.defvjp(lambda w: (f(w), None), lambda _, ct: (wrong * ct,))
    return h * f(scope.weight(op).astype(F32))


@operation(nests=True)
def own_vjp_around(h, op, scope):
    """The straight-through estimator around what is inside."""
    f = jax.custom_vjp(lambda h: scope.run(op.inner, h))
    f.defvjp(lambda h: (f(h), None), lambda _, ct: (0.7 * ct,))
    if any(o.weight or o.name in READ_DATA for o in walk(op.inner)):  # it would close over them
        return 0.7 * h
    return f(h)


READ_DATA = (
    "embedding", "indexing", "shared_data", "dropout", "noise", "cond", "switch", "print",
    "jit_of_weights",
)  # fmt: skip


@operation()
def root(h, op, scope):
    """An implicit derivative."""
    solved = jax.lax.custom_root(
        lambda y: y**3 + y - h,
        h,
        lambda f, y0: jax.lax.fori_loop(0, 8, lambda _, y: y - f(y) / (3 * y * y + 1), y0),
        lambda g, b: b / g(jnp.ones_like(b)),
    )
    return solved


def walk(ops):
    """All operations, also those inside others."""
    for op in ops:
        yield op
        yield from walk(op.inner)


def has_complex(ops):
    """Whether there are complex numbers, of which JAX keeps none by a policy."""
    return any(op.name in ("complex_numbers", "spectrum") for op in walk(ops))


# ---- what stages hand on beside the rows --------------------------------------------------------


def _make(kind, make):
    def run(h, op, scope):
        scope.carried[kind] = make(h, op, scope)
        return h

    RULES[f"make_{kind}"] = Rule(run, top=True)


def _use(kind, use):
    def run(h, op, scope):
        return use(h, scope.carried[kind]) if kind in scope.carried else h

    RULES[f"use_{kind}"] = Rule(run, top=True)


_make("skip", lambda h, op, scope: 2 * h)
_use("skip", lambda h, x: h + jnp.sin(x))
_make("integer", lambda h, op, scope: scope.data["labels"] + (h > 0).sum(1))
_use("integer", lambda h, n: h + 0.1 * n[:, None].astype(F32))
_make("mask", lambda h, op, scope: h[:, :1] > 0)
_use("mask", lambda h, m: jnp.where(m, h, 0.3 * h))
_make("half", lambda h, op, scope: h.astype(jnp.bfloat16))
_use("half", lambda h, x: h + 0.5 * x.astype(F32))
_make("nothing", lambda h, op, scope: h[:, :0])
_use("nothing", lambda h, x: jnp.concatenate([x, h], 1))
_make("scalar", lambda h, op, scope: jnp.mean(h * h))
_use("scalar", lambda h, s: h / (1 + s))
_make("key", lambda h, op, scope: jax.random.split(scope.key(op))[1])
_use("key", lambda h, k: h * jax.random.bernoulli(k, 0.8, h.shape))
_make("number", lambda h, op, scope: jnp.asarray(3.0))  # weak, and known before the step runs
_use("number", lambda h, n: h * n * 0.4)
_make("weight", lambda h, op, scope: jnp.tanh(next(iter(scope.params.values()))))
_use("weight", lambda h, w: h + 0.1 * w.astype(F32).mean())


# ---- effects ------------------------------------------------------------------------------------


@operation(effect=True)
def callback(h, op, scope):
    jax.debug.callback(events.recorder(f"callback {op.number}"), jnp.sum(h))
    return h


@operation(effect=True)
def print_(h, op, scope):
    jax.debug.print(f"print {op.number}: {{}}", scope.data["labels"].sum())
    return h


@operation(effect=True)
def callback_in_backward(h, op, scope):
    f = jax.custom_vjp(lambda h: 1.0 * h)

    def backward(_, ct):
        jax.debug.callback(events.recorder(f"backward {op.number}"), jnp.sum(ct))
        return (ct,)

    f.defvjp(lambda h: (f(h), None), backward)
    return f(h)


@operation(effect=True)
def unordered_io(h, op, scope):
    total = jax.lax.stop_gradient(jnp.sum(h))
    io_callback(events.recorder(f"io {op.number}"), None, total)
    return h


@operation(effect=True)
def io_with_result(h, op, scope):
    total = jax.lax.stop_gradient(jnp.sum(h))
    doubled = io_callback(
        events.doubler(f"io result {op.number}"), jax.ShapeDtypeStruct((), F32), total
    )
    return h + 0.01 * doubled


@operation()
def pure_callback(h, op, scope):
    rows = jax.lax.stop_gradient(h)
    return h + 0.1 * jax.pure_callback(
        lambda x: np.sin(np.asarray(x)), jax.ShapeDtypeStruct(h.shape, F32), rows,
        vmap_method="sequential",
    )  # fmt: skip
