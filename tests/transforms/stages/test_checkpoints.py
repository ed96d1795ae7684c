"""Cuts inside `jax.checkpoint`: each stage has a checkpoint of its own of what was in it."""

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp import jaxprs
from jaxpp.transforms.stages import _cuts, _stages

enter = jaxpp.pipeline_enter_stage
WS = list(jax.random.normal(jax.random.key(0), (4, 8, 8)) / 2)
X = jax.random.normal(jax.random.key(1), (3, 8))


def forward(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def whole(ws, x):
    return jax.checkpoint(forward)(ws, x)


def under_jit(ws, x):
    return jax.jit(jax.checkpoint(jax.jit(forward)))(ws, x)


def nested(ws, x):
    @jax.checkpoint
    def outer(ws, x):
        x = jnp.sin(x)
        return jax.checkpoint(forward)(ws, x) + jnp.mean(jnp.cos(x))

    return outer(ws, x)


def middle(ws, x):
    x = jnp.tanh(x @ ws[0])
    return jnp.mean(jax.checkpoint(lambda ws, x: forward(ws, x) + x)(ws[1:], x) ** 2)


def cast_inside(ws, x):
    def half(ws, x):
        return forward([w.astype(jnp.float16) for w in ws], x.astype(jnp.float16))

    return jax.checkpoint(half)(ws, x).astype(jnp.float32)


def masked_inside(ws, x):
    """The mask depends on nothing: each stage makes it anew, inside its checkpoint."""

    def masked(ws, x):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        return forward([jnp.where(mask, w, 0) for w in ws], x)

    return jax.checkpoint(masked)(ws, x)


def scanned(ws, x):
    @jax.checkpoint
    def layers(ws, x):
        scale = jnp.exp(jnp.mean(x))
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.sin(x), jnp.stack(ws))
        return jnp.cos(x) * scale

    return jnp.mean(layers(ws, x) ** 2)


PROGRAMS = [whole, under_jit, nested, middle, cast_inside, masked_inside, scanned]


def parts_of(fun, *args):
    stages = _stages.read_stages(jaxprs.trace(fun, args).jaxpr)
    return stages.parts


def products(eqns):
    """How many products there are, also inside calls and loops."""
    loops = [e.params["length"] if e.primitive.name == "scan" else 1 for e in eqns]
    inner = [sum(products(sub.eqns) for sub in jaxprs.sub_jaxprs(e)) for e in eqns]
    own = [e.primitive.name == "dot_general" for e in eqns]
    return sum(o + n * i for o, n, i in zip(own, loops, inner, strict=True))


def assert_gradient(split, plain, *args):
    got = jax.jit(jax.value_and_grad(split))(*args)
    want = jax.jit(jax.value_and_grad(plain))(*args)
    tolerance = 1e-2 if plain is cast_inside else 1e-4
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance / 100)


# ---- automatic cuts -----------------------------------------------------------------------------


@pytest.mark.parametrize("fun", PROGRAMS)
def test_the_layers_in_a_checkpoint_are_shared_out(fun):
    split = jaxpp.split_stages(fun, 2)
    parts = parts_of(split, WS, X)
    assert [products(part.jaxpr.eqns) for part in parts] == [2, 2]
    # All that the stages compute of it is still in a checkpoint.
    assert not any(e.primitive.name == "dot_general" for e in parts[1].jaxpr.eqns)
    assert_gradient(split, fun, WS, X)


@pytest.mark.parametrize("fun", [whole, cast_inside, masked_inside])
def test_a_stage_reads_the_weights_of_its_own_part_of_a_checkpoint(fun, arguments_of):
    w = WS[0].shape
    assert arguments_of(jaxpp.split_stages(fun, 2), WS, X) == [[X.shape, w, w], [w, w]]


def test_what_depends_on_nothing_is_made_inside_each_checkpoint(edges_of):
    split = jaxpp.split_stages(masked_inside, 2)
    assert edges_of(split, WS, X) == [(0, 1, X.shape)]
    for part in parts_of(split, WS, X):
        # The weights that are kept for the backward pass are those that the stage is given.
        checkpoints = [e for e in part.jaxpr.eqns if jaxprs.is_checkpoint(e)]
        assert all(v in part.inputs for e in checkpoints for v in jaxprs.variables(e.invars))


