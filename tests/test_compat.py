"""What differs between JAX versions, checked on the version at hand."""

import threading
import warnings
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import _compat
from tests.helpers import mesh_of

X = jax.random.normal(jax.random.key(0), (3, 4))


# ---- jaxprs -------------------------------------------------------------------------------------


def test_a_jaxpr_is_built_from_equations():
    jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(jnp.sin(x)))(X)
    opened = jaxpr.jaxpr
    built = _compat.make_closed_jaxpr(opened.invars, opened.outvars, opened.eqns, "mine")
    assert isinstance(built, jex.ClosedJaxpr) and not _compat.constants_of(built)
    np.testing.assert_array_equal(jex.jaxpr_as_fun(built)(X)[0], jnp.tanh(jnp.sin(X)))
    jax.jit(lambda x: jex.jaxpr_as_fun(built)(x))(X)


def test_a_built_jaxpr_has_the_effects_of_its_equations():
    def fun(x):
        jax.debug.print("{}", x)
        return x

    opened = jax.make_jaxpr(fun)(1.0).jaxpr
    built = _compat.make_closed_jaxpr(opened.invars, opened.outvars, opened.eqns)
    assert built.effects == opened.effects and built.effects
    assert not _compat.make_closed_jaxpr(opened.invars, opened.outvars, []).effects


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["closed", "open"])
def test_a_body_keeps_its_type_and_constants_with_other_equations(wrap):
    constant = np.arange(4, dtype=np.float32)
    (eqn,) = jax.make_jaxpr(wrap(lambda x: jnp.sin(x) * constant))(X).eqns
    body = eqn.params["jaxpr"]
    assert isinstance(body, _compat.JaxprTypes)
    opened = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
    closed = _compat.make_closed_jaxpr(opened.invars, opened.outvars, opened.eqns)
    assert type(_compat.with_closed_type(closed, body)) is type(body)
    first = [e for e in opened.eqns if e.primitive.name == "sin"]
    shorter = _compat.with_equations(body, first, first[0].outvars)
    assert type(shorter) is type(body)
    assert len(_compat.constants_of(shorter)) == len(_compat.constants_of(body))
    changed = eqn.replace(params=dict(eqn.params, jaxpr=shorter))
    outer = _compat.make_closed_jaxpr(
        [v for v in changed.invars if not isinstance(v, jex.Literal)], changed.outvars, [changed]
    )
    args = [X if v.aval.shape == X.shape else constant for v in outer.jaxpr.invars]
    np.testing.assert_allclose(jex.jaxpr_as_fun(outer)(*args)[0], jnp.sin(X), rtol=1e-6)


def test_dead_code_goes_and_the_inputs_stay():
    def fun(x, y):
        dead = jnp.cos(y)
        kept, _ = jax.jit(lambda x: (jnp.sin(x), jnp.tan(x)))(x)
        return kept, dead

    jaxpr = jax.make_jaxpr(fun)(X, X)
    slim = _compat.eliminate_dead_code(jaxpr, [True, False])
    assert len(slim.jaxpr.invars) == 2
    np.testing.assert_array_equal(jex.jaxpr_as_fun(slim)(X, X)[0], jnp.sin(X))
    inside = [e.primitive.name for sub in [slim.eqns[0].params["jaxpr"]] for e in sub.eqns]
    assert (len(slim.eqns), inside) == (1, ["sin"])


# ---- scans --------------------------------------------------------------------------------------


def scan_of(num_consts, num_carry, num_xs, num_ys, rank=1, reverse=False):
    """A scan with so many of each, of arrays of one rank inside."""
    shape = (2,) * rank
    consts = [jnp.full(shape, 1.0 + i) for i in range(num_consts)]
    carry = tuple(jnp.full(shape, 10.0 + i) for i in range(num_carry))
    xs = tuple(jnp.full((3, *shape), 20.0 + i) for i in range(num_xs))

    def step(carry, xs):
        total = sum([*consts, *carry, *xs], jnp.zeros(shape))
        return tuple(c + total for c in carry), tuple(total * i for i in range(1, num_ys + 1))

    def fun(consts_, carry, xs):
        consts[:] = consts_
        return jax.lax.scan(step, carry, xs, length=3, reverse=reverse)

    return fun, (list(consts), carry, xs)


