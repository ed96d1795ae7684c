"""Edits by laws: of real numbers, some of which numbers of a computer do not obey."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpp import _compat, jaxprs
from tests.certification.inner.places import Change, Place, is_like

#: Functions of a value, and of another one of its type, by the kinds of types for which they are.
LAWS: dict[str, tuple[str, Callable[..., Any]]] = {
    "x + 0*y": ("fci", lambda x, y: x + 0 * y),
    "x + 0*log(y)": ("f", lambda x, y: x + 0 * jnp.log(y)),
    "x * (y/y)": ("fc", lambda x, y: x * (y / y)),
    "x + y - y": ("fci", lambda x, y: x + y - y),
    "x - y + y": ("fci", lambda x, y: x - y + y),
    "x + (y - y)": ("fci", lambda x, y: x + (y - y)),
    "(x*2)/2": ("fc", lambda x, y: (x * 2) / 2),
    "(x/2)*2": ("fc", lambda x, y: (x / 2) * 2),
    "(x*2)//2": ("i", lambda x, y: lax.div(x * 2, jnp.full_like(x, 2))),
    "(x//2)*2": ("i", lambda x, y: lax.div(x, jnp.full_like(x, 2)) * 2),
    "(x*3)/3": ("f", lambda x, y: (x * 3) / 3),
    "-(-x)": ("fci", lambda x, y: lax.neg(-x)),
    "0 - (0 - x)": ("fci", lambda x, y: 0 - (0 - x)),
    "x + 0": ("fci", lambda x, y: lax.add(x, jnp.zeros_like(x))),
    "x - 0": ("fci", lambda x, y: lax.sub(x, jnp.zeros_like(x))),
    "x + -0": ("f", lambda x, y: lax.add(x, jnp.full_like(x, -0.0))),
    "x * 1": ("fci", lambda x, y: lax.mul(x, jnp.ones_like(x))),
    "x * -1 * -1": ("fci", lambda x, y: x * -1 * -1),
    "x / 1": ("fc", lambda x, y: lax.div(x, jnp.ones_like(x))),
    "x // 1": ("i", lambda x, y: lax.div(x, jnp.ones_like(x))),
    "x * y / y": ("fc", lambda x, y: x * y / y),
    "max(x, x)": ("fib", lambda x, y: jnp.maximum(x, x)),
    "max(min(x, y), x)": ("fib", lambda x, y: jnp.maximum(jnp.minimum(x, y), x)),
    "log(exp(x))": ("f", lambda x, y: jnp.log(jnp.exp(x))),
    "exp(log(x))": ("f", lambda x, y: jnp.exp(jnp.log(x))),
    "sqrt(x*x)": ("f", lambda x, y: jnp.sqrt(x * x)),
    "sqrt(x)**2": ("f", lambda x, y: jnp.sqrt(x) ** 2),
    "|x|": ("fi", lambda x, y: jnp.abs(x)),
    "|x| * sign(x)": ("fi", lambda x, y: jnp.abs(x) * jnp.sign(x)),
    "1/(1/x)": ("fc", lambda x, y: 1 / (1 / x)),
    "(x + 1) - 1": ("fci", lambda x, y: (x + 1) - 1),
    "0 for NaN": ("f", lambda x, y: jnp.where(jnp.isnan(x), 0, x)),
    "0 for x != x": ("f", lambda x, y: jnp.where(x == x, x, 0)),
    "0 for infinities": ("f", lambda x, y: jnp.where(jnp.isfinite(x), x, 0)),
    "the number nearest to an infinity": ("f", lambda x, y: jnp.nan_to_num(x, nan=jnp.nan)),
    "0 for zeros": ("f", lambda x, y: jnp.where(x == 0, 0, x)),
    "x if y == y": ("fi", lambda x, y: jnp.where(y == y, x, 0)),
    "x if y >= y": ("fi", lambda x, y: lax.select(y >= y, x, jnp.zeros_like(x))),
    "x if not y > y": ("fi", lambda x, y: lax.select(y > y, jnp.zeros_like(x), x)),
    "x if true": ("fib", lambda x, y: lax.select(jnp.ones(x.shape, bool), x, y)),
    "x if x > y, else x": ("fi", lambda x, y: lax.select(x > y, x, x)),
    "x**1": ("fi", lambda x, y: lax.integer_pow(x, 1)),
    "x + 1e-8*x": ("f", lambda x, y: x + 1e-8 * x),
    "clipped": ("f", lambda x, y: jnp.clip(x, -1e30, 1e30)),
    "clipped at the ends": ("fi", lambda x, y: jnp.clip(x, *_ends(x.dtype))),
    "x ^ y ^ y": ("ib", lambda x, y: x ^ y ^ y),
    "(x << 1) >> 1": ("i", lambda x, y: (x << 1) >> 1),
    "x & x": ("ib", lambda x, y: x & x),
    "x | (y & ~y)": ("ib", lambda x, y: x | (y & ~y)),
    "x & (y | x)": ("ib", lambda x, y: x & (y | x)),
    "x & (y | ~y)": ("ib", lambda x, y: x & (y | ~y)),
    "~~x": ("ib", lambda x, y: ~(~x)),
    "x % 1000": ("i", lambda x, y: x % 1000),
    "re + i im": ("c", lambda x, y: jnp.real(x) + 1j * jnp.imag(x)),
    "conj(conj(x))": ("c", lambda x, y: jnp.conj(jnp.conj(x))),
    "conj(x)": ("c", lambda x, y: jnp.conj(x)),
    "-i (i x)": ("c", lambda x, y: -1j * (1j * x)),
    "x.reshape twice": ("fcib", lambda x, y: x.reshape(-1).reshape(x.shape)),
    "x.T.T": ("fcib", lambda x, y: x.T.T),
    "rev(rev(x))": ("fcib", lambda x, y: lax.rev(lax.rev(x, range(x.ndim)), range(x.ndim))),
    "rev(x)": ("fcib", lambda x, y: lax.rev(x, range(x.ndim))),
    "another last row": ("fc", lambda x, y: x.at[-1:].multiply(1.5) if x.ndim else x * 1.5),
    "another row": ("fc", lambda x, y: x.at[1:2].multiply(1.5) if x.ndim else x * 1.5),
    "rows that change places": ("fcib", lambda x, y: _swapped(x, 1, 2)),
    "rolled": ("fcib", lambda x, y: jnp.roll(x, 1)),
    "sum of a row": ("fci", lambda x, y: jnp.sum(x[None], 0, dtype=x.dtype)),
    "max of a row": ("fib", lambda x, y: jnp.max(x[None], 0)),
    "mean of twins": ("fc", lambda x, y: jnp.mean(jnp.stack([x, x]), 0)),
    "sum with a zero": ("fci", lambda x, y: jnp.stack([x, jnp.zeros_like(x)]).sum(0)),
    "a difference of sums": ("fc", lambda x, y: jnp.stack([x, y]).sum(0) - jnp.stack([y]).sum(0)),
    "a random bit": ("f", lambda x, y: x * (1 + 2**-20 * jnp.sign(x))),
}  # fmt: skip


def _swapped(x, a, b):
    """Two rows of an array change places; with fewer rows they are turned."""
    if not x.ndim or x.shape[0] < 3:
        return lax.rev(x, range(x.ndim))
    order = list(range(x.shape[0]))
    order[a], order[b] = order[b], order[a]
    return jnp.stack([x[i] for i in order])


#: What can be done and undone.
_THERE_AND_BACK: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: lax.rev(x, range(x.ndim)), lambda x: lax.rev(x, range(x.ndim))),
    (lambda x: jnp.flip(x, 0), lambda x: jnp.flip(x, 0)),
    (lambda x: jnp.flip(x, -1), lambda x: jnp.flip(x, -1)),
    (lambda x: x.T, lambda x: x.T),
    (lambda x: _swapped(x, 1, 2), lambda x: _swapped(x, 1, 2)),
    (lambda x: jnp.roll(x, 1, 0), lambda x: jnp.roll(x, -1, 0)),
    (lambda x: -x, lambda x: -x),
    (lambda x: x * 2, lambda x: x / 2),
    (lambda x: x + 1, lambda x: x - 1),
    (lambda x: 1 / x, lambda x: 1 / x),
    (lambda x: jnp.exp(x), lambda x: jnp.log(x)),
    (lambda x: jnp.conj(x), lambda x: jnp.conj(x)),
    (lambda x: ~x, lambda x: ~x),
]


def there_and_back(p: Place) -> Change | None:
    """Operands are changed, and the results back: right if the operation does not mind."""
    if not p.eqn.outvars or p.eqn.effects:
        return None
    there, back = p.rng.choice(_THERE_AND_BACK)
    which = [k for k, v in enumerate(p.eqn.invars) if is_like(v, p.eqn.outvars[0])]
    if not which:
        return None
    which = which if p.rng.random() < 0.5 else [p.rng.choice(which)]

    def run(*args):
        args = [there(x) if k in which else x for k, x in enumerate(args)]
        made = p.bind()(*args)
        first, *others = made if p.eqn.primitive.multiple_results else (made,)
        return [back(first), *others]

    return p.instead(run)


def _ends(dtype):
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return info.min, info.max


def _kind(atom: Any) -> str:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return "f" if dtype is not None else ""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "c"
    return "i" if jnp.issubdtype(dtype, jnp.integer) else "b" if str(dtype) == "bool" else ""


def _law(p: Place, atom: Any) -> tuple[str, Callable[..., Any]] | None:
    if _compat.is_ref(atom) or not (kind := _kind(atom)):
        return None
    return p.rng.choice([(name, fun) for name, (kinds, fun) in LAWS.items() if kind in kinds])


def law_on_an_operand(p: Place) -> Change | None:
    if not p.eqn.invars:
        return None
    k = p.rng.randrange(len(p.eqn.invars))
    atom = p.eqn.invars[k]
    if (law := _law(p, atom)) is None:
        return None
    return p.on_operand(k, law[1], [p.rng.choice(p.like(atom) or [atom])])


def law_on_a_result(p: Place) -> Change | None:
    if not p.eqn.outvars:
        return None
    k = p.rng.randrange(len(p.eqn.outvars))
    result = p.eqn.outvars[k]
    if (law := _law(p, result)) is None:
        return None
    others = [v for v in p.like(result) if v is not result]
    if not others:
        return p.on_result(k, lambda x: law[1](x, x))
    return p.on_result(k, law[1], [p.rng.choice(others)])


#: Other ways to say operations, by their names: of the operands.
_WAYS: dict[str, list[Callable[..., Any]]] = {
    "add": [lambda a, b: a - (-b), lambda a, b: b + a, lambda a, b: -(-a - b)],
    "add_any": [lambda a, b: a + b, lambda a, b: a - (-b)],
    "sub": [lambda a, b: a + (-b), lambda a, b: -(b - a), lambda a, b: a + b * -1],
    "mul": [lambda a, b: b * a, lambda a, b: a / (1 / b), lambda a, b: -a * -b],
    "div": [lambda a, b: a * (1 / b), lambda a, b: -a / -b, lambda a, b: 1 / (b / a)],
    "neg": [lambda a: 0 - a, lambda a: a * -1, lambda a: a / -1, lambda a: -0.0 - a],
    "max": [lambda a, b: jnp.where(a > b, a, b), lambda a, b: jnp.where(b > a, b, a),
            lambda a, b: -lax.min(-a, -b), lambda a, b: lax.max(b, a)],
    "min": [lambda a, b: jnp.where(a < b, a, b), lambda a, b: -lax.max(-a, -b),
            lambda a, b: lax.min(b, a)],
    "abs": [lambda a: lax.max(a, -a), lambda a: jnp.sqrt(a * a), lambda a: a * jnp.sign(a)],
    "square": [lambda a: a * a, lambda a: jnp.abs(a) ** 2],
    "integer_pow": [lambda a: a * a, lambda a: jnp.abs(a) ** 2, lambda a: 1 / a],
    "sqrt": [lambda a: a**0.5, lambda a: a * lax.rsqrt(a)],
    "rsqrt": [lambda a: 1 / jnp.sqrt(a), lambda a: a**-0.5],
    "logistic": [lambda a: 1 / (1 + jnp.exp(-a)), lambda a: 1 - lax.logistic(-a)],
    "tanh": [lambda a: -jnp.tanh(-a), lambda a: 2 * lax.logistic(2 * a) - 1,
             lambda a: jnp.sinh(a) / jnp.cosh(a)],
    "sin": [lambda a: -jnp.sin(-a)],
    "cos": [lambda a: jnp.cos(-a)],
    "log1p": [lambda a: jnp.log(1 + a)],
    "expm1": [lambda a: jnp.exp(a) - 1],
    "exp": [lambda a: 1 / jnp.exp(-a), lambda a: jnp.exp(a / 2) ** 2],
    "log": [lambda a: -jnp.log(1 / a), lambda a: 2 * jnp.log(jnp.sqrt(a))],
    "sign": [lambda a: a / jnp.abs(a), lambda a: (a > 0) * 1.0 - (a < 0) * 1.0],
    "lt": [lambda a, b: ~(a >= b), lambda a, b: b > a, lambda a, b: a - b < 0],
    "le": [lambda a, b: ~(a > b), lambda a, b: (a < b) | (a == b)],
    "gt": [lambda a, b: ~(a <= b), lambda a, b: b < a, lambda a, b: (a >= b) & (a != b)],
    "ge": [lambda a, b: ~(a < b), lambda a, b: -a <= -b],
    "eq": [lambda a, b: ~(a != b), lambda a, b: (a <= b) & (a >= b),
           lambda a, b: ~(a < b) & ~(a > b), lambda a, b: a - b == 0],
    "ne": [lambda a, b: ~(a == b), lambda a, b: (a < b) | (a > b), lambda a, b: a - b != 0],
    "not": [lambda a: a ^ True, lambda a: a == False, lambda a: -1 - a],  # noqa: E712
    "and": [lambda a, b: ~(~a | ~b), lambda a, b: a * b, lambda a, b: lax.min(a, b)],
    "or": [lambda a, b: ~(~a & ~b), lambda a, b: a + b, lambda a, b: lax.max(a, b)],
    "is_finite": [lambda a: jnp.abs(a) < jnp.inf, lambda a: a == a, lambda a: a - a == 0],
    "real": [lambda a: lax.imag(1j * a), lambda a: lax.real(lax.conj(a))],
    "imag": [lambda a: -lax.imag(lax.conj(a)), lambda a: lax.real(-1j * a)],
    "clamp": [lambda a, b, c: lax.min(lax.max(b, a), c), lambda a, b, c: lax.max(lax.min(b, c), a)],
    "select_n": [
        lambda w, a, b: lax.select_n(~w, b, a),
        lambda w, a, b: jnp.where(w, 1, 0).astype(a.dtype) * b
        + jnp.where(w, 0, 1).astype(a.dtype) * a,
        lambda w, a, b: a + w * (b - a),
    ],
    "convert_element_type": [lambda a: jnp.where(a, 1, 0), lambda a: jnp.round(a)],
    "pow": [lambda a, b: jnp.exp(b * jnp.log(a))],
    "rem": [lambda a, b: a - b * lax.div(a, b), lambda a, b: a % b],
    "sort": [lambda a: -lax.sort(-a), lambda a: lax.sort(a)],
    "reduce_precision": [lambda a: a],
}  # fmt: skip


def said_otherwise(p: Place) -> Change | None:
    if p.name not in _WAYS or len(p.eqn.outvars) != 1:
        return None
    way, dtype = p.rng.choice(_WAYS[p.name]), p.eqn.outvars[0].aval.dtype

    def run(*args):
        made = way(*args)
        return made.astype(dtype) if p.name == "convert_element_type" else made

    return p.instead(run)


def reduced_otherwise(p: Place) -> Change | None:
    """A reduction is said in another way, or in another order."""
    if not p.name.startswith("reduce_") or "axes" not in p.eqn.params or len(p.eqn.invars) != 1:
        return None
    axes, dtype = p.eqn.params["axes"], p.eqn.outvars[0].aval.dtype
    ways = {
        "reduce_sum": [
            lambda x: jnp.sum(lax.rev(x, axes), axes, dtype=dtype),
            lambda x: -jnp.sum(-x, axes, dtype=dtype),
            lambda x: jnp.mean(x, axes) * (x.size // max(jnp.sum(x, axes).size, 1)),
            lambda x: jnp.take(lax.cumsum(x, axes[0]), -1, axes[0]),
            lambda x: jnp.sum(x * 2, axes, dtype=dtype) / 2,
        ],
        "reduce_max": [
            lambda x: -jnp.min(-x, axes),
            lambda x: jnp.max(lax.rev(x, axes), axes),
            lambda x: jnp.take(jnp.sort(x, axes[0]), -1, axes[0]),
            lambda x: jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), axes),
        ],
        "reduce_min": [lambda x: -jnp.max(-x, axes), lambda x: jnp.min(lax.rev(x, axes), axes)],
        "reduce_and": [lambda x: ~jnp.any(~x, axes), lambda x: jnp.min(x, axes)],
        "reduce_or": [lambda x: ~jnp.all(~x, axes), lambda x: jnp.max(x, axes)],
    }
    return p.instead(p.rng.choice(ways[p.name])) if p.name in ways else None


def _maker(p: Place, atom: Any) -> Any:
    if jaxprs.is_literal(atom):
        return None
    return next((e for e in p.before if atom in e.outvars), None)


def commute(p: Place) -> Change | None:
    """Two operations that follow one another change places: f(g(x)) is g(f(x))."""
    if len(p.eqn.outvars) != 1 or p.eqn.effects or not p.eqn.invars:
        return None
    maker = _maker(p, p.eqn.invars[0])
    if maker is None or len(maker.outvars) != 1 or maker.effects or not maker.invars:
        return None

    def run(x, *others):
        mine, its = others[: len(p.eqn.invars) - 1], others[len(p.eqn.invars) - 1 :]
        first = p.eqn.primitive.bind(x, *mine, **p.eqn.params)
        (first,) = first if p.eqn.primitive.multiple_results else (first,)
        return maker.primitive.bind(first, *its, **maker.params)

    return p.instead(run, [maker.invars[0], *p.eqn.invars[1:], *maker.invars[1:]])


def distribute(p: Place) -> Change | None:
    """f(a + b) is f(a) + f(b), of any operation."""
    if len(p.eqn.outvars) != 1 or p.eqn.effects or not p.eqn.invars:
        return None
    k = p.rng.randrange(len(p.eqn.invars))
    maker = _maker(p, p.eqn.invars[k])
    if maker is None or maker.primitive.name not in (
        "add", "add_any", "sub", "mul", "max", "min", "select_n", "and", "or", "xor", "neg", "div",
    ):  # fmt: skip
        return None

    def run(*args):
        args, parts = list(args[: len(p.eqn.invars)]), args[len(p.eqn.invars) :]
        made = []
        for part in parts[1:] if maker.primitive.name == "select_n" else parts:
            args[k] = part
            made.append(p.bind()(*args))
        if maker.primitive.name == "select_n":
            made = [parts[0], *made]
        return maker.primitive.bind(*made, **maker.params)

    return p.instead(run, [*p.eqn.invars, *maker.invars])


def collect(p: Place) -> Change | None:
    """f(a) + f(b) is f(a + b), of any operation f."""
    if len(p.eqn.invars) != 2 or len(p.eqn.outvars) != 1:
        return None
    one, other = (_maker(p, v) for v in p.eqn.invars)
    if one is None or other is None or one.primitive is not other.primitive or one.effects:
        return None
    if len(one.outvars) != 1 or len(one.invars) != len(other.invars) or not one.invars:
        return None
    ks = [k for k in range(len(one.invars)) if is_like(one.invars[k], other.invars[k])]
    if not ks:
        return None
    k = p.rng.choice(ks)

    def run(*args):
        mine = list(args[: len(one.invars)])
        mine[k] = p.bind()(mine[k], args[len(one.invars)])
        return one.primitive.bind(*mine, **one.params)

    return p.instead(run, [*one.invars, other.invars[k]])


def regroup(p: Place) -> Change | None:
    """(a + b) + c is a + (b + c), of any operation of two operands."""
    if len(p.eqn.invars) != 2 or len(p.eqn.outvars) != 1 or p.eqn.effects:
        return None
    k = p.rng.randrange(2)
    maker = _maker(p, p.eqn.invars[k])
    if maker is None or maker.primitive is not p.eqn.primitive or len(maker.invars) != 2:
        return None
    a, b, c = *maker.invars, p.eqn.invars[1 - k]
    return p.instead(lambda a, b, c: p.bind()(a, p.bind()(b, c)), [a, b, c])


KINDS = [
    law_on_an_operand,
    law_on_an_operand,
    law_on_a_result,
    law_on_a_result,
    said_otherwise,
    said_otherwise,
    reduced_otherwise,
    commute,
    distribute,
    collect,
    regroup,
    there_and_back,
    there_and_back,
]
