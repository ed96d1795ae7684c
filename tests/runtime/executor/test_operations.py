"""Where a task gives an invalid value, the error names the operation and the user's line."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp._program import Computation
from jaxpp.runtime.executor import find_invalid

X = jnp.arange(4.0)


def in_a_call(x):
    return jax.jit(jnp.log)(x - 1.0)  # here


@jax.custom_jvp
def rooted(x):
    return jnp.sqrt(x - 1.0)  # here


rooted.defjvp(lambda primals, tangents: (rooted(*primals), tangents[0]))


def in_a_scan(x):
    return jax.lax.scan(lambda c, x: (c + x, x / (x - x)), 0.0, x)[1]  # here


def in_a_checkpoint(x):
    return jax.checkpoint(rooted)(x)


def infinite(x):
    return jnp.exp(x * 1000.0)  # here


CASES = {in_a_call: "log", rooted: "sqrt", in_a_scan: "scan", in_a_checkpoint: "sqrt"}


def line_of(fun):
    """The line of a function that is marked."""
    fun = getattr(fun, "fun", rooted.fun if fun is in_a_checkpoint else fun)
    with open(__file__) as file:
        lines = file.readlines()
    numbered = enumerate(lines[fun.__code__.co_firstlineno - 1 :], fun.__code__.co_firstlineno)
    return next(number for number, line in numbered if line.endswith("# here\n"))


def computation_of(fun):
    return Computation("F0", jax.make_jaxpr(fun)(X), ())


@pytest.mark.parametrize("fun", [*CASES, infinite])
def test_the_operation_is_found(fun):
    kind = "infs" if fun is infinite else "nans"
    operation = CASES.get(fun, "exp")
    with getattr(jax, f"debug_{kind}")(True):
        found = find_invalid(computation_of(fun), jax.devices()[0], [X])
    want = rf"invalid value \({kind[:3]}\) encountered in {operation} at .*operations.py:(\d+)"
    match = re.fullmatch(want, found or "")
    assert match and int(match[1]) == line_of(fun), found


def test_what_gives_valid_values_alone_is_not_named():
    with jax.debug_nans(True):
        assert find_invalid(computation_of(jnp.sin), jax.devices()[0], [X]) is None


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_a_placed_step_names_the_operation_and_its_task(donate):
    """In the forward of a stage of a rank with two devices, whose arguments may be donated."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        return jnp.mean(jnp.log(h @ w - 100.0))

    def step(w, x):
        grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
        grad = jaxpp.schedule(jaxpp.microbatch(grad, 2), jaxpp.schedules.OneFOneB())
        value, grads = grad(w, x)
        return w - grads, x, value

    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    placed = jaxpp.place(step, mesh, donate_argnums=donate)
    args = lambda: (jnp.eye(4), jnp.ones((4, 4)))  # noqa: E731
    placed(*args())  # without the check
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        placed(*args())
    line = loss.__code__.co_firstlineno + 2
    assert str(caught.value) == f"invalid value (nan) encountered in log at {__file__}:{line}"
    assert caught.value.__notes__ == ["in F1.0 on rank 1"]
