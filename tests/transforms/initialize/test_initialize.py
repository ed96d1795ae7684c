"""Deferred initialisation: each rank makes its own part of the state, with the eager values."""

import re
from collections.abc import Callable

import chex
import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp._program import Free, Run, Wait
from jaxpp.transforms.initialize import _initialize
from tests.helpers import assert_same

WIDTH, VOCABULARY, DEPTH, BATCH = 6, 10, 4, 4
TOKENS = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
OPTIMIZER = optax.adam(1e-2)


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    activation: Callable

    def __init__(self, key):
        # XLA rounds a product and a quotient by constants in another way where it may fuse them.
        self.weight = jax.random.normal(key, (WIDTH, WIDTH)) * 0.7 / 3.0
        self.bias = jnp.zeros(WIDTH)
        self.activation = jnp.tanh

    def __call__(self, x):
        return self.activation(x @ self.weight + self.bias)


class Model(eqx.Module):
    embedding: jax.Array
    layers: list[Layer]
    name: str

    def __init__(self, key):
        ends, *layers = jax.random.split(key, DEPTH + 1)
        self.embedding = jax.random.truncated_normal(ends, -2.0, 2.0, (VOCABULARY, WIDTH))
        self.layers = [Layer(k) for k in layers]
        self.name = "tied"


def loss_fn(model, tokens):
    x = model.embedding[tokens]
    for layer in model.layers:
        x = layer(x)
    logits = x @ model.embedding.T
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def make_state(key):
    model = Model(key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array)), jnp.zeros((), jnp.int32)


def placed(mesh=None, *, stages=2, at=None):
    staged = jaxpp.wrap_forward(
        jaxpp.split_stages(loss_fn, at=at) if at else jaxpp.split_stages(loss_fn, stages)
    )
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(model, opt_state, count, tokens):
        loss, grads = grad_fn(model, tokens)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, count + 1, loss

    return jaxpp.place(train_step, mesh, donate_argnums=(0, 1, 2))


CUTS = {
    "one": {"stages": 1},
    "two": {"stages": 2},
    "four": {"stages": 4},
    "uneven": {"at": ["layers.1"]},
}


@pytest.fixture(scope="module", params=CUTS)
def initialized(request):
    """A step, and the state that it has initialised."""
    step = placed(**CUTS[request.param])
    return step, step.initialize(make_state, jax.random.key(3), rest=(TOKENS,))


# ---- the law ------------------------------------------------------------------------------------


def test_values_are_those_of_the_function(initialized):
    assert_same(initialized[1], make_state(jax.random.key(3)))


def test_arrays_are_where_the_step_reads_them(initialized):
    step, state = initialized
    compiled = step.lower(*state, TOKENS).compile()
    places = zip(
        *(jax.tree.leaves(t, is_leaf=lambda x: x is None)
          for t in (state, compiled.input_shardings[:3])),
        strict=True,
    )  # fmt: skip
    for x, sharding in places:
        if eqx.is_array(x):
            assert x.sharding == sharding
    tied = state[0].embedding.sharding.device_set
    assert len(tied) == min(2, len(step.programs))  # the first and the last rank


def test_each_array_has_its_own_memory(initialized):
    _, state = initialized
    shards = [
        s.data for x in jax.tree.leaves(state) if eqx.is_array(x) for s in x.addressable_shards
    ]
    assert len({s.unsafe_buffer_pointer() for s in shards}) == len(shards)


def test_the_step_takes_them_and_is_compiled_once(initialized):
    step, state = initialized
    copies = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, state)
    known = list(step._cache)
    *_, count, loss = step(*copies, jnp.arange(BATCH))
    assert step._cache == known
    assert count == 1 and np.isfinite(loss)


def test_ranks_that_share_a_device_make_what_each_reads():
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    step = placed(mesh)
    state = step.initialize(make_state, jax.random.key(5), rest=(TOKENS,))
    assert_same(state, make_state(jax.random.key(5)))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_any_kind_of_key_and_of_function(make):
    """Jitted functions, arrays that are closed over, arguments handed through, shared arrays."""
    table = jnp.arange(6.0)

    @jax.jit
    def pair(key):
        weight = jax.random.uniform(key, (3, 2), minval=-0.1, maxval=0.3)
        return {"w": weight, "double": 2.0 * weight + 0.5}

    def init_fn(key, scale, *, bias=0.25):
        half = jax.random.normal(key, (4,), jnp.bfloat16) * scale
        return {
            **pair(key), "half": half, "same": half, "table": table, "scale": scale, "key": key,
            "number": jnp.asarray(2.0), "literal": jnp.float32(bias), "name": "a static leaf",
            "mean": jax.nn.softplus(table) * 3.0 + 0.1,
        }  # fmt: skip

    step = jaxpp.place(lambda state, x: (state["w"].sum() + x, state["double"]))
    args = make(7), jnp.float32(0.3)
    got = step.initialize(init_fn, *args, rest=(jnp.float32(0),))
    want = init_fn(*args)
    data = lambda s: {**s, "key": jax.random.key_data(s["key"])}  # noqa: E731
    assert_same(data(got), data(want))
    step(got, jnp.float32(1))


class StackedModel(eqx.Module):
    embedding: jax.Array
    layers: Layer

    def __init__(self, key):
        ends, layers = jax.random.split(key)
        self.embedding = jax.random.normal(ends, (VOCABULARY, WIDTH))
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(layers, 3))


