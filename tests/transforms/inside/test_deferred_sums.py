"""Sums over the batch are made once a step: with the same values, and without collectives."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import jaxpp
from jaxpp import _jaxprs
from jaxpp._specs import partition_spec, replicated
from jaxpp.runtime.executor import _collectives
from jaxpp.transforms.inside import propagation, replicas
from jaxpp.transforms.tasks import _loop
from tests.helpers import assert_close_sums

MICROBATCHES, EXAMPLES, TIME, WIDTH, VOCABULARY, LAYERS = 4, 8, 6, 4, 10, 3
SCHEDULES = {
    "1f1b": jaxpp.schedules.OneFOneB(),
    "zb_h1": jaxpp.schedules.ZeroBubbleH1(),
    "chimera": jaxpp.schedules.Chimera(),
}
enter = jaxpp.pipeline_enter_stage


class Model(NamedTuple):
    """A loss of parameters and the arrays of a microbatch, and the shapes of both."""

    loss: Callable
    params: Mapping[str, tuple[int, ...]]
    batch: Mapping[str, tuple[int, ...]]


def product_of(selection, *values):
    """Cases for all combinations of the values, of which those not selected are slow."""
    return [
        pytest.param(*case, marks=[] if case in selection else [pytest.mark.slow])
        for case in itertools.product(*values)
    ]


# ---- models -------------------------------------------------------------------------------------


def mlp(params, x, y):
    h = enter(jax.nn.gelu(x @ params["w"] + params["b"]))
    return jnp.mean((h @ params["v"] - y) ** 2)


def penalized(params, x, y):
    """What is added to the loss of the examples, and its gradient, count once."""
    return mlp(params, x, y) + 0.3 * sum(jnp.sum(w**2) for w in params.values())


def branches(params, x, y):
    """One of two layers, chosen by a parameter."""
    up, down = (lambda x, sign=sign: jnp.tanh(x @ params["w"] * sign) for sign in (1, -1))
    h = jax.lax.cond(params["b"][0] > 0, up, down, x)
    return jnp.mean((enter(h) @ params["v"] + params["b"] - y) ** 2)


def layer_norm(params, x, y):
    mean = jnp.mean(x, -1, keepdims=True)
    normal = (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    h = enter(normal * params["scale"] + params["bias"])
    return jnp.mean((h * params["gain"] - y) ** 2)


def attend(params, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    causal = jnp.tril(jnp.ones((TIME, TIME), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["o"])


def attention(params, x, y):
    h = enter(attend(params, x))
    return jnp.mean((jnp.tanh(h @ params["w"]) - y) ** 2)


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen[..., 0]


def language_model(params, tokens, labels):
    """The embedding is tied to the logits, in one stage."""
    x = enter(jnp.take(params["position"], jnp.arange(TIME), axis=0)[None] + labels[..., None])
    x = x + params["embedding"][tokens]
    logits = jnp.tanh(x @ params["w"]) @ params["embedding"].T
    return jnp.mean(cross_entropy(logits, labels))


def apart_tied(params, tokens, labels):
    """The embedding is tied to the logits, in another stage."""
    x = enter(params["embedding"][tokens])
    logits = jnp.tanh(x @ params["w"]) @ params["embedding"].T
    return jnp.mean(cross_entropy(logits, labels))


def gated(x, up, gate, bias):
    return x + (x @ up) * jnp.tanh(x @ gate + bias)


def scanned_layers(params, x, y, block=gated):
    """Stacked weights, two of which have the same shape."""

    def layer(x, weights):
        return block(x, *weights), None

    x, _ = jax.lax.scan(layer, x, tuple(params[name][:1] for name in ("up", "gate", "bias")))
    x, _ = jax.lax.scan(layer, enter(x), tuple(params[name][1:] for name in ("up", "gate", "bias")))
    return jnp.mean((x - y) ** 2)


def remat_layers(params, x, y):
    return scanned_layers(params, x, y, jax.checkpoint(gated))


def shared_by_layers(params, x, y):
    """One weight for all layers of a scan, whose gradient the scan carries."""

    def layer(x, b):
        return x + jnp.tanh(x @ params["w"] + b), None

    x, _ = jax.lax.scan(layer, x, params["b"])
    return jnp.mean((enter(x) @ params["v"] - y) ** 2)


def convolution(params, images, y):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(
        images, params["kernel"], (2, 1), "SAME", dimension_numbers=numbers
    )
    return jnp.mean((jnp.tanh(enter(h)).mean((1, 2)) @ params["v"] - y) ** 2)


def batch_norm(params, x, y):
    """A mean and a variance over all examples, whose gradients need sums over them too."""
    h = x @ params["w"]
    mean, variance = jnp.mean(h, (0, 1)), jnp.var(h, (0, 1))
    h = enter((h - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"])
    return jnp.mean((jnp.tanh(h) - y) ** 2)


def masked_mean(params, tokens, labels, x):
    """The number of the tokens that count is known only at the end of a microbatch's forward."""
    mask = (tokens > VOCABULARY // 3).astype(x.dtype)
    logits = jnp.tanh(enter(x @ params["w"])) @ params["u"]
    return jnp.sum(cross_entropy(logits, labels) * mask) / jnp.sum(mask)


def balanced_experts(params, x, y):
    """A loss that is a product of two means over the batch, as of mixtures of experts."""
    probabilities = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), WIDTH, dtype=x.dtype)
    balance = jnp.sum(jnp.mean(probabilities, (0, 1)) * jnp.mean(chosen, (0, 1)))
    h = enter(probabilities * (x @ params["w"]))
    return jnp.mean((h - y) ** 2) + 0.1 * balance


