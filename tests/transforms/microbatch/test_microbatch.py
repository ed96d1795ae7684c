"""Slices one after the other: law 2, prefixes, reductions and errors."""

import dataclasses
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import _compat, jaxprs
from tests.helpers import assert_close_sums, assert_same

W = jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (12, 8))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def count(jaxpr, name):
    return sum(
        (eqn.primitive.name == name) + sum(count(sub, name) for sub in jaxprs.sub_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


# ---- law 2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 12])
@pytest.mark.parametrize(
    "step",
    [
        lambda f, m: jaxpp.microbatch(jax.value_and_grad(f), m),
        lambda f, m: jax.value_and_grad(jaxpp.microbatch(f, m)),
    ],
    ids=["inside", "outside"],
)
def test_the_gradient_is_that_of_the_full_batch(step, number):
    want = jax.value_and_grad(loss)(W, X)
    assert_close_sums(step(loss, number)(W, X), want)
    assert_close_sums(jax.jit(step(loss, number))(W, X), want)


def test_one_gradient_dropped_would_be_seen():
    fewer = jaxpp.microbatch(jax.grad(loss), 3)(W, X.at[:4].set(0.0))
    with pytest.raises(AssertionError):
        assert_close_sums(fewer, jax.grad(loss)(W, X))


@pytest.mark.parametrize(
    "step",
    [
        lambda m: jaxpp.microbatch(loss, m),
        lambda m: jaxpp.microbatch(jax.value_and_grad(loss), m),
        lambda m: jax.grad(jaxpp.microbatch(loss, m)),
    ],
    ids=["forward", "grad-inside", "grad-outside"],
)
def test_the_jaxpr_has_one_scan_and_does_not_grow_with_the_number(step):
    jaxprs = [jax.make_jaxpr(step(number))(W, X).jaxpr for number in (2, 4, 12)]
    assert [count(jaxpr, "scan") for jaxpr in jaxprs] == [1, 1, 1]
    assert len({count(jaxpr, "dot_general") for jaxpr in jaxprs}) == 1


def test_the_gradient_outside_keeps_one_slices_residuals():
    jaxpr = jax.make_jaxpr(jax.grad(jaxpp.microbatch(loss, 4)))(W, X)
    (scan,) = [e for e in jaxprs.inline(jaxpr, lambda e: True).eqns if e.primitive.name == "scan"]
    assert all(v.aval.size <= W.size for v in scan.outvars)


@pytest.mark.parametrize("number", [1, 3])
def test_gradients_by_the_sliced_data(number):
    want = jax.grad(loss, argnums=(0, 1))(W, X)
    assert_close_sums(jax.grad(jaxpp.microbatch(loss, number), argnums=(0, 1))(W, X), want)
    assert_close_sums(jax.grad(jaxpp.microbatch(loss, number), argnums=1)(W, X), want[1])


def test_gradients_of_a_closed_over_model():
    def outside(w):
        return jaxpp.microbatch(lambda x: loss(w, x), 3, in_axes=0)(X)

    def inside(w):
        return jaxpp.microbatch(lambda x: loss(jnp.sin(w), x), 3, in_axes=(0,))(X)

    assert_close_sums(jax.value_and_grad(outside)(W), jax.value_and_grad(loss)(W, X))
    assert_close_sums(jax.jit(jax.grad(inside))(W), jax.grad(lambda w: loss(jnp.sin(w), X))(W))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_gradients_of_a_sum_or_a_mean(reduce):
    scale = 1.0 if reduce == "mean" else 4.0
    got = jax.grad(jaxpp.microbatch(loss, 4, reduce=reduce))(W, X)
    assert_close_sums(got, jax.grad(lambda w, x: scale * loss(w, x))(W, X))


def outputs(w, x):
    h = jnp.tanh(x @ w)
    return {"loss": (h**2).mean(), "other": h.mean(), "rows": h.sum(1), "count": jnp.int32(3)}


REDUCE = {"loss": "mean", "other": "mean", "rows": "concat", "count": "last"}


@pytest.mark.parametrize(
    "of",
    [
        lambda o: o["loss"],
        lambda o: o["other"],
        lambda o: o["loss"] * 2 + jnp.sin(o["other"]),
        lambda o: (o["rows"] ** 2).sum(),
        lambda o: o["loss"] + o["rows"][3] * o["count"],
    ],
    ids=["first", "second", "both", "collected", "all"],
)
@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_gradients_through_any_output(of, argnums):
    def total(fun):
        return lambda w, x: of(fun(w, x))

    got = jax.grad(total(jaxpp.microbatch(outputs, 3, reduce=REDUCE)), argnums)(W, X)
    assert_close_sums(got, jax.grad(total(outputs), argnums)(W, X))


def live_scans(fun, *args):
    """The scans of a function that are needed for its results."""
    flat = jaxprs.inline(jax.make_jaxpr(fun)(*args), lambda e: True)
    live = _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))
    return [e for e in live.eqns if e.primitive.name == "scan"]


