"""Tracing, inlining, slicing and comparing jaxprs."""

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import primitives
from tests.helpers import assert_close

X = jax.random.normal(jax.random.key(0), (3, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def traced(fun, *args):
    return jaxprs.trace(fun, args).jaxpr


# ---- tracing ------------------------------------------------------------------------------------


def mixed(tree, scale, *, name):
    return {"y": tree["x"] * scale, "name": name, "n": np.float32(2), "none": None, "f": jnp.tanh}


def test_a_traced_function_is_rebuilt_from_its_outputs():
    args, kwargs = ({"x": X, "tag": "t"}, 3), {"name": "mine"}
    t = jaxprs.trace(mixed, args, kwargs)
    got = t.rebuild(jaxprs.run(t.jaxpr, *t.inputs))
    want = mixed(*args, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert (got["name"], got["none"], got["f"]) == ("mine", None, jnp.tanh)
    np.testing.assert_array_equal(got["y"], want["y"])
    np.testing.assert_array_equal(got["n"], want["n"])


def test_output_paths_are_those_of_the_arrays():
    t = jaxprs.trace(mixed, ({"x": X}, 3), {"name": "mine"})
    assert t.output_paths() == ["['n']", "['y']"]


def test_what_a_function_closes_over_comes_first():
    closed = jnp.full((3, 4), 2.0)
    t = jaxprs.trace(lambda x: x * closed, (X,))
    assert t.num_closed_over == len(t.inputs) - 1
    assert t.inputs[-1] is X
    np.testing.assert_array_equal(jaxprs.run(t.jaxpr, *t.inputs)[0], X * closed)


def test_shapes_stand_for_arrays():
    t = jaxprs.trace(jnp.tanh, (jax.ShapeDtypeStruct((3, 4), jnp.float32),))
    assert t.jaxpr.in_avals[0].shape == (3, 4)


def test_a_traced_function_differentiates_through_closures():
    def outer(w):
        t = jaxprs.trace(lambda x: jnp.tanh(x @ w).sum(), (X,))
        return t.rebuild(jaxprs.run(t.jaxpr, *t.inputs))

    want = jax.grad(lambda w: jnp.tanh(X @ w).sum())(W)
    np.testing.assert_allclose(jax.grad(outer)(W), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("leaf", "is_array"),
    [
        (X, True), (np.ones(2), True), (np.float32(1), True), (jax.random.key(0), True),
        (jax.ShapeDtypeStruct((), jnp.int32), True), (1.0, False), ("a", False), (jnp.tanh, False),
    ],
)  # fmt: skip
def test_arrays_are_told_from_static_leaves(leaf, is_array):
    assert jaxprs.is_array(leaf) is is_array


# ---- calls --------------------------------------------------------------------------------------


@jax.custom_vjp
def custom(x):
    return jax.jit(jnp.tanh)(x)


custom.defvjp(lambda x: (custom(x), x), lambda x, ct: (2 * ct,))


def calls(x, w):
    with jax.named_scope("outer"):
        x = jax.jit(lambda x: jax.jit(jnp.sin)(x) @ w)(x)
    x = jax.checkpoint(lambda x: jax.jit(jnp.cos)(x))(x)
    x = custom(x)
    return jax.jit(lambda x: (x, x * np.arange(4.0, dtype=np.float32)))(x)


def test_inlined_calls_compute_the_same():
    jaxpr = traced(calls, X, W)
    for wanted in (
        lambda e: True,
        lambda e: e.primitive.name not in primitives.CUSTOM_RULES,
        lambda e: e.primitive.name in primitives.CHECKPOINTS,
        lambda e: False,
    ):
        flat = jaxprs.inline(jaxpr, wanted)
        assert_close(jaxprs.run(flat, X, W), jaxprs.run(jaxpr, X, W), rtol=1e-6, atol=0)
        assert not any(wanted(e) for e in flat.eqns if jaxprs.called_jaxpr(e) is not None)


def test_inlining_keeps_the_names_of_scopes():
    flat = jaxprs.inline(traced(calls, X, W), lambda e: True)
    (product,) = [e for e in flat.eqns if e.primitive.name == "dot_general"]
    assert str(product.source_info.name_stack).startswith("outer")


def test_inlining_twice_the_same_call_gives_each_its_own_variables():
    jaxpr = traced(lambda x: jax.jit(jnp.sin)(jax.jit(jnp.sin)(x)), X)
    flat = jaxprs.inline(jaxpr, lambda e: True)
    made = [v for e in flat.eqns for v in e.outvars]
    assert len(made) == len(set(made)) == 2
    np.testing.assert_array_equal(jaxprs.run(flat, X)[0], jnp.sin(jnp.sin(X)))


@pytest.mark.parametrize(
    ("fun", "is_call"),
    [
        (lambda x: jax.jit(jnp.sin)(x), True),
        (lambda x: jax.checkpoint(jnp.sin)(x), True),
        (custom, True),
        (jax.nn.relu, True),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2)[0], False),
        (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), False),
        (jnp.sin, False),
    ],
    ids=["jit", "checkpoint", "custom_vjp", "custom_jvp", "scan", "cond", "primitive"],
)
def test_calls_have_a_body(fun, is_call):
    eqn = traced(fun, X).eqns[-1]
    assert (jaxprs.called_jaxpr(eqn) is not None) is is_call


