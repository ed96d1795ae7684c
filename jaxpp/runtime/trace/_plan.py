"""Finds the array to wait for in order to know when a run of a program has ended."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp._program import Free, Program, Receive, Run, Send
from jaxpp.runtime.executor import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """The end of a run: the moment when the array in `slot`, or `mark` of that array, is there."""

    position: int
    slot: int | None
    mark: Callable[[Any], Any] | None


def plan(worker: Worker) -> dict[int, Watch]:
    """Finds for each run of an executor's program, by the run's id, the array to wait for.

    The array is the smallest result that is not donated later. A wait for a donated array would
    raise an error, for its memory belongs to another array as soon as that one is dispatched. Where
    every result is donated, as the accumulators of a backward without an input gradient are, the
    array is one element of the smallest result, made by a computation of its own right after the
    run. A wait for the run itself before the next dispatch would let the device wait, too.
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
    """Finds for the tag of each message of a program the run next to it.

    Each pair has the position of the last run before the message is sent, if this rank sends it,
    and that of the first run after it has been received, if this rank receives it. The other one
    of the two is None, and so is either where there is no such run.
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
    """Finds the runs' results that are donated later: their positions and slots.

    A result of the step counts as donated: the next call may donate it, or the user may delete it.
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
    return math.prod(type_.shape) or math.inf  # nobody can wait for an array without elements


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
    """Makes a function that gives an element of an array on each device; None if there is none."""
    if 0 in type_.shape:
        return None
    sharding, (device, *others) = type_.sharding, type_.sharding.device_set
    if not others:
        sharding = SingleDeviceSharding(device)
    return _compiled_mark(type_.shape, type_.dtype, sharding)
