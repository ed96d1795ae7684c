"""Plans models from their published costs, and puts the plans beside the published ones.

    python -m experiments.plan_duel
    python -m experiments.plan_duel --data=folder,other --parts=octopipe --tries=60000 --out=plans

Without `--data` it reads small files of made-up costs, which show the format. The figures to beat,
with their sources, are in `experiments/data/plan_duel/figures.csv`. By part:

- `octopipe`: the layers of eight models (`octopipe_layers.csv`, as SimPipe has them), in ticks of
  0.01 ms; the embedding is one with the first layer, the head with the last. With the memory of
  1F1B, a rank has room for the activations of as many layers as 1F1B's first rank at an even cut;
- `octopipe_cut`: the order alone, at the published cut and placement (`octopipe_published.csv`);
- `pipedream`: AlexNet's layers (`pipedream_layers.csv`); backwards are whole;
- `pipemorph`: published tables under slow links (`pipemorph_cases.csv`, `pipemorph_orders.csv`):
  the order alone, free and at the memory of the published table;
- `zero_bubble`: Table 5 of arXiv 2401.10241 (`zero_bubble_table5.csv`): the order alone.

Seconds are those of the process's own time on a core. A star marks what is above its figure.
"""

import collections
import csv
import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

import jaxpp
from benchmarks.synthesis_cases import published_row
from jaxpp.planning.search import Choice, Layers, LayersPlan, Setting
from jaxpp.schedules import Costs, Memory, from_tasks, simulate, synthesize, to_text

FOLDER = pathlib.Path(__file__).parent / "data" / "plan_duel"
PARTS = ["octopipe", "octopipe_cut", "pipedream", "pipemorph", "zero_bubble"]
_DATA = flags.DEFINE_list("data", [str(FOLDER)], "The folders of the CSV files.")
_PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "What to plan.")
_MODELS = flags.DEFINE_list("models", [], "Only these models or cases; by default all.")
_SIZES = flags.DEFINE_list("sizes", ["4x8"], "Ranks and microbatches of the models, as 4x8.")
_MEMORY = flags.DEFINE_bool("memory", False, "Whether to plan at the memory of 1F1B, too.")
_DIRECTIONS = flags.DEFINE_list("directions", ["1", "2"], "The numbers of directions to try.")
_TRIES = flags.DEFINE_integer("tries", 100_000, "How many choices a plan judges.", 1)
_EVALUATIONS = flags.DEFINE_integer("evaluations", 2000, "Those of the order alone.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of all random choices.")
_OUT = flags.DEFINE_string("out", None, "A folder for the plans, as JSON and as pictures.")


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan beside the figure to beat."""

    case: str
    published: float
    what: str
    found: float
    bound: float
    seconds: float

    def __str__(self) -> str:
        star = "*" if self.found > self.published * (1 + 1e-9) else " "
        gap = self.found / self.bound - 1 if self.bound else 0.0
        return (
            f"{self.case:52}{self.published:>12.6g} {self.what:10}{self.found:>12.6g}{star}"
            f"{self.bound:>12.6g}{gap:>8.2%}{self.seconds:>9.1f}"
        )


HEADER = f"{'':52}{'figure':>12} {'of':10}{'plan':>12} {'bound':>12}{'gap':>8}{'seconds':>9}"


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file in the folders; none where none of them has it."""
    for folder in _DATA.value:
        path = pathlib.Path(folder) / name
        if path.exists():
            with path.open() as file:
                return list(csv.DictReader(file))
    return []


def figures(part: str, case: str, ranks: int, microbatches: int, memory: str) -> list[Any]:
    """The figures to beat of a case, with what they are; not a number where there is none."""
    wanted = (part, case, str(ranks), str(microbatches), memory)
    with (FOLDER / "figures.csv").open() as file:
        found = [
            (float(row["figure"]), row["what"])
            for row in csv.DictReader(file)
            if tuple(row[k] for k in ("part", "case", "ranks", "microbatches", "memory")) == wanted
        ]
    return found or [(math.nan, "none")]


def octopipe_models() -> dict[str, Layers]:
    """The layers of each model, in ticks; a layer keeps one unit of activations."""
    patterns: dict[str, str] = {}
    times: dict[tuple[str, str], list[int]] = {}
    for row in rows_of("octopipe_layers.csv"):
        patterns[row["model"]] = row["pattern"]
        columns = ("forward_ms", "input_grad_ms", "weight_grad_ms")
        times[row["model"], row["symbol"]] = [round(100 * float(row[c])) for c in columns]
    models = {}
    for model, pattern in patterns.items():
        each = [times[model, symbol] for symbol in pattern]
        first, *middle, last = [each[0], *each[1:-1], each[-1]]
        middle[0] = [a + b for a, b in zip(first, middle[0], strict=True)]
        middle[-1] = [a + b for a, b in zip(middle[-1], last, strict=True)]
        forward, inputs, weights = (tuple(map(float, own)) for own in zip(*middle, strict=True))
        models[model] = Layers(forward, inputs, weights, activation_bytes=(1.0,) * len(middle))
    return models


def planned(name: str, layers: Layers, ranks: int, microbatches: int, **options: Any) -> Any:
    """A plan, and the seconds it took; it is checked, saved and drawn."""
    begin = time.process_time()
    plan: LayersPlan = jaxpp.plan_layers(
        layers, ranks=ranks, microbatches=microbatches, tries=_TRIES.value, seed=_SEED.value,
        directions=tuple(map(int, _DIRECTIONS.value)), **options,
    )  # fmt: skip
    seconds = time.process_time() - begin
    plan.check()
    if _OUT.value:
        folder = pathlib.Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name.replace(" ", "_").replace("/", "_")
        plan.save(file.with_suffix(".json"))
        plan.plot(file.with_suffix(".png"))
        file.with_suffix(".txt").write_text(f"{plan}\n{to_text(plan.timeline)}\n")
    return plan, seconds