@pytest.mark.parametrize("name", ["loss", "other"])
def test_the_gradient_of_any_scalar_takes_one_pass_over_the_slices(name):
    def fun(w, x):  # the key that is differentiated sorts first or last
        return {k: v for k, v in outputs(w, x).items() if k in ("loss", "other")}

    microbatched = jaxpp.microbatch(fun, 4)
    got = jax.value_and_grad(lambda w: microbatched(w, X)[name])
    assert_close_sums(jax.jit(got)(W), jax.value_and_grad(lambda w: fun(w, X)[name])(W))
    (scan,) = live_scans(got, W)
    assert sum(v.aval.shape == W.shape for v in scan.outvars) == 1
    alone = jax.value_and_grad(lambda w: jaxpp.microbatch(lambda w, x: fun(w, x)[name], 4)(w, X))
    flops = [jax.jit(f).lower(W).compile().cost_analysis()["flops"] for f in (got, alone)]
    assert flops[0] == pytest.approx(flops[1], rel=0.01)


@pytest.mark.parametrize("reduce", ["stack", "concat"])
def test_the_gradient_of_collected_rows_takes_the_memory_of_one_slice(reduce):
    microbatched = jaxpp.microbatch(lambda w, x: jnp.tanh(x @ w).sum(1), 4, reduce=reduce)
    got = jax.grad(lambda w: (microbatched(w, X) ** 2).sum())
    assert_close_sums(got(W), jax.grad(lambda w: (jnp.tanh(X @ w).sum(1) ** 2).sum())(W))
    assert all(v.aval.size <= max(W.size, len(X)) for s in live_scans(got, W) for v in s.outvars)


def test_gradients_through_rows_without_elements():
    def fun(w, x):
        h = jnp.tanh(x @ w)
        return jnp.mean(h), h[:, :0]

    def total(fun):
        return jax.grad(lambda w: jnp.sum(fun(w, X)[1]) + fun(w, X)[0])

    microbatched = jaxpp.microbatch(fun, 3, reduce=("mean", "concat"))
    assert_close_sums(total(microbatched)(W), total(fun)(W))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f, (0, None)),
        lambda f: jax.vmap(f, (None, 1)),
        lambda f: jax.vmap(jax.grad(f), (0, None)),
        lambda f: jax.grad(lambda ws, x: jax.vmap(f, (0, None))(ws, x).sum()),
        lambda f: jax.grad(lambda w, x: (jax.grad(f)(w, x) ** 2).sum()),
        lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (w,)),
        lambda f: jax.checkpoint(jax.grad(f)),
    ],
    ids=["vmap", "vmap-data", "vmap-grad", "grad-vmap", "grad-grad", "jvp-grad", "checkpoint"],
)
def test_transformations_of_it(transform):
    got = jax.jit(transform(jaxpp.microbatch(lambda w, x: loss(w, x), 3)))
    want = jax.jit(transform(loss))
    data = [(W, X), (jnp.stack([W, -W]), X), (W, jnp.stack([X, X**2], 1))]
    ran = 0
    for args in data:
        try:
            expected = want(*args)
        except (TypeError, ValueError):
            continue
        assert_close_sums(got(*args), expected, rtol=1e-4)
        ran += 1
    assert ran


@pytest.mark.parametrize(
    "gradient",
    [lambda f: jaxpp.microbatch(jax.grad(f), 3), lambda f: jax.grad(jaxpp.microbatch(f, 3))],
    ids=["inside", "outside"],
)
def test_a_gradient_has_a_forward_derivative(gradient):
    def along(grad):
        return lambda w, x: jax.jvp(lambda w: grad(w, x), (w,), (jnp.cos(w),))

    assert_close_sums(jax.jit(along(gradient(loss)))(W, X), along(jax.grad(loss))(W, X), rtol=1e-4)


def test_the_gradient_by_an_integer_passes():
    def fun(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) * params["n"])

    params = {"n": jnp.int32(3), "mask": jnp.ones(4, bool), "w": W}
    grad = jax.value_and_grad(fun, allow_int=True)
    for microbatched in (jaxpp.microbatch(grad, 3), jaxpp.microbatch(jax.jit(grad), 3)):
        got, want = jax.jit(microbatched)(params, X), jax.jit(grad)(params, X)
        assert_close_sums((got[0], got[1]["w"]), (want[0], want[1]["w"]))
        for name in ("n", "mask"):
            assert got[1][name].dtype == want[1][name].dtype == jax.dtypes.float0
            assert got[1][name].shape == want[1][name].shape


