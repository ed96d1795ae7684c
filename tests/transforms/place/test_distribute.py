"""Stacked parameters are distributed: each rank holds its layers, and moves none of them."""

import collections
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import _compat, jaxprs
from jaxpp.runtime import StackedArray
from jaxpp.transforms.stacked import Classes, in_parts, part_vars
from tests.helpers import mesh_of
from tests.transforms import two_layers

LAYERS, WIDTH, BATCH, MICROBATCHES, STEPS = 6, 8, 8, 4, 3


def init(key=None, layers=LAYERS):
    key = jax.random.key(0) if key is None else key

    def layer(key):
        weight = jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        return {"w": weight, "b": 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (WIDTH,))}

    head = jax.random.normal(jax.random.fold_in(key, 7), (WIDTH, 3))
    return {"layers": jax.vmap(layer)(jax.random.split(key, layers)), "head": head}


def layer(h, p):
    return jnp.tanh(h @ p["w"] + p["b"]), None


def loss_of(bounds, body=layer, prepare=lambda layers: layers):
    """A loss whose scan over layers is cut at `bounds`."""

    def loss(params, x):
        layers = prepare(params["layers"])
        for k, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            x = jaxpp.pipeline_enter_stage(x) if k else x
            part = jax.tree.map(lambda w: jax.lax.slice_in_dim(w, low, high), layers)  # noqa: B023
            x, _ = jax.lax.scan(body, x, part)
        return jnp.mean((x @ params["head"]) ** 2)

    return loss


def value_and_grad(loss, policy=None):
    return jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss, policy=policy)), MICROBATCHES
    )


def scheduled(loss, schedule=None, policy=None):
    return jaxpp.schedule(value_and_grad(loss, policy), schedule or jaxpp.schedules.OneFOneB())


def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 2, params)


ADAMW = optax.chain(
    optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-2, weight_decay=0.1, mask=decayed)
)


