"""Cuts at modules of an Equinox model, at named scopes, and by balance."""

import abc
import re
import threading
import warnings
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from tests.helpers import assert_close


class Base(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Block(Base):
    """Inherits its __call__."""

    act: eqx.nn.Lambda
    scale: float = eqx.field(static=True)

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, key=key)
        self.act = eqx.nn.Lambda(jnp.tanh)
        self.scale = 0.5


class Wide(Block):
    """Calls its base, of the same name."""

    def __call__(self, x):
        return super().__call__(x) * self.scale


class Net(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear
    table: dict[str, eqx.Module]

    def __init__(self, key, block=Block):
        keys = jax.random.split(key, 7)
        self.embed = eqx.nn.Linear(8, 8, key=keys[0])
        self.blocks = [block(k) for k in keys[1:5]]
        self.head = eqx.nn.Linear(8, 4, key=keys[5])
        self.table = {"unused": eqx.nn.Linear(8, 8, key=keys[6])}

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODEL = Net(jax.random.key(0))
X = jax.random.normal(jax.random.key(1), (3, 8))
PARAMS, STATIC = eqx.partition(MODEL, eqx.is_inexact_array)
CUTS = ["blocks.1", "blocks.3"]


def loss(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


def products(names):
    return [n.count("dot_general") for n in names]


# ---- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [CUTS, tuple(CUTS), lambda m: [m.blocks[1], m.blocks[3]]],
    ids=["list", "tuple", "function"],
)
def test_a_module_opens_a_stage(at, primitives_of, stages_of, assert_same):
    split = jaxpp.split_stages(loss, at=at)
    assert products(primitives_of(split, MODEL, X)) == [2, 2, 2]
    assert stages_of(split, MODEL, X).names == (None, *CUTS)
    assert_same(split, loss, MODEL, X)
    assert_same(eqx.filter_grad(split), eqx.filter_grad(loss), MODEL, X)


def test_one_module_need_not_be_in_a_list(stages_of):
    assert stages_of(jaxpp.split_stages(loss, at="head"), MODEL, X).names == (None, "head")
    assert stages_of(jaxpp.split_stages(loss, at=lambda m: m.head), MODEL, X).names == (
        None,
        "head",
    )


def test_num_stages_may_be_given_too(stages_of):
    assert stages_of(jaxpp.split_stages(loss, 3, at=CUTS), MODEL, X).num_stages == 3
    message = r"num_stages=4, .* make 3 stages \(entered at 'blocks.1', 'blocks.3'\); drop"
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(loss, 4, at=CUTS)(MODEL, X)


def combined(params, x):
    return loss(eqx.combine(params, STATIC), x)


def combined_argument(params, static, x):
    return loss(eqx.combine(params, static), x)


def averaged(model, x):
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b if eqx.is_array(a) else a, model, MODEL)
    return loss(mean, x)


def averaged_with(model, other, x):
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b if eqx.is_array(a) else a, model, other)
    return loss(mean, x) + loss(other, x)


def cast(model, x):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_array(a) else a, model)
    return loss(half, x.astype(jnp.bfloat16))


def cast_under_jit(model, x):
    to_half = eqx.filter_jit(
        lambda m: jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_array(a) else a, m)
    )
    return loss(to_half(model), x.astype(jnp.bfloat16))


@jax.custom_jvp
def halved(arrays):
    return jax.tree.map(lambda a: 0.5 * a, arrays)


halved.defjvp(lambda primals, tangents: (halved(*primals), halved(*tangents)))


def halved_by_a_rule(model, x):
    return loss(eqx.combine(halved(eqx.filter(model, eqx.is_inexact_array)), STATIC), x)


def jitted_blocks(model, x):
    run = eqx.filter_jit(lambda block, x: block(x))

    def one(x):
        x = model.embed(x)
        for block in model.blocks:
            x = run(block, x)
        return model.head(x)

    return (jax.vmap(one)(x) ** 2).mean()


def checkpointed_blocks(model, x):
    def one(x):
        x = model.embed(x)
        for block in model.blocks:
            x = eqx.filter_checkpoint(block)(x)
        return model.head(x)

    return (jax.vmap(one)(x) ** 2).mean()


