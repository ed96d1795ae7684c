"""Draws `trace.svg`, a traced step beside its simulation: run `python docs/draw_trace.py`.

The step is recorded in `trace.csv`; `python docs/draw_trace.py --measure` runs and records another.
"""

import csv
import os
import sys
import tempfile
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from drawing import beside, save
from matplotlib.figure import Figure

import jaxpp
from jaxpp.schedules import Kind, Table, Task, Timeline, ZeroBubbleH1, plot

_RANKS, _MICROBATCHES, _WIDTH, _CALLS = 2, 6, 256, 60
_FILE = beside(__file__, "trace.csv")
_FIELDS = ("timeline", "rank", "kind", "stage", "microbatch", "start", "end")


def main() -> None:
    """Draws the recorded step; with `--measure` records it first."""
    if "--measure" in sys.argv:
        _write(_measure())
    timelines = _read()
    figure = Figure(figsize=(752 / 72, 270 / 72), layout="constrained")
    for axes, (title, timeline) in zip(
        figure.subplots(len(timelines), 1, sharex=True), timelines.items(), strict=True
    ):
        plot({title: timeline}, ax=axes, unit="ms")
        axes.set_xlim(0, max(own.makespan for own in timelines.values()))
        axes.tick_params(labelsize=8)
        for text in axes.texts:
            text.set_fontsize(8)
    save(figure, beside(__file__, "trace.svg"))


def _measure() -> dict[str, Timeline]:
    """Traces a step of a perceptron on two CPU devices."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"  # a core for each device
    jax.config.update("jax_num_cpu_devices", _RANKS)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, num_stages=_RANKS))
    grad = jaxpp.microbatch(jax.value_and_grad(staged), _MICROBATCHES)
    mesh = jaxpp.MpmdMesh((_RANKS,))
    step = jaxpp.place(jaxpp.schedule(grad, ZeroBubbleH1()), mesh)
    keys = jax.random.split(jax.random.key(0), 8)
    weights = [jax.random.normal(key, (_WIDTH, _WIDTH)) / _WIDTH**0.5 for key in keys]
    x = jnp.ones((_WIDTH * _MICROBATCHES, _WIDTH))
    jax.block_until_ready(step(weights, x))
    with tempfile.TemporaryDirectory() as folder:
        mesh.start_trace(folder)
        for _ in range(_CALLS):
            jax.block_until_ready(step(weights, x))
        trace = mesh.stop_trace()
    return {"measured": trace.timeline(), "simulated with its costs": trace.simulated()}


def _write(timelines: Mapping[str, Timeline]) -> None:
    with open(_FILE, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_FIELDS)
        for title, timeline in timelines.items():
            for span in timeline.spans:
                t, times = span.task, (f"{1e3 * s:.3f}" for s in (span.start, span.end))
                rows.writerow([title, span.rank, t.kind, t.stage, t.microbatch, *times])


def _read() -> dict[str, Timeline]:
    """Reads the timelines; their times are in milliseconds."""
    with open(_FILE, newline="") as file:
        rows = list(csv.DictReader(file))
    timelines = {}
    for title in dict.fromkeys(row["timeline"] for row in rows):
        ranks: list[list[tuple[float, float, Task]]] = [[] for _ in range(_RANKS)]
        for row in rows:
            if row["timeline"] == title:
                task = Task(Kind(row["kind"]), int(row["stage"]), int(row["microbatch"]))
                times = float(row["start"]), float(row["end"])
                ranks[int(row["rank"])].append((*times, task))
        orders = [sorted(own, key=lambda run: run[:2]) for own in ranks]
        table = Table(tuple(tuple(r[2] for r in own) for own in orders), _RANKS, _MICROBATCHES)
        starts, ends = (tuple(tuple(r[n] for r in own) for own in orders) for n in (0, 1))
        timelines[title] = Timeline(table, starts, ends)
    return timelines


if __name__ == "__main__":
    main()