def test_forward_mode_of_a_loss_is_refused():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jaxpp.microbatch(loss, 3), (W, X), (W, X))


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_any_axis_is_sliced(axis):
    def fun(x):
        return jnp.moveaxis(x, axis, 0).sum(axis=(1, 2))

    x = jax.random.normal(jax.random.key(2), (6, 6, 6))
    got = jaxpp.microbatch(fun, 3, in_axes=axis, reduce="concat")(x)
    assert_close_sums(got, fun(x))


@pytest.mark.parametrize(
    "in_axes",
    [
        (None, {"x": 0, "y": 1, "flag": None}),
        (None, {"x": 0, "y": (-1), "flag": None}),
        [None, {"x": 0, "y": 1, "flag": None}],
    ],
)
def test_axes_are_a_prefix(in_axes):
    batch = {"x": X, "y": jnp.stack([X[:, 0], X[:, 1]]), "flag": jnp.array(True)}

    def fun(w, batch):
        y = jnp.where(batch["flag"], batch["y"].T, 0.0)
        return jnp.mean((batch["x"] @ w[:, :2] - y) ** 2)

    assert_close_sums(jaxpp.microbatch(fun, 4, in_axes=in_axes)(W, batch), fun(W, batch))


def test_a_prefix_stands_for_all_below_it():
    batch = {"x": X, "pair": (X[:, 0], [X[:, 1], None])}

    def fun(batch):
        return (batch["x"][:, 0] * batch["pair"][0] + batch["pair"][1][0]).mean()

    assert_close_sums(jaxpp.microbatch(fun, 3, in_axes=0)(batch), fun(batch))
    assert_close_sums(jaxpp.microbatch(fun, 3, in_axes=({"x": 0, "pair": 0},))(batch), fun(batch))


def test_slices_are_runs_of_indices_in_order():
    got = jaxpp.microbatch(lambda x: x, 3, in_axes=0, reduce="stack")(jnp.arange(12))
    np.testing.assert_array_equal(got, np.arange(12).reshape(3, 4))


@pytest.mark.filterwarnings("error")
def test_numpy_arrays_of_any_width_are_sliced():
    ids = np.arange(12, dtype=np.int64)
    got = jaxpp.microbatch(lambda x: x + 1, 3, in_axes=0, reduce="concat")(ids)
    np.testing.assert_array_equal(got, ids + 1)


def test_keys_integers_booleans_and_static_leaves():
    keys = jax.random.split(jax.random.key(3), 12)
    mask, ids = jnp.arange(12) % 3 == 0, jnp.arange(12)

    def fun(w, batch):
        keys, mask, ids, name = batch
        noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)
        assert name == "static"
        return jnp.where(mask[:, None], noise @ w, 0.0).sum(1) + ids, keys, ids

    got = jaxpp.microbatch(fun, 4, reduce="concat")(W, (keys, mask, ids, "static"))
    want = fun(W, (keys, mask, ids, "static"))
    assert_close_sums((got[0], got[2]), (want[0], want[2]))
    np.testing.assert_array_equal(jax.random.key_data(got[1]), jax.random.key_data(keys))
    grads = jax.grad(
        lambda w: jaxpp.microbatch(fun, 4, reduce="concat")(w, (keys, mask, ids, "static"))[0].sum()
    )
    assert_close_sums(grads(W), jax.grad(lambda w: fun(w, (keys, mask, ids, "static"))[0].sum())(W))


BATCH = {"x": X, "weights": jnp.arange(3.0)}


def weighted(batch):
    return jnp.sum(batch["x"]) * batch["weights"][-1]


def test_an_array_with_an_entry_for_each_microbatch_has_an_axis_of_its_own():
    got = jaxpp.microbatch(weighted, 3, in_axes=({"x": 0, "weights": 0},), reduce="stack")(BATCH)
    assert_close_sums(got, X.reshape(3, 4, 8).sum((1, 2)) * BATCH["weights"])
    got = jaxpp.microbatch(weighted, 3, in_axes=({"x": 0, "weights": None},), reduce="sum")(BATCH)
    assert_close_sums(got, X.sum() * 2.0)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda m: m(weighted, 3, in_axes=0)(BATCH), "args[0]['weights']"),
        (lambda m: m(lambda x, w: w[0], 3, in_axes=0)(X, jnp.arange(3.0)), "args[1]"),
        (lambda m: m(lambda x, w: w[0], 3, in_axes=(0,))(X, w=jnp.arange(3.0)), "args[1].w"),
    ],
    ids=["dictionary", "arguments", "keyword"],
)
def test_an_array_as_long_as_there_are_microbatches_is_no_entry_of_the_batch(call, name):
    with pytest.raises(ValueError, match=re.escape(f"{name} has 3 entries where others have 12")):
        call(jaxpp.microbatch)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_of_the_microbatches_may_be_in_the_batch(make_key):
    keys = jax.random.split(make_key(0), 3)
    draw = jaxpp.microbatch(lambda b: jax.random.normal(b[1][0]), 3, in_axes=0, reduce="stack")
    assert_close_sums(draw((X, keys)), jax.vmap(jax.random.normal)(keys))


