"""What `place` takes and gives: pytrees, dtypes, static leaves, the lowered step, its errors."""

import dataclasses
import functools
from typing import Any

import chex
import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp._program import Free, Receive, Run, Send
from tests.helpers import assert_close, assert_same

WIDTH, BATCH, MICROBATCHES = 8, 8, 2
RATE = 0.1


def mesh(ranks=3):
    return jaxpp.MpmdMesh((ranks,))


def init_params(depth=3, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), depth)
    return {
        f"layer_{i}": {
            "w": (jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5).astype(dtype),
            "b": jnp.full((WIDTH,), 0.1 * (i + 1), dtype),
        }
        for i, k in enumerate(keys)
    }


def apply(params, x):
    for i, layer in enumerate(params.values()):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ layer["w"] + layer["b"])
    return x


def loss_fn(params, x):
    return jnp.mean((apply(params, x) - 0.5) ** 2)


def batch(seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(100 + seed), (BATCH, WIDTH), dtype)


def piped(loss, *, in_axes=(None, 0), reduce: Any = "mean", schedule=None, has_aux=False):
    grad = eqx.filter_value_and_grad(jaxpp.wrap_forward(loss), has_aux=has_aux)
    loop = jaxpp.microbatch(grad, MICROBATCHES, in_axes=in_axes, reduce=reduce)
    return jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - (RATE * g).astype(p.dtype), params, grads)


def train_step(params, x):
    loss, grads = piped(loss_fn)(params, x)
    return descend(params, grads), loss


def plain_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return descend(params, grads), loss


def run_both(make, carry, data, *, donate=True, ranks=3, **tolerance):
    """Runs a step `(carry, batch) -> (carry, rest)` placed and on one device, and compares."""

    def plain(loss, has_aux=False, **_):
        return eqx.filter_value_and_grad(loss, has_aux=has_aux)

    placed = jaxpp.place(make(piped), mesh(ranks), donate_argnums=(0,) if donate else ())
    results = []
    for step in (eqx.filter_jit(make(plain)), placed):
        state = jax.tree.map(lambda x: jnp.array(x, copy=True) if eqx.is_array(x) else x, carry)
        seen = []
        for x in data:
            state, rest = step(state, x)
            seen.append(rest)
        results.append(eqx.filter((state, seen), eqx.is_array))
    assert_close(results[1], results[0], **tolerance)
    kinds = {k for p in placed.programs for s in p.sends for k in s.message.kinds}
    assert kinds <= {"edge", "scalar"}, placed.as_text()
    return state


# ---- pytrees ------------------------------------------------------------------------------------


@pytest.mark.more
def test_dictionaries():
    def make(value_and_grad):
        def step(params, x):
            loss, grads = value_and_grad(loss_fn)(params, x)
            return descend(params, grads), loss

        return step

    run_both(make, init_params(), [batch(i) for i in range(3)])


def test_flax():
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            for i in range(3):
                x = flax.linen.tanh(
                    flax.linen.Dense(WIDTH)(jaxpp.pipeline_enter_stage(x) if i else x)
                )
            return x

    net: Any = Net()

    def make(value_and_grad):
        def step(variables, x):
            loss, grads = value_and_grad(lambda v, x: jnp.mean(net.apply(v, x) ** 2))(variables, x)
            return descend(variables, grads), loss

        return step

    run_both(make, net.init(jax.random.key(0), batch()), [batch(i) for i in range(3)])


