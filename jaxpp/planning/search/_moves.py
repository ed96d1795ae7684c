"""The moves of a search: a choice becomes another one."""

import itertools
import math
import random

from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules.building_blocks import loop, waves

#: The starts of searches, in turns: placements, and the number of stages of each rank.
STARTS = ((loop, 1), (waves, 2), (loop, 2))


def start(setting: Setting, directions: int, number: int, halves: bool) -> Choice:
    """Returns stages of about equal work, in loops or waves; a second direction is reversed."""
    place, stages_per_rank = STARTS[number % len(STARTS)]
    layers, ranks = setting.layers, setting.ranks
    stages = min(ranks * stages_per_rank, layers.count)
    share = math.fsum(layers.work(halves)) / stages
    cuts, done = [0], 0.0
    for n, own in enumerate(layers.work(halves)):
        done += own
        left = layers.count - 1 - n  # behind this layer
        wanted = stages - len(cuts)
        if wanted and (left == wanted or (done >= share * len(cuts) and left > wanted)):
            cuts.append(n + 1)
    there = tuple(place(ranks, stages_per_rank)[:stages])
    back = tuple(ranks - 1 - rank for rank in there)
    return Choice((*cuts, layers.count), (there, back)[:directions], halves)


def move(setting: Setting, choice: Choice, choose: random.Random) -> Choice | None:
    """Makes a random move; None where it leads to no choice.

    A cut, or a row of cuts, shifts; a stage goes to another rank; two stages of a direction swap
    their ranks; a row of stages is reversed; a stage is split; two stages become one.
    """
    ranks, stages = setting.ranks, choice.num_stages
    cuts, placement = list(choice.cuts), [list(own) for own in choice.placement]
    own = placement[choose.randrange(len(placement))]
    kind = choose.random()
    if kind < 0.35:
        if stages < 2:
            return None
        first = choose.randrange(1, stages)
        more = int(choose.random() ** 2 * 4) if choose.random() < 0.5 else 0
        step = choose.choice((-2, -1, -1, 1, 1, 2))
        for n in range(first, min(stages, first + 1 + more)):
            cuts[n] += step
    elif kind < 0.5:
        own[choose.randrange(stages)] = choose.randrange(ranks)
    elif kind < 0.68:
        a, b = choose.randrange(stages), choose.randrange(stages)
        own[a], own[b] = own[b], own[a]
    elif kind < 0.74:
        a, b = sorted((choose.randrange(stages), choose.randrange(stages)))
        own[a : b + 1] = own[a : b + 1][::-1]
    elif kind < 0.87:
        stage = choose.randrange(stages)
        if stages >= 10 * ranks or cuts[stage + 1] - cuts[stage] < 2:
            return None
        cuts.insert(stage + 1, choose.randrange(cuts[stage] + 1, cuts[stage + 1]))
        for each in placement:
            each.insert(stage + choose.randrange(2), choose.randrange(ranks))
    else:
        if stages < 2:
            return None
        stage = choose.randrange(1, stages)
        del cuts[stage]
        for each in placement:
            del each[stage - choose.randrange(2)]
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        return None
    if len(set(itertools.chain(*placement))) < ranks:
        return None
    return Choice(tuple(cuts), tuple(map(tuple, placement)), choice.halves)