@pytest.mark.more
def test_layers_of_a_stack_are_made_by_their_ranks():
    """Two ranks and three layers: no rank makes an array of all of them."""

    def loss_fn(model, tokens):
        x = model.embedding[tokens]
        arrays, static = eqx.partition(model.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), x, arrays)
        return jnp.mean((x @ model.embedding.T) ** 2)

    def init_fn(key):
        model = StackedModel(key)
        return model, jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, 2))
    grad_fn = jaxpp.microbatch(eqx.filter_grad(staged), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(model, momentum, tokens):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grad_fn(model, tokens))
        return eqx.apply_updates(model, momentum), momentum

    step = jaxpp.place(train_step, donate_argnums=(0, 1))
    state = step.initialize(init_fn, jax.random.key(1), rest=(TOKENS,))
    assert_same(state, init_fn(jax.random.key(1)))
    rows = [[p.shape[0] for p in x.layers.weight.parts] for x in state]
    assert rows[0] == rows[1] and sorted(rows[0]) == [1, 2]
    step(*state, jnp.arange(BATCH))


# ---- no more than a rank's share ----------------------------------------------------------------


def peak_of(bundle, rank):
    """The most bytes that a rank's program holds at a time, and the bytes of its results."""
    program = bundle.programs[rank]
    size = {slot: bundle.arguments[n].aval.size * 4 for n, slot in program.inputs}
    live, peak = dict(size), 0
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            results = bundle.computations[instruction.computation].jaxpr.jaxpr.outvars
            for slot, v in zip(instruction.outputs, results, strict=True):
                live[slot] = v.aval.size * getattr(v.aval.dtype, "itemsize", 8)
            peak = max(peak, sum(live.values()))
        elif isinstance(instruction, Free):
            for slot in instruction.slots:
                live.pop(slot)
    return peak, sum(live[slot] for _, slot in program.outputs)


def test_a_rank_holds_its_share_and_little_else():
    """At any time: its share, and what making one array takes."""

    def init_fn(key):
        weights = [jax.random.normal(k, (50, 50)) / 7.0 for k in jax.random.split(key, 16)]
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, 4))
    grad_fn = jaxpp.microbatch(jax.grad(staged), 2)
    step = jaxpp.place(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()))
    traced = _initialize.trace_initializer(init_fn, (jax.random.key(0),))
    state = _initialize.first_arguments(traced)
    lowered = step.lower(*state, jax.ShapeDtypeStruct((2, 50), jnp.bfloat16))
    bundle = _initialize.lower_initializer(traced, lowered.bundle, [""])
    array = 50 * 50 * 2
    for rank in range(4):
        peak, share = peak_of(bundle, rank)
        assert share == 4 * array
        # An array is waited for before the next but one is dispatched.
        assert sum(isinstance(i, Wait) for i in bundle.programs[rank].instructions) == 4 - 1
        assert peak <= share + 4 * array + 1000  # two float32 arrays at a time, and keys
    # Each operation once (but JAX 0.12 unstacks keys, and each rank keeps other ones of them).
    assert len(bundle.computations) <= 8


def test_an_operation_takes_little_more_than_its_result():
    """What XLA needs beside results, by its own account: at most a few times the largest array."""
    step = jaxpp.place(lambda model: jax.tree.map(jnp.negative, model))

    def init_fn(key):
        return [jax.random.normal(key, (300, 200)) / 3.0, jax.random.uniform(key, (300, 200))]

    traced = _initialize.trace_initializer(init_fn, (jax.random.key(0),))
    lowered = step.lower(*_initialize.first_arguments(traced))
    bundle = _initialize.lower_initializer(traced, lowered.bundle, [""])
    for computation in bundle.computations:
        avals = [v.aval for v in computation.jaxpr.jaxpr.invars]
        run = jex.jaxpr_as_fun(computation.jaxpr)
        memory = jax.jit(run).lower(*avals).compile().memory_analysis()
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= 5 * 300 * 200 * 4


# ---- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    def step(state, x):
        return jax.tree.map(lambda w: w + x, state)

    state = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": [jnp.zeros(3, jnp.int32)]}
    return jaxpp.place(step).lower(state, jnp.float32(1)).compile()


def test_a_compiled_step_initializes_what_it_takes(compiled):
    state = compiled.initialize(lambda n: {"a": jnp.ones(2), "b": [jnp.full(3, n)]}, jnp.int32(4))
    chex.assert_trees_all_equal(state, {"a": jnp.ones(2), "b": [jnp.full(3, 4)]})


@pytest.mark.parametrize(
    ("init_fn", "message"),
    [
        (lambda n: {"a": jnp.ones(3), "b": [n]}, "args[0]['a'] is float32[3], not float32[2]"),
        (lambda n: {"a": jnp.ones(2), "b": [jnp.ones(3)]}, "['b'][0] is float32[3], not int32[3]"),
        (lambda n: {"a": jnp.ones(2), "b": []}, "args[0]['b'][0] is missing"),
        (lambda n: {"a": jnp.ones(2), "b": [n, n]}, "args[0]['b'][1] is one too many"),
        (lambda n: {"a": 1.5, "b": [n]}, "args[0]['a'] is float32[], weakly typed, not float32[2]"),
        (lambda n: {"a": jnp.ones(2), "b": (n,)}, "args[0] has another structure"),
        (lambda n: ({}, {}, {}), "a tuple of 3, but the step has 2 arguments"),
    ],
)  # fmt: skip
def test_what_the_step_does_not_take_is_named(compiled, init_fn, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        compiled.initialize(init_fn, jnp.zeros(3, jnp.int32))


def test_effects_are_refused(compiled):
    def init_fn():
        jax.debug.print("hello")
        return {"a": jnp.ones(2), "b": [jnp.zeros(3, jnp.int32)]}

    with pytest.raises(ValueError, match=r"debug_\w+` at .*test_initialize.py:\d+ has an effect"):
        compiled.initialize(init_fn)
