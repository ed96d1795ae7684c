"""Scans over stacked layers, cut between their iterations."""

import itertools
from collections.abc import Callable

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp import jaxprs, testing
from jaxpp.schedules import GPipe, Interleaved1F1B, Kind, OneFOneB, ZeroBubbleH1
from jaxpp.transforms.stacked import _scans
from jaxpp.transforms.stages import _cuts
from jaxpp.transforms.tasks import _loop

WIDTH, LAYERS = 4, 7
X = jax.random.normal(jax.random.key(1), (4, 3, WIDTH))


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape) / 2


PARAMS = {
    "blocks": {"w": normal(2, LAYERS, WIDTH, WIDTH), "b": normal(3, LAYERS, WIDTH)},
    "embed": normal(4, WIDTH, WIDTH),
}


# ---- programs -----------------------------------------------------------------------------------


def layer(h, block):
    return jnp.tanh(h @ block["w"] + block["b"]), None


def with_scan(scan):
    """A loss whose middle is `scan`, between tied embeddings."""

    def loss(params, x):
        h, aux = scan(x @ params["embed"], params)
        return jnp.mean((h @ params["embed"].T) ** 2) + aux

    loss.__name__ = loss.__qualname__ = scan.__name__
    return loss


def plain(h, params):
    return jax.lax.scan(layer, h, params["blocks"])[0], 0.0


def reverse(h, params):
    return jax.lax.scan(layer, h, params["blocks"], reverse=True)[0], 0.0


def unrolled(h, params):
    return jax.lax.scan(layer, h, params["blocks"], unroll=3)[0], 0.0


def checkpointed_layer(h, params):
    return jax.lax.scan(jax.checkpoint(layer), h, params["blocks"])[0], 0.0


def checkpointed_scan(h, params):
    return jax.checkpoint(plain)(h, params)


def checkpointed_around(h, params):
    @jax.checkpoint
    def middle(h, params):
        h, _ = jax.jit(plain)(jnp.sin(h), params)
        return jnp.cos(h) * params["embed"][0]

    return middle(h, params), 0.0


def twice_checkpointed(h, params):
    @jax.checkpoint
    def middle(h, params):
        return jax.checkpoint(plain)(jnp.sin(h), params)

    return middle(h, params)


def jitted(h, params):
    return jax.jit(plain)(h, params)


def carrying(h, params):
    """A counter, a key that is split, a sum over layers, and a scale that no layer touches."""

    def step(carry, block):
        h, count, key, total, scale = carry
        key, own = jax.random.split(key)
        h, _ = layer(h * scale, block)
        h = h + 0.1 * count * jax.random.uniform(own, h.shape)
        return (h, count + 1, key, total + jnp.mean(h**2) * count, scale), None

    init = h, 0, jax.random.key(5), 0.0, 1 + params["embed"][0]
    (h, count, key, total, scale), _ = jax.lax.scan(step, init, params["blocks"])
    return h * scale + jax.random.uniform(key, (WIDTH,)), total / count


def stacking(h, params):
    """Per-layer keys in, per-layer losses, activations and counts out."""

    def step(h, xs):
        block, key, raw = xs
        h, _ = layer(h, block)
        h = h * jax.random.bernoulli(key, 0.9, h.shape) + jax.random.uniform(raw, (WIDTH,))
        return h, (jnp.mean(h), h, jnp.sum(h > 0))

    keys = (
        jax.random.split(jax.random.key(6), LAYERS),
        jax.random.split(jax.random.PRNGKey(7), LAYERS),
    )
    h, (losses, hidden, counts) = jax.lax.scan(step, h, (params["blocks"], *keys))
    return h + hidden[1] * hidden[-1], jnp.sum(losses * counts)


def reversed_stacking(h, params):
    def step(h, block):
        h, _ = layer(h, block)
        return h, jnp.mean(h)

    h, losses = jax.lax.scan(step, h, params["blocks"], reverse=True)
    return h, jnp.sum(losses * jnp.arange(LAYERS))


