"""Computations travel as pickled jaxprs, and are the same programs where they are read."""

import contextlib
import hashlib
import pickle
import re
import subprocess
import sys
import threading

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.gpu import attention
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from jaxpp import _compat, jaxprs
from jaxpp._program import Computation
from jaxpp.runtime.site._carried import Packed, carry

S = jax.ShapeDtypeStruct
X = S((128,), jnp.float32)
Q = S((2, 128, 4, 64), jnp.float16)
MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))


# ---- primitives with parameters of their own ----------------------------------------------------


def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def rectified(x_ref, o_ref):
    o_ref[...] = jax.nn.relu(x_ref[...])


def pallas(x, kernel=kernel, **options):
    return pl.pallas_call(kernel, out_shape=S(x.shape, x.dtype), **options)(x)


@custom_partitioning
def doubled(x):
    return x * 2


def _partition(mesh, arguments, result):
    return mesh, doubled.fun, result.sharding, tuple(x.sharding for x in arguments)


doubled.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
    sharding_rule="i -> i",
)


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


@jax.custom_batching.custom_vmap
def batched(x):
    return jnp.sin(x)


@batched.def_vmap
def _(size, is_batched, x):
    del size
    return jnp.sin(x), is_batched[0]


def loop(x):
    def body(carry):
        count, x = carry
        return count + 1, jax.lax.cond(count > 1, jnp.sin, jnp.cos, x)

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def solved(x):
    a = jnp.eye(8) + x[:64].reshape(8, 8) @ x[64:].reshape(8, 8).T
    return jnp.linalg.eigh(a)[0] + jnp.linalg.solve(a, x[:8]) + jnp.linalg.cholesky(a)[0]


def moved(x):
    return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)


def with_a_policy(x):
    inner = jax.checkpoint(
        lambda x: cubed(jnp.sin(x)), policy=jax.checkpoint_policies.dots_saveable
    )
    return jax.grad(lambda x: inner(x).sum())(x)


def manual(x):
    summed = jax.shard_map(
        lambda x: jax.lax.psum(cubed(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P()
    )
    return summed(x)


def branching(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tan)


def called_back(x):
    jax.debug.print("{}", x[0])
    y = jax.pure_callback(np.sin, X, x)
    return io_callback(np.cos, X, y, ordered=True)


def random(x):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), 2)
    return x + jax.random.normal(keys[0], x.shape) + jax.random.bernoulli(keys[1])


def attended(q):
    return attention.mha(q, q, q, segment_ids=None)


#: A function, its argument, and the platform that it is lowered for.
CASES = {
    "shard_map": (manual, X, "cpu"),
    "pallas": (pallas, X, "cuda"),
    "pallas_triton": (
        lambda x: pallas(x, compiler_params=triton.CompilerParams(num_warps=4)),
        X,
        "cuda",
    ),
    "pallas_rule": (lambda x: pallas(x, rectified, interpret=True), X, "cpu"),
    "pallas_attention": (attended, Q, "cuda"),
    "pallas_attention_grad": (
        jax.grad(lambda q: jnp.sum(attended(q), dtype=jnp.float32)),
        Q,
        "cuda",
    ),
    "attention": (lambda q: jax.nn.dot_product_attention(q, q, q), Q, "cuda"),
    "platform_dependent": (branching, X, "cuda"),
    "ffi_call": (lambda x: jax.ffi.ffi_call("a_target", X)(x, factor=np.int32(2)), X, "cuda"),
    "custom_partitioning": (lambda x: doubled(x), X, "cuda"),
    "callbacks": (called_back, X, "cpu"),
    "loops": (loop, X, "cpu"),
    "random": (random, X, "cpu"),
    "sort, fft": (lambda x: jnp.fft.fft(jnp.sort(x)).real + jax.lax.top_k(x, 128)[0], X, "cpu"),
    "solvers": (solved, X, "cpu"),
    "host_memory": (moved, X, "cuda"),
    "checkpoint": (with_a_policy, X, "cpu"),
    "custom_rules": (
        lambda x: jax.lax.scan(lambda c, x: (jax.nn.relu(c) + cubed(x), batched(c)), 1.0, x),
        X,
        "cpu",
    ),
    "error_if": (lambda x: eqx.error_if(x, x[0] < 0, "negative"), X, "cpu"),
    "closed_over": (lambda x: x[jnp.asarray(np.arange(7))] + np.float32(1), X, "cpu"),
}


def computation_of(fun, *avals, mesh=None):
    with use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
        return Computation("F0", jax.make_jaxpr(fun)(*avals), ())


#: Pallas asks for a kind of GPU where there is none.
GPU = AbstractMesh((1,), ("gpu",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))


