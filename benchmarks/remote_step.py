"""Measures a mesh of worker processes against what it is compared with, as ratios in one run.

    python -m benchmarks.remote_step --torch_python=/path/to/python/with/torch
    python -m benchmarks.remote_step --parts=speedup --task_ms=5

Starts a Ray session, or joins the one that is there, and prints by part:

- `empty`: what a step takes whose tasks do next to nothing, from the call in the driver until its
  result is there (`call`), and in a loop that does not wait for each (`loop`), over what the same
  program takes in `torch.distributed.pipelining` with gloo, in a loop without a barrier; with the
  quartiles of the blocks. The losses of both are compared first. Without `--torch_python` it is
  left out;
- `launched`: the loop on launched processes, a rank each, over that on workers, and over torch;
- `threads`: the processor time of each thread of the driver and the workers in an empty step, how
  long the thread waited for a core, and how often it slept and was woken (Linux);
- `speedup`: two workers over one, each pinned to a core, for tasks of several lengths, and what the
  schedule's simulation makes of the times of tasks, measured in the pipeline (`predicted`) and on a
  worker alone (`predicted_alone`: cores that work at once slow each other); `efficiency` is what it
  makes of each task's own time over the step of which it was part. With 1F1B a rank waits for each
  of its transfers, twice a microbatch; eager 1F1B leaves them the time of a task;
- `local`: the same empty step on the mesh of one process: how long a call takes to return
  (`dispatch`), and until its result is there;
- `memory`: what driver and workers hold after a tenth of many steps, and at the end.

What is compared takes turns in short blocks, so that a machine that changes its speed changes it
for both; medians of blocks count. Workers and the ranks of torch take the cores in turn.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import psutil
import ray
from absl import app, flags

import jaxpp
from benchmarks import launching, speedup
from benchmarks.empty_pipeline import EmptyPipeline
from benchmarks.equal_blocks import Loop, elapsed
from benchmarks.launched_pipeline import empty_loop

PARTS = ["empty", "launched", "threads", "speedup", "local", "memory"]

_PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "What to measure.")
_RANKS = flags.DEFINE_list("ranks", ["2", "4"], "Numbers of ranks, of empty pipelines.")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "32"], "Of empty pipelines.")
_WIDTH = flags.DEFINE_integer("width", 8, "Features of empty pipelines.", 1)
_TORCH_PYTHON = flags.DEFINE_string("torch_python", None, "A Python that has torch and NumPy.")
_TASK_MS = flags.DEFINE_list("task_ms", ["1", "5", "50"], "Lengths of tasks, for the speed-up.")
_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b", "eager_1f1b"], "For the speed-up.")
_SPEEDUP_MICROBATCHES = flags.DEFINE_integer("speedup_microbatches", 16, "For the speed-up.", 1)
_BLOCKS = flags.DEFINE_integer("blocks", 7, "How often what is compared takes turns.", 1)
_STEPS = flags.DEFINE_integer("steps", 50, "Empty steps in a block.", 1)
_MEMORY_STEPS = flags.DEFINE_integer("memory_steps", 2000, "Steps in a row, for the memory.", 10)
_JSON = flags.DEFINE_string("json", None, "A file to write the figures to.")


# ---- the empty pipeline -------------------------------------------------------------------------


def call_seconds(loop: Loop, steps: int) -> tuple[float, float]:
    """Medians of the seconds until a call returns, and until its loss is there."""
    returned, done = [], []
    for _ in range(steps):
        start = time.perf_counter()
        _, loss = loop()
        returned.append(time.perf_counter() - start)
        float(loss)
        done.append(time.perf_counter() - start)
    return statistics.median(returned), statistics.median(done)


@dataclasses.dataclass(frozen=True)
class Served:
    """The same program elsewhere: the loss of its first step, and what clocks some more."""

    first_loss: float
    seconds: Callable[[int], float]


@contextlib.contextmanager
def served(
    module: str, processes: Sequence["subprocess.Popen[str]"], first_loss: float
) -> Iterator[Served]:
    """Takes turns with processes that wait for lines: all get them, and the first one answers."""
    answers = processes[0].stdout
    assert answers is not None

    def answer() -> float:
        if not (line := answers.readline()):
            raise RuntimeError(f"{module} has ended with status {processes[0].wait()}.")
        return float(line)

    def seconds(steps: int) -> float:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return answer()

    try:
        loss = answer()
        if not math.isclose(first_loss, loss, rel_tol=1e-5):
            raise RuntimeError(f"The losses differ: {first_loss}, of {module} {loss}.")
        yield Served(loss, seconds)
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.wait()


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def flags_of(pipeline: EmptyPipeline) -> list[str]:
    return [f"--{name}={value}" for name, value in dataclasses.asdict(pipeline).items()]


def torch_pipeline(
    pipeline: EmptyPipeline, first_loss: float
) -> contextlib.AbstractContextManager[Served | None]:
    """Starts `torch_pipeline.py` with a Python that has torch, if there is one."""
    if not (python := _TORCH_PYTHON.value):
        return contextlib.nullcontext()
    command = [python, "-m", "benchmarks.torch_pipeline", "--serve", *flags_of(pipeline)]
    process = subprocess.Popen(command, text=True, cwd=launching.REPOSITORY, **PIPES)
    return served("torch_pipeline", [process], first_loss)


def launched_pipeline(
    pipeline: EmptyPipeline, first_loss: float
) -> contextlib.AbstractContextManager[Served]:
    """Starts `launched_pipeline.py`, a process for each rank."""
    command = [sys.executable, "-m", "benchmarks.launched_pipeline", *flags_of(pipeline)]
    processes = launching.launch(pipeline.ranks, command, **PIPES)
    return served("launched_pipeline", list(processes.values()), first_loss)


def empty_row(pipeline: EmptyPipeline, mesh: Any) -> dict[str, float]:
    """What an empty step takes in microseconds, and over that of torch where there is one."""
    loop, steps = empty_loop(pipeline, mesh), _STEPS.value
    first_loss = float(loop()[1])
    elapsed(loop, 10)
    ours: list[tuple[float, float]] = []
    theirs: list[float] = []
    with torch_pipeline(pipeline, first_loss) as torch:
        for _ in range(_BLOCKS.value):
            ours.append((call_seconds(loop, steps)[1], elapsed(loop, steps) / steps))
            if torch:
                theirs.append(torch.seconds(steps) / steps)
    call, in_loop = (1e6 * statistics.median(t) for t in zip(*ours, strict=True))
    row = {
        "ranks": pipeline.ranks,
        "microbatches": pipeline.microbatches,
        "call_us": call,
        "loop_us": in_loop,
        "call_us_per_task": call / pipeline.num_tasks,
        "loop_us_per_task": in_loop / pipeline.num_tasks,
    }
    if theirs:
        middle = 1e6 * statistics.median(theirs)
        row |= {"torch_us": middle, "call/torch": call / middle, "loop/torch": in_loop / middle}
        ratios = sorted(loop / torch for (_, loop), torch in zip(ours, theirs, strict=True))
        row |= {"loop/torch q1": ratios[len(ratios) // 4], "q3": ratios[-1 - len(ratios) // 4]}
    return row


def launched_row(pipeline: EmptyPipeline, mesh: Any) -> dict[str, float]:
    """What an empty step takes in a loop on launched processes, Ray's workers, and in torch."""
    loop, steps = empty_loop(pipeline, mesh), _STEPS.value
    first_loss = float(loop()[1])
    elapsed(loop, 10)
    with (
        launched_pipeline(pipeline, first_loss) as launched,
        torch_pipeline(pipeline, first_loss) as torch,
    ):
        if launched.first_loss != first_loss:
            raise RuntimeError(f"Launched processes have {launched.first_loss}, not {first_loss}.")
        clocks = {"launched": launched.seconds, "workers": lambda n: elapsed(loop, n)}
        clocks |= {"torch": torch.seconds} if torch else {}
        blocks = [
            {name: 1e6 * clock(steps) / steps for name, clock in clocks.items()}
            for _ in range(_BLOCKS.value + 1)
        ][1:]
    row: dict[str, float] = {"ranks": pipeline.ranks, "microbatches": pipeline.microbatches}
    row |= {f"{name}_us": statistics.median(block[name] for block in blocks) for name in clocks}
    for name in [*clocks][1:]:
        ratios = sorted(block["launched"] / block[name] for block in blocks)
        places = {"": len(ratios) // 2, " q1": len(ratios) // 4, " q3": -1 - len(ratios) // 4}
        row |= {f"launched/{name}{of}": ratios[place] for of, place in places.items()}
    return row


def empty_rows(row: Callable[[EmptyPipeline, Any], dict[str, float]]) -> list[dict[str, float]]:
    """A row of each size of the empty pipeline, with a mesh of workers."""
    if not _TORCH_PYTHON.value:
        print("torch is left out; --torch_python names a Python that has it")
    rows = []
    for ranks in map(int, _RANKS.value):
        with pinned_mesh(ranks) as mesh:
            for microbatches in map(int, _MICROBATCHES.value):
                rows.append(row(EmptyPipeline(ranks, microbatches, width=_WIDTH.value), mesh))
    return rows


def times_of_threads(process: Any) -> dict[str, tuple[float, ...]]:
    """By the names of a process's threads: microseconds on a core, of waiting for one, and sleeps.

    Threads of one name are added up. Runs in the process.
    """
    del process
    names = {t.native_id: t.name for t in threading.enumerate()}
    found: dict[str, tuple[float, ...]] = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), (task / "comm").read_text().strip())
        on_core, waiting, _ = map(int, (task / "schedstat").read_text().split())
        (sleeps,) = re.findall(r"\bvoluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text())
        before = found.get(name, (0.0, 0.0, 0.0))
        own = on_core / 1e3, waiting / 1e3, float(sleeps)
        found[name] = tuple(a + b for a, b in zip(before, own, strict=True))
    return found


def measure_threads() -> list[dict[str, Any]]:
    """What each thread does in an empty step; those under 10 us are left out."""
    rows: list[dict[str, Any]] = []
    for ranks in map(int, _RANKS.value):
        everybody = dict.fromkeys(range(ranks), ())
        with pinned_mesh(ranks) as mesh:
            for microbatches in map(int, _MICROBATCHES.value):
                loop = empty_loop(EmptyPipeline(ranks, microbatches, width=_WIDTH.value), mesh)
                elapsed(loop, 10)

                def now(mesh: Any = mesh, everybody: Any = everybody) -> dict[Any, Any]:
                    return mesh.apply(times_of_threads, everybody) | {
                        "driver": times_of_threads(None)
                    }

                steps, before = _BLOCKS.value * _STEPS.value, now()
                elapsed(loop, steps)
                for of, threads in now().items():
                    for name, figures in threads.items():
                        earlier = before[of].get(name, (0.0,) * len(figures))
                        took = [(b - a) / steps for a, b in zip(earlier, figures, strict=True)]
                        if took[0] >= 10:
                            rows.append(
                                {"ranks": ranks, "microbatches": microbatches, "of": str(of)}
                                | {"thread": name}
                                | dict(zip(("us", "us_waiting", "sleeps"), took, strict=True))
                            )
    return rows


def measure_local() -> list[dict[str, float]]:
    """The step on worker processes over the step on devices of this process."""
    rows = []
    for ranks in map(int, _RANKS.value):
        here = jaxpp.MpmdMesh((ranks,), ("mpmd",))
        with pinned_mesh(ranks) as there:
            for microbatches in map(int, _MICROBATCHES.value):
                pipeline = EmptyPipeline(ranks, microbatches, width=_WIDTH.value)
                loops = [empty_loop(pipeline, mesh) for mesh in (there, here)]
                blocks = [
                    [call_seconds(loop, _STEPS.value) for loop in loops]
                    for _ in range(_BLOCKS.value + 1)
                ]
                times = [  # for each mesh, the medians of dispatch and completion
                    [1e6 * statistics.median(t) for t in zip(*own, strict=True)]
                    for own in zip(*blocks[1:], strict=True)
                ]
                rows.append(
                    {
                        "ranks": ranks,
                        "microbatches": microbatches,
                        "dispatch_us": times[0][0],
                        "local_dispatch_us": times[1][0],
                        "dispatch": times[0][0] / times[1][0],
                        "call_us": times[0][1],
                        "local_call_us": times[1][1],
                        "call": times[0][1] / times[1][1],
                    }
                )
    return rows


# ---- two workers and one ------------------------------------------------------------------------


def measure_speedup() -> list[dict[str, float]]:
    rows = []
    schedules = {name: jaxpp.schedules.by_name(name) for name in _SCHEDULES.value}
    sizes = _SPEEDUP_MICROBATCHES.value, _BLOCKS.value
    with pinned_mesh(1) as one, pinned_mesh(2) as two:
        for task_ms in map(float, _TASK_MS.value):
            measured = speedup.measure(one, two, list(schedules.values()), task_ms / 1e3, *sizes)
            rows += [
                {
                    "task_ms": task_ms,
                    "schedule": name,
                    "forward_ms": 1e3 * found.shortest_task,
                    "backward_ms": 1e3 * found.longest_task,
                    "plain_ms": 1e3 * found.plain_step,
                    "placed_on_one_ms": 1e3 * found.placed_on_one,
                    "placed_on_two_ms": 1e3 * found.placed_on_two,
                    "speedup": found.measured,
                    "predicted": found.predicted(found.predicted_traced),
                    "speedup/predicted": found.predicted_traced / found.placed_on_two,
                    "predicted_alone": found.predicted(found.predicted_alone),
                    "speedup/predicted_alone": found.predicted_alone / found.placed_on_two,
                    "efficiency": found.efficiency,
                }
                for name, found in zip(schedules, measured, strict=True)
            ]
    return rows


# ---- memory -------------------------------------------------------------------------------------


def holdings(mesh: Any) -> dict[str, dict[str, float]]:
    """What driver, workers and Ray's object store hold: MiB, and numbers of open things."""
    pids = mesh.apply(pid_of, {rank: () for rank in range(mesh.num_ranks)})
    processes = {"driver": os.getpid()} | {f"rank {rank}": pid for rank, pid in pids.items()}
    found = {name: holdings_of(psutil.Process(pid)) for name, pid in processes.items()}
    time.sleep(2)  # nodes tell what they hold from time to time
    there, free = ray.cluster_resources(), ray.available_resources()
    store = there["object_store_memory"] - free["object_store_memory"]
    return found | {"object store": {"MiB": store / 2**20}}


def holdings_of(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "MiB": process.memory_info().rss / 2**20,
            "files": process.num_fds(),
            "sockets": len(process.net_connections("all")),
            "threads": process.num_threads(),
        }


def pid_of(process: Any) -> int:
    """The id of the worker's process; runs in it."""
    del process
    return os.getpid()


def measure_memory() -> list[dict[str, Any]]:
    """What is held after a tenth of the steps, and after all."""
    steps = _MEMORY_STEPS.value
    with pinned_mesh(2) as mesh:
        loop = empty_loop(EmptyPipeline(width=64), mesh)
        elapsed(loop, steps // 10)
        before = holdings(mesh)
        for _ in range(steps - steps // 10):
            float(loop()[1])
        after = holdings(mesh)
    return [
        {"of": who}
        | {f"{what} before": number for what, number in before[who].items()}
        | {f"{what} after": number for what, number in after[who].items()}
        for who in after
    ]


# ---- the run ------------------------------------------------------------------------------------


def make_devices() -> None:
    """Makes the devices of the local mesh."""
    jax.config.update("jax_num_cpu_devices", max(int(ranks) for ranks in _RANKS.value))


def pinned_mesh(ranks: int) -> Any:
    """A worker for each rank, which the workers' host gives a core each, in turn."""
    return jaxpp.RemoteMpmdMesh((ranks,), ("mpmd",), cores=1)


def show(part: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(f"{part}:")
    cells = [columns, *([cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)), flush=True)


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def main(_: list[str]) -> None:
    make_devices()
    measures = {
        "empty": functools.partial(empty_rows, empty_row),
        "launched": functools.partial(empty_rows, launched_row),
        "threads": measure_threads,
        "speedup": measure_speedup,
        "local": measure_local,
        "memory": measure_memory,
    }
    print(f"JAX {jax.__version__}, Ray {ray.__version__}, {os.cpu_count()} cores")
    figures = {}
    for part in _PARTS.value:
        figures[part] = measures[part]()
        show(part, figures[part])
        if _JSON.value:
            pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    app.run(main)
