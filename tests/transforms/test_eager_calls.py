"""A transformed function outside of `jit` compiles once, and sees what Python has at each call."""

import contextlib
import dataclasses
import gc
import weakref

import chex
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.jaxprs import _run

WEIGHTS = [jax.random.normal(jax.random.key(i), (4, 4)) for i in range(3)]
X = jax.random.normal(jax.random.key(3), (8, 4))


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def loss_fn(weights, x):
    for n, w in enumerate(weights):
        x = jaxpp.pipeline_enter_stage(x) if n else x
        x = sine(jax.nn.relu(x @ w))
    return jnp.mean(x**2)


def wrapped(loss, **options):
    return jaxpp.wrap_forward(loss, **options)


def looped(loss):
    return jaxpp.microbatch(loss, 4)


def with_gradients(loss):
    return jax.value_and_grad(loss)


def scheduled(loss, schedule=None):
    return jaxpp.schedule(loss, schedule or jaxpp.schedules.OneFOneB())


def batched(fun):
    return lambda weights, x: jax.vmap(fun, (None, 0))(weights, jnp.stack([x, x + 1]))


def pulled_back(fun):
    """A product with the Jacobian of a function whose result is no scalar."""

    def product(weights, x):
        y, pull_back = jax.vjp(fun, weights, x)
        return pull_back(jnp.ones_like(y))

    return product


def squared(grad_fun):
    return lambda weights, x: sum(jnp.sum(g**2) for g in grad_fun(weights, x))


FUNCTIONS = {
    "split_stages": jaxpp.split_stages(loss_fn),
    "wrap_forward": wrapped(loss_fn),
    "gradients of wrap_forward": with_gradients(wrapped(loss_fn)),
    "gradients under a policy": with_gradients(
        wrapped(loss_fn, policy=jax.checkpoint_policies.nothing_saveable)
    ),
    "microbatch": looped(loss_fn),
    "microbatch of gradients": looped(with_gradients(wrapped(loss_fn))),
    "gradients of microbatch": with_gradients(looped(wrapped(loss_fn))),
    "predictions of microbatches": jaxpp.microbatch(
        lambda weights, x: jnp.tanh(x @ weights[0]), 4, reduce="concat"
    ),
    "schedule": scheduled(looped(with_gradients(wrapped(loss_fn)))),
    "schedule of gradients": scheduled(with_gradients(looped(wrapped(loss_fn)))),
    "schedule of two directions": scheduled(
        looped(with_gradients(wrapped(lambda weights, x: loss_fn(weights[:2], x)))),
        jaxpp.schedules.Chimera(),
    ),
    "product with a Jacobian": pulled_back(
        wrapped(lambda weights, x: sine(jaxpp.pipeline_enter_stage(0.1 * x @ weights[0])))
    ),
    "batch of wrap_forward": batched(wrapped(loss_fn)),
    "batch of microbatch": batched(looped(with_gradients(wrapped(loss_fn)))),
    "batch of a schedule": batched(scheduled(looped(with_gradients(wrapped(loss_fn))))),
    "gradients of a schedule": jax.grad(
        lambda *args: scheduled(looped(with_gradients(wrapped(loss_fn))))(*args)[0]
    ),
    "gradients of gradients": jax.grad(squared(jax.grad(wrapped(loss_fn)))),
}


@contextlib.contextmanager
def compilations():
    """Lists the compilations of XLA."""
    made = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            made.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield made
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_compiles_nothing_that_an_equal_call_has_compiled(name):
    fun, others = FUNCTIONS[name], ([2 * w for w in WEIGHTS], X + 1)
    fun(WEIGHTS, X)
    with compilations() as made:
        results = fun(*others)
    assert not made
    expected = jax.jit(fun)(*others)
    chex.assert_trees_all_close(results, expected, rtol=1e-5, atol=1e-6)


def test_functions_that_compute_the_same_share_an_executable():
    """JAX knows a function by its identity; here two functions of one program are one."""

    def make():
        return scheduled(looped(with_gradients(wrapped(lambda weights, x: loss_fn(weights, x)))))

    expected = make()(WEIGHTS, X)
    with compilations() as made:
        chex.assert_trees_all_equal(make()(WEIGHTS, X), expected)
    assert not made


# ---- what changes between calls -----------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    """All that Python may change behind a function's back."""

    scale: float
    array: jax.Array
    buffer: np.ndarray

    @property
    def total(self) -> float:
        return self.scale + float(self.array.sum()) + float(self.buffer.sum())


