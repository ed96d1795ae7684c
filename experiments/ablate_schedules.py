"""Compares schedules: how much of the time is bubble, for how much memory, and is it so when run?

    python -m experiments.ablate_schedules
    python -m experiments.ablate_schedules --ranks=4,8 --microbatches=8,16 --latency=0.1
    python -m experiments.ablate_schedules --ranks=2 --microbatches=8 --measure
    python -m experiments.ablate_schedules --compare=outputs/ablate_schedules/results.csv
    python -m experiments.ablate_schedules --ranks=2 --schedules=1f1b,benchmarks.irregular:Irregular

Every schedule of the catalogue, and tables that are synthesized under several caps of memory, are
simulated for each number of ranks and microbatches. With `--measure` each also trains a small GPT
on this machine: its tasks are measured one by one, the simulator gets their times, and what it
predicts is compared with what the step takes. Costs are those of a rank's whole share of one
microbatch, and memory is in such shares, whatever the number of stages on a rank.

`--schedules` takes schedules of your own by their modules, as in the last line. `--model` names a
function to measure with in the place of the GPT, as `my_module:my_model`: `my_model(key,
num_microbatches)` returns a loss function of a model and a batch, the model, and a batch;
`split_stages` cuts the loss function. With `--mesh=ray` ranks are worker processes, and steps are
timed as wholes.

The output folder gets `results.csv` and pictures: bubble against memory, with the Pareto front,
and predicted against measured time.
"""

import csv
import dataclasses
import functools
import importlib
import itertools
import math
import os
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import optax
import tqdm
from absl import app, flags

import jaxpp
from experiments.models import gpt, sliced_gpt
from jaxpp.schedules import Comparison, Costs, Machine, Memory, Seq1F1B

NAMES = [name for name in jaxpp.schedules.CATALOGUE if name != "forward_only"]

_SCHEDULES = flags.DEFINE_string(
    "schedules",
    ",".join(NAMES),
    "Schedules, with commas between, each as jaxpp.schedules.by_name takes it; empty to synthesize "
    "only.",
)
_RANKS = flags.DEFINE_list("ranks", ["4", "8"], "Numbers of ranks.")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "16"], "Numbers of microbatches.")

_FORWARD = flags.DEFINE_float("forward", 1.0, "Time of a forward.", 0.0)
_INPUT_GRAD = flags.DEFINE_float("input_grad", 1.0, "Time of an input gradient.", 0.0)
_WEIGHT_GRAD = flags.DEFINE_float("weight_grad", 1.0, "Time of a weight gradient.", 0.0)
_BACKWARD = flags.DEFINE_float(
    "backward", None, "Time of a whole backward; by default that of its halves.", 0.0
)
_LATENCY = flags.DEFINE_float("latency", 0.0, "Time of a transfer between ranks.", 0.0)
_TRANSFER = flags.DEFINE_float(
    "transfer", 0.0, "Time for which a transfer keeps its link busy, beside --latency.", 0.0
)
_SHARED_LINKS = flags.DEFINE_bool("shared_links", False, "Whether transfers of a link take turns.")
_BLOCKING_SENDS = flags.DEFINE_bool(
    "blocking_sends", False, "Whether ranks wait until what they send has arrived."
)
_SPEEDS = flags.DEFINE_list("speeds", [], "The speed of each rank; by default all have 1.")
_UPDATE = flags.DEFINE_float(
    "update", 0.0, "Time of a rank's gradient reduction and optimizer, after its last task.", 0.0
)
_OVERLAP = flags.DEFINE_enum(
    "overlap", "atomic", ["atomic", "free", "none"], "What tasks that may overlap do."
)
_FORWARD_MEMORY = flags.DEFINE_float("forward_memory", 1.0, "What a forward keeps.", 0.0)
_INPUT_GRAD_MEMORY = flags.DEFINE_float(
    "input_grad_memory", 0.0, "What an input gradient keeps, or frees; its weights' frees the rest."
)

