"""The laws on GPUs, which the ranks share where there is only one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxpp
from tests.helpers import assert_close

pytestmark = pytest.mark.gpu


def _loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize(
    ("schedule", "fuse"),
    [
        (jaxpp.schedules.OneFOneB(), "none"),
        (jaxpp.schedules.ZeroBubbleH1(), "chains"),
        (jaxpp.schedules.DualPipe(), "pairs"),
    ],
)
def test_step_on_gpu_equals_the_plain_step(schedule, fuse):
    model = eqx.nn.MLP(16, 16, 32, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (24, 16))
    gpus = jax.devices("gpu")
    mesh = jaxpp.MpmdMesh((4,), ("mpmd",), devices=[gpus[r % len(gpus)] for r in range(4)])

    def step_of(grad_fn):
        def step(model, x):
            loss, grads = grad_fn(model, x)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

        return step

    staged = jaxpp.wrap_forward(jaxpp.split_stages(_loss, 4))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 8)
    placed = jaxpp.place(step_of(jaxpp.schedule(grad_fn, schedule)), mesh, fuse=fuse)
    plain = eqx.filter_jit(step_of(eqx.filter_value_and_grad(_loss)))
    for _ in range(3):
        got, expected = placed(model, x), plain(model, x)
        for a, b in zip(
            jax.tree.leaves(eqx.filter(got, eqx.is_array)),
            jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        model = expected[0]


def _remote_steps(transport, ranks, gpus_per_rank, memory):
    """Three steps on worker processes that have GPUs, and the same steps in this process."""
    params = [
        jax.random.normal(key, (16, 16)) for key in jax.random.split(jax.random.key(2), ranks)
    ]
    x = jax.random.normal(jax.random.key(3), (8, 16))

    def loss(params, x):
        for n, w in enumerate(params):
            x = jnp.tanh(x @ w)
            if n + 1 < len(params):
                x = jaxpp.pipeline_enter_stage(x)
        return jnp.mean(x**2)

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.ZeroBubbleH1())

    def step(params, x):
        value, grads = grad_fn(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    expected = params
    for _ in range(3):
        expected, expected_loss = jax.jit(step)(expected, x)
    with jaxpp.RemoteMpmdMesh(
        (ranks,),
        ("mpmd",),
        gpus_per_rank=gpus_per_rank,
        environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": memory},
        transport=transport,
    ) as mesh:
        placed = jaxpp.place(step, mesh)
        for _ in range(3):
            params, value = placed(params, x)
        params, value = jax.device_get((params, value))
    np.testing.assert_allclose(value, expected_loss, rtol=1e-4)
    assert_close(params, expected, rtol=1e-4)


@pytest.mark.parametrize("transport", ["auto", "jax"])
def test_workers_share_a_gpu(transport):
    _remote_steps(transport, ranks=2, gpus_per_rank=0.5, memory="0.08")


@pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["auto", "jax"])
def test_workers_have_a_gpu_each(transport):
    _remote_steps(transport, ranks=2, gpus_per_rank=1, memory="0.2")


# ---- what is there on a GPU alone ----------------------------------------------------------------


def _attention(w, x):
    """Attention by cuDNN."""
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], 2, 64) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return x + y.reshape(x.shape)


@jax.custom_vjp
def _gelu(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.nn.gelu(x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


_gelu.defvjp(lambda x: (_gelu(x), x), lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g))


def _kernel(w, x):
    """A kernel of Pallas, in float32: Triton has no `tanh` of bfloat16."""
    hidden = (x @ w["q"]).reshape(-1, 128).astype(jnp.float32)
    return _gelu(hidden).reshape(x.shape).astype(x.dtype)


def _callback(w, x):
    """A callback with a value."""
    doubled = jax.pure_callback(lambda a: 2 * np.asarray(a), x, jax.lax.stop_gradient(x))
    return (x + doubled) @ w["v"]


@pytest.mark.parametrize("layer", [_attention, _kernel, _callback])
def test_code_for_gpus_runs_in_stages_here_and_on_workers(layer):
    keys = jax.random.split(jax.random.key(4), 7)
    params = [
        {name: jax.random.normal(key, (128, 128), jnp.bfloat16) / 8 for name, key in own}
        for own in (zip("qkv", keys[:3], strict=True), zip("qkv", keys[3:6], strict=True))
    ]
    x = jax.random.normal(keys[6], (8, 64, 128), jnp.bfloat16)

    def loss(params, x):
        x = jaxpp.pipeline_enter_stage(layer(params[0], x))
        return jnp.mean(layer(params[1], x).astype(jnp.float32) ** 2)

    def step_of(grad_fn):
        def step(params, x):
            value, grads = grad_fn(params, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

        return step

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4)
    step = step_of(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()))
    want = jax.jit(step_of(jax.value_and_grad(loss)))(params, x)
    close = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.02)
    gpu = jax.devices("gpu")[0]
    here = jaxpp.place(step, jaxpp.MpmdMesh((2,), devices=[gpu] * 2))(params, x)
    jax.tree.map(close, _wide(here), _wide(want))
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.08"}
    with jaxpp.RemoteMpmdMesh((2,), gpus_per_rank=0.5, environment=memory) as mesh:
        there = jax.device_get(jaxpp.place(step, mesh)(params, x))
    jax.tree.map(close, _wide(there), _wide(want))


def _wide(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)
