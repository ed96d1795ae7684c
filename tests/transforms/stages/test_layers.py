"""A balanced cut is made between the layers of a model, not inside them."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.transforms.stages import _stages
from tests.helpers import assert_close

WIDTH = 8
X = jax.random.normal(jax.random.key(1), (4, WIDTH))


class Block(eqx.Module):
    """Two products, so that a cut inside shows as an odd number of them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=up)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=down)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, layers, classes=2):
        embed, head, *keys = jax.random.split(jax.random.key(0), layers + 2)
        self.embed = eqx.nn.Linear(WIDTH, WIDTH, key=embed)
        self.blocks = [Block(key) for key in keys]
        self.head = eqx.nn.Linear(WIDTH, classes, key=head)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def rebuilt(model, x):
    """The same object of no module is called, and all by one function that is traced once."""
    model = jax.tree.map(lambda a: 0.5 * a, model)
    run = eqx.filter_jit(lambda block, x: block(x))
    x = jax.vmap(model.embed)(x)
    for block in model.blocks:
        x = jax.vmap(run, (None, 0))(block, x)
    return jnp.mean(jax.vmap(model.head)(x) ** 2)


class Stacked(eqx.Module):
    blocks: Block

    def __init__(self, layers):
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), layers))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda h, own: (eqx.combine(own, static)(h), None), x, arrays)[0]


def functions(layers):
    """Plain functions: each layer is under a scope."""
    weights = list(jax.random.normal(jax.random.key(2), (layers, 2, WIDTH, WIDTH)))

    def fun(weights, x):
        for i, (up, down) in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    return fun, weights


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(2 * WIDTH)(x)))


class LinenNet(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = LinenBlock()(x)
        return x


class HaikuBlock(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(WIDTH)(jnp.tanh(hk.Linear(2 * WIDTH)(x)))


def linen(layers):
    net: Any = LinenNet(layers)
    return lambda p, x: jnp.mean(net.apply(p, x) ** 2), net.init(jax.random.key(0), X)


def haiku(layers):
    def run(x):
        for _ in range(layers):
            x = HaikuBlock()(x)
        return jnp.mean(x**2)

    net = hk.without_apply_rng(hk.transform(run))
    return net.apply, net.init(jax.random.key(0), X)


MODELS = {
    "equinox": lambda layers: (loss, Net(layers)),
    "rebuilt": lambda layers: (rebuilt, Net(layers)),
    "stacked": lambda layers: (loss, Stacked(layers)),
    "scopes": functions,
    "linen": linen,
    "haiku": haiku,
}


def products(eqns):
    """How many products there are, also inside calls and loops."""
    loops = [e.params["length"] if e.primitive.name == "scan" else 1 for e in eqns]
    inner = [sum(products(sub.eqns) for sub in jaxprs.sub_jaxprs(e)) for e in eqns]
    own = [e.primitive.name == "dot_general" for e in eqns]
    return sum(o + n * i for o, n, i in zip(own, loops, inner, strict=True))


def layers_of(split, model):
    """How many layers each stage has; those of `Net` without its ends."""
    stages = _stages.read_stages(jaxprs.trace(split, (model, X)).jaxpr)
    found = [products(part.jaxpr.eqns) for part in stages.parts]
    if isinstance(model, Net):
        found = [found[0] - 1, *found[1:-1], found[-1] - 1]
    return [n / 2 for n in found]


def assert_gradient(split, fun, model):
    got = eqx.filter_jit(eqx.filter_value_and_grad(split))(model, X)
    want = eqx.filter_jit(eqx.filter_value_and_grad(fun))(model, X)
    assert_close(got, want)


@pytest.mark.more
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (7, 3)])
def test_no_stage_is_without_a_layer_and_none_is_cut(name, layers, stages):
    fun, model = MODELS[name](layers)
    split = jaxpp.split_stages(fun, stages)
    found = layers_of(split, model)
    fewest, more = divmod(layers, stages)
    assert sorted(found) == [fewest] * (stages - more) + [fewest + 1] * more
    assert_gradient(split, fun, model)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_stages_have_the_remainder_where_layers_are_counted(name):
    fun, model = MODELS[name](6)
    split = jaxpp.split_stages(fun, 4, balance="layers")
    assert layers_of(split, model) == [1, 1, 2, 2]
    assert_gradient(split, fun, model)


def test_a_head_that_costs_more_than_a_layer_takes_none_from_its_stage():
    model = Net(5, classes=5 * WIDTH)
    assert sorted(layers_of(jaxpp.split_stages(loss, 4), model)) == [1, 1, 1, 2]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "stacked"])
def test_with_nothing_whole_a_layer_may_be_cut(name):
    fun, model = MODELS[name](5)
    split = jaxpp.split_stages(fun, 2, whole=())
    assert 2.5 in layers_of(split, model)
    assert_gradient(split, fun, model)


@pytest.mark.parametrize(
    ("name", "block"),
    [("equinox", Block), ("rebuilt", Block), ("linen", LinenBlock), ("haiku", HaikuBlock)],
)
def test_each_call_of_a_class_is_whole(name, block):
    fun, model = MODELS[name](3)
    split = jaxpp.split_stages(fun, 2, whole=block)
    assert sorted(layers_of(split, model)) == [1, 2]
    split = jaxpp.split_stages(fun, 3, whole=[block], balance="layers")
    assert layers_of(split, model) == [1, 1, 1]
    assert_gradient(split, fun, model)


