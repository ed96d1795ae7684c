"""Programs that are wrong in what devices exchange, in effects or in kernels are refuted."""

import dataclasses
import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import _compat, jaxprs
from jaxpp._program import Free
from tests.certification.attacks import (
    WIDTH,
    X,
    by,
    edited,
    forward,
    grad_of,
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
