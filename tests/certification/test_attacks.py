"""Wrong programs that a proof has once accepted: each is refuted, and the right ones are not."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import _compat, jaxprs, schedules
from jaxpp._program import Bundle, Free, Run
from tests.helpers import mesh_of

pytestmark = pytest.mark.more

WIDTH = 4


def weights(number):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(number)]


X = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)


def loss_of(first, second=lambda h: h):
    """A loss of two stages; `first` and `second` are what they do beside products."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(first(x @ w[0]))
        return jnp.mean(second(h @ w[1]) ** 2)

    return loss


def forward(fun, reduce="mean", **options):
    loop = jaxpp.microbatch(jaxpp.wrap_forward(fun), 2, reduce=reduce, **options)
    return jaxpp.schedule(loop, schedules.ForwardOnly())


def grad_of(loss, microbatches=2):
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    return jaxpp.schedule(jaxpp.microbatch(grad, microbatches), schedules.OneFOneB())


def lower(step, *args, mesh=None, **options):
    return jaxpp.place(step, mesh or mesh_of(2, shared=True), **options).lower(*args)


def refuses(lowered, edited: Bundle):
    """Asserts that the programs are certified, and that the edited ones are refuted."""
    lowered.certify(passes=False)
    assert edited != lowered.bundle
    with pytest.raises(jaxpp.Refuted):
        dataclasses.replace(lowered, bundle=edited).certify(passes=False)


# ---- edits of equations -------------------------------------------------------------------------


def named(*names):
    return lambda eqn: eqn.primitive.name in names


