"""Edits inside the computations of a bundle, drawn at random."""

import dataclasses
import random
from typing import Any

from jaxpp import jaxprs
from jaxpp._program import Bundle
from tests.certification.inner import (
    algebra,
    control,
    loops,
    operands,
    params,
    places,
    primitives,
    records,
    types,
)

#: The kinds of edits of an equation, and of what is beside the computations.
KINDS = [
    kind
    for module in (operands, primitives, types, params, control, loops, algebra)
    for kind in module.KINDS
]
#: How often an edit is one of a record.
_RECORDS = 0.06
#: How many of those that only count are left out.
_FEWER_COUNTS = 0.8
#: How many equations are tried for a kind that cannot edit most of them.
_TRIES = 30


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edited bundle: the kind of the edit, where it is, and what it is."""

    kind: str
    bundle: Bundle
    text: str


def draw(key: Any, bundle: Bundle, sites: list[places.Site]) -> Edit:
    """Draws an edit; equal keys give equal edits.

    Args:
        key: what the random numbers are drawn from.
        bundle: the bundle.
        sites: its equations.
    """
    rng = random.Random(str(key))
    while True:
        if rng.random() < _RECORDS:
            record = rng.choice(records.KINDS)
            new = record(rng, bundle)
            if new is not None:
                return Edit(record.__name__, new, record.__doc__ or record.__name__)
            continue
        kind = rng.choice(KINDS)
        for _ in range(_TRIES):
            place = places.at(rng, bundle, rng.choice(sites))
            if _counts(place.eqn) and rng.random() < _FEWER_COUNTS:
                continue
            if (change := _change(kind, place)) is not None:
                # Half of the edits are of one run of a computation that ranks or tasks share.
                new = places.changed(
                    bundle, place.site, change, rng if rng.random() < 0.5 else None
                )
                return Edit(kind.__name__, new, _text(bundle, place, change))


def _counts(eqn: Any) -> bool:
    """Whether an equation only counts: as those do that cut the batch by the microbatch."""
    is_small = all(v.aval.shape == () and v.aval.dtype in ("int32", "bool") for v in eqn.outvars)
    return is_small and not eqn.effects and eqn.primitive.name in ("add", "lt", "select_n")


def _change(kind: Any, place: places.Place) -> places.Change | None:
    """The change of a kind; None where JAX cannot trace it."""
    try:
        change = kind(place)
    except (TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError,
            OverflowError, ZeroDivisionError, AssertionError, NameError):  # fmt: skip
        return None
    if change is None or (
        change.eqns == place.jaxpr.eqns and list(change.outvars) == list(place.jaxpr.outvars)
    ):
        return None
    return change


def _text(bundle: Bundle, place: places.Place, change: places.Change) -> str:
    computation = bundle.computations[place.site.computation]
    where = [computation.name, *(f"{s.name}@{s.eqn}" for s in place.site.path)]
    old = set(map(id, place.jaxpr.eqns))
    new = "; ".join(_line(e) for e in change.eqns if id(e) not in old)
    return f"{'/'.join(where)}#{place.site.at}: {_line(place.eqn)} => {new or 'moved'}"


def _line(eqn: Any) -> str:
    def atom(v):
        return str(v.val) if jaxprs.is_literal(v) else f"v{id(v) % 9973}:{v.aval.str_short(True)}"

    shown = {k: str(v)[:40] for k, v in eqn.params.items() if not k.endswith("jaxpr")}
    shown = {k: v for k, v in shown.items() if v not in ("None", "()") and "\n" not in v}
    given = " ".join(map(atom, eqn.invars))
    return f"{' '.join(map(atom, eqn.outvars))} = {eqn.primitive.name} {given} {shown or ''}"[:300]
