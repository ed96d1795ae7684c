"""Makes a step one flat jaxpr, gives each result its own memory, and pairs state with arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp import _compat, _jaxprs
from jaxpp.transforms._step import Step
from jaxpp.transforms.stages import is_enter, is_stage_call
from jaxpp.transforms.tasks import is_loop, is_microbatch_loop, result_stages, was_loop


def flatten(jaxpr):
    """Inlines all calls of a step, but for the calls of stages outside of loops."""
    flat = _jaxprs.inline(jaxpr, lambda e: not is_stage_call(e))
    for eqn in flat.eqns:
        if is_microbatch_loop(eqn):
            raise ValueError(
                f"place: the microbatch loop{_compat.at_source_line(eqn)} has no schedule; wrap "
                f"the function: schedule(grad_fn, jaxpp.schedules.OneFOneB())."
            )
        if _jaxprs.contains(eqn, was_loop):
            raise ValueError(
                f"place: the scheduled loop{_compat.at_source_line(eqn)} was differentiated, and "
                f"has no schedule any more; differentiate first, then schedule: "
                f"schedule(jax.grad(microbatch(wrap_forward(f), M)), ...)."
            )
        if not is_loop(eqn) and _jaxprs.contains(eqn, is_loop):
            raise ValueError(
                f"place: a scheduled loop is inside a `{eqn.primitive.name}`"
                f"{_compat.at_source_line(eqn)}; a pipeline cannot start there. Move it to "
                f"the top of the step."
            )
    live = _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))
    loops = [e for e in flat.eqns if is_loop(e)]
    if loops and not any(map(is_loop, live.eqns)):
        raise ValueError(
            f"place: nothing reads what the scheduled loop{_compat.at_source_line(loops[0])} "
            f"computes, so that the step has nothing to run as a pipeline; return some of it, such "
            f"as the loss, or leave the loop out."
        )
    return live


def unused_mark(jaxpr) -> Any | None:
    """Finds a mark in a step that has neither stages nor loops; None where there is none."""
    marks, used = [], []

    def look(eqn) -> bool:
        if is_enter(eqn):
            marks.append(eqn)
        elif is_stage_call(eqn) or is_loop(eqn):
            used.append(eqn)
        return bool(used)

    return None if any(_jaxprs.contains(e, look) for e in jaxpr.eqns) or not marks else marks[0]


def own_results(step: Step) -> Step:
    """Gives each result its own memory: copies a result that is a literal, an argument or another.

    A donated argument that is itself a result is not copied, and is donated no more.
    """
    invars, eqns, outvars = step.jaxpr.jaxpr.invars, list(step.jaxpr.eqns), []
    taken = {v for v, a in zip(invars, step.arguments, strict=True) if not a.donated}
    for v in step.jaxpr.jaxpr.outvars:
        if _jaxprs.is_literal(v) or v in taken:
            own = _jaxprs.fresh_var(v)
            eqns += _jaxprs.splice(jnp.copy, [v], [own])
            v = own
        outvars.append(v)
        taken.add(v)
    arguments = tuple(
        dataclasses.replace(a, donated=False) if v in taken else a
        for v, a in zip(invars, step.arguments, strict=True)
    )
    jaxpr = _compat.make_closed_jaxpr(invars, outvars, eqns)
    return dataclasses.replace(step, jaxpr=jaxpr, arguments=arguments)


def skip_carries(step: Step) -> Step:
    """Replaces the result of each carry that a loop only hands through by the loop's operand."""
    known = _jaxprs.Substitution()
    eqns = []
    for eqn in step.jaxpr.eqns:
        eqn = known.rename(eqn)
        eqns.append(eqn)
        if is_loop(eqn):
            first = eqn.params["tasks"].num_consts
            made = result_stages(eqn)[: eqn.params["tasks"].num_carry]
            known.of.update(
                (out, eqn.invars[first + j])
                for j, (out, place) in enumerate(zip(eqn.outvars, made, strict=False))
                if not place
            )
    outvars = [known(v) for v in step.jaxpr.jaxpr.outvars]
    jaxpr = _compat.make_closed_jaxpr(step.jaxpr.jaxpr.invars, outvars, eqns)
    guards = {v: tuple((known(w), k) for w, k in guard) for v, guard in step.guards.items()}
    return step.with_guards(jaxpr, guards)


def leaves_of(args: Sequence[Any], numbers: Sequence[int]) -> set[int]:
    """Numbers the leaves of all arguments, and gives the numbers of those of some arguments."""
    found, start = set(), 0
    for n, arg in enumerate(args):
        size = len(jtu.tree_leaves(arg))
        if n in numbers:
            found.update(range(start, start + size))
        start += size
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
    number_of = {id(o): n for n, o in enumerate(outputs)}
    in_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
    out_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.outvars]
    origins = _origins(jaxpr)
    #: For each argument its structure, and the numbers of its arrays, by their leaves.
    free: dict[int, tuple[Any, list[int | None]]] = {}
    numbers = iter(range(len(in_avals)))
    for n, arg in enumerate(args):
        leaves, tree = jtu.tree_flatten(arg)
        own = [next(numbers) if _jaxprs.is_array(leaf) else None for leaf in leaves]
        if any(i is not None for i in own) and (
            n in donate_argnums or not jtu.treedef_is_leaf(tree)
        ):
            free[n] = tree, own
    pairs: dict[int, int] = {}

    def arrays_of(node, n: int) -> list[tuple[int, int]] | None:
        """Pairs the outputs of a subtree with argument `n`'s inputs; None if they are not alike."""
        leaves, tree = jtu.tree_flatten(node)
        wanted, inputs = free[n]
        outs = [number_of.get(id(leaf)) for leaf in leaves]
        if tree != wanted or [o is None for o in outs] != [i is None for i in inputs]:
            return None
        own = [(o, i) for o, i in zip(outs, inputs, strict=True) if o is not None and i is not None]
        return own if all(out_avals[o] == in_avals[i] for o, i in own) else None

    def largest(node) -> list[Any]:
        """Finds the largest subtrees that are like an argument."""
        if any(arrays_of(node, n) is not None for n in free):
            return [node]
        return [found for child in _children(node) for found in largest(child)]

    nodes = largest(traced.rebuild(outputs))
    while nodes:
        alike = [
            (sum(1 / len(origins[o]) for o, i in own if i in origins[o]), k, n, own)
            for k, node in enumerate(nodes)
            for n in free
            if (own := arrays_of(node, n)) is not None
        ]
        taken = set()
        for _, k, n, own in sorted(alike, key=lambda found: -found[0]):
            if n in free and k not in taken:
                taken.add(k)
                pairs.update(own)
                del free[n]
        rest = [node for k, node in enumerate(nodes) if k not in taken]
        nodes = [found for node in rest for child in _children(node) for found in largest(child)]
    return pairs


def _children(node: Any) -> list[Any]:
    """Gives the children of a node of a pytree."""
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