def blocks(ws, x, wrap=jax.checkpoint):
    for w in ws:
        x = wrap(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w) @ w.T))(x, w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_checkpoint_around_a_block_of_several_is_not_cut(num_stages):
    split = jaxpp.split_stages(blocks, num_stages)
    found = [products(part.jaxpr.eqns) for part in parts_of(split, WS, X)]
    assert sum(found) == 8 and all(n % 2 == 0 for n in found) and max(found) - min(found) <= 2
    assert_gradient(split, blocks, WS, X)


def test_with_nothing_whole_a_checkpoint_around_a_block_may_be_cut():
    split = jaxpp.split_stages(blocks, 8, whole=())
    assert [products(part.jaxpr.eqns) for part in parts_of(split, WS, X)] == [1] * 8
    assert_gradient(split, blocks, WS, X)


def test_a_checkpoint_that_is_not_cut_stays_as_it_is():
    def fun(ws, x):
        return jax.checkpoint(nested, policy=jax.checkpoint_policies.dots_saveable)(ws, x)

    jaxpr = jax.make_jaxpr(fun)(WS, X)
    opened, checkpoints = _cuts.open_program(jaxpr)
    assert len(checkpoints) == 3
    assert not any(map(jaxprs.is_checkpoint, opened.eqns))
    closed = _stages.read_stages(opened, checkpoints).jaxpr
    assert [jaxprs.is_checkpoint(e) for e in closed.eqns] == [True]
    again, _ = _cuts.open_program(closed)
    assert jaxprs.structure(again) == jaxprs.structure(opened)


def test_a_policy_is_that_of_each_part():
    policy = jax.checkpoint_policies.dots_saveable
    split = jaxpp.split_stages(jax.checkpoint(forward, policy=policy), 2)
    jaxpr = jax.make_jaxpr(split)(WS, X)
    found = [e.params["policy"] for e in jaxpr.eqns if jaxprs.is_checkpoint(e)]
    assert found == [policy] * 2


# ---- cuts by number, by name, by mark -----------------------------------------------------------


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(eqx.Module):
    """Blocks under one checkpoint, in a list or stacked."""

    blocks: list[Block] | Block

    def __init__(self, stacked):
        keys = jax.random.split(jax.random.key(2), 4)
        self.blocks = eqx.filter_vmap(Block)(keys) if stacked else [Block(k) for k in keys]

    def __call__(self, x):
        return eqx.filter_checkpoint(Model.run)(self, x)

    def run(self, x):
        if isinstance(self.blocks, list):
            for block in self.blocks:
                x = block(x)
            return x
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda h, own: (eqx.combine(own, static)(h), None), x, arrays)[0]


