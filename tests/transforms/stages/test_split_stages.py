"""Cuts by annotation, and which equation belongs to which stage."""

import re
import warnings
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.jaxprs import primitives
from jaxpp.transforms.stages import _stages

enter = jaxpp.pipeline_enter_stage


def data(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def mlp(ws, x, marks=(1, 2)):
    for i, w in enumerate(ws):
        if i in marks:
            x = enter(x)
        x = jnp.tanh(x @ w)
    return (x**2).mean()


WS = data(*[(8, 8)] * 3, seed=1)
X = data((4, 8), seed=2)[0]


def plain_mlp(ws, x):
    return mlp(ws, x, marks=())


# ---- law 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split",
    [
        jaxpp.split_stages(mlp),
        jaxpp.split_stages(mlp, 3),
        jaxpp.split_stages(plain_mlp, 3),
        jaxpp.split_stages(plain_mlp, 1),
    ],
    ids=["marks", "marks-counted", "balanced", "one-stage"],
)
def test_split_function_equals_the_plain_one(split, assert_same):
    assert_same(split, plain_mlp, WS, X)
    assert_same(jax.grad(split), jax.grad(plain_mlp), WS, X)
    xs = jnp.stack([X, 2 * X])
    batched = jax.vmap(plain_mlp, (None, 0))
    assert_same(jax.vmap(split, (None, 0)), batched, WS, xs)
    assert_same(jaxpp.split_stages(batched, 2), batched, WS, xs)
    got, want = jax.jvp(split, (WS, X), (WS, X)), jax.jvp(plain_mlp, (WS, X), (WS, X))
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_splitting_a_gradient_equals_the_plain_gradient(assert_same):
    grad = jax.grad(plain_mlp)
    assert_same(jaxpp.split_stages(grad, 2), grad, WS, X)


def test_split_is_found_again_by_split(stages_of):
    once = jaxpp.split_stages(plain_mlp, 3)
    twice = jaxpp.split_stages(once)
    assert stages_of(twice, WS, X).stage_of == stages_of(once, WS, X).stage_of


def test_marks_are_a_no_op_alone(assert_same):
    assert_same(mlp, plain_mlp, WS, X)
    assert_same(jax.grad(jax.checkpoint(mlp)), jax.grad(plain_mlp), WS, X)


# ---- marks --------------------------------------------------------------------------------------


def numbered(ws, x):
    x = jnp.tanh(enter(x, stage_id=0) @ ws[0])
    x = jnp.tanh(enter(x, stage_id=1, name="middle") @ ws[1])
    return (enter(x, stage_id=2) @ ws[2]).sum()


def from_one(ws, x):
    x = jnp.tanh(x @ ws[0])
    x = jnp.tanh(enter(x, stage_id=1, name="middle") @ ws[1])
    return (enter(x, stage_id=2) @ ws[2]).sum()


def at_the_start(ws, x):
    x = jnp.tanh(enter(x) @ ws[0])
    x = jnp.tanh(enter(x, name="middle") @ ws[1])
    return (enter(x) @ ws[2]).sum()


def after_casts(ws, x):
    ws = [w.astype(jnp.bfloat16) for w in ws]
    x = jnp.tanh(enter(x) @ ws[0])
    x = jnp.tanh(enter(x, name="middle") @ ws[1])
    return (enter(x) @ ws[2]).sum()


@pytest.mark.parametrize("fun", [numbered, from_one, at_the_start, after_casts])
def test_marks_count_the_stages(fun, primitives_of, stages_of):
    split = jaxpp.split_stages(fun)
    assert stages_of(split, WS, X).names == (None, "middle", None)
    assert [names.count("dot_general") for names in primitives_of(split, WS, X)] == [1, 1, 1]