def step_of(value_and_grad, optimizer=ADAMW):
    def step(params, state, x):
        loss, grads = value_and_grad(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def batch(i):
    return jax.random.normal(jax.random.key(100 + i), (BATCH, WIDTH))


def train(step, params, optimizer=ADAMW) -> Any:
    state: Any = (params, optimizer.init(params))
    loss = None
    for i in range(STEPS):
        *state, loss = step(*state, batch(i))
    return state, loss


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def sent(step):
    return collections.Counter(k for p in step.programs for s in p.sends for k in s.message.kinds)


def check(loss, optimizer=ADAMW, *, ranks=2, schedule=None, policy=None, rtol=1e-6, params=None):
    """Three steps as on a single device, with stage edges and scalars alone between ranks."""
    params = init() if params is None else params
    step = step_of(scheduled(loss, schedule, policy), optimizer)
    placed = jaxpp.place(step, mesh_of(ranks))
    got = train(placed, params, optimizer)
    want = train(jax.jit(step_of(value_and_grad(loss, policy), optimizer)), params, optimizer)
    chex.assert_trees_all_close(as_numpy(got), as_numpy(want), rtol=rtol, atol=rtol)
    assert set(sent(placed)) <= {"edge", "scalar"}
    return placed, got


# ---- the law ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "schedule", "ranks"),
    [
        ((0, 3, 6), jaxpp.schedules.OneFOneB(), 2),
        ((0, 1, 6), jaxpp.schedules.ZeroBubbleH1(), 2),
        ((0, 1, 3, 4, 6), jaxpp.schedules.Interleaved1F1B(), 2),
        pytest.param((0, 2, 3, 6), jaxpp.schedules.GPipe(), 3, marks=pytest.mark.slow),
        pytest.param((0, 1, 3, 4, 6), jaxpp.schedules.ZeroBubbleV(), 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_stacked_model_trains_as_on_one_device(bounds, schedule, ranks):
    placed, (state, _) = check(loss_of(bounds), ranks=ranks, schedule=schedule)
    for stack in jax.tree.leaves([s["layers"] for s in (state[0], state[1][1][0].mu)]):
        assert isinstance(stack, StackedArray) and stack.bounds == bounds
    shared = jaxpp.place(
        step_of(scheduled(loss_of(bounds), schedule)), mesh_of(placed_ranks(placed), shared=True)
    )
    got, other = train(placed, init()), train(shared, init())
    chex.assert_trees_all_equal(as_numpy(got), as_numpy(other))


def placed_ranks(placed):
    return len(placed.programs)


def test_no_rank_holds_more_than_its_layers():
    """Live arrays of each device while a step runs over and over, and after it."""
    bounds = (0, 1, 3, 5, 6)
    schedule = jaxpp.schedules.Interleaved1F1B()
    placed = jaxpp.place(
        step_of(scheduled(loss_of(bounds), schedule)), mesh_of(2), donate_argnums=(0, 1)
    )
    params = jax.device_get(init())
    state = params, jax.device_get(ADAMW.init(params))
    earlier = jax.live_arrays()  # held: the `id` of one that is freed would be given again
    before = {id(a) for a in earlier}
    *state, _ = placed(*state, batch(0))
    *state, _ = placed(*state, batch(1))
    jax.block_until_ready(state)
    rows = collections.Counter()
    for array in jax.live_arrays():
        if id(array) not in before and array.shape[1:] == (WIDTH, WIDTH):
            (device,) = array.devices()
            rows[device] += array.shape[0]
    # The weights and both moments: three layers of six on each of two ranks.
    assert rows == {d: 3 * (LAYERS // 2) for d in jax.devices()[:2]}
    for computation in placed.bundle.computations:
        for v in computation.jaxpr.jaxpr.invars + computation.jaxpr.jaxpr.outvars:
            assert v.aval.shape[:1] != (LAYERS,)
        for eqn in computation.jaxpr.eqns:
            assert all(v.aval.shape != (LAYERS, WIDTH, WIDTH) for v in eqn.outvars)


def test_equal_stages_compile_once():
    """As many computations as for a model whose layers are separate arrays, or fewer."""

    def unstacked(params, x):
        for k, block in enumerate(params["layers"]):
            x = jaxpp.pipeline_enter_stage(x) if k in (2, 4) else x
            x, _ = layer(x, block)
        return jnp.mean((x @ params["head"]) ** 2)

    params, x = init(), batch(0)
    blocks = [jax.tree.map(lambda w: w[i], params["layers"]) for i in range(LAYERS)]  # noqa: B023
    flat = {"layers": blocks, "head": params["head"]}
    stacked = jaxpp.place(step_of(scheduled(loss_of((0, 2, 4, 6)))), mesh_of(3))
    stacked = stacked.lower(params, ADAMW.init(params), x)
    separate = jaxpp.place(step_of(scheduled(unstacked)), mesh_of(3))
    separate = separate.lower(flat, ADAMW.init(flat), x)
    assert len(stacked.bundle.computations) <= len(separate.bundle.computations)
    assert len(stacked.as_text()) <= len(separate.as_text())


# ---- models -------------------------------------------------------------------------------------


def in_bfloat16(layers):
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers)


def half_layer(h, p):
    y = h.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16)
    return jnp.tanh(y).astype(jnp.float32), None


@pytest.mark.more
@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        (loss_of((0, 2, 6), jax.checkpoint(layer)), None),
        (loss_of((0, 2, 6)), jax.checkpoint_policies.nothing_saveable),
        (loss_of((0, 2, 6), half_layer), None),
        (loss_of((0, 2, 6), half_layer, prepare=in_bfloat16), None),
    ],
    ids=["checkpointed layers", "policy", "cast in the layer", "cast of the stack"],
)
def test_layers_may_be_checkpointed_and_cast(loss, policy):
    check(loss, optax.sgd(0.1, momentum=0.9), policy=policy, rtol=1e-5)


@pytest.mark.more
def test_a_penalty_in_the_loss_is_summed_up_in_parts():
    plain = loss_of((0, 2, 6))

    def loss(params, x):
        return plain(params, x) + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))

    check(loss, optax.sgd(0.1, momentum=0.9))