@pytest.mark.more
def test_haiku():
    haiku = pytest.importorskip("haiku")

    def forward(x):
        for i in range(3):
            x = jnp.tanh(haiku.Linear(WIDTH)(jaxpp.pipeline_enter_stage(x) if i else x))
        return jnp.mean(x**2)

    net = haiku.without_apply_rng(haiku.transform(forward))

    def make(value_and_grad):
        def step(params, x):
            loss, grads = value_and_grad(net.apply)(params, x)
            return descend(params, grads), loss

        return step

    run_both(make, net.init(jax.random.key(0), batch()), [batch(i) for i in range(3)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: jax.Array
    params: Any
    momentum: Any
    key: jax.Array
    frozen: jax.Array
    flags: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="run")


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_train_state_with_key_integers_and_booleans(make_key):
    """One dataclass in and out; its key is split in the step and makes noise for every example."""

    def make(value_and_grad):
        def noisy(params, x):
            x, keys = x
            noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)
            return loss_fn(params, x + 0.1 * noise)

        grad_fn = value_and_grad(noisy)

        def step(state, x):
            key, now = jax.random.split(state.key)
            loss, grads = grad_fn(state.params, (x, jax.random.split(now, BATCH)))
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
            new = dataclasses.replace(
                state,
                step=state.step + 1,
                params=descend(state.params, momentum),
                momentum=momentum,
                key=key,
                flags=jnp.logical_xor(state.flags, loss > 0.3),
            )
            return new, {"loss": loss, "lr": RATE / (1.0 + state.step)}

        return step

    params = init_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    flags = jnp.array([True, False])
    state = TrainState(jnp.int32(0), params, zeros, make_key(3), jnp.arange(4), flags)
    run_both(make, state, [batch(i) for i in range(3)])


class Normed(eqx.Module):
    """Layers with running statistics, and dropout with a key for each example."""

    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.BatchNorm]
    dropout: eqx.nn.Dropout
    activation: Any

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key, 3)]
        self.norms = [eqx.nn.BatchNorm(WIDTH, "batch", mode="ema") for _ in range(3)]
        self.dropout = eqx.nn.Dropout(0.2)
        self.activation = jnp.tanh

    def __call__(self, x, key, state):
        keys = jax.random.split(key, 3)
        for i, (layer, norm, k) in enumerate(zip(self.layers, self.norms, keys, strict=True)):
            x = layer(jaxpp.pipeline_enter_stage(x) if i else x)
            x, state = norm(x, state)
            x = self.dropout(self.activation(x), key=k)
        return x, state


def test_equinox_state_and_dropout():
    """Running statistics leave the loop with its last microbatch."""

    def loss(model, state, x, keys):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))
        y, state = run(x, keys, state)
        return jnp.mean((y - 0.5) ** 2), state

    def placed(carry, data):
        model, state = carry
        grad_fn = piped(
            loss, in_axes=(None, None, 0, 0), reduce=(("mean", "last"), "mean"), has_aux=True
        )
        (value, state), grads = grad_fn(model, state, *data)
        updates = jax.tree.map(lambda g: -RATE * g, grads)
        return (eqx.apply_updates(model, updates), state), value

    @eqx.filter_jit
    def plain(carry, data):
        model, state = carry
        values, total = [], None
        for m in range(MICROBATCHES):
            part = [jnp.split(a, MICROBATCHES)[m] for a in data]
            (value, last), grads = eqx.filter_value_and_grad(loss, has_aux=True)(
                model, state, *part
            )
            values.append(value)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        updates = jax.tree.map(lambda g: -RATE * g / MICROBATCHES, total)
        return (eqx.apply_updates(model, updates), last), jnp.mean(jnp.stack(values))

    step = jaxpp.place(placed, mesh(), donate_argnums=(0,))
    carry = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    carries = [carry, jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, carry)]
    for i in range(3):
        data = (batch(i), jax.random.split(jax.random.key(i), BATCH))
        carries[0], expected = plain(carries[0], data)
        carries[1], value = step(carries[1], data)
        assert_close(value, expected)
    # Dropout puts zeros where it hits, so an error in the keys cannot hide in a tolerance.
    assert_close(*(eqx.filter(c, eqx.is_array) for c in carries))
    kinds = {k for p in step.programs for s in p.sends for k in s.message.kinds}
    assert kinds <= {"edge", "scalar"}, step.as_text()


# ---- arguments and results ----------------------------------------------------------------------


def test_numpy_arguments():
    step = jaxpp.place(train_step, mesh())
    arrays = jax.tree.map(np.asarray, (init_params(), batch()))
    results = step(*arrays)
    chex.assert_trees_all_equal(results, step(init_params(), batch()))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(results))
    assert len(step._cache) == 1


