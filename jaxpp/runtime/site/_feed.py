"""Arguments that the ranks load themselves: the driver's side, and a rank's side."""

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.tree_util as jtu

from jaxpp._program import Fed
from jaxpp._specs import type_of
from jaxpp.runtime.arrays import ArrayType
from jaxpp.runtime.site._carried import unpacked


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The load of one argument of one call: `load(value)`.

    The `function` is a number, with a `reference` to the function; it and the `value` are packed.
    """

    number: int
    function: int
    reference: Any
    value: Any


#: The functions that a mesh keeps; one that is used again later is described again.
KEPT = 64


class Feeds:
    """The driver's side: the functions that load, and the types of the arrays that each gives."""

    def __init__(self, mesh: Any, group: Any):
        self._mesh, self._put, self._pack = mesh, group.put, group.pack
        #: The functions that are kept, each with its number, packed, and with its types.
        self._loads: collections.deque[tuple[Any, int, Any, Any]] = collections.deque(maxlen=KEPT)
        self._functions, self._batches = itertools.count(), itertools.count()

    def __call__(self, load: Callable[[Any], Any], value: Any) -> Any:
        """Returns placeholders of `load(value)` for the arguments of a call."""
        found = next((own for own in self._loads if own[0] == load), None)
        if found is None:
            types = self._mesh.apply(describe_batch, {0: (load, value)}, ordered=False)[0]
            found = load, next(self._functions), self._pack(load), types
            self._loads.append(found)
        _, number, function, types = found
        batch = Batch(next(self._batches), number, self._put(function), self._pack(value))
        leaves, tree = jtu.tree_flatten(types)
        return jtu.tree_unflatten(tree, [Fed(batch, i, aval) for i, aval in enumerate(leaves)])


class Loader:
    """A rank's side: loads batches one after the other, while the step before runs."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get
        #: The functions that are kept, by number: each may have a state.
        self._functions: dict[int, Callable[[Any], Any]] = {}
        #: By number the leaves of a batch, each with its path, or what its load raised.
        self._batches: dict[int, list[tuple[Any, Any]] | BaseException] = {}
        self._there = threading.Condition()
        self._stopped: BaseException | None = None

    def load(self, batch: Batch) -> None:
        """Loads a batch; keeps an error for the caller of `take`."""
        found: list[tuple[Any, Any]] | BaseException
        value: Any = "what could not be read"
        try:
            if batch.function not in self._functions:
                self._functions[batch.function] = self._get(batch.reference)
                for number in [*self._functions][:-KEPT]:
                    del self._functions[number]
            value = unpacked(batch.value)
            found = jtu.tree_leaves_with_path(self._functions[batch.function](value))
        except BaseException as error:  # noqa: B036  also an interrupt is told to the driver
            error.add_note(f"in the function that feeds the step, called with {value!r}")
            found = error
        with self._there:
            self._batches[batch.number] = found
            self._there.notify_all()

    def take(self, number: int, leaf: int, expected: ArrayType) -> Any:
        """Waits for an array of a batch; returns it as it was loaded, if it is of a type.

        Raises:
            Exception: what the function that loads the batch raised.
            ValueError: it gave something else than the first time.
        """
        with self._there:
            self._there.wait_for(lambda: number in self._batches or self._stopped is not None)
            found = self._batches.get(number, self._stopped)
        if not isinstance(found, list):
            assert found is not None
            raise found
        if leaf >= len(found):
            raise ValueError(
                f"The function that feeds the step gave {len(found)} array(s), and more the first "
                f"time."
            )
        path, value = found[leaf]
        given = ArrayType.of(jax.typeof(value))
        if given != expected:
            where = f"for {jtu.keystr(path)}" if path else "an array"
            raise ValueError(
                f"The function that feeds the step gave {where} of type {given}, and {expected} "
                f"the first time; a step is compiled for one type: drop what is left of a batch, "
                f"convert it, or place the step again with another function."
            )
        return value

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets batches whose arrays have been taken."""
        for number in numbers:
            self._batches.pop(number, None)

    def stop(self, error: BaseException) -> None:
        """Wakes all threads that wait for a batch, with an error."""
        with self._there:
            self._stopped = error
            self._there.notify_all()


def describe_batch(process: Any, load: Callable[[Any], Any], value: Any) -> Any:
    """Returns the types of the arrays that a function loads; runs on a rank."""
    del process
    return jax.tree.map(lambda leaf: type_of(jax.typeof(leaf)), load(value))