# ---- what surrounds the loop --------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
        optax.MultiSteps(optax.adamw(1e-2, eps=1e-2), 2),
        optax.chain(optax.clip(0.05), optax.lion(1e-3)),
        optax.chain(
            optax.centralize(), optax.ema(0.9), optax.scale_by_schedule(lambda n: -0.1 / n)
        ),
    ],
    ids=["apply_if_finite", "MultiSteps", "lion", "centralize and ema"],
)
def test_optimizers_run_slice_by_slice(optimizer):
    check(loss_of((0, 2, 6)), optimizer, rtol=1e-5)


def newton_schulz(g):
    return 1.5 * g - 0.5 * g @ g.T @ g


def unit(g):
    return g / jnp.linalg.norm(g)


def iterated(g):
    return jax.lax.fori_loop(0, 5, lambda _, g: newton_schulz(g), unit(g))


def with_coefficients(g):
    coefficients = jnp.array([[1.5, -0.5], [1.4, -0.4], [1.3, -0.3]])
    return jax.lax.scan(lambda g, c: (c[0] * g + c[1] * g @ g.T @ g, None), unit(g), coefficients)[
        0
    ]


def converged(g):
    def is_far(carry):
        return (carry[0] < 40) & (jnp.max(jnp.abs(newton_schulz(carry[1]) - carry[1])) > 1e-3)

    return jax.lax.while_loop(is_far, lambda c: (c[0] + 1, newton_schulz(c[1])), (0, unit(g)))[1]


def whitened(g):
    values, vectors = jnp.linalg.eigh(g @ g.T + 1e-3 * jnp.eye(len(g)))
    return vectors @ jnp.diag(values**-0.5) @ vectors.T @ g


def solved(g):
    return jnp.linalg.solve(g @ g.T + jnp.eye(len(g)), g)


def largest_of_each_row(g):
    order = jnp.argsort(jnp.abs(g), axis=1)
    return g.at[:, 0].set(jnp.take_along_axis(g, order, axis=1)[:, -1])


def of_one_layer(precondition):
    """An optimizer that treats each layer's matrix apart, all of them at once."""

    def update(updates, params):
        w = jax.vmap(precondition)(updates["layers"]["w"])
        return {**updates, "layers": {**updates["layers"], "w": w}}

    return optax.chain(optax.trace(0.9), optax.stateless(update), optax.sgd(0.05))


@pytest.mark.parametrize(
    "precondition",
    [iterated, with_coefficients, converged, whitened, solved, largest_of_each_row],
    ids=lambda fun: fun.__name__,
)
def test_a_matrix_optimizer_runs_on_the_rank_of_each_layer(precondition):
    optimizer, params = of_one_layer(precondition), init()
    step = step_of(scheduled(loss_of((0, 2, 6))), optimizer)
    placed = jaxpp.place(step, mesh_of(2))
    got = train(placed, params, optimizer)
    shared = train(jaxpp.place(step, mesh_of(2, shared=True)), params, optimizer)
    want = train(jax.jit(step_of(value_and_grad(loss_of((0, 2, 6))), optimizer)), params, optimizer)
    chex.assert_trees_all_equal(as_numpy(got), as_numpy(shared))
    chex.assert_trees_all_close(as_numpy(got), as_numpy(want), rtol=1e-4, atol=1e-5)
    assert set(sent(placed)) <= {"edge", "scalar"}
    jaxpp.testing.assert_no_transfers_of(placed, params)
    jaxpp.certify(placed, params, optimizer.init(params), batch(0))


