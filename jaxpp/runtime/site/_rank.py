"""A rank in its process: its arrays, its inputs, and what it has compiled."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxpp.runtime.arrays import Home, from_host, own_share, resplit, spans, to_host
from jaxpp.runtime.executor import Executor
from jaxpp.runtime.site._call import Given, Input, Kept, Loaded, Moved, RankCall, Source
from jaxpp.runtime.site._carried import WithSettings
from jaxpp.runtime.site._failure import Lost
from jaxpp.runtime.site._feed import Loader
from jaxpp.runtime.site._programs import Loading


class Rank:
    """A rank of a site. Functions that `mesh.apply` runs get it as their first argument.

    Where a rank has several processes, each has a `Rank`, and all run the same program.
    """

    def __init__(self, site: Any, rank: int, home: Home):
        self.rank, self.home = rank, home
        self.process, self.transport = site.process, site.transport
        #: Its arrays by number; see `keep`.
        self.arrays: dict[int, Any] = {}
        self.loader = Loader(site.get)
        #: Tells whether the step waits for a batch that this rank loads itself.
        self.feeds = False
        #: The programs of the ranks of the process, by number.
        self.computations: dict[int, WithSettings] = site.computations
        self._site, self._end = site, site.end
        #: For each step its executor, and for each input of the program what makes it.
        self._steps: dict[int, tuple[Executor, tuple[Input, ...]]] = {}

    # ---- steps ----------------------------------------------------------------------------------

    def load(self, loading: Loading) -> Executor:
        """Makes the executor of a step, and keeps it."""
        for number, reference in loading.references.items():
            if number not in self.computations:
                self.computations[number] = self._site.get(reference)
        known = [None if n is None else self.computations[n] for n in loading.computations]
        executor = Executor(
            loading.program,
            [own and own.executables.on(self.home) for own in known],
            self.transport,
            [(n, from_host(v.copy(), type_, self.home)) for n, type_, v in loading.constants],
            [own and own.computation for own in known],
            self.home,
        )
        made = tuple(Input(type_, self.home, spec) for type_, spec in loading.inputs)
        self._steps[loading.step] = executor, made
        return executor

    def executables(self, step: int) -> Sequence[Any]:
        """Returns the executables of a step's computations; None for one that is not run here."""
        return self._steps[step][0].executables

    def unload(self, step: int) -> None:
        """Forgets a step."""
        self._steps.pop(step, None)

    def send(self, part: RankCall) -> None:
        """Sends what other ranks read before a step."""
        for move in part.sends:
            self.transport.send([self.arrays[move.array]], move.message)

    def feed(self, step: int, part: RankCall) -> None:
        """Puts the inputs of a step into their slots."""
        executor, makes = self._steps[step]
        slots = [slot for _, slot in executor.program.inputs]
        for slot, make, source in zip(slots, makes, part.inputs, strict=True):
            executor.slots[slot] = self._input(source, make)
        # An array that the transport has yet to send must not be donated.
        self.transport.settle([executor.slots[slot] for slot in slots])
        self.drop(part.dropped)
        self.loader.drop({s.batch for s in part.inputs if isinstance(s, Loaded)})

    def _input(self, source: Source, make: Input) -> Any:
        match source:
            case Kept(array):
                return resplit(self.arrays[array], self.home, make.spec)
            case Given(data):
                return make(data)
            case Moved(message=message):
                return self.transport.receive(message)[0]
            case Loaded(batch, leaf):
                self.feeds = True
                found = self.loader.take(batch, leaf, make.array_type)
                self.feeds = False
                self._site.took(self.rank, batch, leaf, found)
                return make.of_loaded(found)

    def take_results(self, step: int, first: int) -> None:
        """Keeps the results of a step that has been dispatched; the first one has that number."""
        executor, _ = self._steps[step]
        slots = executor.slots
        self.keep({first + n: slots[slot] for n, slot in executor.program.outputs})
        for _, slot in executor.program.outputs:
            slots[slot] = None

    # ---- arrays ---------------------------------------------------------------------------------

    def keep(self, arrays: Any) -> None:
        """Adds arrays by number, all at once, and wakes who waits for one."""
        with self._site.changed:
            self.arrays.update(arrays)
            self._site.changed.notify_all()

    def wait_for(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Waits until the calls that make some arrays have been dispatched; returns the arrays.

        Raises:
            Lost: the process has failed before they were made.
        """
        end, changed = self._end, self._site.changed
        with changed:
            changed.wait_for(lambda: end.done() or all(n in self.arrays for n in numbers))
            if any(n not in self.arrays for n in numbers):
                raise Lost("The step that was to make it has failed.")
            return [self.arrays[n] for n in numbers]

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the bytes of arrays; of several processes of the rank, each has its shares."""
        to_bytes = own_share if spans(self.home) else to_host
        return list(map(to_bytes, jax.block_until_ready(self.wait_for(numbers))))

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets arrays."""
        for number in numbers:
            self.arrays.pop(number, None)
