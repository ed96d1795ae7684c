"""The exact solver: the whole problem as a constraint program, for small cases.

It needs OR-tools (the extra `exact`): `pip install "jaxpp[exact]"`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxpp import _messages
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules.simulator import OrderProblem, evaluate

#: The steps in the longest time, where times are not whole numbers of a longer step.
_STEPS = 1000
#: The workers of the solver.
_WORKERS = 8


def solve(
    problem: OrderProblem,
    orders: Sequence[Sequence[int]],
    bound: float,
    work_limit: float,
    seed: int,
) -> tuple[list[list[int]], float]:
    """Proves with CP-SAT how good given orders are, and improves on them where it can.

    Each task is an interval, after its inputs; no two run at once on a rank. A rank's memory is a
    reservoir. The microbatches of an op go in order, which loses nothing (see `_bounds`). Times are
    whole numbers of steps, rounded down, so that the solver's bound is a bound for the problem. The
    solver begins with the orders' times in these whole numbers. Its workers race, so that another
    run may find other orders, and another bound.

    Args:
      problem: the tasks.
      orders: a solution to start from.
      bound: a value that no table beats.
      work_limit: where to stop, in the solver's deterministic seconds: about seconds of a core.
      seed: of the solver.

    Returns:
      The best orders found, and a lower bound on the objective.

    Raises:
      ImportError: OR-tools is not installed.
    """
    _messages.need("exact", "The exact solver", "ortools")
    from ortools.sat.python import cp_model

    step = _step(problem)
    whole = _in_steps(problem, step)
    hint = evaluate(whole, orders)
    assert hint is not None, "the orders deadlock"
    model: Any = cp_model.CpModel()
    starts, goal = _model(model, whole, problem, math.ceil(max(hint.ends)))
    model.add(goal >= math.floor(bound / step * (1 - 1e-9)))
    for n, start in enumerate(hint.starts):
        model.add_hint(starts[n], int(start))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = _WORKERS
    # They take longer than the whole proof.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_deterministic_time = work_limit
    status = solver.solve(model)
    proved = max(bound, solver.best_objective_bound * step)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [list(order) for order in orders], bound
    at, m, found = [solver.value(start) for start in starts], problem.num_microbatches, []
    for own in problem.rank_ops:
        tasks = [n for op in own for n in range(op * m, op * m + m)]
        # Tasks of 0 steps keep the order of their ops: forwards come before their readers.
        found.append(sorted(tasks, key=lambda n: (at[n], at[n] + whole.time[n], n)))
    return found, proved


def _in_steps(problem: OrderProblem, step: float) -> OrderProblem:
    """Returns the problem in whole numbers of steps, rounded down."""

    def rounded(time: float) -> float:
        return float(math.floor(time / step + 1e-6))

    outputs = [
        [(reader, [*map(rounded, delays)]) for reader, delays in own] for own in problem.outputs
    ]
    return dataclasses.replace(problem, time=[*map(rounded, problem.time)], outputs=outputs)


def _model(
    model: Any, whole: OrderProblem, problem: OrderProblem, horizon: int
) -> tuple[list[Any], Any]:
    """Adds all that tasks have to keep to; returns their starts, and the goal."""
    m, time = whole.num_microbatches, [*map(int, whole.time)]
    starts = [model.new_int_var(0, horizon, "") for _ in time]
    for op, own in enumerate(whole.inputs):
        for n in range(op * m, op * m + m):
            if n % m:
                model.add(starts[n] >= starts[n - 1] + time[n - 1])
            for need, delays in own:
                k = need * m + n % m
                model.add(starts[n] >= starts[k] + time[k] + int(delays[n % m]))
    goal = model.new_int_var(0, horizon, "")
    for rank, own in enumerate(whole.rank_ops):
        tasks = [op * m + i for op in own for i in range(m)]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[n], time[n], "") for n in tasks]
        )
        _limit_memory(model, problem, rank, tasks, starts, time)
        begin = 0
        if whole.objective == "span":
            begin = model.new_int_var(0, horizon, "")
            for op in own:
                if whole.ops[op][0] is Kind.F:
                    model.add(begin <= starts[op * m])
        for op in own:
            model.add(goal >= starts[op * m + m - 1] + time[op * m + m - 1] - begin)
    model.minimize(goal)
    return starts, goal


def _limit_memory(
    model: Any, problem: OrderProblem, rank: int, tasks: Sequence[int], starts: Any, time: Any
) -> None:
    """Lets a rank hold no more than its limit, in whole numbers of a millionth of a change."""
    if problem.limits[rank] == math.inf:
        return
    whole = all(float(problem.change[n]).is_integer() for n in tasks)
    unit = 1.0 if whole else max(map(abs, problem.change)) / 10**6
    changes = [math.floor(problem.change[n] / unit) for n in tasks]
    times = [
        starts[n] + (0 if change > 0 else time[n]) for n, change in zip(tasks, changes, strict=True)
    ]
    least = sum(change for change in changes if change < 0)
    most = math.floor(problem.limits[rank] / unit + 1e-6)
    if least < 0 or sum(changes) > most:
        model.add_reservoir_constraint(times, changes, least, most)


def _step(problem: OrderProblem) -> float:
    """Finds, among a few steps, the longest one that divides all times; or else a fine one."""
    delays = (delay for own in problem.outputs for _, each in own for delay in each)
    times = {*problem.time, *delays} - {0.0}
    for parts in (1, 2, 3, 4, 5, 8, 10, 100):
        if all(abs(t * parts - round(t * parts)) < 1e-9 for t in times):
            return 1 / parts
    return max(times, default=1.0) / _STEPS
