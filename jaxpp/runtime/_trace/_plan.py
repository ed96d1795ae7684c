"""What to wait for, so as to know when a run of a program has ended."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp._program import Free, Program, Receive, Run, Send
from jaxpp.runtime._worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """A run's end is when the array in `slot` is there, or what `mark` makes of that array."""

    position: int
    slot: int | None
    mark: Callable[[Any], Any] | None


def plan(worker: Worker) -> dict[int, Watch]:
    """For the id of each run of a worker's program, what to wait for.

    That is the smallest result which nothing donates later. Who waits for an array that has been
    donated gets an error, for its memory is another array's by then, though dispatched only. Where
    every result is donated, as the accumulators that a backward without an input gradient makes,
    it is one element of the smallest: a computation of its own, dispatched right after the run. To
    wait for the run itself before the next is dispatched would have the device wait, too.
    """
    donated = _donated_results(worker)
    watches = {}
    for position, run in enumerate(worker.program.instructions):
        if not isinstance(run, Run):
            continue
        types = dict(zip(run.outputs, _types_of_results(worker, run), strict=True))
        kept = [slot for slot in types if (position, slot) not in donated]
        slot = min(kept or types, key=lambda slot: _size(types[slot]), default=None)
        mark = None if slot is None or kept else _mark(types[slot])
        watches[id(run)] = Watch(position, slot, mark)
    return watches


def consumers(program: Program) -> dict[int, tuple[int | None, int | None]]:
    """For the tag of each message, the runs that it lies between.

    Those are the positions of the run before it is sent, on the rank that sends, and of the first
    run after it has been received, on the rank that receives; None for the other one of the two,
    and where there is no such run.
    """
    found: dict[int, tuple[int | None, int | None]] = {}
    last: int | None = None
    waiting: list[int] = []
    for position, instruction in enumerate(program.instructions):
        match instruction:
            case Run():
                found.update((tag, (None, position)) for tag in waiting)
                last, waiting = position, []
            case Send(message=message):
                found[message.tag] = (last, None)
            case Receive(message=message):
                waiting.append(message.tag)
    return found


def _donated_results(worker: Worker) -> set[tuple[int, int]]:
    """The runs' results that are donated later: their positions and slots.

    A result of the step may be donated by the next call, or deleted by the user.
    """
    donated: set[tuple[int, int]] = set()
    made: dict[int, int] = {}
    for position, instruction in enumerate(worker.program.instructions):
        match instruction:
            case Run(number, inputs, outputs):
                for i in _donated_inputs(worker.executables[number]):
                    if inputs[i] in made:
                        donated.add((made[inputs[i]], inputs[i]))
                made.update(dict.fromkeys(outputs, position))
            case Receive(slots) | Free(slots):
                for slot in slots:
                    made.pop(slot, None)
    returned = {slot for _, slot in worker.program.outputs}
    return donated | {(made[slot], slot) for slot in returned if slot in made}


def _donated_inputs(executable: jax.stages.Compiled) -> list[int]:
    infos = jax.tree_util.tree_leaves(executable.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    return [i for i, info in enumerate(infos) if info.donated]


def _types_of_results(worker: Worker, run: Run) -> list[Any]:
    return jax.tree_util.tree_leaves(worker.executables[run.computation].out_info)


def _size(type_: Any) -> float:
    return math.prod(type_.shape) or math.inf  # an array without elements has none to wait for


@functools.cache
def _compiled_mark(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], Any]:
    def mark(x):
        return lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), (1,))

    if isinstance(sharding, NamedSharding):
        mark = jax.shard_map(
            mark,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=PartitionSpec(sharding.mesh.axis_names),
            check_vma=False,
        )
    return jax.jit(mark).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).compile()


def _mark(type_: Any) -> Callable[[Any], Any] | None:
    """What gives an element of an array of a type, of each device; None where it has none."""
    if 0 in type_.shape:
        return None
    sharding, (device, *others) = type_.sharding, type_.sharding.device_set
    if not others:
        sharding = SingleDeviceSharding(device)
    return _compiled_mark(type_.shape, type_.dtype, sharding)