SQUARE, VECTOR, SEQUENCE = (WIDTH, WIDTH), (WIDTH,), (TIME, WIDTH)
XY = {"x": SEQUENCE, "y": SEQUENCE}
TOKENS = {"tokens": (TIME,), "labels": (TIME,)}
HEADS = (WIDTH, 2, 3)
LAYERED = dict.fromkeys(["up", "gate"], (LAYERS, *SQUARE)) | {"bias": (LAYERS, WIDTH)}
TIED = {"embedding": (VOCABULARY, WIDTH), "w": SQUARE}
PERCEPTRON = {"w": SQUARE, "b": VECTOR, "v": SQUARE}
PLAIN = {
    "mlp": Model(mlp, PERCEPTRON, XY),
    "penalized": Model(penalized, PERCEPTRON, XY),
    "branches": Model(branches, PERCEPTRON, XY),
    "layer_norm": Model(layer_norm, dict.fromkeys(["scale", "bias", "gain"], VECTOR), XY),
    "attention": Model(
        attention, dict.fromkeys("qkv", HEADS) | {"o": (2, 3, WIDTH), "w": SQUARE}, XY
    ),
    "language_model": Model(language_model, TIED | {"position": SEQUENCE}, TOKENS),
    "apart_tied": Model(apart_tied, TIED, TOKENS),
    "scanned_layers": Model(scanned_layers, LAYERED, XY),
    "remat_layers": Model(remat_layers, LAYERED, XY),
    "shared_by_layers": Model(
        shared_by_layers, {"w": SQUARE, "b": (LAYERS, WIDTH), "v": SQUARE}, XY
    ),
    "convolution": Model(
        convolution, {"kernel": (3, 3, 2, WIDTH), "v": SQUARE}, {"images": (8, 8, 2), "y": VECTOR}
    ),
}
STATISTICS = {
    "batch_norm": Model(batch_norm, {"w": SQUARE, "scale": VECTOR, "bias": VECTOR}, XY),
    "masked_mean": Model(
        masked_mean, {"w": SQUARE, "u": (WIDTH, VOCABULARY)}, TOKENS | {"x": SEQUENCE}
    ),
    "balanced_experts": Model(balanced_experts, {"router": SQUARE, "w": SQUARE}, XY),
}
MODELS = PLAIN | STATISTICS


# ---- steps --------------------------------------------------------------------------------------


