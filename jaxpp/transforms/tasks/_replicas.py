"""The loops of replicas as one scheduled loop, whose values have a row for each replica.

`microbatch(..., replicas=D)` makes a scan over replicas, whose body calls the loop of one, and then
calls that combine the rows of its results. The loops of all replicas have the same tasks. So they
are one scheduled loop over arrays of rows, of which `place` gives each replica its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var, primitives
from jaxpp.transforms.stages import call_as, called_as, is_stage_call
from jaxpp.transforms.tasks import _write
from jaxpp.transforms.tasks._loop import ScheduledLoop, is_loop, loop_p

#: Combines rows number by number, so that it is the same for the parts of an array.
_ROW_BY_ROW: dict[str, Callable[[Any], Any]] = {
    "sum": lambda rows: functools.reduce(jnp.add, list(rows)),
    "last": lambda rows: rows[-1],
}
#: The primitives that make the sum of the parts of a sum over microbatches.
_LINEAR = primitives.ADDS | {"concatenate"}


def is_replicas(eqn) -> bool:
    """Tells whether an equation is a scan over the loops of replicas."""
    if eqn.primitive.name != "scan":
        return False
    return any(called_as(e, "replica") is not None for e in jaxprs.opened(eqn.params["jaxpr"]).eqns)


def check_differentiated(eqn: Eqn) -> None:
    """Checks that no gradient of all replicas is one sum, to which each adds.

    Raises:
        ValueError: so it is where a loop was differentiated that carries a value.
    """
    if is_replicas(eqn) and _compat.scan_parts(eqn)[1]:
        raise ValueError(
            f"schedule: the microbatch loop of replicas{_compat.at_source_line(eqn)} carries a "
            f"value, and was differentiated, so that the gradients of all replicas are one sum. "
            f"Differentiate first: microbatch(jax.value_and_grad(f), M, replicas=...)."
        )


def of_rows(eqn: Eqn, after: Sequence[Eqn], scheduled: Callable[..., list[Eqn]]) -> list[Eqn]:
    """Schedules the loops of replicas.

    Args:
        eqn: the scan over them.
        after: equations, among which are those that combine rows of its results.
        scheduled: gives the equations of the scheduled loop of one replica.

    Returns:
        The equations that make its results, and the results of those equations that add their rows
        up, or take the last: where stages make a result in parts, it is these that are combined.
    """
    num_consts, num_carry = _compat.scan_parts(eqn)
    body, constants = jaxprs.without_constants(eqn.params["jaxpr"])
    literals = map(jaxprs.literal, constants, (v.aval for v in body.jaxpr.invars))

    def holds_calls(e) -> bool:
        return not is_stage_call(e) and jaxprs.contains(e, is_stage_call)

    flat = jaxprs.inline(body, holds_calls)
    (loop,) = filter(holds_calls, flat.eqns)
    assert not num_carry, "a replica runs one loop"
    of_loop = scheduled(loop, join_rows=_write.first_of)
    known = zip(flat.jaxpr.invars, [*literals, *eqn.invars], strict=True)
    rows = _ReplicaRows(
        eqn.params["length"], known, flat.jaxpr.invars[len(constants) + num_consts :]
    )
    rows.add([e for inner in flat.eqns for e in (of_loop if inner is loop else [inner])])
    results = dict(zip(eqn.outvars, flat.jaxpr.outvars, strict=True))
    in_rows = {v: rows.of(result) for v, result in results.items()}
    for merge in after:
        if (how := called_as(merge, "merge_")) in _ROW_BY_ROW:
            result: Any = results.get(jaxprs.variables(merge.invars)[0])
            if result in loop.outvars and (part := _linear(of_loop, result)):
                combine = functools.partial(_combined, part.jaxpr, how)
                in_rows |= zip(merge.outvars, rows.record(combine, part.inputs), strict=True)
    return jaxprs.with_results(rows.eqns, list(in_rows.values()), list(in_rows))


def _linear(of_loop: Sequence[Eqn], result: Atom) -> jaxprs.Part | None:
    """Finds what makes a result of the loop's, if it makes the same of combined rows."""
    (at,) = (n for n, e in enumerate(of_loop) if is_loop(e))
    needed = jaxprs.needed(of_loop[at + 1 :], [result])
    linear = all(e.primitive.name in _LINEAR for e in needed)
    return jaxprs.part(needed, [result]) if linear else None