def edited(bundle: Bundle, wanted: Callable, change: Callable, most: int = 100) -> Bundle:
    """Puts `change(eqn)`, which gives equations, in the place of those that are wanted."""
    left, computations = most, []
    for computation in bundle.computations:
        eqns = []
        for eqn in computation.jaxpr.eqns:
            is_one = left > 0 and wanted(eqn)
            left -= is_one
            eqns += change(eqn) if is_one else [eqn]
        jaxpr = _compat.with_equations(computation.jaxpr, eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    assert left < most, "no such equation"
    return dataclasses.replace(bundle, computations=tuple(computations))


def skipped(bundle: Bundle, wanted: Callable) -> Bundle:
    """Puts the operand of equations that are wanted in the place of their results."""
    computations = []
    for computation in bundle.computations:
        inside = computation.jaxpr.jaxpr
        known, eqns = jaxprs.Substitution(), []
        for eqn in map(known.rename, inside.eqns):
            if wanted(eqn):
                known.of.update(zip(eqn.outvars, eqn.invars, strict=True))
            eqns += [] if wanted(eqn) else [known.rename(eqn)]
        eqns = list(map(known.rename, eqns))
        jaxpr = _compat.make_closed_jaxpr(inside.invars, list(map(known, inside.outvars)), eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    return dataclasses.replace(bundle, computations=tuple(computations))


def by(fun: Callable) -> Callable:
    """A change: a function of the operands in place of the equation."""
    return lambda eqn: jaxprs.splice(fun, eqn.invars, eqn.outvars, eqn)


def with_params(**params: Any) -> Callable:
    return lambda eqn: [eqn.replace(params={**eqn.params, **params})]


def on_operand(fun: Callable, k: int = 0) -> Callable:
    """A change: a function of operand `k` in place of that operand."""

    def change(eqn):
        eqns, (new,) = jaxprs.record(fun, [eqn.invars[k]])
        return [*eqns, eqn.replace(invars=[*eqn.invars[:k], new, *eqn.invars[k + 1 :]])]

    return change


def on_result(fun: Callable) -> Callable:
    def change(eqn):
        new = jaxprs.fresh_var(eqn.outvars[0])
        return [
            eqn.replace(outvars=[new, *eqn.outvars[1:]]),
            *jaxprs.splice(fun, [new], eqn.outvars[:1]),
        ]

    return change


def is_cast(old, new):
    def wanted(eqn):
        types = eqn.invars[0].aval.dtype if eqn.invars else None, eqn.outvars[:1]
        return (
            eqn.primitive.name == "convert_element_type"
            and types[0] == old
            and types[1][0].aval.dtype == new
        )

    return wanted


# ---- results ------------------------------------------------------------------------------------


def clipped():
    """Stacked layers, tied ends, and gradients that are clipped by their global norm."""

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x @ w["tied"], w["layers"])
        return jnp.mean((h @ w["tied"].T) ** 2)

    grad = grad_of(jaxpp.split_stages(loss, num_stages=3))

    def step(w, x):
        value, g = grad(w, x)
        norm = jnp.sqrt(sum(jnp.sum(own * own) for own in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / norm, w, g), value

    tied, *layers = weights(7)
    return lower(step, {"tied": tied, "layers": jnp.stack(layers)}, X, mesh=mesh_of(3, shared=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_result_counts_on_each_of_its_ranks(rank):
    """Also where the sums of the first rank are in another order."""
    lowered = clipped()
    bundle = lowered.bundle
    tied = next(n for n, r in enumerate(bundle.results) if r.aval.shape == (WIDTH, WIDTH))
    holders = [p.rank for p in bundle.programs if tied in dict(p.outputs)]
    assert holders == [0, 2]
    program = bundle.programs[rank]
    slot = dict(program.outputs)[tied]
    at = max(
        i for i, own in enumerate(program.instructions)
        if isinstance(own, Run) and slot in own.outputs
    )  # fmt: skip
    run: Any = program.instructions[at]
    old = bundle.computations[run.computation]
    outvars = list(old.jaxpr.jaxpr.outvars)
    k = run.outputs.index(slot)
    new = jaxprs.fresh_var(outvars[k])
    eqns = [*old.jaxpr.eqns, *jaxprs.splice(lambda v: 100.0 - v, [outvars[k]], [new])]
    outvars[k] = new
    jaxpr = _compat.make_closed_jaxpr(old.jaxpr.jaxpr.invars, outvars, eqns)
    instructions = list(program.instructions)
    instructions[at] = dataclasses.replace(run, computation=len(bundle.computations))
    programs = list(bundle.programs)
    programs[rank] = dataclasses.replace(program, instructions=tuple(instructions))
    computations = (*bundle.computations, dataclasses.replace(old, jaxpr=jaxpr))
    wrong = dataclasses.replace(bundle, computations=computations, programs=tuple(programs))
    refuses(lowered, wrong)


def stacked():
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    grad = grad_of(jaxpp.split_stages(loss, num_stages=2))

    def step(w, x):
        value, g = grad(w, x)
        return w - 0.1 * g, value

    return lower(step, jnp.stack(weights(4)), X)


def without(bundle: Bundle, n: int) -> Bundle:
    kept = [k for k in range(len(bundle.results)) if k != n]
    programs = tuple(
        dataclasses.replace(p, outputs=tuple((kept.index(k), s) for k, s in p.outputs if k != n))
        for p in bundle.programs
    )
    results = tuple(bundle.results[k] for k in kept)
    return dataclasses.replace(bundle, results=results, programs=programs)


@pytest.mark.parametrize("which", ["rows", "a whole"])
def test_each_result_is_there(which):
    lowered = stacked()
    results = lowered.bundle.results
    n = {
        "rows": next(n for n, r in enumerate(results) if r.rows and r.rows[0]),
        "a whole": next(n for n, r in enumerate(results) if not r.rows),
    }[which]
    refuses(lowered, without(lowered.bundle, n))


def test_results_have_memory_of_their_own():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, average, x):
        new = [a - 0.1 * d for a, d in zip(w, grad(w, x)[1], strict=True)]
        return new, new  # the average begins anew

    lowered = lower(step, weights(2), weights(2), X, donate_argnums=(0, 1))
    half, programs = len(lowered.bundle.results) // 2, []
    for p in lowered.bundle.programs:
        slots = dict(p.outputs)
        own = ((n, slots.get(n - half, s) if n >= half else s) for n, s in p.outputs)
        programs.append(dataclasses.replace(p, outputs=tuple(own)))
    refuses(lowered, dataclasses.replace(lowered.bundle, programs=tuple(programs)))


# ---- types --------------------------------------------------------------------------------------


def with_weak_type():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, rate, x):
        value, g = grad(w, x)
        return [a - rate * d for a, d in zip(w, g, strict=True)], rate * 0.9

    return lower(step, weights(2), jnp.asarray(0.1), X)


def test_a_record_keeps_the_weak_type_of_a_result():
    lowered = with_weak_type()
    results = tuple(
        dataclasses.replace(r, aval=r.aval.update(weak_type=False)) for r in lowered.bundle.results
    )
    refuses(lowered, dataclasses.replace(lowered.bundle, results=results))


def test_a_computation_keeps_the_weak_type_of_a_result():
    lowered = with_weak_type()
    computations = []
    for computation in lowered.bundle.computations:
        eqns, outvars = list(computation.jaxpr.eqns), list(computation.jaxpr.jaxpr.outvars)
        for k, v in enumerate(outvars):
            if getattr(v.aval, "weak_type", False):
                strong = jex_var(v.aval.update(weak_type=False), v)
                eqns += jaxprs.splice(lambda x: x + jnp.zeros((), x.dtype), [v], [strong])
                outvars[k] = strong
        jaxpr = _compat.make_closed_jaxpr(computation.jaxpr.jaxpr.invars, outvars, eqns)
        computations.append(dataclasses.replace(computation, jaxpr=jaxpr))
    refuses(lowered, dataclasses.replace(lowered.bundle, computations=tuple(computations)))


def jex_var(aval, like):
    return type(like)(aval)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_a_record_keeps_the_dtype_of_a_result(dtype):
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    results = list(lowered.bundle.results)
    aval = results[0].aval.update(dtype=jnp.dtype(dtype))
    results[0] = dataclasses.replace(results[0], aval=aval)
    refuses(lowered, dataclasses.replace(lowered.bundle, results=tuple(results)))


def test_a_record_keeps_the_memory_of_a_result():
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    results = list(lowered.bundle.results)
    aval = results[0].aval.update(memory_space=jax.memory.Space.Host)
    results[0] = dataclasses.replace(results[0], aval=aval)
    refuses(lowered, dataclasses.replace(lowered.bundle, results=tuple(results)))


def test_the_last_cast_of_a_result_counts():
    """Bfloat16 for float32."""
    loop = grad_of(loss_of(jnp.tanh))

    def step(w, x):
        return loop(w, x)[0].astype(jnp.bfloat16).astype(jnp.float32)

    lowered = lower(step, weights(2), X)
    refuses(lowered, skipped(lowered.bundle, is_cast("bfloat16", "float32")))


def test_memory_on_the_host_is_not_that_of_the_device():
    grad = grad_of(loss_of(jnp.tanh))

    def step(w, x):
        value, g = grad(w, x)
        return [jax.device_put(d, jax.memory.Space.Host) for d in g], value

    lowered = lower(step, weights(2), X)
    refuses(lowered, skipped(lowered.bundle, named("device_put")))


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


# ---- devices ------------------------------------------------------------------------------------


def inside_mesh(count):
    devices = jax.devices()[: 2 * count]
    return jaxpp.MpmdMesh((2, count), ("mpmd", "model"), devices=devices)


def test_gathered_shards_are_in_order():
    def whole(w):
        return jax.shard_map(
            lambda w: jax.lax.all_gather(w, "model", tiled=True),
            in_specs=P("model"), out_specs=P(), axis_names={"model"}, check_vma=False,
        )(w)  # fmt: skip

    def fun(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ whole(w[0])))
        return jnp.mean((h @ w[1]) ** 2)

    options = {"mesh": inside_mesh(4), "in_specs": ([P("model"), P()], P())}
    lowered = lower(lambda w, x: forward(fun)(w, x), weights(2), X, **options)
    wrong = on_operand(lambda w: jnp.concatenate([w[:1], w[2:3], w[1:2], w[3:]]))
    refuses(lowered, edited(lowered.bundle, named("shard_map"), wrong))


def shifted(a):
    return jax.lax.ppermute(a, "model", [(i, (i + 1) % 4) for i in range(4)])


def numbered(a):
    return a * (1.0 + jax.lax.axis_index("model"))


def exchanged(a):
    return jax.lax.all_to_all(a, "model", split_axis=1, concat_axis=0, tiled=True).T


def mapped(one):
    """After the loop, a computation on shards."""
    grad, split = grad_of(loss_of(jnp.tanh)), P("model")

    def step(w, x):
        value, g = grad(w, x)
        return jax.shard_map(one, in_specs=split, out_specs=split)(g[0]), value

    return lower(step, weights(2), X, mesh=inside_mesh(4))


@pytest.mark.parametrize("one", [shifted, numbered, exchanged])
def test_shards_do_not_change_places(one):
    """The order of the shards is turned before and after."""
    lowered = mapped(one)
    turned = edited(lowered.bundle, named("shard_map"), on_operand(lambda a: a[::-1]))
    refuses(lowered, edited(turned, named("shard_map"), on_result(lambda a: a[::-1])))


@pytest.mark.parametrize(
    ("one", "name", "params"),
    [
        (shifted, "ppermute", {"perm": tuple(((i + 1) % 4, i) for i in range(4))}),
        (shifted, "ppermute", {"perm": ((0, 1), (1, 0), (2, 3), (3, 2))}),
    ],
)
def test_a_collective_keeps_its_parameters(one, name, params):
    lowered = mapped(one)

    def change(eqn):
        body = jaxprs.opened(eqn.params["jaxpr"])
        eqns = [
            e.replace(params={**e.params, **params}) if e.primitive.name == name else e
            for e in body.eqns
        ]
        new = _compat.with_equations(eqn.params["jaxpr"], eqns)
        return [eqn.replace(params={**eqn.params, "jaxpr": new})]

    refuses(lowered, edited(lowered.bundle, named("shard_map"), change))


# ---- effects and kernels ------------------------------------------------------------------------


def test_an_effect_in_a_loop_happens_as_often():
    def printing(h):
        def body(i):
            jax.debug.print("i={}", i)
            return i + 1

        jax.lax.while_loop(lambda i: i < 5, body, jnp.int32(0))
        return h

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, printing))(w, x), weights(2), X)
    later = on_operand(lambda i: jnp.int32(4))
    refuses(lowered, edited(lowered.bundle, named("while"), later))