def test_closing_over_arrays():
    data, offset = batch(), np.linspace(0, 1, WIDTH, dtype=np.float32)
    scale = jnp.float32(0.5)

    def loss(params, x):
        return jnp.mean((apply(params, x + data[0]) - offset) ** 2) * scale

    def step(grad_fn, params):
        loss, grads = grad_fn(params, data)
        return descend(params, grads), loss + data.sum(), data

    placed = jaxpp.place(functools.partial(step, piped(loss)), mesh())
    expected = jax.jit(functools.partial(step, jax.value_and_grad(loss)))(init_params())
    assert_close(placed(init_params()), expected)


def results_of_all_kinds(grad_fn, params, x, unused, count, empty):
    loss, grads = grad_fn(params, x)
    new = descend(params, grads)
    return {
        "params": new,
        "twice": new,
        "as it is": params,
        "count": count,
        "also": (count, x),
        "loss": [loss, loss],
        "constant": jnp.arange(3.0),
        "literal": 2.0 * jnp.ones(()),
        "empty": empty,
        "more empty": jnp.concatenate([empty, empty * loss]),
        "static": "text",
        "nothing": None,
        "number": 3,
    }


@pytest.mark.parametrize("donate", [(), (0,), (0, 1, 2, 3, 4)])
def test_results_of_all_kinds(donate):
    def args():
        return init_params(), batch(), jnp.ones(5), jnp.int32(4), jnp.zeros((0, 2))

    placed = jaxpp.place(
        functools.partial(results_of_all_kinds, piped(loss_fn)), mesh(), donate_argnums=donate
    )
    expected = results_of_all_kinds(jax.value_and_grad(loss_fn), *args())
    for _ in range(2):
        given = args()
        results = placed(*given)
        chex.assert_trees_all_equal_structs(results, expected)
        assert (results["static"], results["number"]) == ("text", 3)
        assert_close(eqx.filter(results, eqx.is_array), eqx.filter(expected, eqx.is_array))
        arrays = jax.tree.leaves(eqx.filter(results, eqx.is_array))
        assert len({id(a) for a in arrays}) == len(arrays)
        for n, arg in enumerate(given):
            if n not in donate:  # deleting the results leaves the arguments
                assert not any(r is a for r in arrays for a in jax.tree.leaves(arg))
        jax.tree.map(lambda a: a.is_deleted() or a.delete(), arrays)
        for n, arg in enumerate(given):
            if n not in donate:
                assert np.isfinite(sum(np.sum(a) for a in jax.tree.leaves(arg)))


def test_same_argument_twice():
    params = init_params()
    placed = jaxpp.place(lambda p, q, x: (train_step(p, x), q["layer_0"]["w"].sum()), mesh())
    (_, loss), total = placed(params, params, batch())
    assert_close((loss, total), (loss_fn(params, batch()), params["layer_0"]["w"].sum()))


@pytest.mark.more
def test_bfloat16():
    params, x = init_params(dtype=jnp.bfloat16), batch(dtype=jnp.bfloat16)
    results = jaxpp.place(train_step, mesh())(params, x)
    assert_close(results, jax.jit(plain_step)(params, x), rtol=2e-2, atol=2e-2)


def test_random_key_as_result():
    def step(params, key, x):
        new, loss = train_step(params, x)
        return new, jax.random.fold_in(key, jnp.int32(loss * 0)), jax.random.split(key, 2)

    _, folded, split = jaxpp.place(step, mesh())(init_params(), jax.random.key(1), batch())
    assert_same(folded, jax.random.fold_in(jax.random.key(1), 0))
    assert_same(split, jax.random.split(jax.random.key(1), 2))


# ---- retracing ----------------------------------------------------------------------------------


