"""The steps of a remote mesh: loads them on the workers, and calls them."""

import itertools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp._program import Bundle, Fed, Message
from jaxpp._specs import axis_sizes, partition_spec, type_of
from jaxpp.runtime.arrays import ArrayType, check_arguments, devices_of, put_together, to_host
from jaxpp.runtime.executor import Description, Inspected, describe, inspect
from jaxpp.runtime.remote._array import RemoteArray, RemoteSharding
from jaxpp.runtime.remote._arrays import Arrays
from jaxpp.runtime.remote._library import Library
from jaxpp.runtime.remote.calls import (
    CHECKS,
    FED,
    LARGE,
    MOVED,
    VALUE,
    Batch,
    Call,
    Feeds,
    Lane,
    Move,
    pack,
    uninterrupted,
)

#: Seconds between two looks at whether an array that a call consumes has been fetched.
READING = 1e-3


class Steps:
    """The steps of a mesh, in one order for all ranks.

    Args:
        arrays: the records of the mesh's arrays.
        group: the workers.
        library: the program cache.
        feeds: the functions that feed steps.
    """

    def __init__(self, arrays: Arrays, group: Any, library: Library, feeds: Feeds):
        self.arrays, self.group, self.library, self.feeds = arrays, group, library, feeds
        self.mesh = arrays.mesh
        self.calls = itertools.count(1)
        #: The trace that is being recorded, if there is one.
        self.tracing: Any = None

    def load(self, bundle: Bundle) -> "RemoteStep":
        """Compiles a step on the workers."""
        with self.group.order:
            self.group.check()
            number = self.library.add(bundle)
            step = RemoteStep(self, bundle, number)
            weakref.finalize(step, self.library.remove, number)
            self.install(number)
        return step

    def install(self, step: int) -> None:
        """Brings a step to the workers that do not have it, before any of them begins to run it."""
        group = self.group
        with uninterrupted():
            for rank, *unused in self.library.removals():
                group.post(group.posts(Lane.ORDERED, "unload", rank, *unused))
        loadings = self.library.missing(step)
        if not loadings:  # as in every call but the first
            return
        each = {worker: x for x in loadings for worker in group.workers(x.rank)}
        compile = {worker: x.compile for worker, x in each.items()}
        compiled = group.call(Lane.ORDERED, "compile", compile).values()
        load = {w: (*x.load, self.library.shared(x, each, compiled)) for w, x in each.items()}
        group.call(Lane.ORDERED, "load", load).values()
        self.library.installed(step)

    def settle(self) -> None:
        """Waits until the callbacks of all calls have been made."""
        every = dict.fromkeys(range(len(self.group.members)), ())
        self.group.call(Lane.ORDERED, "settle", every).values()

    def flush(self) -> None:
        """Tells the ranks at once which arrays they may drop; else the next call tells them."""
        with self.group.order, uninterrupted():
            for rank, released in enumerate(self.arrays.releases()):
                if released:
                    self.group.post(self.group.posts(Lane.ORDERED, "drop", rank, released))
        self.group.flush()

    def loads(self, rank: int, batches: Iterable[Batch]) -> list[Any]:
        """Makes the posts that let a rank load the batches that its next call reads."""
        posts = []
        for batch in batches:
            known, has = ("load", batch.load), self.group.has(rank)
            load = None if known in has else self.feeds.load_of(batch)
            posts += self.group.posts(Lane.FEED, "loader.load", rank, batch, load)
            has.add(known)
        return posts