def after_the_loop(fun):
    """A step that gives a function of what a loop has summed up, which is on one rank."""
    loop = forward(lambda w, x: jnp.sum(jaxpp.pipeline_enter_stage(x @ w[0]) @ w[1], 0), "sum")
    return lower(lambda w, x: fun(loop(w, x)), weights(2), X)


def with_body(eqn, name, kept):
    """A loop without some equations of its body."""
    body = eqn.params[name]
    eqns = [e for e in body.eqns if kept(e)]
    return eqn.replace(params={**eqn.params, name: _compat.with_equations(body, eqns)})


@pytest.mark.parametrize(("name", "key"), [("scan", "jaxpr"), ("while", "body_jaxpr")])
def test_ordered_effects_of_a_loop_take_turns(name, key):
    """They do not in two loops, one for each."""

    def see(i, what):
        io_callback(what, None, i, ordered=True)

    def body(i):
        see(i, _first)
        see(i, _second)
        return i + 1

    def fun(total):
        if name == "while":
            return total, jax.lax.while_loop(lambda i: i < 12, body, jnp.int32(0))
        rows = jnp.tile(total, 3) * 0.5
        last, _ = jax.lax.scan(lambda i, row: (body(i), None), jnp.int32(0), rows)
        return total, last

    lowered = after_the_loop(fun)

    def apart(eqn):
        one, other = (e for e in eqn.params[key].eqns if e.effects)
        fresh = list(map(jaxprs.fresh_var, eqn.outvars))
        return [
            with_body(eqn, key, lambda e: e is not other).replace(outvars=fresh),
            with_body(eqn, key, lambda e: e is not one),
        ]

    refuses(lowered, edited(lowered.bundle, named(name), apart))


