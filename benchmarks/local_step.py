"""Measures a placed step against what it is made of, as ratios in one run.

Prints, for small, medium and large tasks:

- for each schedule, a placed step on a device per rank over the plain single-device step, which
  accumulates the same gradients by a scan (it uses all cores too: 1 is the best that a busy machine
  gives), by turns, with the quartiles; schedules with more stages than blocks are left out.

And for the first of the schedules:

- `host`: the time to dispatch a step over that of a straight-line Python script of the same
  jitted calls and transfers; on a line of its own also over the floor, which is as many jitted
  calls that do next to nothing, of as many arrays, without transfers, with the quartiles;
- `tasks`: a placed step with all ranks on one device over the sum of its computations' own times;
- `first`: the first call (trace, lower, compile, run) over the plain step's;
- `memory`: the most bytes that a rank holds during a step over the closed form: arguments and
  accumulators, and the schedule's number of activations.

And for the first call: how tracing and lowering grow with the number of microbatches.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import Loop, copy, draw, elapsed, placed_step, plain_step, seconds
from jaxpp import _compat
from jaxpp._program import Bundle, Free, Receive, Run, Send
from jaxpp.planning._measure import _loaded as loaded
from jaxpp.runtime.executor import _compile, _executor, held_bytes, over_time
from jaxpp.runtime.transport import _near

FLAGS = flags.FLAGS
flags.DEFINE_integer("ranks", 4, "Pipeline ranks.")
flags.DEFINE_integer("microbatches", 8, "Microbatches in a step.")
flags.DEFINE_list("schedules", ["1f1b", "zb_h1", "interleaved_1f1b"], "Names of schedules.")
flags.DEFINE_integer("repeats", 15, "Timed repetitions; the median counts.")
flags.DEFINE_list("sizes", ["small", "medium", "large"], "Which sizes to measure.")
flags.DEFINE_string("json", None, "A file to write the figures to.")


@dataclasses.dataclass(frozen=True)
class Size:
    """The width of blocks, the examples of a microbatch, and the blocks of each rank."""

    width: int
    examples: int
    blocks: int


#: Tasks take next to nothing, a few milliseconds, and about ten.
SIZES = {"small": Size(16, 4, 1), "medium": Size(256, 64, 2), "large": Size(512, 128, 1)}


def local_step(
    schedule: Any, ranks: int, microbatches: int, optimizer: Any, blocks: int, devices: Any = None
) -> Any:
    """The placed step on devices of this process, by default one for each rank."""
    mesh = jaxpp.MpmdMesh((ranks,), ("mpmd",), devices=devices)
    stages = ranks * schedule.stages_per_rank
    return placed_step(schedule, stages, microbatches, optimizer, mesh, blocks * ranks)


# ---- what a step is made of ---------------------------------------------------------------------


def straight_line(bundle: Bundle, devices: Any) -> Callable:
    """A step as a script without a loop, lists or checks: one line for each call and transfer.

    A function from the arguments to the results, both by rank and number.
    """
    executables = _compile.compile_all(bundle, devices)
    names: dict[str, Any] = {}
    lines: list[str] = []
    mail: dict[int, str] = {}
    for rank, chunk in _executor.interleave(bundle.programs):
        for instruction in chunk:
            match instruction:
                case Run(number, inputs, outputs):
                    names[f"call{rank}_{number}"] = executables[rank][number]
                    left = ", ".join(f"s{rank}_{i}" for i in outputs)
                    right = ", ".join(f"s{rank}_{i}" for i in inputs)
                    lines.append(f"[{left}] = call{rank}_{number}({right})")
                case Send(slots, message):
                    values = ", ".join(f"s{rank}_{i}" for i in slots)
                    mail[message.tag] = f"m{message.tag}"
                    names[f"put{message.target}"] = _compat.copier_to(devices[message.target])
                    same = devices[message.target] is devices[rank]
                    lines.append(
                        f"m{message.tag} = [{values}]"
                        if same
                        else f"m{message.tag} = put{message.target}([{values}])"
                    )
                case Receive(slots, message):
                    left = ", ".join(f"s{rank}_{i}" for i in slots)
                    lines.append(f"[{left}] = m{message.tag}; del m{message.tag}")
                case Free(slots):
                    lines.append("; ".join(f"s{rank}_{i} = None" for i in slots))
    loads, results = [], []
    for program, device in zip(bundle.programs, devices, strict=True):
        rank = program.rank
        for slot, value in program.constants:
            names[f"c{rank}_{slot}"] = jax.device_put(value, device)
            loads.append(f"s{rank}_{slot} = c{rank}_{slot}")
        loads.extend(f"s{rank}_{slot} = arguments[{rank}, {n}]" for n, slot in program.inputs)
        results.extend(f"({rank}, {n}): s{rank}_{slot}" for n, slot in program.outputs)
    body = [*loads, *lines, f"return {{{', '.join(results)}}}"]
    exec("def step(arguments):\n" + "\n".join(f"    {line}" for line in body), names)  # noqa: S102
    return names["step"]


def floor(bundle: Bundle, device: Any) -> Callable[[], None]:
    """As many jitted calls as a step has, of as many arrays each, that do next to nothing.

    Without transfers.
    """

    @functools.cache
    def jitted(outputs: int) -> Callable:
        own = lambda *xs: [sum(xs[:1], start=jnp.float32(n)) for n in range(outputs)]  # noqa: E731
        return jax.jit(own, keep_unused=True)

    array = jax.device_put(jnp.float32(1), device)
    runs = [i for p in bundle.programs for i in p.instructions if isinstance(i, Run)]
    calls = [(jitted(len(i.outputs)), [array] * len(i.inputs)) for i in runs]

    def run() -> None:
        for function, arguments in calls:
            function(*arguments)

    return run


def host_seconds(step: Any, state: tuple, batch: Any, repeats: int) -> dict[str, list[float]]:
    """Host times of a placed step, of the straight-line script and of the floor, by turns.

    Without the waits for devices that lag behind, which the script does not have.
    """
    waits, _near.RUN_AHEAD = _near.RUN_AHEAD, sys.maxsize
    try:
        return _host_seconds(step, state, batch, repeats)
    finally:
        _near.RUN_AHEAD = waits


def _host_seconds(step: Any, state: tuple, batch: Any, repeats: int) -> dict[str, list[float]]:
    loop = Loop(step, state, batch)
    jax.block_until_ready(loop())
    bundle, devices = step.bundle, step.mesh.devices
    script, calls = straight_line(bundle, devices), floor(bundle, devices[0])
    leaves = [x for x in jax.tree.leaves((*copy(state), batch)) if eqx.is_array(x)]
    arguments = {
        (program.rank, n): jax.device_put(jnp.copy(leaves[n]), device)
        for program, device in zip(bundle.programs, devices, strict=True)
        for n, _ in program.inputs
    }
    # Argument n of the next step is result n: the model and the optimizer's state come first.
    fed_back = [key for key in arguments if key[1] in bundle.donated]

    def run_script() -> None:
        results = script(arguments)
        arguments.update((key, results[key]) for key in fed_back)

    runs = {"placed": loop, "script": run_script, "floor": calls}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            jax.block_until_ready((loop.state, arguments))
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: own[1:] for name, own in times.items()}


def quartiles(values: Sequence[float]) -> str:
    """Writes the median, and the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}, {high:.2f})"


