"""The synthesizer's problem: the tasks of a pipeline in numbers."""

import dataclasses
from collections.abc import Sequence

from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules.simulator import Objective, Problem, shape_of


def make_problem(
    costs: Costs,
    placement: tuple[tuple[int, ...], ...],
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
    sizes = len(placement[0]), len(placement), num_microbatches
    table, ops, readers = shape_of(*sizes, stage_inputs, split)
    table = dataclasses.replace(table, placement=placement)
    ranks = [rank for own in placement for rank in own]
    op_rank = [ranks[stage] for _, stage in ops]
    limits = [limit + 1e-9 * abs(limit) for limit in limits]
    empty = Problem(table, ops, op_rank, [], [], limits, [], objective)
    m = empty.num_microbatches
    tasks = [empty.task(n) for n in range(len(ops) * m)]

    def delays(op: int, here: int, there: int) -> Sequence[float]:
        if here == there:
            return (0.0,) * m
        return [costs.transfer(task, here, there) for task in tasks[op * m : op * m + m]]

    return dataclasses.replace(
        empty,
        time=[costs.of(task) for task in tasks],
        change=[memory.of(task) for task in tasks],
        outputs=[
            [(reader, delays(op, op_rank[op], op_rank[reader])) for reader in own]
            for op, own in enumerate(readers)
        ],
    )
