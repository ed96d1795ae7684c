"""Callbacks run on the worker that has the value, as often as in the plain function."""

import collections
import contextlib
import gc
import io
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxpp
from tests.helpers import assert_same, wait_until

SHAPE, AXES = (2, 2), ("mpmd", "data")
WEIGHTS = [jnp.eye(4), 0.5 + jnp.arange(8.0).reshape(4, 2) / 8]
X = jnp.arange(32.0).reshape(8, 4) / 32
SCALAR = jax.ShapeDtypeStruct((), "float32")


@contextlib.contextmanager
def printed(mesh=None):
    """Gives a list of the lines that are printed inside, once that is left.

    Those of a mesh are brought by Ray, a little later, with the name of the process: the last line
    that each rank prints here is our own, and is left out. Ray's colours are left out, too.
    """
    found, lines = [], io.StringIO()
    with contextlib.redirect_stdout(lines):
        yield found
        jax.effects_barrier()
        if mesh is not None:
            mesh._group.settle()
            mesh.apply(print_last, {rank: () for rank in range(mesh.num_ranks)})
            assert wait_until(lambda: lines.getvalue().count(LAST) == mesh.num_ranks, 10)
    text = re.sub("\x1b[^m]*m", "", lines.getvalue())
    text = re.sub(r"\((rank \d) pid=\d+\)", r"\1:", text)
    found += [line for line in text.splitlines() if not line.endswith(LAST)]


LAST = "the last line"


def print_last(rank):
    print(f"{rank.rank} {LAST}")


def report(tag, *values, ordered=False):
    """Calls back, to print a tag, and the types and values of arrays."""

    def note(*values):
        print(tag, *((str(v.dtype), np.asarray(v).tolist()) for v in values))

    jax.debug.callback(note, *values, ordered=ordered)


# ---- on one rank of two -------------------------------------------------------------------------


def prints(x):
    report("one", x, x + 1)
    report("no values")
    report("types", x.astype("bfloat16"), jnp.arange(3), jax.random.key(3))
    jax.debug.print("{} and {y:.3f}", x, y=x + 1)
    return x + 1


def ordered(x):
    for n in range(4):
        report(f"{n}", x + n, ordered=True)
        jax.debug.print("after {}", n, ordered=True)
    return x


def in_loops(x):
    def body(carry, row):
        report("row", carry, row)
        branches = lambda: report("odd", row), lambda: jax.debug.print("even {}", row)  # noqa: E731
        jax.lax.cond(row % 2 == 1, *branches)
        return carry * 2, carry

    last, _ = jax.lax.scan(body, x, jnp.arange(3))
    return jax.lax.while_loop(lambda x: x < 99, lambda x: (report("x", x), 2 * x)[1], last)


def in_a_shard_map(x):
    mesh = jax.sharding.get_abstract_mesh()
    spec = jax.sharding.PartitionSpec("data")

    def inner(x):
        jax.debug.print("part {}", x)
        return x + 1

    return jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.stack([x, x]))


@jax.custom_vjp
def doubled(x):
    report("forward", x)
    return 2 * x


doubled.defvjp(
    lambda x: (report("first", x), (2 * x, x))[1],
    lambda x, ct: (report("back", x, ct), (2 * ct,))[1],
)


def in_derivative_rules(x):
    return jax.grad(lambda x: doubled(x) + jax.checkpoint(doubled)(x) ** 2)(x)


def with_values(x):
    y = jax.pure_callback(np.sqrt, SCALAR, x)
    for _ in range(2):
        y = io_callback(lambda y: (print("given", y), np.cos(y))[1], SCALAR, y, ordered=True)
    return jax.lax.fori_loop(0, 3, lambda _, y: jax.pure_callback(np.sin, SCALAR, y), y)