def test_contains_looks_inside_everything():
    def fun(x):
        step = lambda c, _: (jax.lax.cond(c[0, 0] > 0, jnp.sin, jnp.cos, c), None)  # noqa: E731
        return jax.jit(lambda x: jax.lax.scan(step, x, None, 2)[0])(x)

    (eqn,) = traced(fun, X).eqns
    for name in ("scan", "cond", "sin", "cos"):
        assert jaxprs.contains(eqn, lambda e, name=name: e.primitive.name == name)
    assert not jaxprs.contains(eqn, lambda e: e.primitive.name == "tanh")


# ---- slices -------------------------------------------------------------------------------------


def test_a_part_reads_what_it_does_not_make():
    jaxpr = traced(lambda x, w: (jnp.tanh(jnp.sin(x) @ w), x), X, W)
    x, w = jaxpr.jaxpr.invars
    first = jaxprs.part(jaxpr.eqns[:1], [jaxpr.eqns[0].outvars[0], w])
    assert first.inputs == (x, w)
    rest = jaxprs.part(jaxpr.eqns[1:], jaxpr.jaxpr.outvars)
    assert set(rest.inputs) == {jaxpr.eqns[0].outvars[0], w, x}
    values = dict(zip(first.outputs, jaxprs.run(first.jaxpr, X, W), strict=True)) | {x: X}
    got = jaxprs.run(rest.jaxpr, *(values[v] for v in rest.inputs))
    np.testing.assert_allclose(got[0], jnp.tanh(jnp.sin(X) @ W), rtol=1e-6)


def test_ancestors_and_descendants():
    def fun(x, w):
        a = jnp.sin(x)
        b = jnp.cos(w)
        return jnp.tanh(a), b

    jaxpr = traced(fun, X, W)
    a, b = jaxpr.jaxpr.outvars
    needed = [
        e.primitive.name
        for e, k in zip(jaxpr.eqns, jaxprs.ancestors(jaxpr.eqns, [a]), strict=True)
        if k
    ]
    assert needed == ["sin", "tanh"]
    reached = jaxprs.descendants(jaxpr.eqns, [jaxpr.jaxpr.invars[1]])
    assert b in reached and a not in reached


def test_equations_with_effects_are_always_needed():
    def fun(x):
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x), jnp.cos(x)

    jaxpr = traced(fun, X)
    keep = jaxprs.ancestors(jaxpr.eqns, [])
    kept = [e for e, k in zip(jaxpr.eqns, keep, strict=True) if k]
    assert any(e.effects for e in kept) and "sin" not in [e.primitive.name for e in kept]
    assert jaxprs.part(jaxpr.eqns, []).jaxpr.effects


def test_a_rule_says_what_takes_the_place_of_an_equation():
    """Gone, another one, or itself; what stands for its result is a literal, too."""

    def fun(x, scale):
        return jnp.sin(jax.lax.stop_gradient(jnp.cos(x) * scale) + jnp.tanh(x)), jnp.exp(scale)

    def rule(eqn):
        one = jaxprs.literal(1.0, eqn.outvars[0].aval)
        return {
            "sin": lambda: ([], eqn.invars),
            "cos": lambda: jaxprs.record(lambda x: 2 * x, eqn.invars, eqn),
            "exp": lambda: ([], [one]),
        }.get(eqn.primitive.name, lambda: None)()

    jaxpr, known = traced(fun, X, jnp.float32(2)), jaxprs.Substitution()
    scale = jaxpr.jaxpr.invars[1]
    known.of[scale] = jaxprs.literal(3.0, scale.aval)
    new = jaxprs.rewrite(jaxpr, rule, known)
    assert len(new.jaxpr.invars) == 1
    assert set(names(jaxpr)) - {"sin", "cos", "exp"} == set(names(new))
    assert_close(jaxprs.run(new, X), [2 * X * 3 + jnp.tanh(X), jnp.float32(1)])
    same = jaxprs.rewrite(jaxpr, lambda eqn: None)
    assert jaxprs.structure(same) == jaxprs.structure(jaxpr)


def test_outputs_of_their_own_are_no_inputs_literals_or_the_same_twice():
    jaxpr = traced(lambda x, y: (x, y, y + 1, y.max()), X, X)
    two = jaxprs.literal_of(np.float32(2))
    stand = {"add": jaxpr.jaxpr.invars[0], "reduce_max": two}
    whole = jaxprs.rewrite(jaxpr, lambda eqn: ([], [stand[eqn.primitive.name]]))
    new = jaxprs.with_separate_outputs(whole, whole.jaxpr.invars[:1])
    outvars = jaxprs.variables(new.jaxpr.outvars)
    assert len({*outvars}) == 4 and new.jaxpr.invars[0] not in outvars
    assert outvars[1] is new.jaxpr.invars[1]
    assert_close(jaxprs.run(new, X, W[:3]), [X, W[:3], X, jnp.float32(2)])