def vmapped_blocks(model, x):
    x = jax.vmap(model.embed)(x)
    for block in model.blocks:
        x = jax.vmap(block)(x)
    return (jax.vmap(model.head)(x) ** 2).mean()


def isinstance_dispatch(model, x):
    assert type(model.blocks[1]) is Block and isinstance(model.blocks[1], Base)
    assert jax.tree.structure(model) == jax.tree.structure(MODEL)
    return loss(model, x)


REBUILT = {
    "combined": (combined, (PARAMS, X)),
    "combined-argument": (combined_argument, (PARAMS, STATIC, X)),
    "averaged": (averaged, (MODEL, X)),
    "averaged-with-argument": (averaged_with, (MODEL, Net(jax.random.key(5)), X)),
    "cast": (cast, (MODEL, X)),
    "cast-under-jit": (cast_under_jit, (MODEL, X)),
    "halved-by-a-rule": (halved_by_a_rule, (MODEL, X)),
    "jit": (eqx.filter_jit(loss), (MODEL, X)),
    "checkpoint": (eqx.filter_checkpoint(loss), (MODEL, X)),
    "jitted-blocks": (jitted_blocks, (MODEL, X)),
    "checkpointed-blocks": (checkpointed_blocks, (MODEL, X)),
    "vmapped-blocks": (vmapped_blocks, (MODEL, X)),
    "isinstance": (isinstance_dispatch, (MODEL, X)),
}


@pytest.mark.parametrize("name", REBUILT)
def test_modules_are_known_again_however_the_model_is_rebuilt(name, stages_of, assert_same):
    fun, args = REBUILT[name]
    split = jaxpp.split_stages(fun, at=CUTS)
    stages = stages_of(split, *args)
    assert stages.names == (None, *CUTS)
    assert set(stages.stage_of) >= {0, 1, 2}
    assert_same(split, fun, *args)


@pytest.mark.parametrize("name", ["combined", "checkpointed-blocks", "jitted-blocks"])
def test_gradients_pass_modules_that_were_rebuilt(name, assert_same):
    fun, args = REBUILT[name]
    split = jaxpp.split_stages(fun, at=CUTS)
    assert_same(eqx.filter_grad(split), eqx.filter_grad(fun), *args)


@pytest.mark.parametrize("name", ["isinstance", "jitted-blocks"])
@pytest.mark.parametrize("cut", [{"at": CUTS}, {"num_stages": 3}], ids=str)
def test_equations_are_under_scopes_named_by_their_modules(name, cut):
    fun, args = REBUILT[name]
    jaxpr = eqx.filter_make_jaxpr(jaxpp.split_stages(fun, **cut))(*args)[0]
    assert not watched(jaxpr)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    found = [str(e.source_info.name_stack) for e in products[1:5]]
    assert [f"blocks.{i}" in scope for i, scope in enumerate(found)] == [True] * 4
    jaxpr = eqx.filter_make_jaxpr(jaxpp.split_stages(fun, 1))(*args)[0]
    assert not watched(jaxpr)  # though it opens no calls


KEYS = jax.random.split(jax.random.key(9), 4)
MLP = eqx.nn.Sequential([eqx.nn.Linear(8, 8, use_bias=False, key=k) for k in KEYS])


def distilled(model, teacher, x):
    """Calls another model on the results of this one, and no other layers before them."""
    student = jax.vmap(jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, model))(x)
    return jnp.mean((jax.vmap(teacher)(student) - student) ** 2)


def averaged_with_other(model, other, x):
    mean = jax.tree.map(lambda a, b: a + b if eqx.is_array(a) else a, model, other)
    return jnp.mean(jax.vmap(mean)(x) ** 2)


def without_data(model, other, x):
    model = jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, model)
    return jnp.mean(jax.vmap(model)(jnp.ones((3, 8))) ** 2)


@pytest.mark.parametrize(
    ("fun", "last"), [(distilled, 5), (averaged_with_other, 1), (without_data, 1)]
)
def test_results_of_other_calls_do_not_tell_which_module_is_called(
    fun, last, primitives_of, assert_same
):
    split = jaxpp.split_stages(fun, at=["layers.1", "layers.3"])
    assert products(primitives_of(split, MLP, MLP, X)) == [1, 2, last]
    assert_same(split, fun, MLP, MLP, X)


