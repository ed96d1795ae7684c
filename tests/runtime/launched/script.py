"""What each process of a launched job runs: `python script.py CASE FOLDER [FAULT]`."""

import collections
import importlib.metadata
import os
import pathlib
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import schedules
from jaxpp.runtime.launched import _watch

WIDTH, BATCH, MICROBATCHES, STEPS = 8, 16, 4, 10
TRANSPORT: Any = os.environ.get("JAXPP_TEST_TRANSPORT", "sockets")

#: The case's axes, number of layers, schedule, and options.
CASES = {
    "plain": ((4,), 4, schedules.OneFOneB(), {}),
    "interleaved": ((2,), 4, schedules.Interleaved1F1B(2), {}),
    "zero_bubble": ((4,), 4, schedules.ZeroBubbleH1(), {}),
    "offload": ((2,), 2, schedules.Offload("gpipe"), {}),
    "replicas": ((2, 2), 2, schedules.OneFOneB(), {"replicas": 2}),
    "callbacks": ((2,), 2, schedules.OneFOneB(), {"callbacks": True}),
    "interleaved4": ((4,), 8, schedules.Interleaved1F1B(2), {}),
    "offload4": ((4,), 4, schedules.Offload("gpipe"), {}),
    "replicas4": ((4, 2), 4, schedules.OneFOneB(), {"replicas": 2}),
    "callbacks4": ((4,), 4, schedules.OneFOneB(), {"callbacks": True}),
}


def axes_of(case):
    shape = CASES[case][0]
    return shape, ("mpmd", "data")[: len(shape)]


def loss_fn(params, batch, callbacks=False):
    x = batch  # the first and the last rank read it
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
        if callbacks:
            jax.debug.callback(lambda n, i=i: print(f"stage {i} in {os.getpid()}", flush=True), 1)
    return jnp.mean((x - 0.5 * batch) ** 2)


def batch(number):
    return np.random.RandomState(number).randn(BATCH, WIDTH).astype(np.float32)


def begin(depth):
    params = [np.random.RandomState(n).randn(WIDTH, WIDTH).astype(np.float32) for n in range(depth)]
    return params, [np.zeros_like(w) for w in params]


def make_state(key):
    params = [jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(key, 2)]
    return params, jax.tree.map(jnp.zeros_like, params)


def placed(case, mesh, feed=batch):
    """The step of a case: its state is donated, and ranks load the batches by their numbers."""
    _, _, schedule, options = CASES[case]

    def loss(params, x):
        return loss_fn(params, x, options.get("callbacks", False))

    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    replicas = options.get("replicas", 1)
    grad = jaxpp.microbatch(grad, MICROBATCHES // replicas, replicas=replicas)
    grad = jaxpp.schedule(grad, schedule)

    def step(params, momentum, x):
        value, grads = grad(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return params, momentum, value

    split: Any = {"in_specs": (None, None, P("data"))} if replicas > 1 else {}
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), feed={2: feed}, **split)


def train(case, mesh, saved=None):
    """The losses and the parameters of some steps, as plain arrays; may save them, too."""
    step, state, losses = placed(case, mesh), begin(CASES[case][1]), []
    for number in range(STEPS):
        *state, loss = step(*state, number)
        losses.append(float(loss))
    if saved is not None:
        jaxpp.save_state(saved, state)
    return losses, [np.asarray(w) for w in jax.tree.leaves(jaxpp.gather(state))]


def bitwise(case, folder, *saved):
    with jaxpp.LaunchedMpmdMesh(*axes_of(case), transport=TRANSPORT) as mesh:
        losses, state = train(case, mesh, folder / "saved" if saved else None)
        np.savez(folder / f"{mesh.process}.npz", np.array(losses), *state)
    assert "ray" not in sys.modules


def composes(folder):
    """All else that a mesh does."""
    with jaxpp.LaunchedMpmdMesh((2,), transport=TRANSPORT) as mesh:
        step = placed("callbacks", mesh)
        made = step.initialize(make_state, jax.random.key(0), rest=(0,))
        *state, loss = step(*made, 0)
        jaxpp.save_state(folder / "saved", state)
        like = state
        try:
            jaxpp.save_state(folder / "saved", state)
        except FileExistsError as error:
            (folder / f"refused{mesh.process}").write_text(str(error))
        *state, loss = step(*state, 1)
        *again, same = step(*jaxpp.load_state(folder / "saved", like), 1)
        assert float(loss) == float(same)
        joined = TRANSPORT == "device_put"  # with it traces want to wait
        mesh.start_trace(folder / "trace", times="waits" if joined else "profile")
        *state, loss = step(*state, 2)
        trace = mesh.stop_trace()
        assert {run.rank for run in trace.runs} == {0, 1} and not trace.errors
        assert len(trace.calls) == 1 and all(trace.steps.values())
        assert "are proven" in str(jaxpp.certify(step, *state, 2))
        lowered = step.lower(*state, 2).compile()
        description = lowered.describe()
        assert len(description.ranks) == 2
        (folder / f"notes{mesh.process}").write_text("\n".join(description.notes))
        print(f"loss {loss} of {mesh!r} in process {mesh.process}", flush=True)