@pytest.mark.more
def test_metrics_of_layers_and_of_all_layers():
    def metrics(params, grads):
        w, g = params["layers"]["w"], grads["layers"]["w"]
        each = jnp.sqrt(jnp.sum(g**2, axis=(1, 2)))
        mask = jnp.arange(LAYERS) >= 2
        _, running = jax.lax.scan(lambda total, n: (total + n, total + n), 0.0, each)
        return {
            "each": each,
            "norm": jnp.linalg.norm(w),
            "largest": jnp.max(jnp.abs(g)),
            "mean": jnp.mean(w, axis=0),
            "chosen": jnp.sum(jnp.where(mask[:, None, None], g, 0.0)),
            "layer 3": jnp.sum(g[3]),
            "running": running,
        }

    def step_with(value_and_grad):
        def step(params, x):
            loss, grads = value_and_grad(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), metrics(params, grads)

        return step

    loss = loss_of((0, 2, 6))
    placed = jaxpp.place(step_with(scheduled(loss)), mesh_of(2))
    got = placed(init(), batch(0))
    want = jax.jit(step_with(value_and_grad(loss)))(init(), batch(0))
    chex.assert_trees_all_close(as_numpy(got), as_numpy(want), rtol=1e-5, atol=1e-6)
    jaxpp.testing.assert_no_transfers_of(placed, init())


def test_what_needs_all_layers_gathers_and_says_so():
    def step_with(value_and_grad):
        def step(params, x):
            loss, grads = value_and_grad(params, x)
            new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            new["layers"]["w"] += jnp.sort(params["layers"]["w"], axis=0)
            return new, loss

        return step

    loss = loss_of((0, 2, 6))
    placed = jaxpp.place(step_with(scheduled(loss)), mesh_of(2), donate_argnums=0)
    jaxpp.testing.assert_matches_single_device(
        placed, step_with(value_and_grad(loss)), init(), batch(0), rtol=1e-5
    )
    lines = [
        line for line in placed.as_text().splitlines() if "gathered" in line and "send" in line
    ]
    assert len(lines) == 2  # each rank sends its layers of this one parameter, and of no other
    for line, rows in zip(lines, ("0:2", "2:6"), strict=True):
        assert f"gathered args[0]['layers']['w'][{rows}] for `sort` at " in line
        assert "test_distribute.py" in line
    with pytest.raises(AssertionError, match=r"\['w'\]\[0:2\]"):
        jaxpp.testing.assert_no_transfers_of(placed, init())


def test_a_callback_is_given_all_layers():
    seen = []

    def step(params, x):
        _, grads = scheduled(loss_of((0, 2, 6)))(params, x)
        jax.debug.callback(lambda w: seen.append(np.asarray(w)), params["layers"]["w"])
        return grads

    placed = jaxpp.place(step, mesh_of(2))
    placed(init(), batch(0))
    jax.effects_barrier()
    (layers,) = seen
    np.testing.assert_array_equal(layers, init()["layers"]["w"])
    assert "for `debug_callback` at " in placed.as_text()


def test_a_table_that_one_stage_slices_stays_whole():
    def loss(params, x):
        h = jnp.tanh(x + params["positions"][: BATCH // MICROBATCHES])
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ params["head"]) ** 2)

    params = {"positions": jnp.ones((32, WIDTH)), "head": jnp.ones((WIDTH, 3))}
    placed = jaxpp.place(scheduled(loss), mesh_of(2))
    _, grads = placed(params, batch(0))
    assert not isinstance(grads["positions"], StackedArray)
    want = value_and_grad(loss)(params, batch(0))[1]
    chex.assert_trees_all_close(as_numpy(grads), as_numpy(want), rtol=1e-6)


def test_a_stack_that_the_step_closes_over_is_sliced_too():
    frozen = init()["layers"]

    def loss_with(bounds):
        inner = loss_of(bounds)
        return lambda head, x: inner({"layers": frozen, "head": head}, x)

    placed = jaxpp.place(scheduled(loss_with((0, 2, 6))), mesh_of(2))
    got = placed(init()["head"], batch(0))
    want = value_and_grad(loss_with((0, 2, 6)))(init()["head"], batch(0))
    chex.assert_trees_all_close(as_numpy(got), as_numpy(want), rtol=1e-6)
    shapes = {np.shape(value) for p in placed.programs for _, value in p.constants}
    assert (2, WIDTH, WIDTH) in shapes and (LAYERS, WIDTH, WIDTH) not in shapes