def test_a_module_that_computes_nothing_may_be_named(primitives_of):
    model = eqx.nn.Sequential([MODEL.embed, eqx.nn.Dropout(inference=True), MODEL.embed])
    at = jaxpp.split_stages(loss, at=["layers.1", "layers.2"])
    assert products(primitives_of(at, model, X)) == [1, 0, 1]
    whole = jaxpp.split_stages(loss, 2, whole=lambda m: [*m.layers])
    assert products(primitives_of(whole, model, X)) == [1, 1]


def test_the_backward_of_a_layer_is_no_layer(primitives_of):
    def fun(model, x):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(eqx.filter_grad(loss)(model, x)))

    assert products(primitives_of(jaxpp.split_stages(fun, 3), MODEL, X)) == [6, 7, 4]


def test_a_stage_reads_the_parameters_of_its_modules_only(arguments_of):
    linear, head = [(8,), (8, 8)], [(4,), (4, 8)]
    shapes = arguments_of(jaxpp.split_stages(combined, at=CUTS), PARAMS, X)
    assert shapes == [sorted([*linear * 2, (3, 8)]), sorted(linear * 2), sorted(linear + head)]


@pytest.mark.more
def test_a_subclass_that_calls_its_base_is_called_once(primitives_of, assert_same):
    model = Net(jax.random.key(2), Wide)
    split = jaxpp.split_stages(loss, at=CUTS)
    assert products(primitives_of(split, model, X)) == [2, 2, 2]
    assert_same(split, loss, model, X)


def test_a_class_and_its_base_may_both_be_cut(stages_of, assert_same):
    keys = jax.random.split(jax.random.key(2), 3)
    wide: Any = Wide  # its constructor is that of its base
    blocks = Base(eqx.nn.Linear(8, 8, key=keys[2])), wide(keys[1])
    model = eqx.tree_at(lambda m: (m.blocks[1], m.blocks[3]), MODEL, blocks)
    split = jaxpp.split_stages(loss, at=CUTS)
    assert stages_of(split, model, X).names == (None, *CUTS)
    assert_same(split, loss, model, X)


def test_classes_are_as_before_after_tracing():
    before = {cls: dict(vars(cls)) for cls in (Base, Block, Wide, eqx.nn.Linear)}
    jaxpp.split_stages(loss, at=[*CUTS, "head"])(MODEL, X)
    jaxpp.split_stages(loss, at=CUTS)(Net(jax.random.key(2), Wide), X)
    with pytest.raises(ValueError):
        jaxpp.split_stages(loss, at=["blocks.0", "table.unused"])(MODEL, X)
    assert before == {cls: dict(vars(cls)) for cls in before}


def test_a_function_that_raises_leaves_the_classes_alone():
    def fails(model, x):
        raise KeyError("mine")

    before = dict(vars(Block))
    with pytest.raises(KeyError, match="mine"):
        jaxpp.split_stages(fails, at=CUTS)(MODEL, X)
    assert dict(vars(Block)) == before


def test_jitted_functions_traced_before_and_after_are_not_mixed_up(stages_of):
    inner = eqx.filter_jit(loss)
    inner(MODEL, X)
    for at in (CUTS, ["blocks.2"], ["head"]):
        assert stages_of(jaxpp.split_stages(inner, at=at), MODEL, X).names == (None, *at)
    assert stages_of(jaxpp.split_stages(inner, 3, whole=["blocks.2"]), MODEL, X).num_stages == 3
    assert not watched(eqx.filter_make_jaxpr(lambda m, x: inner(m, x))(MODEL, X)[0])


def watched(jaxpr):
    """Whether a call of a module has left something in a jaxpr."""

    def is_trace(eqn):
        return "jaxpp_" in str(eqn.source_info.name_stack) or "jaxpp_" in str(eqn.params)

    return any(jaxprs.contains(eqn, is_trace) for eqn in jaxpr.eqns)