def octopipe() -> Iterator[Row]:
    """Plans each model."""
    for size in _SIZES.value:
        ranks, microbatches = map(int, size.split("x"))
        for model, layers in octopipe_models().items():
            if _MODELS.value and model not in _MODELS.value:
                continue
            for memory in ("", "1f1b") if _MEMORY.value else ("",):
                limit = ranks * -(-layers.count // ranks) if memory else math.inf
                name = f"{model} {ranks}x{microbatches}{' ' * bool(memory)}{memory}"
                plan, seconds = planned(
                    name, layers, ranks, microbatches, memory_limit=float(limit)
                )
                for figure, what in figures("octopipe", model, ranks, microbatches, memory):
                    yield Row(name, figure, what, plan.time, plan.lower_bound, seconds)


def octopipe_cut() -> Iterator[Row]:
    """Orders the tasks of published plans at their own cut and placement."""
    models = octopipe_models()
    for row in rows_of("octopipe_published.csv"):
        counts, placement = (list(map(int, row[key].split())) for key in ("partition", "placement"))
        cuts = (0, *itertools.accumulate(counts))
        microbatches = int(row["microbatches"])
        setting = Setting(models[row["model"]], int(row["ranks"]), microbatches)
        costs = setting.costs(Choice(cuts, (tuple(placement),)))
        begin = time.process_time()
        found = synthesize(
            costs, placement, microbatches, evaluations=_EVALUATIONS.value, seed=_SEED.value
        )
        seconds = time.process_time() - begin
        name = f"{row['model']} at the cut of {row['schedule']}"
        yield Row(
            name, float(row["makespan_ticks"]), "published", found.value, found.lower_bound, seconds
        )


def pipedream() -> Iterator[Row]:
    """Plans the layers of PipeDream's models, with 4 ranks and 16 microbatches."""
    models: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
    for row in rows_of("pipedream_layers.csv"):
        models[row["model"]].append(row)
    for model, rows in models.items():
        if not _MODELS.value or model in _MODELS.value:
            layers = Layers(
                tuple(float(row["forward_ms"]) for row in rows),
                backward=tuple(float(row["backward_ms"]) for row in rows),
            )
            plan, seconds = planned(f"{model} 4x16", layers, 4, 16)
            for figure, what in figures("pipedream", model, 4, 16, ""):
                yield Row(f"{model} 4x16", figure, what, plan.time, plan.lower_bound, seconds)


def numbers(text: str) -> Sequence[float]:
    """Numbers with blanks between them."""
    return tuple(map(float, text.split()))


def pipemorph() -> Iterator[Row]:
    """Orders the tasks of published cases, free and at the memory of the published table."""
    orders: dict[str, dict[int, list[str]]] = collections.defaultdict(dict)
    for row in rows_of("pipemorph_orders.csv"):
        own = row["order"].split()
        rank = int(row["rank"])
        orders[row["case"]][rank] = [f"{task[0]}{rank}.{task[1:]}" for task in own]
    for row in rows_of("pipemorph_cases.csv"):
        if _MODELS.value and row["case"] not in _MODELS.value:
            continue
        delays = numbers(row["link_delay_ms"])
        costs = Costs(
            numbers(row["forward_ms"]),
            numbers(row["input_grad_ms"]),
            numbers(row["weight_grad_ms"]),
            latency=lambda a, b, delays=delays: delays[min(a, b)] if min(a, b) < len(delays) else 0,
        )
        table = from_tasks(orders[row["case"]][rank] for rank in range(int(row["ranks"])))
        published = float(row["makespan_ms"])
        assert simulate(table, costs).makespan == published, row["case"]
        for name, limit in (("", math.inf), (" at its memory", Memory().peaks(table))):
            begin = time.process_time()
            found = synthesize(
                costs, range(table.num_ranks), table.num_microbatches,
                memory_limit=limit, evaluations=_EVALUATIONS.value, seed=_SEED.value,
            )  # fmt: skip
            seconds = time.process_time() - begin
            yield Row(
                row["case"] + name, published, "published", found.value, found.lower_bound, seconds
            )


def zero_bubble() -> Iterator[Row]:
    """Orders the tasks of Table 5: bubble rates."""
    for row in rows_of("zero_bubble_table5.csv"):
        if row["schedule"] in ("ZB-1p", "ZB-2p"):
            begin = time.process_time()
            found = published_row(row, _EVALUATIONS.value, _SEED.value)
            yield Row(
                found["case"], found["published"], "published", found["found"], found["at least"],
                time.process_time() - begin,
            )  # fmt: skip


def main(argv: list[str]) -> None:
    """Prints a row for each case."""
    del argv
    print(HEADER)
    above = 0
    parts = {"octopipe": octopipe, "octopipe_cut": octopipe_cut, "pipedream": pipedream,
             "pipemorph": pipemorph, "zero_bubble": zero_bubble}  # fmt: skip
    for part in dict.fromkeys(_PARTS.value):
        for row in parts[part]():
            print(row, flush=True)
            above += row.found > row.published * (1 + 1e-9)
    print(f"{above} above the figure to beat")


if __name__ == "__main__":
    app.run(main)
