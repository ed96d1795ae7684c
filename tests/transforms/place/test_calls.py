"""How a placed step is called: what `jax.jit` respects it respects, and under a trace it is plain.

Each is compared with `jax.jit` of the step without a pipeline.
"""

import enum
import functools
import warnings
from typing import Any

import chex
import equinox as eqx
import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.runtime.executor import _compile
from jaxpp.transforms.place import _flat_step, _place
from tests.helpers import assert_close

WIDTH, BATCH, MICROBATCHES = 4, 8, 2


def mesh():
    return jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)


def weights(seed=0):
    return list(jax.random.normal(jax.random.key(seed), (2, WIDTH, WIDTH)) / 2)


def batch(seed=0):
    return jax.random.normal(jax.random.key(100 + seed), (BATCH, WIDTH))


def loss_fn(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    return jnp.mean((h @ w[1] - 0.5) ** 2)


def piped(loss, reduce="mean"):
    loop = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES, reduce=reduce
    )
    return jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())


def descend(value_and_grad, w, x, rate=0.1):
    value, grads = value_and_grad(w, x)
    return jax.tree.map(lambda p, g: p - rate * g, w, grads), value


def train_step(w, x, rate: Any = 0.1):
    return descend(piped(loss_fn), w, x, rate)


def plain_step(w, x, rate=0.1):
    return descend(jax.value_and_grad(loss_fn), w, x, rate)


def counted(fun):
    """The function, and a list that grows whenever it is traced."""
    traces = []

    @functools.wraps(fun)
    def call(*args, **kwargs):
        traces.append(1)
        return fun(*args, **kwargs)

    return call, traces


# ---- settings of JAX ----------------------------------------------------------------------------


def noisy_step(value_and_grad, w, x):
    """Random numbers in a stage and around the loop, and numbers of the default type."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - jax.random.normal(jax.random.key(1), (WIDTH,))) ** 2)

    value, _ = value_and_grad(loss)(w, x)
    return value, jax.random.normal(jax.random.key(0), (5,)), jnp.arange(3.0), w[0] @ w[1]


SETTINGS = {
    "threefry_partitionable": (jax.threefry_partitionable, False, True),
    "default_matmul_precision": (jax.default_matmul_precision, "highest", "float32"),
    "enable_x64": (jax.enable_x64, True, False),
}


@pytest.mark.more
@pytest.mark.parametrize("by_update", [False, True], ids=["context", "update"])
@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_traces_anew_and_an_earlier_one_does_not(name, by_update):
    context, first, second = SETTINGS[name]
    fun, traces = counted(functools.partial(noisy_step, piped))
    placed = jaxpp.place(fun, mesh())
    plain = jax.jit(functools.partial(noisy_step, jax.value_and_grad))
    w, x = weights(), batch()
    before = getattr(jax.config, f"jax_{name}")
    seen = []
    try:
        for value in (first, second, first):
            if by_update:
                jax.config.update(f"jax_{name}", value)
            with context(value):
                got = placed(w, x)
                assert_close(got, plain(w, x), rtol=1e-4)
            seen.append(got)
    finally:
        jax.config.update(f"jax_{name}", before)
    assert len(traces) == 2
    chex.assert_trees_all_equal(seen[0], seen[2])
    if name == "threefry_partitionable":
        assert not np.allclose(seen[0][1], seen[1][1]) and not np.allclose(seen[0][0], seen[1][0])
    if name == "enable_x64":
        assert [y[2].dtype for y in seen] == ["float64", "float32", "float64"]


@pytest.mark.more
def test_the_precision_of_a_product_is_that_of_the_call():
    def precision_of(w, x):
        (eqn,) = jax.make_jaxpr(jnp.dot)(x, w[0]).eqns
        return str(eqn.params["precision"]), train_step(w, x)

    placed = jaxpp.place(precision_of, mesh())
    seen = []
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            seen.append(placed(weights(), batch())[0])
    assert "HIGHEST" in seen[0] and "HIGHEST" not in seen[1]


@pytest.mark.more
@pytest.mark.parametrize("transformed", ["microbatch", "schedule"])
def test_a_loop_that_is_not_placed_knows_its_setting_too(transformed):
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1] - jax.random.normal(jax.random.key(1), (WIDTH,))) ** 2)

    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    if transformed == "schedule":
        loop = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())
    values = []
    for setting in (False, True, False):
        with jax.threefry_partitionable(setting):
            got = loop(weights(), batch())
            assert_close(got, jax.jit(jax.value_and_grad(loss))(weights(), batch()))
            values.append(float(got[0]))
    assert values[0] == values[2] != values[1]


@pytest.mark.more
@pytest.mark.parametrize("where", ["task", "around"])
def test_nans_are_found_where_they_are_asked_for(where):
    """Also in a call of what was compiled, and called, before."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean(jnp.sqrt(jnp.abs(h @ w[1]) + x[0, 0]))

    def step(w, x):
        value, grads = piped(loss)(w, x)
        return value, grads, jnp.log(w[0][0, 0])

    placed, w, x = jaxpp.place(step, mesh()), weights(), batch()
    w[0], x = w[0].at[0, 0].set(1.0), jnp.abs(x)
    bad = (w, x - 4.0) if where == "task" else ([w[0].at[0, 0].set(-1), w[1]], x)
    placed(*bad)
    with jax.debug_nans(True):
        placed(w, x)
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="nan") as caught:
                placed(*bad)
        placed(w, x)
    (note,) = caught.value.__notes__
    assert ("1.0 on rank 1" in note) == (where == "task")
    assert jnp.isnan(placed(*bad)[0 if where == "task" else -1])


