"""Lowers a placed step to one program per rank.

First the runs of all ranks are listed in an order in which they can happen; then each value that is
read on a rank that did not make it gets a send right after it is made and a receive right before
its first use, and each slot is freed after its last use.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, _jaxprs, schedules
from jaxpp._program import (
    Bundle,
    Computation,
    Free,
    Instruction,
    Message,
    Program,
    Receive,
    Run,
    Send,
)
from jaxpp._specs import Spec, replicated
from jaxpp.transforms import _loop, _marks, _placement
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import assign, with_specs


@dataclasses.dataclass(eq=False)
class _Event:
    """One run on one rank, over named values."""

    rank: int
    computation: int
    inputs: list[Hashable]
    outputs: list[Hashable]
    label: str


class _Computations:
    """The computations of a step, equal ones once."""

    def __init__(self):
        self.items: list[Computation] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, name: str, make) -> int:
        """The number of the computation with a key; `make()` gives its jaxpr and donations."""
        if key not in self._numbers:
            self._numbers[key] = len(self.items)
            jaxpr, donated = make()
            self.items.append(Computation(name, jaxpr, donated))
        return self._numbers[key]

    def add(self, key: Any, computation: Computation) -> int:
        """The number of a computation with a key."""
        if key not in self._numbers:
            self._numbers[key] = len(self.items)
            self.items.append(computation)
        return self._numbers[key]


def lower(step: Step, placement: _placement.Placement) -> Bundle:
    """Lowers a step, whose equations are placed, to programs."""
    lowering = _Lowering(step, placement)
    for part in placement.steps:
        if isinstance(part, _placement.Segment):
            lowering.segment(part)
        else:
            lowering.loop(part)
    return lowering.bundle()


class _Lowering:
    def __init__(self, step: Step, placement: _placement.Placement):
        self.step = step
        self.placement = placement
        #: Values that share memory one after the other, by what they are part of, and their firsts.
        self.groups: dict[Hashable, Hashable] = {}
        self.beginnings: set[Hashable] = set()
        #: Why values are sent to be put together with others.
        self.why_gathered = {
            v: why
            for e in step.jaxpr.eqns
            if e.outvars and (why := step.fact(e.outvars[0]).gathered)
            for v in _jaxprs.variables(e.invars)
        }
        #: The rank of each place: of each stage, in one direction after the other.
        self.ranks_of = sum(placement.directions, ())
        self.num_ranks = max(self.ranks_of) + 1
        self.args = dict(zip(step.jaxpr.jaxpr.invars, step.arguments, strict=True))
        self.computations = _Computations()
        self.events: list[_Event] = []
        self.segments: list[tuple[int, _placement.Segment]] = []
        self.avals: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, str] = {}
        self.names: dict[Hashable, str] = {}
        for v, own in self.args.items():
            self._name(v, v.aval, _kind(v, "argument"), f"args{own.name}")
        self.constants: dict[Hashable, Any] = {}
        self.loop_number = itertools.count()

    def ranks(self, place: _placement.Place) -> list[int]:
        return sorted({self.ranks_of[s] for s in place})

    # ---- segments -------------------------------------------------------------------------------

    def segment(self, segment: _placement.Segment) -> None:
        """Adds a segment's run on each rank of its place; its computation is chosen at the end."""
        maker = {v: e for e in segment.part.jaxpr.eqns for v in e.outvars}
        for v in segment.part.outputs:
            call = _marks.stage_of_call(maker[v]) if v in maker else None
            if v not in self.names:
                kind = _kind(v, "gathered" if call is None else "edge")
                self._name(v, v.aval, kind, f"{segment.label} {_origin(maker.get(v))}")
        part, constants = _jaxprs.lift_arrays(segment.part)
        segment = dataclasses.replace(segment, part=part)
        inputs = [*part.inputs, *map(self._operand, constants)]
        for rank in self.ranks(segment.place):
            event = _Event(rank, -1, list(inputs), list(part.outputs), segment.label)
            self.segments.append((len(self.events), segment))
            self.events.append(event)

    def _finish_segments(self, last_use, shared) -> None:
        """Gives segments their computations, donating what nothing reads after them."""
        structures: dict[int, Any] = {}
        for index, segment in self.segments:
            event = self.events[index]
            part = segment.part
            free = [
                i
                for i, v in enumerate(event.inputs)
                if last_use.get((event.rank, v)) == index
                and (event.rank, v) not in shared
                and (v not in self.args or self.args[v].donated)
                and v not in self.constants
            ]
            taken = _pair_by_type(
                [v.aval for v in part.outputs], [(i, part.inputs[i].aval) for i in free]
            )
            if id(segment) not in structures:
                structures[id(segment)] = _jaxprs.structure(part.jaxpr)
            name = f"{segment.label}_{'_'.join(map(str, sorted(segment.place)))}"
            event.computation = self.computations.number(
                (structures[id(segment)], taken),
                name,
                lambda: (part.jaxpr, taken),  # noqa: B023
            )

    # ---- loops ----------------------------------------------------------------------------------

    def loop(self, loop: _placement.Loop) -> None:
        """Adds the runs of a loop's tasks in an order in which the ranks can run them."""
        number = next(self.loop_number)
        tasks, table = loop.tasks, loop.tasks.table
        length = table.num_microbatches
        order = [t for _, t in schedules.execution_order(table, tasks.dependencies)]
        taken = table.direction_of if tasks.num_directions > 1 else (0,) * length
        bodies = [(task, tasks.body(task, taken[task.microbatch])) for task in order]
        order = [(task, body) for task, body in bodies if body is not None]
        last_writer = {r: task for task, body in order for r in body.outputs if r.source != "value"}
        lifted = {body: _jaxprs.lift_arrays(_whole(body.jaxpr)) for body in tasks.bodies}
        computations = {
            body: self._task_computation(body, part.jaxpr, loop)
            for body, (part, _) in lifted.items()
        }
        # Where operands are; accumulators and results move on as tasks update them.
        known: dict[str, list[Hashable]] = {
            "const": [self._operand(v) for v in loop.consts],
            "x": [self._operand(v) for v in loop.xs],
            "carry": list(loop.carries),
            "y": list(loop.ys),
        }
        results = {"carry": loop.carry_outs, "y": loop.y_outs}
        for source in results:
            for i, key in enumerate(known[source]):
                if not _jaxprs.is_literal(key):  # of which nothing reads the beginning
                    self.beginnings.add(key)
                    self.groups[key] = number, source, i
        for task, body in order:
            mb = length - 1 - task.microbatch if loop.eqn.params["reverse"] else task.microbatch
            inputs = [
                (number, mb, r.index) if r.source == "value" else known[r.source][r.index]
                for r in body.inputs
            ]
            inputs += map(self._operand, lifted[body][1])
            if _is_indexed(body):
                inputs.append(self._number(np.int32(mb)))
            outputs: list[Hashable] = []
            for ref, v in zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True):
                if ref.source == "value":
                    key = self._name((number, mb, ref.index), v.aval, "edge", str(task))
                else:
                    if ref.source == "y":
                        inputs.append(known["y"][ref.index])
                    result = results[ref.source][ref.index]
                    key = result if task == last_writer[ref] else (number, ref, mb)
                    kind = _kind(result, {"carry": "gradient", "y": "gathered"}[ref.source])
                    self._name(key, result.aval, kind, f"result of {task.kind}{task.stage}")
                    self.groups[key] = number, ref.source, ref.index
                    known[ref.source][ref.index] = key
                outputs.append(key)
            rank = self.ranks_of[body.stage]
            self.events.append(_Event(rank, computations[body], inputs, outputs, str(task)))

    def _name(self, key: Hashable, aval: Any, kind: str, name: str) -> Hashable:
        """Notes what messages say of a value, and gives it back."""
        if key in self.why_gathered:
            kind = "scalar" if kind == "scalar" else "gathered"
            name = f"{name} {self.why_gathered[key]}"
        self.avals[key], self.kinds[key], self.names[key] = aval, kind, name
        return key

    def _operand(self, atom: Any) -> Hashable:
        """The key of an atom; a literal is there before the step."""
        if not _jaxprs.is_literal(atom):
            return atom
        if not _jaxprs.is_array_literal(atom):
            return self._number(_jaxprs.literal_array(atom))
        if (key := ("array", id(atom.val))) not in self.constants:
            self.constants[key] = _jaxprs.literal_array(atom)
        return key

    def _number(self, value: Any) -> Hashable:
        key = (str(value.dtype), np.asarray(value).tobytes())
        self.constants[key] = value
        return key

    def _task_computation(
        self, body: _loop.TaskBody, jaxpr: jex.ClosedJaxpr, loop: _placement.Loop
    ) -> int:
        """A task as a computation: it slices its microbatch, and updates accumulators in place.

        Its `jaxpr` takes the arrays that it closes over after its other inputs.
        """
        xs = [loop.xs[r.index].aval if r.source == "x" else None for r in body.inputs]
        xs += [None] * (len(jaxpr.in_avals) - len(xs))
        y_avals = [loop.y_outs[r.index].aval for r in body.outputs if r.source == "y"]
        indexed = _is_indexed(body)
        pattern = (
            tuple(r.source == "x" for r in body.inputs),
            tuple(r.source == "carry" for r in body.inputs),
            tuple(r.source == "y" for r in body.outputs),
            tuple(str(a) for a in y_avals),
            loop.tasks.table.num_microbatches if indexed else None,
        )
        carries = tuple(i for i, r in enumerate(body.inputs) if r.source == "carry")

        def run(*operands):
            own = list(operands[: len(xs)])
            index = operands[len(xs)] if indexed else None
            buffers = iter(operands[len(xs) + indexed :])
            own = [
                x if a is None else jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
                for x, a in zip(own, xs, strict=True)
            ]
            outputs = _jaxprs.run(jaxpr, *own)
            return [
                jax.lax.dynamic_update_index_in_dim(next(buffers), y, index, 0)
                if r.source == "y" else y
                for r, y in zip(body.outputs, outputs, strict=True)
            ]  # fmt: skip

        def make():
            avals = [
                v.aval if a is None else a for v, a in zip(jaxpr.jaxpr.invars, xs, strict=True)
            ]
            if indexed:
                avals.append(jax.ShapeDtypeStruct((), jnp.int32))
            first = len(avals)
            whole, consts = _jaxprs.without_constants(jax.make_jaxpr(run)(*avals, *y_avals))
            assert not consts
            return whole, (*carries, *range(first, first + len(y_avals)))

        return self.computations.number((_jaxprs.structure(jaxpr), pattern), body.name, make)

    # ---- programs -------------------------------------------------------------------------------

    def bundle(self) -> Bundle:
        homes = {v: self.ranks(place) for v, place in self.placement.homes.items()}
        final = [(v, self.ranks(place)) for v, place in self.placement.final]
        # Who makes each value, and who reads it.
        made: dict[Hashable, dict[int, int]] = {v: dict.fromkeys(r, -1) for v, r in homes.items()}
        readers: dict[Hashable, dict[int, int]] = {}
        last_use: dict[tuple[int, Hashable], int] = {}
        end = len(self.events)
        for index, event in enumerate(self.events):
            for key in event.outputs:
                made.setdefault(key, {})[event.rank] = index
            for key in event.inputs:
                readers.setdefault(key, {}).setdefault(event.rank, index)
                last_use[event.rank, key] = index
        for v, ranks in final:
            for rank in ranks:
                readers.setdefault(v, {}).setdefault(rank, end)
                last_use[rank, v] = end
        routes, moved = self._routes(made, readers)
        for _, key in moved:
            source = min(made[key])
            last_use.setdefault((source, key), made[key][source])
        returned = {(rank, v) for v, ranks in final for rank in ranks}
        self._finish_segments(last_use, moved | returned | {(min(made[k]), k) for _, k in moved})
        specs = self._assign_specs()
        sends, receives = self._messages(routes, specs)
        writers = [_ProgramWriter(rank, last_use, self.constants) for rank in range(self.num_ranks)]
        for n, v in enumerate(self.args):
            for rank in homes[v]:
                writers[rank].inputs.append((n, writers[rank].slot(v)))
        for rank, writer in enumerate(writers):
            writer.send(sends.get((-1, rank), ()))
        for index, event in enumerate(self.events):
            writer = writers[event.rank]
            writer.receive(receives.get((index, event.rank), ()))
            writer.run(index, event, self.computations.items[event.computation].donated)
            writer.send(sends.get((index, event.rank), ()))
            writer.free(index)
        for rank, writer in enumerate(writers):
            writer.receive(receives.get((end, rank), ()))
        for n, (v, ranks) in enumerate(final):
            for rank in ranks:
                writers[rank].outputs.append((n, writers[rank].slot(v)))
        homes_of = list(zip(*self.placement.directions, strict=True))
        stages = [
            tuple(s for s, ranks in enumerate(homes_of) if rank in ranks)
            for rank in range(self.num_ranks)
        ]
        results = (
            dataclasses.replace(result, spec=specs.get(v, ()))
            for result, (v, _) in zip(self.step.results, final, strict=True)
        )
        return Bundle(
            tuple(w.program(s) for w, s in zip(writers, stages, strict=True)),
            tuple(self.computations.items),
            self.step.arguments,
            tuple(results),
            self.step.inside and self.step.inside.mesh,
        )

    def _assign_specs(self) -> dict[Hashable, Spec]:
        """How each value is split inside a rank; the events get computations that are, too."""
        if self.step.inside is None:
            return {}
        fixed: dict[Hashable, Spec] = {v: own.spec for v, own in self.args.items()}
        fixed.update((key, replicated(np.ndim(value))) for key, value in self.constants.items())
        for (v, _), result in zip(self.placement.final, self.step.results, strict=True):
            if result.spec is not None:
                fixed.setdefault(v, result.spec)
        sizes = self.step.inside.own_sizes
        specs = assign(
            self.events,
            self.computations.items,
            fixed,
            self.groups,
            self.beginnings,
            sizes,
        )
        whole = self.computations
        self.computations = _Computations()
        for event in self.events:
            own = tuple(specs[k] for k in event.inputs), tuple(specs[k] for k in event.outputs)
            split = with_specs(whole.items[event.computation], *own, sizes)
            event.computation = self.computations.add((event.computation, own), split)
        return specs

    def _routes(
        self, made: dict[Hashable, dict[int, int]], readers: dict[Hashable, dict[int, int]]
    ):
        """What is sent after which event, and before which it is read, by (event, source, target).

        Also the ranks that values are sent to, with the values.
        """
        wanted: dict[tuple[int, int, int], list[Hashable]] = {}
        first_read: dict[tuple[int, int, int], int] = {}
        moved: set[tuple[int, Hashable]] = set()
        for key, by_rank in readers.items():
            if key in self.constants:
                continue
            for rank, index in by_rank.items():
                if rank in made[key]:
                    continue
                source = min(made[key])
                route = (made[key][source], source, rank)
                wanted.setdefault(route, []).append(key)
                first_read[route] = min(first_read.get(route, index), index)
                moved.add((rank, key))
        return {route: (wanted[route], first_read[route]) for route in sorted(wanted)}, moved

    def _messages(self, routes, specs: Mapping[Hashable, Spec]):
        """The sends after each event and the receives before each, by (event, rank)."""
        sends: dict[tuple[int, int], list[tuple[list[Hashable], Message]]] = {}
        receives: dict[tuple[int, int], list[tuple[list[Hashable], Message]]] = {}
        for tag, (route, (keys, first_read)) in enumerate(routes.items()):
            event, source, target = route
            message = Message(
                tag,
                source,
                target,
                tuple(self.names[k] for k in keys),
                tuple(self.kinds[k] for k in keys),
                tuple(self.avals[k] for k in keys),
                tuple(specs[k] for k in keys) if specs else (),
            )
            sends.setdefault((event, source), []).append((keys, message))
            receives.setdefault((first_read, target), []).append((keys, message))
        return sends, receives


