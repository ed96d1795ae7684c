"""Ranks of several processes, joined by JAX: the same results; one lost process ends the step."""

import contextlib
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from benchmarks import faults
from jaxpp.runtime import RankError
from jaxpp.runtime.arrays._steps import parts_of
from jaxpp.runtime.arrays._types import ArrayType, join_shares, own_share
from tests.helpers import assert_same
from tests.runtime import inside

SHAPE, AXES, WIDTH = (2, 2), ("mpmd", "data"), 8


@pytest.fixture(autouse=True)
def no_hanging():
    with faults.deadline(180):
        yield


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh(SHAPE, AXES, processes_per_rank=2, start_timeout=300) as mesh:
        yield mesh


def local():
    return jaxpp.MpmdMesh(SHAPE, AXES)


def make_params(key):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (WIDTH, WIDTH)),
        "second": jax.random.normal(second, (WIDTH, WIDTH)),
    }


def params():
    return make_params(jax.random.key(0))


def batch(number=0):
    return np.random.default_rng(number).normal(size=(8, WIDTH)).astype("f4")


def loss(params, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params["first"]))
    return jnp.mean((h @ params["second"]) ** 2)


def placed(mesh, replicas=1, **options: Any):
    """A step whose batch is split over the processes of a rank, and one of its two weights."""
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    grad = jaxpp.microbatch(grad, 2, in_axes=(None, 0), replicas=replicas)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())

    def step(params, x):
        value, grads = grad(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    options = {"in_specs": ([("second", P("data"))], P("data"))} | options
    return jaxpp.place(step, mesh, donate_argnums=0, **options)


def train(step, state, numbers, make=batch) -> tuple[Any, Any]:
    losses = []
    for number in numbers:
        state, value = step(state, make(number))
        losses.append(value)
    return state, jax.device_get(losses)


@pytest.fixture(scope="module")
def expected():
    """What three steps give on the mesh of one process."""
    return jax.device_get(train(placed(local()), params(), range(3)))


# ---- the law: the same results on any mesh ------------------------------------------------------


def test_three_steps_are_bitwise_those_of_the_local_mesh(mesh, expected):
    state, losses = train(placed(mesh), params(), range(3))
    assert losses == expected[1]
    assert_same(state, expected[0])
    assert state["second"].spec == (("data",), ())
    assert state["first"].is_fully_replicated


@pytest.mark.more
def test_replicas_in_processes_of_their_own_are_bitwise_those_of_the_local_mesh(mesh):
    options = {"replicas": 2, "in_specs": (None, P("data"))}
    state, losses = train(placed(mesh, **options), params(), range(3))
    wanted, wanted_losses = train(placed(local(), **options), params(), range(3))
    assert losses == wanted_losses
    assert_same(state, wanted)


@pytest.mark.slow
def test_two_axes_inside_a_rank(ray_session):
    """Rows of devices belong to one process, columns to two."""
    specs = [("first", P(None, "model")), ("second", P(("data", "model")))], P("data")
    with jaxpp.RemoteMpmdMesh(
        (2, 2, 2), inside.AXES, processes_per_rank=2, start_timeout=300
    ) as mesh:
        state, losses = train(placed(mesh, in_specs=specs), params(), range(3))
        state = jax.device_get(state)
    step = placed(inside.local((2, 2, 2)), in_specs=specs)
    wanted, wanted_losses = train(step, params(), range(3))
    assert losses == wanted_losses
    assert_same(state, wanted)


@pytest.mark.slow
def test_a_deeper_model_with_two_axes_inside_a_rank(ray_session):
    with jaxpp.RemoteMpmdMesh(
        (2, 2, 2), inside.AXES, processes_per_rank=2, start_timeout=300
    ) as mesh:
        state, losses = inside.train(inside.placed(mesh), inside.start(), range(3))
        state = jax.device_get(state)
    step = inside.placed(inside.local((2, 2, 2)))
    wanted, wanted_losses = inside.train(step, inside.start(), range(3))
    assert losses == wanted_losses
    assert_same(state, wanted)


@pytest.mark.parametrize(
    "spec", [(), (("a",),), ((), ("b",)), (("b", "a"), ()), (("a", "b"),), (("b",), ("a",))]
)
@pytest.mark.parametrize("keys", [False, True])
def test_shares_make_up_the_array(spec, keys):
    """Each element is in one share, and shares go together in any order."""
    whole = np.arange(72, dtype="u4").reshape(12, 6)
    whole = jax.random.split(jax.random.key(0), (12, 6)) if keys else whole
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("a", "b")), P(*spec))
    boxes, data = own_share(jax.device_put(whole, sharding))
    parts = np.split(data, len(boxes))
    shares = [([box], part) for box, part in zip(boxes, parts, strict=True)]
    assert sum((b - a) * (d - c) for (a, b), (c, d) in boxes) == 72
    found = join_shares(ArrayType.of(whole), [*shares[::-1], ((), data[:0])])
    assert np.array_equal(found, jax.random.key_data(whole) if keys else whole)