def delayed(folder):
    """Delayed steps in a program each, and all in one, whose loops overlap."""
    from tests.transforms.tasks import test_delay as case

    step = jaxpp.delay(case.step_of(case.grad_fn(schedules.OneFOneB()), case.ADAMW))
    with jaxpp.LaunchedMpmdMesh((2,), transport=TRANSPORT) as mesh:
        for name, found in (
            ("calls", case.run(jaxpp.place(step, mesh), 1)),
            ("program", case.run_in_one(step, mesh)),
        ):
            np.savez(folder / f"{name}{mesh.process}.npz", *jax.tree.leaves(found))


def managed(folder):
    """Orbax's manager, where the script has joined the processes by `jax.distributed`."""
    import orbax.checkpoint as ocp

    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, count, number, cluster_detection_method="deactivate")
    with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
        step, state = placed("plain", mesh), begin(2)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        with ocp.CheckpointManager(folder / "kept", options=options) as manager:
            for n in range(4):
                *state, _ = step(*state, n)
                manager.save(n, args=jaxpp.save_args(state))
            manager.wait_until_finished()
            assert list(manager.all_steps()) == [2, 3]
            back = manager.restore(3, args=jaxpp.restore_args(state))
            one, other = jaxpp.gather((back, state))
            assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))
            for n in range(4, 1000):
                *state, _ = step(*state, n)
                if n == 5 and number == 1:
                    os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler that wants the host
                if manager.reached_preemption(n):
                    manager.save(n, args=jaxpp.save_args(state))
                    break
                time.sleep(0.01)
        assert manager.latest_step() == n > 5


def twice(folder):
    """One mesh after the other; the second ends with the script."""
    with jaxpp.LaunchedMpmdMesh((2,), transport=TRANSPORT) as mesh:
        placed("plain", mesh)(*begin(2), 0)
    mesh = jaxpp.LaunchedMpmdMesh((2,), transport=TRANSPORT)
    *_, loss = placed("plain", mesh)(*begin(2), 0)
    (folder / f"loss{mesh.process}").write_text(str(loss))


def disordered(folder):
    """The order of transfers is wrong, alike in both processes: so no step is placed."""
    del folder
    from jaxpp.runtime.launched import _group

    right = _group.transfers_of
    _group.transfers_of = lambda *args: right(*args)[::-1]  # pyright: ignore
    with jaxpp.LaunchedMpmdMesh((2,), transport="device_put") as mesh:
        try:
            placed("plain", mesh).lower(*begin(2), 0).compile()
        except ValueError as error:
            print(error, flush=True)


def late(folder):
    """The mesh is asked for in process 1 once JAX has been used."""
    del folder
    if os.environ["RANK"] == "1":
        jnp.zeros(()).block_until_ready()
    try:
        jaxpp.LaunchedMpmdMesh((2,), transport="device_put")
    except (ValueError, jaxpp.RankError) as error:
        print(error, flush=True)


def loose(folder, how):
    """Without `with`, process 1 ends earlier: as if all were well, or by an exception."""
    mesh = jaxpp.LaunchedMpmdMesh((2,), heartbeat_timeout=2.0)
    step, state = placed("plain", mesh), begin(2)
    for number in range(100_000):
        *state, loss = step(*state, number)
        float(loss)
        if number == 3 and mesh.process == 1:
            sys.exit(0) if how == "exit" else begin(how)


def idle(folder, errors):
    """Process 1 fails while process 0 does not call the mesh, and may have nowhere to write to."""
    _watch.END_TIMEOUT = 2.0
    if errors == "closed":
        sys.stderr.close()
    with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
        float(placed("plain", mesh)(*begin(2), 0)[-1])
        if mesh.process == 1:
            raise LookupError("no such word")
        time.sleep(100)