def test_equinox_models_in_and_out():
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(4))

    def fun(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    want = eqx.filter_value_and_grad(fun)(model, X)
    assert_close_sums(jaxpp.microbatch(eqx.filter_value_and_grad(fun), 4)(model, X), want)
    assert_close_sums(eqx.filter_value_and_grad(jaxpp.microbatch(fun, 4))(model, X), want)

    def returned(model, x):
        return model, fun(model, x), None, "name"

    got = jaxpp.microbatch(returned, 3, reduce=("last", "mean", None, None))(model, X)
    assert_close_sums(got, (model, fun(model, X), None, "name"))
    assert got[0].activation is model.activation


def test_dropout_with_a_key_for_each_example():
    drop, keys = eqx.nn.Dropout(0.5), jax.random.split(jax.random.key(5), 12)

    def fun(w, x, keys):
        return jnp.mean(jax.vmap(lambda x, k: drop(x, key=k))(x, keys) @ w)

    got = jax.value_and_grad(jaxpp.microbatch(fun, 3, in_axes=(None, 0, 0)))(W, X, keys)
    assert_close_sums(got, jax.value_and_grad(fun)(W, X, keys))


# ---- reductions ---------------------------------------------------------------------------------

PARTS = X.reshape(3, 4, 8)


@pytest.mark.parametrize(
    ("reduce", "want"),
    [
        ("mean", PARTS.mean(0)),
        ("sum", PARTS.sum(0)),
        ("max", PARTS.max(0)),
        ("last", PARTS[-1]),
        ("stack", PARTS),
        ("concat", X),
    ],
)
@pytest.mark.parametrize("number", [3, 1])
def test_reductions(reduce, want, number):
    if number == 1:
        want = X[None] if reduce == "stack" else X
    assert_close_sums(jaxpp.microbatch(lambda x: x, number, in_axes=0, reduce=reduce)(X), want)


@pytest.mark.parametrize(
    ("reduce", "value", "want"),
    [
        ("sum", np.arange(6, dtype=np.int32) - 3, [-3, 0]),
        ("max", np.arange(6, dtype=np.int32) - 9, [-5, -4]),
        ("max", np.array([False, False, True, False, False, False]), [True, False]),
        ("last", np.array([1, 2, 3, 4, 5, 6], np.uint8), [5, 6]),
        ("mean", np.arange(6, dtype=np.float16), [2, 3]),
        ("sum", np.arange(6, dtype=np.complex64), [6, 9]),
        ("max", -np.arange(6, dtype=np.float32), [0, -1]),
    ],
)
def test_reductions_keep_the_dtype(reduce, value, want):
    got = jaxpp.microbatch(lambda x: x, 3, in_axes=0, reduce=reduce)(value)
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, np.array(want, value.dtype))


FLOATS = (
    "float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float16 bfloat16 float32"
).split()


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_maximum_is_that_of_all_slices(dtype):
    """Types without infinities too, and where all are the lowest number."""
    low = jnp.finfo(dtype).min.astype(dtype)
    x = jnp.stack([X[:, 0].astype(dtype), jnp.full(12, low)], axis=1)
    run = jaxpp.microbatch(lambda x: jnp.max(x, axis=0), 3, in_axes=0, reduce="max")
    assert_same(jax.jit(run)(x), jax.jit(lambda x: jnp.max(x, axis=0))(x))
    infinite = jnp.full((12, 2), -jnp.inf, dtype)
    if jnp.isinf(infinite).all():
        assert_same(run(infinite), infinite[0])


@dataclasses.dataclass
class LogSumExp:
    """A user's operator with a state of two arrays."""

    def init(self, x):
        return jnp.full(x.shape, -jnp.inf, x.dtype), jnp.int32(0)

    def combine(self, acc, x):
        return jnp.logaddexp(acc[0], x), acc[1] + 1

    def finish(self, acc, num_microbatches):
        return acc[0] - jnp.log(num_microbatches) + 0 * acc[1]


def test_an_operator_of_the_users():
    assert isinstance(LogSumExp(), jaxpp.Operator)
    got = jaxpp.microbatch(lambda x: x, 3, in_axes=0, reduce=LogSumExp())(X)
    want = jax.nn.logsumexp(PARTS, axis=0) - jnp.log(3)
    assert_close_sums(got, want)


