"""Says where a wrong result first leaves the function."""

import collections
import dataclasses

from jaxpp import _compat
from jaxpp.certification._table import Form, Term, template_of
from jaxpp.certification._terms import Terms, rows_in


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first operation that is not one of the function's: in words, its task, and its line."""

    words: str
    task: str = ""
    line: str = ""


def explain(terms: Terms, known: int, wrong: Term, wanted: Term, maker: dict[Term, str]) -> Cause:
    """Finds the earliest operation behind a wrong result that the function never does.

    Args:
        terms: all terms.
        known: the number of the function's own terms, which come first.
        wrong: the term of the result.
        maker: for terms that ranks made the task and the rank.
    """
    new, stack = set[Term](), [wrong]
    while stack:
        term = stack.pop()
        if template_of(term).number >= known and term not in new:
            new.add(term)
            stack.extend(term.args)
    first = [t for t in new if not any(a in new for a in t.args)]
    if not first:  # the function's value of another place
        return Cause(f"it is {origin(wrong, maker)}", _task(maker.get(wrong, "")), _line(wrong))
    cause = min(first, key=lambda t: (t.name == "rows_joined", t.number))
    said = [f"the first wrong operation is {origin(cause, maker)}"]
    like = _nearest(terms, known, cause)
    for k, (wanted, now) in enumerate(zip(like.args if like else (), cause.args, strict=False)):
        if template_of(wanted) is not template_of(now):
            said.append(f"  its operand {k} is {origin(now, maker)}")
            said.append(f"  where, say, {origin(wanted, {})} is wanted")
    if len(said) == 1 and len({a.op.params for a in cause.args if a.form is Form.INSTANCE}) > 1:
        said += [f"  its operand {k} is {origin(a, maker)}" for k, a in enumerate(cause.args)]
    where = maker.get(cause, cause.where)
    return Cause("\n      ".join(said), _task(where), _line(cause))


def _nearest(terms: Terms, known: int, t: Term) -> Term | None:
    """The term of the function that is most like another: its operation, most of its operands."""
    args = [template_of(a) for a in t.args]

    def score(u: Term):
        own = [template_of(a) for a in u.args]
        alike = sum((collections.Counter(args) & collections.Counter(own)).values())
        in_place = sum(x is y for x, y in zip(own, args, strict=False))
        return alike, in_place, u.eqn is t.eqn

    type_of = (t.name, t.shape, t.dtype)
    same = [u for u in terms.terms[:known] if (u.name, u.shape, u.dtype) == type_of]
    return max(same, key=score, default=None)


def origin(t: Term, maker: dict[Term, str]) -> str:
    """A term in words: what it is, and where and by which line it is made."""
    rows = rows_in(t)
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