def test_other_shapes_and_dtypes_and_static_values_trace_again():
    traces = []

    @functools.partial(jaxpp.place, mesh=mesh(1), static_argnums=2)
    def step(params, x, power, names):
        traces.append(power)
        return jax.tree.map(lambda p: jnp.mean(x) * p**power, params), names

    params = {"w": jnp.arange(3.0)}
    calls = [
        (params, batch(), 2, "a"),
        (params, batch()[:2], 2, "a"),
        (params, batch().astype(jnp.bfloat16), 2, "a"),
        (params, batch(), 3, "a"),
        (params, batch(), 3, ("a",)),
        (params, batch(), 3.0, ("a",)),
        (params, batch(), True, ("a",)),
        ({**params, "b": jnp.ones(2)}, batch(), True, ("a",)),
    ]
    for _ in range(2):
        for p, x, power, names in calls:
            results, same = step(p, x, power, names)
            assert same == names
            expected = jax.tree.map(lambda a, x=x, n=power: jnp.mean(x) * a**n, p)
            assert_close(results, expected, rtol=1e-2 if x.dtype == jnp.bfloat16 else 1e-6)
    assert len(traces) == len(calls)


def test_a_count_that_shapes_or_branches_depend_on_is_static():
    @functools.partial(jaxpp.place, mesh=mesh(1), static_argnums=1)
    def step(x, count):
        return x + (jnp.ones(count).sum() if count < 4 else 0)

    for count in (2, 3, 4, 2, 5):
        assert float(step(jnp.ones(()), count)) == 1 + (count if count < 4 else 0)


def test_second_call_does_not_trace():
    traces = []

    def step(params, x):
        traces.append(1)
        return train_step(params, x)

    placed = jaxpp.place(step, mesh(), donate_argnums=0)
    params = init_params()
    for i in range(4):
        params, _ = placed(params, batch(i))
    assert len(traces) == 1


# ---- lowering -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lowered():
    return jaxpp.place(train_step, mesh()).lower(init_params(), batch())


def test_lowers_from_shapes(lowered):
    shapes = jax.eval_shape(lambda: (init_params(), batch()))
    again = jaxpp.place(train_step, mesh()).lower(*shapes)
    assert again.programs == lowered.programs
    assert_close(
        again.compile()(init_params(), batch()), jax.jit(plain_step)(init_params(), batch())
    )


def test_programs_and_text(lowered):
    assert [p.rank for p in lowered.programs] == [0, 1, 2]
    assert [p.stages for p in lowered.programs] == [(0,), (1,), (2,)]
    text = lowered.as_text().splitlines()
    assert [line for line in text if not line.startswith(" ")] == [
        f"rank {r} (stages {r}):" for r in range(3)
    ]
    assert len(text) == 3 + sum(len(p.instructions) for p in lowered.programs)
    for task in ("F0.0", "F2.1", "B1.0"):
        assert any(task in line for line in text)
    compiled = lowered.compile()
    assert compiled.programs is lowered.programs
    assert compiled.as_text() == lowered.as_text()


def test_accumulators_are_updated_in_place(lowered):
    """A backward hands the memory of each accumulator that it reads to the one that it makes."""
    for program in lowered.programs:
        backwards = [
            i for i in program.instructions if isinstance(i, Run) and i.label.startswith("B")
        ]
        assert backwards
        for run in backwards:
            computation = lowered.bundle.computations[run.computation]
            types = [computation.jaxpr.in_avals[i] for i in computation.donated]
            assert types and all(t in computation.jaxpr.out_avals for t in types)


def replay(program, computations):
    """The slots that hold something at the end of a program; fails where one is misused."""
    live = {slot for _, slot in program.inputs} | {slot for slot, _ in program.constants}
    for instruction in program.instructions:
        match instruction:
            case Run(number, inputs, outputs):
                assert set(inputs) <= live
                live -= {inputs[i] for i in computations[number].donated}
                assert not live & set(outputs) and len(set(outputs)) == len(outputs)
                live |= set(outputs)
            case Send(slots):
                assert set(slots) <= live
            case Receive(slots):
                assert not live & set(slots)
                live |= set(slots)
            case Free(slots):
                assert set(slots) <= live
                live -= set(slots)
    return live