_CAPS = flags.DEFINE_list(
    "caps",
    ["0.5", "0.75", "1", "1.5", "2"],
    "Memory caps to synthesize tables for, in shares for each rank of the pipeline: the cap 1 is "
    "what 1F1B takes. Empty to synthesize none.",
)
_PLACEMENTS = flags.DEFINE_multi_enum(
    "placement",
    ["chain", "v"],
    ["chain", "v", "loop"],
    "Where synthesized tables have their stages: one on a rank, or two, as a V or a loop.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the synthesizer, the model and the batch.")

_MEASURE = flags.DEFINE_bool("measure", False, "Whether to run the schedules on this machine.")
_MODEL = flags.DEFINE_string(
    "model", None, "package.module:function of a model to measure with, in the place of the GPT."
)
_MESH = flags.DEFINE_enum("mesh", "local", ["local", "ray"], "Devices or worker processes.")
_LAYERS = flags.DEFINE_list("layers", ["16"], "Numbers of Transformer blocks, to measure with.")
_WIDTH = flags.DEFINE_integer("width", 64, "Features of each position.", 1)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 64, "In bytes.", 1)
_SEQUENCES = flags.DEFINE_integer("sequences", 2, "Sequences in a microbatch.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often to measure; the median counts.", 1)
_SHARE_DEVICE = flags.DEFINE_bool(
    "share_device", False, "Whether all ranks share one device, on which their tasks take turns."
)

_OUTPUT = flags.DEFINE_string("output", "outputs/ablate_schedules", "Folder for the results.")
_COMPARE = flags.DEFINE_string("compare", None, "The results.csv of another run.")

HEADS = 4


@dataclasses.dataclass(frozen=True)
class Row(Comparison):
    """A comparison, and what the schedule took when it was run.

    Simulated times are in units of the flags, measured ones in seconds.
    """

    layers: int | None = None
    gap: float | None = None
    shortest_task: float | None = None
    predicted: float | None = None
    predicted_from_tasks_alone: float | None = None
    measured: float | None = None
    fastest: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.schedule, self.ranks, self.microbatches, self.layers

    @property
    def is_synthesized(self) -> bool:
        return self.schedule.startswith("synthesized")

    @property
    def error(self) -> float | None:
        """How much the prediction is above the measured time, as a part of it."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1


# ---- what is simulated --------------------------------------------------------------------------


def costs() -> Costs:
    """The time of a rank's tasks."""
    return Costs(
        _FORWARD.value,
        _INPUT_GRAD.value,
        _WEIGHT_GRAD.value,
        _BACKWARD.value,
        latency=_LATENCY.value,
        bandwidth=1.0,
        edge_bytes=_TRANSFER.value,
    )


def memory() -> Memory:
    """What a rank's tasks hold."""
    forward, input_grad = _FORWARD_MEMORY.value, _INPUT_GRAD_MEMORY.value
    return Memory(forward, input_grad, -(forward + input_grad))


def machine() -> Machine:
    """The ranks and links that are simulated."""
    return Machine(
        speed=[float(speed) for speed in _SPEEDS.value] or 1.0,
        shared_links=_SHARED_LINKS.value,
        blocking_sends=_BLOCKING_SENDS.value,
        optimizer=_UPDATE.value,
    )


def simulated(name: str, schedule: Any, ranks: int, microbatches: int) -> tuple[Row, Any]:
    """The row of a schedule and the schedule, or the reason that there is none of this size."""
    overlap: Any = _OVERLAP.value
    (found,) = jaxpp.schedules.compare(
        {name: schedule},
        ranks,
        microbatches,
        costs(),
        memory=memory(),
        overlap=overlap,
        machine=machine(),
    )
    return Row(**dataclasses.asdict(found)), None if found.reason else schedule