class RemoteStep:
    """A step's programs, loaded on the workers of a mesh; called with its flat arguments."""

    def __init__(self, steps: Steps, bundle: Bundle, number: int):
        self.bundle = bundle
        self.number = number
        self._steps, self._mesh = steps, steps.mesh
        self._readers = _ranks_of([p.inputs for p in bundle.programs], len(bundle.arguments))
        self._types = [ArrayType.of(a.aval) for a in bundle.arguments]
        held = _ranks_of([p.outputs for p in bundle.programs], len(bundle.results))
        #: For each result its type, the ranks that hold it, and its split in each rank.
        self._held = [
            (type_of(result.aval), ranks, result.spec or ())
            for result, ranks in zip(bundle.results, held, strict=True)
        ]

    def input_shardings(self) -> list[RemoteSharding]:
        """Returns for each argument the ranks that read it, and its split in each rank."""
        return [
            RemoteSharding(self._mesh, ranks, partition_spec(own.spec))
            for ranks, own in zip(self._readers, self.bundle.arguments, strict=True)
        ]

    def inspect(self) -> list[Inspected]:
        """Returns each rank's devices and axes, and XLA's analysis of what it runs there."""
        ranks, axes = range(self._mesh.num_ranks), axis_sizes(self._mesh.inside)
        found = self._mesh.apply(look_at, {rank: (self.number, axes) for rank in ranks})
        return [found[rank] for rank in ranks]

    def describe(self) -> Description:
        """Describes what each rank holds, sends and reduces; reads the executables on the ranks."""
        return describe(self.bundle, self.inspect())

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Starts the step on all ranks, and returns at once."""
        if (results := put_together(self, args)) is not None:
            return results
        check_arguments(self.bundle, args)
        # These may have to be computed first.
        values = {
            n: _bytes_of(arg, self._types[n])
            for n, arg in enumerate(args)
            if not isinstance(arg, RemoteArray | Fed) and self._readers[n]
        }
        steps, group = self._steps, self._steps.group
        donated = [args[n] for n in self.bundle.donated if isinstance(args[n], RemoteArray)]
        with group.order:
            self._check(args)
            steps.install(self.number)
            results = None
            while results is None:
                group.wait_for_room()
                with steps.arrays.lock, uninterrupted():
                    if steps.arrays.are_read(donated):
                        results = self._call(next(steps.calls), args, values)
                        group.flush(wait=False)
                if results is None:
                    time.sleep(READING)
        group.flush()
        return results

    def _check(self, args: Sequence[Any]) -> None:
        self._steps.group.check()
        for arg in args:
            if isinstance(arg, RemoteArray):
                if arg.mesh is not self._mesh:
                    raise ValueError(
                        f"{arg!r} is on another mesh than the step; fetch it with jax.device_get "
                        f"first."
                    )
                self._steps.arrays.check_exists(arg)

    def _call(self, number: int, args: Sequence[Any], values: Mapping[int, Any]) -> list[Any]:
        """Posts the calls of all ranks, and takes note of it, without a wait."""
        steps, bundle, group = self._steps, self.bundle, self._steps.group
        moves, dropped = self._plan(args)
        results = steps.arrays.new_ids(len(self._held))
        checks = tuple(name for name in CHECKS if getattr(jax.config, f"jax_{name}"))
        calls, posts, released = {}, [], steps.arrays.releases()
        for program in bundle.programs:
            rank = program.rank
            numbers = [n for n, _ in program.inputs]
            fed = [args[n] for n in numbers if isinstance(args[n], Fed)]
            posts += steps.loads(rank, dict.fromkeys(leaf.batch for leaf in fed))
            own = [values[n] for n in numbers if n in values]
            call = Call(
                number,
                self.number,
                tuple(_source(args[n], rank) for n in numbers),
                results,
                (*released[rank], *dropped[rank]),
                tuple(m for m in moves if rank in (m.message.source, m.message.target)),
                tuple((leaf.batch.number, leaf.index) for leaf in fed),
                checks,
                tuple(v if v.nbytes > LARGE else v.tobytes() for v in own),
            )
            calls[rank] = pack(("run", tuple(call)))
        steps.library.called(number, self.number)
        group.post([*posts, *group.steps(calls)])
        if steps.tracing is not None:
            steps.tracing.steps[self.number] = bundle
        for n in bundle.donated:
            arg = args[n]
            if isinstance(arg, RemoteArray):
                arg.consume(f"donated as args{bundle.arguments[n].name} to call {number}")
            elif isinstance(arg, jax.Array):
                arg.delete()
        held = enumerate(self._held, results)
        return [RemoteArray(steps.arrays, id_, *own) for id_, own in held]

    def _plan(self, args: Sequence[Any]) -> tuple[list[Move], dict[int, list[int]]]:
        """Finds what ranks send before the step, and the donated arrays that each rank drops."""
        moves: list[Move] = []
        dropped: dict[int, list[int]] = {p.rank: [] for p in self.bundle.programs}
        tags = itertools.count(-1, -1)
        for n, (own, arg) in enumerate(zip(self.bundle.arguments, args, strict=True)):
            if not isinstance(arg, RemoteArray):
                continue
            for rank in self._readers[n]:
                if rank not in arg.ranks:
                    names, source = (f"args{own.name}",), arg.ranks[0]
                    specs = (own.spec,) if self.bundle.inside else ()
                    message = Message(
                        next(tags), source, rank, names, ("argument",), (own.aval,), specs
                    )
                    moves.append(Move(arg.id, message))
            if own.donated:
                for rank in arg.ranks:
                    dropped[rank].append(arg.id)
        return moves, dropped


def look_at(process: Any, step: int, axes: Mapping[str, int]) -> Inspected:
    """Inspects a rank in its process.

    Args:
        process: the rank's.
        step: the number of the step.
        axes: the axes inside the rank, and their sizes.
    """
    return inspect(devices_of(process.home), axes, process.executables(step))


def _bytes_of(arg: Any, type_: ArrayType) -> np.ndarray:
    # NumPy's 64-bit types become JAX's 32-bit ones, as in any call of JAX.
    return to_host(arg if isinstance(arg, jax.Array) else np.asarray(arg, type_.host_dtype))


def _source(arg: Any, rank: int) -> int:
    if isinstance(arg, Fed):
        return FED
    if not isinstance(arg, RemoteArray):
        return VALUE
    return arg.id if rank in arg.ranks else MOVED


def _ranks_of(pairs: Sequence[Sequence[tuple[int, int]]], count: int) -> list[tuple[int, ...]]:
    """Returns for each argument or result the ranks whose programs have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, own in enumerate(pairs):
        for number, _ in own:
            found[number].append(rank)
    return [tuple(dict.fromkeys(ranks)) for ranks in found]
