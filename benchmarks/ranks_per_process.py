"""Ranks that share a worker process: the same bits as on a local mesh, and the time of a step.

    python -m benchmarks.ranks_per_process
    python -m benchmarks.ranks_per_process --schedules=1f1b --per_process=1,4

Four ranks are 4, 2 or 1 worker processes. For each schedule it trains a few steps there and on the
mesh of this process, compares all bits of the state and the losses, and prints the median time of a
step over that of a process for each rank; what is compared takes turns. Then a step with callbacks,
one whose activations are offloaded, one with replicas, a checkpoint that is saved, lost and loaded
within a training, and a traced step each have to give the same bits. It fails where one differs.
"""

import contextlib
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import PartitionSpec

import jaxpp
from benchmarks.equal_blocks import Loop, draw, elapsed, placed_step

_SCHEDULES = flags.DEFINE_list(
    "schedules", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipe"], "By name."
)
_PER_PROCESS = flags.DEFINE_list("per_process", ["1", "2", "4"], "Ranks in a worker process.")
_BLOCKS = flags.DEFINE_integer("blocks", 5, "How often what is compared takes turns.", 1)
_STEPS = flags.DEFINE_integer("steps", 10, "Steps in a turn.", 1)
_WIDTH = flags.DEFINE_integer("width", 32, "Features of an example.", 1)

RANKS, MICROBATCHES, OPTIMIZER = 4, 8, optax.adam(1e-3)


def loop_on(mesh: Any, schedule: jaxpp.schedules.Schedule, **options: Any) -> Loop:
    """A training loop on a mesh, from the same start on each."""
    stages = RANKS * schedule.stages_per_rank
    count = MICROBATCHES * options.get("replicas", 1)
    state, batch = draw(stages, _WIDTH.value, 4 * count, OPTIMIZER)
    step = placed_step(schedule, stages, MICROBATCHES, OPTIMIZER, mesh, **options)
    return Loop(step, state, batch)


def train(loop: Loop, steps: int = 3) -> Any:
    """The arrays of the state after some steps, and the last loss."""
    found = [loop() for _ in range(steps)][-1]
    return [np.asarray(x) for x in jax.tree.leaves(found) if hasattr(x, "dtype")]


def check_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


# ---- what else a step may have -------------------------------------------------------------------


def with_callbacks(mesh: Any, here: Any) -> None:
    seen: list[float] = []

    def loss_fn(weights, x):
        for n, w in enumerate(weights):
            x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if n else x) @ w)
        jax.debug.callback(lambda loss: seen.append(float(loss)), loss := jnp.mean(x**2))
        return loss

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    keys = jax.random.split(jax.random.key(0), RANKS + 1)
    weights = [jax.random.normal(key, (16, 16)) for key in keys[1:]]
    batch = jax.random.normal(keys[0], (4 * MICROBATCHES, 16))
    results = []
    for each in (mesh, here):
        found = jax.device_get(jaxpp.place(grad_fn, each)(weights, batch))
        jax.effects_barrier()
        results.append(jax.tree.leaves(found))
    check_same(*results)
    assert len(seen) >= MICROBATCHES  # those of workers run there


def with_offload(mesh: Any, here: Any) -> None:
    schedule = jaxpp.schedules.Offload("1f1b")
    check_same(train(loop_on(mesh, schedule)), train(loop_on(here, schedule)))


def with_checkpoint(mesh: Any, here: Any) -> None:
    schedule = jaxpp.schedules.ZeroBubbleH1()
    loop = loop_on(mesh, schedule)
    train(loop, 2)
    with tempfile.TemporaryDirectory() as folder:
        jaxpp.save_state(f"{folder}/state", loop.state)
        train(loop, 2)
        loop.state = jaxpp.load_state(f"{folder}/state", loop.state)
    check_same(train(loop, 1), train(loop_on(here, schedule), 3))


def with_trace(mesh: Any, here: Any) -> None:
    schedule = jaxpp.schedules.OneFOneB()
    loop = loop_on(mesh, schedule)
    train(loop, 1)
    with tempfile.TemporaryDirectory() as folder:
        mesh.start_trace(folder)
        found = train(loop, 2)
        trace = mesh.stop_trace()
    check_same(found, train(loop_on(here, schedule)))
    assert not trace.errors and trace.timeline().table.ranks == schedule.table(4, 8).ranks


FEATURES: dict[str, Callable[[Any, Any], None]] = {
    "callbacks": with_callbacks,
    "offload": with_offload,
    "a checkpoint": with_checkpoint,
    "a trace": with_trace,
}


def replicas(number: int) -> None:
    """Replicas along an axis inside the ranks, of two devices each."""
    shape, names = (RANKS, 2), ("mpmd", "data")
    schedule = jaxpp.schedules.OneFOneB()
    options = {"replicas": 2, "in_specs": (None, None, PartitionSpec("data"))}
    with jaxpp.RemoteMpmdMesh(shape, names, ranks_per_process=number) as mesh:
        found = train(loop_on(mesh, schedule, **options))
    check_same(found, train(loop_on(jaxpp.MpmdMesh(shape, names), schedule, **options)))


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_num_cpu_devices", 2 * RANKS)
    warnings.filterwarnings("ignore", message="place: the microbatches")
    here = jaxpp.MpmdMesh((RANKS,), devices=jax.devices()[:RANKS])
    numbers = [int(number) for number in _PER_PROCESS.value]
    with contextlib.ExitStack() as stack:
        meshes = {
            n: stack.enter_context(jaxpp.RemoteMpmdMesh((RANKS,), ranks_per_process=n))
            for n in numbers
        }
        for name in _SCHEDULES.value:
            schedule = jaxpp.schedules.by_name(name)
            loops = {n: loop_on(mesh, schedule) for n, mesh in meshes.items()}
            expected = train(loop_on(here, schedule))
            for loop in loops.values():
                check_same(train(loop), expected)
            times: dict[int, list[float]] = {n: [] for n in numbers}
            for _ in range(_BLOCKS.value):
                for n, loop in loops.items():
                    times[n].append(elapsed(loop, _STEPS.value) / _STEPS.value)
            base = statistics.median(times[numbers[0]])
            figures = ", ".join(
                f"{n} a process {statistics.median(t) / base:.2f}" for n, t in times.items()
            )
            print(f"{name}: the same bits; {figures}, of {1e3 * base:.1f} ms", flush=True)
        for n, mesh in meshes.items():
            for name, check in FEATURES.items():
                check(mesh, here)
                print(f"{n} a process, {name}: the same bits", flush=True)
    for n in numbers:
        replicas(n)
        print(f"{n} a process, replicas: the same bits", flush=True)


if __name__ == "__main__":
    app.run(main)