def test_a_class_may_be_named_beside_paths():
    split = jaxpp.split_stages(loss, 5, whole=[Block, "head"])
    assert layers_of(split, Net(3)) == [0, 1, 1, 1, 0]


class Run(Stacked):
    def __call__(self, x, *, key=None):
        return super().__call__(x)


class Group(eqx.Module):
    blocks: list[Block]

    def __init__(self, key):
        self.blocks = [Block(k) for k in jax.random.split(key, 3)]

    def __call__(self, x, *, key=None):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_outermost_of_repeated_modules_are_the_layers_unless_a_class_says_otherwise():
    model = eqx.nn.Sequential([Group(k) for k in jax.random.split(jax.random.key(3), 2)])
    assert layers_of(jaxpp.split_stages(loss, 2), model) == [3, 3]
    with pytest.warns(UserWarning, match=r"the 2 layers that .* 0.50, 0.50, 0.00, 0.00"):
        jaxpp.split_stages(loss, 4)(model, X)
    assert sorted(layers_of(jaxpp.split_stages(loss, 4, whole=Block), model)) == [1, 1, 2, 2]


def test_modules_that_run_stacked_layers_are_cut_between_these_where_they_are_too_few():
    run: Any = Run  # its constructor is that of its base
    model = eqx.nn.Sequential([run(3), run(3)])
    assert layers_of(jaxpp.split_stages(loss, 2), model) == [3, 3]
    assert sorted(layers_of(jaxpp.split_stages(loss, 4), model)) == [1, 1, 2, 2]


def test_stacks_that_one_function_scans_over_are_told_apart():
    run: Any = Run  # its constructor is that of its base
    model = eqx.nn.Sequential([run(4), run(4)])
    static = eqx.filter(Stacked(4).blocks, eqx.is_array, inverse=True)

    def step(h, own):
        return eqx.combine(own, static)(h), None

    def fun(model, x):
        for run in model.layers:
            x, _ = jax.lax.scan(step, x, eqx.filter(run.blocks, eqx.is_array))
        return jnp.mean(x**2)

    split = jaxpp.split_stages(
        lambda model, x: jnp.mean(jax.vmap(lambda x: fun(model, x))(x)),
        2,
        whole=["layers.0.blocks", "layers.1.blocks"],
    )
    assert layers_of(split, model) == [4, 4]
    text = jax.jit(lambda x: split(model, x)).lower(X).as_text(debug_info=True)
    assert "layers.0.blocks" in text and "jaxpp_call" not in text


class Deep(eqx.Module):
    """A layer that has a list of small modules of one class, too."""

    norms: list[eqx.nn.LayerNorm]
    block: Block

    def __init__(self, key):
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.block = Block(key)

    def __call__(self, x, *, key=None):
        return self.norms[1](self.block(self.norms[0](x)))


def test_a_list_of_small_modules_inside_layers_is_no_list_of_layers():
    model = eqx.nn.Sequential([Deep(k) for k in jax.random.split(jax.random.key(3), 5)])
    assert sorted(layers_of(jaxpp.split_stages(loss, 4), model)) == [1, 1, 1, 2]
    assert layers_of(jaxpp.split_stages(loss, 3, balance="layers"), model) == [1, 2, 2]


@pytest.mark.parametrize("name", ["scopes", "linen"])
def test_more_stages_than_places_between_layers_are_an_error_with_the_way_out(name):
    fun, model = MODELS[name](3)
    with pytest.raises(ValueError, match=r"10 stages need .* 3 layers .*whole=\(\)"):
        jaxpp.split_stages(fun, 10)(model, X)
    with pytest.raises(ValueError, match="4 stages need a layer each, .* has 3; ask for at most 3"):
        jaxpp.split_stages(fun, 4, balance="layers")(model, X)
    assert_gradient(jaxpp.split_stages(fun, 10, whole=()), fun, model)


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (3, 2)])
def test_layers_that_nothing_tells_apart_are_shared_out_evenly(layers, stages):
    def fun(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = list(jax.random.normal(jax.random.key(4), (layers, WIDTH, WIDTH)))
    split = jaxpp.split_stages(fun, stages)
    assert sorted(layers_of(split, weights)) == [0.5] * (stages - 1) + [1]
    assert_gradient(split, fun, weights)


def test_a_name_with_dots_or_slashes_is_the_same(primitives_of):
    fun, model = linen(4)
    for at in (["LinenNet.LinenBlock_2"], ["LinenNet/LinenBlock_2"], ["LinenBlock_2"]):
        names = primitives_of(jaxpp.split_stages(fun, at=at), model, X)
        assert [n.count("dot_general") for n in names] == [4, 4]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("LinenNet.LinenBlok_2", "LinenNet.LinenBlock_2"), ("LinenBlock2", "LinenBlock_2")],
)
def test_the_error_for_an_unknown_scope_names_the_nearest(wrong, right):
    fun, model = linen(4)
    with pytest.raises(ValueError, match=rf"the nearest is '{right}'"):
        jaxpp.split_stages(fun, at=[wrong])(model, X)


def test_the_error_for_an_unknown_module_names_the_nearest():
    with pytest.raises(ValueError, match=r"the nearest is 'blocks.1'\)"):
        jaxpp.split_stages(loss, at=["block.1"])(Net(3), X)
    with pytest.raises(ValueError, match=r"'block.2': .*; the nearest is 'blocks.2'\.$"):
        jaxpp.split_stages(loss, at=["blocks.1", "block.2"])(Net(3), X)