@pytest.mark.more
def test_an_equinox_model_of_stacked_layers():
    class Net(eqx.Module):
        layers: eqx.nn.Linear
        head: jax.Array

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            for k, (low, high) in enumerate(((0, 2), (2, 6))):
                x = jaxpp.pipeline_enter_stage(x) if k else x
                part = jax.tree.map(lambda w: w[low:high], arrays)  # noqa: B023
                body = lambda h, p: (jnp.tanh(jax.vmap(eqx.combine(p, static))(h)), None)  # noqa: E731
                x, _ = jax.lax.scan(body, x, part)
            return x @ self.head

    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(keys)
    model = Net(layers, jnp.ones((WIDTH, 3)))
    optimizer = optax.adamw(1e-2, eps=1e-2)

    def step_with(transform):
        grad = jaxpp.microbatch(
            eqx.filter_value_and_grad(jaxpp.wrap_forward(lambda model, x: jnp.mean(model(x) ** 2))),
            MICROBATCHES,
        )
        grad = transform(grad)

        def step(model, state, x):
            loss, grads = grad(model, x)
            updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state, loss

        return step

    state = optimizer.init(eqx.filter(model, eqx.is_array))
    placed = jaxpp.place(
        step_with(lambda f: jaxpp.schedule(f, jaxpp.schedules.ZeroBubbleH1())), mesh_of(2)
    )
    jaxpp.testing.assert_matches_single_device(
        placed, step_with(lambda f: f), model, state, data=lambda i: (batch(i),), num_state=2,
        rtol=1e-5,
    )  # fmt: skip
    assert set(sent(placed)) <= {"edge", "scalar"}
    new, _, _ = placed(model, state, batch(0))
    assert eqx.is_array(new.layers.weight) and eqx.is_inexact_array(new.layers.weight)
    assert jax.tree.structure(new) == jax.tree.structure(model)


# ---- rules --------------------------------------------------------------------------------------


def keys(n):
    return jax.random.split(jax.random.key(3), n)


