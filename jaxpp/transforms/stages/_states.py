"""Finds results that are the next values of arguments: the state of a BatchNorm, a moving average.

A loop over microbatches carries them, and the stage that makes one must not come after a stage that
reads it. `split_stages` does not see the loop: it takes a part of the result that has the
structure, the shapes and the dtypes of an argument for the argument's next value.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, _jaxprs
from jaxpp.transforms.stages import _stages, _units


class State(NamedTuple):
    """An argument of a flat program, and the number of the result that is its next value."""

    argument: Any
    result: int


def states(traced: _jaxprs.Traced, args: Sequence[Any], kwargs: dict[str, Any]) -> list[State]:
    """Finds the states among the arguments of a traced function.

    The first argument, and an argument that is a bare array, are never taken for a state.
    """
    jaxpr = traced.jaxpr.jaxpr
    inputs = iter(jaxpr.invars[traced.num_closed_over :])
    leaves, tree = jtu.tree_flatten((tuple(args), kwargs))
    args, kwargs = tree.unflatten(next(inputs) if _jaxprs.is_array(v) else v for v in leaves)
    structs = [jax.ShapeDtypeStruct(*_type(v)) for v in jaxpr.outvars]
    number = {id(struct): i for i, struct in enumerate(structs)}
    result = traced.rebuild(structs)
    found = []
    for argument in [*args[1:], *kwargs.values()]:
        own, structure = jtu.tree_flatten(argument)
        if jtu.treedef_is_leaf(structure) or not own:
            continue
        for part in _parts(result, structure):
            pairs = [
                (v, number[id(s)])
                for v, s in zip(own, jtu.tree_leaves(part), strict=True)
                if isinstance(v, jex.Var) and id(s) in number
            ]
            types = [(_type(v), _type(jaxpr.outvars[i])) for v, i in pairs]
            if all(one == other for one, other in types):
                found += [State(v, i) for v, i in pairs]
    return found


def _type(atom: Any) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype


def _parts(tree: Any, structure: Any) -> Iterable[Any]:
    """Finds the parts of a tree that have a given structure."""

    def fits(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    return [part for part in jtu.tree_leaves(tree, is_leaf=fits) if fits(part)]


def units(
    carried: Sequence[State], eqns: Sequence[Any], prepares: Container[Any], results: Sequence[Any]
) -> list[_units.Unit]:
    """Makes a unit of the equations from the first reader of each state to its next value.

    A next value that an equation of `prepares` makes (the next count of a counter) needs none: it
    goes with the readers of its argument anyway. Equations are named by their first variable.
    """
    makers = {v: i for i, e in enumerate(eqns) if e.outvars[0] not in prepares for v in e.outvars}
    readers: dict[Any, int] = {}
    for i, eqn in enumerate(eqns):
        for v in _jaxprs.variables(eqn.invars):
            readers.setdefault(v, i)
    return [
        _units.Unit(readers[s.argument], makers[result], s)
        for s in carried
        for result in _jaxprs.variables([results[s.result]])
        if s.argument in readers and readers[s.argument] < makers.get(result, -1)
    ]


def note(together: Sequence[_units.Unit], eqns: Sequence[Any]) -> str:
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
    other = set(_jaxprs.variables(v for i, v in enumerate(results) if i not in numbers))
    is_update = [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        is_update[i] = not eqns[i].effects and other.isdisjoint(eqns[i].outvars)
        if not is_update[i]:
            other.update(_jaxprs.variables(eqns[i].invars))
    ready: dict[Any, int] = {}
    place = []
    for i, moves in enumerate(_stages.argument_chains(jaxpr)):
        operands = [ready.get(v, -1) for v in _jaxprs.variables(eqns[i].invars)]
        place.append(-1 if moves else max(operands, default=-1) if is_update[i] else i)
        ready.update((v, place[i]) for v in eqns[i].outvars)
    order = sorted(range(len(eqns)), key=lambda i: (place[i], is_update[i], i))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, results, [eqns[i] for i in order])