def reversed_tree(xs):
    return jax.tree.map(lambda x: x[::-1] if x.ndim else x, xs)


def numbers_of(xs, n):
    """What the second rank makes of arrays of all kinds that the first one sends it."""
    xs = jaxpp.pipeline_enter_stage(reversed_tree(xs))
    xs["keys"] = jax.vmap(lambda key: jax.random.normal(key, (8,)))(xs["keys"])
    return jax.tree.map(lambda x: x.astype("f4").sum() * n[0], xs)


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_arrays_of_all_kinds_go_from_rank_to_rank(mesh, spec):
    """Keys, narrow types, no elements, large ones; whole and split."""
    values = {
        "keys": jax.random.split(jax.random.key(3), 4),
        "narrow": np.arange(8, dtype=jnp.bfloat16).reshape(4, 2),
        "bits": np.arange(8).reshape(2, 4) % 3 == 0,
        "large": np.random.default_rng(0).normal(size=(128, 300)).astype("f4"),
        "number": np.int32(7),
        "none": np.zeros((4, 0), "f4"),
    }
    loop = jaxpp.microbatch(jaxpp.wrap_forward(numbers_of), 2, in_axes=(None, 0))
    loop = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
    specs = {name: spec if np.ndim(x) else P() for name, x in values.items()}
    found, wanted = (
        jaxpp.place(loop, m, in_specs=(specs, P()))(values, np.arange(1.0, 3.0, dtype="f4"))
        for m in (mesh, local())
    )
    assert_same(found, wanted)


def test_arrays_come_back_as_they_were(mesh):
    """Keys too; those that a rank has split are fetched from all of its processes."""
    values = {"keys": jax.random.split(jax.random.key(3), 4), "rows": np.arange(12).reshape(4, 3)}
    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), 2, in_axes=(None, 0))
    loop = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())

    def step(params, x, values):
        return loop(params, x), jax.tree.map(lambda x: x[::-1], values)

    for spec in (P(), P("data")):
        out = jaxpp.place(step, mesh, in_specs=(P(), P("data"), spec))(params(), batch(), values)
        found = jax.tree.map(jnp.asarray, out[1])
        assert_same(jax.random.key_data(found["keys"])[::-1], jax.random.key_data(values["keys"]))
        assert_same(found["rows"][::-1], jnp.asarray(values["rows"]))


def test_an_array_is_split_anew_where_another_step_reads_it_so(mesh):
    """On its rank, and on another one that it is sent to."""
    state, _ = placed(mesh)(params(), batch())
    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), 2, in_axes=(None, 0))
    loop = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
    swapped = {"first": state["second"], "second": state["first"]}
    specs = ([("first", P(None, "data")), ("second", P("data"))], P("data"))
    found = jaxpp.place(loop, mesh, in_specs=specs)(swapped, batch())
    wanted = jaxpp.place(loop, local(), in_specs=specs)(jax.device_get(swapped), batch())
    assert_same(found, wanted)


def test_rows_of_an_array_stay_with_all_processes(mesh):
    state, _ = placed(mesh)(params(), batch())
    parts = parts_of(state["second"], (0, 2, WIDTH))
    whole = np.asarray(state["second"])
    assert [part.spec for part in parts] == [((), ())] * 2
    assert_same([np.asarray(part) for part in parts], [whole[:2], whole[2:]])


def test_ranks_load_their_batch_themselves(mesh, expected):
    for load in (batch, lambda n: jnp.asarray(batch(n))):
        fed = placed(mesh, feed={1: load})
        state, losses = train(fed, params(), range(3), make=lambda n: n)
        assert losses == expected[1]
        assert_same(state, expected[0])


def test_workers_make_their_parts(mesh):
    key = jax.random.key(5)
    state = placed(mesh).initialize(make_params, key, rest=(batch(),))
    assert state["second"].spec == (("data",), ())
    assert_same(state, make_params(key))


# ---- what is said of a step ---------------------------------------------------------------------


def test_what_is_said_of_a_step_is_what_the_local_mesh_says(mesh):
    found, wanted = (placed(m).lower(params(), batch()).compile().describe()
                     for m in (mesh, local()))  # fmt: skip
    for own, other in zip(found.ranks, wanted.ranks, strict=True):
        assert len(own.devices) == 2 and own.sent_bytes == other.sent_bytes
        assert own.parameter_bytes == other.parameter_bytes


def test_a_trace_has_the_tasks_of_each_rank(mesh, tmp_path):
    step = placed(mesh)
    state, _ = step(params(), batch())
    mesh.start_trace(tmp_path / "trace")
    state, value = step(state, batch(1))
    float(value)
    trace = mesh.stop_trace()
    assert {run.rank for run in trace.runs} == {0, 1} and trace.messages and not trace.errors
    assert all(path.is_dir() for path in trace.profile_paths)


