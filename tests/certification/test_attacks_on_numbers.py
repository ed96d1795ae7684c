"""Programs that are wrong in their precision or their arithmetic are refuted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import _compat, jaxprs
from tests.certification.attacks import (
    WIDTH,
    X,
    by,
    edited,
    forward,
    grad_of,
    is_cast,
    loss_of,
    lower,
    named,
    on_operand,
    on_result,
    refuses,
    weights,
    with_params,
)

pytestmark = pytest.mark.more


# ---- precision ----------------------------------------------------------------------------------


def counted():
    def fun(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        ones = jnp.ones(1000) * jnp.sum(h) ** 0
        total, _ = jax.lax.scan(lambda t, v: (t + v, None), jnp.float32(0), ones)
        count = jnp.sum(x > -100, dtype=jnp.int32) * 1001
        wrapped = (jnp.sum(x > 0).astype(jnp.uint8) - jnp.uint8(200)).astype(jnp.int32)
        return total.astype(jnp.bfloat16), count.astype(jnp.float32), wrapped

    return lower(lambda w, x: forward(fun, "last")(w, x), weights(2), X)


def test_a_sum_has_the_precision_of_its_dtype():
    """Of 1000 ones: 1000 in float32, and 256 in bfloat16."""

    def narrow(*args):
        def body(t, v):
            return t + v.astype(jnp.bfloat16), None

        return jax.lax.scan(body, jnp.bfloat16(0), args[-1])[0].astype(jnp.float32)

    lowered = counted()
    refuses(lowered, edited(lowered.bundle, named("scan"), by(narrow)))


def test_a_whole_number_is_rounded_by_a_narrow_float():
    lowered = counted()
    wrong = by(lambda n: n.astype(jnp.bfloat16).astype(jnp.float32))
    refuses(lowered, edited(lowered.bundle, is_cast("int32", "float32"), wrong))


NARROW = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float4_e2m1fn", "float8_e3m4",
    "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16",
]  # fmt: skip


@pytest.mark.parametrize("old", NARROW)
def test_a_cast_that_keeps_each_value_does(old):
    """Of types of up to 16 bits all values go to each other type and back."""
    from jaxpp.certification._terms import keeps_values

    bits = np.arange(2**16, dtype=np.uint16)
    if old == "bool":
        values = np.array([False, True])
    elif jnp.issubdtype(old, jnp.integer):
        values = bits.view(np.int16).astype(old)
    else:
        dtype = jnp.dtype(old)
        values = (bits if dtype.itemsize == 2 else bits[: 2**8].astype(np.uint8)).view(dtype)
    for new in (*NARROW, "float32", "int32", "float64"):
        if keeps_values(old, new):
            back = values.astype(new).astype(old)
            one, other = (x.astype(np.float64) for x in (values, back))
            same = (one == other) & (np.signbit(one) == np.signbit(other))
            assert (same | (np.isnan(one) & np.isnan(other))).all(), new


def test_a_difference_wraps_before_it_is_widened():
    lowered = counted()
    wrong = []
    for computation in lowered.bundle.computations:
        eqns = list(computation.jaxpr.eqns)
        for i, eqn in enumerate(computation.jaxpr.eqns):
            if is_cast("uint8", "int32")(eqn):
                sub = next(e for e in eqns if eqn.invars[0] in e.outvars)

                def widened(*args):
                    return jnp.subtract(*(jnp.asarray(a).astype(jnp.int32) for a in args))

                eqns[i : i + 1] = jaxprs.splice(widened, sub.invars, eqn.outvars)
        jaxpr = _compat.with_equations(computation.jaxpr, eqns)
        wrong.append(dataclasses.replace(computation, jaxpr=jaxpr))
    refuses(lowered, dataclasses.replace(lowered.bundle, computations=tuple(wrong)))


def test_accumulators_are_as_wide_as_they_are_asked_for():
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (weights(2), X))
    lowered = lower(grad_of(loss_of(jnp.tanh), 4), *args)
    results = {v for c in lowered.bundle.computations for v in c.jaxpr.jaxpr.outvars}

    def wanted(eqn):
        return (
            eqn.primitive.name in ("add", "add_any")
            and eqn.outvars[0] in results
            and eqn.outvars[0].aval.dtype == jnp.float32
            and eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
        )

    def narrow(a, b):
        return (a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)).astype(jnp.float32)

    refuses(lowered, edited(lowered.bundle, wanted, by(narrow)))


# ---- numbers that are not real ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: jnp.tanh(y) + 0 * jnp.log(y),
        lambda y: jnp.tanh(y) * (y / y),
        lambda y: jnp.tanh(y) + y - y,
        lambda y: jnp.where(jnp.isnan(jnp.tanh(y)), 0, jnp.tanh(y)),
        lambda y: jnp.exp(jnp.log(jnp.tanh(y))),
    ],
)
def test_what_is_nothing_for_real_numbers_may_be_nan(wrong):
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    refuses(lowered, edited(lowered.bundle, named("tanh"), by(wrong), most=1))


def test_parts_of_complex_numbers_do_not_commute():
    def crossed(h):
        a, b = jax.lax.complex(h[:2], h[2:]), jnp.fft.fft(h[:2])
        return jnp.real(a) * jnp.imag(b)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, crossed))(w, x), weights(2), X)
    swapped = {"real": jax.lax.imag, "imag": jax.lax.real}
    wrong = edited(
        lowered.bundle,
        named(*swapped),
        lambda e: jaxprs.splice(swapped[e.primitive.name], e.invars, e.outvars),
    )
    refuses(lowered, wrong)


@pytest.mark.parametrize("divided", [False, True])
def test_a_complex_number_is_not_itself_times_one(divided):
    """Infinity times one has a part that is NaN."""

    def joined(h):
        z = jax.lax.complex(h, jnp.sin(h))
        return jnp.real(z) * jnp.imag(z)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, joined))(w, x), weights(2), X)
    by_one = jax.lax.div if divided else jax.lax.mul
    wrong = on_result(lambda z: by_one(z, jnp.ones_like(z)))
    refuses(lowered, edited(lowered.bundle, named("complex"), wrong))


def test_a_slice_skips_the_rows_that_it_says():
    def skipping(h):
        return h * jnp.sum(h[::2, :2])

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, skipping))(w, x), weights(2), X)

    def is_one(eqn):
        return eqn.primitive.name == "slice" and eqn.params["strides"] == (2, 1)

    refuses(lowered, edited(lowered.bundle, is_one, with_params(strides=(3, 1))))


def test_a_row_of_the_greatest_depends_on_all_rows():
    def greatest(h):
        both = jnp.concatenate([h, jnp.sin(h)])
        return jax.lax.top_k(both, 2 * WIDTH, axis=0)[0][:WIDTH]

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, greatest))(w, x), weights(2), X)
    wrong = by(lambda a, b: jnp.concatenate([a, 2 * b]))
    refuses(lowered, edited(lowered.bundle, named("concatenate"), wrong))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_bits_of_several_keys_are_not_those_of_each(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)

    def fun(w, x, keys):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        bits = jax.vmap(lambda key: jax.random.bits(key, (WIDTH,)))(keys)
        return h @ w[1], bits[1:2]

    loop = forward(fun, "concat", in_axes=(None, 0, 0))
    lowered = lower(lambda *args: loop(*args), weights(2), X, keys)
    wrong = []
    for computation in lowered.bundle.computations:
        eqns = list(computation.jaxpr.eqns)
        for eqn in computation.jaxpr.eqns:
            if eqn.primitive.name == "random_bits":
                at = next(i for i, e in enumerate(eqns) if eqn.outvars[0] in e.invars)
                bind = functools.partial(eqn.primitive.bind, **eqn.params)
                new = jaxprs.splice(lambda k, bind=bind: bind(k[1:2]), eqn.invars, eqns[at].outvars)
                eqns[at : at + 1] = new
        jaxpr = _compat.with_equations(computation.jaxpr, eqns)
        wrong.append(dataclasses.replace(computation, jaxpr=jaxpr))
    refuses(lowered, dataclasses.replace(lowered.bundle, computations=tuple(wrong)))


def test_a_flag_is_not_equal_to_a_half():
    def halved(h):
        flag = (h[:1, :1] > 0).astype(jnp.float32)[0, 0]
        return jnp.where(flag == 0.0, h, 2 * h)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, halved))(w, x), weights(2), X)
    for number in (0.5, np.nan, np.inf):
        half = on_operand(lambda _, n=number: jnp.float32(n), 1)
        refuses(lowered, edited(lowered.bundle, named("eq"), half))


def test_a_gather_that_fills_in_is_not_linear():
    indices = jnp.array([0, 99])

    def taken(h):
        def take(v):
            return v.at[indices].get(mode="fill", fill_value=5.0)

        return take(h[0]) + take(h[1])

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, taken))(w, x), weights(2), X)
    gathers = [
        e for c in lowered.bundle.computations for e in c.jaxpr.eqns
        if e.primitive.name == "gather"
    ]  # fmt: skip
    a, b = gathers

    def once(eqn):
        total = jaxprs.fresh_var(a.invars[0])
        return [
            *jaxprs.splice(jnp.add, [a.invars[0], b.invars[0]], [total]),
            a.replace(invars=[total, a.invars[1]], outvars=eqn.outvars),
        ]

    def is_sum(eqn):
        made = a.outvars[0], b.outvars[0]
        return eqn.primitive.name == "add" and tuple(eqn.invars) in (made, made[::-1])

    refuses(lowered, edited(lowered.bundle, is_sum, once))


def test_a_sample_depends_on_how_keys_are_split():
    key = jax.random.key(0)

    def noisy(h):
        return h + jax.random.gamma(key, 2.0, h.shape)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, noisy))(w, x), weights(2), X)

    def otherwise(eqn):
        with jax.threefry_partitionable(not eqn.ctx.threefry_partitionable):
            return jaxprs.splice(
                lambda *args: eqn.primitive.bind(*args, **eqn.params), eqn.invars, eqn.outvars
            )

    bundle = lowered.bundle
    computations = tuple(
        dataclasses.replace(c, jaxpr=jaxprs.inline(c.jaxpr, lambda e: True))
        for c in bundle.computations
    )
    opened = dataclasses.replace(bundle, computations=computations)
    refuses(lowered, edited(opened, named("random_gamma"), otherwise))