def model_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize(
    ("cut", "found"),
    [
        ({"at": ["blocks.1"]}, [1, 3]),
        ({"num_stages": 4}, [1, 1, 1, 1]),
        ({"num_stages": 3, "balance": "layers"}, [1, 1, 2]),
    ],
    ids=["at", "num_stages", "layers"],
)
def test_blocks_under_one_checkpoint_are_cut_by_number(stacked, cut, found):
    model = Model(stacked)
    split = jaxpp.split_stages(model_loss, **cut)
    parts = parts_of(split, model, X)
    assert [products(part.jaxpr.eqns) for part in parts] == found
    got = eqx.filter_jit(eqx.filter_value_and_grad(split))(model, X)
    want = eqx.filter_jit(eqx.filter_value_and_grad(model_loss))(model, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


def test_a_scope_inside_a_checkpoint_opens_a_stage():
    @jax.checkpoint
    def fun(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    split = jaxpp.split_stages(fun, at=["layer_1", "layer_2"])
    assert [products(part.jaxpr.eqns) for part in parts_of(split, WS, X)] == [1, 1, 2]
    assert_gradient(split, fun, WS, X)


def marked(ws, x, prevent_cse: Any = True):
    def run(ws, x):
        h = jnp.tanh(x @ ws["a"])
        return jnp.mean((enter(h) @ ws["b"] + ws["c"]) ** 2)

    return jax.checkpoint(run, prevent_cse=prevent_cse)(ws, x)


def test_prevent_cse_of_each_operand_goes_with_it_into_the_parts():
    ws = {"a": WS[0], "b": WS[1], "c": WS[2][:1]}
    prevent_cse = ({"a": True, "b": False, "c": True}, False)

    def fun(ws, x):
        return marked(ws, x, prevent_cse)

    jaxpr = jax.make_jaxpr(jaxpp.split_stages(fun))(ws, X)
    a, b, c, x = jaxpr.jaxpr.invars
    given = {a: True, b: False, c: True, x: False}
    found = {
        v: prevents
        for e in jaxpr.eqns
        if jaxprs.is_checkpoint(e)
        for v, prevents in zip(e.invars, e.params["prevent_cse"], strict=True)
        if v in given
    }
    assert found == given
    assert_gradient(jaxpp.split_stages(fun), fun, ws, X)
    assert_gradient(jaxpp.wrap_forward(fun), fun, ws, X)


def test_a_weight_cast_in_a_checkpoint_goes_with_its_reader_behind_a_mark(arguments_of):
    @jax.checkpoint
    def fun(ws, x):
        ws = [w.astype(jnp.float16) for w in ws]
        h = enter(jnp.tanh(x @ ws[0]))
        return jnp.mean(h @ ws[1]).astype(jnp.float32)

    w = WS[0].shape
    assert arguments_of(fun, WS[:2], X) == [[X.shape, w], [w]]
    assert_gradient(jaxpp.wrap_forward(fun), fun, WS[:2], X)


def test_a_print_in_a_checkpoint_prints_in_its_stage(capfd):
    @jax.checkpoint
    def fun(ws, x):
        h = jnp.tanh(x @ ws[0])
        jax.debug.print("hidden {}", h[0, 0])
        return jnp.mean(enter(h) @ ws[1])

    def printed(fun):
        jax.block_until_ready(jax.jit(jax.grad(fun))(WS, X))
        jax.effects_barrier()
        return capfd.readouterr().out

    want = printed(fun)
    assert want.count("hidden") >= 1
    assert printed(jaxpp.wrap_forward(fun)) == want


# ---- what cannot be opened ----------------------------------------------------------------------


@jax.custom_jvp
def with_rule(ws, x):
    return forward(ws, x)


with_rule.defjvp(lambda primals, tangents: jax.jvp(forward, primals, tangents))


def on_devices(ws, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        lambda ws, x: forward(ws, x)[None],
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    return run(ws, x).sum()


def chosen(ws, x):
    return jax.lax.cond(x[0, 0] > 0, forward, forward, ws, x)


@pytest.mark.parametrize(
    ("call", "name"),
    [(with_rule, "custom_jvp_call"), (on_devices, "shard_map"), (chosen, "cond")],
    ids=["rule", "shard_map", "cond"],
)
def test_a_call_that_is_one_unit_and_has_most_of_the_work_is_named_in_a_warning(call, name):
    def fun(ws, x):
        return call(ws, jnp.tanh(x @ ws[0]))

    message = rf"the `{name}` at \S*test_checkpoints.py:\d+ has 8\d% of the work.* 0.\d+, 0.8"
    with pytest.warns(UserWarning, match=message):
        split = jaxpp.split_stages(fun, 2)
        assert_gradient(split, fun, WS, X)


def test_a_call_with_a_rule_that_is_all_of_the_work_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"0 places to cut.* the `custom_jvp_call` at \S*py:\d+"):
        jaxpp.split_stages(lambda ws, x: with_rule(ws, x), 2)(WS, X)


def test_rules_of_layers_give_no_warning(recwarn):
    def fun(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    jax.make_jaxpr(jaxpp.split_stages(fun, 4))(WS, X)
    assert not [w for w in recwarn if "split_stages" in str(w.message)]
