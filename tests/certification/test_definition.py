"""The definition of `microbatch` is what its docstring says, by rules of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.certification import _definition
from jaxpp.transforms.microbatch import _arguments, _reductions
from tests.certification import steps
from tests.helpers import assert_same

X = jax.random.normal(jax.random.key(0), (6, 4))


def by_definition(fun, *args, **kwargs):
    with jaxprs.by_definition(_definition.PLAIN):
        return fun(*args, **kwargs)


def slices_of(x, axis=0, count=2):
    size = x.shape[axis] // count
    return [jax.lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis) for i in range(count)]


class Alternating:
    """An operator of the user's, for which the order counts."""

    def init(self, x):
        return jnp.zeros(x.shape, x.dtype)

    def combine(self, acc, x):
        return x - acc

    def finish(self, acc, num_microbatches):
        return acc * num_microbatches


@pytest.mark.parametrize(
    ("reduce", "of"),
    [
        ("sum", lambda a, b: a + b),
        ("mean", lambda a, b: (a + b) / 2),
        ("max", jnp.maximum),
        ("last", lambda a, b: b),
        ("stack", lambda a, b: jnp.stack([a, b])),
        ("concat", lambda a, b: jnp.concatenate([a, b])),
        (Alternating(), lambda a, b: (b - a) * 2),
    ],
)
def test_outputs_are_combined_as_the_reduction_says(reduce, of):
    fun = jaxpp.microbatch(lambda x: jnp.sin(x) - 5, 2, in_axes=0, reduce=reduce)
    assert_same(by_definition(fun, X), of(*(jnp.sin(x) - 5 for x in slices_of(X))))


@pytest.mark.parametrize(
    ("in_axes", "axes"),
    [((0, None, 1), (0, None, 1)), ((0, -1), (0, 1, 0)), (1, (1, 1, 1)), ((None, 0), (None, 0, 0))],
)
@pytest.mark.parametrize("num_keywords", [0, 1, 2])
def test_arguments_are_sliced_as_in_axes_says(in_axes, axes, num_keywords):
    args = X[:4], 2 * X[:4], 3 * X[:4]
    num_keywords = max(num_keywords, 3 - len(in_axes) if isinstance(in_axes, tuple) else 0)
    given = args[: 3 - num_keywords]
    names = dict(list(zip("abc", args, strict=True))[3 - num_keywords :])
    fun = jaxpp.microbatch(lambda a, b, c: (a, b, c), 2, in_axes=in_axes, reduce="stack")
    want = [
        jnp.stack([x, x] if axis is None else slices_of(x, axis))
        for x, axis in zip(args, axes, strict=True)
    ]
    for run in (fun, lambda *args, **kwargs: by_definition(fun, *args, **kwargs)):
        assert_same(run(*given, **names), tuple(want))


def test_a_state_goes_from_slice_to_slice():
    def fun(state, x):
        return state + 1, (x.sum() * state, len(x))

    reduce = ("carry", ("stack", "sum"))
    loop = jaxpp.microbatch(fun, 2, in_axes=("carry", 0), reduce=reduce)
    a, b = slices_of(X)
    want = jnp.float32(4), (jnp.stack([2 * a.sum(), 3 * b.sum()]), jnp.asarray(6))
    assert_same(by_definition(loop, jnp.float32(2), X), want)


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize(
    ("asked", "wide", "result"),
    [("auto", "float32", "float16"), (None, "float16", "float16"), ("float32",) * 3],
)
def test_narrow_sums_are_in_the_dtype_that_was_asked_for(kind, asked, wide, result):
    x = np.asarray([60000, 1, 60000, 3], np.float16)
    options = {"in_axes": 0, "reduce": kind, "accumulator_dtype": asked}
    got = by_definition(jaxpp.microbatch(jnp.sum, 4, **options), x)
    with np.errstate(over="ignore"):
        total = x.astype(wide).sum(dtype=wide) / (4 if kind == "mean" else 1)
        assert got == np.asarray(total, result)
    assert got.dtype == result


# ---- errors in what `microbatch` reads -----------------------------------------------------------


def slices_in_another_order(patch):
    right = _arguments.stack_slices
    patch.setattr(_arguments, "stack_slices", lambda *args: right(*args)[::-1])


def another_axis(patch):
    right = _arguments.stack_slices
    patch.setattr(_arguments, "stack_slices", lambda x, axis, count: right(x, 0, count))


def a_mean_for_a_sum(patch):
    patch.setitem(_reductions.REDUCTIONS, "sum", _reductions.REDUCTIONS["mean"])


def another_accumulator(patch):
    patch.setattr(_reductions, "dtype_of_sum", lambda dtype, x: x.dtype)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("layers, ZB-H1", slices_in_another_order),
        ("as given", another_axis),
        ("gradient outside", a_mean_for_a_sum),
        ("as given", another_accumulator),
    ],
)
def test_an_error_in_what_microbatch_reads_is_refuted(monkeypatch, name, error):
    error(monkeypatch)
    step, args = steps.CASES[name]()
    with pytest.raises(jaxpp.Refuted, match="the transforms before schedule"):
        step.lower(*args).certify()