def make_arguments(model: Model, dtype=jnp.float32):
    """Parameters, and the microbatches of a batch; tokens are integers."""
    rng = np.random.default_rng(0)
    params = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in model.params.items()}
    batch = {}
    for name, shape in model.batch.items():
        shape = (MICROBATCHES, EXAMPLES, *shape)
        tokens, values = rng.integers(VOCABULARY, size=shape), rng.normal(size=shape)
        batch[name] = jnp.asarray(tokens) if name in TOKENS else jnp.asarray(values, dtype)
    return params, batch


def make_step(model: Model, schedule: str = "1f1b"):
    """The loss and the gradients, summed over microbatches, then scaled as an optimizer would."""

    def step(params, batch):
        grad_fn = jax.value_and_grad(jaxpp.wrap_forward(model.loss))

        def add(total, arrays):
            return jax.tree.map(jnp.add, total, grad_fn(params, **arrays)), None

        # Not from zero: what there is before must be counted once, not once for each replica.
        start = jnp.asarray(2, params[min(params)].dtype), jax.tree.map(jnp.zeros_like, params)
        loss, gradients = jax.lax.scan(add, start, batch)[0]
        return loss / MICROBATCHES, jax.tree.map(lambda g: -0.1 * g, gradients)

    return jaxpp.schedule(step, SCHEDULES[schedule])


def specs_of(arguments, of_params=None):
    """The examples of each microbatch are split over `data`."""
    params, batch = arguments
    whole = {name: replicated(x.ndim) for name, x in params.items()} | (of_params or {})
    return [
        *jax.tree.leaves(whole, is_leaf=lambda spec: isinstance(spec, tuple)),
        *(((), ("data",), *replicated(x.ndim - 2)) for x in jax.tree.leaves(batch)),
    ]


def trace(step, arguments):
    """A step's jaxpr with calls inlined."""
    traced = _jaxprs.trace(step, arguments)
    assert traced.num_closed_over == 0
    return _jaxprs.inline(traced.jaxpr, lambda e: True)


class Steps(NamedTuple):
    """A step as it was, and with deferred sums; the specs of its arguments, and its mesh."""

    plain: Any
    deferred: Any
    specs: list
    mesh: AbstractMesh

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))


@functools.cache
def make_steps(name: str, schedule: str, num_devices: int) -> Steps:
    arguments = make_arguments(MODELS[name])
    return steps_of(make_step(MODELS[name], schedule), arguments, specs_of(arguments), num_devices)


def steps_of(step, arguments, specs, num_devices: int, **axes: int) -> Steps:
    """The steps on a mesh of the given number of devices along `data`, and along other axes."""
    sizes = {"data": num_devices, **axes}
    types = (AxisType.Auto,) * len(sizes)  # JAX 0.12 makes them explicit by itself
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    with jax.sharding.use_abstract_mesh(mesh):
        plain = trace(step, arguments)
        deferred = replicas.with_deferred_sums(plain, specs, ("data",), sizes)
    return Steps(plain, deferred, specs, mesh)


def loop_of(jaxpr):
    (loop,) = filter(_loop.is_loop, jaxpr.eqns)
    return loop


# ---- values -------------------------------------------------------------------------------------


VALUES = [
    ("penalized", "zb_h1"),
    ("branches", "1f1b"),
    ("language_model", "zb_h1"),
    ("apart_tied", "chimera"),
    ("remat_layers", "1f1b"),
    ("shared_by_layers", "zb_h1"),
    ("convolution", "1f1b"),
    ("batch_norm", "zb_h1"),
    ("masked_mean", "1f1b"),
]


@pytest.mark.parametrize(("name", "schedule"), product_of(VALUES, MODELS, SCHEDULES))
def test_equals_the_step_that_reduces_in_each_microbatch(name, schedule):
    with jax.enable_x64(True):
        arguments = make_arguments(MODELS[name], jnp.float64)
        plain = trace(make_step(MODELS[name], schedule), arguments)
        deferred = replicas.with_deferred_sums(plain, specs_of(arguments), ("data",), {"data": 4})
        carries = [v.aval.shape for v in loop_of(plain).outvars]
        assert [v.aval.shape for v in loop_of(deferred).outvars] == [(4, *s) for s in carries]
        leaves = jax.tree.leaves(arguments)
        got, want = (jax.jit(lambda *xs, j=j: _jaxprs.run(j, *xs)) for j in (deferred, plain))
        assert_close_sums(got(*leaves), want(*leaves), 1e-13)