def cast(h, params):
    """Layers in another dtype, transposed and decayed as a whole before the scan."""
    blocks = jax.tree.map(lambda x: (0.9 * x).astype(jnp.float16), params["blocks"])
    blocks["w"] = jnp.swapaxes(blocks["w"], 1, 2)
    h, _ = jax.lax.scan(layer, h.astype(jnp.float16), blocks)
    return h.astype(jnp.float32), 0.0


def made_by_rows(h, params):
    """Layers that are made of others row by row, which are read twice, before the scan."""

    def made(x):
        rows = jnp.sin(x.reshape(LAYERS, -1))
        return (rows * jax.lax.rsqrt(1 + jnp.sum(rows**2, 1, keepdims=True))).reshape(x.shape)

    return jax.lax.scan(layer, h, jax.tree.map(made, params["blocks"]))[0], 0.0


def listed(h, params):
    """Layers that are stacked in the program."""
    blocks = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(LAYERS)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    return jax.lax.scan(layer, h, stacked)[0], 0.0


def masked(h, params):
    """Each layer reads a constant that is computed, and the first activation."""
    scale = jnp.exp(params["embed"][1])

    def step(c, block):
        return layer(c * scale + h, block)

    return jax.lax.scan(step, h, params["blocks"])[0], 0.0


def encoder_decoder(h, params):
    """The second scan goes over the layers, and over what the first has stacked, backwards."""

    def encode(h, block):
        h, _ = layer(h, block)
        return h, h

    def decode(h, xs):
        block, skip = xs
        return layer(h + skip, block)

    first, second = (
        jax.tree.map(lambda x, k=k: x[3 * k : 3 * k + 3], params["blocks"]) for k in range(2)
    )
    h, skips = jax.lax.scan(encode, h, first)
    return jax.lax.scan(decode, h, (second, skips), reverse=True)[0], 0.0


SCANS = [
    plain, reverse, unrolled, checkpointed_layer, checkpointed_scan, checkpointed_around,
    twice_checkpointed, jitted, carrying, stacking, reversed_stacking, cast, made_by_rows,
    listed, masked, encoder_decoder,
]  # fmt: skip
SLOW = [unrolled, twice_checkpointed, jitted, reversed_stacking, listed, checkpointed_scan]
SOME = [checkpointed_layer, carrying, stacking]


def value_and_grad(fun):
    return jax.jit(jax.value_and_grad(fun))


def scans_of(fun, *args):
    """The scans of a program in order, also those inside checkpoints."""
    flat = jaxprs.inline(jax.make_jaxpr(fun)(*args), lambda e: True)
    return [e for e in flat.eqns if e.primitive.name == "scan"]


def lengths(fun, *args):
    return [e.params["length"] for e in scans_of(fun, *args)]


# ---- laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scan", [pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s for s in SCANS]
)
def test_a_cut_scan_gives_the_values_and_the_gradient_of_the_whole(scan):
    loss = with_scan(scan)
    cut = jaxpp.split_stages(loss, 4)
    assert len(scans_of(cut, PARAMS, X)) > len(scans_of(loss, PARAMS, X))
    got, want = value_and_grad(cut)(PARAMS, X), value_and_grad(loss)(PARAMS, X)
    if scan is cast:
        chex.assert_trees_all_close(got, want, rtol=2e-3, atol=1e-5)
    else:
        chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "scan", [checkpointed_layer, *(pytest.param(s, marks=pytest.mark.slow) for s in SOME[1:])]
)
def test_vmap_commutes_with_the_cut(scan):
    loss = with_scan(scan)
    axes = {"blocks": None, "embed": 0}
    params = PARAMS | {"embed": jnp.stack([PARAMS["embed"], normal(8, WIDTH, WIDTH)])}
    got = jax.jit(jax.vmap(jaxpp.split_stages(loss, 3), (axes, None)))(params, X)
    want = jax.jit(jax.vmap(loss, (axes, None)))(params, X)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