def test_a_mark_on_a_pytree_keeps_what_is_not_an_array():
    tree = {"x": X, "name": "a", "none": None, "number": 3}
    got = enter(tree)
    assert (got["name"], got["none"], got["number"]) == ("a", None, 3)
    np.testing.assert_array_equal(got["x"], X)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        eqx.filter_jit,
        jax.checkpoint,
        eqx.filter_checkpoint,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    ],
    ids=["jit", "filter_jit", "checkpoint", "filter_checkpoint", "nested"],
)
def test_marks_inside_calls_are_honoured(wrap, assert_same, primitives_of):
    fun = wrap(mlp)
    split = jaxpp.split_stages(fun)
    inner = [str(names).count("dot_general") for names in map(_flat, _parts(split, WS, X))]
    assert inner == [1, 1, 1]
    assert_same(split, plain_mlp, WS, X)
    got, want = jax.jit(jax.grad(split))(WS, X), jax.jit(jax.grad(plain_mlp))(WS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


def _parts(fun, *args):
    stages = _stages.read_stages(jaxprs.trace(fun, args).jaxpr)
    return [part.jaxpr for part in stages.parts]


def _flat(jaxpr):
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for sub in jaxprs.sub_jaxprs(eqn):
            names.extend(_flat(sub))
    return names


def test_a_cut_checkpoint_is_a_checkpoint_in_each_stage():
    split = jaxpp.split_stages(jax.checkpoint(mlp))
    for part in _parts(split, WS, X):
        assert any(eqn.primitive.name in primitives.CHECKPOINTS for eqn in part.eqns)


def test_a_mark_under_vmap_marks_the_batch(stages_of):
    split = jaxpp.split_stages(jax.vmap(mlp, (None, 0)))
    assert stages_of(split, WS, X[None]).num_stages == 3


# ---- which equation belongs where ---------------------------------------------------------------


def test_each_equation_is_in_exactly_one_stage(stages_of):
    stages = stages_of(jaxpp.split_stages(mlp), WS, X)
    assert None not in stages.stage_of
    per_stage = [len(part.jaxpr.eqns) for part in stages.parts]
    assert (
        sum(per_stage) == len(stages.jaxpr.eqns) == len(jaxprs.trace(plain_mlp, (WS, X)).jaxpr.eqns)
    )


def with_skip(ws, x):
    h0 = jnp.tanh(x @ ws[0])
    h1 = jnp.tanh(enter(h0) @ ws[1])
    h2 = jnp.tanh(enter(h1) @ ws[2])
    return (h2 + h0).sum()


def test_a_skip_connection_goes_straight_to_its_reader(edges_of, assert_same):
    split = jaxpp.split_stages(with_skip)
    assert edges_of(split, WS, X) == [(0, 1, (4, 8)), (0, 2, (4, 8)), (1, 2, (4, 8))]
    assert_same(jax.grad(split), jax.grad(with_skip), WS, X)


def encoder_decoder(ws, source, target):
    encoded = jnp.tanh(source @ ws[0])
    h = enter(target, name="decoder")
    h = jnp.tanh(h @ ws[1]) + encoded.mean(0)
    h = enter(h)
    return ((h @ ws[2] + encoded.mean(0)) ** 2).mean()


def test_a_decoder_reads_the_encoder_and_its_own_input(edges_of, arguments_of, assert_same):
    source, target = data((4, 8), (5, 8))
    split = jaxpp.split_stages(encoder_decoder)
    assert arguments_of(split, WS, source, target) == [[(4, 8), (8, 8)], [(5, 8), (8, 8)], [(8, 8)]]
    targets = [(i, j) for i, j, _ in edges_of(split, WS, source, target)]
    assert targets == [(0, 1), (0, 2), (1, 2)]
    assert_same(jax.grad(split), jax.grad(encoder_decoder), WS, source, target)


def two_towers(ws, a, b):
    left = jnp.tanh(a @ ws[0])
    right = jnp.tanh(enter(b, stage_id=1) @ ws[1])
    left, right = enter((left, right), stage_id=2)
    return jnp.mean((left @ ws[2] - right) ** 2)


def test_parallel_towers_read_nothing_of_each_other(edges_of, arguments_of, assert_same):
    a, b = data((4, 8), (4, 8))
    split = jaxpp.split_stages(two_towers)
    assert edges_of(split, WS, a, b) == [(0, 2, (4, 8)), (1, 2, (4, 8))]
    assert arguments_of(split, WS, a, b) == [[(4, 8), (8, 8)], [(4, 8), (8, 8)], [(8, 8)]]
    assert_same(jax.grad(split), jax.grad(two_towers), WS, a, b)


def several_outputs(ws, x):
    first = jnp.tanh(x @ ws[0])
    second = jnp.tanh(enter(first) @ ws[1])
    third = jnp.tanh(enter(second) @ ws[2])
    return {"loss": third.mean(), "first": first, "norms": (second**2).sum(), "static": "name"}


def test_a_stage_that_opens_on_a_slice_of_the_data_waits_for_no_other(edges_of, assert_same):
    """Two halves of a sequence; the second one reads what the first one's layers left behind."""

    def loss(ws, x):
        left: list[Any] = [0.0, 0.0]
        total = 0.0
        for half in range(2):
            h = x[:, 3 * half : 3 * half + 3].reshape(4, 3)
            for layer, w in enumerate(ws):
                h = jaxpp.pipeline_enter_stage(h, stage_id=2 * half + layer)
                h = left[layer] = jnp.tanh(h @ w + left[layer])
            total += jnp.mean(h**2)
        return total

    ws, x = jax.random.normal(jax.random.key(0), (2, 3, 3)), jnp.ones((4, 6))
    ws = list(ws)
    # From layer to layer, and from half to half; and the loss of the first half, a number.
    assert edges_of(loss, ws, x) == [(0, 1, (4, 3)), (0, 2, (4, 3)), (1, 3, ()), (1, 3, (4, 3)),
                                     (2, 3, (4, 3))]  # fmt: skip
    assert_same(jaxpp.wrap_forward(loss), loss, ws, x)


def test_each_output_is_made_in_its_own_stage(stages_of, assert_same):
    split = jaxpp.split_stages(several_outputs)
    stages = stages_of(split, WS, X)
    made = {
        v.aval.shape: k
        for k in range(3)
        for v in stages.parts[k].outputs
        if v in stages.jaxpr.jaxpr.outvars and v.aval.shape
    }
    assert made == {(4, 8): 0}
    assert_same(split, several_outputs, WS, X)
    assert split(WS, X)["static"] == "name"


def masked(ws, x, lengths):
    mask = jnp.arange(8)[None] < lengths[:, None]
    causal = jnp.tril(jnp.ones((8, 8), bool))
    for i, w in enumerate(ws):
        x = jnp.where(mask, jnp.tanh(x @ jnp.where(causal, w, 0.0)), 0.0)
        if i < 2:
            x = enter(x)
    return x.sum()


def test_constant_masks_are_repeated_and_others_sent_once_to_each(edges_of, assert_same):
    lengths = jnp.array([3, 8, 5, 1])
    split = jaxpp.split_stages(masked)
    edges = edges_of(split, WS, X, lengths)
    assert (0, 1, (8, 8)) not in edges
    assert [e for e in edges if e[2] == (4, 8)].count((0, 1, (4, 8))) >= 1
    masks = [e for e in edges if e[2] != (4, 8)]
    assert len({target for _, target, _ in masks}) <= 2
    assert_same(jax.grad(split), jax.grad(masked), WS, X, lengths)


def positions(ws, x):
    where = jnp.arange(8) / 8
    for i, w in enumerate(ws):
        x = jnp.tanh((x + where) @ w)
        if i < 2:
            x = enter(x)
    return x.sum()


def test_positions_are_repeated_where_they_are_read(edges_of, primitives_of):
    split = jaxpp.split_stages(positions)
    assert edges_of(split, WS, X) == [(0, 1, (4, 8)), (1, 2, (4, 8))]
    assert all("iota" in names for names in primitives_of(split, WS, X))


# ---- arguments go with their readers ------------------------------------------------------------


def cast_at_the_top(ws, x):
    return mlp([w.astype(jnp.bfloat16) for w in ws], x.astype(jnp.bfloat16)).astype(jnp.float32)


def stacked_at_the_top(ws, x):
    stack = jnp.stack(ws)
    for i in range(3):
        x = jnp.tanh(x @ stack[i]) if i == 0 else jnp.tanh(enter(x) @ stack[i])
    return x.sum()


def transposed_at_the_top(ws, x):
    return mlp([w.T * 0.5 for w in ws], x)


@pytest.mark.parametrize("fun", [cast_at_the_top, transposed_at_the_top])
def test_a_weights_transform_goes_with_its_reader(fun, arguments_of, edges_of, assert_same):
    split = jaxpp.split_stages(fun)
    assert arguments_of(split, WS, X) == [[(4, 8), (8, 8)], [(8, 8)], [(8, 8)]]
    assert edges_of(split, WS, X) == [(0, 1, (4, 8)), (1, 2, (4, 8))]
    assert_same(jax.grad(split), jax.grad(fun), WS, X)


@pytest.mark.parametrize("fun", [cast_at_the_top, transposed_at_the_top])
def test_a_weights_transform_goes_with_its_reader_in_a_balanced_cut(fun, arguments_of, edges_of):
    split = jaxpp.split_stages(_unmarked(fun), 3)
    assert [len(shapes) for shapes in arguments_of(split, WS, X)] == [2, 1, 1]
    assert [(i, j) for i, j, _ in edges_of(split, WS, X)] == [(0, 1), (1, 2)]


def _unmarked(fun):
    def unmarked(ws, x):
        traced = jaxprs.trace(fun, (ws, x))
        flat, _ = _stages.dissolve_marks(traced.jaxpr)
        return traced.rebuild(jaxprs.run(flat, *traced.inputs))

    return unmarked


def test_stacking_of_all_weights_is_the_first_readers(arguments_of, assert_same):
    split = jaxpp.split_stages(stacked_at_the_top)
    assert [len(shapes) for shapes in arguments_of(split, WS, X)] == [4, 0, 0]
    assert_same(split, stacked_at_the_top, WS, X)


def regularised(ws, x):
    return mlp(ws, x) + 1e-2 * sum((w**2).sum() for w in ws)


def regularised_by_tree(ws, x):
    squares = jax.tree.map(lambda w: jnp.sum(jnp.square(w)), ws)
    return mlp(ws, x) + 1e-2 * jax.tree.reduce(jnp.add, squares)


@pytest.mark.parametrize("fun", [regularised, regularised_by_tree])
def test_a_penalty_on_all_parameters_sends_scalars(fun, edges_of, arguments_of, assert_same):
    split = jaxpp.split_stages(fun)
    assert arguments_of(split, WS, X) == [[(4, 8), (8, 8)], [(8, 8)], [(8, 8)]]
    assert {shape for *_, shape in edges_of(split, WS, X)} == {(4, 8), ()}
    assert_same(jax.grad(split), jax.grad(fun), WS, X)


def test_tied_weights_are_read_by_both_stages(arguments_of, assert_same):
    def tied(w, x):
        return (enter(jnp.tanh(x @ w)) @ w.T).sum()

    split = jaxpp.split_stages(tied)
    assert arguments_of(split, WS[0], X) == [[(4, 8), (8, 8)], [(8, 8)]]
    assert_same(jax.grad(split), jax.grad(tied), WS[0], X)


def test_keys_integers_and_unused_arguments_pass(assert_same):
    def fun(ws, x, key, n, unused):
        h = enter(jnp.tanh(x @ ws[0]))
        return (h * jax.random.bernoulli(key, 0.5, h.shape)).sum() * n, key, n + 1

    def values(ws, x, key, n, unused):
        out, key, n = jaxpp.split_stages(fun)(ws, x, key, n, unused)
        return out, jax.random.key_data(key), n

    def wanted(ws, x, key, n, unused):
        out, key, n = fun(ws, x, key, n, unused)
        return out, jax.random.key_data(key), n

    assert_same(values, wanted, WS, X, jax.random.key(3), jnp.array(2), X)


# ---- bad input ----------------------------------------------------------------------------------


def in_scan(ws, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(enter(h) @ w), None), x, jnp.stack(ws))[0].sum()


