"""Every context that `jax.jit` accepts around a call, around each transform and on each mesh.

Under a context a transformed function does what `jax.jit` of the plain function does: it gives the
same values and types, or raises the same error.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import assert_close, mesh_of
from tests.transforms.two_layers import MICROBATCHES, WEIGHTS, X


def inside(size, *types):
    return jax.make_mesh((size,), ("data",), types or None, devices=jax.devices()[:size])


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


#: The contexts, by name.
CONTEXTS = {
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "set_mesh": lambda: jax.set_mesh(inside(2)),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "jax_custom_vjp3": lambda: setting("jax_custom_vjp3", True),
    "set_mesh, one device": lambda: jax.set_mesh(inside(1, AxisType.Auto)),
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",))),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "enable_x64": lambda: jax.enable_x64(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("bfloat16"),
    "threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "default_device, by name": lambda: jax.default_device("cpu"),
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "enable_checks": lambda: jax.enable_checks(True),
    "softmax_custom_jvp": lambda: jax.softmax_custom_jvp(False),
}
#: Under these alone, JAX cannot run a plain function on the devices that the arrays are on.
NOT_PLAIN = {"use_abstract_mesh"}


def batch():
    """Examples, and a fresh key for each: a call uses them up."""
    return X, jax.random.split(jax.random.key(7), len(X))


def dropout(h, keys):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, h.shape[1:]))(keys)
    return jnp.where(kept, h, 0)


def loss(weights, batch):
    """Two layers with dropout, each with its own keys of one array."""
    x, keys = batch
    keys = jax.vmap(jax.random.split)(keys)
    h = dropout(jnp.tanh(x @ weights[0]), keys[:, 0])
    h = jaxpp.pipeline_enter_stage(h)
    return jnp.mean((dropout(h, keys[:, 1]) @ weights[1]) ** 2)


def step_of(grad_fn):
    def step(weights, batch):
        value, grads = grad_fn(weights, batch)
        return value, [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    return step


def looped(loss):
    return jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)


def scheduled(loss):
    return jaxpp.schedule(looped(loss), jaxpp.schedules.OneFOneB())


def placed(mesh, **options):
    return lambda loss: jaxpp.place(step_of(scheduled(loss)), mesh(), **options)


WAYS = {
    "place": placed(lambda: mesh_of(2)),
    "place, inside": placed(
        lambda: jaxpp.MpmdMesh((2, 2), ("mpmd", "data")), in_specs=(P(), P("data"))
    ),
    "place, shared": placed(lambda: mesh_of(2, shared=True)),
    "schedule": lambda loss: jax.jit(step_of(scheduled(loss))),
    "microbatch": lambda loss: jax.jit(step_of(looped(loss))),
    "wrap_forward": lambda loss: jax.jit(step_of(jax.value_and_grad(jaxpp.wrap_forward(loss)))),
    "split_stages": lambda loss: jax.jit(step_of(jax.value_and_grad(jaxpp.split_stages(loss)))),
}


def plain(loss):
    return jax.jit(step_of(jax.value_and_grad(loss)))


def outcome(context, run, *args):
    """What a call gives under a context: its value, or its error."""
    try:
        with context():
            return run(*args)
    except (ValueError, TypeError, FloatingPointError, jax.errors.KeyReuseError) as error:
        return error


#: On JAX 0.10 other bits of random numbers cannot be split over devices. And what is jitted under a
#: mesh without devices runs nowhere.
LEFT_OUT = {("threefry_partitionable", "place, inside")} | {
    (name, way) for name in NOT_PLAIN for way in WAYS if not way.startswith("place")
}
PAIRS = [(name, way) for way in WAYS for name in CONTEXTS if (name, way) not in LEFT_OUT]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_a_context_holds_as_it_does_for_jit(name, way):
    context = CONTEXTS[name]
    got = outcome(context, WAYS[way](loss), WEIGHTS, batch())
    unset = contextlib.nullcontext if name in NOT_PLAIN else context
    want = outcome(unset, plain(loss), WEIGHTS, batch())
    assert not isinstance(want, Exception)
    assert not isinstance(got, Exception), got
    # Products in bfloat16 are summed in another order.
    rtol, atol = (2e-2, 1e-2) if name == "default_matmul_precision" else (1e-5, 1e-6)
    assert_close(jaxpp.gather(got), want, rtol, atol)


# ---- what a context refuses ---------------------------------------------------------------------


def with_one_key(weights, batch):
    x, keys = batch
    h = jaxpp.pipeline_enter_stage(dropout(jnp.tanh(x @ weights[0]), keys))
    return jnp.mean((dropout(h, keys) @ weights[1]) ** 2)


def with_ranks(weights, batch):
    x, _ = batch
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0])) + jnp.ones(6)
    return jnp.mean((h @ weights[1]) ** 2)


def with_dtypes(weights, batch):
    x, _ = batch
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0])) * jnp.ones((1, 6), jnp.bfloat16)
    return jnp.mean((h @ weights[1]) ** 2)


def with_nan(weights, batch):
    return loss(weights, batch) + jnp.log(-jnp.sum(weights[0] ** 2))


def with_inf(weights, batch):
    return loss(weights, batch) + jnp.sum(weights[0] ** 2) / 0.0


#: For each context that refuses something, a loss that has it.
REFUSED = {
    "debug_key_reuse": with_one_key,
    "debug_nans": with_nan,
    "debug_infs": with_inf,
    "numpy_rank_promotion": with_ranks,
    "numpy_dtype_promotion": with_dtypes,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_context_refuses_is_refused(name, way):
    fun = REFUSED[name]
    got = outcome(CONTEXTS[name], WAYS[way](fun), WEIGHTS, batch())
    want = outcome(CONTEXTS[name], plain(fun), WEIGHTS, batch())
    assert isinstance(want, Exception) and type(got) is type(want), got


def test_a_key_that_a_call_has_used_up_is_refused():
    run, data = WAYS["place"](loss), batch()
    with jax.debug_key_reuse(True):
        run(WEIGHTS, data)
        with pytest.raises(jax.errors.KeyReuseError, match="placed function"):
            run(WEIGHTS, data)


def test_a_stage_that_is_computed_again_uses_its_keys_once():
    wrapped = jaxpp.wrap_forward(loss, policy=jax.checkpoint_policies.nothing_saveable)
    loop = jaxpp.microbatch(jax.value_and_grad(wrapped), MICROBATCHES)
    run = jaxpp.place(step_of(jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())), mesh_of(2))
    with jax.debug_key_reuse(True):
        assert_close(jaxpp.gather(run(WEIGHTS, batch())), plain(loss)(WEIGHTS, batch()))


# ---- meshes -------------------------------------------------------------------------------------


def test_a_step_that_needs_the_mesh_around_it_is_told_of_its_own():
    def constrained(weights, batch):
        x, keys = batch
        return loss(weights, (jax.lax.with_sharding_constraint(x, P("data")), keys))

    with jax.set_mesh(inside(2, AxisType.Auto)), pytest.raises(Exception) as caught:
        WAYS["place"](constrained)(WEIGHTS, batch())
    assert any("jaxpp.MpmdMesh" in note for note in caught.value.__notes__)


def test_64_bits_within_a_loss():
    """The context is around a part of the function, and a constant in it is wide."""
    table = np.arange(6.0)

    def wide(weights, batch):
        value = loss(weights, batch)
        with jax.enable_x64(True):
            return (value.astype("float64") * table.sum() + jnp.sum(table)).astype("float32")

    got = jaxpp.gather(WAYS["place"](wide)(WEIGHTS, batch()))
    assert_close(got, plain(wide)(WEIGHTS, batch()))