def _whole(jaxpr: jex.ClosedJaxpr) -> _jaxprs.Part:
    """A task's jaxpr, the calls of functions with derivative rules opened: no more are needed."""
    plain = _jaxprs.inline(jaxpr, lambda e: e.primitive.name in _jaxprs.CUSTOM_RULES)
    return _jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))


def _kind(var, otherwise: str) -> str:
    """The kind of a message with a variable: `otherwise` where it is not a scalar."""
    return "scalar" if var.aval.size == 1 else otherwise


def _origin(eqn) -> str:
    """What made a value, and where in the user's code."""
    if eqn is None:
        return "value"
    call = _marks.stage_of_call(eqn)
    name = eqn.primitive.name if call is None else f"stage {call[0]}"
    return name + _compat.at_source_line(eqn)


def _is_indexed(body: _loop.TaskBody) -> bool:
    """Whether a task needs the number of its microbatch: it reads a slice, or makes one."""
    return any(r.source == "x" for r in body.inputs) or any(r.source == "y" for r in body.outputs)


def _pair_by_type(outputs: Sequence[Any], inputs: Sequence[tuple[int, Any]]) -> tuple[int, ...]:
    """The inputs whose memory outputs of the same type can take."""
    wanted: dict[Any, int] = {}
    for aval in outputs:
        wanted[aval.shape, aval.dtype] = wanted.get((aval.shape, aval.dtype), 0) + 1
    taken = []
    for i, aval in inputs:
        if wanted.get((aval.shape, aval.dtype), 0) > 0:
            wanted[aval.shape, aval.dtype] -= 1
            taken.append(i)
    return tuple(taken)