def left(folder):
    """The mesh is in a generator, which all leave after its second loss."""

    def losses():
        with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
            step = placed("plain", mesh)
            while True:
                yield float(step(*begin(2), 0)[-1])

    for number, _ in enumerate(losses()):
        if number:
            break


def unsendable(folder):
    """The class of a batch is known in one function alone, so types of it cannot be sent."""
    Batch = collections.namedtuple("Batch", "x")  # noqa: PYI024
    with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
        jaxpp.place(lambda b: jnp.sum(b.x), mesh, feed={0: lambda n: Batch(batch(n))})(0)


def versions(folder):
    """Process 1 has another version of JAX."""
    if os.environ["RANK"] == "1":
        right = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.1" if name == "jax" else right(name)
    jaxpp.LaunchedMpmdMesh((2,))


def caught(folder, *meshes):
    """Process 1 raises; all catch what comes out of the mesh, and may make another one."""
    try:
        with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
            step = placed("plain", mesh)
            float(step(*begin(2), 0)[-1])
            if mesh.process == 1:
                raise LookupError("no such word")
            float(step(*begin(2), 1)[-1])
    except (LookupError, jaxpp.RankError) as error:
        print(f"caught {type(error).__name__}", flush=True)
    if meshes:
        twice(folder)


def napping(folder):
    """A callback of rank 1 takes longer than the end of a mesh waits; it is in Python at times."""

    def nap(x):
        (folder / "naps").touch()
        for _ in range(10_000):
            time.sleep(0.002)
        return x

    def loss(w, x):
        x = jaxpp.pipeline_enter_stage(x @ w)
        slept = jax.pure_callback(nap, x, jax.lax.stop_gradient(x), vmap_method="sequential")
        return jnp.mean((x - slept) ** 2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2)
    with jaxpp.LaunchedMpmdMesh((2,)) as mesh:
        step = jaxpp.place(jaxpp.schedule(grad, schedules.OneFOneB()), mesh)
        print(float(step(begin(1)[0][0], batch(0))[0]))


def faulty(folder, fault):
    """Trains for ever; process 1 has a fault at its fifth step, or is sent a signal by the test."""

    def load(number):
        if fault == "feed" and number == 5 and me == 0:
            raise KeyError("no such batch")
        return batch(number + 1000 * me if fault == "loads" and number == 5 else number)

    me = int(os.environ["RANK"])
    limit = float(os.environ.get("JAXPP_TEST_START_TIMEOUT", "60"))
    count = int(os.environ["WORLD_SIZE"])
    mesh = jaxpp.LaunchedMpmdMesh(
        (count,), transport=TRANSPORT, heartbeat_timeout=2.0, start_timeout=limit
    )
    with mesh:
        if fault == "unequal" and me == 1:
            global MICROBATCHES
            MICROBATCHES = 8
        step, state = placed("plain", mesh, load), begin(2)
        another: Any = placed("plain", mesh, load) if fault == "other" else None
        if fault == "start" and me == 1:
            state = begin(2)[0][::-1], state[1]
        for number in range(100_000):
            *state, loss = step(*state, number)
            value = float(loss)
            if number == 5:
                (folder / f"pid{me}").write_text(str(os.getpid()))
                if me == 1 and fault == "raises":
                    raise ValueError(f"a bad loss: {value}")
                if me == 1 and fault == "exits":
                    sys.exit(0)
                if me == 1 and fault == "alone":
                    float(jnp.sum(jaxpp.gather(state[0][0])))
                if me == 1 and fault == "again":
                    *state, _ = step(*state, number)
                if fault == "other":
                    *state, loss = (another if me else step)(*state, number)
                if fault == "batch":
                    *state, loss = step(*state, number + me)
                if fault == "fork" and me == 1:
                    if os.fork() == 0:  # it holds the connections, and lives longer than the test
                        os.closerange(1, 3)
                        time.sleep(120)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "once_more" and me == 0:
                    *state, loss = step(*state, number)
                if fault == "once_more":
                    return
                if fault == "folders":
                    jaxpp.save_state(folder / f"own{me}", state)
            if number > 5:
                time.sleep(0.02)


if __name__ == "__main__":
    case, folder, *rest = sys.argv[1:]
    others = (composes, delayed, managed, twice, disordered, late, loose, idle)
    others = (*others, left, unsendable, versions, caught, napping, faulty)
    run = {function.__name__: function for function in others}.get(case)
    if run is None:
        bitwise(case, pathlib.Path(folder), *rest)
    else:
        run(pathlib.Path(folder), *rest)