@pytest.mark.parametrize("scan", SCANS)
def test_a_stage_reads_its_own_layers_alone(scan):
    """What reads a stacked parameter is slices that do not overlap, nothing is read whole."""
    jaxpr = jax.make_jaxpr(jaxpp.split_stages(with_scan(scan), 4))(PARAMS, X)
    for stack in jaxpr.jaxpr.invars[:2]:
        readers = [e for e in jaxpr.eqns if stack in e.invars]
        assert {e.primitive.name for e in readers} == {"slice"}
        rows = [
            set(range(e.params["start_indices"][0], e.params["limit_indices"][0])) for e in readers
        ]
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(rows, 2))
        assert len(set().union(*rows)) == (6 if scan is encoder_decoder else LAYERS)


@pytest.mark.parametrize("num_stages", [2, 4, LAYERS])
def test_layers_that_do_not_divide_evenly_are_balanced(num_stages):
    found = lengths(
        jaxpp.split_stages(lambda p, x: jnp.mean(plain(x, p)[0]), num_stages), PARAMS, X
    )
    assert sum(found) == LAYERS
    assert len(found) == num_stages
    assert max(found) == -(-LAYERS // num_stages)


def test_what_no_iteration_touches_goes_to_each_stage_from_where_it_is_made():
    def scan(h, params):
        def step(carry, block):
            return (layer(carry[0], block)[0] * carry[1], carry[1]), None

        step = jax.checkpoint(step)  # without it JAX itself makes it a constant
        (h, kept), _ = jax.lax.scan(step, (h, jnp.sin(h)), params["blocks"])
        return h * kept, 0.0

    jaxpr = jax.make_jaxpr(jaxpp.split_stages(with_scan(scan), 3))(PARAMS, X)
    parts = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    results = [e.outvars[1] for e in parts]
    assert len(results) == 3
    assert not any(v in e.invars for e in jaxpr.eqns for v in results)


def test_balance_counts_an_iteration_as_its_body():
    """A cost function sees scans of one iteration."""
    seen = set()

    def cost(eqn):
        if eqn.primitive.name == "scan":
            seen.add(eqn.params["length"])
        return 1.0

    jax.make_jaxpr(jaxpp.split_stages(with_scan(plain), 2, balance=cost))(PARAMS, X)
    assert seen == {1}


def test_a_scan_over_data_is_not_cut():
    """Time steps share their weights: a cut between them would put these on all ranks."""

    def loss(w, x):
        h = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0]
        return jnp.mean(jnp.sin(h @ w))

    assert lengths(jaxpp.split_stages(loss, 2), PARAMS["embed"], X) == [4]


def test_a_whole_module_or_scope_is_not_cut():
    def loss(params, x):
        with jax.named_scope("layers"):
            h, _ = plain(x, params)
        return jnp.mean(jnp.tanh(h @ params["embed"]) @ params["embed"])

    cut = jaxpp.split_stages(loss, 2, whole=["layers"])
    assert lengths(cut, PARAMS, X) == [LAYERS]


# ---- Equinox modules, paths ---------------------------------------------------------------------


class Block(eqx.Module):
    linear: eqx.nn.Linear
    scale: jax.Array

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.scale = jax.random.normal(key, (WIDTH,))

    def __call__(self, h):
        return h + jnp.tanh(jax.vmap(jax.vmap(self.linear))(h)) * self.scale


class Model(eqx.Module):
    embed: eqx.nn.Linear
    blocks: Block
    head: eqx.nn.Linear
    remat: bool = eqx.field(static=True)

    def __init__(self, layers=LAYERS, remat=False):
        keys = jax.random.split(jax.random.key(9), layers)
        self.embed = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
        self.blocks = eqx.filter_vmap(Block)(keys)
        self.head = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(10))
        self.remat = remat

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def step(h, own):
            return eqx.combine(own, static)(h), None

        h = jax.vmap(jax.vmap(self.embed))(x)
        h, _ = jax.lax.scan(jax.checkpoint(step) if self.remat else step, h, arrays)
        return jax.vmap(jax.vmap(self.head))(h)