def _combined(jaxpr: jex.ClosedJaxpr, how: str, *rows: Any) -> list[Any]:
    """Combines rows of the results of a scheduled loop, then makes of these one result."""
    return jaxprs.run(jaxpr, *(call_as(f"merge_{how}", _ROW_BY_ROW[how], (x,)) for x in rows))


class _ReplicaRows:
    """Equations of one replica, written for all: `eqns`.

    Args:
        replicas: their number.
        known: the variables of one that are there, with the atoms outside.
        varying: those of them that have a row for each replica.
    """

    def __init__(self, replicas: int, known: Iterable[tuple[Var, Atom]], varying: Iterable[Var]):
        self.replicas = replicas
        self.eqns: list[Eqn] = []
        self._known = jaxprs.Substitution(known)
        self._varying = set(varying)

    def of(self, atom: Atom) -> Atom:
        """Returns the rows of an atom; each has the same, where none has its own."""
        if not jaxprs.is_literal(atom) and atom in self._varying:
            return self._known(atom)
        shape = self.replicas, *atom.aval.shape
        (rows,) = self.record(lambda x: [jnp.broadcast_to(x, shape)], [atom])
        return rows

    def record(self, fun: Callable[..., Any], atoms: Sequence[Atom]) -> list[Atom]:
        """Adds what a function does with rows of some atoms, or with these as they are."""
        operands = list(map(self._known, atoms))
        traced = jax.make_jaxpr(fun)(*(v.aval for v in operands))
        eqns, results = jaxprs.inline_body(traced, operands)
        self.eqns += eqns
        return results

    def add(self, eqns: Sequence[Eqn]) -> None:
        """Adds equations: those that depend on a row are for all rows, a scheduled loop as one."""
        self._varying |= jaxprs.descendants(eqns, self._varying)

        def kind(e: Eqn) -> tuple[bool, bool]:
            return is_loop(e), not self._varying.isdisjoint(e.outvars)

        for (scheduled, depends), group in itertools.groupby(eqns, kind):
            part = jaxprs.part(members := list(group), jaxprs.results_of(members))
            if scheduled:
                results = self._loop(*members)
            elif depends:
                axes = [0 if v in self._varying else None for v in part.inputs]
                results = self.record(
                    jax.vmap(functools.partial(jaxprs.run, part.jaxpr), axes), part.inputs
                )
            else:
                results = self.record(functools.partial(jaxprs.run, part.jaxpr), part.inputs)
            self._known.of.update(zip(jaxprs.results_of(members), results, strict=True))

    def _loop(self, eqn: Eqn) -> list[Atom]:
        """Adds a scheduled loop; its constants are those of all replicas."""
        first = eqn.params["num_consts"]
        consts, others = eqn.invars[:first], eqn.invars[first:]
        assert self._varying.isdisjoint(jaxprs.variables(consts)), "all replicas have them"
        operands = [*map(self._known, consts), *map(self.of, others)]
        loop = dataclasses.replace(ScheduledLoop.of(eqn), replicas=self.replicas)
        eqns, results = jaxprs.record(functools.partial(loop_p.bind, **loop.params), operands, eqn)
        self.eqns += eqns
        join, count = _write.row_by_direction(loop), loop.num_directions
        for n in range(count * loop.num_carry, len(results), count) if count > 1 else ():
            joined = self.record(functools.partial(_joined, join), results[n : n + count])
            results[n : n + count] = joined * count
        return results


def _joined(join: Callable[..., Any], *results: Any) -> list[Any]:
    """Joins results of directions, whose microbatches of all replicas follow each other."""
    return [join(*results).reshape(results[0].shape)]