def _first(i):
    return None


def _second(i):
    return None


def test_what_a_callback_gives_depends_on_the_iteration():
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def fun(total):
        def body(c, row):
            return c + row, io_callback(_counted, scalar, jnp.float32(1), ordered=True)

        last, counts = jax.lax.scan(body, jnp.float32(0), jnp.tile(total, 3))
        return last, jax.lax.slice(counts, (3,), (4,))

    lowered = after_the_loop(fun)
    later = with_params(start_indices=(7,), limit_indices=(8,))
    refuses(lowered, edited(lowered.bundle, named("slice"), later))


def test_a_callback_keeps_the_object_that_it_writes_to():
    """Also if both are empty lists when the step is traced."""
    one, other = [], []

    def into(seen):
        return lambda x: seen.append(x)

    def fun(total):
        jax.debug.callback(into(one), total)
        jax.debug.callback(into(other), 2 * total)
        return total

    lowered = after_the_loop(fun)
    eqns = [e for c in lowered.bundle.computations for e in c.jaxpr.eqns if e.effects]
    a, b = (e.params["callback"] for e in eqns)

    def swap(eqn):
        return with_params(callback=b if eqn.params["callback"] is a else a)(eqn)

    refuses(lowered, edited(lowered.bundle, named("debug_callback"), swap))


