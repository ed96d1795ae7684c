"""Debug callbacks of worker processes are made on the driver, as often as in the plain function."""

import collections
import contextlib
import dataclasses
import gc
import io
import threading
import time

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp._program import Computation
from jaxpp.runtime.remote._callbacks import Callbacks
from jaxpp.runtime.remote.calls import compile_exported, export, hoist
from jaxpp.runtime.remote.worker._teller import Teller, Telling
from tests.helpers import assert_same

#: What callbacks were given, and what was printed, in order.
CALLS = []


def report(tag, *values, ordered=False, **named):
    """Calls back, to note a tag and values."""

    def note(*values, **named):
        CALLS.append((tag, *_plain(values), *_plain(named.items())))

    jax.debug.callback(note, *values, ordered=ordered, **named)


def _plain(values):
    for value in values:
        if isinstance(value, tuple):
            yield from _plain(value)
        else:
            known = hasattr(value, "dtype")
            yield (str(value.dtype), np.asarray(value).tolist()) if known else value


class _Lines(io.StringIO):
    """Notes the lines that are printed."""

    def write(self, text):
        CALLS.extend(text.splitlines())
        return len(text)


@contextlib.contextmanager
def calls():
    """Gives a list of what is called back and printed inside, once that is left."""
    CALLS.clear()
    found = []
    with contextlib.redirect_stdout(_Lines()):
        yield found
        jax.effects_barrier()
    found += CALLS


# ---- a jaxpr without its callbacks, and their replay --------------------------------------------


@jax.custom_vjp
def doubled(x):
    report("forward", x)
    return 2 * x


doubled.defvjp(
    lambda x: (report("first", x), (2 * x, x))[1],
    lambda x, ct: (report("back", x, ct), (2 * ct,))[1],
)


@jax.custom_jvp
def squared(x):
    report("squared", x)
    return x**2


@squared.defjvp
def _(primals, tangents):
    report("derivative", *primals)
    return squared(*primals), 2 * primals[0] * tangents[0]


def plainly(x, ordered):
    report("one", x, x + 1, ordered=ordered)
    report("none", ordered=ordered)
    report("static", "text", None, y=x, ordered=ordered)
    report("number", jnp.float32(2), 3, np.arange(3), ordered=ordered)
    jax.debug.print("{} and {y:.3f}", x, y=x + 1, ordered=ordered)
    jax.debug.print("no values", ordered=ordered)
    return x + 1


def of_dtypes(x, ordered):
    for dtype in ("bfloat16", "float8_e4m3fn", "int4", "int8", "bool", "complex64"):
        report(dtype, jnp.arange(3).astype(dtype), ordered=ordered)
    report("empty", jnp.zeros((0, 3)), ordered=ordered)
    report("key", jax.random.key(3), jax.random.split(jax.random.key(4), 2), ordered=ordered)
    return x


def in_a_scan(x, ordered, reverse=False):
    constant = jnp.arange(2.0) + x

    def body(carry, row):
        report("row", carry, row, constant, constant * row, ordered=ordered)
        report("each", ordered=ordered)
        return carry * 2, carry + row

    last, rows = jax.lax.scan(body, x, jnp.arange(3.0), reverse=reverse)
    last, _ = jax.lax.scan(body, last, jnp.arange(2.0))  # nobody reads the rows
    return jax.lax.fori_loop(
        0, 2, lambda i, y: (report("i", i, ordered=ordered), y)[1], last + rows.sum()
    )


def in_a_reverse_scan(x, ordered):
    return in_a_scan(x, ordered, reverse=True)


def in_a_scan_without_iterations(x, ordered):
    return jax.lax.scan(
        lambda c, _: (report("never", c, ordered=ordered), (c, None))[1], x, None, 0
    )[0]


def in_a_cond(x, ordered):
    def more(x):
        report("more", x, jax.random.key(1), ordered=ordered)
        return x + 1

    def less(x):
        return x - 1

    x = jax.lax.cond(x > 1, more, less, x)
    x = jax.lax.cond(x > 100, more, less, x)
    number = jnp.int32(x) % 3
    cases = [
        lambda: report("nought", x, ordered=ordered),
        lambda: jax.debug.print("one {}", x.astype("bfloat16"), ordered=ordered),
        lambda: report("two", ordered=ordered),
    ]
    for extra in range(3):
        jax.lax.switch((number + extra) % 3, cases)
    return x