@pytest.mark.parametrize("num_consts", [0, 1, 2])
@pytest.mark.parametrize("num_carry", [0, 1, 2])
@pytest.mark.parametrize("num_xs", [0, 1, 2])
@pytest.mark.parametrize("num_ys", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_scan_is_read_in_parts(num_consts, num_carry, num_xs, num_ys, rank):
    if not num_carry and not num_ys:
        num_ys = 1
    fun, args = scan_of(num_consts, num_carry, num_xs, num_ys, rank)
    eqns = jax.make_jaxpr(fun)(*args).eqns
    (eqn,) = [e for e in eqns if e.primitive.name == "scan"]
    assert _compat.scan_parts(eqn) == (num_consts, num_carry)


def grad_of_scan(x, w):
    step = lambda c, x: (jnp.tanh(c @ w + x), c.sum())  # noqa: E731
    carry, ys = jax.lax.scan(step, jnp.zeros(4), x)
    return (carry**2).sum() + ys.sum()


def test_scans_made_by_differentiation_and_batching_are_read_in_parts():
    x, w = X, jnp.eye(4)
    plain = jax.make_jaxpr(grad_of_scan)(x, w)
    (eqn,) = [e for e in plain.eqns if e.primitive.name == "scan"]
    assert _compat.scan_parts(eqn) == (1, 1)
    derived = jax.make_jaxpr(jax.vmap(jax.grad(grad_of_scan, argnums=1), (0, None)))(x[None], w)
    scans = [e for e in derived.eqns if e.primitive.name == "scan"]
    assert len(scans) == 2
    for eqn in scans:
        consts, carry = _compat.scan_parts(eqn)
        body = eqn.params["jaxpr"].jaxpr
        inner = [v.aval for v in body.invars[consts : consts + carry]]
        assert inner == [v.aval for v in eqn.invars[consts : consts + carry]]
        assert [v.aval.shape for v in body.invars[consts + carry :]] == [
            v.aval.shape[1:] for v in eqn.invars[consts + carry :]
        ]
        assert all(v.aval.shape[0] == 3 for v in eqn.invars[consts + carry :])


def test_scans_over_keys_are_read_in_parts():
    keys = jax.random.split(jax.random.key(0), 3)
    fun = lambda k, ks: jax.lax.scan(lambda c, k: (jax.random.fold_in(c, 1), k), k, ks)  # noqa: E731
    (eqn,) = jax.make_jaxpr(fun)(keys[0], keys).eqns
    assert _compat.scan_parts(eqn) == (0, 1)


# ---- names and lines ----------------------------------------------------------------------------


def test_an_equation_knows_the_users_line():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x))(X)  # this line
    line = _compat.source_line(jaxpr.eqns[0])
    file, number = line.rsplit(":", 1)
    assert file.endswith("test_compat.py")
    with open(__file__) as source:
        assert "# this line" in source.readlines()[int(number) - 1]
    assert _compat.at_source_line(jaxpr.eqns[0]) == f" at {line}"


def test_scopes_are_put_in_front():
    def fun(x):
        with jax.named_scope("outer"):
            x = jnp.cos(x)
        with jax.named_scope("inner"):
            return jnp.sin(x)

    cos, sin = jax.make_jaxpr(fun)(X).eqns
    assert str(_compat.under_scope(sin, cos).source_info.name_stack) == "outer/inner"
    assert str(_compat.in_scope(sin, "mine").source_info.name_stack) == "mine/inner"
    assert str(sin.source_info.name_stack) == "inner"


def test_tracers_are_told_from_values():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(_compat.is_tracer(x)) or x)(X)
    assert seen == [True]
    assert (
        not _compat.is_tracer(X) and not _compat.is_tracer(np.ones(1)) and not _compat.is_tracer(1)
    )