def _counted(x):
    raise NotImplementedError


def test_an_effect_in_a_long_scan_sees_its_rows():
    def printing(h):
        def body(c, i):
            jax.debug.print("i={}", i)
            return c + i, None

        rows = jnp.arange(2000.0)
        return h + jax.lax.scan(body, jnp.float32(0), rows * h[0, 0] ** 0)[0]

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, printing))(w, x), weights(2), X)
    assert any(
        e.primitive.name == "scan" for c in lowered.bundle.computations for e in c.jaxpr.eqns
    )
    wrong = edited(
        lowered.bundle, named("scan"), lambda e: on_operand(jnp.flip, len(e.invars) - 1)(e)
    )
    refuses(lowered, wrong)


def kernel(factor, x_ref, o_ref):
    o_ref[...] = x_ref[...] * factor


def multiplied(factor, h):
    shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
    body = functools.partial(kernel, factor)
    return pl.pallas_call(body, out_shape=shape, interpret=True, name="times")(h)


def test_a_kernel_is_what_its_body_computes():
    double = functools.partial(multiplied, 2.0)
    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, double))(w, x), weights(2), X)
    triple = by(functools.partial(multiplied, 3.0))
    refuses(lowered, edited(lowered.bundle, named("pallas_call"), triple))


# ---- arguments ----------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """Two arrays that have one key."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("weight"), x) for x in (self.a, self.b)], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_arguments_of_one_path_are_two():
    grad = grad_of(lambda p, x: loss_of(jnp.tanh)([p.a, p.b * 2], x))
    lowered = lower(grad, Pair(*weights(2)), X)
    other = {0: 1, 1: 0}
    programs = tuple(
        dataclasses.replace(p, inputs=tuple((other.get(n, n), s) for n, s in p.inputs))
        for p in lowered.bundle.programs
    )
    refuses(lowered, dataclasses.replace(lowered.bundle, programs=programs))


def test_rows_of_an_argument_are_those_that_its_record_says():
    lowered = stacked()
    arguments = list(lowered.bundle.arguments)
    a, b = [n for n, own in enumerate(arguments) if own.rows]
    first, second = arguments[a].rows, arguments[b].rows
    arguments[a] = dataclasses.replace(arguments[a], rows=second)
    arguments[b] = dataclasses.replace(arguments[b], rows=first)
    refuses(lowered, dataclasses.replace(lowered.bundle, arguments=tuple(arguments)))


# ---- transforms ---------------------------------------------------------------------------------


def test_a_mean_that_is_a_sum_is_not_said_to_be_proven(monkeypatch):
    from jaxpp.transforms.microbatch import _reductions

    mean = dataclasses.replace(_reductions.REDUCTIONS["mean"], finish=lambda total, m: total)
    monkeypatch.setitem(_reductions.REDUCTIONS, "mean", mean)
    lowered = lower(grad_of(loss_of(jnp.tanh)), weights(2), X)
    try:
        certificate = lowered.certify()
    except jaxpp.Refuted:
        return
    assert "microbatch" not in certificate.transforms and certificate.undecided


