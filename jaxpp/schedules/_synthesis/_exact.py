"""The exact solver: the whole problem as a constraint program, for small cases.

It needs OR-tools (the extra `exact`): `pip install "jaxpp[exact]"`.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxpp import _messages
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._synthesis._problem import Problem, evaluate

#: The steps in the longest time, where times are not whole numbers of a longer step.
_STEPS = 1000


def solve(
    problem: Problem, orders: Sequence[Sequence[int]], work_limit: float, seed: int
) -> tuple[list[list[int]], float]:
    """Solves a problem with CP-SAT, or improves on given orders, and proves a bound.

    Each task is an interval, after its inputs; no two run at once on a rank. A rank's memory is a
    reservoir. The microbatches of an op go in order, which loses nothing (see `_bounds`). Times are
    whole numbers of steps, rounded down, so that the solver's bound is a bound for the problem.

    Args:
      problem: the tasks.
      orders: a solution to start from.
      work_limit: where to stop, in the solver's deterministic seconds: about seconds, but the same
        on any machine.
      seed: of the solver.

    Returns:
      The best orders found, and a lower bound on the objective.

    Raises:
      ImportError: OR-tools is not installed.
    """
    _messages.need("exact", "The exact solver", "ortools")
    from ortools.sat.python import cp_model

    step = _step(problem)
    floor = [math.floor(t / step + 1e-6) for t in problem.time]
    start_at = evaluate(problem, orders)
    assert start_at is not None, "the orders deadlock"
    horizon = math.ceil(start_at.value / step) + 1
    horizon = max(horizon, math.ceil(max(start_at.ends) / step) + 1)
    model: Any = cp_model.CpModel()
    starts = [model.new_int_var(0, horizon, "") for _ in floor]
    m = problem.num_microbatches
    for n, own in enumerate(problem.remote):
        if n % m:
            model.add(starts[n] >= starts[n - 1] + floor[n - 1])
        for need, delay in own:
            model.add(starts[n] >= starts[need] + floor[need] + math.floor(delay / step + 1e-6))
        for op in problem.local[n // m]:
            need = op * m + n % m
            model.add(starts[n] >= starts[need] + floor[need])
    goal = model.new_int_var(0, horizon, "")
    for rank, own in enumerate(problem.rank_ops):
        tasks = [op * m + i for op in own for i in range(m)]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[n], floor[n], "") for n in tasks]
        )
        _limit_memory(model, problem, rank, tasks, starts, floor)
        begin = 0
        if problem.objective == "span":
            begin = model.new_int_var(0, horizon, "")
            for op in own:
                if problem.ops[op][0] is Kind.F:
                    model.add(begin <= starts[op * m])
        for op in own:
            model.add(goal >= starts[op * m + m - 1] + floor[op * m + m - 1] - begin)
    model.minimize(goal)
    for n, end in enumerate(start_at.ends):
        model.add_hint(starts[n], round((end - problem.time[n]) / step))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # The same search on any number of cores.
    solver.parameters.max_deterministic_time = work_limit
    status = solver.solve(model)
    bound = max(solver.best_objective_bound, 0.0) * step
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [list(order) for order in orders], bound
    at = [(solver.value(start), n) for n, start in enumerate(starts)]
    found = []
    for own in problem.rank_ops:
        place = {n: at[n][0] for op in own for n in range(op * m, op * m + m)}
        # Tasks of 0 steps keep the order of their ops: forwards come before their readers.
        found.append(sorted(place, key=lambda n: (place[n], place[n] + floor[n], n)))
    return found, bound


def _limit_memory(
    model: Any,
    problem: Problem,
    rank: int,
    tasks: Sequence[int],
    starts: Sequence[Any],
    floor: Sequence[int],
) -> None:
    if problem.limits[rank] == math.inf:
        return
    unit = max(map(abs, problem.change)) / 10**6
    whole = all(float(problem.change[n]).is_integer() for n in tasks)
    unit = 1.0 if whole else unit
    changes = [math.floor(problem.change[n] / unit) for n in tasks]
    times = [
        starts[n] if change > 0 else starts[n] + floor[n]
        for n, change in zip(tasks, changes, strict=True)
    ]
    least = sum(change for change in changes if change < 0)
    most = math.floor(problem.limits[rank] / unit + 1e-6)
    if least < 0 or sum(changes) > most:
        model.add_reservoir_constraint(times, changes, least, most)


def _step(problem: Problem) -> float:
    """Finds, among a few steps, the longest one that divides all times; or else a fine one."""
    times = {*problem.time, *(delay for own in problem.remote for _, delay in own)} - {0.0}
    for parts in (1, 2, 3, 4, 5, 8, 10, 100):
        if all(abs(t * parts - round(t * parts)) < 1e-9 for t in times):
            return 1 / parts
    return max(times, default=1.0) / _STEPS
