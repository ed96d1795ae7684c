"""How far predictions are from what is measured: the bytes of ranks, and the time of a step.

    python -m benchmarks.prediction
    python -m benchmarks.prediction --programs=gpt,llama2 --schedules=1f1b --parts=time

- `memory`: for each program, schedule and policy, the most bytes of arrays that a rank's device
  holds in a step whose instructions run one after the other, over what the walk over its program
  says: the worst rank.
- `time`: the time of a step on the local mesh over what `predict` makes of the times that `measure`
  found, of this schedule and, for all but the first, of the first one.

Ranks are CPU devices of this process.
"""

import itertools
import json
import statistics
from typing import Any

import jax
from absl import app, flags

import jaxpp
from experiments import train_lm
from experiments.training import data
from experiments.training.config import Config
from jaxpp.planning._measure import _execute, _loaded, _placed_copies
from jaxpp.runtime.executor import held_bytes, over_time

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
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Which programs.")
_SCHEDULES = flags.DEFINE_list(
    "schedules", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"], "Which schedules."
)
_REMAT = flags.DEFINE_list("remat", ["none", "full"], "What is computed again.")
_PARTS = flags.DEFINE_multi_enum("parts", ["memory", "time"], ["memory", "time"], "Which parts.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks, each a CPU device.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often to measure; the median counts.", 1)
_JSON = flags.DEFINE_string("json", None, "A file to write the figures to.")


def live_bytes(device: Any) -> int:
    """The bytes of all arrays of a device; two of them may be one buffer."""
    buffers: dict[int, int] = {}
    for array in jax.live_arrays():
        parts = [array] if len(array.devices()) == 1 else [s.data for s in array.addressable_shards]
        for part in parts:
            if not part.is_deleted() and part.nbytes and device in part.devices():
                buffers[part.unsafe_buffer_pointer()] = part.nbytes
    return sum(buffers.values())


def memory_ratio(step: Any, args: Any) -> float:
    """What is measured over what is predicted, of the rank where these are furthest apart."""
    local, arrays = _loaded(step, args)
    devices = local.homes
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
    held = [h for h in held_bytes(local.bundle, local.inspect()) if h.kind != "temporary"]
    predicted = [
        max(now.total() for _, now in over_time(h for h in held if h.rank == rank))
        for rank in range(len(devices))
    ]
    ratios = [peak / own for peak, own in zip(peaks, predicted, strict=True)]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    mesh, rows = jaxpp.MpmdMesh((_RANKS.value,)), list[dict[str, Any]]()
    print(f"{'program':14}{'schedule':20}{'remat':7}{'memory':>8}{'time':>8}{'from first':>12}")
    for name, remat in itertools.product(_PROGRAMS.value, _REMAT.value):
        first = None
        for schedule in _SCHEDULES.value:
            config = Config(**PROGRAMS[name], ranks=_RANKS.value, schedule=schedule, remat=remat)
            step = train_lm.make_pipeline(config, mesh)[0]
            batch: Any = next(train_lm.training_batches(config, data.load()))
            args = (*train_lm.initial_state(config), *batch)
            row: dict[str, Any] = {"program": name, "schedule": schedule, "remat": remat}
            if "memory" in _PARTS.value:
                row["memory"] = memory_ratio(step, args)
            if "time" in _PARTS.value:
                measured = jaxpp.measure(step, *args, repeats=_REPEATS.value)
                row["time"] = measured.step / jaxpp.predict(step, *args, costs=measured).seconds
                try:
                    if first is not None:
                        predicted = jaxpp.predict(step, *args, costs=first)
                        row["from_first"] = measured.step / predicted.seconds
                except ValueError:  # it has other stages
                    pass
                first = first or measured
            rows.append(row)
            shown = (
                f"{row[key]:.3f}" if key in row else "-" for key in ("memory", "time", "from_first")
            )
            print(
                f"{name:14}{schedule:20}{remat:7}" + "".join(f"{x:>9}" for x in shown), flush=True
            )
    for key in ("memory", "time", "from_first"):
        if own := [row[key] for row in rows if key in row]:
            print(
                f"{key}: median {statistics.median(own):.3f}, from {min(own):.3f} to {max(own):.3f}"
            )
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    app.run(main)
