"""Problems for `synthesize` with something to compare it with: published, proved, or the catalogue.

Each gives calls that solve one problem each, and rows of what they found.
"""

import csv
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxpp.schedules import Costs, Memory, Synthesis, simulate, synthesize
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
    hidden, heads, seq = (int(row[key]) for key in ("hidden", "heads", "seq"))
    whole, rest = 34 * hidden + 5 * heads * seq, 32 * hidden
    forward, input_grad, weight_grad = (float(row[key]) for key in ("T_F", "T_B", "T_W"))
    begin = time.perf_counter()
    found = synthesize(
        Costs(forward, input_grad, weight_grad, latency=float(row["T_comm"])),
        range(p),
        m,
        memory=Memory(whole, rest - whole, -rest),
        memory_limit={"ZB-1p": p, "ZB-2p": 2 * p}[row["schedule"]] * whole,
        objective="span",
        evaluations=evaluations,
        seed=seed,
    )
    work = m * (forward + input_grad + weight_grad)
    bubble = found.timeline.span_bubble_fraction
    return {
        "case": f"{row['schedule']} {row['model']} p={p} m={m}",
        "published": float(row["bubble_rate"]),
        "found": round(bubble, 4),
        "at least": round(1 - work / found.lower_bound, 4),
        "good": round(bubble, 4) <= float(row["bubble_rate"]),
        "seconds": round(time.perf_counter() - begin, 1),
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
            costs, placement = Costs().divided(v), waves(p, v)
            found = synthesize(
                costs, placement, m, memory_limit=limit, evaluations=evaluations, seed=seed
            )
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
                costs, waves(p, v), m, memory_limit=limit, evaluations=evaluations, seed=seed
            )
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
        for _, table in catalogue_tables(placement, m, None)
        if max(Memory().peaks(table)) <= limit
    ]
    return min(fits, default=math.inf)


def peak(found: Synthesis) -> float:
    """The most that a rank of the table holds."""
    return max(found.timeline.peak_memory)
