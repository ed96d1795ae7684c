"""Small edits of the programs of a step: ones drawn at random, and ones made by hand.

An edit is a function of a bundle that gives another bundle.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from jaxpp import _compat
from jaxpp._program import Bundle, Computation, Free, Receive, Run, Send, Wait


def _with_program(bundle: Bundle, rank: int, **changes: Any) -> Bundle:
    programs = list(bundle.programs)
    programs[rank] = dataclasses.replace(programs[rank], **changes)
    return dataclasses.replace(bundle, programs=tuple(programs))


def _with_instructions(bundle: Bundle, rank: int, instructions: Sequence[Any]) -> Bundle:
    return _with_program(bundle, rank, instructions=tuple(instructions))


def _with_jaxpr(computation: Computation, outvars: Sequence[Any], eqns: Sequence[Any]):
    jaxpr = _compat.make_closed_jaxpr(computation.jaxpr.jaxpr.invars, outvars, eqns)
    return dataclasses.replace(computation, jaxpr=jaxpr)


def _with_computation(bundle: Bundle, number: int, computation: Computation) -> Bundle:
    computations = list(bundle.computations)
    computations[number] = computation
    return dataclasses.replace(bundle, computations=tuple(computations))


def _swapped(values: Sequence[Any], a: int, b: int) -> tuple[Any, ...]:
    new = list(values)
    new[a], new[b] = new[b], new[a]
    return tuple(new)


# ---- drawn at random ----------------------------------------------------------------------------


def _pair(rng: random.Random, values: Sequence[Any]) -> tuple[int, int] | None:
    """The positions of two values that differ."""
    if len(set(values)) < 2:
        return None
    while True:
        a, b = rng.sample(range(len(values)), 2)
        if values[a] != values[b]:
            return a, b


class _Draw:
    """One edit: of an instruction of a rank; each method is a kind, and gives None where it cannot.

    `own` is the instruction, at position `at` of those of rank `rank`.
    """

    def __init__(self, rng: random.Random, bundle: Bundle):
        self.rng, self.bundle = rng, bundle
        self.rank = rng.randrange(len(bundle.programs))
        self.program = bundle.programs[self.rank]
        self.all: list[Any] = list(self.program.instructions)
        self.at = rng.randrange(len(self.all))
        self.own: Any = self.all[self.at]

    def _with(self, *instructions: Any) -> Bundle:
        new = [*self.all[: self.at], *instructions, *self.all[self.at + 1 :]]
        return _with_instructions(self.bundle, self.rank, new)

    def _like_inputs(self) -> tuple[int, int] | None:
        """Two inputs of a computation of one type, in different slots."""
        if not isinstance(self.own, Run):
            return None
        variables = self.bundle.computations[self.own.computation].jaxpr.jaxpr.invars
        types, slots = [str(v.aval) for v in variables], self.own.inputs
        pairs = [
            (a, b)
            for a in range(len(slots))
            for b in range(len(slots))
            if types[a] == types[b] and slots[a] != slots[b]
        ]
        return self.rng.choice(pairs) if pairs else None

    def swap_inputs(self):
        if (pair := self._like_inputs()) is None:
            return None
        inputs = _swapped(self.own.inputs, *pair)
        return self._with(dataclasses.replace(self.own, inputs=inputs))

    def other_input(self):
        if (pair := self._like_inputs()) is None:
            return None
        inputs = list(self.own.inputs)
        inputs[pair[0]] = inputs[pair[1]]
        return self._with(dataclasses.replace(self.own, inputs=tuple(inputs)))

    def swap_outputs(self):
        if not isinstance(self.own, Run) or (pair := _pair(self.rng, self.own.outputs)) is None:
            return None
        outputs = _swapped(self.own.outputs, *pair)
        return self._with(dataclasses.replace(self.own, outputs=outputs))

    def drop(self):
        return None if isinstance(self.own, Wait) else self._with()

    def repeat(self):
        return self._with(self.own, self.own) if isinstance(self.own, Run | Send) else None

    def swap_instructions(self):
        if self.at + 1 == len(self.all):
            return None
        return _with_instructions(self.bundle, self.rank, _swapped(self.all, self.at, self.at + 1))

    def move(self):
        """Moves an instruction by a few places."""
        to = min(len(self.all) - 1, max(0, self.at + self.rng.randint(-5, 5)))
        new = list(self.all)
        new.insert(to, new.pop(self.at))
        return _with_instructions(self.bundle, self.rank, new)

    def swap_slots_of_a_message(self):
        if not isinstance(self.own, Send | Receive):
            return None
        if (pair := _pair(self.rng, self.own.slots)) is None:
            return None
        return self._with(dataclasses.replace(self.own, slots=_swapped(self.own.slots, *pair)))

    def swap_messages(self):
        if not isinstance(self.own, Receive):
            return None
        source, types = self.own.message.source, list(map(str, self.own.message.avals))
        others = [
            j
            for j, other in enumerate(self.all)
            if isinstance(other, Receive)
            and j != self.at
            and (other.message.source, list(map(str, other.message.avals))) == (source, types)
        ]
        if not others:
            return None
        new: list[Any] = list(self.all)
        j = self.rng.choice(others)
        new[self.at] = dataclasses.replace(self.own, message=new[j].message)
        new[j] = dataclasses.replace(new[j], message=self.own.message)
        return _with_instructions(self.bundle, self.rank, new)

    def swap_results(self):
        """Swaps the slots of two results of one type."""
        outputs = self.program.outputs
        types = [str(self.bundle.results[n].aval) for n, _ in outputs]
        pairs = [
            (a, b)
            for a in range(len(outputs))
            for b in range(a)
            if types[a] == types[b] and outputs[a][1] != outputs[b][1]
        ]
        if not pairs:
            return None
        slots = _swapped([s for _, s in outputs], *self.rng.choice(pairs))
        new = tuple((n, s) for (n, _), s in zip(outputs, slots, strict=True))
        return _with_program(self.bundle, self.rank, outputs=new)

    def other_number(self):
        """Adds one to a number in a computation."""
        number = self.rng.randrange(len(self.bundle.computations))
        computation = self.bundle.computations[number]
        eqns = list(computation.jaxpr.eqns)
        places = [
            (j, k)
            for j, eqn in enumerate(eqns)
            for k, v in enumerate(eqn.invars)
            if isinstance(v, jex.Literal) and np.ndim(v.val) == 0 and "float" in str(v.aval)
        ]
        if not places:
            return None
        j, k = self.rng.choice(places)
        inputs: list[Any] = list(eqns[j].invars)
        inputs[k] = jex.Literal(float(inputs[k].val) + 1, inputs[k].aval)
        eqns[j] = eqns[j].replace(invars=inputs)
        new = _with_jaxpr(computation, computation.jaxpr.jaxpr.outvars, eqns)
        return _with_computation(self.bundle, number, new)


KINDS = tuple(name for name in vars(_Draw) if not name.startswith("_"))


def draw(rng: random.Random, bundle: Bundle) -> tuple[str, Bundle]:
    """Draws an edit that changes a bundle: its kind, and the bundle."""
    while True:
        kind = rng.choice(KINDS)
        new = getattr(_Draw(rng, bundle), kind)()
        if new is not None and new != bundle:
            return kind, new


# ---- made by hand -------------------------------------------------------------------------------


def _find(bundle: Bundle, rank: int, label: str) -> tuple[int, Run]:
    """The first instruction that runs a task, with its position."""
    for at, own in enumerate(bundle.programs[rank].instructions):
        if isinstance(own, Run) and own.label == label:
            return at, own
    raise ValueError(label)


def _replaced(bundle: Bundle, rank: int, at: int, *new: Any) -> Bundle:
    own = bundle.programs[rank].instructions
    return _with_instructions(bundle, rank, [*own[:at], *new, *own[at + 1 :]])


def not_run(bundle: Bundle) -> Bundle:
    return _replaced(bundle, 1, _find(bundle, 1, "W1.1")[0])


def added_nothing(bundle: Bundle) -> Bundle:
    """`W1.1` hands its accumulator on as it is."""
    at, own = _find(bundle, 1, "W1.1")
    computation = bundle.computations[own.computation]
    variables = computation.jaxpr.jaxpr.invars
    same = _with_jaxpr(computation, [variables[i] for i in computation.donated], [])
    bundle = dataclasses.replace(bundle, computations=(*bundle.computations, same))
    number = len(bundle.computations) - 1
    return _replaced(bundle, 1, at, dataclasses.replace(own, computation=number))


def added_twice(bundle: Bundle) -> Bundle:
    at, own = _find(bundle, 1, "W1.1")
    return _replaced(bundle, 1, at, own, own)


def other_slice(bundle: Bundle) -> Bundle:
    """Microbatch 3 reads the slice of microbatch 2."""
    (_, of_two), (at, own) = _find(bundle, 0, "F0.2"), _find(bundle, 0, "F0.3")
    return _replaced(bundle, 0, at, dataclasses.replace(own, inputs=of_two.inputs))


def swapped_operands(bundle: Bundle) -> Bundle:
    """The activation and the cotangent of `W1.2` change places."""
    at, own = _find(bundle, 1, "W1.2")
    variables = bundle.computations[own.computation].jaxpr.jaxpr.invars
    one, other = (i for i, v in enumerate(variables) if v.aval.str_short() == "float32[2,4]")
    inputs = _swapped(own.inputs, one, other)
    return _replaced(bundle, 1, at, dataclasses.replace(own, inputs=inputs))


def swapped_messages(bundle: Bundle) -> Bundle:
    """The activations of two microbatches change places."""
    own: list[Any] = list(bundle.programs[2].instructions)
    a, b = [i for i, x in enumerate(own) if isinstance(x, Receive) and x.message.source == 1][1:3]
    own[a], own[b] = (
        dataclasses.replace(own[i], message=own[j].message) for i, j in ((a, b), (b, a))
    )
    return _with_instructions(bundle, 2, own)


def freed_early(bundle: Bundle) -> Bundle:
    """What `I1.0` reads is freed before it."""
    at, _ = _find(bundle, 1, "I1.0")
    own = list(bundle.programs[1].instructions)
    free = next(i for i in range(at, len(own)) if isinstance(own[i], Free))
    own.insert(at, own.pop(free))
    return _with_instructions(bundle, 1, own)


def swapped_results(bundle: Bundle) -> Bundle:
    """A rank gives the momentum of its layer for the layer."""
    outputs = bundle.programs[1].outputs
    (a, first), (b, second) = outputs
    return _with_program(bundle, 1, outputs=((a, second), (b, first)))


def sum_for_mean(bundle: Bundle) -> Bundle:
    """The gradient of rank 1 is not divided by the number of microbatches."""
    _, own = _find(bundle, 1, "update")
    computation = bundle.computations[own.computation]
    eqns = list(computation.jaxpr.eqns)
    at = next(i for i, e in enumerate(eqns) if e.primitive.name == "div")
    one = jex.Literal(np.float32(1), eqns[at].invars[1].aval)
    eqns[at] = eqns[at].replace(invars=[eqns[at].invars[0], one])
    new = _with_jaxpr(computation, computation.jaxpr.jaxpr.outvars, eqns)
    return _with_computation(bundle, own.computation, new)


def stale_weight(bundle: Bundle) -> Bundle:
    """The update of rank 2 gives the weight as it was."""
    own = [x for x in bundle.programs[2].instructions if isinstance(x, Run)][-1]
    computation = bundle.computations[own.computation]
    jaxpr = computation.jaxpr.jaxpr
    new = _with_jaxpr(
        computation, [jaxpr.outvars[0], jaxpr.invars[1], *jaxpr.outvars[2:]], jaxpr.eqns
    )
    return _with_computation(bundle, own.computation, new)


def waiting(bundle: Bundle) -> Bundle:
    """The first rank waits for a gradient before it has sent an activation."""
    own = list(bundle.programs[0].instructions)
    at = next(i for i, x in enumerate(own) if isinstance(x, Receive))
    own.insert(0, own.pop(at))
    return _with_instructions(bundle, 0, own)


def not_received(bundle: Bundle) -> Bundle:
    own = bundle.programs[1].instructions
    at = max(i for i, x in enumerate(own) if isinstance(x, Receive))
    update = max(i for i, x in enumerate(own) if isinstance(x, Run))
    return _with_instructions(bundle, 1, [*own[:at], *own[at + 1 : update]])


def donated_constant(bundle: Bundle) -> Bundle:
    """A forward takes the memory of the number of its microbatch."""
    _, own = _find(bundle, 0, "F0.0")
    computation = bundle.computations[own.computation]
    new = dataclasses.replace(computation, donated=(len(own.inputs) - 1,))
    return _with_computation(bundle, own.computation, new)


def donated_argument(bundle: Bundle) -> Bundle:
    """The caller keeps its arguments, of which an update takes the memory."""
    arguments = [dataclasses.replace(a, donated=False) for a in bundle.arguments]
    return dataclasses.replace(bundle, arguments=tuple(arguments))
