"""The judge of a search: a list schedule, each rank at each moment the first task that may run.

Backwards come first, then forwards, older microbatches before newer ones. A weight gradient fills
the time in which nothing else can run; by some rules it comes before forwards, to free memory.
Where memory is limited, a forward of any microbatch but the rank's oldest leaves room for one whole
microbatch, so the oldest can always go on: no deadlock.
"""

import dataclasses
import functools
import heapq
import math
from heapq import heappop, heappush

from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Kind, Table, Task

#: The rules that decide between tasks that may run: see `_order`. From `EAGER` on they are the same
#: again, with weight gradients before forwards.
RULES = range(8)
EAGER = 4


@functools.lru_cache(maxsize=512)
def _order(stages: int, directions: int, pairs: int, rule: int) -> tuple[list[int], list[int]]:
    """Returns for each task its place in the order of a rule, and for each place its task.

    A microbatch takes `2 * stages` steps along its direction: forwards, then backwards. Task
    `pair * steps + step` is a step of a microbatch; a pair has one microbatch of each direction.
    """
    width = 2 * stages
    steps = width * directions

    def key(task: int):
        pair, step = divmod(task, steps)
        direction, at = divmod(step, width)
        forward = at < stages
        return (
            forward,
            *((pair, -at), (-at, pair), (pair, at), (-at if forward else pair, pair))[rule],
            direction,
        )

    tasks = sorted(range(steps * pairs), key=key)
    places = [0] * len(tasks)
    for place, task in enumerate(tasks):
        places[task] = place
    return places, tasks


@dataclasses.dataclass
class _Ranks:
    """The bytes that the ranks hold, by microbatch, and their limits."""

    held: list[float]
    limits: list[float]
    whole: list[float]
    of: list[dict[int, float]]
    unfinished: list[dict[int, int]]

    def allows(self, rank: int, microbatch: int, more: float) -> bool:
        """Tells whether a forward may run."""
        left = self.unfinished[rank]
        oldest = next(iter(left))
        if microbatch == oldest:
            return True
        others = self.held[rank] - self.of[rank].get(oldest, 0.0)
        return others + more + self.whole[rank] <= self.limits[rank]

    def add(self, rank: int, microbatch: int, more: float) -> None:
        """Notes a forward (`more` above 0), or the end of a microbatch on a stage (below)."""
        self.held[rank] += more
        own = self.of[rank]
        own[microbatch] = own.get(microbatch, 0.0) + more

    def end(self, rank: int, microbatch: int) -> None:
        """Notes that a stage has done all of a microbatch."""
        left = self.unfinished[rank]
        left[microbatch] -= 1
        if not left[microbatch]:
            del left[microbatch]
            self.held[rank] -= self.of[rank].pop(microbatch, 0.0)  # what rounding has left


def _memory(setting: Setting, choice: Choice, kept: list[float], pairs: int) -> _Ranks | None:
    """Starts with nothing held; None where a rank has no room for one microbatch."""
    ranks, directions = range(setting.ranks), len(choice.placement)
    limits = [setting.memory_limit * (1 + 1e-9) - own for own in setting.resident(choice)]
    whole = [0.0] * setting.ranks
    counts = [[0] * directions for _ in ranks]
    for direction, stages in enumerate(choice.placement):
        each = [0.0] * setting.ranks
        for rank, own in zip(stages, kept, strict=True):
            each[rank] += own
            counts[rank][direction] += 1
        whole = list(map(max, whole, each))
    if any(own > limit for own, limit in zip(whole, limits, strict=True)):
        return None
    unfinished = [
        {
            pair * directions + d: counts[rank][d]
            for pair in range(pairs)
            for d in range(directions)
            if counts[rank][d]
        }
        for rank in ranks
    ]
    return _Ranks([0.0] * setting.ranks, limits, whole, [{} for _ in ranks], unfinished)