def test_a_trace_knows_that_it_is_one():
    seen = [_compat.is_tracing()]
    jax.vmap(lambda x: seen.append(_compat.is_tracing()) or x)(X)
    jax.jit(lambda: seen.append(_compat.is_tracing()))()
    assert [*seen, _compat.is_tracing()] == [False, True, True, False]


def test_jit_may_be_disabled():
    with jax.disable_jit():
        assert _compat.is_jit_disabled()
    assert not _compat.is_jit_disabled()


@pytest.mark.parametrize("setting", [jax.enable_x64(True), jax.default_matmul_precision("highest")])
def test_the_context_of_a_trace_is_that_of_its_settings(setting):
    before = _compat.trace_context()
    with setting:
        assert _compat.trace_context() != before
    assert _compat.trace_context() == before


def test_an_executable_that_finds_a_nan_raises_what_jit_raises():
    compiled = jax.jit(lambda x: x / x).lower(X).compile()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        try:
            compiled(0 * X)
        except Exception as error:
            raise _compat.public_error(error) from None
    error = KeyError()
    assert _compat.public_error(error) is error


def test_a_class_may_refuse_to_be_computed_with():
    class Place:
        pass

    class Handle:
        dtype, shape, weak_type, sharding = np.dtype(np.float32), (), False, Place()

    def refuse(it):
        raise ValueError(f"not this {type(it).__name__}")

    _compat.refuse_as_argument(Handle, refuse)
    _compat.refuse_as_place(Place, refuse)
    handle: Any = Handle()
    for function in (jnp.exp, jax.lax.exp, jax.jit(jnp.exp), jax.grad(jnp.exp)):
        with pytest.raises(ValueError, match="not this (Handle|Place)"):
            function(handle)
    assert jax.eval_shape(jnp.exp, handle) == jax.ShapeDtypeStruct((), np.float32)
    assert jnp.zeros_like(handle) == 0


# ---- executables --------------------------------------------------------------------------------


def compile_for(fun, device, *shapes):
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
    return jax.jit(fun).lower(*avals).compile()


class Compilations:
    """Counts how often the backend compiles, in this thread."""

    def __init__(self):
        self.count, self._thread = 0, threading.get_ident()

    def __call__(self, event, duration_secs, **kwargs):
        if "backend_compile" in event and threading.get_ident() == self._thread:
            self.count += 1


