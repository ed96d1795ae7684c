"""The synthesizer's problem: the tasks of a pipeline in numbers."""

from collections.abc import Sequence

from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules._execute import stage_dependencies
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task, chain
from jaxpp.schedules.simulator import Objective, Problem


def make_problem(
    costs: Costs,
    placement: Sequence[Sequence[int]],
    num_microbatches: int,
    memory: Memory,
    limits: Sequence[float],
    objective: Objective,
    stage_inputs: tuple[tuple[int, ...], ...] | None,
    split: bool,
) -> Problem:
    """Numbers the tasks of a pipeline, with the backward whole or split.

    The placement has the rank of each stage, for each direction; microbatches take turns.
    """
    count, num_stages = len(placement), len(placement[0])
    m, ranks = num_microbatches // count, [rank for own in placement for rank in own]
    halves = (Kind.I, Kind.W) if split else (Kind.B,)
    ops = [(Kind.F, s) for s in range(len(ranks))]
    ops += [(kind, s) for kind in halves for s in reversed(range(len(ranks)))]
    table = Table(
        (), num_stages, num_microbatches, tuple(map(tuple, placement)), stage_inputs,
        direction_of=tuple(i % count for i in range(num_microbatches)),
    )  # fmt: skip
    tasks = [
        Task(kind, stage % num_stages, i * count + stage // num_stages)
        for kind, stage in ops
        for i in range(m)
    ]
    op_rank = [ranks[stage] for _, stage in ops]
    graph = stage_inputs or chain(num_stages)
    whole = tuple(
        tuple(first + need for need in own)
        for first in range(0, len(ranks), num_stages)
        for own in graph
    )
    sample = (tuple(Task(*op, 0) for op in ops),)
    needs = stage_dependencies(Table(sample, len(ranks), 1, stage_inputs=whole))
    at = {op: n for n, op in enumerate(ops)}

    def delays(need: int, rank: int) -> Sequence[float]:
        if op_rank[need] == rank:
            return (0.0,) * m
        return [
            costs.transfer(task, op_rank[need], rank) for task in tasks[need * m : need * m + m]
        ]

    outputs: list[list[tuple[int, Sequence[float]]]] = [[] for _ in ops]
    for op, key in enumerate(ops):
        for need in (at[need] for need in needs[key] if need in at):
            outputs[need].append((op, delays(need, op_rank[op])))
    return Problem(
        table,
        ops,
        op_rank,
        [costs.of(task) for task in tasks],
        [memory.of(task) for task in tasks],
        [limit + 1e-9 * abs(limit) for limit in limits],
        outputs,
        objective,
    )
