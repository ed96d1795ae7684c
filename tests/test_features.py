"""Features of JAX in a placed step: each row of the page `features.md` is a case here."""

import logging
import pathlib
import re

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ray
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.experimental import checkify, io_callback, sparse
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import testing
from jaxpp.schedules import OneFOneB
from tests.helpers import assert_close, mesh_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "features.md"
SIZE = 4
BATCH = jax.random.normal(jax.random.key(2), (4, 8, SIZE))  # examples, positions, features
WEIGHTS = [jax.random.normal(key, (SIZE, SIZE)) / 2 for key in jax.random.split(jax.random.key(1))]


# ---- what a stage computes: a function of its weight and of one microbatch -----------------------


def _pallas(w, x):
    def kernel(a, b, out):
        out[...] = a[...] + b[...]

    add = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)

    @jax.custom_vjp
    def double(x):
        return add(x, x)

    double.defvjp(lambda x: (double(x), None), lambda _, g: (add(g, g),))
    return double(x @ w)


def _ragged_dot(w, x):
    flat = x.reshape(-1, SIZE)
    sizes = jnp.array([3, len(flat) - 3], jnp.int32)  # of the rows of two experts, which are alike
    return jax.lax.ragged_dot(flat, jnp.stack([w, w]), sizes).reshape(x.shape)


@custom_partitioning
def _partitioned(x):
    return jnp.sin(x)


def _same_sharding(mesh, arguments, result):
    return result.sharding


def _partition(mesh, arguments, result):
    return mesh, jnp.sin, result.sharding, (arguments[0].sharding,)


_partitioned.def_partition(
    partition=_partition, infer_sharding_from_operands=_same_sharding, sharding_rule="... -> ..."
)


def _custom_partitioning(w, x):
    @jax.custom_vjp
    def sine(x):
        return _partitioned(x)

    sine.defvjp(lambda x: (_partitioned(x), x), lambda x, g: (g * jnp.cos(x),))
    return sine(x @ w)


def _ffi(w, x):
    positive = w @ w.T + jnp.eye(SIZE)
    return x @ jnp.linalg.cholesky(positive)


def _custom_vjp(w, x):
    @jax.custom_vjp
    def reversal(x):
        return x

    reversal.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))
    return reversal(x @ w)


def _custom_jvp(w, x):
    @jax.custom_jvp
    def logistic(x):
        return jax.nn.sigmoid(x)

    logistic.defjvps(lambda t, out, x: t * out * (1 - out))
    return logistic(x @ w)


def _remat(w, x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)))(x)


def _named_residuals(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def run(x):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "kept"))

    return jax.checkpoint(run, policy=policy)(x)


def _host_memory(w, x):
    far = jax.device_put(x @ w, jax.memory.Space.Host)
    return jax.device_put(jax.lax.stop_gradient(far), jax.memory.Space.Device) + x @ w


def _offload(w, x):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["far"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def run(x):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "far"))

    return jax.checkpoint(run, policy=policy)(x)


def _scan(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=2)[0]


def _fori_loop(w, x):
    return jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w), x)


def _while_loop(w, x):
    steps = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return x @ w * steps


def _cond(w, x):
    return jax.lax.cond(jnp.sum(w) > 0, lambda x: x @ w, lambda x: -x @ w, x)


def _switch(w, x):
    return jax.lax.switch(jnp.int32(1), [jnp.sin, jnp.cos], x @ w)


def _associative_scan(w, x):
    return jax.lax.associative_scan(jnp.add, x @ w, axis=1)


def _map(w, x):
    return jax.lax.map(lambda row: row @ w, x)


def _vmap(w, x):
    return jax.vmap(jax.vmap(lambda row: w.T @ row))(x)


def _axis_name(w, x):
    def centred(row):
        return row - jax.lax.pmean(row, "positions")

    return jax.vmap(jax.vmap(centred, axis_name="positions"))(x @ w)


def _inner_grad(w, x):
    return jax.grad(lambda x: jnp.sum(jnp.cos(x @ w)))(x)


