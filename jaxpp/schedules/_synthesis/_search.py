"""The search through a portfolio: the order of its attempts, and their number."""

import dataclasses
import math
import random
import time
from collections.abc import Sequence

from jaxpp.schedules._synthesis._justify import Justifier
from jaxpp.schedules._synthesis._portfolio import Rules, one_at_a_time
from jaxpp.schedules._synthesis._tabu import escape
from jaxpp.schedules.simulator import OrderProblem, Rule, Times, evaluate, list_schedule

#: A list schedule may be so much worse than the best; justified, it may still become the best.
_MUCH_WORSE = 1.1

#: The tasks that local search runs at most, over all tables that it evaluates.
_MOST_WORK = 12_000_000

#: The evaluations of the first local searches; all later ones have as many as the last.
#: They do not depend on the number that is allowed, so a larger one goes on where a smaller ended.
_LENGTHS = (100, 500, 1200, 4000)

#: A step of tabu search counts as so many evaluations.
_STEP = 4

#: The evaluations of local search for each list schedule by a rule that is near another one.
_PER_RULE = 50
_MOST_RULES = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """Orders that fit and do not deadlock, their value, and the rule that made them.

    The origin is the number of the first that was found of those that they were improved from.
    """

    value: float
    source: str
    orders: list[list[int]]
    times: Times
    rule: Rule | None
    origin: int


class Search:
    """A search for the best orders of one problem."""

    def __init__(self, problem: OrderProblem, bound: float, deadline: float):
        """Starts with nothing found; the search ends at the bound, or at the deadline."""
        self.problem, self.bound, self.deadline = problem, bound, deadline
        self.justifier = Justifier(problem)
        self.found: list[Found] = []

    @property
    def best(self) -> Found:
        """The best orders; of equals, the first."""
        return min(self.found, key=lambda found: found.value)

    @property
    def over(self) -> bool:
        """Tells whether nothing better is possible, or the time is up."""
        least = min((found.value for found in self.found), default=math.inf)
        return least <= self.target or time.monotonic() > self.deadline

    @property
    def target(self) -> float:
        """The lower bound, with room for rounding."""
        return self.bound + 1e-9 * self.bound

    def add(
        self,
        source: str,
        orders: Sequence[Sequence[int]] | None,
        rule: Rule | None = None,
        start: Found | None = None,
    ) -> None:
        """Adds orders to those found, if there are any, and they fit and do not deadlock."""
        if orders is None or not self.problem.fits(orders):
            return
        if (times := evaluate(self.problem, orders)) is not None:
            own = [list(order) for order in orders]
            origin = len(self.found) if start is None else start.origin
            self.found.append(Found(times.value, source, own, times, rule, origin))

    def run(
        self, given: Sequence[tuple[str, list[list[int]]]], evaluations: int, seed: int
    ) -> None:
        """Searches from given orders, by name: adds all of them, then goes on as far as allowed."""
        for source, orders in given:
            self.add(source, orders)
        known = sorted(self.found, key=lambda found: found.value)
        self.add("one microbatch at a time", one_at_a_time(self.problem))
        self._justify(known)
        if self.over:
            return
        choose = random.Random(seed)
        rules = Rules(self.problem, self.bound)
        self._list_schedules(rules, known[:3])
        self._justify([found for found in self.found if found.rule])
        # Many tasks take their time, and by now little is left to gain.
        left = min(evaluations, _MOST_WORK // len(self.problem.time) + 1)
        number = 0
        while left > 0 and not self.over:
            length = _LENGTHS[min(number, len(_LENGTHS) - 1)]
            first = len(self.found)
            self._near_rules(rules, min(length // _PER_RULE, _MOST_RULES), choose)
            self._justify(self.found[first:])
            self._local_search(number, length, min(left, length), choose)
            left -= length
            number += 1

    def _justify(self, starts: Sequence[Found], most: int = 3) -> None:
        """Justifies the best orders of a few different values."""
        values: dict[float, Found] = {}
        for found in sorted(starts, key=lambda found: found.value):
            values.setdefault(found.value, found)
        for found in list(values.values())[:most]:
            if self.over:
                return
            orders = self.justifier.improve(found.orders, found.times)
            self.add("justified " + found.source, orders, start=found)

    def _list_schedules(self, rules: Rules, known: Sequence[Found]) -> None:
        grid = [(f"list schedule, rule {n}", rule) for n, rule in enumerate(rules.grid())]
        for start in known:
            grid.append((f"list schedule, as {start.source}", rules.replanned(start)))
        for source, rule in grid:
            if self.over:
                return
            self.add(source, self._list_schedule(rule), rule)

    def _near_rules(self, rules: Rules, most: int, choose: random.Random) -> None:
        """Schedules by rules that are near the best ones."""
        for _ in range(most):
            ruled = sorted((f for f in self.found if f.rule), key=lambda found: found.value)[:3]
            if self.over or not ruled:
                return
            start = choose.choice(ruled)
            assert start.rule is not None
            again = choose.random() < 0.1
            rule = rules.replanned(start) if again else rules.near(start.rule, choose)
            self.add("list schedule, near another rule", self._list_schedule(rule), rule)

    def _list_schedule(self, rule: Rule) -> list[list[int]] | None:
        """Schedules by a rule; gives up where that is much worse than the best."""
        problem, m = self.problem, self.problem.num_microbatches
        most = _MUCH_WORSE * self.best.value
        work = [
            math.fsum(t for op in own for t in problem.time[op * m : op * m + m])
            for own in problem.rank_ops
        ]
        found = list_schedule(problem, rule, [most - own for own in work])
        return found[0] if found else None

    def _local_search(
        self, number: int, length: int, evaluations: int, choose: random.Random
    ) -> None:
        """Improves by tabu search the best orders of one of three origins.

        A search that is cut short has found what the whole one would have found by then. Its result
        is not justified: that of the whole one may be better, and still be worse once justified.
        """
        origins: dict[int, Found] = {}
        for found in sorted(self.found, key=lambda found: found.value):
            origins.setdefault(found.origin, found)
        start = list(origins.values())[: 1 + number // 2 % 3][-1]
        seed, steps = choose.randrange(2**32), evaluations // _STEP
        _, orders = escape(self.problem, start.orders, steps, self.target, seed, self.deadline)
        source = "local search from " + start.source.removeprefix("local search from ")
        self.add(source, orders, start=start)
        if evaluations == length:
            self._justify(self.found[-1:])