def nested(x, ordered):
    table = np.arange(4.0, dtype=np.float32)  # a constant of the branch

    def inner(carry, row):
        branches = (
            lambda: (report("odd", row, carry + table, ordered=ordered), carry)[1],
            lambda: jax.jit(lambda c: (report("even", c, ordered=ordered), c + 1)[1])(carry),
        )
        return jax.lax.cond(row % 2 == 1, *branches), None

    def outer(carry, row):
        report("outer", row, ordered=ordered)
        return jax.lax.scan(inner, carry, jnp.arange(3) + row)[0], None

    return jax.checkpoint(lambda x: jax.lax.scan(outer, x, jnp.arange(2))[0])(x)


def of_derivative_rules(x, ordered):
    del ordered  # a derivative rule must not have an ordered effect
    return doubled(squared(x)) + jax.checkpoint(squared)(x)


FUNCTIONS = [
    plainly,
    of_dtypes,
    in_a_scan,
    in_a_reverse_scan,
    in_a_scan_without_iterations,
    in_a_cond,
    nested,
    of_derivative_rules,
]


def check_hoisted(fun, x):
    """The hoisted jaxpr gives what `fun` gives; its replay calls what `fun` calls, in order."""
    with calls() as expected:
        results = jax.block_until_ready(jax.jit(fun)(x))
    hoisted = hoist(jax.make_jaxpr(fun)(x))
    assert not hoisted.jaxpr.effects
    with calls() as found:
        outputs = jax.jit(jex.jaxpr_as_fun(hoisted.jaxpr))(x)
        assert not CALLS
        leaves = jax.tree.leaves(results)
        values = outputs[len(leaves) :]
        assert [v.aval for v in values] == list(hoisted.read)
        hoisted.replay([np.asarray(_data(v)) for v in values])
    for one, other in zip(leaves, outputs, strict=False):
        np.testing.assert_array_equal(one, other)
    return expected, found


def _data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.grad, jax.vmap], ids=["plain", "grad", "vmap"]
)
@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_replay_calls_what_the_function_calls(fun, transform):
    x = jnp.arange(1.5, 3.5) if transform is jax.vmap else jnp.float32(1.5)
    expected, found = check_hoisted(transform(lambda x: fun(x, False)), x)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert found or fun is in_a_scan_without_iterations


@pytest.mark.parametrize("fun", FUNCTIONS[:-1], ids=lambda f: f.__name__)
def test_a_replay_calls_in_the_order_of_the_program(fun):
    expected, found = check_hoisted(lambda x: fun(x, True), jnp.float32(1.5))
    assert found == expected


# ---- the way from a worker to the driver, without a mesh ----------------------------------------


class Loopback:
    """A teller whose values come to callbacks in this process."""

    def __init__(self):
        self.known, self.failed = {}, []
        self.callbacks = Callbacks(self.known.__getitem__)
        self.teller = Teller(self.send, self.failed.append)
        self.go_on = threading.Event()
        self.go_on.set()

    def send(self, number, pieces):
        self.go_on.wait(10)
        self.callbacks.heard(1, number, [bytes(piece) for piece in pieces])

    def load(self, fun, *args, donated=()):
        """Compiles a function as a worker does; its callbacks go over this."""
        computation = Computation("F0", jax.make_jaxpr(fun)(*args), donated)
        hoisted = hoist(computation.jaxpr)
        exported = export(computation, "cpu", hoisted=hoisted)
        call = compile_exported(exported, jax.devices()[0])
        if exported.told is None:
            return call
        number = len(self.known)
        self.known[number] = hoisted
        return Telling(call, number, exported.told, self.teller.tell)


@pytest.fixture
def loopback():
    loopback = Loopback()
    yield loopback
    loopback.callbacks.close()


