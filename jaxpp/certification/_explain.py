"""Says where a wrong result first leaves the function."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxpp import _compat
from jaxpp.certification._table import Term, full_of, template_of
from jaxpp.certification._terms import rows_in


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first operation that is not one of the function's: in words, its task, and its line."""

    words: str
    task: str = ""
    line: str = ""


def explain(
    wrong: Term,
    wanted: Term,
    known: int,
    maker: dict[Term, str],
    are_equal: Callable[[Term, Term], bool],
) -> Cause:
    """Finds the earliest operation behind a wrong result that the function never does.

    Args:
        wrong: the term of the result.
        wanted: the term that is wanted.
        known: the number of the function's own terms, which come first.
        maker: for terms that ranks made the task and the rank; empty where no ranks run.
        are_equal: tells whether two terms are equal.
    """
    now, place = wrong, wanted
    pairs = _differences(now, place, are_equal)
    while (deeper := _to_follow(pairs)) is not None:
        now, place = deeper
        pairs = _differences(now, place, are_equal)
    cause = _first_new(wrong, known) if maker else None
    said = [] if cause is None else [f"the first wrong operation is {origin(cause, maker)}"]
    if pairs and now is not cause:
        said.append(f"{'so ' if said else ''}it differs in {origin(now, maker)}")
    elif now is not cause:
        said.append(f"{'so ' if said else ''}it is {origin(now, maker)}")
    for x, y in pairs[:3]:
        if x is None:
            said += [f"  which lacks {origin(y, {})}"] if y is not None else []
        elif y is None:
            said.append(f"  which has {origin(x, maker)} once too often")
        else:
            said += [f"  which has {origin(x, maker)}", f"  where {origin(y, {})} is wanted"]
    if not pairs:
        said.append(f"  where {origin(place, {})} is wanted")
    own = cause if cause is not None else now
    where = maker.get(own, own.where if cause is not None or not maker else "")
    return Cause("\n      ".join(said), _task(where), _line(own) or _line(place))


_SUMS = frozenset({"add", "add_any"})


def _is_new(t: Term, known: int) -> bool:
    """Tells whether the function has no such term; numbers are no operations."""
    return template_of(t).number >= known and full_of(template_of(t)) is None


def _first_new(wrong: Term, known: int) -> Term | None:
    """The earliest operation behind a term that is not one of the function's."""
    new, stack = set[Term](), [wrong]
    while stack:
        term = stack.pop()
        if _is_new(term, known) and term not in new:
            new.add(term)
            stack.extend(term.args)
    first = [t for t in new if not any(a in new for a in t.args)]
    return min(first, key=lambda t: (t.name == "rows_joined", t.number), default=None)


def _is_alike(a: Term, b: Term) -> bool:
    """Tells whether two terms are one operation on operands of the same types."""
    types = [[(t.shape, t.dtype) for t in own.args] for own in (a, b)]
    return a.op is b.op and types[0] == types[1] and bool(a.args)


def _differences(
    now: Term, wanted: Term, are_equal: Callable[[Term, Term], bool]
) -> list[tuple[Term | None, Term | None]]:
    """The operands in which two operations differ: of a sum those that are not in the other one.

    It is empty for different operations.
    """
    if now.name in _SUMS and wanted.name in _SUMS:
        lacks, has = list(_terms_of_sum(wanted)), list[Term]()
        for x in _terms_of_sum(now):
            same = next((k for k, y in enumerate(lacks) if x is y or are_equal(x, y)), None)
            if same is None:
                has.append(x)
            else:
                del lacks[same]
        return list(itertools.zip_longest(has, lacks))
    if not _is_alike(now, wanted):
        return []
    pairs = zip(now.args, wanted.args, strict=True)
    return [(x, y) for x, y in pairs if x is not y and not are_equal(x, y)]


def _to_follow(pairs: Sequence[tuple[Term | None, Term | None]]) -> tuple[Term, Term] | None:
    """The first of the operands that differ which are one operation on others, or the only ones."""
    if {x for x, _ in pairs} == {y for _, y in pairs}:  # they change places
        return None
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    alike = (own for own in both if _is_alike(*own) or {t.name for t in own} <= _SUMS)
    return next(alike, both[0] if len(pairs) == len(both) == 1 else None)


def _terms_of_sum(t: Term) -> Iterator[Term]:
    """The summands of a sum; those of a microbatch's sum are of this microbatch."""
    stack = [t]
    while stack:
        own = stack.pop()
        if own.name in _SUMS:
            stack.extend(reversed(own.args))
        else:
            yield own


def origin(t: Term, maker: dict[Term, str]) -> str:
    """A term in words: what it is, and where and by which line it is made."""
    rows = rows_in(t)
    if (number := full_of(t)) is not None:
        return f"{number.value} for all elements" if t.shape else f"{number.value}"
    if t.name in ("argument", "literal") or (rows and rows[0].name == "argument"):
        return _shown(t)
    where = maker.get(t, t.where)
    return f"{_shown(t)} of {where}{_compat.at_source_line(t.eqn) if t.eqn is not None else ''}"


def _shown(t: Term) -> str:
    if rows := rows_in(t):
        of, low, high = rows
        return f"rows {low}:{high} of {_shown(of)}"
    match t.name:
        case "instance":
            return f"{_shown(t.args[0])} of microbatch {t.op.params}"
        case "argument":
            return f"args{t.op.params[0]}"
        case "literal":
            return str(t.value)
        case "reshape" | "broadcast" if t.args:
            return f"{t.name} of {_shown(t.args[0])}"
    return f"{t.name}:{t.dtype}[{','.join(map(str, t.shape))}]"


def _task(where: str) -> str:
    return where.split(" on rank ")[0]


def _line(t: Term) -> str:
    return _compat.source_line(t.eqn) if t.eqn is not None else ""