def test_other_threads_call_their_modules_undisturbed():
    results = []

    def slow(model, x):
        other = threading.Thread(
            target=lambda: results.append(eqx.filter_make_jaxpr(loss)(MODEL, X)[0])
        )
        other.start()
        other.join()
        return loss(model, x)

    jaxpp.split_stages(slow, at=CUTS)(MODEL, X)
    assert not watched(results[0])


def test_nested_splits_of_the_same_classes(assert_same):
    def outer(model, x):
        return jaxpp.split_stages(loss, at=CUTS)(model, x) + jnp.float32(1)

    before = dict(vars(Block))
    assert_same(outer, lambda m, x: loss(m, x) + jnp.float32(1), MODEL, X)
    assert_same(jaxpp.split_stages(outer), outer, MODEL, X)
    assert_same(jaxpp.split_stages(outer, 3), outer, MODEL, X)
    assert dict(vars(Block)) == before


def test_at_goes_before_marks_in_the_model(stages_of):
    def marked(model, x):
        return loss(model, jaxpp.pipeline_enter_stage(x * 2))

    assert stages_of(jaxpp.split_stages(marked, at=CUTS), MODEL, X).names == (None, *CUTS)


def test_a_model_may_be_returned_and_keeps_its_type(assert_same):
    def step(model, x):
        grads = eqx.filter_grad(loss)(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss(model, x)

    def evaluate(model, x):
        return model, {"loss": loss(model, x), "blocks": model.blocks}

    got = jaxpp.split_stages(evaluate, at=CUTS)(MODEL, X)
    assert jax.tree.structure(got) == jax.tree.structure(evaluate(MODEL, X))
    assert type(got[0].blocks[1]) is Block
    assert_same(jaxpp.split_stages(step, 2), step, MODEL, X)


def test_no_warning_reaches_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpp.split_stages(loss, at=CUTS)(MODEL, X)
        jaxpp.split_stages(loss, 2, whole=["blocks.1"])(MODEL, X)


class Abstract(eqx.Module, strict=True):
    @abc.abstractmethod
    def __call__(self, x): ...


class Concrete(Abstract, strict=True):
    weight: jax.Array

    @eqx.filter_jit
    def __call__(self, x, *, key=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return jnp.tanh(self.weight @ x)


class Registered(eqx.Module):
    """A class that minds being subclassed."""

    weight: jax.Array

    def __init_subclass__(cls, **kwargs):
        raise TypeError("not to be subclassed")

    def __call__(self, x, *, flip: bool = False):
        return (-1 if flip else 1) * (self.weight @ x)


def test_unusual_classes(stages_of, assert_same):
    w = jax.random.normal(jax.random.key(3), (2, 8, 8))
    model = eqx.nn.Sequential(
        [Concrete(w[0]), eqx.nn.Lambda(jnp.tanh), eqx.nn.Lambda(jnp.tanh), Concrete(w[1])]
    )
    for name in ("layers.2", "layers.3"):
        split = jaxpp.split_stages(loss, at=[name])
        assert stages_of(split, model, X).names == (None, name)
        assert_same(split, loss, model, X)


def test_keyword_and_static_arguments_of_a_module(assert_same):
    class Pair(eqx.Module):
        a: Registered
        b: Registered

        def __call__(self, x):
            return self.b(self.a(x), flip=True)

    w = jax.random.normal(jax.random.key(3), (2, 8, 8))
    model = Pair(Registered(w[0]), Registered(w[1]))
    assert_same(jaxpp.split_stages(loss, at=["b"]), loss, model, X)


def test_one_instance_in_two_places_is_two_modules(stages_of, assert_same):
    class Twice(eqx.Module):
        first: Block
        second: Block

        def __call__(self, x):
            return self.second(self.first(x))

    block = Block(jax.random.key(4))
    model = Twice(block, block)
    for at in (["second"], lambda m: m.second):
        split = jaxpp.split_stages(loss, at=at)
        assert stages_of(split, model, X).names == (None, "second")
        assert_same(split, loss, model, X)


def test_shared_weights_of_equinox(stages_of, assert_same):
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            pair = (eqx.nn.Embedding(16, 8, key=key), eqx.nn.Linear(8, 16, use_bias=False, key=key))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token):
            embed, head = self.shared()
            return head(jnp.tanh(embed(token)))

    model, tokens = Tied(jax.random.key(6)), jnp.array([3, 1, 5])
    split = jaxpp.split_stages(loss, at=["shared.pytree.1"])
    assert stages_of(split, model, tokens).num_stages == 2
    assert_same(eqx.filter_grad(split), eqx.filter_grad(loss), model, tokens)


def test_stateful_layers(stages_of, assert_same):
    class Normed(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(8, 8, key=keys[0])
            self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
            self.last = eqx.nn.Linear(8, 4, key=keys[1])

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.last(x), state

    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(7))

    def with_state(model, state, x):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = run(x, state)
        return (out**2).mean(), state

    split = jaxpp.split_stages(with_state, at=["norm", "last"])
    assert stages_of(split, model, state, X).names == (None, "norm", "last")

    def leaves(fun):
        return lambda *args: jax.tree.leaves(fun(*args))

    assert_same(leaves(split), leaves(with_state), model, state, X)


# ---- bad module cuts ----------------------------------------------------------------------------


def uses_last_twice(model, x):
    return loss(model, x) + jax.vmap(model.head)(x).mean()


def test_a_module_that_is_called_twice_opens_one_stage_for_both_calls():
    split = jaxpp.split_stages(uses_last_twice, at=["head"])
    lines = jaxpp.stages_as_text(split, MODEL, X).splitlines()[1:]
    assert ["head" in line for line in lines] == [False, True]
    got, want = (eqx.filter_jit(eqx.filter_grad(f))(MODEL, X) for f in (split, uses_last_twice))
    assert_close(got, want)


def scanned(model, x):
    def step(h, _):
        return model.blocks[1](h), None

    return jax.vmap(lambda x: jax.lax.scan(step, x, None, length=2)[0])(x).sum()


class Bag(eqx.Module):
    inner: eqx.Module
    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)


