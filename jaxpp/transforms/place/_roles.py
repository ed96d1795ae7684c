"""Finds what the arguments of a step are to it, and which results are the next call's arguments.

An argument is a parameter, optimizer state, part of the batch, or something else.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp import _jaxprs
from jaxpp._program import Role
from jaxpp.transforms._step import Step
from jaxpp.transforms.stages import is_stage_call
from jaxpp.transforms.tasks import ScheduledLoop, is_loop


def find_roles(step: Step) -> Step:
    """Finds the role of each argument."""
    jaxpr = step.jaxpr
    for_all, sliced = [], []
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            first = len(eqn.invars) - len(ScheduledLoop.of(eqn).xs)
            for_all += eqn.invars[:first]
            sliced += eqn.invars[first:]
        elif is_stage_call(eqn):
            for_all += eqn.invars
    read, batch = _behind(jaxpr, for_all), _behind(jaxpr, sliced)
    state = frozenset(step.pairs.values())

    def role(n: int, v: Any) -> Role:
        if v in batch:
            return Role.BATCH
        if v in read:
            learned = jnp.issubdtype(v.aval.dtype, jnp.inexact)
            return Role.PARAMETER if learned else Role.OTHER
        return Role.OPTIMIZER if n in state else Role.OTHER

    arguments = tuple(
        dataclasses.replace(a, role=role(n, v))
        for n, (a, v) in enumerate(zip(step.arguments, jaxpr.jaxpr.invars, strict=True))
    )
    return dataclasses.replace(step, arguments=arguments)


def _behind(jaxpr: jex.ClosedJaxpr, atoms: Iterable) -> set:
    """Finds the variables that some atoms are computed from, with the variables among the atoms."""
    found = set(_jaxprs.variables(atoms))
    for eqn, keep in zip(jaxpr.eqns, _jaxprs.ancestors(jaxpr.eqns, found), strict=True):
        if keep:
            found.update(_jaxprs.variables(eqn.invars))
    return found


def pair_state(args, donate_argnums, traced: _jaxprs.Traced, jaxpr) -> dict[int, int]:
    """Finds the outputs that are arguments of the next call, by output the number of the input.

    They are the subtrees of the result that have the structure and types of an argument. Where
    several have, such as a model and its average, the pair is the subtree that is computed from the
    argument, leaf by leaf, and from as little else as can be. An argument that is a single array is
    matched only if it is donated, since a scalar loss looks like a scalar argument.
    """
    # Plain objects stand for the outputs; JAX asks user-defined pytrees to accept such leaves.
    outputs = [object() for _ in jaxpr.jaxpr.outvars]
    pairing = _Pairing(_arguments(args, donate_argnums), outputs, jaxpr)
    nodes = pairing.largest(traced.rebuild(outputs))
    while nodes:
        rest = pairing.pair(nodes)
        children = [child for node in rest for child in _children(node)]
        nodes = [found for child in children for found in pairing.largest(child)]
    return pairing.pairs


#: The structure of an argument, and the number of the array at each of its leaves.
_Leaves = tuple[Any, list[int | None]]


def _arguments(args, donate_argnums) -> dict[int, _Leaves]:
    """Finds the arguments that a result may become, by their positions."""
    found: dict[int, _Leaves] = {}
    numbers = itertools.count()
    for n, arg in enumerate(args):
        leaves, tree = jtu.tree_flatten(arg)
        own = [next(numbers) if _jaxprs.is_array(leaf) else None for leaf in leaves]
        if any(i is not None for i in own) and (
            n in donate_argnums or not jtu.treedef_is_leaf(tree)
        ):
            found[n] = tree, own
    return found


class _Pairing:
    """Pairs subtrees of a result with the arguments that are `free`; `pairs` has their arrays."""

    def __init__(self, arguments: dict[int, _Leaves], outputs: list[Any], jaxpr):
        self.free = arguments
        self.pairs: dict[int, int] = {}
        self.number_of = {id(o): n for n, o in enumerate(outputs)}
        self.in_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
        self.out_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.outvars]
        self.origins = _origins(jaxpr)

    def arrays_of(self, node: Any, n: int) -> list[tuple[int, int]] | None:
        """Pairs the outputs of a subtree with argument `n`'s inputs; None if they are not alike."""
        leaves, tree = jtu.tree_flatten(node)
        wanted, inputs = self.free[n]
        outs = [self.number_of.get(id(leaf)) for leaf in leaves]
        if tree != wanted or [o is None for o in outs] != [i is None for i in inputs]:
            return None
        own = [(o, i) for o, i in zip(outs, inputs, strict=True) if o is not None and i is not None]
        return own if all(self.out_avals[o] == self.in_avals[i] for o, i in own) else None

    def largest(self, node: Any) -> list[Any]:
        """Finds the largest subtrees that are like an argument."""
        if any(self.arrays_of(node, n) is not None for n in self.free):
            return [node]
        return [found for child in _children(node) for found in self.largest(child)]

    def pair(self, nodes: list[Any]) -> list[Any]:
        """Pairs subtrees with the arguments that they come from most; gives the other subtrees."""
        alike = [
            (sum(1 / len(self.origins[o]) for o, i in own if i in self.origins[o]), k, n, own)
            for k, node in enumerate(nodes)
            for n in self.free
            if (own := self.arrays_of(node, n)) is not None
        ]
        taken = set()
        for _, k, n, own in sorted(alike, key=lambda found: -found[0]):
            if n in self.free and k not in taken:
                taken.add(k)
                self.pairs.update(own)
                del self.free[n]
        return [node for k, node in enumerate(nodes) if k not in taken]


def _children(node: Any) -> list[Any]:
    """Returns the children of a node of a pytree."""
    children = jtu.tree_leaves(node, is_leaf=lambda x: x is not node)
    return [child for child in children if child is not node]


def _origins(jaxpr) -> list[frozenset[int]]:
    """Finds the inputs of each output: those that reach it outside loops by arrays of its shape."""
    reached = {v: frozenset({n}) for n, v in enumerate(jaxpr.jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if is_loop(eqn) or is_stage_call(eqn):
            continue
        operands = [v for v in _jaxprs.variables(eqn.invars) if v in reached]
        for out in eqn.outvars:
            alike = [reached[v] for v in operands if v.aval.shape == out.aval.shape]
            if alike:
                reached[out] = frozenset().union(*alike)
    return [
        frozenset() if _jaxprs.is_literal(v) else reached.get(v, frozenset())
        for v in jaxpr.jaxpr.outvars
    ]
