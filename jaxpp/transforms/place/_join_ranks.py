"""Joins the programs of ranks whose meshes differ in size.

A step is traced and lowered once for each size of a rank, since the size is in the step's types: a
`shard_map` in the model sees the shapes of a device's shards. Each rank runs the program that it
would run if all ranks were like it. The ranks exchange the same arrays at all sizes. So it is
enough to take each rank's program, and to check that the messages agree.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp._program import Bundle, Computation, Instruction, Message, Program, Receive, Run, Send
from jaxpp._specs import axis_sizes


def join_ranks(bundles: Sequence[Bundle]) -> Bundle:
    """Makes one bundle in which each rank has its program of its own lowering.

    Args:
        bundles: for each rank the step, lowered as if all ranks were like it; the same object for
            ranks of the same sizes.

    Returns:
        The bundle. The spec of a message is that of its target; the spec of a result, that of the
        first rank that has it.

    Raises:
        ValueError: the ranks do not agree on what they exchange.
    """
    first = bundles[0]
    for bundle in bundles:
        _check_alike(first, bundle)
    computations: list[Computation] = []
    start: dict[int, int] = {}
    for bundle in bundles:
        if id(bundle) not in start:
            start[id(bundle)] = len(computations)
            computations += bundle.computations
    received = {
        i.message.tag: i.message
        for rank, bundle in enumerate(bundles)
        for i in bundle.programs[rank].instructions
        if isinstance(i, Receive)
    }
    programs = [
        _joined(bundle.programs[rank], start[id(bundle)], received)
        for rank, bundle in enumerate(bundles)
    ]
    results = list(first.results)
    for rank in reversed(range(len(bundles))):
        for n, _ in programs[rank].outputs:
            results[n] = bundles[rank].results[n]
    return dataclasses.replace(
        first,
        programs=tuple(programs),
        computations=tuple(computations),
        results=tuple(results),
    )


def _joined(program: Program, start: int, received: Mapping[int, Message]) -> Program:
    """Numbers a program's computations from `start`, and sends each message as it is received."""

    def joined(instruction: Instruction) -> Instruction:
        match instruction:
            case Run(number):
                return dataclasses.replace(instruction, computation=start + number)
            case Send(slots, message):
                return Send(slots, received[message.tag])
        return instruction

    return dataclasses.replace(program, instructions=tuple(map(joined, program.instructions)))


def _check_alike(bundle: Bundle, other: Bundle) -> None:
    for own, program in zip(bundle.programs, other.programs, strict=True):
        one, two = _outline(own), _outline(program)
        given, taken = ([(a.spec, a.donated) for a in b.arguments] for b in (bundle, other))
        if one == two and given == taken:
            continue
        differing = next((f"{a}, but {b}" for a, b in zip(one, two, strict=False) if a != b), "")
        raise ValueError(
            f"place: rank {own.rank} exchanges other arrays if the axes inside a rank have the "
            f"sizes {axis_sizes(bundle.inside)} than if they have {axis_sizes(other.inside)}"
            f"{differing and ': ' + differing}. Only the shards that a jax.shard_map sees may "
            f"depend on the size of a rank: not what the model computes."
        )


def _outline(program: Program) -> list[Any]:
    """Lists in words the arguments, the results and the messages of a program."""
    inputs = [f"argument {n}" for n, _ in program.inputs]
    outputs = [f"result {n}" for n, _ in program.outputs]
    messages = [
        f"{', '.join(a.str_short() for a in m.avals)} from rank {m.source} to rank {m.target}"
        for i in program.instructions
        if isinstance(i, Send | Receive)
        for m in [i.message]
    ]
    return [*sorted(inputs), *sorted(outputs), *messages]
