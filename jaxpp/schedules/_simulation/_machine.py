"""The machine that a table is simulated on, beyond the time of its tasks and transfers."""

import dataclasses
import math
from collections.abc import Sequence

#: A number for all ranks, or one for each.
PerRank = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The ranks and links of a machine, and what each rank does once a step, after its last task.

    The default is the machine of the papers: equal ranks, transfers that disturb nothing, and a
    step that ends with its last task. Times and bytes are in the units of `Costs` and `Memory`.

    Args:
      speed: the speed of a rank; its tasks take their time divided by it.
      shared_links: whether transfers from one rank to another take turns on their link, in the
        order in which they are sent. One takes its bytes over the bandwidth; the latency passes
        beside it. The two ways between a pair of ranks are two links.
      blocking_sends: whether a rank runs nothing until what it sends has arrived.
      gradient_bytes: the bytes of gradients that a rank reduces with its replicas.
      reduction_bandwidth: the bytes of gradients that a rank reduces in one unit of time.
      optimizer: the time of a rank's optimizer.
      resident: what a rank holds all the time: parameters, gradients, the optimizer's state.

    >>> from jaxpp.schedules import OneFOneB, simulate
    >>> table = OneFOneB().table(num_stages=4, num_microbatches=8)
    >>> simulate(table, machine=Machine(optimizer=2.0)).makespan - simulate(table).makespan
    2.0
    >>> simulate(table, machine=Machine(speed=(1, 1, 1, 0.5))).makespan  # the last rank is slow
    57.0
    """

    speed: PerRank = 1.0
    shared_links: bool = False
    blocking_sends: bool = False
    gradient_bytes: PerRank = 0.0
    reduction_bandwidth: float = math.inf
    optimizer: PerRank = 0.0
    resident: PerRank = 0.0

    def check(self, num_ranks: int) -> None:
        """Raises a `ValueError` where the machine is not one of so many ranks."""
        for values in (self.speeds, self.update, self.held):
            values(num_ranks)

    def speeds(self, num_ranks: int) -> tuple[float, ...]:
        """Returns the speed of each rank."""
        return _each("speed", self.speed, num_ranks, above=True)

    def update(self, num_ranks: int) -> tuple[float, ...]:
        """Returns for each rank the time from its last task to the end of its step.

        >>> Machine(gradient_bytes=10.0, reduction_bandwidth=5.0, optimizer=(1.0, 3.0)).update(2)
        (3.0, 5.0)
        """
        times = _each("optimizer", self.optimizer, num_ranks)
        return tuple(map(sum, zip(self.reduction(num_ranks), times, strict=True)))

    def reduction(self, num_ranks: int) -> tuple[float, ...]:
        """Finds for each rank the time in which it reduces its gradients, before its optimizer."""
        if not self.reduction_bandwidth > 0:
            raise ValueError(f"reduction_bandwidth is above 0, got {self.reduction_bandwidth}.")
        sizes = _each("gradient_bytes", self.gradient_bytes, num_ranks)
        return tuple(size / self.reduction_bandwidth for size in sizes)

    def held(self, num_ranks: int) -> tuple[float, ...]:
        """Returns what each rank holds all the time."""
        return _each("resident", self.resident, num_ranks)


def _each(name: str, given: PerRank, num_ranks: int, above: bool = False) -> tuple[float, ...]:
    values = (given,) * num_ranks if isinstance(given, (int, float)) else tuple(given)
    if len(values) != num_ranks:
        raise ValueError(
            f"{name} has {len(values)} numbers for {num_ranks} ranks; give a number for each, or "
            f"one for all."
        )
    if not all((0 < v if above else 0 <= v) and v < math.inf for v in values):
        raise ValueError(
            f"{name} is a finite number {'above' if above else 'of at least'} 0 for each rank, got "
            f"{given}."
        )
    return tuple(map(float, values))
