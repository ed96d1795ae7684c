"""The split of a backward: I makes what other stages wait for, W the rest, together the whole."""

import itertools

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.schedules import Kind, OneFOneB, ZeroBubbleH1
from jaxpp.transforms.tasks import _loop, _split_backward

WIDTH = 4
X = jax.random.normal(jax.random.key(1), (6, WIDTH))


# ---- equations ----------------------------------------------------------------------------------


def halves(fun, wanted, *args):
    """The two halves of a function's equations, and its jaxpr; `wanted` are numbers of outputs."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert not jaxpr.consts
    outs = jaxpr.jaxpr.outvars
    first, second = _split_backward.split_backward(jaxpr.eqns, [outs[i] for i in wanted])
    return first, second, jaxpr


def run_halves(first, second, jaxpr, args):
    """What both halves make, one after the other."""
    values = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    read = set(jaxprs.variables([*jaxpr.jaxpr.outvars, *(v for e in second for v in e.invars)]))
    for eqns in (first, second):
        part = jaxprs.part(eqns, [v for e in eqns for v in e.outvars if v in read])
        results = jaxprs.run(part.jaxpr, *(values[v] for v in part.inputs))
        values.update(zip(part.outputs, results, strict=True))
    return [values[v] for v in jaxpr.jaxpr.outvars]


def count(eqns, name: str) -> int:
    """How many equations of a primitive there are, also inside of others."""
    found = sum(e.primitive.name == name for e in eqns)
    return found + sum(count(sub.eqns, name) for e in eqns for sub in jaxprs.sub_jaxprs(e))


def two_carries(c, xs):
    def step(carry, x):
        a, b, n = carry
        a = jnp.tanh(a * x + c)
        b = b + jnp.sin(a) * x
        return (a, b, n + 1), (a * n, b - x)

    (a, b, n), (ys, zs) = jax.lax.scan(step, (c, c, 0), xs, reverse=True)
    return a, b, n, ys, zs


def nested(c, xs):
    def inner(carry, x):
        a, b = carry
        a = jnp.tanh(a + x)
        return (a, b + jnp.exp(a)), a * x

    def outer(carry, xs):
        carry, ys = jax.lax.scan(inner, carry, xs)
        return carry, ys.sum(0)

    (a, b), ys = jax.lax.scan(outer, (c, c), xs.reshape(2, -1, *xs.shape[1:]))
    return a, b, ys


def calls(c, xs):
    @jax.jit
    def both(x):
        return jnp.tanh(x) * c, jnp.cos(x)

    @jax.checkpoint
    def again(x):
        return jnp.exp(both(x)[1])

    (a, b) = both(xs)
    return a, b, again(b), a


def counted_loop(c, xs):
    def step(i, carry):
        a, b = carry
        return jnp.tanh(a + c), b + a * i

    return jax.lax.fori_loop(0, 5, step, (c, xs[0]))


@pytest.mark.parametrize(
    ("fun", "wanted"),
    [
        (fun, wanted)
        for fun, size in ((two_carries, 5), (nested, 3), (calls, 4), (counted_loop, 2))
        for number in range(1, size + 1)
        for wanted in itertools.combinations(range(size), number)
        if number < 3 or number == size
    ],
)
def test_the_halves_together_make_all_that_the_whole_makes(fun, wanted):
    args = X[0], X
    first, second, jaxpr = halves(fun, wanted, *args)
    chex.assert_trees_all_close(
        run_halves(first, second, jaxpr, args), list(fun(*args)), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("fun", [two_carries, nested, calls, counted_loop])
@pytest.mark.parametrize("wanted", [(0,), (1,)])
def test_the_first_half_holds_what_the_wanted_need_and_no_more(fun, wanted):
    first, _, jaxpr = halves(fun, wanted, X[0], X)
    outs = [jaxpr.jaxpr.outvars[i] for i in wanted]
    assert all(jaxprs.ancestors(first, outs))
    made = {v for e in first for v in e.outvars}
    assert made >= set(outs)


@pytest.mark.parametrize(
    ("fun", "primitive"), [(two_carries, "sin"), (nested, "exp"), (calls, "exp")]
)
def test_what_only_the_others_need_is_in_the_second_half_alone(fun, primitive):
    first, second, jaxpr = halves(fun, (0,), X[0], X)
    assert count(jaxpr.eqns, primitive) > 0
    assert count(first, primitive) == 0
    assert count(second, primitive) == count(jaxpr.eqns, primitive)


def test_a_scan_that_is_wanted_whole_stays_whole():
    first, second, _ = halves(two_carries, range(5), X[0], X)
    assert count(first, "scan") == 1
    assert not second


# ---- stages -------------------------------------------------------------------------------------


def matrix(i, *shape):
    return jax.random.normal(jax.random.key(i), (*shape, WIDTH, WIDTH)) / 2


@jax.jit
def jitted_layer(w, x):
    return jnp.tanh(x @ w)


def plain(ws, x):
    return jitted_layer(ws[1], jitted_layer(ws[0], x))


def scanned(ws, x):
    return jax.lax.scan(lambda x, w: (jitted_layer(w, x), None), x, ws)[0]


@jax.custom_vjp
def own_rule(w, x):
    return jnp.tanh(x @ w)


def _own_backward(residuals, ct):
    w, x, y = residuals
    ct = ct * (1 - y * y)
    return x.T @ ct, ct @ w.T


own_rule.defvjp(lambda w, x: (own_rule(w, x), (w, x, own_rule(w, x))), _own_backward)


def custom(ws, x):
    return own_rule(ws[1], own_rule(ws[0], x))


def recomputed(ws, x):
    return jax.checkpoint(plain)(ws, x)


def scanned_and_recomputed(ws, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jax.lax.scan(layer, x, ws)[0]


def branching(ws, x):
    return jax.lax.cond(ws[0, 0, 0] > 0, lambda: jnp.tanh(x @ ws[0]), lambda: jnp.sin(x @ ws[1]))


MIDDLES = [plain, scanned, custom, recomputed, scanned_and_recomputed, branching]
WS = {"first": matrix(0), "middle": matrix(1, 2), "last": matrix(2)}


def with_middle(middle):
    """Three stages, the second of which is `middle`."""

    def loss(ws, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws["first"]))
        x = jaxpp.pipeline_enter_stage(middle(ws["middle"], x))
        return jnp.mean((x @ ws["last"]) ** 2)

    return loss


def tasks_of(loss, schedule, ws, policy=None):
    """The jaxprs of the tasks, by kind and stage."""
    return {t.params["key"]: t.params["jaxpr"] for t in loop_of(loss, schedule, ws, policy).tasks}


def loop_of(loss, schedule, ws, policy=None):
    fun = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss, policy=policy)), 3)
    jaxpr = jax.make_jaxpr(jaxpp.schedule(fun, schedule))(ws, X)
    (loop,) = (e for e in jaxpr.eqns if _loop.is_loop(e))
    return _loop.ScheduledLoop.of(loop)


POLICIES = [None, jax.checkpoint_policies.nothing_saveable]


@pytest.mark.parametrize("policy", POLICIES, ids=["keep", "recompute"])
@pytest.mark.parametrize("middle", MIDDLES)
def test_a_split_backward_gives_the_gradient(middle, policy):
    loss = with_middle(middle)
    fun = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss, policy=policy)), 3)
    got = jax.jit(jaxpp.schedule(fun, ZeroBubbleH1()))(WS, X)
    want = jax.jit(jax.value_and_grad(loss))(WS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("middle", MIDDLES)
def test_every_equation_of_i_makes_what_another_stage_reads(middle):
    tasks = {t.params["key"]: t for t in loop_of(with_middle(middle), ZeroBubbleH1(), WS).tasks}
    elsewhere = {v for (_, stage), t in tasks.items() if stage != 1 for v in t.invars}
    first = tasks[Kind.I, 1]
    inside = first.params["jaxpr"]
    outs = zip(first.outvars, inside.jaxpr.outvars, strict=True)
    sent = [v for made, v in outs if made in elsewhere]
    assert sent
    assert all(jaxprs.ancestors(inside.eqns, sent))


@pytest.mark.parametrize("middle", MIDDLES)
def test_weight_gradients_leave_with_w(middle):
    loop = loop_of(with_middle(middle), ZeroBubbleH1(), WS)
    for task in loop.tasks:
        kind, carries = task.params["key"].kind, {*loop.carry_outs}.intersection(task.outvars)
        assert carries == ({*task.outvars} if kind is Kind.W else set()) or kind is Kind.F


@pytest.mark.parametrize("middle", [plain, scanned, custom])
def test_i_has_the_dots_of_the_inputs_and_w_those_of_the_weights(middle):
    whole = tasks_of(with_middle(middle), OneFOneB(), WS)[Kind.B, 1]
    split = tasks_of(with_middle(middle), ZeroBubbleH1(), WS)
    layers = 1 if middle is scanned else 2  # the dots of a scan's body count once
    assert count(whole.jaxpr.eqns, "dot_general") == 2 * layers
    assert count(split[Kind.I, 1].eqns, "dot_general") == layers
    assert count(split[Kind.W, 1].eqns, "dot_general") == layers


@pytest.mark.parametrize("middle", [recomputed, scanned_and_recomputed])
def test_w_reads_what_i_has_recomputed(middle):
    split = tasks_of(with_middle(middle), ZeroBubbleH1(), WS)
    layers = 1 if middle is scanned_and_recomputed else 2
    recomputed_tanh = count(split[Kind.I, 1].eqns, "tanh")
    assert recomputed_tanh >= 1
    assert count(split[Kind.W, 1].eqns, "tanh") == 0
    assert count(split[Kind.W, 1].eqns, "dot_general") == layers


def test_a_scan_over_layers_is_two_scans():
    split = tasks_of(with_middle(scanned), ZeroBubbleH1(), WS)
    assert count(split[Kind.I, 1].eqns, "scan") == 1
    assert count(split[Kind.W, 1].eqns, "scan") == 1


def test_the_first_stage_has_no_i_and_a_stage_without_parameters_no_w():
    ws = {"first": matrix(0), "middle": jnp.zeros(()), "last": matrix(2)}
    tasks = tasks_of(with_middle(lambda _, x: jnp.sin(x)), ZeroBubbleH1(), ws)
    assert (Kind.I, 0) not in tasks
    assert (Kind.W, 0) in tasks
    assert (Kind.I, 1) in tasks
    assert (Kind.W, 1) not in tasks
    assert {(Kind.I, 2), (Kind.W, 2)} <= set(tasks)


def test_a_stage_whose_input_needs_no_gradient_is_all_w():
    def loss(ws, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ jax.lax.stop_gradient(ws["first"])))
        x = jaxpp.pipeline_enter_stage(plain(ws["middle"], x))
        return jnp.mean((x @ ws["last"]) ** 2)

    tasks = tasks_of(loss, ZeroBubbleH1(), WS)
    assert {task for task in tasks if task[0] is not Kind.F} == {
        (Kind.W, 1), (Kind.I, 2), (Kind.W, 2)
    }  # fmt: skip
    # Between its two layers the cotangent is still computed.
    assert count(tasks[Kind.W, 1].eqns, "dot_general") == 3