@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("schedule", ["OneFOneB", "GPipe", "Interleaved1F1B", "ZeroBubbleH1"])
def test_every_slot_is_freed_after_its_last_use(schedule, donate):
    """At the end a rank holds the results and the constants; each message has its receiver."""
    schedule = getattr(jaxpp.schedules, schedule)()
    stages = schedule.stages_per_rank * 2
    grad_fn = piped(loss_fn, schedule=schedule)

    def step(params, x):
        x = (x - x.mean()) / x.std()
        loss, grads = grad_fn(params, x)
        norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
        return descend(params, jax.tree.map(lambda g: g / norm, grads)), loss, norm, x.max()

    step = jaxpp.place(step, mesh(2), donate_argnums=donate)
    bundle = step.lower(init_params(stages), batch()).bundle
    for program in bundle.programs:
        kept = {slot for _, slot in program.outputs} | {slot for slot, _ in program.constants}
        assert replay(program, bundle.computations) == kept
    sent, received = [
        sorted(
            (i.message.tag, i.message.target, len(i.slots))
            for p in bundle.programs
            for i in p.instructions
            if isinstance(i, kind)
        )
        for kind in (Send, Receive)
    ]
    assert sent == received
    assert len({tag for tag, *_ in sent}) == len(sent)


def test_programs_of_the_last_call(lowered):
    step = jaxpp.place(train_step, mesh())
    for ask in (lambda: step.programs, step.as_text, step.describe):
        with pytest.raises(ValueError, match=r"not been called yet; .* lower\(.*\).*describe\(\)"):
            ask()
    ahead = step.lower(init_params(), batch())
    assert ahead.as_text() == lowered.as_text() and ahead.compile().describe().ranks
    step(init_params(), batch())
    assert step.programs == lowered.programs
    assert step.as_text() == lowered.as_text()


@pytest.mark.parametrize(
    "args, message",
    [
        (lambda p, x: (p, x[:4]), r"args\[1\] is float32\[4,8\], not float32\[8,8\]"),
        (lambda p, x: (p, x.astype(jnp.int32)), r"args\[1\] is int32\[8,8\], not float32\[8,8\]"),
        (lambda p, x: (p, 3), r"args\[1\] is int32\[\], weakly typed, not float32\[8,8\]"),
        (lambda p, x: (p,), "there are 1 of them, not 2"),
        (lambda p, x: ({**p, "more": x}, x), r"args\[0\]\['more'\] is one too many"),
    ],
)
def test_compiled_refuses_other_arguments(lowered, args, message):
    compiled = lowered.compile()
    with pytest.raises(TypeError, match=f"compiled for other arguments: {message}"):
        compiled(*args(init_params(), batch()))


def test_compiled_refuses_other_static_arguments():
    placed = jaxpp.place(lambda x, power: x**power, mesh(1), static_argnums=1)
    compiled = placed.lower(jnp.ones(2), 2).compile()
    with pytest.raises(TypeError, match=r"args\[1\] is 3, not 2"):
        compiled(jnp.ones(2), 3)


@pytest.mark.parametrize("microbatches", [8, 32])
def test_nothing_but_the_programs_grows_with_microbatches(microbatches):
    """Neither the number of computations nor that of their equations."""

    def lower(count):
        def step(params, x):
            loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), count)
            loss, grads = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())(params, x)
            return descend(params, grads), loss

        x = jax.ShapeDtypeStruct((2 * count, WIDTH), jnp.float32)
        return jaxpp.place(step, mesh()).lower(init_params(), x).bundle

    def sizes(bundle):
        return [(c.name, len(c.jaxpr.eqns)) for c in bundle.computations]

    assert sizes(lower(microbatches)) == sizes(lower(2))


def test_equal_stages_share_their_computations():
    def lower(stages):
        loss = jaxpp.wrap_forward(loss_fn)
        loop = jaxpp.schedule(
            jaxpp.microbatch(jax.value_and_grad(loss), MICROBATCHES), jaxpp.schedules.OneFOneB()
        )

        def step(params, x):
            value, grads = loop(params, x)
            return descend(params, grads), value

        bundle = jaxpp.place(step, mesh(stages)).lower(init_params(stages), batch()).bundle
        assert len(bundle.programs) == stages
        return len(bundle.computations)

    assert lower(8) == lower(4)