def test_gradients_through_a_users_operator():
    def fun(reduce_of):
        return lambda w, x: reduce_of(w, x).sum()

    plain = fun(lambda w, x: jax.nn.logsumexp((x @ w).reshape(3, 4, 8), axis=0) - jnp.log(3))
    ours = fun(jaxpp.microbatch(lambda w, x: x @ w, 3, reduce=LogSumExp()))
    assert_close_sums(jax.grad(ours)(W, X), jax.grad(plain)(W, X), rtol=1e-4)


def test_a_result_without_arrays_needs_no_reduction():
    with pytest.raises(ValueError, match="None is no reduction"):
        jaxpp.microbatch(loss, 3, reduce=None)(W, X)


def test_reductions_are_a_prefix():
    def fun(x):
        return {"a": (x.sum(), x.max()), "b": x}, jnp.float32(2)

    reduce = ({"a": ("sum", "max"), "b": "concat"}, "last")
    got = jaxpp.microbatch(fun, 3, in_axes=0, reduce=reduce)(X)
    assert_close_sums(got, fun(X))
    got = jaxpp.microbatch(fun, 3, in_axes=0, reduce=({"a": LogSumExp(), "b": "stack"}, "sum"))(X)
    assert_close_sums(got[0]["b"], PARTS)
    assert_close_sums(got[1], jnp.float32(6))


def test_a_last_key_is_the_last_key():
    keys = jax.random.split(jax.random.key(6), 3)
    got = jaxpp.microbatch(lambda k: k[0], 3, in_axes=0, reduce="last")(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys[-1]))


def test_an_argument_may_be_a_result_and_a_constant_too():
    def fun(w, x):
        return w, jnp.arange(3.0), x.mean(), np.float32(2)

    got = jaxpp.microbatch(fun, 3)(W, X)
    assert_close_sums(got, tuple(jnp.asarray(v) for v in fun(W, X)))


# ---- numbers of Python --------------------------------------------------------------------------


def counting(of_number):
    """A sum; and numbers, a count of the rows among them, as they are or as arrays."""

    def fun(w, x):
        numbers = {"rows": len(x), "rate": 0.5 * len(x)}
        return jnp.sum(x @ w), [jax.tree.map(of_number, numbers), "static"]

    return fun


class Product:
    def init(self, x):
        return jnp.ones(x.shape, x.dtype)

    def combine(self, acc, x):
        return acc * x

    def finish(self, acc, num_microbatches):
        return acc


@pytest.mark.cases(3)
@pytest.mark.parametrize("reduce", ["sum", Product(), "stack", "max", "last"])
def test_a_number_is_reduced_as_an_array_is(reduce):
    def reduced(of_number):
        loop = jaxpp.microbatch(counting(of_number), 3, reduce=("sum", reduce))
        return jax.value_and_grad(loop, has_aux=True)(W, X)

    assert_same(reduced(lambda number: number), reduced(jnp.asarray))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_sum_of_a_count_is_that_of_the_whole_batch(transform):
    fun = counting(lambda number: number)
    got = transform(lambda w, x: jaxpp.microbatch(fun, 3, reduce="sum")(w, x)[1][0])(W, X)
    assert_same(got, jax.jit(lambda w, x: fun(w, x)[1][0])(W, X))  # weak types as well