def synthesized(placement: str, cap: float, ranks: int, microbatches: int) -> tuple[Row, Any]:
    """The row of a table made for a memory cap, and the table as a schedule."""
    name = f"synthesized {placement} {cap:g}"
    down, up = list(range(ranks)), list(reversed(range(ranks)))
    rank_of_stage = {"chain": down, "v": down + up, "loop": down + down}[placement]
    try:
        found = jaxpp.schedules.synthesize(
            costs(),
            rank_of_stage,
            microbatches,
            memory=memory(),
            memory_limit=cap * ranks,
            seed=_SEED.value,
        )
    except ValueError as error:
        return Row(name, ranks, microbatches, reason=str(error)), None
    row, schedule = simulated(name, found.schedule, ranks, microbatches)
    return dataclasses.replace(row, gap=found.gap), schedule


def grid() -> Iterator[Callable[[], tuple[Row, Any]]]:
    """What makes each row of the simulation, and its schedule."""
    for ranks, microbatches in sizes():
        for name, schedule in named_schedules().items():
            yield lambda n=name, s=schedule, p=ranks, m=microbatches: simulated(n, s, p, m)
        for placement, cap in itertools.product(_PLACEMENTS.value, _CAPS.value):
            yield lambda n=placement, c=float(cap), p=ranks, m=microbatches: synthesized(n, c, p, m)


def named_schedules() -> dict[str, Any]:
    """The schedules of the flags, by the names they have there."""
    names = [n.strip() for n in re.split(r",(?![^(]*\))", _SCHEDULES.value)]
    return {name: jaxpp.schedules.by_name(name) for name in names if name}


def sizes() -> list[tuple[int, int]]:
    """Each number of ranks with each number of microbatches."""
    return [(int(p), int(m)) for p in _RANKS.value for m in _MICROBATCHES.value]


# ---- what is measured ---------------------------------------------------------------------------


