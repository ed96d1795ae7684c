"""A step of a mesh over several processes, and its calls."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpp._program import Bundle, Fed, Message
from jaxpp._specs import axis_sizes, partition_spec, type_of
from jaxpp.runtime.arrays import ArrayType, check_arguments, devices_of
from jaxpp.runtime.executor import Description, Inspected, describe
from jaxpp.runtime.site._array import Handles, RemoteArray, RemoteSharding
from jaxpp.runtime.site._call import CHECKS, Given, Kept, Loaded, Moved, RankCall, Source, StepCall
from jaxpp.runtime.site._group import Group
from jaxpp.runtime.site._interrupts import uninterrupted
from jaxpp.runtime.site._process import Process


class RemoteStep:
    """A step's programs, which the workers of a mesh know by its `number`."""

    def __init__(self, bundle: Bundle, number: int, arrays: Handles, group: Group):
        self.bundle, self.number = bundle, number
        self._arrays, self._group, self._mesh = arrays, group, arrays.mesh
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
        return describe(self.bundle, self.inspect(), self._group.notes_of(self.bundle))

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Starts the step on all ranks, and returns at once."""
        check_arguments(self.bundle, args)
        # These may have to be computed first.
        values = {
            n: Given.of(arg, self._types[n])
            for n, arg in enumerate(args)
            if not isinstance(arg, RemoteArray | Fed) and self._readers[n]
        }
        group, arrays = self._group, self._arrays
        donated = [args[n] for n in self.bundle.donated if isinstance(args[n], RemoteArray)]
        with group.order:
            self._check(args)
            group.install(self.number)
            while True:
                group.wait_for_room()
                with arrays.lock, uninterrupted():
                    if not (readers := arrays.readers(donated)):
                        return self._call(next(group.calls), args, values)
                readers[0].wait()

    def _check(self, args: Sequence[Any]) -> None:
        self._group.check()
        for own, arg in zip(self.bundle.arguments, args, strict=True):
            if isinstance(arg, RemoteArray):
                if arg.mesh is not self._mesh:
                    raise ValueError(
                        f"args{own.name} is {arg!r}, on another mesh, {arg.mesh!r}: a call takes "
                        f"arrays of its own mesh, {self._mesh!r}, and of this process. To bring it "
                        f"here, pass jaxpp.gather(x), which fetches it while its mesh runs."
                    )
                self._arrays.check_exists(arg)

    def _call(self, number: int, args: Sequence[Any], values: Mapping[int, Any]) -> list[Any]:
        """Calls the step on all workers, and takes note of it, without a wait."""
        bundle, arrays = self.bundle, self._arrays
        parts = self._parts(args, values)
        results = arrays.new_ids(len(self._held))
        checks = tuple(name for name in CHECKS if getattr(jax.config, f"jax_{name}"))
        calls = {
            worker: StepCall(number, self.number, results, checks, own)
            for worker, own in self._group.by_worker(parts).items()
        }
        self._load_batches(args)
        self._group.send_steps(calls, [values.get(n, arg) for n, arg in enumerate(args)])
        if (tracing := self._mesh.tracing) is not None:
            tracing.steps[self.number] = bundle
        for n in bundle.donated:
            arg = args[n]
            if isinstance(arg, RemoteArray):
                arg.consume(f"donated as args{bundle.arguments[n].name} to call {number}")
            elif isinstance(arg, jax.Array):
                arg.delete()
        held = enumerate(self._held, results)
        return [RemoteArray(arrays, id_, *own) for id_, own in held]

    def _load_batches(self, args: Sequence[Any]) -> None:
        """Lets the ranks load the batches that this call reads."""
        readers: dict[int, tuple[Any, set[int]]] = {}
        for arg, ranks in zip(args, self._readers, strict=True):
            if isinstance(arg, Fed):
                readers.setdefault(arg.batch.number, (arg.batch, set()))[1].update(ranks)
        for batch, ranks in readers.values():
            self._group.send_by_rank(Process.load_batch, dict.fromkeys(ranks), batch)

    def _parts(self, args: Sequence[Any], values: Mapping[int, Any]) -> dict[int, RankCall]:
        """Says where each rank finds its inputs, what it sends before, and what it drops."""
        inputs: dict[tuple[int, int], Source] = {}
        sends: dict[int, list[Moved]] = {p.rank: [] for p in self.bundle.programs}
        dropped = list(map(list, self._arrays.releases()))
        tags = itertools.count(-1, -1)
        for n, (own, arg) in enumerate(zip(self.bundle.arguments, args, strict=True)):
            for rank in self._readers[n]:
                if isinstance(arg, Fed):
                    inputs[n, rank] = Loaded(arg.batch.number, arg.index)
                elif not isinstance(arg, RemoteArray):
                    inputs[n, rank] = values[n]
                elif rank in arg.ranks:
                    inputs[n, rank] = Kept(arg.id)
                else:
                    names, source = (f"args{own.name}",), arg.ranks[0]
                    specs = (own.spec,) if self.bundle.inside else ()
                    message = Message(
                        next(tags), source, rank, names, ("argument",), (own.aval,), specs
                    )
                    inputs[n, rank] = moved = Moved(arg.id, message)
                    sends[source].append(moved)
            if own.donated and isinstance(arg, RemoteArray):
                for rank in arg.ranks:
                    dropped[rank].append(arg.id)
        return {
            p.rank: RankCall(
                tuple(inputs[n, p.rank] for n, _ in p.inputs),
                tuple(sends[p.rank]),
                tuple(dropped[p.rank]),
            )
            for p in self.bundle.programs
        }


def look_at(process: Any, step: int, axes: Mapping[str, int]) -> Inspected:
    """Inspects a rank of some axes in its process."""
    return Inspected.of(devices_of(process.home), axes, process.executables(step))


def _ranks_of(pairs: Sequence[Sequence[tuple[int, int]]], count: int) -> list[tuple[int, ...]]:
    """Returns for each argument or result the ranks whose programs have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, own in enumerate(pairs):
        for number, _ in own:
            found[number].append(rank)
    return [tuple(dict.fromkeys(ranks)) for ranks in found]