def test_what_is_no_number_passes_and_so_do_the_settings_of_a_module():
    def fun(x):
        return x.sum(), {"drop": eqx.nn.Dropout(0.5), "name": "a", "fun": fun, "flag": True}

    for reduce in ("mean", "max", "last"):
        _, got = jaxpp.microbatch(fun, 3, in_axes=0, reduce=("sum", reduce))(X)
        assert got == fun(X)[1]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("output", "reduce", "message"),
    [
        (lambda x: len(x), "mean", "output['it'] (int32[]) has no 'mean'; give reduce= for it"),
        (lambda x: eqx.nn.Dropout(0.5), "sum", "output['it'].p is 0.5, a bool of Python or a"),
        (lambda x: True, "stack", "output['it'] is True, a bool of Python or a number"),
        (lambda x: True, LogSumExp(), "output['it'] is True, a bool of Python or a number"),
    ],
)
def test_a_number_that_cannot_be_reduced_is_an_error(output, reduce, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpp.microbatch(lambda x: {"it": output(x)}, 3, in_axes=0, reduce=reduce)(X)


def test_a_number_is_carried_as_an_array_is_and_nothing_else_may_change():
    def fun(state, x):
        return {**state, "seen": state["seen"] + len(x), "flag": state["flag"] or changes}

    carried = jaxpp.microbatch(fun, 3, in_axes=("carry", 0), reduce="carry")
    changes = False
    got = carried({"seen": 1, "flag": False, "name": "a"}, X)
    assert_same(got, {"seen": jnp.asarray(1 + len(X)), "flag": False, "name": "a"})
    changes = True
    with pytest.raises(ValueError, match="False is carried in, and True out"):
        carried({"seen": 1, "flag": False, "name": "a"}, X)


# ---- values carried from slice to slice ---------------------------------------------------------


STATE = {
    "mean": jax.random.normal(jax.random.key(3), (8,)),
    "seen": jnp.int32(5),
    "key": jax.random.key(4),
}


def with_state(w, state, x):
    """A loss with running statistics, which it is also made of, a counter and a key."""
    key, now = jax.random.split(state["key"])
    h = jnp.tanh(x @ w - state["mean"]) + 0.1 * jax.random.normal(now, x.shape)
    mean = 0.9 * state["mean"] + 0.1 * h.mean(0)
    return jnp.mean(h**2), {"mean": mean, "seen": state["seen"] + len(x), "key": key}


def loop_with_state(w, state, x, slices=4):
    """What `microbatch` does, in Python."""
    losses = []
    for one in jnp.split(x, slices):
        loss, state = with_state(w, state, one)
        losses.append(loss)
    return sum(losses[1:], losses[0]) / slices, state


CARRIED = jaxpp.microbatch(
    with_state, 4, in_axes=(None, "carry", 0), reduce=("mean", "carry")
)  # fmt: skip


def test_a_carried_state_is_that_of_a_loop_over_the_slices_bit_for_bit():
    each = jaxpp.microbatch(with_state, 4, in_axes=(None, "carry", 0), reduce=("stack", "carry"))
    step, state, losses = jax.jit(with_state), STATE, []
    for one in jnp.split(X, 4):
        loss, state = step(W, state, one)
        losses.append(loss)
    got = jax.jit(each)(W, STATE, X)
    assert_same(got, (jnp.stack(losses), state))


def test_a_carried_state_depends_on_the_order_of_the_slices():
    forwards, backwards = CARRIED(W, STATE, X), CARRIED(W, STATE, X[::-1])
    assert not np.allclose(forwards[1]["mean"], backwards[1]["mean"])


def test_a_gradient_goes_through_a_carried_state():
    def total(fun):
        def of(w, mean, x):
            loss, state = fun(w, STATE | {"mean": mean}, x)
            return loss + (state["mean"] ** 2).sum()

        return jax.grad(of, (0, 1, 2))

    got = total(CARRIED)(W, STATE["mean"], X)
    assert_close_sums(got, total(loop_with_state)(W, STATE["mean"], X))


def test_the_gradient_of_each_slice_takes_the_state_as_it_is():
    grad = jax.value_and_grad(with_state, has_aux=True)
    ours = jaxpp.microbatch(grad, 4, in_axes=(None, "carry", 0), reduce=(("mean", "carry"), "mean"))
    state, total = STATE, jnp.zeros_like(W)
    for one in jnp.split(X, 4):
        (_, state), grads = grad(W, state, one)
        total = total + grads / 4
    (_, got), grads = ours(W, STATE, X)
    assert_close_sums((got, grads), (state, total))


def test_a_part_of_an_argument_may_be_carried():
    def fun(pair, x):
        return {"next": (pair["old"] + x.sum(),), "loss": (x * pair["w"]).mean()}

    axes = ({"old": "carry", "w": None}, 0)
    carried = jaxpp.microbatch(fun, 3, in_axes=axes, reduce={"next": "carry", "loss": "mean"})
    got = carried({"old": jnp.float32(2), "w": jnp.float32(3)}, X)
    assert_close_sums(got, {"next": (2 + X.sum(),), "loss": 3 * X.mean()})


@pytest.mark.parametrize(
    ("in_axes", "reduce", "message"),
    [
        ((None, "carry", 0), "last", "in_axes carries 3 arrays in, but reduce carries 0 out"),
        ((None, None, 0), ("mean", "carry"), "in_axes carries 0 arrays in, but reduce carries 3"),
        (
            (None, "carry", 0),
            ("mean", {"mean": "carry", "seen": "last", "key": "last"}),
            "carries 3 arrays in, but reduce carries 1 out",
        ),
        (
            (None, {"mean": "carry", "seen": None, "key": None}, 0),
            ("carry", "last"),
            "output[0] (float32[]) of a microbatch is carried to args[1]['mean'] (float32[8])",
        ),
    ],
)
def test_what_is_carried_out_is_what_is_carried_in(in_axes, reduce, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpp.microbatch(with_state, 4, in_axes=in_axes, reduce=reduce)(W, STATE, X)


# ---- with the other transforms ------------------------------------------------------------------


def test_with_stages_in_it():
    def fun(w, x):
        return (jaxpp.pipeline_enter_stage(jnp.tanh(x @ w)) @ w).mean()

    staged = jaxpp.wrap_forward(jaxpp.split_stages(fun))
    want = jax.value_and_grad(fun)(W, X)
    assert_close_sums(jaxpp.microbatch(jax.value_and_grad(staged), 3)(W, X), want)
    assert_close_sums(jax.value_and_grad(jaxpp.microbatch(staged, 3))(W, X), want)


def test_inside_itself():
    inner = jaxpp.microbatch(loss, 2)
    want = jax.value_and_grad(loss)(W, X)
    assert_close_sums(jax.value_and_grad(jaxpp.microbatch(inner, 3))(W, X), want)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -2, True, 2.5])