@pytest.mark.more
@pytest.mark.parametrize(
    ("fun", "pieces"),
    [
        (lambda x: jnp.tanh(2.0 * x) - x**2, True),
        (lambda x: jnp.where(x > 0, x, 0.5), True),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), True),
        (lambda x: x.reshape(5, 12)[:, 3:7].reshape(5, 2, 2), True),
        (lambda x: jnp.swapaxes(x, 1, 2), True),
        (lambda x: jnp.sum(x, axis=-1, keepdims=True) * x, True),
        (lambda x: jnp.cumsum(x, axis=1)[:, ::-1], True),
        (lambda x: jnp.concatenate([x, x + 1], axis=2), True),
        (lambda x: jnp.sort(x, axis=1), True),
        (lambda x: jnp.argmax(x, axis=1), True),
        (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), True),
        (lambda x: jnp.einsum("lij,lik->ljk", x, x), True),
        (lambda x: jnp.einsum("lij,jk->lik", x, jnp.ones((3, 2))), True),
        (lambda x: x + jnp.mean(x, axis=0), True),
        (lambda x: jax.vmap(lambda k: jax.random.bits(k, (4, 3)))(keys(5)) * x, True),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0] * 0, x)[1], True),
        (lambda x: jax.lax.scan(lambda c, r: (c * r, c), x[0], x, reverse=True)[1], True),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * i + x[:, :1], x), True),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + jnp.sum(x, 0), x), None),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x[::-1] + i, x), None),
        (
            lambda x: jax.vmap(
                lambda r: jax.lax.while_loop(lambda r: jnp.sum(r) < 9, lambda r: r + 0.5, r)
            )(x),
            True,
        ),
        (lambda x: jax.lax.fori_loop(0, jnp.argmax(x), lambda i, x: x * 0.9, x), None),
        (lambda x: jnp.fft.fft(x).real, True),
        (lambda x: jax.lax.top_k(x, 2)[0], True),
        (lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1), True),
        (lambda x: x[:, jnp.array([2, 0])], True),
        (lambda x: x[jnp.array([2, 0])], None),
        (lambda x: x.at[:, 1].set(0.0), True),
        (lambda x: x.at[1].set(0.0), None),
        (lambda x: jax.lax.dynamic_slice(x, (0, jnp.argmax(x[0, 0]), 0), (5, 2, 3)), True),
        (lambda x: jax.lax.dynamic_update_slice(x, x[:, :1], (0, jnp.argmax(x[0, 0]), 0)), True),
        (lambda x: jnp.linalg.svd(x, compute_uv=False), True),
        (lambda x: jnp.sum(x**2), False),
        (lambda x: (jnp.max(x), jnp.min(x, axis=0), jnp.prod(x), jnp.all(x > 0)), False),
        (lambda x: jnp.einsum("lij,lij->", x, x), False),
        (lambda x: x[1:4] * 2, False),
        (lambda x: x[::-1], None),
        (lambda x: jnp.sort(x, axis=0) + x, None),
        (lambda x: jnp.roll(x, 1, axis=0), False),
        (lambda x: x[1:4, 2:], False),
    ],
)
def test_an_equation_gives_part_by_part_what_it_gives_as_a_whole(fun, pieces):
    """`pieces`: whether the results are in parts; None where an array has to be put together."""
    x = jax.random.normal(jax.random.key(0), (5, 4, 3))
    closed = jax.make_jaxpr(fun)(x)
    jaxpr, consts = jaxprs.without_constants(closed)
    jaxpr = jaxprs.inline(jaxpr, lambda e: True)
    (*_, arg) = jaxpr.jaxpr.invars
    bounds = (0, 2, 5)
    classes = Classes(jaxpr.eqns)
    variables = [arg, *(v for e in jaxpr.eqns for v in e.outvars)]
    cut = {v: bounds for v in variables if classes.of(v) is classes.of(arg)}
    given = part_vars(arg, bounds)
    slicer = in_parts(jaxpr.eqns, cut, {arg: given})
    outs, joined = [], []
    for v in jaxpr.jaxpr.outvars:
        parts = slicer.outputs([v], [cut.get(v)])
        outs.extend(parts)
        joined.append(len(parts))
    assert (pieces is None) == bool(slicer.gathered)
    if pieces is not None:
        assert all(n == (2 if pieces else 1) for n in joined)
    invars = [*jaxpr.jaxpr.invars[:-1], *given]
    split = _compat.make_closed_jaxpr(invars, outs, slicer.eqns)
    values = iter(jax.jit(lambda *xs: jaxprs.run(split, *xs))(*consts, x[:2], x[2:]))
    got = [
        np.concatenate([next(values) for _ in range(n)]) if n > 1 else next(values) for n in joined
    ]
    chex.assert_trees_all_close(got, jax.tree.leaves(jax.jit(fun)(x)), rtol=1e-6, atol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize(
    "update",
    [
        lambda p, g: (p[None] - g[None])[0],
        lambda p, g: jnp.broadcast_to(p, (3, *p.shape)).mean(0) - g,
        lambda p, g: (p[:, None] - g[:, None])[:, 0],
    ],
)
def test_an_update_may_put_an_axis_before_or_after_the_layers(update):
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    grad_fn = two_layers.scheduled(jaxpp.split_stages(loss, 2))
    w = jax.random.normal(jax.random.key(3), (4, 4, 4))
    got = two_layers.place(lambda w, x: update(w, grad_fn(w, x)[1]))(w, two_layers.X)
    _, grads = two_layers.accumulated(loss)(w, two_layers.X)
    np.testing.assert_allclose(jax.device_get(got), update(w, grads), rtol=1e-4, atol=1e-6)