def _jvp(w, x):
    return jax.jvp(lambda x: jnp.sin(x @ w), (x,), (jnp.ones_like(x),))[1]


def _custom_root(w, x):
    def run(a):
        return jax.lax.custom_linear_solve(
            lambda v: 2 * v, a, lambda _, b: b / 2, transpose_solve=lambda _, b: b / 2
        )

    return run(x @ w)


def _custom_vmap(w, x):
    @jax.custom_batching.custom_vmap
    def sine(row):
        return jnp.sin(row)

    @sine.def_vmap
    def _(size, batched, rows):
        return jnp.sin(rows), batched[0]

    return jax.vmap(jax.vmap(sine))(x @ w)


def _random(w, x):
    return x @ w + jax.random.normal(jax.random.key(3), (SIZE,))


def _attention(w, x):
    heads = (x @ w)[:, :, None]
    return jax.nn.dot_product_attention(heads, heads, heads)[:, :, 0]


def _convolution(w, x):
    out = jax.lax.conv_general_dilated(
        x, w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.tanh(out)


def _fft(w, x):
    return jnp.fft.ifft(jnp.fft.fft(x @ w, axis=1) * 0.5, axis=1).real


def _sparse(w, x):
    return x @ w @ sparse.BCOO.fromdense(jnp.eye(SIZE), nse=SIZE).todense()


def _bfloat16(w, x):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def _float8(w, x):
    return x @ w.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def _jit(w, x):
    return jax.jit(lambda w, x, power: (x @ w) ** power, static_argnums=2)(w, x, 2)


def _barrier(w, x):
    return jax.lax.optimization_barrier(x @ w)


def _ref(w, x):
    ref = jax.new_ref(jnp.zeros(x.shape))
    ref[...] += jax.lax.stop_gradient(x)
    return x @ w + jax.lax.stop_gradient(ref[...])


def _named_scope(w, x):
    with jax.named_scope("block"):
        return x @ w


def _precision(w, x):
    with jax.default_matmul_precision("highest"):
        return x @ w


def _debug_print(w, x):
    jax.debug.print("largest {}", jnp.max(x))
    return x @ w


def _pure_callback(w, x):
    size = jax.ShapeDtypeStruct((), jnp.float32)
    scale = jax.pure_callback(lambda: np.float32(3), size)
    return x @ w * scale


def _io_callback(w, x):
    size = jax.ShapeDtypeStruct((), jnp.float32)
    return x @ w * jax.lax.stop_gradient(io_callback(lambda: np.float32(2), size))


def _error_if(w, x):
    return eqx.error_if(x @ w, jnp.any(jnp.isnan(x)), "not a number")


class _Layer(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])


def _nnx_scan(w, x):
    layers = nnx.vmap(_Layer)(jnp.stack([w, w.T]))
    return nnx.scan(lambda h, layer: layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, layers
    )


def _nnx_remat(w, x):
    return nnx.remat(lambda layer, x: layer(x))(_Layer(w), x)


#: By the heading of the page, and the name that a row has there.
BLOCKS = {
    "Kernels and foreign code": {
        "pallas_call": _pallas,
        "ragged_dot": _ragged_dot,
        "dot_product_attention": _attention,
        "conv_general_dilated": _convolution,
        "custom_partitioning": _custom_partitioning,
        "FFI": _ffi,
        "BCOO": _sparse,
    },
    "Derivatives and memory": {
        "custom_vjp": _custom_vjp,
        "custom_jvp": _custom_jvp,
        "custom_linear_solve": _custom_root,
        "grad": _inner_grad,
        "jvp": _jvp,
        "checkpoint": _remat,
        "checkpoint_name": _named_residuals,
        "memory.Space.Host": _host_memory,
        "offload": _offload,
    },
    "Control flow": {
        "scan": _scan,
        "fori_loop": _fori_loop,
        "while_loop": _while_loop,
        "cond": _cond,
        "switch": _switch,
        "associative_scan": _associative_scan,
        "lax.map": _map,
    },
    "Calls, batches and scopes": {
        "jit": _jit,
        "vmap": _vmap,
        "pmean": _axis_name,
        "custom_vmap": _custom_vmap,
        "named_scope": _named_scope,
        "default_matmul_precision": _precision,
        "optimization_barrier": _barrier,
        "new_ref": _ref,
        "random": _random,
        "fft": _fft,
    },
    "Effects": {
        "debug.print": _debug_print,
        "pure_callback": _pure_callback,
        "io_callback": _io_callback,
        "error_if": _error_if,
    },
    "Flax NNX": {"nnx.scan": _nnx_scan, "nnx.remat": _nnx_remat},
    "Narrow types": {"bfloat16": _bfloat16, "float8": _float8},
}