class _ProgramWriter:
    """Writes one rank's program: gives values slots, and frees them."""

    def __init__(self, rank: int, last_use, constants):
        self.rank = rank
        self.instructions: list[Instruction] = []
        self.inputs: list[tuple[int, int]] = []
        self.outputs: list[tuple[int, int]] = []
        self.constant_slots: list[tuple[int, Any]] = []
        self.constants = constants
        self.last_use = last_use
        self.slots: dict[Hashable, int] = {}
        self.vacant: list[int] = []
        self.num_slots = 0
        self.sent_last: list[Hashable] = []

    def slot(self, key: Hashable) -> int:
        if key not in self.slots:
            if self.vacant and key not in self.constants:
                self.slots[key] = self.vacant.pop()
            else:
                self.slots[key] = self.num_slots
                self.num_slots += 1
            if key in self.constants:
                self.constant_slots.append((self.slots[key], self.constants[key]))
        return self.slots[key]

    def run(self, index: int, event: _Event, donated: Sequence[int]) -> None:
        inputs = tuple(self.slot(k) for k in event.inputs)
        for i in donated:
            self._vacate(event.inputs[i])
        outputs = tuple(self.slot(k) for k in event.outputs)
        self.instructions.append(Run(event.computation, inputs, outputs, event.label))
        gone = {event.inputs[i] for i in donated}
        self.ending = [
            k
            for k in dict.fromkeys([*event.inputs, *event.outputs])
            if k not in self.constants
            and k not in gone
            and self.last_use.get((self.rank, k), -2) <= index
        ]

    def free(self, index: int) -> None:
        """Frees what the last run was the last to use, after it has been sent."""
        slots = tuple(self.slots[k] for k in self.ending)
        for k in self.ending:
            self._vacate(k)
        if slots:
            self.instructions.append(Free(slots))

    def _vacate(self, key: Hashable) -> None:
        self.vacant.append(self.slots.pop(key))

    def send(self, messages) -> None:
        for keys, message in messages:
            self.instructions.append(Send(tuple(self.slot(k) for k in keys), message))

    def receive(self, messages) -> None:
        for keys, message in messages:
            self.instructions.append(Receive(tuple(self.slot(k) for k in keys), message))

    def program(self, stages: tuple[int, ...]) -> Program:
        return Program(
            self.rank,
            stages,
            tuple(self.instructions),
            self.num_slots,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.constant_slots),
        )