def in_cond(ws, x):
    return jax.lax.cond(x[0, 0] > 0, lambda h: enter(h) @ ws[0], lambda h: h @ ws[1], x).sum()


def in_while(ws, x):
    def body(state):
        return state[0] + 1, enter(state[1]) @ ws[0]

    return jax.lax.while_loop(lambda s: s[0] < 2, body, (0, x))[1].sum()


@jax.custom_vjp
def custom(x):
    return jnp.tanh(enter(x))


custom.defvjp(lambda x: (custom(x), x), lambda x, ct: (ct,))


def in_custom_vjp(ws, x):
    return custom(x @ ws[0]).sum()


@pytest.mark.parametrize(
    ("fun", "inside"),
    [
        (in_scan, "`scan`"),
        (in_cond, "`cond`"),
        (in_while, "`while`"),
        (in_custom_vjp, "`custom_vjp_call`"),
        (lambda ws, x: jax.checkpoint(in_scan)(ws, x), "`scan`"),
    ],
    ids=["scan", "cond", "while", "custom_vjp", "scan-in-checkpoint"],
)
def test_a_mark_where_no_cut_can_be_made_is_an_error_with_its_line(fun, inside):
    with pytest.raises(ValueError, match=rf"inside a {inside} at \S*test_split_stages.py:\d+"):
        jaxpp.split_stages(fun)(WS, X)