def loss_of(blocks):
    """Two stages, each of which computes half of the blocks, and keeps numbers small."""

    def stage(w, x, blocks):
        for block in blocks:
            x = jnp.tanh(block(w, x)) + 0.5 * x
        return x

    def loss(weights, x):
        hidden = jaxpp.pipeline_enter_stage(stage(weights[0], x, blocks[::2]))
        return jnp.mean(stage(weights[1], hidden, blocks[1::2]) ** 2)

    return loss


def pipeline(loss, **knobs):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2, **knobs)
    return jaxpp.schedule(grad, OneFOneB())


@pytest.mark.parametrize("group", BLOCKS)
def test_features_compute_in_stages_what_they_do_in_plain_jax(group):
    loss = loss_of([*BLOCKS[group].values()])
    want = jax.jit(jax.value_and_grad(loss))(WEIGHTS, BATCH)
    assert float(want[0]) > 0 and all(np.any(g) for g in want[1])
    step = jaxpp.place(pipeline(loss), mesh_of(2))
    assert_close(step(WEIGHTS, BATCH), want, *((0.1, 0.1) if group == "Narrow types" else (1e-4,)))
    testing.assert_computes_the_function(step, WEIGHTS, BATCH)


@pytest.fixture(scope="module")
def workers():
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
    with jaxpp.RemoteMpmdMesh((2,), gpus_per_rank=0) as mesh:
        yield mesh
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("group", ["Kernels and foreign code", "Effects", "Flax NNX"])
def test_features_compute_in_worker_processes_what_they_do_in_plain_jax(workers, group):
    loss = loss_of([*BLOCKS[group].values()])
    want = jax.jit(jax.value_and_grad(loss))(WEIGHTS, BATCH)
    got = jax.device_get(jaxpp.place(pipeline(loss), workers)(WEIGHTS, BATCH))
    assert_close(got, want, 1e-4)


# ---- inside a rank, and around the loop ----------------------------------------------------------

LOSS = loss_of([lambda w, x: x @ w] * 2)


def _all_to_all():
    """Exchanges halves between the two devices of each rank: from examples to positions."""
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    plain = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def block(w, x):
        def exchange(x):
            x = jax.lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)
            x = jnp.cumsum(x, axis=0)  # over all examples of the microbatch
            return jax.lax.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)

        split = P("data")
        return jax.shard_map(exchange, in_specs=split, out_specs=split, check_vma=False)(x @ w)

    loss = loss_of([block] * 2)
    step = jaxpp.place(pipeline(loss), mesh, in_specs=(None, P("data")))
    accumulated = jaxpp.microbatch(jax.value_and_grad(loss), 2)
    with jax.set_mesh(plain):
        return step(WEIGHTS, BATCH), jax.jit(accumulated)(WEIGHTS, BATCH)