class NotCalled(eqx.Module):
    weight: jax.Array


@pytest.mark.parametrize(
    ("fun", "at", "message"),
    [
        (
            loss,
            ["blocks.1", "blocks.9"],
            r"Net has no submodule 'blocks.9': there are 'embed', 'bl",
        ),
        (
            loss,
            ["block"],
            r"No module of the first argument is called 'block' \(there are 'embed', ",
        ),
        (loss, ["blocks.1", "blocks.1"], r"the cut at 'blocks.1' is given twice"),
        (loss, lambda m: [m.head, m.head], r"a module is named twice in \['head', 'head'\]"),
        (loss, lambda m: [m.blocks], r"returned list, which is not a submodule of Net"),
        (loss, lambda m: m, r"returned Net, which is not a submodule of Net"),
        (
            loss,
            ["blocks.3", "blocks.1"],
            r"out of order: .* in the order \['blocks.1', 'blocks.3'\]",
        ),
        (loss, ["table.unused"], r"'table.unused' cannot be made: the function never calls it"),
        (uses_last_twice, ["blocks.2", "head"], r"'head' is not unique: .* calls it 2 times"),
        (scanned, ["blocks.1"], r"inside a `scan` at \S*test_cuts.py:\d+"),
    ],
)
def test_bad_module_cuts_are_errors(fun, at, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(fun, at=at)(MODEL, X)


def test_a_module_without_call_is_an_error():
    model = Bag(NotCalled(X), MODEL.embed)
    with pytest.raises(ValueError, match="'inner' is a NotCalled, which is not called"):
        jaxpp.split_stages(loss, at=["inner"])(model, X)


def test_modules_that_cannot_be_told_apart_are_an_error():
    model = eqx.nn.Sequential(
        [MODEL.embed, eqx.nn.Lambda(jnp.tanh), MODEL.embed, eqx.nn.Lambda(jnp.sin)]
    )
    params, static = eqx.partition(model, eqx.is_array)

    def rebuilt(params, x):
        return loss(eqx.combine(params, static), x)

    with pytest.raises(ValueError, match="'layers.1' cannot be told from that of 'layers.3'"):
        jaxpp.split_stages(rebuilt, at=["layers.1"])(params, X)


@pytest.mark.parametrize("option", [{"at": lambda m: m}, {"num_stages": 2, "whole": lambda m: m}])
def test_a_function_needs_an_equinox_model(option):
    with pytest.raises(ValueError, match="functions only where the first argument is an Equinox"):
        jaxpp.split_stages(lambda w, x: x @ w, **option)(X.T, X)


# ---- named scopes -------------------------------------------------------------------------------


def scoped(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return x.sum()


WS = list(jax.random.normal(jax.random.key(8), (4, 8, 8)))


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: jax.vmap(f, (None, 0)), lambda f: jax.jit(jax.jit(f))],
    ids=["plain", "jit", "vmap", "nested"],
)
def test_scopes_open_stages(wrap, primitives_of, assert_same):
    fun = wrap(scoped)
    x = X[None]
    split = jaxpp.split_stages(fun, at=["layer_1", "layer_2"])
    assert products(primitives_of(split, WS, x)) == [1, 1, 2]
    assert_same(split, fun, WS, x)
    total = lambda f: lambda ws, x: f(ws, x).sum()  # noqa: E731
    assert_same(jax.grad(total(split)), jax.grad(total(fun)), WS, x)