# ---- numbers of Python --------------------------------------------------------------------------


def test_a_number_is_traced_as_by_jit():
    """The learning rate and the number of the step: one trace for all values, with their types."""

    def step(value_and_grad, w, x, rate, count, unit):
        assert not isinstance(count, int) and not isinstance(rate, float)
        new, value = descend(value_and_grad, w, x, rate / (1 + count))
        return new, value, count + 1, rate, unit * 1j, f"{count}".endswith(")")

    fun, traces = counted(functools.partial(step, piped(loss_fn)))
    placed = jaxpp.place(fun, mesh())
    plain = eqx.filter_jit(functools.partial(step, jax.value_and_grad(loss_fn)))
    w, x = weights(), batch()
    for count in range(3):
        rate = 0.1 / (1 + count)
        got = placed(w, x, rate, count, complex(count))
        want = plain(w, x, *(jnp.asarray(n) for n in (rate, count, complex(count))))
        assert got[-1] is want[-1]
        assert_close(got[:-1], want[:-1])
        assert [y.weak_type for y in got[2:5]] == [y.weak_type for y in want[2:5]]
        w = got[0]
    assert len(traces) == 1


def test_a_number_in_an_equinox_module_is_a_setting():
    """As for `eqx.filter_jit`: a rate of zero needs no key, and is no parameter."""

    class Net(eqx.Module):
        layers: list
        dropout: eqx.nn.Dropout
        scale: int

    def loss(net, x):
        h = jaxpp.pipeline_enter_stage(net.dropout(jnp.tanh(x @ net.layers[0])))
        return jnp.mean((h @ net.layers[1]) ** 2) * range(9)[net.scale]

    def step(value_and_grad, net, x):
        value, grads = value_and_grad(net, x)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), value

    loop = jaxpp.microbatch(eqx.filter_value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    loop = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())
    placed = jaxpp.place(functools.partial(step, loop), mesh())
    plain = eqx.filter_jit(functools.partial(step, eqx.filter_value_and_grad(loss)))
    for scale in (2, 3, 2):
        net = Net(weights(), eqx.nn.Dropout(0.0), scale)
        got, want = placed(net, batch()), plain(net, batch())
        assert (got[0].scale, got[0].dropout.p) == (scale, 0.0)
        assert_close(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array))
    assert len(placed._cache) == 2


def test_a_state_that_counts_in_python_is_compiled_once():
    """The step of a Flax `TrainState` is an int at first."""
    loop = piped(loss_fn)
    fun, traces = counted(lambda state, x: state.apply_gradients(grads=loop(state.params, x)[1]))
    placed = jaxpp.place(fun, mesh(), donate_argnums=0)
    make = functools.partial(
        flax.training.train_state.TrainState.create, apply_fn=None, tx=optax.adam(1e-2)
    )
    plain = jax.jit(
        lambda state, x: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))
    )
    state, want = make(params=weights()), make(params=weights())
    for n in range(3):
        state, want = placed(state, batch(n)), plain(want, batch(n))
    assert len(traces) == 1 and int(state.step) == 3
    assert_close(jax.tree.leaves(state), jax.tree.leaves(want))
    fresh = placed.initialize(lambda: make(params=weights()), rest=(batch(),))
    assert int(placed(fresh, batch()).step) == 1
    assert len(traces) == 1