# ---- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_of_either_mesh_loads_on_the_other(mesh, tmp_path, expected):
    step, here = placed(mesh), placed(local())
    state, _ = train(step, params(), range(2))
    jaxpp.save_state(tmp_path / "2", state)
    writers = {path.name for path in (tmp_path / "2").glob("ocdbt.process_*")}
    assert {f"ocdbt.process_rank1process{n}" for n in (0, 1)} <= writers
    loaded = jaxpp.load_state(tmp_path / "2", params())
    assert_same(loaded, state)
    after, losses = train(here, loaded, [2])
    assert losses == expected[1][2:]
    assert_same(after, expected[0])

    there, _ = train(here, params(), range(2))
    jaxpp.save_state(tmp_path / "local", there)
    shardings = step.lower(params(), batch()).compile().input_shardings[0]
    loaded = jaxpp.load_state(tmp_path / "local", params(), shardings)
    after, losses = train(step, loaded, [2])
    assert losses == expected[1][2:]
    assert_same(after, expected[0])


# ---- failure ------------------------------------------------------------------------------------


def pids(mesh):
    return mesh.apply_everywhere(lambda process: os.getpid(), {0: (), 1: ()})()


@contextlib.contextmanager
def failing(mesh, within=5.0):
    """What goes wrong in the block, with the first call or fetch that follows within some time."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        yield caught
        state, step = params(), placed(mesh)
        while time.monotonic() < began + 2 * within:
            state, value = step(state, batch())
            float(value)
    assert time.monotonic() - began < within


@pytest.mark.parametrize(("rank", "process"), [(1, 1), pytest.param(0, 0, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_step_and_a_restarted_mesh_goes_on(
    mesh, tmp_path, expected, rank, process
):
    """The second process of a rank; and the first, without which the second one ends."""
    step = placed(mesh)
    state, _ = train(step, params(), range(2))
    jaxpp.save_state(tmp_path / "2", state)
    before = pids(mesh)
    with failing(mesh) as caught:
        os.kill(before[rank][process], signal.SIGKILL)
    error = caught.value
    assert (error.rank, error.process) == (rank, process)
    assert f"rank {rank} (its process {process} of 2, process {before[rank][process]}" in str(error)
    assert "its process has died" in error.reason
    mesh.restart()
    after = pids(mesh)
    assert not {p for own in after.values() for p in own} & {
        p for own in before.values() for p in own
    }
    shardings = step.lower(params(), batch()).compile().input_shardings[0]
    state, losses = train(step, jaxpp.load_state(tmp_path / "2", params(), shardings), [2])
    assert losses == expected[1][2:]
    assert_same(state, expected[0])


def fails_in_one_process(number):
    if number == 1 and jax.process_index() == 1:
        raise KeyError("no such batch")
    return batch(number)


@pytest.mark.slow
def test_a_stopped_process_is_found_while_the_others_wait_for_it(mesh, expected):
    step = placed(mesh)
    step(params(), batch())
    own = pids(mesh)[1][1]
    with failing(mesh, within=9.0) as caught:
        os.kill(own, signal.SIGSTOP)
    assert (caught.value.rank, caught.value.process) == (1, 1)
    assert "its process is stopped" in caught.value.reason
    mesh.restart()
    assert not psutil.pid_exists(own)
    assert_same(train(step, params(), range(3))[0], expected[0])


@pytest.mark.slow
def test_an_error_in_one_process_ends_those_that_wait_for_it(mesh, expected):
    step = placed(mesh, feed={1: fails_in_one_process})
    began = time.monotonic()
    with pytest.raises(RankError, match="no such batch") as caught:
        train(step, params(), range(2), make=lambda n: n)
    assert time.monotonic() - began < 30
    assert (caught.value.rank, caught.value.process) == (0, 1)
    mesh.restart()
    assert_same(train(placed(mesh), params(), range(3))[0], expected[0])


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_few_devices_are_an_error_at_the_start(ray_session):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    told = r"Rank 0 needs 4 devices .*, 2 in each of its 2 processes, and its process has 1"
    with pytest.raises(ValueError, match=told):
        jaxpp.RemoteMpmdMesh(
            (1, 4), AXES, processes_per_rank=2, environment=flags, start_timeout=300
        )


def test_processes_are_checked_before_anything_starts():
    with pytest.raises(ValueError, match=r"a rank of 2 cannot have processes_per_rank=3"):
        jaxpp.RemoteMpmdMesh((2, 2), AXES, processes_per_rank=3)
    with pytest.raises(ValueError, match=r"a rank of 1 cannot have processes_per_rank=2"):
        jaxpp.RemoteMpmdMesh((2,), processes_per_rank=2)
    with pytest.raises(ValueError, match=r"cannot have processes_per_rank=0"):
        jaxpp.RemoteMpmdMesh((2, 2), AXES, processes_per_rank=0)
    with pytest.raises(ValueError, match=r"transport='nccl' is not known; it is one of auto, unix"):
        jaxpp.RemoteMpmdMesh((2,), transport="nccl")
