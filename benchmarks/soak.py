"""A long run: do memory, threads and open files of driver and workers stay what they are?

    python -m benchmarks.soak --steps=5000 --functions=200

Makes many steps of one placed function on worker processes and on devices of this process, then
places, calls and drops many different functions on the same meshes. It prints what driver and
workers hold after a warm-up, in the middle and at the end of each part. It fails if a process grows
from the warm-up to the end by more than `--mib` MiB for a thousand steps, or `--function_mib` MiB
for a function that is gone, or by more than a few threads or files.
"""

import dataclasses
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from absl import app, flags

import jaxpp

_STEPS = flags.DEFINE_integer("steps", 5000, "Steps of one placed function.", 20)
_FUNCTIONS = flags.DEFINE_integer("functions", 200, "Placed functions that come and go.", 10)
_RANKS = flags.DEFINE_integer("ranks", 2, "Ranks of each mesh.", 1)
_MESHES = flags.DEFINE_multi_enum("meshes", ["remote", "local"], ["remote", "local"], "Which.")
_MIB = flags.DEFINE_float("mib", 2.0, "MiB by which a process may grow in a thousand steps.")
_FUNCTION_MIB = flags.DEFINE_float("function_mib", 0.05, "MiB that a function may leave behind.")
_SLACK = flags.DEFINE_float("slack_mib", 16.0, "MiB by which a process may grow in any case.")
_FEW = flags.DEFINE_integer("few", 3, "Threads, and files, by which a process may grow.")

WIDTH, BATCH, MICROBATCHES = 64, 16, 4
#: The part of the steps that is the warm-up.
STEPS_WARM_UP = 0.2
#: That of the functions, in which the cache of 512 compiled programs gets full.
FUNCTIONS_WARM_UP = 0.7


@dataclasses.dataclass(frozen=True)
class Held:
    """What a process holds."""

    mib: float
    threads: int
    files: int

    @staticmethod
    def by(pid: int) -> "Held":
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_info().rss / 2**20
            return Held(memory, process.num_threads(), process.num_fds())

    def __str__(self):
        return f"{self.mib:8.1f} MiB {self.threads:4} threads {self.files:4} files"


def step_on(mesh: Any, rate: float, feed: bool = False) -> Any:
    """A train step; another `rate` makes it another function."""

    def loss_fn(weights, x):
        for i, w in enumerate(weights):
            x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
        return jnp.mean(x**2) * (1 + rate)

    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(weights, x):
        loss, grads = grad_fn(weights, x)
        return jax.tree.map(lambda w, g: w - rate * g, weights, grads), loss

    # A function of its own for each step, as a user's closure over a data set is.
    loads = {1: lambda number: batch(number)} if feed else None
    return jaxpp.place(train_step, mesh, donate_argnums=0, feed=loads)


def weights() -> list[jax.Array]:
    return [jnp.eye(WIDTH) for _ in range(_RANKS.value)]


def batch(number: int) -> np.ndarray:
    return np.full((BATCH, WIDTH), 1 / (1 + number % 7), np.float32)


def pid_of(process: Any) -> int:
    """Gives the id of the worker's process; runs in it."""
    del process
    return os.getpid()


def processes(mesh: Any) -> dict[str, int]:
    """The driver, and the workers of a mesh that has some."""
    found = {"driver": os.getpid()}
    if isinstance(mesh, jaxpp.RemoteMpmdMesh):
        pids = mesh.apply(pid_of, {rank: () for rank in range(mesh.num_ranks)})
        found |= {f"rank {rank}": pid for rank, pid in pids.items()}
    return found


def soak(
    mesh: Any, what: str, one: Callable[[int], None], times: int, warm_up: float, mib: float
) -> list[str]:
    """Does something many times, and prints what is held; gives what has grown too much.

    Args:
        mesh: whose workers are looked at.
        what: names it.
        one: does it, given how often it has been done.
        times: how often.
        warm_up: the part of these that is the warm-up.
        mib: MiB that a process may have more each time.
    """
    middle = (1 + warm_up) / 2
    looks = {int(warm_up * times): "start", int(middle * times): "middle", times: "end"}
    held: dict[str, dict[str, Held]] = {}
    began = time.monotonic()
    for number in range(times + 1):
        if number in looks:
            gc.collect()
            held[looks[number]] = {n: Held.by(pid) for n, pid in processes(mesh).items()}
        if number < times:
            one(number)
    print(f"{what}: {times} in {time.monotonic() - began:.0f} s")
    for when, found in held.items():
        for name, own in found.items():
            print(f"  {when:6} {name:7} {own}", flush=True)
    allowed = _SLACK.value + mib * (1 - warm_up) * times
    return [
        f"{what}: {name} has grown from {before} to {held['end'][name]}"
        for name, before in held["start"].items()
        if has_grown(before, held["end"][name], allowed)
    ]


def has_grown(before: Held, after: Held, mib: float) -> bool:
    more = after.threads - before.threads, after.files - before.files
    return after.mib - before.mib > mib or max(more) > _FEW.value


def soak_steps(mesh: Any, name: str) -> list[str]:
    step, state = step_on(mesh, 0.1), [weights()]

    def one(number: int) -> None:
        state[0], loss = step(state[0], batch(number))
        if number % 5 == 0:
            float(loss)

    return soak(mesh, f"steps, {name}", one, _STEPS.value, STEPS_WARM_UP, _MIB.value / 1000)


def soak_functions(mesh: Any, name: str) -> list[str]:
    def one(number: int) -> None:
        feed = isinstance(mesh, jaxpp.RemoteMpmdMesh) and number % 2 == 1
        step = step_on(mesh, 0.1 / (1 + number), feed)
        _, loss = step(weights(), number if feed else batch(number))
        assert np.isfinite(float(loss))

    each = _FUNCTION_MIB.value
    return soak(mesh, f"functions, {name}", one, _FUNCTIONS.value, FUNCTIONS_WARM_UP, each)


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    grown = []
    if "remote" in _MESHES.value:
        with jaxpp.RemoteMpmdMesh((_RANKS.value,), ("mpmd",)) as mesh:
            grown += soak_steps(mesh, "worker processes")
            grown += soak_functions(mesh, "worker processes")
    if "local" in _MESHES.value:
        mesh = jaxpp.MpmdMesh((_RANKS.value,), ("mpmd",))
        grown += soak_steps(mesh, "one process")
        grown += soak_functions(mesh, "one process")
    if grown:
        raise SystemExit("\n".join(grown))
    print("Nothing has grown.")


if __name__ == "__main__":
    app.run(main)