@pytest.mark.parametrize("make", [wrapped, looped, lambda f: with_gradients(looped(wrapped(f)))])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_call_sees_what_has_changed_in_python(make, jitted):
    settings = Settings(1.0, jnp.ones(2), np.ones(2, np.float32))

    def loss(w, x):
        def shifted():
            return settings.scale + settings.array.sum() + jnp.sum(settings.buffer)

        x = jaxpp.pipeline_enter_stage(x * w)
        return jnp.mean(x) + (jax.jit(lambda: shifted())() if jitted else shifted())

    def call():
        return jax.tree.leaves(make(loss)(jnp.zeros(()), jnp.zeros((8, 1))))[0]

    np.testing.assert_allclose(call(), settings.total)
    settings.scale = 3.0
    np.testing.assert_allclose(call(), settings.total)
    settings.array = jnp.full(2, 5.0)
    np.testing.assert_allclose(call(), settings.total)
    settings.buffer[:] = 7.0
    np.testing.assert_allclose(call(), settings.total)


def test_a_call_uses_the_derivative_rule_that_a_function_has_by_then():
    factor = 2.0

    def make():
        rule = jax.custom_vjp(lambda x: 1.0 * x)
        rule.defvjp(lambda x: (x, None), lambda _, ct: (factor * ct,))
        return jax.grad(looped(lambda w, x: jnp.mean(rule(jaxpp.pipeline_enter_stage(w * x)))))

    assert float(make()(jnp.ones(()), jnp.ones(8))) == 2.0
    factor = 3.0
    assert float(make()(jnp.ones(()), jnp.ones(8))) == 3.0


def test_a_reduction_may_change_between_calls():
    class Scaled:
        scale = 1.0

        def init(self, x):
            return jnp.zeros(x.shape, x.dtype)

        def combine(self, accumulated, x):
            return accumulated + self.scale * x

        def finish(self, accumulated, count):
            return accumulated

    scaled = Scaled()
    fun = jaxpp.microbatch(lambda w, x: jnp.sum(w * x), 4, reduce=scaled)
    assert float(fun(jnp.ones(()), jnp.ones(8))) == 8.0
    scaled.scale = 2.0
    assert float(fun(jnp.ones(()), jnp.ones(8))) == 16.0


@pytest.mark.more
def test_a_call_follows_the_settings_of_jax():
    fun = FUNCTIONS["schedule"]
    fun(WEIGHTS, X)
    with compilations() as made, jax.default_matmul_precision("highest"):
        fun(WEIGHTS, X)
        assert made
        made.clear()
        fun(WEIGHTS, X)
    assert not made
    with jax.enable_x64(True):
        loss, _ = fun([np.asarray(w, np.float64) for w in WEIGHTS], np.asarray(X, np.float64))
        assert loss.dtype == jnp.float64
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fun(WEIGHTS, X / 0)
    expected = fun(WEIGHTS, X)
    with jax.disable_jit():
        chex.assert_trees_all_close(fun(WEIGHTS, X), expected, rtol=1e-5, atol=1e-6)


def test_a_print_is_made_at_each_call(capfd):
    def loss(w, x):
        x = jaxpp.pipeline_enter_stage(x * w)
        jax.debug.print("a print")
        return jnp.mean(x)

    for _ in range(2):
        jax.block_until_ready(looped(loss)(jnp.ones(()), jnp.ones(8)))
        jax.effects_barrier()
        assert capfd.readouterr().out.count("a print") == 4


# ---- memory -------------------------------------------------------------------------------------


def test_a_call_keeps_no_more_than_the_call_before():
    """A program is kept once, and only the last few programs are."""
    fun = FUNCTIONS["gradients of microbatch"]
    fun(WEIGHTS, X)
    before = _run._compiled.cache_info()
    fun(WEIGHTS, X)
    after = _run._compiled.cache_info()
    assert (after.hits, after.misses) == (before.hits + 2, before.misses)  # forward and backward
    assert after.maxsize is not None and after.currsize == before.currsize


def test_no_array_is_kept_that_a_function_closes_over():
    def call():
        array = jnp.arange(8.0) + 1
        loss = looped(lambda w, x: jnp.mean(w * x * array))
        with_gradients(loss)(jnp.ones(()), jnp.ones((4, 8)))
        return weakref.ref(array)

    kept = call()
    gc.collect()
    assert kept() is None


def test_functions_that_differ_in_a_derivative_rule_alone_have_their_own_gradients():
    def factor(k):
        @jax.custom_jvp
        def double(x):
            return 2 * x

        double.defjvp(lambda primals, tangents: (double(*primals), k * tangents[0]))
        return jaxpp.microbatch(lambda w, x: double(w * x), 2, reduce="concat")

    for k in (2.0, 5.0):
        gradient = jax.grad(lambda w, loop: loop(w, jnp.arange(4.0)).sum())
        assert gradient(1.0, factor(k)) == 6 * k
