"""Problems for `synthesize` with something to compare it with: published, proved, or the catalogue.

Each gives calls that solve one problem each, and rows of what they found.
"""

import csv
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.zero_bubble_v_search import greedy_search
from jaxpp.schedules import (
    Costs,
    Kind,
    Memory,
    Synthesis,
    Task,
    ZeroBubbleV,
    simulate,
    synthesize,
)
from jaxpp.schedules._synthesis._portfolio import catalogue_tables
from jaxpp.schedules.building_blocks import waves

Row = dict[str, Any]


def table5(path: str, max_ranks: int, evaluations: int, seed: int) -> Iterator[Callable[[], Row]]:
    """Gives a call for each row: bubble rates, and whether ours is no more at 4 digits."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["schedule"] in ("ZB-1p", "ZB-2p")]
    for row in rows:
        if int(row["p"]) <= max_ranks:
            yield lambda row=row: published_row(row, evaluations, seed)


def published_row(row: dict[str, str], evaluations: int = 2000, seed: int = 0) -> Row:
    """Runs one row of Table 5, with times from Table 9 and memory as in section 4.2."""
    p, m = int(row["p"]), int(row["m"])
    costs, memory, whole = _profile(row)
    begin = time.perf_counter()
    found = synthesize(
        costs,
        range(p),
        m,
        memory=memory,
        memory_limit={"ZB-1p": p, "ZB-2p": 2 * p}[row["schedule"]] * whole,
        objective="span",
        evaluations=evaluations,
        seed=seed,
    )
    bubble = found.timeline.span_bubble_fraction
    return {
        "case": f"{row['schedule']} {row['model']} p={p} m={m}",
        "published": float(row["bubble_rate"]),
        "found": round(bubble, 4),
        "at least": round(_least_bubble(found), 4),
        "good": round(bubble, 4) <= float(row["bubble_rate"]),
        "seconds": round(time.perf_counter() - begin, 1),
        "source": found.source,
    }


def _profile(row: dict[str, str]) -> tuple[Costs, Memory, float]:
    """Gives the costs of a rank, what a microbatch changes there, and what its forward adds."""
    hidden, heads, seq = (int(row[key]) for key in ("hidden", "heads", "seq"))
    whole, rest = 34 * hidden + 5 * heads * seq, 32 * hidden
    forward, input_grad, weight_grad = (float(row[key]) for key in ("T_F", "T_B", "T_W"))
    costs = Costs(forward, input_grad, weight_grad, latency=float(row["T_comm"]))
    return costs, Memory(whole, rest - whole, -rest), whole


def _least_bubble(found: Synthesis) -> float:
    """Gives the bubble rate that no table beats, of the longest span."""
    least = 1 - (1 - found.timeline.span_bubble_fraction) * found.value / found.lower_bound
    return max(least, 0.0)


def v_schedules(path: str, evaluations: int, seed: int) -> Iterator[Callable[[], Row]]:
    """Gives a call for each of nine cases with two stages a rank, in a V."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["schedule"] == "ZB-1p"]
    for model, p, sizes in (
        ("6.2B", 16, (48, 64, 128)),
        ("14.6B", 24, (72, 96, 128)),
        ("28.3B", 32, (96, 112, 128)),
    ):
        own = [row for row in rows if row["model"] == model]
        for row, m in zip(own, sizes, strict=True):
            yield lambda row=row, p=p, m=m: v_row(row, p, m, evaluations, seed)