def test_values_come_back_whole_and_in_order(loopback):
    functions = [lambda x, f=f: f(x, True) for f in FUNCTIONS[:-1]]
    x = jnp.float32(1.5)
    with calls() as expected:
        results = [jax.jit(f)(x) for f in functions]
    loaded = [loopback.load(f, x) for f in functions]
    with calls() as found:
        for result, call in zip(results, loaded, strict=True):
            (output,) = call(x)
            np.testing.assert_array_equal(output, result)
        loopback.teller.wait()
        loopback.callbacks.settle()
    marked = [f"rank 1: {x}" if isinstance(x, str) else x for x in expected]
    assert found == marked


def test_a_computation_without_callbacks_tells_nothing(loopback):
    assert not isinstance(loopback.load(lambda x: x + 1, 1.0), Telling)


def test_values_outlive_donated_arguments(loopback):
    def step(x):
        report("before", x)
        return x * 2

    x = jnp.arange(1000.0)
    call = loopback.load(step, x, donated=(0,))
    loopback.go_on.clear()
    with calls() as found:
        for _ in range(3):
            (x,) = call(x)
        loopback.go_on.set()
        loopback.teller.wait()
        loopback.callbacks.settle()
    expected = [np.arange(1000.0) * 2**n for n in range(3)]
    assert found == [("before", ("float32", x.tolist())) for x in expected]


