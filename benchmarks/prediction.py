"""How far predictions are from what is measured: the bytes of ranks, and the time of a step.

    python -m benchmarks.prediction
    python -m benchmarks.prediction --programs=gpt,llama2 --schedules=1f1b --parts=local

- `memory`: for each program, schedule and policy, the most bytes of arrays that a rank's device
  holds in a step whose instructions run one after the other, over what the walk over its program
  says: the worst rank.
- `local`: the time of a step on the local mesh over what `predict` makes of the times of its tasks
  that `measure` found in the same minutes. There are two ranks, and tasks of 4 ms or more;
- `workers`: the same on two worker processes, each pinned to a core, from the times of a trace.
"""

import contextlib
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
from absl import app, flags

import jaxpp
from experiments import train_lm
from experiments.training import data
from experiments.training.config import Config
from jaxpp.planning._measure import _execute, _loaded, _placed_copies
from jaxpp.runtime.arrays import devices_of
from jaxpp.runtime.executor import held_bytes, over_time
from jaxpp.runtime.executor._compile import clear_cache

ZOO = dict(width=32, kv_heads=2, head_width=8, mlp_width=64, heads=4, layers=8)
#: The programs, by name: fields of a `Config`.
PROGRAMS: dict[str, dict[str, Any]] = {
    "gpt": dict(),
    "gpt_wide": dict(width=128),
    "gpt_tied": dict(tied=True),
    "gpt_dropout": dict(dropout=0.1),
    "gpt_bfloat16": dict(dtype="bfloat16"),
    "gpt_sgd": dict(optimizer="sgd"),
    "gpt_long": dict(sequence_length=256, batch_size=8),
    "gpt_marks": dict(cut="annotation"),
    "gpt2": dict(model="gpt2", vocabulary=512),
    "llama2": dict(model="llama2", vocabulary=512, **ZOO),
    "mistral": dict(model="mistral", vocabulary=512, window=16, **ZOO),
    "mixtral": dict(model="mixtral", vocabulary=512, **ZOO),
}
#: The sizes of programs whose time is predicted.
TIMED: dict[str, Any] = dict(ranks=2, layers=4, width=128, sequence_length=128, batch_size=64)
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Which programs.")
_SCHEDULES = flags.DEFINE_list(
    "schedules", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"], "Which schedules."
)
_REMAT = flags.DEFINE_list("remat", ["none", "full"], "What is computed again.")
PARTS = ["memory", "local", "workers"]
_PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "Which parts.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks, for the memory.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often to measure; the median counts.", 1)
_JSON = flags.DEFINE_string("json", None, "A file to write the figures to.")


def live_bytes(device: Any) -> int:
    """The bytes of all arrays of a device; two of them may be one buffer."""
    buffers: dict[int, int] = {}
    for array in jax.live_arrays():
        parts = [array] if len(array.devices()) == 1 else [s.data for s in array.addressable_shards]
        for part in parts:
            if part.is_deleted() or part.sharding.memory_kind == "pinned_host":
                continue
            if part.nbytes and device in part.devices():
                buffers[part.unsafe_buffer_pointer()] = part.nbytes
    return sum(buffers.values())


def memory_peaks(step: Any, args: Any) -> tuple[list[int], list[int]]:
    """The most bytes that each rank's device holds: those measured, and those predicted."""
    local, arrays = _loaded(step, args)
    devices = [devices_of(home)[0] for home in local.homes]
    jax.block_until_ready(local(_placed_copies(local, arrays)))
    before = [live_bytes(device) for device in devices]
    peaks = [0] * len(devices)

    def one_by_one():
        for rank, chunk in local.order:
            for instruction in chunk:
                _execute(local, rank, instruction)
                for n, device in enumerate(devices):
                    peaks[n] = max(peaks[n], live_bytes(device) - before[n])

    local(_placed_copies(local, arrays), one_by_one)
    held = held_bytes(local.bundle, local.inspect())
    held = [h for h in held if h.kind not in ("temporary", "host")]
    predicted = [
        max(now.total() for _, now in over_time(h for h in held if h.rank == rank))
        for rank in range(len(devices))
    ]
    return peaks, predicted


def memory_ratio(step: Any, args: Any) -> float:
    """What is measured over what is predicted, of the rank where these are furthest apart."""
    ratios = [peak / own for peak, own in zip(*memory_peaks(step, args), strict=True)]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def make(config: Config, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step on a mesh, and its arguments."""
    step = train_lm.make_pipeline(config, mesh)[0]
    batch: Any = next(train_lm.training_batches(config, data.load()))
    return step, (*train_lm.initial_state(config), *batch)


def local_ratio(config: Config, mesh: Any) -> float:
    """The measured step over the prediction, on devices of this process."""
    step, args = make(config, mesh)
    measured = jaxpp.measure(step, *args, repeats=_REPEATS.value)
    return measured.step / jaxpp.predict(step, *args, costs=measured).seconds


def workers_ratio(config: Config, mesh: Any) -> float:
    """The same on worker processes: the prediction is that of a trace between the steps."""
    step, (*state, tokens, keys) = make(config, mesh)

    def seconds(steps: int) -> float:
        nonlocal state
        start, loss = time.perf_counter(), 0.0
        for _ in range(steps):
            *state, loss = step(*state, tokens, keys)
        float(loss)
        return (time.perf_counter() - start) / steps

    seconds(2)
    ratios = []
    for _ in range(_REPEATS.value):
        before = seconds(3)
        with tempfile.TemporaryDirectory() as folder:
            mesh.start_trace(folder)
            seconds(3)
            trace = mesh.stop_trace()
        predicted = jaxpp.predict(step, *state, tokens, keys, costs=trace).seconds
        ratios.append((before + seconds(3)) / 2 / predicted)
    return statistics.median(ratios)


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        meshes: dict[str, Any] = {
            "memory": jaxpp.MpmdMesh((_RANKS.value,)),
            "local": jaxpp.MpmdMesh((TIMED["ranks"],)),
        }
        if "workers" in _PARTS.value:
            workers = jaxpp.RemoteMpmdMesh((TIMED["ranks"],), cores=1)
            meshes["workers"] = stack.enter_context(workers)
        print(
            f"{'program':14}{'schedule':20}{'remat':7}" + "".join(f"{p:>9}" for p in _PARTS.value)
        )
        for name, remat, schedule in itertools.product(
            _PROGRAMS.value, _REMAT.value, _SCHEDULES.value
        ):
            row: dict[str, Any] = {"program": name, "schedule": schedule, "remat": remat}
            fields: dict[str, Any] = PROGRAMS[name] | {"schedule": schedule, "remat": remat}
            for part in _PARTS.value:
                if part == "memory":
                    small = Config(**fields, ranks=_RANKS.value)
                    row[part] = memory_ratio(*make(small, meshes[part]))
                else:
                    ratio = local_ratio if part == "local" else workers_ratio
                    row[part] = ratio(Config(**fields | TIMED), meshes[part])
            rows.append(row)
            # A process may have so many memory mappings, and each executable takes some.
            clear_cache()
            jax.clear_caches()
            print(f"{name:14}{schedule:20}{remat:7}"
                  + "".join(f"{row[part]:9.3f}" for part in _PARTS.value), flush=True)  # fmt: skip
    for part in _PARTS.value:
        own = [row[part] for row in rows]
        print(f"{part}: median {statistics.median(own):.3f}, from {min(own):.3f} to {max(own):.3f}")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    app.run(main)