def test_a_long_program_without_a_loop():
    """Deeper than Python's stack."""

    def step(x, y):
        for _ in range(1500):
            x = x + y
        return x

    placed = jaxpp.place(step, mesh(1))
    assert_close(placed(jnp.zeros(2), jnp.ones(2)), np.full(2, 1500.0, "f4"))


def test_a_long_program_before_the_loop():
    def step(params, x):
        for _ in range(60):
            x = 0.5 * (x + x)
        for _ in range(1200):
            x = x + 0.0
        return train_step(params, x)

    bundle = jaxpp.place(step, mesh()).lower(init_params(), batch()).bundle
    assert len(bundle.programs) == 3


# ---- errors -------------------------------------------------------------------------------------


def test_donated_argument_used_again():
    step = jaxpp.place(train_step, mesh(), donate_argnums=0)
    params = init_params()
    step(params, batch())
    message = r"args\[0\]\['layer_0'\]\['b'\] was donated to an earlier call"
    with pytest.raises(ValueError, match=message):
        step(params, batch())


def test_same_array_donated_twice():
    step = jaxpp.place(
        lambda p, q, x: (train_step(p, x), train_step(q, x)), mesh(), donate_argnums=(0, 1)
    )
    params = init_params()
    message = (
        r"args\[1\]\['layer_0'\]\['b'\] is the same array as args\[0\]\['layer_0'\]\['b'\], and"
    )
    with pytest.raises(ValueError, match=message):
        step(params, params, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("order", [0, 1])
def test_same_array_donated_and_not(order):
    """In whichever order the two arguments come."""
    step = jaxpp.place(lambda x, y: (x + 1, y + 2), mesh(1), donate_argnums=order)
    x = jnp.ones(3)
    with pytest.raises(ValueError, match=r"args\[1\] is the same array as args\[0\]"):
        step(x, x)
    step(np.ones(3), np.ones(3))


def test_same_numpy_array_twice():
    """Each use is a copy of its own on the device."""
    step = jaxpp.place(lambda x, y: (x + 1, y + 2), mesh(1), donate_argnums=(0, 1))
    x = np.ones(3, np.float32)
    assert_close(step(x, x), (np.full(3, 2.0, "f4"), np.full(3, 3.0, "f4")))


@pytest.mark.parametrize("number", [2, -3, 5])
def test_donate_argnums_out_of_range(number):
    step = jaxpp.place(train_step, mesh(), donate_argnums=(0, number))
    with pytest.raises(
        ValueError, match=f"donate_argnums names argument {number}, but .* with 2 arg"
    ):
        step(init_params(), batch())


def test_unhashable_argument():
    class Settings:
        __hash__: Any = None

    step = jaxpp.place(lambda p, x, s: train_step(p, x), mesh())
    with pytest.raises(
        ValueError, match=r"args\[2\]\['a'\] is a Settings, which is neither an array nor"
    ):
        step(init_params(), batch(), {"a": Settings()})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mesh_with_another_number_of_ranks(ranks):
    step = jaxpp.place(train_step, mesh(ranks))
    message = (
        rf"puts 3 stages on 3 ranks \(1 stage per rank\), but the mesh has {ranks} ranks?; cut "
        rf"into {ranks} stages? .*, or take a mesh of 3 .*\nStages begin at"
    )
    with pytest.raises(ValueError, match=message):
        step.lower(init_params(), batch())


@pytest.mark.parametrize(
    "order", [jaxpp.schedules.ZeroBubbleV(), jaxpp.schedules.Interleaved1F1B(2)], ids=str
)
def test_another_number_of_ranks_where_each_has_two_stages(order):
    split = jaxpp.split_stages(lambda ws, x: jnp.mean(functools.reduce(jnp.matmul, ws, x)), 4)
    grad_fn = piped(split, schedule=order)
    message = r"puts 4 stages on 2 ranks \(2 stages per rank\), .* has 4 ranks; cut into 8 stages"
    with pytest.raises(ValueError, match=message) as caught:
        jaxpp.place(grad_fn, mesh(4)).lower([jnp.eye(8)] * 4, jnp.ones((8, 8)))
    first, _ = str(caught.value).splitlines()
    assert len(first) < 250


def test_more_stages_than_ranks_may_be_several_on_a_rank():
    step = jaxpp.place(train_step, mesh(2))
    with pytest.raises(ValueError, match=r"on 4 ranks.* has 2 .* 2 stages: Interleaved1F1B\(2\)"):
        step.lower(init_params(4), batch())
    grad_fn = piped(loss_fn, schedule=jaxpp.schedules.Interleaved1F1B(2))
    assert len(jaxpp.place(grad_fn, mesh(2)).lower(init_params(4), batch()).programs) == 2
    with pytest.raises(ValueError, match=r"on 3 ranks.* has 2 .* a device\)\.\n"):
        step.lower(init_params(3), batch())


def test_an_evaluation_of_more_stages_than_ranks_says_what_runs_where():
    staged = jaxpp.wrap_forward(loss_fn)
    own = r"has 4 stages .* and no schedule: each .* rank of its own, but the mesh has 2 ranks; cut"
    for fun, way in ((staged, "ForwardOnly"), (jax.grad(staged), "Interleaved1F1B")):
        way = rf"{own}.*2 stages: schedule\(microbatch\(fun, M\), {way}\(2\)\)\.\n"
        with pytest.raises(ValueError, match=way):
            jaxpp.place(fun, mesh(2)).lower(init_params(4), batch())
    looped = jaxpp.microbatch(staged, 2)
    with pytest.raises(ValueError, match=r"no schedule; .*schedule\(fun, .*\.ForwardOnly\(\)\)\.$"):
        jaxpp.place(looped, mesh(2)).lower(init_params(4), batch())
    once = jaxpp.schedule(looped, jaxpp.schedules.ForwardOnly())
    with pytest.raises(ValueError, match=r"puts 4 stages on 4 ranks.* ForwardOnly\(2\)\.\n"):
        jaxpp.place(once, mesh(2)).lower(init_params(4), batch())
    twice = jaxpp.schedule(looped, jaxpp.schedules.ForwardOnly(2))
    assert len(jaxpp.place(twice, mesh(2)).lower(init_params(4), batch()).programs) == 2


@pytest.mark.parametrize("looped", [False, True])
def test_marks_without_stages_ask_for_wrap_forward(looped):
    grad_fn = jax.value_and_grad(loss_fn)
    grad_fn = jaxpp.microbatch(jax.jit(grad_fn), MICROBATCHES) if looped else grad_fn
    message = r"pipeline_enter_stage at .*test_place.py:\d+ marks .* wrap_forward is missing"
    with pytest.raises(ValueError, match=message):
        jaxpp.place(grad_fn, mesh()).lower(init_params(), batch())


def test_marks_outside_of_the_loop_are_no_stages():
    def step(params, x):
        return train_step(params, x), loss_fn(params, x)

    (_, value), plain = jaxpp.place(step, mesh())(init_params(), batch())
    assert_close((value, plain), (loss_fn(init_params(), batch()),) * 2)


def test_default_mesh_has_the_ranks_of_the_schedule():
    step = jaxpp.place(train_step)
    results = step(init_params(), batch())
    assert len(step.programs) == 3
    assert_close(results, jax.jit(plain_step)(init_params(), batch()))


def test_unscheduled_loop():
    def step(params, x):
        grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES)
        return grad(params, x)

    with pytest.raises(
        ValueError, match=r"microbatch loop.* has no schedule; wrap the func.*OneFOneB"
    ):
        jaxpp.place(step, mesh()).lower(init_params(), batch())


def test_repr_and_name():
    step = jaxpp.place(train_step, mesh())
    assert step.__name__ == "train_step"
    assert repr(step) == "<placed train_step>"
