"""A step on a remote mesh, and the driver's work for a call of the step."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpp._program import Bundle, Fed, Message
from jaxpp._specs import axis_sizes, partition_spec
from jaxpp.runtime.arrays import ArrayType, check_arguments, devices_of, put_together, to_host
from jaxpp.runtime.executor import Description, collectives, describe
from jaxpp.runtime.remote._array import RemoteArray, RemoteSharding
from jaxpp.runtime.remote.calls import CHECKS, FED, MOVED, VALUE, Call, Move

if TYPE_CHECKING:
    from jaxpp.runtime.remote._mesh import RemoteMpmdMesh


class RemoteStep:
    """A step's programs, loaded on the workers of a mesh; called with its flat arguments."""

    def __init__(self, mesh: "RemoteMpmdMesh", bundle: Bundle, number: int):
        self.bundle = bundle
        self.number = number
        self._mesh = mesh
        self._readers = _ranks_of([p.inputs for p in bundle.programs], len(bundle.arguments))
        self._types = [ArrayType.of(a.aval) for a in bundle.arguments]
        #: For each result its type, the ranks that hold it, and its split in each rank.
        self._held = [
            (
                jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)),
                ranks,
                result.spec or (),
            )
            for result, ranks in zip(
                bundle.results,
                _ranks_of([p.outputs for p in bundle.programs], len(bundle.results)),
                strict=True,
            )
            for a in [result.aval]
        ]

    def input_shardings(self) -> list[RemoteSharding]:
        """Gives for each argument the ranks that read it, and its split in each rank."""
        return [
            RemoteSharding(self._mesh, ranks, partition_spec(own.spec))
            for ranks, own in zip(self._readers, self.bundle.arguments, strict=True)
        ]

    def describe(self) -> Description:
        """Describes what each rank holds, sends and reduces; reads the executables on the ranks."""
        sizes = [axis_sizes(inside) for inside in self._mesh.insides]
        found = self._mesh.apply(look_at, {r: (self.number, own) for r, own in enumerate(sizes)})
        devices, counted = zip(*(found[rank] for rank in range(len(sizes))), strict=True)
        return describe(self.bundle, devices, counted, sizes)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Starts the step on all ranks, and returns at once."""
        if (results := put_together(self, args)) is not None:
            return results
        check_arguments(self.bundle, args)
        for arg in args:
            if isinstance(arg, RemoteArray):
                self._check_mesh(arg)
        with self._mesh.turn(self.number) as number:
            return self._call(number, args)

    def _check_mesh(self, arg: RemoteArray) -> None:
        if arg.mesh is not self._mesh:
            raise ValueError(
                f"{arg!r} is on another mesh than the step; fetch it with jax.device_get first."
            )
        self._mesh.check_array(arg)

    def _call(self, number: int, args: Sequence[Any]) -> list[Any]:
        mesh, bundle = self._mesh, self.bundle
        moves, dropped = self._plan(args)
        results = mesh.new_ids(len(self._held))
        values = {
            n: _bytes_of(arg, self._types[n])
            for n, arg in enumerate(args)
            if not isinstance(arg, RemoteArray | Fed) and self._readers[n]
        }
        mesh.note_traced(self.number, bundle)
        checks = tuple(name for name in CHECKS if getattr(jax.config, f"jax_{name}"))
        calls = []
        for program in bundle.programs:
            rank = program.rank
            numbers = [n for n, _ in program.inputs]
            fed = [args[n] for n in numbers if isinstance(args[n], Fed)]
            mesh.load_batches(rank, dict.fromkeys(leaf.batch for leaf in fed))
            call = Call(
                number,
                self.number,
                tuple(_source(args[n], rank) for n in numbers),
                results,
                (*mesh.releases(rank), *dropped[rank]),
                tuple(
                    m
                    for m in moves
                    if mesh.moves_all or m.message.source == rank or m.message.target == rank
                ),
                tuple((leaf.batch.number, leaf.index) for leaf in fed),
                checks,
            )
            calls.append((rank, call.pack([values[n] for n in numbers if n in values])))
        mesh.submit(calls)
        for n in bundle.donated:
            arg = args[n]
            if isinstance(arg, RemoteArray):
                arg.consume(f"donated as args{bundle.arguments[n].name} to call {number}")
            elif isinstance(arg, jax.Array):
                arg.delete()
        return [RemoteArray(mesh, results + n, *own) for n, own in enumerate(self._held)]

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


def look_at(
    process: Any, step: int, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[int, Counter[tuple[str, str]]]]:
    """Gives a rank's devices, and the collectives of each computation that it runs in a step.

    Args:
        process: the rank's.
        step: the number of the step.
        sizes: the axes inside the rank, and their sizes.
    """
    counted = {
        n: collectives(call.as_text() or "", tuple(sizes.values()), tuple(sizes))
        for n, call in enumerate(process.executables(step))
        if call is not None and sizes
    }
    return tuple(map(str, devices_of(process.home))), counted


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
    """Gives for each argument or result the ranks whose programs have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, own in enumerate(pairs):
        for number, _ in own:
            found[number].append(rank)
    return [tuple(dict.fromkeys(ranks)) for ranks in found]