def model_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.more
@pytest.mark.parametrize(
    ("at", "found"),
    [
        (["blocks.2", "blocks.4"], [2, 2, 3]),
        pytest.param(["blocks[2]"], [2, 5], marks=pytest.mark.slow),
        (["blocks", "blocks[6]", "head"], [6, 1]),
        pytest.param(["blocks.0", "head"], [7], marks=pytest.mark.slow),
        pytest.param(["blocks.1", "blocks.6"], [1, 5, 1], marks=pytest.mark.slow),
    ],
    ids=["dots", "brackets", "stack", "first", "uneven"],
)
def test_a_path_names_a_layer_of_a_stack(at, found):
    model = Model(remat=len(at) == 2)
    cut = jaxpp.split_stages(model_loss, len(at) + 1, at=at)
    arrays, static = eqx.partition(model, eqx.is_array)
    assert lengths(lambda a, x: cut(eqx.combine(a, static), x), arrays, X) == found
    got = eqx.filter_jit(eqx.filter_value_and_grad(cut))(model, X)
    want = eqx.filter_jit(eqx.filter_value_and_grad(model_loss))(model, X)
    chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_path_names_the_layer_that_a_reversed_scan_runs_there():
    class Backwards(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, self.w, reverse=True)[0]

    model = Backwards(PARAMS["blocks"]["w"])
    cut = jaxpp.split_stages(model_loss, at=["w.5", "w.2"])
    assert lengths(lambda w, x: cut(Backwards(w), x), model.w, X) == [1, 3, 3]
    chex.assert_trees_all_close(cut(model, X), model_loss(model, X), rtol=1e-6)


def test_a_scope_with_an_index_names_a_layer_of_the_scan_under_it():
    def loss(params, x):
        with jax.named_scope("layers"):
            h, _ = checkpointed_scan(x @ params["embed"], params)
        with jax.named_scope("head"):
            return jnp.mean((h @ params["embed"].T) ** 2)

    cut = jaxpp.split_stages(loss, at=["layers[2]", "layers.3", "head"])
    assert lengths(cut, PARAMS, X) == [2, 1, 4]
    chex.assert_trees_all_close(cut(PARAMS, X), loss(PARAMS, X), rtol=1e-6)


@pytest.mark.more
def test_a_layer_of_a_flax_scan_is_named_by_the_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return jnp.tanh(nn.Dense(WIDTH)(h)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Layer),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            h, _ = layers(name="layers")(nn.Dense(WIDTH)(x), None)
            return nn.Dense(WIDTH)(h)

    params = Net().init(jax.random.key(11), X)

    def loss(params, x):
        return jnp.mean(jnp.asarray(Net().apply(params, x)) ** 2)

    assert lengths(jaxpp.split_stages(loss, 3), params, X) == [2, 3, 2]
    cut = jaxpp.split_stages(loss, at=["layers.1", "layers[4]"])
    assert lengths(cut, params, X) == [1, 3, 3]
    chex.assert_trees_all_close(cut(params, X), loss(params, X), rtol=1e-6)


def test_a_stack_named_whole_is_not_cut():
    model = Model()
    cut = jaxpp.split_stages(model_loss, 2, whole=["blocks"])
    arrays, static = eqx.partition(model, eqx.is_array)
    assert lengths(lambda a, x: cut(eqx.combine(a, static), x), arrays, X) == [LAYERS]


# ---- bad input ----------------------------------------------------------------------------------


class Stack(eqx.Module):
    w: jax.Array
    run: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.run(self.w, x)


def indexed(w, x):
    return jax.lax.fori_loop(0, len(w), lambda i, h: jnp.tanh(h @ w[(3 * i) % len(w)]), x)


def carried(w, x):
    def step(carry, i):
        h, w = carry
        return (jnp.tanh(h @ w[i]), w * 0.9), None

    return jax.lax.scan(step, (x, w), jnp.arange(len(w)))[0][0]


def in_while(w, x):
    def body(carry):
        h, n = carry
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0], n + 1

    return jax.lax.while_loop(lambda c: c[1] < 3, body, (x, 0))[0]