def test_nothing_to_cut_by_is_an_error():
    with pytest.raises(ValueError, match="nothing says where to cut: give num_stages or at="):
        jaxpp.split_stages(plain_mlp)(WS, X)


def test_another_number_of_stages_than_marks_is_an_error():
    with pytest.raises(ValueError, match="num_stages=2, but the cuts in the function make 3"):
        jaxpp.split_stages(mlp, 2)(WS, X)


def test_more_stages_than_equations_is_an_error():
    with pytest.raises(ValueError, match=r"30 stages need 29 cuts, .* ask for at most \d"):
        jaxpp.split_stages(plain_mlp, 30)(WS, X)


@pytest.mark.parametrize("number", [0, -1])
def test_no_stages_is_an_error(number):
    with pytest.raises(ValueError, match=f"num_stages must be at least 1, got {number}"):
        jaxpp.split_stages(plain_mlp, number)


def marks_numbered(*ids):
    def fun(ws, x):
        for k in ids:
            x = enter(jnp.tanh(x @ ws[0]), stage_id=k)
        return (x @ ws[1]).sum()

    return fun


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            (1, 1),
            r"at \S*test_split_stages.py:\d+ reads a value of stage 1, but stage 1",
        ),
        ((1, None), r"the one entered at \S*test_split_stages.py:\d+ is not"),
        ((1, 3), r"numbered \[1, 3\], but must be numbered without gaps"),
        ((2, 3), r"numbered \[2, 3\], but must be numbered without gaps"),
        (
            (2, 1),
            r"at \S*test_split_stages.py:\d+ reads a value of stage 2, but stage 1",
        ),
    ],
)
def test_badly_numbered_marks_are_errors(ids, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(marks_numbered(*ids))(WS, X)


def test_a_consumer_before_its_producer_is_an_error():
    def fun(ws, x):
        a = enter(x @ ws[0], stage_id=2)
        b = enter(jnp.tanh(a) @ ws[1], stage_id=1)
        return b.sum()

    with pytest.raises(ValueError, match="out of order|consumer before its producer"):
        jaxpp.split_stages(fun)(WS, X)


def test_every_error_names_an_unknown_balance():
    with pytest.raises(ValueError, match=re.escape("balance is 'flops', 'layers' or a function")):
        jaxpp.split_stages(plain_mlp, 2, balance="seconds")


def test_what_a_module_is_called_with_is_prepared_in_its_stage(arguments_of):
    class Biased(eqx.Module):
        weight: jax.Array

        def __call__(self, x, bias):
            return jnp.tanh(x @ self.weight + bias)

    class Net(eqx.Module):
        first: eqx.nn.Linear
        second: Biased
        table: jax.Array

        def __call__(self, x):
            x = jax.vmap(self.first)(x)
            return self.second(x, self.table[jnp.arange(4) % 3])

    net = Net(
        eqx.nn.Linear(2, 4, key=jax.random.key(0)), Biased(jnp.ones((4, 5))), jnp.ones((3, 5))
    )
    split = jaxpp.split_stages(lambda net, x: net(x).sum(), at=["second"])
    first, second = arguments_of(split, net, jnp.ones((4, 2)))
    assert first == [(4,), (4, 2), (4, 2)]
    assert second == [(3, 5), (4, 5)]


@pytest.mark.parametrize("transform", [jaxpp.split_stages, jaxpp.wrap_forward])
def test_a_mark_behind_which_nothing_is_computed_is_an_error(transform):
    def fun(ws, x):
        return enter(jnp.mean(mlp(ws, x, marks=(1,)) ** 2))

    message = (
        r"Nothing is computed in the last stage, 2, .* at \S*test_split_stages.py:\d+: .* Drop"
    )
    with pytest.raises(ValueError, match=message):
        transform(fun)(WS, X)


def test_results_may_come_from_earlier_stages_than_the_last(stages_of, assert_same):
    def fun(ws, x):
        h = jnp.tanh(x @ ws[0])
        beside = jnp.cos(h)
        return jnp.mean(enter(h) @ ws[1]), h, beside

    split = jaxpp.split_stages(fun)
    assert stages_of(split, WS, X).num_stages == 2
    assert_same(split, fun, WS, X)
    assert_same(jaxpp.wrap_forward(split), fun, WS, X)


def test_a_stage_may_have_thousands_of_equations_and_use_a_weight_in_each():
    def fun(w, x):
        for _ in range(1200):
            x = jnp.tanh(x @ w)
        return x.sum()

    split = jaxpp.split_stages(jax.checkpoint(fun), 2)
    wrapped = jaxpp.wrap_forward(split)
    assert len(jax.make_jaxpr(wrapped)(WS[0], X).eqns) == 2


def test_a_stage_may_have_thousands_of_equations_of_arguments_alone(primitives_of):
    def fun(w, x):
        for _ in range(2500):
            w = jnp.sin(w)
        return (enter(x @ w) @ w).sum()

    first, second = primitives_of(jaxpp.split_stages(fun), WS[0], X)
    assert first.count("sin") == 2500 and "sin" not in second


# ---- the order of the transforms ----------------------------------------------------------------


def with_a_scope(ws, x):
    h = jnp.tanh(x @ ws[0])
    with jax.named_scope("second"):
        return jnp.mean((h @ ws[1]) ** 2)


def marked(ws, x):
    return jnp.mean((enter(jnp.tanh(x @ ws[0])) @ ws[1]) ** 2)


@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["loss", "gradient"])
@pytest.mark.parametrize(
    "cut",
    [
        lambda f: jaxpp.split_stages(f(with_a_scope), 2),
        lambda f: jaxpp.split_stages(f(with_a_scope), at=["second"]),
        lambda f: jaxpp.split_stages(f(marked), 2),
        lambda f: jaxpp.wrap_forward(f(marked)),
    ],
    ids=["balanced", "scope", "marks", "wrapped"],
)
def test_stages_are_cut_before_microbatches_are_made(cut, differentiate):
    cut_last = cut(lambda loss: jaxpp.microbatch(differentiate(loss), 2))
    right = r"loop of microbatch.* microbatch\(value_and_grad\(wrap_forward\(split_stages\("
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a balanced cut beside the loop is warned of
        with pytest.raises((ValueError, UserWarning), match=right):
            cut_last(WS[:2], X)


def test_a_loop_of_microbatches_inside_a_stage_is_allowed(assert_same):
    def loss(ws, x):
        parts = jaxpp.microbatch(lambda w, h: jnp.mean((h @ w) ** 2), 2)
        return parts(ws[1], enter(jnp.tanh(x @ ws[0])))

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, 2))
    assert_same(jax.value_and_grad(staged), jax.value_and_grad(loss), WS, X)