def judge(
    setting: Setting,
    choice: Choice,
    most: float = math.inf,
    rule: int = 0,
    orders: list[list[tuple[int, int]]] | None = None,
) -> float:
    """Returns the time of a choice under the rule; infinite where it is more than `most`.

    Args:
        setting: the layers and the machine.
        choice: the cut and the placement.
        most: a time from which on the choice is of no interest.
        rule: one of `RULES`.
        orders: a list for each rank, which gets its tasks: a step and a pair of microbatches; for a
            weight gradient the step is that of its input gradient, less all steps.
    """
    placement, stages = choice.placement, choice.num_stages
    directions = len(placement)
    pairs, width = setting.microbatches // directions, 2 * stages
    steps = width * directions
    places, tasks = _order(stages, directions, pairs, rule % EAGER)
    eager = rule >= EAGER
    forward, first, rest = (setting.of_stages(own, choice) for own in setting.sums[choice.halves])
    delays = setting.delays(choice)
    update = setting.update(choice)
    kept = setting.of_stages(setting.activations, choice)
    memory = None
    if setting.memory_limit < math.inf:
        memory = _memory(setting, choice, kept, pairs)
        if memory is None:
            return math.inf
    rank_of: list[int] = []
    times: list[float] = []
    lags: list[float] = []
    left = [most - own for own in update]
    for own in placement:
        rank_of += own
        rank_of += own[::-1]
        speeds = [setting.speed[rank] for rank in own]
        times += [t / s for t, s in zip(forward, speeds, strict=True)]
        times += [t / s for t, s in zip(reversed(first), reversed(speeds), strict=True)]
        hops = [d if a != b else 0.0 for d, a, b in zip(delays, own, own[1:], strict=False)]
        lags += [*hops, 0.0, *reversed(hops), 0.0]
        for stage, rank in enumerate(own):
            work = forward[stage] + first[stage] + rest[stage]
            left[rank] -= pairs * work / setting.speed[rank]
    far = any(lags)
    since, idle = [0.0] * setting.ranks, [True] * setting.ranks
    ready: list[list[int]] = [[] for _ in idle]
    late: list[list[int]] = [[] for _ in idle]  # tasks whose weight gradients are to be run
    for direction, own in enumerate(placement):
        for pair in range(pairs):
            heappush(ready[own[0]], places[pair * steps + direction * width])
    # What happens next: a rank ends a task, or a result arrives (with the task as -1 - task).
    events: list[tuple[float, int, int]] = []
    now, free = 0.0, list(range(setting.ranks))
    while True:
        for rank in free:
            if not idle[rank]:
                continue
            own = ready[rank]
            if eager and late[rank] and not (own and tasks[own[0]] % width >= stages):
                task = -1
            else:
                task = _take(own, tasks, steps, width, stages, memory, rank, kept, directions)
            if task >= 0:
                end = now + times[task % steps]
                if orders is not None:
                    orders[rank].append((task % steps, task // steps))
            elif late[rank]:
                task = late[rank].pop(0)
                step = task % steps
                end = now + rest[width - 1 - step % width] / setting.speed[rank]
                if orders is not None:
                    orders[rank].append((step - steps, task // steps))
                task += len(tasks)
            else:
                continue
            idle[rank] = False
            if now > since[rank]:
                left[rank] -= now - since[rank]
                if left[rank] < 0.0:
                    return math.inf
            since[rank] = end
            heappush(events, (end, rank, task))
        if not events:
            break
        free = []
        now = events[0][0]
        while events and events[0][0] == now:
            _, rank, task = heappop(events)
            free.append(rank)
            if task < 0:  # a result has arrived
                heappush(ready[rank], places[-1 - task])
                continue
            idle[rank] = True
            if task >= len(tasks):  # a weight gradient has ended
                if memory is not None:
                    _free(memory, task - len(tasks), rank, steps, width, kept, directions)
                continue
            step = task % steps
            at = step % width
            if at >= stages and choice.halves:
                late[rank].append(task)
            elif at >= stages and memory is not None:
                _free(memory, task, rank, steps, width, kept, directions)
            if at != width - 1:
                target = rank_of[step + 1]
                if far and lags[step]:
                    heappush(events, (now + lags[step], target, -2 - task))
                else:
                    heappush(ready[target], places[task + 1])
                    free.append(target)
    return max(end + own for end, own in zip(since, update, strict=True))


def _take(
    ready: list[int],
    tasks: list[int],
    steps: int,
    width: int,
    stages: int,
    memory: _Ranks | None,
    rank: int,
    kept: list[float],
    directions: int,
) -> int:
    """Takes the first task that may run; gives -1 where there is none."""
    if not ready:
        return -1
    if memory is None:
        return tasks[heappop(ready)]
    for place in sorted(ready):
        task = tasks[place]
        step = task % steps
        stage = step % width
        if stage < stages:
            microbatch = task // steps * directions + step // width
            if not memory.allows(rank, microbatch, kept[stage]):
                continue
            memory.add(rank, microbatch, kept[stage])
        ready.remove(place)
        heapq.heapify(ready)
        return task
    return -1


def _free(
    memory: _Ranks,
    task: int,
    rank: int,
    steps: int,
    width: int,
    kept: list[float],
    directions: int,
) -> None:
    pair, step = divmod(task, steps)
    microbatch = pair * directions + step // width
    memory.add(rank, microbatch, -kept[width - 1 - step % width])
    memory.end(rank, microbatch)


def table_of(setting: Setting, choice: Choice, rule: int) -> Table:
    """Returns the table that `judge` has timed: microbatch `i` takes direction `i % directions`."""
    orders: list[list[tuple[int, int]]] = [[] for _ in range(setting.ranks)]
    judge(setting, choice, rule=rule, orders=orders)
    directions, stages = len(choice.placement), choice.num_stages
    width = 2 * stages
    ranks = []
    for order in orders:
        own = []
        for step, pair in order:
            direction, at = divmod(step % (width * directions), width)
            microbatch = pair * directions + direction
            if step < 0 and not choice.halves:
                continue
            kind = Kind.W if step < 0 else Kind.I if choice.halves else Kind.B
            kind, stage = (Kind.F, at) if at < stages else (kind, width - 1 - at)
            own.append(Task(kind, stage, microbatch))
        ranks.append(tuple(own))
    return Table(
        tuple(ranks), stages, setting.microbatches, choice.placement,
        direction_of=tuple(n % directions for n in range(setting.microbatches)),
    )  # fmt: skip
