"""What the papers have in common: their figures beside ours, a picture, and a placed step."""

import dataclasses
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxpp
from jaxpp import testing
from jaxpp.schedules import Costs, Schedule, Timeline, check, plot, simulate

#: The papers, by year.
NAMES = (
    "gpipe", "pipedream", "megatron", "chimera", "hanayo", "zero_bubble", "controllable_memory",
    "seq1f1b", "dualpipe", "pipeoffload",
)  # fmt: skip
_REFERENCES = pathlib.Path(__file__).parents[2] / "docs" / "references.bib"
#: A loss of weights and a batch as stages, the same on one device, the weights, and the batch.
Model = tuple[Callable[..., Any], Callable[..., Any], Any, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure of a paper and ours, to the digits that the paper has; `why` where they differ."""

    what: str
    where: str
    paper: float
    ours: float
    digits: int = 4
    why: str = ""

    @property
    def shown(self) -> tuple[str, str, str]:
        """The paper's figure, ours, and the difference."""
        paper, ours = (f"{value:.{self.digits}f}" for value in (self.paper, self.ours))
        return (
            paper,
            ours,
            "0" if paper == ours else f"{float(ours) - float(paper):+.{self.digits}f}",
        )


def perceptron(schedule: Schedule, ranks: int, microbatches: int) -> Model:
    """A perceptron of as many layers as the schedule has stages."""
    stages = ranks * schedule.stages_per_rank

    def loss(weights, x):
        for n, weight in enumerate(weights):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), stages + 1)
    weights = [jax.random.normal(key, (4, 4)) / 2 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (2 * microbatches, 4))
    return jaxpp.split_stages(loss, num_stages=stages), loss, weights, batch


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper; its module's docstring cites it, and says what is compared.

    Args:
      arxiv: its number.
      rows: makes its figures and ours.
      picture: makes the timelines of its main picture, by title.
      caption: says what the picture shows.
      leaves_open: what the paper leaves open.
      differs: which figures differ, and why, in a few words.
      small: schedules with ranks and microbatches, small enough to be placed here.
      model: makes what is placed.
      memory: whether the picture has what the ranks hold over time.
    """

    arxiv: str
    rows: Callable[[], Iterable[Row]]
    picture: Callable[[], Mapping[str, Timeline]]
    caption: str
    leaves_open: Sequence[str]
    small: Sequence[tuple[Schedule, int, int]]
    differs: str = "nothing"
    model: Callable[[Schedule, int, int], Model] = perceptron
    memory: bool = False


def load(name: str) -> Paper:
    """The paper of a name."""
    return importlib.import_module(f"experiments.papers.{name}").PAPER


def about(name: str) -> tuple[str, str]:
    """What the file of a paper is about, and the rest of its docstring."""
    docstring = importlib.import_module(f"experiments.papers.{name}").__doc__ or ""
    first, _, body = docstring.partition("\n\n")
    return first.rstrip("."), body.strip()


@functools.cache
def run(schedule: Schedule, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    """Makes a schedule's table, checks it, and simulates it at the costs of a rank's whole work."""
    table = schedule.table_for_ranks(ranks, microbatches)
    check(table)
    return simulate(table, costs)


def peak(schedule: Schedule, ranks: int, microbatches: int) -> float:
    """The most that a rank holds, in microbatches of all of its stages."""
    return max(run(schedule, ranks, microbatches).peak_memory)


def place(paper: Paper) -> None:
    """Places the paper's small steps on a local mesh; raises where they are not the function."""
    for schedule, ranks, microbatches in paper.small:
        staged, loss, weights, batch = paper.model(schedule, ranks, microbatches)
        grad = eqx.filter_value_and_grad(jaxpp.wrap_forward(staged))
        grad = jaxpp.microbatch(grad, microbatches, in_axes=(None, 0))
        devices = jax.devices()
        mesh = jaxpp.MpmdMesh((ranks,), devices=[devices[r % len(devices)] for r in range(ranks)])
        step = jaxpp.place(jaxpp.schedule(grad, schedule), mesh)
        plain = eqx.filter_value_and_grad(loss)
        testing.assert_matches_single_device(step, plain, weights, batch, steps=1)


def reference(paper: Paper) -> tuple[str, str]:
    """The title and the BibTeX entry of a paper."""
    entries = re.findall(r"^@.*?^\}$", _REFERENCES.read_text(), re.M | re.S)
    (entry,) = (entry for entry in entries if f"{{{paper.arxiv}}}" in entry)
    (title,) = re.findall(r"title += \{(.*)\}", entry)
    return title, entry


def draw(paper: Paper, path: pathlib.Path) -> None:
    """Draws the paper's picture."""
    plot(paper.picture(), memory=paper.memory).savefig(path, dpi=120)


@functools.cache
def figures(name: str) -> tuple[Row, ...]:
    """The figures of a paper."""
    return tuple(load(name).rows())


def table(name: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """The figures as cells below their head, and the reasons that the last column names."""
    rows = figures(name)
    whys = list(dict.fromkeys(row.why for row in rows if row.why))
    marks = (f"[{whys.index(row.why) + 1}]" if row.why else "" for row in rows)
    cells: list[tuple[str, ...]] = [
        ("figure", "in the paper", "paper", "ours", "difference", "why")
    ]
    cells += [(r.what, r.where, *r.shown, mark) for r, mark in zip(rows, marks, strict=True)]
    cells = cells if whys else [line[:-1] for line in cells]
    return cells, [f"[{n}] {why}" for n, why in enumerate(whys, 1)]


def text(name: str) -> str:
    """The figures for a terminal, why they differ, and what the paper leaves open."""
    cells, whys = table(name)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    open_ends = (f"- {item}" for item in load(name).leaves_open)
    lines += ["", *whys] if whys else []
    return "\n".join([*lines, "", "The paper leaves open:", *open_ends])