class Kind(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@pytest.mark.parametrize(
    "values", [[True, False], ["relu", "tanh"], [Kind.SMALL, Kind.LARGE], [jnp.sin, jnp.cos]]
)
def test_what_is_no_number_is_static(values):
    def step(w, x, value):
        return train_step(w, x)[1], value

    placed = jaxpp.place(step, mesh())
    for value in [*values, *values]:
        assert placed(weights(), batch(), value)[1] is value
    assert len(placed._cache) == 2


def test_a_number_whose_value_is_needed_is_named_and_may_be_static():
    @functools.wraps(train_step)
    def step(w, x, count, rates):
        rate = {1: 0.1, 2: 0.2}[count] if rates else jnp.ones(count).sum()
        return train_step(w, x, rate)

    placed = jaxpp.place(step, mesh())
    for rates in (True, False):
        with pytest.raises(TypeError) as caught:
            placed(weights(), batch(), 1, rates)
        assert any("numbers args[2], as by jax.jit" in n for n in caught.value.__notes__)
    placed = jaxpp.place(step, mesh(), static_argnums=2)
    for count in (1, 2, 1):
        assert_close(
            placed(weights(), batch(), count, True),
            jax.jit(plain_step)(weights(), batch(), 0.1 * count),
        )
        placed(weights(), batch(), count, False)
    assert len(placed._cache) == 4


def test_too_many_static_values_are_a_warning_and_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(_place, "KEPT", 10)
    placed = jaxpp.place(lambda x, n: x * n, jaxpp.MpmdMesh((1,)), static_argnums=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(7):
            placed(jnp.ones(()), n)
    with pytest.warns(UserWarning, match=r"compiled for 8 values .* args\[1\] is 7, not 6") as said:
        placed(jnp.ones(()), 7)
    assert [w.filename for w in said] == [__file__]
    for n in range(20):
        assert float(placed(jnp.ones(()), n)) == n
    assert len(placed._cache) == 10


# ---- keyword arguments --------------------------------------------------------------------------


def keyword_step(value_and_grad, w, x, rate: Any = 0.1, *, decay=None, extra=(), **more):
    new, value = descend(value_and_grad, w, x, rate)
    if decay is not None:
        new = jax.tree.map(lambda p: p * decay, new)
    return new, value, extra, dict(more)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        (2, {"rate": 0.2}),
        (1, {"x": "batch"}),
        (0, {"x": "batch", "w": "weights", "rate": 0.3}),
        (2, {"decay": jnp.float32(0.5)}),
        (2, {"rate": 0.2, "extra": jnp.arange(3), "unknown": jnp.ones(2), "name": jnp.zeros(1)}),
    ],
)
def test_keyword_arguments(args, kwargs):
    named = {"weights": weights(), "batch": batch()}
    kwargs = {k: named[v] if isinstance(v, str) else v for k, v in kwargs.items()}
    args = (weights(), batch())[:args]
    placed = jaxpp.place(functools.partial(keyword_step, piped(loss_fn)), mesh())
    plain = jax.jit(functools.partial(keyword_step, jax.value_and_grad(loss_fn)))
    want = plain(*args, **kwargs)
    assert_close(placed(*args, **kwargs), want)
    assert_close(placed.lower(*args, **kwargs).compile()(*args, **kwargs), want)


def test_a_keyword_counts_at_its_position():
    placed = jaxpp.place(train_step, mesh(), donate_argnums=0, static_argnums=2, feed={1: batch})
    w = weights()
    got = placed(x=3, rate=0.5, w=w)
    assert all(p.is_deleted() for p in w)
    assert_close(got, jax.jit(plain_step)(weights(), batch(3), 0.5))
    placed(weights(), 3, 0.5)
    assert len(placed._cache) == 1


