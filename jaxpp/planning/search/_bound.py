"""A lower bound on the time of any plan: any cut, any placement and any order.

Let `T` be the time of a plan with one direction. Sort ranks by their first start. Ranks begin with
the forward of different stages, so the one numbered `i` (from 0) begins with a layer that at least
`i` layers come before, whose forwards are done by then. So it has at most `T` less the time of the
first `i` forwards for its tasks. All ranks together run all tasks of all microbatches:

    T >= (microbatches * work + sum over i < ranks of the forwards of the first i layers) / ranks

Where the layers are a graph, a rank may begin with a layer that waits for no others: nothing is
added for those before it.

With `d` directions a stage is on at most `d` ranks, so it is the first `i // d` layers. Where ranks
differ in speed, each term counts times a speed; the least sum has the fastest ranks begin first.
After its tasks a rank updates the parameters that it has, and each is on some rank. Of several
steps in one program all tasks count, and the forwards before a rank begins once.

Where memory is limited, what a rank holds over time is an area, of at most its room times the time
from its first start. A layer's activation is held from its forward over those behind it and their
input gradients, to its own weight gradient, at the speed of the fastest ranks:

    T >= (microbatches * area + sum over i of the room of a rank * those forwards) / room of all

The room of a rank is its memory less what it holds all the time. Where that differs by rank, the
forwards are left out.
"""

import math

from jaxpp.planning.search._layers import sums
from jaxpp.planning.search._setting import Setting


def lower_bound(setting: Setting, directions: int = 1) -> float:
    """Returns a time that no plan with at most so many directions beats.

    Args:
        setting: the layers and the machine.
        directions: in how many directions microbatches may go.

    Example:
        >>> from jaxpp.planning.search import Layers
        >>> layers = Layers((1.0,) * 8, (1.0,) * 8, (1.0,) * 8)
        >>> lower_bound(Setting(layers, ranks=4, microbatches=8))
        49.5
    """
    layers, ranks, m = setting.layers, setting.ranks, setting.microbatches * setting.steps
    fastest = max(setting.speeds)
    forwards = sums(layers.forward)
    heads = [forwards[min(i // directions, layers.count)] / fastest for i in range(ranks)]
    heads = [0.0] * ranks if layers.inputs else heads
    speeds = sorted(setting.speeds, reverse=True)
    # Where a backward has two forms, each layer counts by the form that takes less.
    work = [min(own) for own in zip(*map(layers.work, layers.forms), strict=True)]
    waiting = math.fsum(speed * head for speed, head in zip(speeds, heads, strict=True))
    state = sum(layers.parameter_bytes)
    update = setting.update_seconds(state) + min(speeds) * setting.reduction_seconds(state, True)
    best = max(
        (m * math.fsum(work) + waiting + setting.steps * update) / sum(speeds),
        m * max(work) / sum(speeds[:directions]),
    )
    if setting.memory_limit == math.inf or not any(layers.activation_bytes):
        return best / setting.steps
    halves = layers.forms[0]
    _, first, rest = layers.parts(halves)
    there = back = area = 0.0
    least = first if len(layers.forms) == 1 else (0.0,) * layers.count
    last = rest if len(layers.forms) == 1 else (0.0,) * layers.count
    for n in reversed(range(layers.count)):
        there, back = there + layers.forward[n], back + least[n]
        if layers.inputs:
            there, back = layers.forward[n], least[n]
        area += layers.activation_bytes[n] * (there + back + last[n]) / fastest
    state = setting.copies(True) * state
    room = ranks * setting.memory_limit - state
    late = 0.0 if state else setting.memory_limit * sum(heads)
    return max(best, (m * area + late) / room if room > 0 else 0.0) / setting.steps