@pytest.mark.parametrize("name", product_of([("batch_norm",), ("masked_mean",)], STATISTICS))
def test_statistics_of_a_batch_are_those_of_all_devices(name):
    """As one program on four devices, a step gives what it gives on one."""
    steps = make_steps(name, "1f1b", 4)
    leaves = jax.tree.leaves(make_arguments(MODELS[name]))
    mesh = concrete(steps.mesh)
    placed = [
        jax.device_put(x, NamedSharding(mesh, partition_spec(spec)))
        for x, spec in zip(leaves, steps.specs, strict=True)
    ]
    got = jax.jit(lambda *xs: _jaxprs.run(steps.deferred, *xs))(*placed)
    assert len(got[0].sharding.device_set) == 4
    want = jax.tree.leaves(jax.jit(make_step(MODELS[name]))(*make_arguments(MODELS[name])))
    assert_close_sums(got, want)


# ---- collectives --------------------------------------------------------------------------------


def concrete(mesh: AbstractMesh) -> jax.sharding.Mesh:
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def collectives(jaxpr, in_specs, out_specs, abstract: AbstractMesh) -> Counter:
    """How many collectives of each kind over `data` a program has."""
    mesh = concrete(abstract)

    def shardings(specs, variables):
        pairs = zip(specs, variables, strict=True)
        known = [replicated(v.aval.ndim) if s is None else s for s, v in pairs]
        return [NamedSharding(mesh, partition_spec(s)) for s in known]

    compiled = jax.jit(
        lambda *xs: _jaxprs.run(jaxpr, *xs),
        in_shardings=shardings(in_specs, jaxpr.jaxpr.invars),
        out_shardings=shardings(out_specs, jaxpr.jaxpr.outvars),
    )
    text = compiled.lower(*(v.aval for v in jaxpr.jaxpr.invars)).compile().as_text() or ""
    found = _collectives.collectives(text, abstract.axis_sizes, abstract.axis_names)
    return Counter({kind: n for (kind, axes), n in found.items() if "data" in axes})


def task_collectives(steps: Steps, jaxpr) -> dict[str, Counter]:
    """The collectives over `data` in each task that adds to an accumulator."""
    known = propagation.propagate(jaxpr, steps.specs, steps.sizes)
    loop = loop_of(jaxpr)
    bodies = loop.params["tasks"].bodies
    held = [specs for _, specs in propagation.held(loop, known, steps.sizes)]
    # What a task makes is read by another, or by the same for the next microbatch.
    inside = {
        r: spec
        for body, specs in zip(bodies, held, strict=True)
        for r, spec in zip(body.inputs, specs, strict=True)
    }
    return {
        body.name: collectives(body.jaxpr, specs, [inside[r] for r in body.outputs], steps.mesh)
        for body, specs in zip(bodies, held, strict=True)
        if any(r.source == "carry" for r in body.outputs)
    }


def collectives_after(steps: Steps) -> Counter:
    """The collectives over `data` of what follows a step's loop."""
    jaxpr = steps.deferred
    known = propagation.propagate(jaxpr, steps.specs, steps.sizes)
    rest = _jaxprs.part(jaxpr.eqns[jaxpr.eqns.index(loop_of(jaxpr)) + 1 :], jaxpr.jaxpr.outvars)
    results = [known[v] for v in rest.outputs]
    return collectives(rest.jaxpr, [known[v] for v in rest.inputs], results, steps.mesh)


COMPILED = [
    ("attention", "zb_h1", 2),
    ("language_model", "1f1b", 4),
    ("remat_layers", "zb_h1", 4),
    ("convolution", "1f1b", 2),
]


@pytest.mark.parametrize(
    ("name", "schedule", "num_devices"), product_of(COMPILED, PLAIN, ("1f1b", "zb_h1"), (2, 4))
)
def test_gradients_are_reduced_once_a_step(name, schedule, num_devices):
    steps = make_steps(name, schedule, num_devices)
    found = task_collectives(steps, steps.deferred)
    assert len(found) > 2 and not sum(found.values(), Counter()), found
    after = collectives_after(steps)
    assert set(after) == {"all-reduce"}
    assert 1 <= after["all-reduce"] <= len(steps.plain.jaxpr.outvars)