def test_scopes_around_checkpoints_open_stages(primitives_of, stages_of):
    def fun(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return x.sum()

    stages = stages_of(jaxpp.split_stages(fun, at=["layer_2"]), WS, X)
    assert stages.num_stages == 2


def test_scopes_of_equinox_layers_inside_a_model(stages_of):
    def fun(model, x):
        with jax.named_scope("body"):
            x = jax.vmap(model.embed)(x)
        with jax.named_scope("tail"):
            return (jax.vmap(model.head)(x) ** 2).mean()

    assert stages_of(jaxpp.split_stages(fun, at=["tail"]), MODEL, X).num_stages == 2


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8, name="first")(x))
        x = nn.tanh(nn.Dense(8, name="second")(x))
        return nn.Dense(4, name="third")(x)


def test_scopes_of_flax_modules(primitives_of, assert_same):
    net: Any = Linen()
    params = net.init(jax.random.key(0), X)

    def fun(params, x):
        return (net.apply(params, x) ** 2).mean()

    split = jaxpp.split_stages(fun, at=["second", "third"])
    assert products(primitives_of(split, params, X)) == [1, 1, 1]
    assert_same(jax.grad(split), jax.grad(fun), params, X)


def test_scopes_go_before_marks(stages_of):
    def fun(ws, x):
        return scoped(ws, jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0])))

    stages = stages_of(jaxpp.split_stages(fun, at=["layer_2"]), WS, X)
    assert stages.names == (None, "layer_2")


def in_loop(ws, x):
    def step(x, w):
        with jax.named_scope("inner"):
            return jnp.tanh(x @ w), None

    return jax.lax.scan(step, x, jnp.stack(ws))[0].sum()