def task_seconds(bundle: Bundle, device: Any, repeats: int) -> float:
    """The sum of a step's computations' own times on one device, run by run."""
    executables = _compile.compile_all(bundle, [device] * len(bundle.programs))
    total = 0.0
    counts: dict[int, int] = {}
    for program in bundle.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                counts[instruction.computation] = counts.get(instruction.computation, 0) + 1
    for own in executables:
        for number, executable in own.items():
            if number not in counts:
                continue
            computation = bundle.computations[number]
            avals = [v.aval for v in computation.jaxpr.jaxpr.invars]
            times = []
            for _ in range(repeats):
                args = [jax.device_put(jnp.ones(a.shape, a.dtype), device) for a in avals]
                jax.block_until_ready(args)
                start = time.perf_counter()
                jax.block_until_ready(executable(*args))
                times.append(time.perf_counter() - start)
            total += counts.pop(number) * statistics.median(times)
    return total


def memory_ratio(step: Any, args: Any, table: Any) -> float:
    """The largest ratio, over ranks, of the most bytes held to the closed form.

    An activation is what the first forward task leaves behind: what its backward task reads.
    """
    local, _ = loaded(step, args)
    numbers, firsts = itertools.count(), dict[int, float]()

    def when(rank: int, run: Run, _: float) -> tuple[float, float]:
        start = float(next(numbers))
        if run.label.startswith("F"):
            firsts.setdefault(rank, start)
        return start, start + 1

    passing = ("temporary", "messages")
    held = [h for h in held_bytes(local.bundle, local.inspect(), when) if h.kind not in passing]
    ratios = []
    for rank, in_flight in enumerate(table.peak_in_flight()):
        mine = [h for h in held if h.rank == rank]
        kept = [h for h in mine if h.kind == "activations"]
        first = firsts[rank]
        static = sum(h.nbytes for h in mine if h not in kept and h.start < first < h.end)
        activation = sum(h.nbytes for h in kept if h.start <= first and h.end > first + 1)
        peak = max(now.total() for _, now in over_time(mine))
        ratios.append(peak / (static + in_flight * activation))
    return max(ratios)