def test_a_dictionary_is_not_taken_for_keywords():
    @functools.partial(jaxpp.place, mesh=jaxpp.MpmdMesh((1,)))
    def step(*args, **kwargs):
        return len(args), sorted(kwargs), sum(jax.tree.leaves((args, kwargs)))

    assert step({"a": jnp.ones(())})[:2] == (1, [])
    assert step(a=jnp.ones(()))[:2] == (0, ["a"])
    assert step({"a": jnp.ones(())})[:2] == (1, [])


def test_a_position_that_only_a_keyword_has_is_an_error():
    placed = jaxpp.place(lambda w, *, x: train_step(w, x), mesh(), donate_argnums=1)
    with pytest.raises(ValueError, match="donate_argnums names argument 1, but .* 1 argument"):
        placed(weights(), x=batch())


@pytest.mark.parametrize("in_axes", [(None, 0, None), [None, 0, None], (None, 0, 0), (None, 0)])
def test_keyword_arguments_of_a_loop(in_axes):
    """Each by the entry of its position; as in `jax.vmap` along the first axis without one."""
    whole = in_axes[-1] is None
    scale = jnp.float32(2.0) if whole else jnp.arange(1.0, 9.0)[:, None]

    def loss(w, x, scale, *, power, mask):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean(((h @ w[1]) * mask * scale) ** power)

    loop = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES, in_axes=in_axes
    )
    loop = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())
    mask = jnp.arange(8.0)[:, None] / 8
    got = loop(weights(), scale=scale, x=batch(), power=2, mask=mask)
    want = jax.value_and_grad(loss)(weights(), batch(), scale, power=2, mask=mask)
    assert_close(got, want)


def test_specs_of_positions_leave_keywords_whole():
    spec = jax.sharding.PartitionSpec
    wide = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    placed = jaxpp.place(
        lambda w, x, *, rate: train_step(w, x, rate), wide, in_specs=(None, spec("data"))
    )
    got = placed(weights(), x=batch(), rate=jnp.float32(0.2))
    assert_close(got, jax.jit(plain_step)(weights(), batch(), 0.2))


@pytest.mark.more
def test_without_jit_a_placed_function_is_the_function():
    placed = jaxpp.place(train_step, mesh())
    with jax.disable_jit():
        got = placed(weights(), batch())
    assert_close(got, plain_step(weights(), batch()))
    assert not placed._cache


# ---- under a trace ------------------------------------------------------------------------------