def test_a_substitution_leaves_the_rest():
    jaxpr = traced(lambda x: x + 1.0, X)
    (eqn,), (x,) = jaxpr.eqns, jaxpr.jaxpr.invars
    new = jaxprs.fresh_var(x)
    renamed = jaxprs.Substitution([(x, new)]).rename(eqn)
    assert renamed.invars[0] is new and renamed.invars[1] is eqn.invars[1]
    assert new is not x and new.aval == x.aval


# ---- structure ----------------------------------------------------------------------------------


def scanned(number):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, number)[0]


PROGRAMS = {
    "sin": (jnp.sin, X),
    "cos": (jnp.cos, X),
    "sin-wide": (jnp.sin, W),
    "sin-half": (jnp.sin, X.astype(jnp.bfloat16)),
    "sin-int": (lambda x: jnp.sin(x), jnp.arange(3)),
    "plus-0": (lambda x: x * 0.0, 1.0),
    "minus-0": (lambda x: x * -0.0, 1.0),
    "times-1": (lambda x: x * 1.0, X),
    "sum-0": (lambda x: x.sum(0), X),
    "sum-1": (lambda x: x.sum(1), X),
    "power-2": (lambda x: x**2, X),
    "power-3": (lambda x: x**3, X),
    "scan-2": (scanned(2), X),
    "scan-3": (scanned(3), X),
    "twice": (lambda x: (jnp.sin(x), jnp.sin(x)), X),
    "same-twice": (lambda x: (lambda y: (y, y))(jnp.sin(x)), X),
    "jit": (lambda x: jax.jit(jnp.sin)(x), X),
    "sparse": (
        lambda x: sparse.BCOO.fromdense(x, nse=2).todense(),
        X,
    ),  # with np.int32 as parameter
    "constant": (lambda x: x * np.ones((3, 4), np.float32), X),
    "constant-2": (lambda x: x * (2 * np.ones((3, 4), np.float32)), X),
}


def structure_of(name):
    fun, x = PROGRAMS[name]
    return jaxprs.structure(jax.make_jaxpr(fun)(x))


def test_different_programs_have_different_structures():
    keys = {name: structure_of(name) for name in PROGRAMS}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if not n.startswith("constant")])
def test_the_same_program_traced_again_has_the_same_structure(name):
    assert structure_of(name) == structure_of(name)
    hash(structure_of(name))


def test_names_and_lines_do_not_count():
    def first(x):
        with jax.named_scope("a"):
            return jax.jit(lambda x: jnp.tanh(custom(x)))(x)

    def second(x):
        return jax.jit(_named("other"))(x)

    def _named(name):
        def fun(y):
            z = custom(y)
            return jnp.tanh(z)

        fun.__name__ = name
        return fun

    assert jaxprs.structure(traced(first, X)) == jaxprs.structure(traced(second, X))


def test_keys_and_random_bits_have_a_structure():
    def fun(key):
        return jax.random.normal(key, (2,))

    key = jax.random.key(0)
    assert jaxprs.structure(traced(fun, key)) == jaxprs.structure(traced(fun, key))
    other = jax.random.key(0, impl="rbg")
    assert jaxprs.structure(traced(fun, key)) != jaxprs.structure(traced(fun, other))


def test_equinox_models_of_one_shape_have_one_structure():
    layers = [eqx.nn.Linear(4, 4, key=k) for k in jax.random.split(jax.random.key(2), 2)]
    first, second = (jaxprs.structure(traced(lambda m, x: jax.vmap(m)(x), m, X)) for m in layers)
    assert first == second


def test_literals_are_told_from_variables():
    jaxpr = traced(lambda x: x + 1.0, X)
    assert [jaxprs.is_literal(v) for v in jaxpr.eqns[0].invars] == [False, True]
    assert isinstance(jaxpr, jex.ClosedJaxpr)
    assert not _compat.constants_of(jaxpr)


def test_jaxprs_that_have_names_among_the_parameters_keep_them():
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])

    def solve(b):
        return jax.lax.custom_linear_solve(
            lambda x: matrix @ x, b, lambda _, y: jnp.linalg.inv(matrix) @ y, symmetric=True
        )

    whole = jaxprs.trace(solve, (jnp.ones(2),))
    (eqn,) = (e for e in whole.jaxpr.eqns if e.primitive.name == "custom_linear_solve")
    seen = []
    new = jaxprs.map_jaxprs(eqn, lambda closed: seen.append(closed) or closed)
    assert len(seen) == 4  # the product and the solution, and both transposed
    assert type(new.params["jaxprs"]) is type(eqn.params["jaxprs"])
    flat = _compat.make_closed_jaxpr(
        whole.jaxpr.jaxpr.invars,
        whole.jaxpr.jaxpr.outvars,
        [new if e is eqn else e for e in whole.jaxpr.eqns],
    )
    (made,) = jaxprs.run(flat, *whole.inputs)
    np.testing.assert_array_equal(made, solve(jnp.ones(2)))
