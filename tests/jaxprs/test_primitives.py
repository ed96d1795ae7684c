"""The table of primitives is held against JAX: an entry that is not true fails."""

import gc
import importlib

import jax
import jax.extend.core as jex
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpp import jaxprs
from jaxpp.jaxprs import primitives

NUMBERS = ("NHWC", "HWIO", "NHWC")
MASK = np.arange(6).reshape(2, 3) % 2 == 0
AT = np.array([[0], [2]])


def convolve(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS, **options)


KEEPS_ZEROS = {
    "add": (lax.add, [(2, 3), (2, 3)]),
    "sub": (lax.sub, [(2, 3), (2, 3)]),
    "neg": (lax.neg, [(2, 3)]),
    "mul": (lax.mul, [(2, 3), (2, 3)]),
    "mul_second": (lambda x: jnp.arange(6.0).reshape(2, 3) * x, [(2, 3)]),
    "div": (lambda x: x / 3.7, [(2, 3)]),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)), [(2, 3)]),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [(2, 3), (2, 5)]),
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.complex64), [(2, 3)]),
    "copy": (jnp.copy, [(2, 3)]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(2, 3)]),
    "dot_general": (lax.dot, [(2, 3), (3, 4)]),
    "conv_general_dilated": (convolve, [(2, 5, 5, 3), (3, 3, 3, 4)]),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (1, 2)), [(2, 3)]),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (jnp.int32(1), 0)),
        [(2, 3), (1, 2)],
    ),
    "gather": (lambda x: x[jnp.asarray(AT)], [(3, 3)]),
    "pad": (lambda x, y: lax.pad(x, y, [(1, 0, 0), (0, 2, 1)]), [(2, 3), ()]),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 23), [(2, 3)]),
    "reduce_sum": (lambda x: jnp.sum(x, 1), [(2, 3)]),
    "reduce_window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
        [(2, 3)],
    ),
    "reshape": (lambda x: lax.reshape(x, (3, 2)), [(2, 3)]),
    "rev": (lambda x: lax.rev(x, (1,)), [(2, 3)]),
    "scatter-add": (lambda x, y: x.at[jnp.asarray(AT[:, 0])].add(y), [(3, 3), (2, 3)]),
    "select_n": (lambda x, y: lax.select(jnp.asarray(MASK), x, y), [(2, 3), (2, 3)]),
    "slice": (lambda x: lax.slice(x, (0, 1), (2, 3)), [(2, 3)]),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [(2, 1)]),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), [(2, 3)]),
}


def flat(fun, args):
    return jaxprs.inline(jaxprs.trace(fun, args).jaxpr, lambda e: True)


def test_every_name_is_that_of_a_primitive():
    tables = [v for k, v in vars(primitives).items() if k.isupper() and not k.startswith("_")]
    importlib.import_module("jaxpp.transforms")  # jaxpp's own primitives are made by its import
    gc.unfreeze()
    known = {o.name for o in gc.get_objects() if isinstance(o, jex.Primitive)}
    gc.freeze()
    # What only some versions of JAX have.
    assert set().union(*tables) - known <= {
        "closed_call", "log2", "one_minus_square", "polynomial",
    }  # fmt: skip


# ---- elements -----------------------------------------------------------------------------------

SHAPE = (8, 4)


def operand(kind, rng):
    """Random values: floats, complex numbers, integers, truth values or keys."""
    if kind == "c":
        return jnp.asarray(operand("f", rng) + 1j * operand("f", rng))
    if kind == "k":
        return jax.random.wrap_key_data(
            operand(
                "u",
                rng,
            )[..., None]
            * jnp.ones(2, jnp.uint32)
        )
    values = {
        "f": lambda: rng.uniform(0.05, 0.95, SHAPE).astype(np.float32),
        "u": lambda: rng.integers(1, 30, SHAPE).astype(np.uint32),
        "b": lambda: rng.uniform(size=SHAPE) < 0.5,
    }
    return jnp.asarray(values[kind]())


