"""Effects around the loops happen as often as in the plain step, once, on the rank of the value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp._program import Role, Run
from tests.helpers import assert_close
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Recorder:
    """What a step reports, in order: `report(tag, *arrays)` is a callback, with its sums."""

    def __init__(self):
        self.seen = []

    def report(self, tag, *arrays, ordered=False):
        def note(*values):
            self.seen.append((tag, *(float(np.sum(v)) for v in values)))

        jax.debug.callback(note, *arrays, ordered=ordered)

    def of(self, run, *args):
        """What a function reports when it runs."""
        self.seen.clear()
        run(*args)
        jax.effects_barrier()
        return list(self.seen)


def assert_reports(make_step, *args, in_order=False):
    """A placed step reports what the plain one does."""
    recorder = Recorder()
    placed = two_layers.place(make_step(recorder, two_layers.scheduled()))
    plain = jax.jit(make_step(recorder, two_layers.accumulated()))
    want, got = recorder.of(plain, *args), recorder.of(placed, *args)
    if not in_order:
        want, got = sorted(want), sorted(got)
    assert [tag for tag, *_ in got] == [tag for tag, *_ in want]
    for (_, *values), (_, *wanted) in zip(got, want, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    return placed


REPORTED = {
    "loss": lambda w, x, n, value, grads: [value],
    "argument of all stages": lambda w, x, n, value, grads: [x],
    "parameter": lambda w, x, n, value, grads: [w[1]],
    "counter that no stage reads": lambda w, x, n, value, grads: [n],
    "number": lambda w, x, n, value, grads: [],
    "gradients of two stages": lambda w, x, n, value, grads: grads,
    "scalars of two stages": lambda w, x, n, value, grads: [jnp.sum(g) for g in grads],
    "what is made of a counter": lambda w, x, n, value, grads: [n + 1, value * n],
}


@pytest.mark.parametrize("what", REPORTED)
def test_a_report_around_the_loop_is_made_once(what):
    def make_step(recorder, grad_fn):
        def step(w, x, n):
            value, grads = grad_fn(w, x)
            reported = REPORTED[what](w, x, n, value, grads)
            recorder.report(what, *reported)
            return value, grads

        return step

    placed = assert_reports(make_step, WEIGHTS, X, jnp.asarray(3.0))
    roles = [a.role for a in placed.bundle.arguments]
    assert roles == [Role.PARAMETER, Role.PARAMETER, Role.BATCH, Role.OTHER]
    labels = [i.label for p in placed.programs for i in p.instructions if isinstance(i, Run)]
    assert sum(label.startswith("F") for label in labels) == 8


def test_a_print_of_the_loss_says_what_the_plain_step_says(capfd):
    def step(w, x):
        value, grads = two_layers.scheduled()(w, x)
        jax.debug.print("loss {}", jnp.int32(1000 * value))
        return grads

    two_layers.place(step)(WEIGHTS, X)
    jax.effects_barrier()
    value, _ = two_layers.accumulated()(WEIGHTS, X)
    assert capfd.readouterr().out == f"loss {int(1000 * value)}\n"


def test_a_report_of_optimizer_state_leaves_it_where_it_is():
    def make_step(recorder, grad_fn):
        def step(w, momentum, x):
            recorder.report("momentum", momentum[1])
            value, grads = grad_fn(w, x)
            momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
            return [p - m for p, m in zip(w, momentum, strict=True)], momentum, value

        return step

    momentum = [0.5 * w for w in WEIGHTS]
    placed = assert_reports(make_step, WEIGHTS, momentum, X)
    sent = [name for p in placed.programs for s in p.sends for name in s.message.names]
    assert not [name for name in sent if "args[1]" in name]


def test_ordered_reports_keep_the_order_of_the_program():
    """Before and after the loop, of values of both ranks, some of which the loop needs."""

    def make_step(recorder, grad_fn):
        def step(w, x):
            recorder.report("weight", w[1], ordered=True)
            recorder.report("data", x, ordered=True)
            w = [p * 1.5 for p in w]
            recorder.report("scaled", w[0], ordered=True)
            value, grads = grad_fn(w, x)
            recorder.report("last gradient", grads[1], ordered=True)
            recorder.report("first gradient", grads[0], ordered=True)
            recorder.report("loss", value, ordered=True)
            return grads

        return step

    assert_reports(make_step, WEIGHTS, X, in_order=True)


def test_ordered_reports_of_one_task_keep_their_order_with_those_around():
    def make_step(recorder, grad_fn):
        def loss(w, x):
            h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
            recorder.report("stage", h, ordered=True)
            return jnp.mean(h**2)

        def step(w, x):
            recorder.report("before", x, ordered=True)
            value, grads = grad_fn(loss)(w, x)
            recorder.report("after", grads[0], ordered=True)
            return value, grads

        return step

    recorder = Recorder()
    placed = two_layers.place(make_step(recorder, two_layers.scheduled))
    plain = jax.jit(make_step(recorder, two_layers.accumulated))
    want, got = recorder.of(plain, WEIGHTS, X), recorder.of(placed, WEIGHTS, X)
    assert [tag for tag, *_ in got] == ["before", *["stage"] * 4, "after"]
    np.testing.assert_allclose([v for _, v in got], [v for _, v in want], rtol=1e-5)


def test_ordered_effects_of_two_tasks_are_refused_with_their_line():
    def loss(w, x):
        h = jnp.tanh(x @ w[0])
        jax.debug.callback(lambda _: None, h, ordered=True)
        h = jaxpp.pipeline_enter_stage(h) @ w[1]
        jax.debug.callback(lambda _: None, h, ordered=True)
        return jnp.mean(h**2)

    step = two_layers.place(two_layers.scheduled(loss))
    with pytest.raises(ValueError, match=r"test_effects\.py:\d+ is in F1 .* ordered=False"):
        step(WEIGHTS, X)
    forward = two_layers.place(jaxpp.wrap_forward(loss))
    with pytest.raises(ValueError, match=r"is in stage 1 .* ordered=False"):
        forward(WEIGHTS, X)


def test_a_callback_with_a_result_gives_all_ranks_the_same():
    """A counter of the host: each call gives another number."""

    def make(grad_fn):
        calls = []

        def count():
            calls.append(None)
            return np.float32(len(calls))

        def step(w, x):
            _, grads = grad_fn(w, x)
            number = io_callback(count, SCALAR)
            return [p - number * g for p, g in zip(w, grads, strict=True)]

        return step, calls

    placed, calls = make(two_layers.scheduled())
    plain, _ = make(two_layers.accumulated())
    placed, plain = two_layers.place(placed), jax.jit(plain)
    for n in (1, 2):
        got, want = placed(WEIGHTS, X), plain(WEIGHTS, X)
        assert len(calls) == n
        assert_close(got, want, rtol=1e-4)


def test_a_callback_can_read_the_batch_for_all_stages():
    rows = np.asarray(X)
    reads = []

    def read(n):
        reads.append(int(n))
        return rows + np.float32(n)

    def make(grad_fn):
        def step(w, n):
            x = io_callback(read, jax.ShapeDtypeStruct(X.shape, X.dtype), n)
            return grad_fn(w, x)

        return step

    got = two_layers.place(make(two_layers.scheduled()))(WEIGHTS, jnp.int32(1))
    assert reads == [1]
    want = jax.jit(make(two_layers.accumulated()))(WEIGHTS, jnp.int32(1))
    assert_close(got, want, rtol=1e-4)


def test_a_callback_in_a_stage_leaves_constant_results_alone():
    """They depend on no argument, and are computed beside the stages."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]
        double = io_callback(lambda v: 2 * v, SCALAR, jax.lax.stop_gradient(h.sum()))
        return jnp.mean(h**2) + double, jnp.arange(3)

    staged = jax.value_and_grad(jaxpp.wrap_forward(loss), has_aux=True)
    loop = jaxpp.microbatch(staged, 1, reduce=(("mean", "sum"), "mean"))
    got = two_layers.place(jaxpp.schedule(loop, jaxpp.schedules.OneFOneB()))(WEIGHTS, X)
    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(WEIGHTS, X)
    assert_close(got, want, rtol=1e-4)


def with_noisy_backward(note):
    fun = jax.custom_vjp(lambda h: 1.0 * h)

    def backward(_, ct):
        jax.debug.callback(note, ct)
        return (ct,)

    fun.defvjp(lambda h: (1.0 * h, None), backward)
    return fun


def test_an_effect_of_a_backward_pass_happens_once_or_is_refused():
    """The loop does not know which of several scalars is differentiated."""
    seen = []
    layer = with_noisy_backward(lambda _: seen.append(None))

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(layer(jnp.tanh(x @ w[0])))
        return jnp.mean((h @ w[1]) ** 2)

    def grads_of(fun, pick):
        return jax.grad(lambda w: pick(jaxpp.microbatch(jaxpp.wrap_forward(fun), 4)(w, X)))

    jax.block_until_ready(grads_of(loss, lambda value: value)(WEIGHTS))
    jax.effects_barrier()
    assert len(seen) == 4
    with pytest.raises(ValueError, match="several scalars .* Differentiate first"):
        grads_of(lambda w, x: (loss(w, x), 2 * loss(w, x)), lambda values: values[0])(WEIGHTS)