def test_a_number_of_microbatches_is_at_least_one(number):
    with pytest.raises(ValueError, match=f"must be an int and at least 1, got {number}"):
        jaxpp.microbatch(loss, number)


def predicting(w, x):
    y = jnp.tanh(x @ w)
    return jnp.mean(y**2), {"rows": y.sum(1), "norm": jnp.sum(y)}


def test_a_prediction_for_each_example_that_is_averaged_by_default_is_warned_of():
    grad = jax.value_and_grad(predicting, has_aux=True)
    with pytest.warns(UserWarning) as warned:
        jaxpp.microbatch(grad, 3)(W, X)
    norm, rows = sorted(str(w.message) for w in warned)
    assert "output[0][1]['norm'] (float32[]) seems to be a sum over the examples" in norm
    assert "output[0][1]['rows'] (float32[4]) seems to have an entry for each" in rows
    assert {w.filename for w in warned} == {__file__}


@pytest.mark.parametrize(
    ("fun", "number", "reduce"),
    [
        (predicting, 3, ("mean", {"rows": "concat", "norm": "mean"})),
        (predicting, 3, "mean"),
        (jax.value_and_grad(loss), 3, None),
    ],
    ids=["concatenated", "meant", "gradient"],
)
def test_what_is_chosen_or_is_a_gradient_is_not_warned_of(fun, number, reduce):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {} if reduce is None else {"reduce": reduce}
        jaxpp.microbatch(fun, number, **options)(W, X)


def test_a_gradient_as_long_as_a_microbatch_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpp.microbatch(jax.grad(loss), 2)(W, jnp.ones((16, 8)))
        jaxpp.microbatch(lambda x: jax.grad(loss)(W, x), 2, in_axes=0)(jnp.ones((16, 8)))