FUNCTIONS = [prints, ordered, in_loops, in_a_shard_map, in_derivative_rules, with_values]


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh(SHAPE, AXES) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def ranks(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


def local(shape=SHAPE, axes=AXES):
    return jaxpp.MpmdMesh(shape, axes)


def on_rank_1(mesh, fun):
    return jaxpp.place(jaxpp.wrap_forward(lambda x: fun(jaxpp.pipeline_enter_stage(x + 0.0))), mesh)


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_worker_calls_back_as_this_process_does(mesh, ranks, fun):
    """The same results, and the same calls with the same values."""
    if fun is not in_a_shard_map:
        mesh = ranks
    here = local(mesh.shape, mesh.axis_names)
    with printed() as expected:
        want = [np.asarray(on_rank_1(here, fun)(jnp.float32(x))) for x in (1.5, 2.5)]
    with printed(mesh) as found:
        step = on_rank_1(mesh, fun)
        got = [np.asarray(step(jnp.float32(x))) for x in (1.5, 2.5)]
    assert_same(got, want)
    assert all(line.startswith("rank 1: ") for line in found) and found
    found = [line.removeprefix("rank 1: ") for line in found]
    assert found == expected if fun in (ordered, with_values) else sorted(found) == sorted(expected)
    if fun is not in_a_shard_map:
        with printed() as plain:
            jax.block_until_ready([jax.jit(fun)(jnp.float32(x)) for x in (1.5, 2.5)])
        assert sorted(plain) == sorted(expected)


# ---- in a train step ----------------------------------------------------------------------------


def loss_fn(weights, x):
    """Calls back in both stages; each tag begins with the number of the stage."""
    report("0 batch", x, jax.random.key(0), x.astype("bfloat16"))
    h = doubled(jnp.tanh(x @ weights[0]))

    def body(carry, row):
        report("0 row", row)
        return carry + row, None

    h = h + jax.lax.scan(body, jnp.zeros(4), h)[0]
    h = jaxpp.pipeline_enter_stage(h)
    largest = lambda h: np.float32(np.abs(h).max())  # noqa: E731
    scale = jax.pure_callback(largest, SCALAR, jax.lax.stop_gradient(h))
    jax.lax.cond(h[0, 0] > 1, lambda: report("1 more", h[0]), lambda: jax.debug.print("1 less"))
    y = jax.checkpoint(lambda h: (report("1 recomputed", h), jnp.sin(h @ weights[1]))[1])(h / scale)
    return jnp.mean(y**2)


def step_of(loss_fn=loss_fn):
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(weights, x):
        report("0 before", weights[0])
        loss, grads = grad_fn(weights, x)
        jax.debug.print("1 loss {:.5f}", loss)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    return step


def placed(mesh, step, **options):
    specs = (None, jax.sharding.PartitionSpec("data"))
    return jaxpp.place(step, mesh, in_specs=specs, **options)


def train(step, steps=3, mesh=None):
    """Gives the weights and losses of some steps, and what is printed."""
    weights, losses = [jnp.copy(w) for w in WEIGHTS], []
    with printed(mesh) as found:
        for number in range(steps):
            weights, loss = step(weights, X + number)
            losses.append(loss)
        jax.block_until_ready([np.asarray(x) for x in (*losses, *weights)])
    return (jax.device_get(weights), jax.device_get(losses)), found


def test_a_train_step_calls_back_on_the_ranks_of_its_stages(mesh):
    want, expected = train(placed(local(), step_of()))
    got, found = train(placed(mesh, step_of(), donate_argnums=0), mesh=mesh)
    assert_same(got, want)
    lines = {line: re.match(r"rank (\d): (\w)", line) for line in found}
    assert all(lines.values()), [line for line, match in lines.items() if match is None]
    ranks = collections.Counter(match.groups() for match in lines.values() if match)
    assert ranks.keys() == {("0", "0"), ("1", "1"), ("0", "f"), ("0", "b")} & ranks.keys()
    assert sorted(line.partition(": ")[2] for line in found) == sorted(expected)
    _, plain = train(jax.jit(step_of()))
    tags = [collections.Counter(line[:6] for line in lines) for lines in (expected, plain)]
    assert tags[0] == tags[1] and len(plain) > 60


def test_a_step_that_calls_back_can_be_traced(mesh, tmp_path):
    step = placed(mesh, step_of())
    step(WEIGHTS, X)
    mesh.start_trace(tmp_path)
    with printed(mesh) as found:
        float(step(WEIGHTS, X)[-1])
    tasks = {run.label for run in mesh.stop_trace().runs}
    assert {"F0.0", "B0.1"} <= tasks and found


def late(x):
    long = jax.lax.fori_loop(0, 30000, lambda _, y: jnp.tanh(y @ y), jnp.full((64, 64), x))
    jax.debug.print("late {}", jnp.maximum(x, long[0, 0]))
    return x + 1


def test_a_step_that_is_gone_calls_back(ranks):
    other = on_rank_1(ranks, lambda x: x - 1)
    with printed(ranks) as found:
        on_rank_1(ranks, late)(jnp.float32(3.0))
        gc.collect()
        float(other(jnp.float32(0.0)))
    assert found == ["rank 1: late 3.0"]


def test_the_callbacks_that_are_left_are_made_as_the_mesh_is_left(ray_session):
    with printed() as found, jaxpp.RemoteMpmdMesh((1,)) as mesh:
        step, x = jaxpp.place(late, mesh), 0.0
        for _ in range(5):
            x = step(x)
    assert found == [f"rank 0: late {n}.0" for n in range(5)]


# ---- what fails on a worker ---------------------------------------------------------------------


def fails(x):
    def fail(x):
        raise KeyError(f"too much: {x}")

    jax.debug.callback(fail, x)
    return x + 1


def fails_with_a_value(x):
    def fail(x):
        raise KeyError(f"too much: {x}")

    return jax.pure_callback(fail, SCALAR, x)


def is_checked(x):
    return eqx.error_if(x, x > 1, "too much: x")


@pytest.mark.parametrize("fun", [is_checked, fails, fails_with_a_value], ids=lambda f: f.__name__)
def test_an_error_in_a_task_has_its_type_and_text_on_both_meshes(ranks, fun):
    plain = eqx.filter_jit(fun) if fun is is_checked else jax.jit(fun)
    with pytest.raises(Exception, match="too much: ") as expected:
        jax.block_until_ready(plain(jnp.float32(2.0)))
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    step = on_rank_1(ranks, fun)
    if fun is is_checked:
        assert float(step(jnp.float32(0.5))) == 0.5
    message = r"^rank 1 .*/test_callbacks.py:\d+.*too much: .*\. All ranks"
    with pytest.raises(jaxpp.RankError, match=message) as caught:
        np.asarray(step(jnp.float32(2.0)))
    assert type(caught.value.__cause__) is expected.type
    assert "too much: " in caught.value.reason
    ranks.restart()
    with printed(ranks) as found:  # nothing is left of the error
        assert float(on_rank_1(ranks, prints)(jnp.float32(0.5))) == 1.5
    assert len(found) == 4
    with pytest.raises(expected.type, match="too much: "):
        jax.block_until_ready(on_rank_1(local((2,), ("mpmd",)), fun)(jnp.float32(2.0)))
    with contextlib.suppress(Exception):
        jax.effects_barrier()
