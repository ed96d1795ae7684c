"""A rank in its process: its arrays, its inputs, and what it has compiled."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp import _compat
from jaxpp.runtime.arrays import Home, devices_of, own_share, spans, to_host
from jaxpp.runtime.executor import Executor, RankStep, find_invalid
from jaxpp.runtime.site._call import Given, Input, Kept, Loaded, Moved, Part, Source
from jaxpp.runtime.site._failure import Failure, Lost
from jaxpp.runtime.site._feed import Loader
from jaxpp.runtime.site._pickled import Pickled, Traced
from jaxpp.runtime.site._programs import Loading


class RankArrays(dict[int, Any]):
    """The arrays of a rank by number; who waits for one is woken when it comes.

    Args:
        changed: what they wait at.
    """

    def __init__(self, changed: threading.Condition):
        super().__init__()
        self._changed = changed

    def update(self, arrays: Any) -> None:  # pyright: ignore
        """Adds arrays, all at once."""
        with self._changed:
            super().update(arrays)
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True, slots=True)
class _Executable:
    """A compiled computation, and what it was compiled from."""

    call: Callable[..., Any]
    pickled: Pickled | Traced


class Rank:
    """A rank of a site. Functions that `mesh.apply` runs get it as their first argument.

    Where a rank has several processes, each has a `Rank`, and all run the same program.

    Args:
        rank: its number.
        process: the number of this process among those of the rank.
        home: where its arrays are.
        transport: the way of the process's ranks to others.
        changed: notified when arrays come or the process fails.
        fail: called with the rank and an error when the process is to fail.
        get: gives the value of a reference.
        compiled: what the ranks of the process have compiled, each once, by number.
    """

    def __init__(
        self,
        rank: int,
        process: int,
        home: Home,
        transport: Any,
        changed: threading.Condition,
        fail: Callable[[BaseException, int], Failure],
        get: Callable[[Any], Any],
        compiled: dict[int, Any],
    ):
        self.rank, self.process, self.home, self.transport = rank, process, home, transport
        self.arrays = RankArrays(changed)
        self.loader = Loader(get)
        #: Why the process does no more work; None while it is well.
        self.failure: Failure | None = None
        #: Tells whether the step waits for a batch that this rank loads itself.
        self.feeds = False
        self._changed, self._fail, self._get = changed, fail, get
        self._compiled = compiled
        self._executables: dict[int, _Executable] = {}
        #: For each step its executor, and for each input of the program what makes it.
        self._steps: dict[int, tuple[Executor, tuple[Input, ...]]] = {}
        self._resets = 0

    # ---- steps ----------------------------------------------------------------------------------

    def load(self, loading: Loading) -> RankStep:
        """Makes what the rank has of a step."""
        for number, reference in loading.pickled.items():
            if number not in self._executables:
                self._executables[number] = self._compile(number, self._get(reference))
        known = [n if n is None else self._executables[n] for n in loading.computations]

        def find(computation: int, args: Sequence[Any]) -> str | None:
            own = known[computation]
            assert own is not None
            return find_invalid(own.pickled.computation(), self.home, args)

        return RankStep(
            loading.program,
            self.home,
            [own and own.call for own in known],
            [(slot, type_, value.copy()) for slot, type_, value in loading.constants],
            {n: own.pickled.donated for n, own in enumerate(known) if own is not None},
            find,
        )

    def _compile(self, number: int, pickled: Pickled | Traced) -> _Executable:
        """Compiles a computation, or loads what another rank of the process has compiled."""
        first = self._compiled.get(number)
        call = first and _compat.load_on_devices(first, devices_of(self.home))
        call = call or pickled.compile(self.home)
        self._compiled.setdefault(number, call)
        return _Executable(call, pickled)

    def keep(self, loading: Loading, executor: Executor) -> None:
        """Keeps the executor of a step that has been loaded."""
        made = tuple(Input(type_, self.home, spec) for type_, spec in loading.inputs)
        self._steps[loading.step] = executor, made

    def executables(self, step: int) -> Sequence[Any]:
        """Returns the executables of a step's computations; None for one that is not run here."""
        return self._steps[step][0].executables

    def unload(self, step: int, computations: Sequence[int]) -> None:
        """Forgets a step, and computations that no other step has."""
        self._steps.pop(step, None)
        for number in computations:
            self._executables.pop(number, None)
            self._compiled.pop(number, None)

    def send(self, part: Part) -> None:
        """Sends what other ranks read before a step."""
        for move in part.sends:
            self.transport.send([self.arrays[move.array]], move.message)

    def feed(self, step: int, part: Part) -> None:
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
                return make.resplit(self.arrays[array])
            case Given(data):
                return make(data)
            case Moved(message=message):
                return self.transport.receive(message)[0]
            case Loaded(batch, leaf):
                self.feeds = True
                found = self.loader.take(batch, leaf, make.array_type)
                self.feeds = False
                return make.of_loaded(found)

    def take_results(self, step: int, first: int) -> None:
        """Keeps the results of a step that has been dispatched; the first one has that number."""
        executor, _ = self._steps[step]
        slots = executor.slots
        self.arrays.update({first + n: slots[slot] for n, slot in executor.program.outputs})
        for _, slot in executor.program.outputs:
            slots[slot] = None

    # ---- arrays ---------------------------------------------------------------------------------

    def wait_for(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Waits until the calls that make some arrays have been dispatched; returns the arrays.

        Raises:
            Lost: the process has failed, or has been reset, before they were made.
        """
        resets = self._resets

        def known() -> bool:
            over = self.failure is not None or self._resets != resets
            return over or all(n in self.arrays for n in numbers)

        with self._changed:
            self._changed.wait_for(known)
            if any(n not in self.arrays for n in numbers):
                raise Lost("The step that was to make it has failed.")
            return [self.arrays[n] for n in numbers]

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Waits until arrays have been computed; returns their bytes.

        Where the rank has several processes, these are the process's shares.
        """
        to_bytes = own_share if spans(self.home) else to_host
        return list(map(to_bytes, jax.block_until_ready(self.wait_for(numbers))))

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets arrays."""
        for number in numbers:
            self.arrays.pop(number, None)

    # ---- its end --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> Failure:
        """Fails the process with an error of this rank; its first error counts, and is returned."""
        return self._fail(error, self.rank)

    def end(self, failure: Failure) -> None:
        """Wakes all threads that wait here."""
        with self._changed:
            self.failure = failure
            self._changed.notify_all()
        self.loader.stop(Lost("The rank has ended the step."))

    def reset(self) -> None:
        """Drops the arrays of the rank, which must be idle, and makes it fit for work again."""
        with self._changed:
            self.arrays.clear()
            self.failure, self.feeds = None, False
            self._resets += 1
            self._changed.notify_all()
        self.loader.reset()