def value_of(step):
    return lambda w, x: step(w, x)[1]


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda step: jax.grad(value_of(step)),
    "jit of grad": lambda step: jax.jit(jax.grad(value_of(step))),
    "vjp": lambda step: lambda w, x: jax.vjp(step, w, x)[1]((w, 1.0)),
    "vmap": lambda step: lambda w, x: jax.vmap(step, in_axes=(None, 0))(w, jnp.stack([x, 2 * x])),
    "scan": lambda step: lambda w, x: jax.lax.scan(step, w, jnp.stack([x, 2 * x])),
    "checkpoint": lambda step: jax.grad(jax.checkpoint(value_of(step))),
    "closed over": lambda step: lambda w, x: jax.jit(lambda: step(w, x))(),
    "keywords": lambda step: jax.jit(lambda w, x: step(w, x=x, rate=0.3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_under_a_transformation_a_placed_function_is_the_function(transform):
    placed = jaxpp.place(train_step, mesh(), donate_argnums=0)
    w, x = weights(), batch()
    assert_close(transform(placed)(w, x), transform(plain_step)(w, x))
    assert not any(p.is_deleted() for p in w) and not placed._cache


def test_placed_again_it_is_the_function():
    step = jaxpp.place(train_step, mesh())
    again = jaxpp.place(lambda w, x: step(w, x, 0.2), mesh())
    assert_close(again(weights(), batch()), jax.jit(plain_step)(weights(), batch(), 0.2))


@pytest.mark.parametrize("shape_of", [jax.eval_shape, eqx.filter_eval_shape])
def test_shapes_are_those_of_the_function(shape_of):
    placed = jaxpp.place(train_step, mesh())
    assert shape_of(placed, weights(), batch()) == shape_of(plain_step, weights(), batch())
    assert not placed._cache


def test_its_jaxpr_is_that_of_the_function():
    jaxpr = jax.make_jaxpr(jaxpp.place(train_step, mesh()))(weights(), batch())
    want = jax.make_jaxpr(train_step)(weights(), batch())
    assert [e.primitive for e in jaxpr.eqns] == [e.primitive for e in want.eqns]


def test_under_a_trace_a_fed_argument_is_loaded_there():
    placed = jaxpp.place(train_step, mesh(), feed={1: batch})
    assert_close(jax.jit(lambda w: placed(w, 3))(weights()), plain_step(weights(), batch(3)))


def test_a_tracer_that_has_escaped_is_an_error():
    seen = []
    jax.jit(lambda x: seen.append(x) or x)(batch())
    with pytest.raises(ValueError, match=r"args\[1\] is a tracer that has left"):
        jaxpp.place(train_step, mesh())(weights(), seen[0])


# ---- state --------------------------------------------------------------------------------------


def averaging_step(value_and_grad, w, average, x):
    new, value = descend(value_and_grad, w, x)
    return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new), new, value


def test_what_is_alike_is_handed_on_by_what_it_is_computed_from():
    """The average comes first as a result, and second as an argument: no call lays it out anew."""
    wide = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    spec = jax.sharding.PartitionSpec
    placed = jaxpp.place(
        functools.partial(averaging_step, piped(loss_fn)),
        wide,
        donate_argnums=(0, 1),
        in_specs=(None, None, spec("data")),
        zero1="data",
    )
    plain = jax.jit(functools.partial(averaging_step, jax.value_and_grad(loss_fn)))
    w, average = weights(), weights(1)
    want = plain(w, average, batch())
    average, w, value = placed(*jax.tree.map(jnp.copy, (w, average)), batch())
    assert_close((average, w, value), want)
    shardings = placed._cache[0].input_shardings
    assert [[p.sharding for p in tree] for tree in (w, average)] == list(shardings[:2])
    assert shardings[0] != shardings[1]


PAIRED = {
    "average first": (lambda w, a, g: (a + w, w - g), {0: 1, 1: 0}),
    "moments first": (lambda w, m, g: (m + g, w - (m + g)), {0: 1, 1: 0}),
    "gradient first": (lambda w, a, g: (g, w - g, a), {1: 0, 2: 1}),
    "in order": (lambda w, a, g: (w - a, a + g), {0: 0, 1: 1}),
    "nothing of it": (lambda w, a, g: (g, 2 * g), {0: 0, 1: 1}),
    "inside": (lambda w, a, g: {"more": (g, [a * w]), "w": w * g}, {1: 1, 2: 0}),
}


@pytest.mark.parametrize("rule, pairs", PAIRED.values(), ids=PAIRED)
def test_results_are_paired_with_the_arguments_that_they_update(rule, pairs):
    def step(w, a, x):
        g = jnp.outer(x.sum(0), x.sum(0))
        return jax.tree.map(lambda y: {"y": y}, rule(w["y"], a["y"], g))

    args = ({"y": jnp.ones((3, 3))}, {"y": jnp.zeros((3, 3))}, jnp.ones((2, 3)))
    traced = jaxprs.trace(step, args)
    assert _flat_step.pair_state(args, (), traced, _flat_step.flatten(traced.jaxpr)) == pairs


@pytest.mark.more
def test_a_new_value_takes_the_memory_of_its_own_old_value():
    """Else XLA copies: gradients, moments and parameters are donated, and have the same types."""

    def loss(ws, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        return jnp.mean((h @ ws[1]) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    optimizer = optax.adam(0.1)

    def step(ws, state, x):
        updates, state = optimizer.update(grad(ws, x), state)
        return optax.apply_updates(ws, updates), state

    ws = [jnp.eye(8), jnp.eye(8)]
    placed = jaxpp.place(step, mesh(), donate_argnums=(0, 1))
    lowered = placed.lower(ws, optimizer.init(ws), jnp.ones((8, 8)))
    updates = [
        c
        for c in lowered.bundle.computations
        if len([v for v in c.jaxpr.jaxpr.outvars if v.aval.shape]) == 3
    ]
    assert updates  # of both moments and the parameter
    for computation in updates:
        assert len(computation.donated) >= 3
        text = _compile.lower(computation, jax.devices()[0]).compile().as_text()
        assert text and "f32[8,8]{1,0} copy(" not in text