def each(fun):
    return jax.vmap(jax.vmap(fun))


UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin
    sinh sqrt square tan tanh
""".split()
BINARY = """
    add atan2 complex div eq ge gt le lt max min mul ne nextafter polygamma pow rem sub zeta
""".split()
#: For each elementwise primitive a function that JAX makes an equation of, and its operands.
CASES = {
    **{name: (getattr(lax, name), "f") for name in UNARY},
    **{name: (getattr(lax, name), "ff") for name in BINARY},
    **{name: (getattr(lax, name), "c") for name in ("conj", "imag", "real")},
    **{name: (getattr(lax, name), "u") for name in ("clz", "population_count")},
    **{name: (getattr(lax, f"bitwise_{name}"), "uu") for name in ("and", "or", "xor")},
    **{
        name: (getattr(lax, name), "uu")
        for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical")
    },
    "add_any": (lambda x, y: jax.vjp(lambda x: (x, x), x)[1]((x, y))[0], "ff"),
    "clamp": (lambda x: lax.clamp(jnp.float32(0.3), x, jnp.float32(0.6)), "f"),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), "f"),
    "copy": (jnp.copy, "f"),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), "f"),
    "name": (lambda x: checkpoint_name(x, "x"), "f"),
    "not": (lax.bitwise_not, "u"),
    "random_clone": (jax.random.clone, "k"),
    "random_fold_in": (each(jax.random.fold_in), "ku"),
    "random_seed": (each(jax.random.key), "u"),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 4), "f"),
    "select_n": (lax.select_n, "bff"),
    "threefry2x32": (lambda *xs: tuple(jexr.threefry2x32_p.bind(*xs)), "uuuu"),
}
#: What has no public function, or is in no jaxpr that JAX makes.
UNSEEN = {
    "eq_to", "le_to", "log2", "lt_to", "mulhi", "one_minus_square", "polynomial", "stop_gradient",
    "zeros_like",
}  # fmt: skip


def bits(results):
    leaves = jax.tree.leaves(results)
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]


def assert_same(x, y, ulps):
    """Equal to the bit, or up to some units in the last place."""
    if ulps:
        np.testing.assert_array_max_ulp(x, y, ulps)
    else:
        np.testing.assert_array_equal(x, y)


def assert_elementwise(fun, args, ulps=0):
    """Rows of the operands give the same rows of the results, and so do columns.

    But for a lone element, which XLA computes without vectors, and may round in another way.
    """
    fun = jax.jit(fun)
    whole = bits(fun(*args))
    for mine in ((slice(2, 5),), (slice(None), slice(1, 4)), (slice(6, 8), slice(2, 4))):
        for x, y in zip(bits(fun(*(x[mine] for x in args))), whole, strict=True):
            assert_same(x, y[mine], ulps)


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_for_elementwise_is(name):
    fun, kinds = CASES[name]
    rng = np.random.default_rng(0)
    args = [operand(kind, rng) for kind in kinds]
    assert name in {e.primitive.name for e in flat(fun, args).eqns}
    # XLA computes elements that fill no vector apart.
    assert_elementwise(fun, args, ulps=1 if name in ("atan", "rsqrt") else 0)


def test_every_elementwise_primitive_is_checked():
    assert {*CASES, *UNSEEN} == primitives.ELEMENTWISE


@pytest.mark.parametrize("fun", [lax.cumsum, lax.sort, lambda x: lax.rev(x, (0,)), jnp.cumsum])
def test_what_is_not_elementwise_would_be_found(fun):
    with pytest.raises((AssertionError, IndexError)):
        assert_elementwise(fun, [operand("f", np.random.default_rng(0))])


REORDERS = {
    "copy": jnp.copy,
    "reshape": lambda x: lax.reshape(x, (4, 8)),
    "rev": lambda x: lax.rev(x, (0,)),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
}
MOVES = {
    **REORDERS,
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (8, 3, 4), (0, 2)),
    "slice": lambda x: lax.slice(x, (1, 0), (7, 3), (2, 1)),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_said_to_move_data_does(name):
    x = operand("f", np.random.default_rng(0))
    (eqn,) = [e for e in flat(MOVES[name], [x]).eqns if e.primitive.name == name]
    given, old = eqn.invars[0].aval, np.arange(eqn.invars[0].aval.size, dtype=np.int32)
    (moved,) = [eqn.primitive.bind(jnp.asarray(old.reshape(given.shape)), **eqn.params)]
    assert set(np.ravel(moved)) <= set(old)
    if name in REORDERS:
        np.testing.assert_array_equal(np.sort(np.ravel(moved)), old)
    # Where an element goes does not depend on what it is.
    other = np.random.default_rng(1).permutation(old)
    (again,) = [eqn.primitive.bind(jnp.asarray(other.reshape(given.shape)), **eqn.params)]
    np.testing.assert_array_equal(again, other[moved])


def test_every_move_is_checked():
    assert set(REORDERS) == primitives.REORDERS
    assert set(MOVES) == primitives.MOVES


# ---- sums ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(primitives.EXTREMES))
def test_extremes_are_taken_in_any_order(name):
    fun, kinds = CASES[name]
    rng = np.random.default_rng(0)
    a, b, c = (operand(kinds[0], rng) for _ in range(3))
    np.testing.assert_array_equal(fun(fun(a, b), c), fun(fun(c, a), b))


@pytest.mark.parametrize("name", KEEPS_ZEROS)
def test_zeros_are_kept_whatever_the_other_operands_are(name):
    fun, shapes = KEEPS_ZEROS[name]
    rng = np.random.default_rng(0)
    jaxpr = flat(fun, [jnp.ones(s, jnp.float32) for s in shapes])
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == name.removesuffix("_second")]
    given = jaxpr.jaxpr.invars[-1:] if "second" in name else jaxpr.jaxpr.invars
    zero = [any(v is x for x in given) for v in eqn.invars]
    assert primitives.keeps_zeros(eqn, zero)
    args = [jnp.zeros(s) for s in shapes]
    assert not np.any(fun(*args)) and np.any(
        fun(*(jnp.asarray(rng.normal(size=s)) for s in shapes))
    )


def test_every_primitive_that_keeps_zeros_is_checked():
    # These do nothing to the values.
    same = {"add_any", "name", "sharding_constraint", "real", "imag", "optimization_barrier"}
    known = {*primitives.KEEPS_ZEROS, *primitives.PRODUCTS} - same
    assert {name.removesuffix("_second") for name in KEEPS_ZEROS} == known


@pytest.mark.parametrize("fun", [jnp.exp, jnp.cos, lax.sort, lambda x: 1.0 / x])
def test_what_may_not_keep_zeros_is_not_taken_for_it(fun):
    (eqn,) = flat(fun, [jnp.ones(3)]).eqns
    assert not primitives.keeps_zeros(eqn, [not jaxprs.is_literal(v) for v in eqn.invars])


@pytest.mark.parametrize(("fun", "kept"), [(lax.mul, True), (lax.add, False), (lax.sub, False)])
def test_one_operand_of_zeros_makes_zeros_of_a_product_alone(fun, kept):
    (eqn,) = flat(fun, [jnp.ones(3), jnp.ones(3)]).eqns
    assert [primitives.keeps_zeros(eqn, z) for z in ((True, False), (False, True))] == [kept] * 2


def test_zeros_are_seen_through_moves_and_casts():
    jaxpr = flat(
        lambda x: (jnp.zeros((2, 3), jnp.bfloat16).T[1:], jnp.ones((2, 3)), x), [jnp.ones(3)]
    )
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    assert [primitives.is_zero(v, maker) for v in jaxpr.jaxpr.outvars] == [True, False, False]