@pytest.mark.parametrize(
    ("fun", "at", "message"),
    [
        (
            scoped,
            ["layer_9"],
            r"No equation is under jax.named_scope\('layer_9'\) \(there are 'layer_0'",
        ),
        (scoped, ["layer"], r"No equation is under jax.named_scope\('layer'\)"),
        (
            scoped,
            ["layer_2", "layer_1"],
            r"out of order: they run in the order \['layer_1', 'layer_2'\]",
        ),
        (scoped, ["layer_1", "layer_1"], r"given twice"),
        (in_loop, ["inner"], r"'inner' is inside a `scan` at \S*test_cuts.py:\d+"),
    ],
)
def test_bad_scope_cuts_are_errors(fun, at, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(fun, at=at)(WS, X)


# ---- parts of a pytree --------------------------------------------------------------------------

TREE = {"in": WS[0], "blocks": [{"norm": jnp.ones(X.shape[-1]), "w": w} for w in WS]}


def of_tree(tree, x):
    x = x @ tree["in"]
    for block in tree["blocks"]:
        h = (x - x.mean(-1, keepdims=True)) * block["norm"]
        x = x + jnp.tanh(h @ block["w"])
    return jnp.sum(x)


def layers_of(split, tree):
    return [
        re.split(" {2,}", line.strip())[1]
        for line in jaxpp.stages_as_text(split, tree, X).splitlines()[1:]
    ]


def test_a_path_that_is_of_two_parts_is_refused_and_its_brackets_say_which():
    tree = {"a": [jnp.eye(4) * n for n in (1, 2, 3)], "a.2": jnp.eye(4)}

    def fun(tree, x):
        for w in (tree["a"][0], tree["a.2"], *tree["a"][1:]):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def layers(at):
        text = jaxpp.stages_as_text(jaxpp.split_stages(fun, at=[at]), tree, jnp.ones((2, 4)))
        return [line.split()[1] for line in text.splitlines()[1:]]

    assert layers('["a.2"]') == ["a.0", "a.1-2"]
    assert layers('["a"][2]')[1] == "a.2"
    for at in ("a.2", "a[2]"):
        with pytest.raises(ValueError, match=r"names \['a'\]\[2\] and \['a.2'\] of the first"):
            layers(at)


@pytest.mark.parametrize("at", [["blocks.1", "blocks.3"], ["blocks[1]", '["blocks"][3]']])
def test_cuts_at_parts_of_a_dictionary(at, assert_same):
    split = jaxpp.split_stages(of_tree, at=at)
    assert layers_of(split, TREE) == ["blocks.0, in", "blocks.1-2", "blocks.3"]
    table = jaxpp.stages_as_text(split, TREE, X).splitlines()
    assert f"  {X.nbytes:,}" in table[1], "x alone crosses, and not what prepares the next layer"
    assert_same(split, of_tree, TREE, X)


@pytest.mark.parametrize("key", [int, str])
def test_a_number_may_be_the_key_of_a_dictionary(key):
    def of_keys(tree, x):
        for n in range(len(WS)):
            x = jnp.tanh(x @ tree["blocks"][key(n)]["w"])
        return jnp.sum(x)

    split = jaxpp.split_stages(of_keys, at=["blocks.2"])
    tree = {"blocks": {key(n): {"w": w} for n, w in enumerate(WS)}}
    assert layers_of(split, tree) == ["blocks.0-1", "blocks.2-3"]


def test_a_cut_at_a_layer_of_a_stack_in_a_dictionary():
    def of_stack(tree, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, tree["blocks"]["w"])[0].sum()

    tree = {"blocks": {"w": jnp.stack(WS)}}
    split, even = jaxpp.split_stages(of_stack, at=["blocks.2"]), jaxpp.split_stages(of_stack, 2)
    assert jaxpp.stages_as_text(split, tree, X) == jaxpp.stages_as_text(even, tree, X)


def test_an_unknown_part_of_a_dictionary_lists_the_parts():
    with pytest.raises(ValueError, match=r"by their paths .*'blocks.0'.*nearest is 'blocks.3'"):
        jaxpp.split_stages(of_tree, at=["block.3"])(TREE, X)


def test_a_layer_of_which_two_stages_have_parts_is_marked():
    split = jaxpp.split_stages(of_tree, at=["blocks.1.w"])
    parts = "blocks.1 (part)"
    assert layers_of(split, TREE) == [f"blocks.0, {parts}, in", f"blocks.2-3, {parts}"]


# ---- balance ------------------------------------------------------------------------------------


def test_a_balanced_cut_evens_out_the_products(primitives_of):
    assert products(primitives_of(jaxpp.split_stages(scoped, 4), WS, X)) == [1, 1, 1, 1]
    assert products(primitives_of(jaxpp.split_stages(scoped, 2), WS, X)) == [2, 2]


def test_a_balanced_cut_allows_remainders(primitives_of):
    assert sorted(products(primitives_of(jaxpp.split_stages(scoped, 3), WS, X))) == [1, 1, 2]


def test_a_balanced_cut_minds_the_callers_costs(primitives_of):
    def dear_first(eqn):
        return {"dot_general": 1.0, "tanh": 0.0}.get(eqn.primitive.name, 100.0)

    def fun(ws, x):
        return scoped(ws, jnp.exp(x @ ws[0]))

    names = primitives_of(jaxpp.split_stages(fun, 3, balance=dear_first), WS, X)
    assert [("exp" in n, "reduce_sum" in n) for n in names].count((True, True)) == 0


def test_a_balanced_cut_carries_the_fewest_bytes(edges_of):
    def fun(ws, x):
        wide = jnp.tanh(jnp.concatenate([x] * 4) @ ws[0])
        narrow = wide[:1]
        return jnp.tanh(narrow @ ws[1]).sum()

    def same(eqn):
        return 1.0 if eqn.primitive.name == "dot_general" else 0.0

    assert edges_of(jaxpp.split_stages(fun, 2, balance=same), WS, X) == [(0, 1, (1, 8))]


@pytest.mark.parametrize("args", [(X,)], ids=["one-argument"])
def test_a_program_of_elementwise_operations_can_be_cut(args, stages_of, assert_same):
    def fun(x):
        return jnp.tanh(jnp.sin(jnp.tanh(x))).sum()

    split = jaxpp.split_stages(fun, 2)
    assert stages_of(split, *args).num_stages == 2
    assert_same(jax.grad(split), jax.grad(fun), *args)


@pytest.mark.parametrize(
    "whole",
    [["blocks.0", "blocks.1", "blocks.2"], lambda m: m.blocks[:3]],
    ids=["paths", "function"],
)
@pytest.mark.parametrize("name", ["plain", "combined", "jitted-blocks"])
def test_whole_modules_are_not_cut_inside(name, whole, stages_of, assert_same):
    fun, args = {"plain": (loss, (MODEL, X)), **REBUILT}[name]
    split = jaxpp.split_stages(fun, 5, whole=whole)
    stages = stages_of(split, *args)
    assert stages.num_stages == 5
    owner = {}
    for eqn, k in zip(stages.jaxpr.eqns, stages.stage_of, strict=True):
        scope = str(eqn.source_info.name_stack)
        for block in range(3):
            if f"blocks.{block}" in scope and eqn.primitive.name in ("tanh", "dot_general", "add"):
                owner.setdefault(block, set()).add(k)
    assert owner and all(len(stages) == 1 for stages in owner.values())
    assert_same(split, fun, *args)


def test_without_whole_the_same_cut_is_inside_a_block(primitives_of):
    names = primitives_of(jaxpp.split_stages(loss, 5), MODEL, X)
    assert max(products(names)) == 2
    only = primitives_of(jaxpp.split_stages(loss, 2, whole=["blocks.0", "blocks.1"]), MODEL, X)
    assert sum(products(only)) == 6


def test_whole_scopes_are_not_cut_inside(primitives_of):
    def fun(ws, x):
        with jax.named_scope("unit"):
            for w in ws[:3]:
                x = jnp.tanh(x @ w)
        return jnp.tanh(x @ ws[3]).sum()

    names = primitives_of(jaxpp.split_stages(fun, 2, whole=["unit"]), WS, X)
    assert products(names) == [3, 1]
    assert products(primitives_of(jaxpp.split_stages(fun, 2), WS, X)) == [2, 2]


def test_wholes_leave_too_few_places():
    with pytest.raises(ValueError, match=r"10 stages need 9 cuts, but .* ask for at most \d"):
        blocks = [f"layer_{i}" for i in range(4)]
        jaxpp.split_stages(scoped, 10, whole=blocks)(WS, X)


def test_an_unknown_whole_is_an_error():
    with pytest.raises(ValueError, match=r"No equation is under jax.named_scope\('layer_9'\)"):
        jaxpp.split_stages(scoped, 2, whole=["layer_9"])(WS, X)
    with pytest.raises(ValueError, match=r"'table.unused' cannot stay whole: the function never"):
        jaxpp.split_stages(loss, 2, whole=["table.unused"])(MODEL, X)


def test_numpy_arrays_are_arguments(assert_same):
    ws = [np.asarray(w) for w in WS]
    np.testing.assert_array_equal(
        jax.jit(jaxpp.split_stages(scoped, 2))(ws, np.asarray(X)), jax.jit(scoped)(ws, X)
    )