# ---- found by somebody who knew the promise alone -----------------------------------------------


def test_an_operand_with_a_size_of_one_has_its_elements_along_its_axis():
    def biased(h):
        return jnp.sin(h) + jnp.sin(h[:1])

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, biased))(w, x), weights(2), X)
    turned = by(lambda a, b: jax.lax.add_p.bind(a, jax.lax.reshape(b, (WIDTH, 1))))

    def is_biased(eqn):
        return eqn.primitive.name == "add" and (1, WIDTH) in [v.aval.shape for v in eqn.invars]

    refuses(lowered, edited(lowered.bundle, is_biased, turned))


def test_an_index_is_clamped_to_the_cases_that_there_are():
    """XLA takes the last case for any other index."""

    def choose(h):
        index = h[0, 0].astype(jnp.int32)
        return jax.lax.switch(index, [jnp.sin, jnp.cos, jnp.exp], h)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, choose))(w, x), weights(2), X)
    low, index, _ = range(3)
    del low
    unclamped = by(lambda *operands: operands[index])
    refuses(lowered, edited(lowered.bundle, named("clamp"), unclamped))


def test_an_effect_of_the_test_of_a_loop_is_none_of_its_body():
    def loop(in_test):
        def see(c, is_here):
            if is_here:
                jax.debug.callback(_first, c[0])

        def test(c):
            see(c, in_test)
            return c[0] < 3

        def body(c):
            see(c, not in_test)
            return c[0] + 1, jnp.sin(c[1])

        return lambda h: jax.lax.while_loop(test, body, (0, h))[1]

    of_body, of_test = (
        lower(forward(loss_of(jnp.tanh, loop(k))), weights(2), X) for k in (False, True)
    )
    (other,) = (e for c in of_test.bundle.computations for e in c.jaxpr.eqns if named("while")(e))
    refuses(of_body, edited(of_body.bundle, named("while"), with_params(**other.params)))


def test_effects_of_devices_count_where_there_is_no_rule_for_what_they_compute():
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "d"), devices=jax.devices()[:4])

    def inner(h):
        jax.debug.callback(_first, h[0, 0])
        once = lambda c: (c[0] + 1, jax.lax.psum(c[1], "d") * 0.5)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 3, once, (0, h))[1]

    def mapped(h):
        auto = (jax.sharding.AxisType.Auto,)
        inside = jax.sharding.AbstractMesh((2,), ("d",), axis_types=auto)
        return jax.shard_map(
            inner, mesh=inside, in_specs=P("d"), out_specs=P("d"), check_vma=False
        )(h)

    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh, mapped))(w, x), weights(2), X, mesh=mesh)

    def twice(eqn):
        return [eqn.replace(outvars=list(map(jaxprs.fresh_var, eqn.outvars))), eqn]

    refuses(lowered, edited(lowered.bundle, named("shard_map"), twice))


def test_a_primitive_is_not_known_by_its_name():
    double = jex.Primitive("copy")
    double.def_impl(lambda a: 2 * a)
    double.def_abstract_eval(lambda a: a)
    lowered = lower(lambda w, x: forward(loss_of(jnp.tanh))(w, x), weights(2), X)
    doubled = by(lambda a: double.bind(jnp.tanh(a)))
    refuses(lowered, edited(lowered.bundle, named("tanh"), doubled))


def test_a_result_has_no_memory_of_the_caller():
    lowered = lower(lambda w, x: (forward(loss_of(jnp.tanh))(w, x), w[0]), weights(2), X)
    programs = []
    for program in lowered.bundle.programs:
        of_argument = dict(program.inputs).get(0)
        outputs = tuple(
            (n, of_argument if n == 1 and of_argument is not None else s)
            for n, s in program.outputs
        )
        kept = [
            Free(tuple(s for s in i.slots if s != of_argument)) if isinstance(i, Free) else i
            for i in program.instructions
        ]
        programs.append(dataclasses.replace(program, outputs=outputs, instructions=tuple(kept)))
    refuses(lowered, dataclasses.replace(lowered.bundle, programs=tuple(programs)))