def test_a_sum_that_is_averaged_by_default_is_warned_of_and_a_gradient_by_a_number_is_not():
    def total(w, x):
        return -jnp.sum((x @ w) ** 2) - jnp.sum(w)

    for fun in (total, jax.jit(total), jaxpp.wrap_forward(total)):
        with pytest.warns(UserWarning, match=r"output\[0\] .* seems to be a sum over the examples"):
            jaxpp.microbatch(jax.value_and_grad(fun), 3)(W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpp.microbatch(jax.value_and_grad(total), 3, reduce="sum")(W, X)
        jaxpp.microbatch(lambda w, x: total(w, x) / len(x), 3)(W, X)
        jaxpp.microbatch(jax.value_and_grad(lambda s, x: jnp.mean(s * x)), 3)(jnp.ones(()), X)


@pytest.mark.parametrize(
    ("of", "is_sum"),
    [
        (lambda y: 0.1 * jnp.sum(y**2), True),
        (lambda y: jnp.sum(y**2) / 0.7, True),
        (lambda y: jnp.einsum("ij,ij->", y, y), True),
        (lambda y: 3 * jnp.mean(y**2), False),
        (lambda y: jnp.sum(y**2) * (1 / len(y)), False),
        (lambda y: 0.5 * jnp.sum(y**2) / (2 * y.size), False),
        (lambda y: jnp.nan * jnp.sum(y) / jnp.inf, True),
        (lambda y: jnp.real(jnp.sum(y) * 1j), False),
        (lambda y: jnp.mean(jnp.einsum("ij,ij->i", y, y)), False),
    ],
)
def test_a_sum_times_a_number_is_a_sum_unless_it_is_a_mean(of, is_sum):
    grad = jaxpp.microbatch(jax.value_and_grad(lambda w, x: of(x @ w)), 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grad(W, X)
    assert ["seems to be a sum" in str(w.message) for w in said] == [True] * is_sum


# ---- state that its gradient overwrites ---------------------------------------------------------


@jax.custom_vjp
def watch(x, largest):
    """The identity; the "gradient" by `largest` is the new largest magnitude, as in float8."""
    return x


watch.defvjp(lambda x, largest: (x, x), lambda x, ct: (ct, jnp.max(jnp.abs(x))))


def watching(params, x):
    h = watch(x @ params["w"], params["_overwrite_with_gradient"])
    return jnp.mean(jaxpp.pipeline_enter_stage(jnp.tanh(h)) ** 2)


PARAMS = {"w": W, "_overwrite_with_gradient": jnp.float32(1)}


def test_a_state_that_its_gradient_overwrites_has_a_reduction_of_its_own():
    grad = jax.value_and_grad(jaxpp.wrap_forward(watching))
    reduce = ("mean", {"w": "mean", "_overwrite_with_gradient": "max"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = jaxpp.schedule(jaxpp.microbatch(grad, 3, reduce=reduce), jaxpp.schedules.OneFOneB())
        got = jaxpp.place(loop, jaxpp.MpmdMesh((2,)))(PARAMS, X)
    assert_close_sums(got, jax.value_and_grad(watching)(PARAMS, X))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda f: jaxpp.microbatch(jax.grad(f), 3), "overwrites a state, .* reduction 'mean'"),
        (lambda f: jaxpp.microbatch(jax.grad(f), 3, reduce="sum"), "reduction 'sum'"),
        (lambda f: jax.grad(jaxpp.microbatch(f, 3)), "Differentiate first"),
    ],
    ids=["default", "sum", "outside"],
)
def test_a_state_that_its_gradient_overwrites_is_not_averaged_in_silence(step, message):
    with pytest.warns(UserWarning, match=message):
        step(watching)(PARAMS, X)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"num": 5}, (W, X), "args[1] has 12 examples, which 5 microbatches do not divide; use 10"),
        (
            {"num": 24},
            (W, X),
            "args[1] has 12 examples, which 24 microbatches do not divide; use 24 examples, or",
        ),
        (
            {"in_axes": (0, 0)},
            (W, X),
            "differ in their number of examples: args[0]: 8, args[1]: 12",
        ),
        ({"in_axes": (None, 2)}, (W, X), "args[1] has shape (12, 8) and no axis 2"),
        ({"in_axes": (None, -3)}, (W, X), "args[1] has shape (12, 8) and no axis -3"),
        ({"in_axes": (None, None)}, (W, X), "in_axes names no array to slice"),
        (
            {"in_axes": (None, 0)},
            (X,),
            "in_axes has 2 entries (None, 0), but the function was called",
        ),
        ({"in_axes": (None, {"a": 0})}, (W, X), "in_axes is not a prefix of the pytree"),
        (
            {"in_axes": (None, "0")},
            (W, X),
            "in_axes holds '0'; each of its leaves is an int, None or 'carry'",
        ),
        ({"in_axes": (None, True)}, (W, X), "in_axes holds True; each of its leaves is an int"),
        ({"reduce": "median"}, (W, X), "(float32[]) has the unknown reduction 'median'"),
        ({"reduce": "concat"}, (W, X), "is a scalar and has no axis to concatenate; use 'stack'"),
        ({"reduce": ("mean", "mean")}, (W, X), "reduce is not a prefix of the pytree"),
        ({"reduce": 3}, (W, X), "3 is no reduction"),
    ],
)
def test_bad_options_are_errors(options, args, message):
    options = dict(options)
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpp.microbatch(loss, options.pop("num", 2), **options)(*args)


def test_an_error_of_a_slice_says_what_in_axes_slices():
    with pytest.raises(TypeError) as error:
        jaxpp.microbatch(loss, 4, in_axes=0)(W, X[:8])
    note = "".join(error.value.__notes__)
    assert "in_axes slices args[0] (8, 8) by axis 0, args[1] (8, 8) by axis 0." in note


@pytest.mark.parametrize(
    ("value", "reduce", "others"),
    [
        (np.arange(4), "mean", "'sum', 'max', 'last', 'stack', 'concat'"),
        (np.arange(4) > 2, "sum", "'max', 'last', 'stack', 'concat'"),
        (np.arange(4).astype(np.complex64), "max", "'mean', 'sum', 'last', 'stack', 'concat'"),
        (jax.random.split(jax.random.key(0), 4), "mean", "'last', 'stack', 'concat'"),
    ],
    ids=["int", "bool", "complex", "key"],
)
def test_a_reduction_that_a_dtype_does_not_have_is_an_error(value, reduce, others):
    with pytest.raises(
        ValueError, match=f"has no '{reduce}'; give reduce= for it: one of {others}."
    ):
        jaxpp.microbatch(lambda x: {"it": x}, 2, in_axes=0, reduce=reduce)(value)


def test_the_error_names_the_output():
    with pytest.raises(ValueError, match=re.escape("output['b'][1] (int32[])")):
        jaxpp.microbatch(lambda x: {"a": x.mean(), "b": (x, jnp.int32(1))}, 2, in_axes=0)(X)


def test_an_error_in_the_function_is_the_users():
    def fails(w, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jaxpp.microbatch(fails, 2)(W, X)