def python_loop(w, x):
    for own in w:
        x = jnp.tanh(x @ own)
    return x


def scanned(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


@pytest.mark.parametrize(
    ("run", "name", "message"),
    [
        (indexed, "w.2", r"inside 'w': each iteration of the `scan` at \S*test_scans.py:\d+ reads"),
        (carried, "w.2", r"`scan` at \S*test_scans.py:\d+ reads all of it, as carry 1"),
        (in_while, "w.2", r"it is used inside a `while` at \S*test_scans.py:\d+, whose body"),
        (python_loop, "w.2", "no lax.scan goes over its arrays"),
        (scanned, "w.7", r"'w' has 7 layers; the last is 'w.6'"),
        (lambda w, x: scanned(w, scanned(w, x)), "w.2", "not unique: 2 scans go over its layers"),
        (lambda w, x: scanned(w[:3], x), "w.4", r"scan at \S*test_scans.py:\d+ has 3 layers"),
        (lambda w, x: scanned(w[:1], x), "w.0", r"`scan` at \S*py:\d+ over it has one iteration"),
    ],
    ids=["constant", "carry", "while", "loop", "index", "twice", "slice", "one"],
)
def test_a_layer_that_cannot_be_cut_at_is_refused(run, name, message):
    model = Stack(PARAMS["blocks"]["w"], run)
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(model_loss, at=[name])(model, X)


def test_layers_out_of_order_are_refused():
    with pytest.raises(ValueError, match="out of order"):
        jaxpp.split_stages(model_loss, at=["blocks.4", "blocks.2"])(Model(), X)


def test_two_cuts_at_one_layer_are_refused():
    with pytest.raises(ValueError, match="at the same layer"):
        jaxpp.split_stages(model_loss, at=["blocks", "blocks.0"])(Model(), X)


def test_a_mark_inside_a_scan_is_refused_with_the_way_out():
    def scan(h, params):
        def step(h, block):
            return layer(jaxpp.pipeline_enter_stage(h), block)

        return jax.lax.scan(step, h, params["blocks"])[0], 0.0

    with pytest.raises(ValueError, match=r"test_scans.py:\d+.* 7 iterations.*num_stages"):
        jaxpp.split_stages(with_scan(scan))(PARAMS, X)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (indexed, r"each iteration of the `scan` at \S*test_scans.py:\d+ reads all of a parameter"),
        (in_while, r"a parameter is used inside a `while` at \S*test_scans.py:\d+"),
    ],
)
def test_the_loop_that_is_in_the_way_of_a_balanced_cut_is_named(run, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(lambda w, x: jnp.sum(run(w, x)), 6)(PARAMS["blocks"]["w"], X)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="places to cut"):
        jaxpp.split_stages(with_scan(plain), 50)(PARAMS, X)


# ---- schedules ----------------------------------------------------------------------------------


def tasks_of(loss, schedule):
    """The jaxprs of the tasks, by kind and stage."""
    fun = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(jaxpp.split_stages(loss, 3))), 2)
    jaxpr = jax.make_jaxpr(jaxpp.schedule(fun, schedule))(PARAMS, X)
    (loop,) = (e for e in jaxpr.eqns if _loop.is_loop(e))
    return {t.params["key"]: t.params["jaxpr"] for t in loop.params["body"].eqns}


def microbatched(loss, num=2):
    return jaxpp.microbatch(jax.value_and_grad(loss), num)


@pytest.mark.more
@pytest.mark.parametrize(
    ("scan", "schedule"),
    [
        (checkpointed_layer, ZeroBubbleH1()),
        (carrying, ZeroBubbleH1()),
        (stacking, OneFOneB()),
        pytest.param(checkpointed_layer, OneFOneB(), marks=pytest.mark.slow),
        pytest.param(carrying, OneFOneB(), marks=pytest.mark.slow),
        pytest.param(stacking, ZeroBubbleH1(), marks=pytest.mark.slow),
    ],
)
def test_a_scheduled_cut_gives_the_gradient(scan, schedule):
    loss = with_scan(scan)
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, 3))
    got = jax.jit(jaxpp.schedule(microbatched(staged), schedule))(PARAMS, X)
    want = jax.jit(microbatched(loss))(PARAMS, X)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("scan", [plain, checkpointed_layer])
