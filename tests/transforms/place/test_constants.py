"""Arrays that a function closes over: they are bound once, and may meet each other."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from tests.helpers import mesh_of
from tests.transforms import two_layers
from tests.transforms.place import closed_over
from tests.transforms.two_layers import WEIGHTS, X

ONES, COUNT = jnp.ones(2), jnp.arange(2.0)


def joined():
    return jnp.concatenate([ONES, COUNT])


def appended():
    return jnp.append(ONES, np.arange(2.0))


def repeated():
    return jnp.repeat(jnp.arange(3.0), jnp.array([1, 2, 1]), total_repeat_length=4)


def indexed():
    return jnp.r_[ONES, jnp.arange(2.0)]


@pytest.mark.parametrize("make", [joined, appended, repeated, indexed])
@pytest.mark.parametrize("where", ["stage", "around"])
def test_constants_are_concatenated(make, where):
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        return jnp.mean((h + make()) ** 2) if where == "stage" else jnp.mean(h**2)

    def step(grad_fn):
        def run(w, x):
            value, grads = grad_fn(loss)(w, x)
            return value, [grads[0], grads[1] + make()]

        return run

    got = two_layers.place(step(two_layers.scheduled))(WEIGHTS, X)
    want = jax.jit(step(two_layers.accumulated))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def scaled_vjp(scale, factor):
    """`scale * x`, with a backward that is wrong by a factor, and closes over arrays, too."""
    fun = jax.custom_vjp(lambda x: scale * x)
    fun.defvjp(lambda x: (scale * x, x), lambda x, g: (factor * scale * g + 0 * x,))
    return fun


def scaled_jvp(scale, factor):
    fun = jax.custom_jvp(lambda x: scale * x)
    fun.defjvp(lambda primals, tangents: (scale * primals[0], factor * scale * tangents[0]))
    return fun


@pytest.mark.parametrize("make", [scaled_vjp, scaled_jvp])
@pytest.mark.parametrize(
    "scale", [jnp.arange(1.0, 5.0), jnp.float32(2.0), jnp.bfloat16(2.0)], ids=str
)
@pytest.mark.parametrize("differentiated", [True, False])
def test_a_derivative_rule_may_close_over_an_array(make, scale, differentiated):
    fun = jax.jit(make(scale, 3.0))

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        return jnp.mean(fun(h) ** 2)

    if differentiated:
        got = two_layers.place(two_layers.scheduled(loss))(WEIGHTS, X)
        want = jax.jit(two_layers.accumulated(loss))(WEIGHTS, X)
    else:
        loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), two_layers.MICROBATCHES)
        forward = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
        got, want = two_layers.place(forward)(WEIGHTS, X), jax.jit(loss)(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def test_an_array_that_stages_and_the_step_close_over_is_in_no_executable():
    """Each rank that reads it has it once, whatever the number of its tasks."""
    table = jax.random.normal(jax.random.key(5), (8, 4))

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1]) ** 2 + jnp.sum(table**2))

    def make(grad_fn):
        def step(w, x):
            value, grads = grad_fn(loss)(w, x)
            return value * jnp.sum(table), [g + jnp.sum(table, 0)[0] for g in grads]

        return step

    placed = two_layers.place(make(two_layers.scheduled))
    got, want = placed(WEIGHTS, X), jax.jit(make(two_layers.accumulated))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
    for computation in placed.bundle.computations:
        atoms = [v for e in computation.jaxpr.eqns for v in e.invars]
        assert not [v for v in atoms if jaxprs.is_literal(v) and v.aval.size > 1]
        assert not computation.jaxpr.consts
    for program in placed.programs:
        assert sum(np.size(value) == table.size for _, value in program.constants) == 1


@pytest.mark.parametrize("value", [jnp.asarray(2.0), jnp.arange(1.0, 5.0)])
def test_a_derivative_rule_that_closes_over_an_argument_is_refused_with_its_line(value):
    """JAX cannot differentiate such a function inside `jax.jit`, either."""

    def loss(w, x, scale):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        return jnp.mean(scaled_vjp(scale, 3.0)(h) ** 2)

    with pytest.raises(TypeError):
        jax.jit(jax.grad(jax.jit(loss)))(WEIGHTS, X, value)
    loop = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2, in_axes=(None, 0, None))
    placed = two_layers.place(jaxpp.schedule(loop, jaxpp.schedules.OneFOneB()))
    with pytest.raises(ValueError, match=r"test_constants\.py:\d+, closes over a value"):
        placed(WEIGHTS, X, value)


def test_an_array_that_the_step_closes_over_outlives_a_result_of_its_shape():
    shift = jnp.linspace(0.0, 1.0, 35).reshape(5, 7)  # no argument or gradient has this shape

    def step(w, x):
        value, grads = two_layers.scheduled(two_layers.loss)(w, x)
        return grads, shift * value

    placed = two_layers.place(step)
    first, second = placed(WEIGHTS, X), placed(WEIGHTS, X)
    chex.assert_trees_all_equal(first, second)


# ---- arrays that go, or change ------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("fate", closed_over.FATES)
@pytest.mark.parametrize("where", closed_over.WHERE)
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_keeps_what_it_closed_over(where, fate, shared):
    closed_over.check(mesh_of(2, shared=shared), where, fate)


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["in_a_loop", "plainly"])
def test_a_step_that_is_compiled_later_keeps_what_it_was_lowered_with(where):
    matrix, table = closed_over.aligned(), jnp.arange(1.0, 5.0)

    def loss(w, x):
        return two_layers.loss(w, closed_over.WHERE[where](matrix, x))

    def step(w, x):
        value, grads = two_layers.scheduled(loss)(w, closed_over.WHERE[where](matrix, x))
        return value * table[1], grads

    want = jax.jit(step)(WEIGHTS, X)
    lowered = two_layers.place(step).lower(WEIGHTS, X)
    matrix[:] = 9
    table.delete()
    chex.assert_trees_all_close(lowered.compile()(WEIGHTS, X), want, rtol=1e-4)


def test_a_step_may_be_given_and_donated_an_array_that_it_closes_over():
    shift = jnp.arange(16.0).reshape(4, 4)

    def step(w, x, state):
        value, grads = two_layers.scheduled(two_layers.loss)(w, x @ shift)
        return value, state + jnp.mean(grads[0])

    want = jax.jit(step)(WEIGHTS, X, shift)
    placed = two_layers.place(step, donate_argnums=2)
    value, state = placed(WEIGHTS, X, shift)
    chex.assert_trees_all_close((value, state), want, rtol=1e-4)
    assert shift.is_deleted()
    chex.assert_trees_all_close(placed(WEIGHTS, X, state)[0], want[0], rtol=1e-4)


@pytest.mark.more
def test_an_array_of_numpy_is_kept_once_in_each_rank_that_reads_it():
    table = closed_over.aligned()

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(closed_over.in_a_jit(table, x) @ w[0]))
        return jnp.mean((h @ w[1]) ** 2)

    lowered = two_layers.place(two_layers.scheduled(loss)).lower(WEIGHTS, X)
    kept = [[v for _, v in p.constants if np.shape(v) == (4, 4)] for p in lowered.programs]
    assert [len(own) for own in kept] == [1, 0]
    assert not np.shares_memory(kept[0][0], table)
    for computation in lowered.bundle.computations:
        assert not any(np.size(c) > 1 for e in computation.jaxpr.eqns for c in consts_of(e))


def consts_of(eqn):
    return [c for sub in eqn.params.values() for c in getattr(sub, "consts", ())]