@pytest.fixture
def no_cache():
    """Without JAX's persistent compilation cache, should the user have one."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def compilations(no_cache):
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


def test_an_executable_is_loaded_elsewhere_without_compiling(compilations):
    first, *others = jax.devices()[:3]
    compiled = compile_for(lambda x, w: {"y": jnp.tanh(x @ w)}, first, (3, 4), (4, 4))
    assert compilations.count == 1
    loaded = [_compat.load_on_devices(compiled, [device]) for device in others]
    assert compilations.count == 1
    x, w = X, jax.random.normal(jax.random.key(1), (4, 4))
    want = compiled(*jax.device_put((x, w), first))["y"]
    for device, executable in zip(others, loaded, strict=True):
        assert executable is not None
        got = executable(*jax.device_put((x, w), device))["y"]
        assert got.devices() == {device}
        np.testing.assert_array_equal(got, want)


def test_with_a_persistent_cache_nothing_is_loaded(no_cache, tmp_path):
    compiled = compile_for(jnp.tanh, jax.devices()[0], (3, 4))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert _compat.load_on_devices(compiled, jax.devices()[1:2]) is None


def test_what_cannot_be_loaded_is_none(no_cache):
    class Backwards:
        """An executable that no backend can serialize."""

        def __getattr__(self, name):
            raise ValueError("no serialization here")

    assert _compat.load_on_devices(Backwards(), jax.devices()[:1]) is None  # pyright: ignore


def test_an_executable_of_several_devices_is_compiled_anew(no_cache):
    """What is loaded would hold the shardings over the devices it was compiled for."""
    compiled = compile_for(jnp.tanh, jax.devices()[0], (3, 4))
    assert _compat.load_on_devices(compiled, jax.devices()[:2]) is None


# ---- copies -------------------------------------------------------------------------------------


def _copied(kind: str) -> list[Any]:
    """Arrays on the first device, or beyond."""
    first, *others = jax.devices()
    plain = [jnp.arange(6.0).reshape(2, 3), jnp.zeros((0, 2)), jnp.arange(3, dtype=jnp.int8)]
    mesh = jax.make_mesh((2,), ("data",), devices=others[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return {
        "committed": jax.device_put(plain, first),
        "uncommitted": plain,
        "mixed": [plain[0], jax.device_put(plain[0], first)],
        "key": [jax.device_put(jax.random.key(3), first)],
        "split": [jax.device_put(jnp.arange(4.0), split)],
        "numpy": [np.arange(3.0, dtype=np.float32)],
        "there": jax.device_put(plain, jax.devices()[3]),
        "weak": [jax.device_put(jax.jit(lambda x: x)(2.0), first)],
        "none": [],
    }[kind]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    "kind", "committed uncommitted mixed key split numpy there weak none".split()
)
def test_a_copier_does_what_device_put_does(missing, kind, monkeypatch):
    device, arrays = jax.devices()[3], _copied(kind)
    with monkeypatch.context() as without:
        if missing:
            without.delattr(_compat.xla_client, "batched_copy_array_to_devices_with_sharding")
        copy = _compat.copier_to(device)
    found, expected = copy(arrays), jax.device_put(arrays, device)
    assert len(found) == len(arrays)
    for array, wanted in zip(found, expected, strict=True):
        assert jax.typeof(array) == jax.typeof(wanted)
        assert array.sharding == wanted.sharding and array.committed
        if kind == "key":
            array, wanted = jax.random.key_data(array), jax.random.key_data(wanted)
        np.testing.assert_array_equal(array, wanted)


def test_a_copier_needs_no_device_put_for_committed_arrays(monkeypatch):
    arrays = _copied("committed")
    copy = _compat.copier_to(jax.devices()[3])
    monkeypatch.delattr(jax, "device_put")
    for array, given in zip(copy(arrays), arrays, strict=True):
        np.testing.assert_array_equal(array, given)


def test_a_copy_outlives_what_it_was_made_of():
    """The copied array may be donated, or deleted, as soon as the copier has returned."""
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    for n in range(20):
        given = jax.device_put(jnp.full((1 << 16,), float(n)), jax.devices()[0])
        (found,) = _compat.copier_to(jax.devices()[3])([given])
        donating(given)
        assert given.is_deleted()
        np.testing.assert_array_equal(found, np.full(1 << 16, float(n), np.float32))


def test_a_copier_raises_what_device_put_raises():
    """A deleted array is an error, not a crash; a guard that lets explicit transfers pass holds."""
    copy, (array, *_) = _compat.copier_to(jax.devices()[3]), _copied("committed")
    with jax.transfer_guard("disallow"):
        (found,) = copy([array])
    np.testing.assert_array_equal(found, array)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed"):
        copy([array])
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        copy([array])


def wrong_in_one_version(matrix, x):
    """jax-ml/jax#39103: a small product for each of many rows, and its sum."""
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(x)


def test_a_product_that_one_version_of_jax_gets_wrong_is_warned_of():
    i = jnp.arange(32_769.0)
    x = jnp.stack((i, jnp.zeros_like(i), jnp.zeros_like(i)), axis=1)
    step = jaxpp.place(wrong_in_one_version, mesh_of(1))
    concerned = jax.__version_info__ == (0, 10, 2) and jax.default_backend() == "cpu"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.lower(jnp.eye(3), x)
        jaxpp.place(wrong_in_one_version, mesh_of(1)).lower(jnp.eye(3), x[1:])  # it is right
    told = [str(w.message) for w in found if "39103" in str(w.message)]
    assert len(told) == concerned and all("test_compat.py" in text for text in told)