# ---- the report ---------------------------------------------------------------------------------


def measure(
    size: str, ranks: int, microbatches: int, schedules: dict[str, Any], repeats: int
) -> dict[str, float]:
    width, examples, blocks = dataclasses.astuple(SIZES[size])
    optimizer = optax.adamw(1e-3)
    state, batch = draw(ranks * blocks, width, examples * microbatches, optimizer)

    def first_call(step) -> tuple[float, Loop]:
        loop = Loop(step, state, batch)
        start = time.perf_counter()
        jax.block_until_ready(loop())
        return time.perf_counter() - start, loop

    plain_first, plain = first_call(plain_step(microbatches, optimizer, state))
    steps = {
        name: local_step(schedule, ranks, microbatches, optimizer, blocks)
        for name, schedule in schedules.items()
        if schedule.stages_per_rank <= blocks
    }
    (name, spread), *others = steps.items()
    schedule = schedules[name]
    first, loop = first_call(spread)
    loops = {name: loop} | {other: first_call(step)[1] for other, step in others}
    times = [[elapsed(run) for run in (plain, *loops.values())] for _ in range(repeats + 1)][1:]
    ratios = {own: [row[n] / row[0] for row in times] for n, own in enumerate(loops, 1)}
    for own, found in ratios.items():
        print(f"{size}: {own} over the plain step: {quartiles(found)}", flush=True)
    shared_devices = [jax.devices()[0]] * ranks
    shared = local_step(schedule, ranks, microbatches, optimizer, blocks, shared_devices)
    host = host_seconds(spread, state, batch, repeats)
    mine, script, least = host["placed"], host["script"], host["floor"]
    shared_seconds = seconds(Loop(shared, state, batch), repeats)
    tasks = task_seconds(spread.bundle, jax.devices()[0], repeats)
    num_tasks = sum(len(p) for p in schedule.table(ranks, microbatches).ranks)
    runs = [i for p in spread.bundle.programs for i in p.instructions if isinstance(i, Run)]
    arrays = sum(len(i.inputs) + len(i.outputs) for i in runs) / len(runs)
    print(
        f"{size}: dispatch of a task, of {arrays:.0f} arrays, with its messages: "
        f"{quartiles([1e6 * t / num_tasks for t in mine])} us; "
        f"{quartiles([a / b for a, b in zip(mine, script, strict=True)])} of the script; "
        f"{quartiles([a / b for a, b in zip(mine, least, strict=True)])} of the floor"
    )
    return {
        "task_ms": 1e3 * tasks / num_tasks,
        "step": statistics.median(ratios[name]),
        "host": statistics.median(mine) / statistics.median(script),
        "host_us_per_task": 1e6 * statistics.median(mine) / num_tasks,
        "tasks": shared_seconds / tasks,
        "first": first / plain_first,
        "first_s": first,
        "memory": memory_ratio(spread, (*state, batch), schedule.table(ranks, microbatches)),
    }


def lowering_seconds(ranks: int, schedule: Any) -> dict[int, float]:
    """Seconds to trace and lower the small step, by the number of microbatches."""
    times = {}
    for microbatches in (4, 8, 16, 32, 64):
        width, examples, blocks = dataclasses.astuple(SIZES["small"])
        optimizer = optax.adamw(1e-3)
        state, batch = draw(ranks * blocks, width, examples * microbatches, optimizer)
        step = local_step(schedule, ranks, microbatches, optimizer, blocks)
        start = time.perf_counter()
        step.lower(*state, batch)
        times[microbatches] = time.perf_counter() - start
    return times


def main(_):
    jax.config.update("jax_num_cpu_devices", FLAGS.ranks)
    schedules = {name: jaxpp.schedules.by_name(name) for name in FLAGS.schedules}
    print(f"JAX {jax.__version__}, {FLAGS.ranks} ranks, {FLAGS.microbatches} microbatches")
    figures = {}
    columns = None
    for size in FLAGS.sizes:
        row = measure(size, FLAGS.ranks, FLAGS.microbatches, schedules, FLAGS.repeats)
        if columns is None:
            columns = list(row)
            print(f"{'':8}" + "".join(f"{c:>18}" for c in columns))
        print(f"{size:8}" + "".join(f"{row[c]:18.3f}" for c in columns), flush=True)
        figures[size] = row
    lowering = lowering_seconds(FLAGS.ranks, next(iter(schedules.values())))
    print("trace and lower, s:", ", ".join(f"M={m}: {t:.2f}" for m, t in lowering.items()))
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(figures | {"lowering_s": lowering}, file, indent=2)


if __name__ == "__main__":
    app.run(main)