def text_of(computation, platform):
    """The program that a computation is lowered to; what JAX cannot lower has its error's text."""
    avals = [S(v.aval.shape, v.aval.dtype) for v in computation.jaxpr.jaxpr.invars]
    traced = jax.jit(jex.jaxpr_as_fun(computation.jaxpr)).trace(*avals)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("case", CASES)
def test_a_computation_is_the_same_program_once_it_is_read(case):
    fun, aval, platform = CASES[case]
    computation = computation_of(fun, aval, mesh=GPU if platform == "cuda" else None)
    read = carry(computation, Packed.of).get().computation
    want, got = text_of(computation, platform), text_of(read, platform)
    if case == "callbacks":  # the text has addresses of functions
        want, got = (len(text.splitlines()) for text in (want, got))
    assert got == want


READER = """
import hashlib, pickle, sys
from tests.runtime.remote import test_pickled
for name, (packed, platform) in pickle.load(sys.stdin.buffer).items():
    read = packed.get().computation
    text = test_pickled.text_of(read, platform)
    print(name, hashlib.sha256(text.encode()).hexdigest(), sep=":")
"""


@pytest.mark.more
def test_another_process_reads_the_same_programs():
    sent, want = {}, {}
    for name, (fun, aval, platform) in CASES.items():
        if name in ("callbacks", "error_if"):  # their texts have addresses of functions
            continue
        computation = computation_of(fun, aval, mesh=GPU if platform == "cuda" else None)
        sent[name] = carry(computation, Packed.of), platform
        text = text_of(computation, platform)
        want[name] = hashlib.sha256(text.encode()).hexdigest()
    reader = subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(sent), capture_output=True, check=False
    )
    found = dict(line.split(":") for line in reader.stdout.decode().splitlines())
    assert found == want, reader.stderr.decode()[-2000:]


# ---- what else travels with a computation -------------------------------------------------------


def test_equations_keep_the_users_lines_names_and_context():
    def fun(x):
        with jax.named_scope("outer"):
            y = jnp.sin(x)
        with jax.threefry_partitionable(False):
            return y + jax.random.normal(jax.random.key(1), x.shape)

    computation = computation_of(jax.jit(fun), X)
    read = carry(computation, Packed.of).get().computation
    line, pairs = fun.__code__.co_firstlineno + 2, [(computation.jaxpr, read.jaxpr)]
    seen = []
    while pairs:
        programs = pairs.pop()
        for one, other in zip(*(j.eqns for j in programs), strict=True):
            assert _compat.source_line(other) == _compat.source_line(one)
            assert _compat.scope_names(other) == _compat.scope_names(one)
            assert other.ctx is one.ctx and other.primitive is one.primitive
            seen.append((one.primitive.name, _compat.source_line(one)))
            pairs += zip(*(jaxprs.sub_jaxprs(e) for e in (one, other)), strict=True)
    assert ("sin", f"{__file__}:{line}") in seen and len(seen) > 10


def test_lines_of_the_read_program_have_their_columns():
    def text(computation):
        traced = jax.jit(jex.jaxpr_as_fun(computation.jaxpr)).trace(jnp.ones(128))
        places = re.findall(
            r'test_pickled.py":(\d+):(\d+)', traced.lower().as_text(debug_info=True)
        )
        return {place for place in places if int(place[0]) < loop.__code__.co_firstlineno + 9}

    computation = computation_of(loop, X)
    read = carry(computation, Packed.of).get().computation
    assert text(computation) == text(read) and len(text(read)) > 4


@pytest.mark.parametrize("x64", [True, False])
def test_a_computation_is_compiled_under_the_settings_of_its_trace(x64):
    with jax.enable_x64(x64):
        array = jnp.arange(3) * 1.5
        packed = carry(computation_of(lambda x: x * np.pi, array), Packed.of)
    (result,) = packed.get().executables.on(jax.devices()[0])(array)
    assert result.dtype == array.dtype == ("float64" if x64 else "float32")


def test_what_cannot_be_pickled_is_an_error_that_names_the_line():
    lock = threading.Lock()

    def locked(x):
        with lock:
            return np.sin(x)

    computation = computation_of(lambda x: jax.pure_callback(locked, X, x), X)
    with pytest.raises(ValueError, match=r"F0 .*`pure_callback` at .*test_pickled.py:\d+.* lock"):
        carry(computation, Packed.of)


def test_a_primitive_without_a_name_in_a_module_is_an_error():
    nameless = jex.Primitive("nameless")
    nameless.def_abstract_eval(lambda x: x)
    computation = computation_of(lambda x: nameless.bind(x), X)
    with pytest.raises(ValueError, match=r"`nameless` at .*test_pickled.py:\d+.* global variable"):
        carry(computation, Packed.of)