def test_a_wait_for_an_array_waits_for_no_later_call(loopback):
    call = loopback.load(lambda x: report("x", x), 1.0)
    with calls() as found:
        loopback.teller.begin(results=10)
        call(1.0)
        loopback.teller.wait(12)
        loopback.callbacks.settle()
        assert len(CALLS) == 1
        loopback.go_on.clear()
        loopback.teller.begin(results=13)
        call(2.0)
        loopback.teller.wait(12)  # made by the first call
        waiting = threading.Thread(target=loopback.teller.wait, args=(13,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        loopback.go_on.set()
        waiting.join(10)
        loopback.callbacks.settle()
    assert found == [("x", ("float32", 1.0)), ("x", ("float32", 2.0))]


def test_an_exception_of_a_callback_is_raised_once(loopback):
    def fail(x):
        raise KeyError(float(x))

    def step(x):
        report("before", x)
        jax.debug.callback(fail, x)

    call = loopback.load(step, 1.0)
    with calls() as found:
        call(1.0)
        loopback.teller.wait()
        with pytest.raises(KeyError, match="1.0") as caught:
            loopback.callbacks.settle()
        loopback.callbacks.settle()
        call(2.0)
        loopback.teller.wait()
        with pytest.raises(KeyError, match="2.0"):
            loopback.callbacks.settle()
    assert caught.value.__notes__ == ["in a debug callback of rank 1"]
    assert not loopback.failed
    assert found == [("before", ("float32", 1.0)), ("before", ("float32", 2.0))]


def test_a_value_that_cannot_be_computed_is_a_failure(loopback):
    class Broken:
        dtype = np.dtype("float32")

        def __array__(self, *_, **__):
            raise RuntimeError("it was not computed")

    loopback.teller.tell(0, [Broken()])
    loopback.teller.wait()
    assert [str(error) for error in loopback.failed] == ["it was not computed"]


# ---- what is refused ----------------------------------------------------------------------------


def in_a_while_loop(x):
    return jax.lax.while_loop(lambda x: x < 9, lambda x: (report("x", x), x + 1)[1], x)


def in_a_while_loop_in_a_scan(x):
    return jax.lax.scan(lambda x, _: (in_a_while_loop(x), None), x, None, 2)[0]


def in_a_shard_map(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    inner = lambda x: (jax.debug.print("{}", x), x)[1]  # noqa: E731
    return jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def with_a_pure_callback(x):
    return jax.pure_callback(np.sqrt, jax.ShapeDtypeStruct((), "float32"), x)


def with_an_io_callback(x):
    return io_callback(np.sqrt, jax.ShapeDtypeStruct((), "float32"), jnp.float32(x))


@pytest.mark.parametrize("fun", [in_a_while_loop, in_a_while_loop_in_a_scan, in_a_shard_map])
def test_a_callback_that_is_made_an_unknown_number_of_times_is_refused(fun):
    computation = Computation("F0", jax.make_jaxpr(fun)(1.0), ())
    with pytest.raises(ValueError, match=r"F0 has .*`debug_.*test_callbacks.py:\d+.*jax.lax.scan"):
        export(computation, "cpu")


def test_a_partitioned_callback_of_a_split_rank_is_refused():
    jaxpr = jax.make_jaxpr(lambda x: jax.debug.print("{}", x, partitioned=True))(1.0)
    computation = Computation("F0", jaxpr, ())
    assert export(computation, "cpu").told == 1
    inside = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(
        ValueError, match=r"`debug_print` at .*test_callbacks.py:\d+.* whole arrays"
    ):
        export(dataclasses.replace(computation, in_specs=((),)), "cpu", inside)


# ---- on worker processes ------------------------------------------------------------------------

SHAPE, AXES = (2, 2), ("mpmd", "data")
WEIGHTS = [jnp.eye(4), 0.5 + jnp.arange(8.0).reshape(4, 2) / 8]
X = jnp.arange(32.0).reshape(8, 4) / 32


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh(SHAPE, AXES) as mesh:
        yield mesh


def local():
    return jaxpp.MpmdMesh(SHAPE, AXES)


def loss_fn(weights, x):
    """Calls back in both stages; each tag begins with the number of the stage."""
    report("0 batch", x, jax.random.key(0), x.astype("bfloat16"))
    jax.debug.print("0 shape {}", jnp.asarray(x.shape))
    h = doubled(jnp.tanh(x @ weights[0]))

    def body(carry, row):
        report("0 row", row)
        return carry + row, None

    h = h + jax.lax.scan(body, jnp.zeros(4), h)[0]
    h = jaxpp.pipeline_enter_stage(h)
    jax.lax.cond(h[0, 0] > 1, lambda: report("1 more", h[0]), lambda: jax.debug.print("1 less"))
    y = jax.checkpoint(lambda h: (report("1 recomputed", h), jnp.sin(h @ weights[1]))[1])(h)
    return jnp.mean(y**2)


def make_step(loss_fn=loss_fn):
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(weights, x):
        report("0 before", weights[0])
        loss, grads = grad_fn(weights, x)
        report("1 loss", loss)
        jax.debug.print("1 loss {:.5f}", loss)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    return step


def train(step, steps=3):
    """Gives the weights and losses of some steps, and what is called back."""
    weights, losses = [jnp.copy(w) for w in WEIGHTS], []
    with calls() as found:
        for number in range(steps):
            weights, loss = step(weights, X + number)
            losses.append(loss)
        jax.block_until_ready([np.asarray(x) for x in (*losses, *weights)])
    return (jax.device_get(weights), jax.device_get(losses)), found


def tag_of(call):
    text = call if isinstance(call, str) else call[0]
    return text.split(": ")[-1][:6]


def by_tag(found):
    """The calls of each tag, in order: XLA may reorder what is not ordered in a computation."""
    groups = collections.defaultdict(list)
    for call in found:
        groups[tag_of(call)].append(call.split(": ")[-1] if isinstance(call, str) else call)
    return groups


def placed(mesh, step, **options):
    specs = (None, jax.sharding.PartitionSpec("data"))
    return jaxpp.place(step, mesh, in_specs=specs, **options)


def test_workers_call_back_as_ranks_of_this_process(mesh):
    """The same results, and the same calls with the same values, in order."""
    want, expected = train(placed(local(), make_step()))
    got, found = train(placed(mesh, make_step(), donate_argnums=0))
    assert_same(got, want)
    assert by_tag(found) == by_tag(expected) and len(found) > 60
    prints = {line[:9] for line in found if isinstance(line, str)}
    assert prints == {"rank 0: 0", "rank 1: 1"}


def test_workers_call_back_as_often_as_the_plain_step(mesh):
    _, expected = train(jax.jit(make_step()), steps=1)
    _, found = train(placed(mesh, make_step()), steps=1)
    count = collections.Counter
    assert count(map(tag_of, found)) == count(map(tag_of, expected))


def on_rank_1(mesh, fun):
    return jaxpp.place(jaxpp.wrap_forward(lambda x: fun(jaxpp.pipeline_enter_stage(x + 0.0))), mesh)


def test_a_step_that_calls_back_can_be_traced(mesh, tmp_path):
    step = placed(mesh, make_step())
    step(WEIGHTS, X)
    mesh.start_trace(tmp_path, profiler=False)
    with calls() as found:
        float(step(WEIGHTS, X)[-1])
    tasks = {run.label for run in mesh.stop_trace().runs}
    assert {"F0.0", "B0.1"} <= tasks and found


def report_of(x):
    report("x", x)
    return x + 1


def wait(x):
    return x.block_until_ready()


@pytest.mark.parametrize("fetch", [np.asarray, jnp.asarray, jax.device_get, float, wait])
def test_a_fetch_comes_after_the_callbacks_of_its_call(mesh, fetch):
    step = on_rank_1(mesh, report_of)
    with calls() as found:
        for number in range(5):
            fetch(step(jnp.float32(number)))
            assert len(CALLS) == number + 1
    assert found == [("x", ("float32", float(n))) for n in range(5)]


def test_a_callback_may_fetch_arrays(mesh):
    step = on_rank_1(mesh, lambda x: x + 1)
    array, seen = step(jnp.float32(1.0)), []

    def noisy(x):
        jax.debug.callback(lambda x: seen.append(float(array) + float(x)), x)
        return x + 1

    np.asarray(on_rank_1(mesh, noisy)(jnp.float32(3.0)))
    assert seen == [5.0]


def test_an_exception_of_a_callback_is_raised_by_the_next_fetch_or_call(mesh):
    def fail(x):
        if x > 1:
            raise KeyError("too much")

    def step(x):
        jax.debug.callback(fail, x)
        return x + 1

    step = on_rank_1(mesh, step)
    x = step(step(jnp.float32(0.5)))
    with pytest.raises(KeyError, match="too much") as caught:
        np.asarray(x)
    assert caught.value.__notes__ == ["in a debug callback of rank 1"]
    assert float(x) == 2.5
    step(x)
    with pytest.raises(KeyError, match="too much"):
        for _ in range(1000):
            time.sleep(0.01)
            step(0.0)
    assert float(step(0.0)) == 1


def test_a_step_that_is_gone_calls_back(mesh):
    def late(x):
        long = jax.lax.fori_loop(0, 30000, lambda _, y: jnp.tanh(y @ y), jnp.full((64, 64), x))
        return report_of(jnp.maximum(x, long[0, 0]))

    before = len(mesh._steps.library.hoisted)
    other = on_rank_1(mesh, lambda x: x - 1)
    other(jnp.float32(0.0))
    with calls() as found:
        on_rank_1(mesh, late)(jnp.float32(3.0))
        gc.collect()
        assert not CALLS
        float(other(jnp.float32(0.0)))
        assert len(mesh._steps.library.hoisted) <= before
    assert found == [("x", ("float32", 3.0))]


def test_callbacks_are_made_after_a_restart(mesh):
    step = on_rank_1(mesh, report_of)
    with calls() as found:
        float(step(1.0))
        mesh.restart()
        float(step(2.0))
    assert [value for _, (_, value) in found] == [1.0, 2.0]


def test_the_callbacks_that_are_left_are_made_as_the_mesh_is_left(ray_session):
    with calls() as found:
        with jaxpp.RemoteMpmdMesh((1,)) as mesh:
            step, x = jaxpp.place(report_of, mesh), 0.0
            for _ in range(20):
                x = step(x)
        assert len(CALLS) == 20
    assert [value for _, (_, value) in found] == list(map(float, range(20)))


@pytest.mark.parametrize("fun", [in_a_while_loop, with_a_pure_callback, with_an_io_callback])
def test_what_workers_cannot_call_back_is_refused_with_its_line(mesh, fun):
    with pytest.raises(ValueError, match=r"at .*test_callbacks.py:\d+.* jaxpp.MpmdMesh"):
        on_rank_1(mesh, fun)(1.0)
    float(on_rank_1(local(), fun)(1.0))