def v_row(row: dict[str, str], p: int, m: int, evaluations: int = 2000, seed: int = 0) -> Row:
    """Runs a V of `p` ranks with the times of a row, halved, and the memory of 1F1B."""
    costs, memory, whole = _profile(row)
    # Two stages on a rank, and each of them holds as much as one of 1F1B.
    costs, limit = costs.divided(2), 2 * p * whole
    memory = dataclasses.replace(memory, per="stage")
    begin, cpu = time.perf_counter(), time.process_time()
    found = synthesize(
        costs,
        waves(p),
        m,
        memory=memory,
        memory_limit=limit,
        objective="span",
        evaluations=evaluations,
        seed=seed,
    )
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    times = [costs.of(Task(kind, 0, 0)) for kind in (Kind.F, Kind.I, Kind.W)]
    changes = [memory.of(Task(kind, 0, 0)) for kind in (Kind.F, Kind.I, Kind.W)]
    greedy = greedy_search(p, m, times, changes, limit, float(row["T_comm"]))
    rates = [
        simulate(table, costs).span_bubble_fraction
        for table in (ZeroBubbleV().table(2 * p, m), greedy, found.table)
    ]
    return {
        "case": f"V {row['model']} p={p} m={m}",
        **dict(zip(("ZB-V", "greedy", "found"), (round(rate, 4) for rate in rates), strict=True)),
        "at least": round(_least_bubble(found), 4),
        "good": rates[2] <= rates[1] + 1e-9,
        "gap": found.gap,
        "seconds": round(seconds, 1),
        "cpu": round(cpu, 1),
        "source": found.source,
    }


def optima(evaluations: int, seed: int) -> Iterator[Callable[[], Row]]:
    """Gives a call for each case whose optimum a constraint solver has proved."""
    for p, m, v, limit, optimum in (
        (4, 8, 1, math.inf, 27.0),
        (8, 16, 1, math.inf, 55.0),
        (4, 8, 2, 8.0, 25.5),
        (4, 8, 2, 4.0, 29.5),
    ):

        def run(p=p, m=m, v=v, limit=limit, optimum=optimum) -> Row:
            found = synthesize(
                Costs(), waves(p, v), m, memory=Memory(per="stage"), memory_limit=limit,
                evaluations=evaluations, seed=seed,
            )  # fmt: skip
            return {
                "case": f"p={p} m={m} v={v} limit={limit:g}",
                "optimum": optimum,
                "found": found.value,
                "at least": found.lower_bound,
                "good": found.value == optimum,
                "source": found.source,
            }

        yield run


def instances(
    count: int, p: int, m: int, v: int, evaluations: int, seed: int
) -> Iterator[Callable[[], Row]]:
    """Gives a call for each random instance: the gap, and the best of the catalogue that fits."""
    for n in range(count):
        choose = random.Random(seed + n)
        scale = [choose.uniform(0.8, 1.2) for _ in range(p * v)]
        limit = choose.uniform(p / 2, 2 * p) * v
        costs = Costs(scale, scale, scale).divided(v)

        def run(n=n, costs=costs, limit=limit) -> Row:
            begin, cpu = time.perf_counter(), time.process_time()
            found = synthesize(
                costs, waves(p, v), m, memory=Memory(per="stage"), memory_limit=limit,
                evaluations=evaluations, seed=seed,
            )  # fmt: skip
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            best = best_of_catalogue(costs, waves(p, v), m, limit)
            return {
                "case": f"instance {n} limit={limit / v:.1f}",
                "catalogue": best,
                "found": found.value,
                "at least": found.lower_bound,
                "gap": found.gap,
                "good": found.value <= best and peak(found) <= limit,
                "seconds": round(seconds, 1),
                "cpu": round(cpu, 1),
                "source": found.source,
            }

        yield run


def best_of_catalogue(costs: Costs, placement: tuple[int, ...], m: int, limit: float) -> float:
    """The shortest makespan of the catalogue's schedules that fit; infinite where none does."""
    fits = [
        simulate(table, costs).makespan
        for _, table in catalogue_tables((placement,), m, None)
        if max(Memory(per="stage").peaks(table)) <= limit
    ]
    return min(fits, default=math.inf)


def peak(found: Synthesis) -> float:
    """The most that a rank of the table holds."""
    return max(found.timeline.peak_memory)
