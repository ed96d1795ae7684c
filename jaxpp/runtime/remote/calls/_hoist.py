"""Takes the debug callbacks out of a jaxpr, which then can go to another process.

The jaxpr gives the values that its callbacks read as further results. A replay, which stays with
the functions that are to be called, takes these values, and calls back as the jaxpr would have
done: as often, in its order.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jaxpp import _compat, _jaxprs, _primitives, _specs

#: Calls back with the values that the callbacks read; takes a prefix for what is printed.
Replay = Callable[[Sequence[np.ndarray], str], None]


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A jaxpr without its debug callbacks.

    Args:
        jaxpr: gives the results, and then the values that the callbacks read.
        read: the avals of these values.
        replays: for each equation that called back, how many of the values it read, and its replay.
    """

    jaxpr: jex.ClosedJaxpr
    read: tuple[Any, ...]
    replays: tuple[tuple[int, Replay], ...]

    def replay(self, values: Sequence[np.ndarray], prefix: str = "") -> None:
        """Calls back as the jaxpr would have done.

        Args:
            values: those that `jaxpr` gives after the results; keys as integers, as JAX gives them
                to a callback.
            prefix: of what a `jax.debug.print` writes.
        """
        own = _split(values, [count for count, _ in self.replays])
        for (_, replay), part in zip(self.replays, own, strict=True):
            replay(part, prefix)


def hoist(jaxpr: jex.ClosedJaxpr) -> Hoisted:
    """Takes the debug callbacks out of a jaxpr, but those that run an unknown number of times."""
    opened, constants = _jaxprs.without_constants(jaxpr)
    flat = _jaxprs.inline(_jaxprs.bind_constants(opened, constants), _is_opened)
    eqns, read, replays = [], [], []
    for eqn in flat.eqns:
        rule = _RULES.get(eqn.primitive.name) if _calls_back(eqn) else None
        if rule is None:
            eqns.append(eqn)
            continue
        own, variables, replay = rule(eqn)
        eqns += own
        read += variables
        replays.append((len(variables), replay))
    outvars = [*flat.jaxpr.outvars, *read]
    hoisted = _compat.make_closed_jaxpr(flat.jaxpr.invars, outvars, eqns)
    return Hoisted(hoisted, tuple(v.aval for v in read), tuple(replays))


def _calls_back(eqn: Any) -> bool:
    return _jaxprs.contains(eqn, _compat.is_debug_callback)


def _is_opened(eqn: Any) -> bool:
    return eqn.primitive.name not in _primitives.CHECKPOINTS and _calls_back(eqn)


def _split(values: Sequence[Any], counts: Iterable[int]) -> Iterator[list[Any]]:
    rest = iter(values)
    for count in counts:
        yield list(itertools.islice(rest, count))


# ---- the rules: equations without callbacks, the variables that these read, and their replay -----


def _callback(eqn: Any) -> tuple[list[Any], list[Any], Replay]:
    def replay(values: Sequence[np.ndarray], prefix: str) -> None:
        rest = iter(values)
        operands = [
            _jaxprs.literal_array(a) if _jaxprs.is_literal(a) else next(rest) for a in eqn.invars
        ]
        _compat.call_debug_callback(eqn, operands, prefix)

    return [], _jaxprs.variables(eqn.invars), replay


def _checkpoint(eqn: Any) -> tuple[list[Any], list[Any], Replay]:
    body = eqn.params["jaxpr"]
    inner = hoist(body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ()))
    read = [jex.Var(aval) for aval in inner.read]
    params = {**eqn.params, "jaxpr": _compat.with_closed_type(inner.jaxpr, body)}
    outvars = [*eqn.outvars, *read]
    new = eqn.replace(outvars=outvars, params=params, effects=inner.jaxpr.effects)
    return [new], read, inner.replay


def _scan(eqn: Any) -> tuple[list[Any], list[Any], Replay]:
    """Stacks the values that an iteration's callbacks read."""
    inner = hoist(eqn.params["jaxpr"])
    num_consts, num_carry = _compat.scan_parts(eqn)
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def run(*operands):
        consts, start, xs = _split(operands, [num_consts, num_carry, len(operands)])

        def step(carry, rows):
            results = _jaxprs.run(inner.jaxpr, *consts, *carry, *rows)
            return results[:num_carry], results[num_carry:]

        unroll = eqn.params["unroll"]
        end, stacks = jax.lax.scan(step, start, xs, length, reverse=reverse, unroll=unroll)
        return [*end, *stacks]

    with eqn.ctx.manager:
        eqns, results = _jaxprs.record(run, eqn.invars, eqn)
    read = [_jaxprs.fresh_var(atom) for atom in results[len(eqn.outvars) :]]
    # A result that nobody reads has no variable of its own.
    kept = [_jaxprs.fresh_var(v) if isinstance(v, jex.DropVar) else v for v in eqn.outvars]
    eqns = _jaxprs.with_results(eqns, results, [*kept, *read])

    def replay(values: Sequence[np.ndarray], prefix: str) -> None:
        for i in reversed(range(length)) if reverse else range(length):
            inner.replay([stack[i] for stack in values], prefix)

    return eqns, read, replay


def _cond(eqn: Any) -> tuple[list[Any], list[Any], Replay]:
    """Gives the index of the branch, and what the callbacks of each branch read, or zeros."""
    inner = [hoist(branch) for branch in eqn.params["branches"]]
    index = _jaxprs.variables(eqn.invars[:1])
    counts = [len(own.read) for own in inner]
    branches = []
    for number, (own, old) in enumerate(zip(inner, eqn.params["branches"], strict=True)):
        body = own.jaxpr.jaxpr
        eqns, outvars = list(body.eqns), list(body.outvars[: len(eqn.outvars)])
        for other, hoisted in enumerate(inner):
            if other == number:
                outvars += body.outvars[len(eqn.outvars) :]
            else:
                made, atoms = _jaxprs.record(functools.partial(_zeros, hoisted.read), [], eqn)
                eqns, outvars = eqns + made, outvars + atoms
        new = _compat.make_closed_jaxpr(body.invars, outvars, eqns)
        branches.append(_compat.with_closed_type(new, old))
    read = [jex.Var(aval) for own in inner for aval in own.read]
    params = {**eqn.params, "branches": tuple(branches)}
    effects = frozenset(e for branch in branches for e in branch.effects)
    new = eqn.replace(outvars=[*eqn.outvars, *read], params=params, effects=effects)

    def replay(values: Sequence[np.ndarray], prefix: str) -> None:
        chosen, *own = _split(values, [len(index), *counts])
        number = int(chosen[0] if chosen else eqn.invars[0].val)
        inner[number].replay(own[number], prefix)

    return [new], [*index, *read], replay


def _zeros(avals: Iterable[Any]) -> list[Any]:
    return [_specs.filled(aval, 0) for aval in avals]


_RULES = {
    "debug_callback": _callback,
    "debug_print": _callback,
    "cond": _cond,
    "scan": _scan,
    **dict.fromkeys(_primitives.CHECKPOINTS, _checkpoint),
}
