"""Finds results that are the next values of arguments: the state of a BatchNorm, a moving average.

A loop over microbatches carries them, and the stage that makes one must not come after a stage that
reads it. `split_stages` does not see the loop: it takes a part of the result that has the
structure, the shapes and the dtypes of an argument for the argument's next value.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var
from jaxpp.transforms import stacked
from jaxpp.transforms.stages import _stages, _units


class State(NamedTuple):
    """An argument of a flat program, and the number of the result that is its next value."""

    argument: Var
    result: int


def states(traced: jaxprs.Traced, args: Sequence[Any], kwargs: dict[str, Any]) -> list[State]:
    """Finds the states among the arguments of a traced function.

    The first argument, and an argument that is a bare array, are never taken for a state. A next
    value is found as `place` finds those of its arguments.
    """
    inside = traced.jaxpr.jaxpr
    inputs = inside.invars[traced.num_closed_over :]
    args, kwargs = jaxprs.number_leaves((tuple(args), kwargs), (v.aval for v in inputs))
    arguments = {
        n: tree
        for n, tree in enumerate([*args[1:], *kwargs.values()])
        if jaxprs.leaf_numbers(tree) and not isinstance(tree, jaxprs.Leaf)
    }
    result = traced.rebuild(jaxprs.leaves_of(v.aval for v in inside.outvars))
    found = jaxprs.next_values(arguments, result, lambda: jaxprs.origins(traced.jaxpr, inputs))
    return [
        State(inputs[old], new)
        for n, part in sorted(found.items())
        for old, new in zip(
            jaxprs.leaf_numbers(arguments[n]), jaxprs.leaf_numbers(part), strict=True
        )
    ]


def units(
    carried: Sequence[State], eqns: Sequence[Eqn], prepares: Container[Var], results: Sequence[Atom]
) -> list[_units.Unit]:
    """Makes a unit of the equations from the first reader of each state to its next value.

    Where the states of layers are stacked, each layer has such a unit of its own.

    A next value that an equation of `prepares` makes (the next count of a counter) needs none: it
    goes with the readers of its argument anyway. Equations are named by their first variable.
    """
    makers = {v: i for i, e in enumerate(eqns) if e.outvars[0] not in prepares for v in e.outvars}
    readers: dict[Var, int] = {}
    for i, eqn in enumerate(eqns):
        for v in jaxprs.variables(eqn.invars):
            readers.setdefault(v, i)
    found = []
    for state in carried:
        whole = (state.argument, results[state.result])
        for before, after in stacked.states_of_layers(eqns, *whole) or [whole]:
            last = max((makers.get(v, -1) for v in jaxprs.variables([after])), default=-1)
            if before in readers and readers[before] < last:
                found.append(_units.Unit(readers[before], last, state))
    return found


def note(together: Sequence[_units.Unit], eqns: Sequence[Eqn]) -> str:
    """Says which equations stay together for the sake of a state, and how to part them."""
    longest = max(together, key=lambda unit: unit.last - unit.first)
    reader, maker = (_compat.at_source_line(eqns[i]) for i in (longest.first, longest.last))
    return (
        f"an argument is read{reader}, and what looks like its next value is made{maker}: both "
        f"stay in one stage, so that it can be carried from one microbatch to the next; give at= "
        f"where it is not"
    )


def make_early(jaxpr: jex.ClosedJaxpr, carried: Sequence[State]) -> jex.ClosedJaxpr:
    """Moves the equations that only make next values of states as far forward as they can go."""
    eqns, results = jaxpr.eqns, jaxpr.jaxpr.outvars
    numbers = {state.result for state in carried}
    other = set(jaxprs.variables(v for i, v in enumerate(results) if i not in numbers))
    is_update = [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        is_update[i] = not eqns[i].effects and other.isdisjoint(eqns[i].outvars)
        if not is_update[i]:
            other.update(jaxprs.variables(eqns[i].invars))
    ready: dict[Var, int] = {}
    place = []
    for i, moves in enumerate(_stages.argument_chains(jaxpr)):
        operands = [ready.get(v, -1) for v in jaxprs.variables(eqns[i].invars)]
        place.append(-1 if moves else max(operands, default=-1) if is_update[i] else i)
        ready.update((v, place[i]) for v in eqns[i].outvars)
    order = sorted(range(len(eqns)), key=lambda i: (place[i], is_update[i], i))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, results, [eqns[i] for i in order])