def _optimizer_of_nnx():
    def train(grad):
        graph, state = nnx.split(
            (model := _Layer(WEIGHTS[0]), nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
        )

        def step(state, x):
            model, optimizer = nnx.merge(graph, state)
            params = nnx.state(model, nnx.Param)
            optimizer.update(model, grad(params, x)[1])
            return nnx.state((model, optimizer))

        return step, state

    def loss(params, x):
        w = params["w"][...]
        return jnp.mean(jaxpp.pipeline_enter_stage(x @ w) ** 2)

    (step, state), (plain, _) = train(pipeline(loss)), train(jax.value_and_grad(loss))
    return jaxpp.place(step, mesh_of(2))(state, BATCH), jax.jit(plain)(state, BATCH)


def _checkify():
    def checked(weights, x):
        checkify.check(jnp.all(x < 2), "too large: {}", jnp.max(x))
        return LOSS(weights, x)

    def loss(weights, x):
        error, value = checkify.checkify(checked)(weights, x)
        return value, error

    staged = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    grad = jaxpp.microbatch(staged, 2, reduce=(("mean", "stack"), "mean"))
    (value, error), grads = jaxpp.place(jaxpp.schedule(grad, OneFOneB()), mesh_of(2))(
        WEIGHTS, BATCH
    )
    assert "too large" in error.get()
    return (value, grads), jax.value_and_grad(LOSS)(WEIGHTS, BATCH)


def _lbfgs():
    optimizer = optax.lbfgs(0.1, linesearch=None)

    def train(grad):
        def step(weights, state, x):
            updates, state = optimizer.update(grad(weights, x)[1], state, weights)
            return optax.apply_updates(weights, updates), state

        return step

    state = optimizer.init(WEIGHTS)
    step = jaxpp.place(train(pipeline(LOSS)), mesh_of(2))
    return step(WEIGHTS, state, BATCH), train(jax.value_and_grad(LOSS))(WEIGHTS, state, BATCH)


def _transformed():
    step = jaxpp.place(pipeline(LOSS), mesh_of(2))
    many = jnp.stack([BATCH, 2 * BATCH])
    batched = jax.vmap(step, in_axes=(None, 0))
    return batched(WEIGHTS, many), jax.vmap(jax.value_and_grad(LOSS), (None, 0))(WEIGHTS, many)


def _x64():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (WEIGHTS, BATCH))
        got = jaxpp.place(pipeline(LOSS), mesh_of(2))(*args)
        return got, jax.value_and_grad(LOSS)(*args)


AROUND = {
    "all_to_all": _all_to_all,
    "nnx.Optimizer": _optimizer_of_nnx,
    "checkify": _checkify,
    "lbfgs": _lbfgs,
    "vmap of a placed step": _transformed,
    "enable_x64": _x64,
}


@pytest.mark.parametrize("name", AROUND)
def test_features_around_the_stages(name, monkeypatch):
    """A placed step is proven before it runs; under a trace it is the plain function."""
    place = jaxpp.place

    def proven(fun, *args, **options):
        step = place(fun, *args, **options)

        def run(*args):
            if not any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
                testing.assert_computes_the_function(step, *args)
            return step(*args)

        return run

    monkeypatch.setattr(jaxpp, "place", proven)
    got, want = AROUND[name]()
    assert_close(got, want, rtol=1e-4)


# ---- what is an error ----------------------------------------------------------------------------


def _ordered(w, x):
    jax.debug.print("{}", jnp.sum(x), ordered=True)
    return x @ w


def _scan_over_steps(weights, x):
    grad = pipeline(LOSS)
    return jax.lax.scan(lambda w, _: (grad(w, x)[1], None), weights, length=2)[0]


def _derivative(weights, x):
    return jax.grad(lambda w: pipeline(LOSS)(w, x)[0])(weights)


ERRORS = {
    "ordered": (lambda: pipeline(loss_of([_ordered] * 2)), "ordered"),
    "scan over steps": (lambda: _scan_over_steps, "Write that loop in Python"),
    "grad of a scheduled function": (lambda: _derivative, "ifferentiate"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_work_says_so(name):
    make, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        jaxpp.place(make(), mesh_of(2)).lower(WEIGHTS, BATCH)


def test_the_page_has_a_row_for_each_feature():
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
    rows = {title: re.findall(r"^\| `([^`]+)`", text, re.M) for title, text in sections.items()}
    assert {k: v for k, v in rows.items() if k in BLOCKS} == {k: [*v] for k, v in BLOCKS.items()}
    assert rows["Around the stages"] == [*AROUND]
    assert rows["What is an error"] == [*ERRORS]
