"""Opens checkpoints, so that a program is cut inside them, and closes each stage's part of one.

The equations of an open checkpoint stand among the others, under a scope that names it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax.extend.core as jex

from jaxpp import _compat
from jaxpp.jaxprs import primitives
from jaxpp.jaxprs._equations import operands_of, results_of, variables
from jaxpp.jaxprs._parts import needed, part
from jaxpp.jaxprs._rewrite import inline
from jaxpp.jaxprs._typing import Atom, Eqn, Var

#: The open checkpoints of a program, by their scopes.
Checkpoints = dict[str, Eqn]

_SCOPE = "jaxpp_checkpoint_"

_Item = TypeVar("_Item", bound=Hashable)


def open_calls(
    jaxpr: jex.ClosedJaxpr,
    wanted: Callable[[Eqn], bool],
    change: Callable[[Eqn, list[Eqn]], list[Eqn]] = lambda call, inner: inner,
) -> tuple[jex.ClosedJaxpr, Checkpoints]:
    """Replaces calls and checkpoints that are `wanted`, nested ones too, by their equations.

    Custom derivative rules stay closed. `change(call, inner)` may change the equations of a body.
    """
    checkpoints: Checkpoints = {}

    def can_open(eqn) -> bool:
        return eqn.primitive.name not in primitives.CUSTOM_RULES and wanted(eqn)

    def in_scope(call, inner: list[Eqn]) -> list[Eqn]:
        inner = change(call, inner)
        if not is_checkpoint(call):
            return inner
        scope = f"{_SCOPE}{len(checkpoints)}"
        checkpoints[scope] = call
        return [_compat.in_scope(e, scope) for e in inner]

    return inline(jaxpr, can_open, in_scope), checkpoints


def is_checkpoint(eqn) -> bool:
    """Tells whether an equation is a `jax.checkpoint`."""
    return eqn.primitive.name in primitives.CHECKPOINTS


def checkpoint_scopes(eqn) -> list[str]:
    """Returns the scopes of the open checkpoints that an equation is in, the outermost first."""
    return [n for n in reversed(_compat.scope_names(eqn)) if n.startswith(_SCOPE)]


def outside_checkpoints(eqn: Eqn, others: Sequence[str] = ()) -> Eqn:
    """Takes an equation out of all open checkpoints but `others`."""
    out = set(checkpoint_scopes(eqn)).difference(others)
    return _compat.rename_scopes(eqn, dict.fromkeys(out)) if out else eqn


def close_checkpoints(
    eqns: Sequence[Eqn],
    stages: Sequence[int | None],
    checkpoints: Checkpoints,
    results: Sequence[Atom],
    depth: int = 0,
) -> list[tuple[Eqn, int | None]]:
    """Puts each stage's equations of an open checkpoint into a checkpoint of its own.

    Args:
        eqns: equations, some of them in open checkpoints.
        stages: the stage of each; None for an equation that is repeated in each stage that reads
            it, inside the stage's checkpoint.
        checkpoints: the open checkpoints.
        results: the variables that are read outside of the equations.
        depth: the number of checkpoints around the equations that stay open.

    Returns:
        The equations and their stages, each after the equations that it reads.
    """
    group_of, repeated = [], {}
    for i, (eqn, stage) in enumerate(zip(eqns, stages, strict=True)):
        around = checkpoint_scopes(eqn)[depth : depth + 1]
        group_of.append((around[0], stage) if around and stage is not None else i)
        if around and stage is None:
            repeated.setdefault(around[0], []).append(eqn)
    if not any(isinstance(g, tuple) for g in group_of):
        return [(outside_checkpoints(e), k) for e, k in zip(eqns, stages, strict=True)]

    groups: dict[Hashable, list[int]] = {}
    maker: dict[Var, Hashable] = {}
    for i, group in enumerate(group_of):
        groups.setdefault(group, []).append(i)
        maker.update((v, group) for v in eqns[i].outvars)
    read_from: dict[Hashable, dict[Hashable, None]] = {group: {} for group in groups}
    shared = set(variables(results))
    for i, group in enumerate(group_of):
        for v in variables(eqns[i].invars):
            if v in maker and maker[v] != group:
                read_from[group][maker[v]] = None
                shared.add(v)

    closed: list[tuple[Eqn, int | None]] = []
    for group in ordered_by_needs(groups, read_from.__getitem__):
        own = [eqns[i] for i in groups[group]]
        stage = stages[groups[group][0]]
        if not isinstance(group, tuple):
            closed.append((outside_checkpoints(own[0]), stage))
            continue
        outputs = [v for v in results_of(own) if v in shared]
        read = operands_of(own)
        own = [*needed(repeated.get(group[0], []), read), *own]
        inner = close_checkpoints(own, [stage] * len(own), checkpoints, outputs, depth + 1)
        closed.append((_closed(checkpoints[group[0]], [e for e, _ in inner], outputs), stage))
    return closed


def _closed(checkpoint, eqns: Sequence[Eqn], outputs: Sequence[Var]) -> Eqn:
    """Makes a checkpoint of equations, with the parameters of another one.

    The variables of its body are those outside, which is harmless.
    """
    body = part(eqns, outputs)
    params = checkpoint.params | {
        "jaxpr": _compat.with_closed_type(body.jaxpr, checkpoint.params["jaxpr"])
    }
    if isinstance(params["prevent_cse"], tuple):
        # True for new operands, as JAX does for the operands that it adds to a checkpoint.
        given = dict(zip(checkpoint.invars, params["prevent_cse"], strict=True))
        params["prevent_cse"] = tuple(given.get(v, True) for v in body.inputs)
    return outside_checkpoints(checkpoint).replace(
        invars=list(body.inputs),
        outvars=list(outputs),
        params=params,
        effects=body.jaxpr.effects,
    )


def ordered_by_needs(
    items: Iterable[_Item], needs: Callable[[_Item], Iterable[_Item]]
) -> Iterator[_Item]:
    """Yields the items and those that they need, each once, after its needs, and else in order."""
    placed: set[_Item] = set()
    for item in items:
        stack = [item]
        while stack:
            waiting = [n for n in needs(stack[-1]) if n not in placed]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            top = stack.pop()
            if top not in placed:
                placed.add(top)
                yield top