@pytest.mark.parametrize("name", product_of([("language_model",)], PLAIN))
def test_without_it_each_task_reduces(name):
    steps = make_steps(name, "1f1b", 2)
    found = task_collectives(steps, steps.plain)
    assert all(counter["all-reduce"] for counter in found.values()), found


def test_what_is_split_over_another_axis_stays_so():
    """A multilayer perceptron split over `model`, too: its activations are reduced over it."""
    arguments = make_arguments(MODELS["mlp"])
    columns, rows = ((), ("model",)), (("model",), ())
    specs = specs_of(arguments, {"w": columns, "b": columns[1:], "v": rows})
    steps = steps_of(make_step(MODELS["mlp"]), arguments, specs, 2, model=2)
    found = task_collectives(steps, steps.deferred)
    assert not sum(found.values(), Counter()), found
    assert all(counter["all-reduce"] for counter in task_collectives(steps, steps.plain).values())
    known = propagation.propagate(steps.deferred, specs, steps.sizes)
    accumulators = {known[v] for v in loop_of(steps.deferred).outvars}
    assert {(("data",), *s) for s in (columns, columns[1:], rows, ())} == accumulators


# ---- what is not deferred -----------------------------------------------------------------------


def test_a_sum_that_something_else_reads_is_made_where_it_is():
    """The loss of each microbatch is a result too; the gradients are deferred."""

    def step(params, batch):
        def add(total, arrays):
            loss, grads = jax.value_and_grad(jaxpp.wrap_forward(mlp))(params, **arrays)
            return jax.tree.map(jnp.add, total, (loss, grads)), loss

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, batch)

    arguments = make_arguments(MODELS["mlp"])
    step = jaxpp.schedule(step, SCHEDULES["1f1b"])
    steps = steps_of(step, arguments, specs_of(arguments), 2)
    loss, *gradients, losses = (v.aval.shape for v in loop_of(steps.deferred).outvars)
    assert loss == () and losses == (MICROBATCHES,)
    assert all(shape[0] == 2 and len(shape) > 1 for shape in gradients)


def test_counts_are_exact():
    """Integers that are added up, of which some are there before the first example."""

    def step(params, batch):
        def count(params, tokens, labels):
            best = jnp.argmax(enter(params["embedding"][tokens]) @ params["w"], -1)
            return jnp.arange(VOCABULARY).at[labels].add(tokens), jnp.sum(best == labels)

        def add(total, arrays):
            return jax.tree.map(jnp.add, total, jaxpp.wrap_forward(count)(params, **arrays)), None

        zeros = jnp.full(VOCABULARY, 3, jnp.int32), jnp.asarray(7, jnp.int32)
        return jax.lax.scan(add, zeros, batch)[0]

    arguments = make_arguments(MODELS["apart_tied"])
    step = jaxpp.schedule(step, jaxpp.schedules.ForwardOnly())
    plain = trace(step, arguments)
    deferred = replicas.with_deferred_sums(plain, specs_of(arguments), ("data",), {"data": 4})
    assert [v.aval.shape for v in loop_of(deferred).outvars] == [(4, VOCABULARY), (4,)]
    got, want = _jaxprs.run(deferred, *jax.tree.leaves(arguments)), jax.jit(step)(*arguments)
    chex.assert_trees_all_equal(tuple(got), want, strict=True)


def test_a_step_whose_batch_is_whole_stays_as_it_is():
    arguments = make_arguments(MODELS["mlp"])
    plain = trace(make_step(MODELS["mlp"]), arguments)
    specs = [replicated(len(v.aval.shape)) for v in plain.jaxpr.invars]
    deferred = replicas.with_deferred_sums(plain, specs, ("data",), {"data": 2})
    assert _jaxprs.structure(deferred) == _jaxprs.structure(plain)
    assert replicas.with_deferred_sums(plain, specs_of(arguments), ("data",), {"data": 1}) is plain