def measured(row: Row, schedule: Any, layers: int) -> Row:
    """A row with what the schedule takes when it trains a GPT, and what was predicted."""
    assert row.stages_per_rank is not None
    num_stages = row.ranks * row.stages_per_rank
    if _MODEL.value:
        make = own_model(_MODEL.value)
        loss_fn, model, batch = make(jax.random.key(_SEED.value), row.microbatches)
        loss_fn = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=num_stages))
    else:
        row = dataclasses.replace(row, layers=layers)
        groups = row.ranks if isinstance(schedule, Seq1F1B) else num_stages
        if groups > layers:
            return dataclasses.replace(
                row, reason=f"{groups} stages need as many blocks, got --layers={layers}"
            )
        model, batch = gpt_model(layers, row.microbatches)
        loss_fn = staged_loss(schedule, row, layers)
    optimizer = optax.adamw(1e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = train_step_of(optimizer, row, schedule, loss_fn)
    if _MESH.value == "ray":
        with jaxpp.RemoteMpmdMesh((row.ranks,), ("mpmd",)) as mesh:
            times = step_times(
                jaxpp.place(step, mesh, donate_argnums=(0, 1)), model, opt_state, batch
            )
        return dataclasses.replace(row, measured=statistics.median(times), fastest=min(times))
    devices = jax.devices()
    devices = [devices[0 if _SHARE_DEVICE.value else r % len(devices)] for r in range(row.ranks)]
    step = jaxpp.place(step, jaxpp.MpmdMesh((row.ranks,), devices=devices), donate_argnums=(0, 1))
    found = jaxpp.measure(step, model, opt_state, batch, repeats=_REPEATS.value)
    return dataclasses.replace(
        row,
        shortest_task=min(found.times.values()),
        predicted=found.predict(),
        predicted_from_tasks_alone=found.predict(found.costs_alone),
        measured=found.step,
        fastest=min(found.steps),
    )


def own_model(model: str) -> Callable[..., Any]:
    """The function that `--model` names."""
    module, _, name = model.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(
            f"--model={_MODEL.value} is no package.module:function: {error}."
        ) from error


def gpt_model(layers: int, microbatches: int) -> tuple[Any, jax.Array]:
    """A GPT, and a batch for it."""
    key = jax.random.key(_SEED.value)
    model = gpt.GPT(
        layers=layers, width=_WIDTH.value, heads=HEADS, context=_SEQUENCE_LENGTH.value, key=key
    )
    shape = (_SEQUENCES.value * microbatches, _SEQUENCE_LENGTH.value + 1)
    return model, jax.random.randint(key, shape, 0, gpt.NUM_BYTES)


def step_times(step: Callable[..., Any], *args: Any) -> list[float]:
    """The times of some steps, after one that compiles."""
    *state, batch = args
    times = []
    for _ in range(_REPEATS.value + 1):
        start = time.perf_counter()
        *state, loss = step(*state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - start)
    return times[1:]


def staged_loss(schedule: Any, row: Row, layers: int) -> Callable[..., Any]:
    """The GPT's loss in stages of blocks, as equal as can be."""
    assert row.stages_per_rank is not None
    if isinstance(schedule, Seq1F1B):
        sliced = functools.partial(sliced_gpt.loss_fn, slices=schedule.slices, groups=row.ranks)
        return jaxpp.wrap_forward(jaxpp.split_stages(sliced))
    stages = row.ranks * row.stages_per_rank
    first_blocks = [round(stage * layers / stages) for stage in range(1, stages)]
    at = [f"blocks.{number}" for number in first_blocks]
    return jaxpp.wrap_forward(jaxpp.split_stages(gpt.loss_fn, at=at))


def train_step_of(
    optimizer: optax.GradientTransformation, row: Row, schedule: Any, loss_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """A train step."""
    grad_fn = jaxpp.microbatch(
        eqx.filter_value_and_grad(loss_fn), row.microbatches, in_axes=(None, 0)
    )
    grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(model, opt_state, tokens):
        loss, grads = grad_fn(model, tokens)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


# ---- what is shown ------------------------------------------------------------------------------


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


#: The columns of the terminal's tables: a title, and what to write for a row.
SIMULATED = {
    "stages": lambda row: f"{row.stages_per_rank}",
    "params": lambda row: f"{row.parameters}",
    "makespan": lambda row: f"{row.makespan:.2f}",
    "bubble": lambda row: f"{row.bubble:.2%}",
    "span bubble": lambda row: f"{row.span_bubble:.2%}",
    "memory": lambda row: f"{row.peak_memory:.2f}",
    "gap": lambda row: "" if row.gap is None else f"{row.gap:.2%}",
}
MEASURED = {
    "layers": lambda row: "" if row.layers is None else f"{row.layers}",
    "shortest task ms": lambda row: milliseconds(row.shortest_task),
    "measured ms": lambda row: milliseconds(row.measured),
    "predicted ms": lambda row: milliseconds(row.predicted),
    "error": lambda row: "" if row.error is None else f"{row.error:+.1%}",
    "fastest ms": lambda row: milliseconds(row.fastest),
    "from tasks alone ms": lambda row: milliseconds(row.predicted_from_tasks_alone),
}


def to_text(rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    """A table with a line for each row; a reason takes the place of what there is not."""
    first = max((len(row.schedule) for row in rows), default=0)
    lines = [f"{'schedule':{first}}  ranks  microbatches  " + "  ".join(columns)]
    for row in rows:
        line = f"{row.schedule:{first}}  {row.ranks:5}  {row.microbatches:12}  "
        cells = (f"{show(row):>{len(title)}}" for title, show in columns.items())
        lines.append(line + (f"- {row.reason}" if row.reason else "  ".join(cells)))
    return "\n".join(lines)


def write(rows: Sequence[Row], path: pathlib.Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def read(path: str | os.PathLike[str]) -> list[Row]:
    """The rows that `write` has written."""
    convert: dict[str, Callable[[str], Any]] = {"schedule": str, "reason": str}
    for field in dataclasses.fields(Row):
        if field.name not in convert:
            convert[field.name] = int if "int" in str(field.type) else float
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [
            Row(**{k: convert[k](v) for k, v in row.items() if v != ""})  # pyright: ignore
            for row in rows
        ]
    except (KeyError, TypeError, ValueError):
        raise SystemExit(
            f"--compare={path} is no results.csv of this script: its columns are "
            f"{', '.join(rows[0]) if rows else 'missing'}."
        ) from None


def comparison(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """How this run differs from another, for each schedule and size that both have."""
    known = {row.key: row for row in others}
    both = [(row, known[row.key]) for row in rows if row.key in known]
    same, lines = 0, []
    for row, other in both:
        changes = list(differences(row, other))
        same += not changes
        layers = "" if row.layers is None else f", {row.layers} layers"
        size = f"{row.ranks} ranks, {row.microbatches} microbatches{layers}"
        if changes:
            lines.append(f"{row.schedule} ({size}): {'; '.join(changes)}")
    lines.append(
        f"{same} alike, {len(both) - same} different, {len(rows) - len(both)} only here, "
        f"{len(others) - len(both)} only there"
    )
    return "\n".join(lines)


def differences(row: Row, other: Row) -> Iterator[str]:
    """What differs between two rows of one key, from the other to this one."""
    for field in dataclasses.fields(Row):
        new, old = getattr(row, field.name), getattr(other, field.name)
        if isinstance(new, float) and isinstance(old, float):
            if not math.isclose(new, old, rel_tol=1e-9, abs_tol=1e-12):
                change = f" ({new / old - 1:+.1%})" if old else ""
                yield f"{field.name} {old:.4g} -> {new:.4g}{change}"
        elif new != old:
            yield f"{field.name} {old!r} -> {new!r}"


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """The rows than which no other has both less memory and less bubble, by memory."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.peak_memory, row.bubble)):
        if not front or row.bubble < front[-1].bubble - 1e-9:  # pyright: ignore
            front.append(row)
    return front


def plot_bubbles(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws bubble against peak memory for each size."""
    from matplotlib.figure import Figure

    across, down = len(_RANKS.value), len(_MICROBATCHES.value)
    figure = Figure(figsize=(7 * across, 5 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, (ranks, microbatches) in zip(grid.T.flat, sizes(), strict=True):
        own = [r for r in rows if (r.ranks, r.microbatches) == (ranks, microbatches)]
        own = [r for r in own if not r.reason]
        front = pareto_front(own)
        axes.step(
            [row.peak_memory for row in front],
            [100 * (row.bubble or 0.0) for row in front],
            where="post",
            color="#b0b0b0",
            zorder=0,
            label="Pareto front",
        )
        for marker, colour, label, made in (
            ("o", "#2f6db3", "catalogue", False),
            ("*", "#d8a23a", "synthesized", True),
        ):
            some = [row for row in own if row.is_synthesized == made]
            axes.scatter(
                [row.peak_memory for row in some],
                [100 * (row.bubble or 0.0) for row in some],
                marker=marker,
                color=colour,
                s=80 if made else 30,
                label=label,
            )
        label_points(axes, [row for row in own if not row.is_synthesized])
        axes.set_title(f"{ranks} ranks, {microbatches} microbatches", loc="left")
        axes.set_xlabel("peak memory of a rank (shares of one microbatch)")
        axes.set_ylabel("bubble (%)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def label_points(axes: Any, rows: Sequence[Row]) -> None:
    """Names points; those in one place get one label."""
    places: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        assert row.peak_memory is not None and row.bubble is not None
        place = (round(row.peak_memory, 6), round(100 * row.bubble, 6))
        name = row.schedule + (" (two copies)" if row.parameters == 2 else "")
        places.setdefault(place, []).append(name)
    for n, (place, names) in enumerate(sorted(places.items())):
        where = {"xytext": (4, 3)} if n % 2 else {"xytext": (4, -3), "verticalalignment": "top"}
        axes.annotate("\n".join(names), place, textcoords="offset points", fontsize=7, **where)


def plot_predictions(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws predicted against measured time of a step, with a band of 10 percent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    times = [1e3 * t for row in rows for t in (row.measured, row.predicted) if t is not None]
    ends = [0.85 * min(times), 1.15 * max(times)]
    axes.plot(ends, ends, color="#808080", lw=1)
    axes.fill_between(
        ends,
        [0.9 * end for end in ends],
        [1.1 * end for end in ends],
        color="#e8e8e8",
        label="within 10%",
    )
    for name in dict.fromkeys(row.schedule for row in rows):
        own = [row for row in rows if row.schedule == name]
        axes.scatter(
            [1e3 * (row.measured or 0.0) for row in own],
            [1e3 * (row.predicted or 0.0) for row in own],
            s=25,
            label=name,
        )
    axes.set_xlabel("measured (ms a step)")
    axes.set_ylabel("predicted (ms a step)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


# ---- the run ------------------------------------------------------------------------------------


def check_flags() -> None:
    """Says what is wrong with the flags before anything runs."""
    wanted_types = {
        "ranks": int,
        "microbatches": int,
        "layers": int,
        "caps": float,
        "speeds": float,
    }
    for name, wanted in wanted_types.items():
        for value in flags.FLAGS[name].value or ():
            try:
                valid = 0 < wanted(value) < math.inf
            except ValueError:
                valid = False
            if not valid:
                raise SystemExit(f"--{name} takes positive numbers, got {value!r}.")
    try:
        named_schedules()
    except ValueError as error:
        raise SystemExit(f"--schedules={_SCHEDULES.value}: {error}") from error
    if _SPEEDS.value and any(len(_SPEEDS.value) != int(p) for p in _RANKS.value):
        raise SystemExit(
            f"--speeds has {len(_SPEEDS.value)} numbers; give one for each rank, with one number "
            f"of --ranks."
        )
    if _WIDTH.value % HEADS:
        raise SystemExit(f"--width must be a multiple of {HEADS}, got {_WIDTH.value}.")


def main(_: list[str]) -> None:
    check_flags()
    others = read(_COMPARE.value) if _COMPARE.value else []
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)

    found = [make() for make in tqdm.tqdm(list(grid()), desc="simulate", disable=None)]
    rows = [row for row, _ in found]
    print(to_text(rows, SIMULATED))
    plot_bubbles(rows, output / "bubbles.png")
    write(rows, output / "results.csv")
    if _MEASURE.value:
        make_devices()
        layers = [0] if _MODEL.value else [int(n) for n in _LAYERS.value]
        work = [(*f, n) for n in layers for f in found if f[1] is not None]
        rows = [row for row in rows if row.reason]
        for row, schedule, layers in tqdm.tqdm(work, desc="measure", disable=None):
            rows.append(measured(row, schedule, layers))
            write(rows, output / "results.csv")
        run = [row for row in rows if row.measured is not None or row.layers is not None]
        print(to_text(run, MEASURED))
        if done := [row for row in run if row.predicted is not None]:
            plot_predictions(done, output / "predictions.png")
            print(f"largest error {max(abs(row.error or 0.0) for row in done):.1%}")
    if _COMPARE.value:
        print(comparison(rows, others))
    print(f"results and pictures are in {output}")


def make_devices() -> None:
    """Gives each rank a CPU device, and says so where this is more than the machine has cores."""
    ranks, cores = max(int(p) for p in _RANKS.value), os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", 1 if _SHARE_DEVICE.value else ranks)
    if not _SHARE_DEVICE.value and ranks > cores and jax.default_backend() == "cpu":
        print(
            f"{ranks} ranks share {cores} cores, which the prediction does not know of: use fewer "
            f"--ranks, or --share_device."
        )


if __name__ == "__main__":
    app.run(main)