def test_the_backward_of_layers_is_a_scan_of_input_gradients_and_one_without_carry(scan):
    tasks = tasks_of(with_scan(scan), ZeroBubbleH1())
    (inputs,) = (e for e in tasks[Kind.I, 1].eqns if e.primitive.name == "scan")
    (weights,) = (e for e in tasks[Kind.W, 1].eqns if e.primitive.name == "scan")
    body = inputs.params["jaxpr"].jaxpr
    carries = sum(
        o.aval.ndim == i.aval.ndim for o, i in zip(inputs.outvars, body.outvars, strict=True)
    )
    assert carries == 1
    inner = weights.params["jaxpr"].jaxpr
    assert all(
        o.aval.ndim > i.aval.ndim for o, i in zip(weights.outvars, inner.outvars, strict=True)
    )


def test_the_kept_for_weight_gradients_is_two_activations_a_layer():
    """The input of each layer, and the cotangent of what its weights were multiplied with."""
    tasks = tasks_of(with_scan(plain), ZeroBubbleH1())
    (weights,) = (e for e in tasks[Kind.W, 1].eqns if e.primitive.name == "scan")
    length = weights.params["length"]
    assert [v.aval.shape for v in weights.invars] == [(length, 2, *X.shape[1:])] * 2


def test_a_product_is_kept_and_not_its_factors():
    """The first half recomputes both factors, and only their product is read by the second."""

    def gated(h, params):
        def step(h, block):
            return (jnp.sin(h) * jnp.cos(2 * h)) @ block["w"], None

        return jax.lax.scan(jax.checkpoint(step), h, params["blocks"])[0], 0.0

    tasks = tasks_of(with_scan(gated), ZeroBubbleH1())
    (weights,) = (e for e in tasks[Kind.W, 1].eqns if e.primitive.name == "scan")
    assert len(weights.invars) == 2  # and the cotangent of what the weights are multiplied with


@pytest.mark.parametrize(
    ("schedule", "num_stages", "at"),
    [
        (ZeroBubbleH1(), None, ["blocks.2"]),
        (Interleaved1F1B(stages_per_rank=2), 4, None),
        pytest.param(OneFOneB(), 2, None, marks=pytest.mark.slow),
        pytest.param(GPipe(), None, ["blocks[4]"], marks=pytest.mark.slow),
    ],
    ids=["zb", "interleaved", "1f1b", "gpipe"],
)
def test_a_placed_step_matches_the_single_device(schedule, num_stages, at):
    staged = jaxpp.wrap_forward(jaxpp.split_stages(model_loss, num_stages, at=at))
    grad = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 2)

    def train(grad):
        def step(model, x):
            loss, grads = grad(model, x)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

        return step

    mesh = jaxpp.MpmdMesh((2,), ("mpmd",))
    step = jaxpp.place(train(jaxpp.schedule(grad, schedule)), mesh, donate_argnums=0)
    whole = jaxpp.microbatch(eqx.filter_value_and_grad(model_loss), 2)
    testing.assert_matches_single_device(step, train(whole), Model(remat=True), X)
    assert testing.count_sends(step, "gathered") == testing.count_sends(step, "argument") == 0


# ---- the pass alone -----------------------------------------------------------------------------


def test_a_pass_without_wishes_changes_nothing():
    flat, _ = _cuts.open_program(jax.make_jaxpr(with_scan(checkpointed_scan))(PARAMS, X))
    divided = _scans.divide_scans(flat, flat.jaxpr.invars[:3])
    assert jaxprs.structure(divided.jaxpr) == jaxprs.structure(flat)
    scans = _scans.layer_scans(flat, flat.jaxpr.invars[:3])
    assert [s.length for s in scans] == [LAYERS]
