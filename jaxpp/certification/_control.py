"""The rules of effects and of control flow: scans, conditionals and while loops."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpp import _compat
from jaxpp.certification._table import Term, name_of
from jaxpp.jaxprs import Eqn

if TYPE_CHECKING:
    from jaxpp.certification._evaluate import Evaluator


def effect(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term], params: Any) -> list[Term]:
    """An effect happens where its guards hold; what it gives depends on which time it is."""
    terms, name = evaluator.terms, eqn.primitive.name
    guards = [index for index, _, _ in evaluator.guards]
    key = params, tuple((k, count) for _, k, count in evaluator.guards)
    happened = terms.term(f"effect {name}", key, [*args, *guards], (), "")
    time = evaluator.happens(happened, _compat.is_ordered(eqn))
    types = [(v.aval.shape, name_of(v.aval.dtype)) for v in eqn.outvars]
    given = [*args, *guards, *evaluator.iterations()]
    return [terms.term(name, (key, time, k), given, *own) for k, own in enumerate(types)]


def scan(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term]) -> list[Term]:
    """A scan, iteration by iteration; one that no pass cuts runs its body once."""
    terms, length = evaluator.terms, eqn.params["length"]
    num_consts, num_carry = _compat.scan_parts(eqn)
    consts, carry = args[:num_consts], list(args[num_consts:][:num_carry])
    xs, jaxpr = args[num_consts + num_carry :], eqn.params["jaxpr"]
    if evaluator.is_whole(length):
        return _whole_scan(evaluator, eqn, consts, carry, xs)
    ys: list[Sequence[Term]] = [()] * length
    outer = terms.where
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        terms.where = f"{outer}, iteration {i}" if outer else ""
        made = evaluator.run(jaxpr, [*consts, *carry, *(terms.row(x, i) for x in xs)])
        carry, ys[i] = made[:num_carry], made[num_carry:]
    terms.where, terms.eqn = outer, eqn
    if not length:
        empty = eqn.outvars[num_carry:]
        types = [(v.aval.shape, name_of(v.aval.dtype)) for v in empty]
        return [*carry, *(terms.term("empty", (), (), *own) for own in types)]
    return [*carry, *(terms.stack(rows) for rows in zip(*ys, strict=True))]


class _TermLoop:
    """A loop whose body ran once, on terms that stand for what it carries into any iteration.

    Args:
        evaluator: runs the body.
        depth: the number of loops that it is in, with itself.
        symbols: what stands for the carried values.
        first: the values before the first iteration.
    """

    def __init__(
        self, evaluator: "Evaluator", depth: int, symbols: Sequence[Term], first: Sequence[Term]
    ):
        self.terms, self.depth, self.symbols, self.first = evaluator.terms, depth, symbols, first
        #: The values that the body makes of the carried ones.
        self.next: Sequence[Term] = ()
        self._carried: dict[Term, Term] = {}

    def closed(self, name: str, params: Any, roots: Sequence[Term], type_of: Term) -> Term:
        """A term of the loop: of some values in its body, and of what is carried to make them.

        It names what is carried by the order in which the values read it. So it is the same if the
        loop carries other values, too, or in another order.
        """
        order: dict[Term, None] = {}
        pending = [*roots]
        while pending:
            for symbol in self._read(pending.pop(0)):
                if symbol not in order and symbol not in self._carried:
                    order[symbol] = None
                    pending.append(self._next_of(symbol))
        names = {
            symbol: self.terms.term("step", (self.depth, n), (), symbol.shape, symbol.dtype)
            for n, symbol in enumerate(order)
        }
        body = self.terms.with_terms(
            [*roots, *map(self._next_of, order)], {**self._carried, **names}, self.depth
        )
        args = [*body, *(self.first[self.symbols.index(symbol)] for symbol in order)]
        key = (self.depth, len(roots), *params)
        return self.terms.term(name, key, args, type_of.shape, type_of.dtype)

    def _next_of(self, symbol: Term) -> Term:
        return self.next[self.symbols.index(symbol)]

    def _read(self, root: Term) -> Iterable[Term]:
        """The carried values that a term reads, in the order of the term."""
        found: dict[Term, None] = {}
        seen, stack, symbols = set[Term](), [root], set(self.symbols)
        while stack:
            t = stack.pop()
            if t in seen or not t.free >> self.depth & 1:
                continue
            seen.add(t)
            if t in symbols:
                found[t] = None
            stack.extend(reversed(t.args))
        return found

    def carried(self, how: Any) -> dict[Term, Term]:
        """For each symbol the carried value of the iteration, of a loop of a length and order.

        What is carried is a recurrence with the other values that depend on it, too. All else that
        it depends on is a recurrence of its own, as it is if a pass splits the loop.
        """
        read = {symbol: set(self._read(self._next_of(symbol))) for symbol in self.symbols}
        behind = {symbol: _reached(read, symbol) for symbol in self.symbols}
        # Of two that do not depend on each other, one that depends on the other has more behind it.
        for symbol in sorted(self.symbols, key=lambda symbol: len(behind[symbol])):
            if symbol in self._carried:
                continue
            ring = [s for s in behind[symbol] if symbol in behind[s]] or [symbol]
            made = [self.closed("carried", how, [s], s) for s in ring]
            for own, term in zip(ring, made, strict=True):
                first = self.first[self.symbols.index(own)]  # what it is if it never changes
                self._carried[own] = first if self._next_of(own) is own else term
        return self._carried


def _reached(read: Mapping[Term, set[Term]], start: Term) -> set[Term]:
    found, stack = set[Term](), [start]
    while stack:
        new = read[stack.pop()] - found
        found |= new
        stack.extend(new)
    return found


def _whole_scan(evaluator, eqn, consts, carry, xs) -> list[Term]:
    """A scan as recurrences: what it carries, and what it makes, as functions of the iteration.

    An output is then the same however a pass splits the scan into several over the same rows.
    """
    terms, params = evaluator.terms, eqn.params
    length, how = params["length"], (params["length"], params["reverse"])
    with evaluator.bound([(c.shape, c.dtype) for c in carry]) as (depth, symbols):
        loop = _TermLoop(evaluator, depth, symbols, carry)
        with evaluator.collected() as happened:
            rows = [terms.at(x, depth) for x in xs]
            made = evaluator.run(params["jaxpr"], [*consts, *symbols, *rows])
        loop.next = made[: len(carry)]
        carried = loop.carried(how)
        terms.eqn = eqn
        outputs = terms.with_terms(made[len(carry) :], carried, depth)
        effects = terms.with_terms([t for t, _ in happened], carried, depth)
    for own, is_ordered in _grouped(effects, [ordered for _, ordered in happened]):
        evaluator.happens(terms.term("effect each", (depth, *how), own, (), ""), is_ordered)
    last = [terms.last(carried[s], depth) for s in symbols]
    return [*last, *(terms.each(t, depth, length) for t in outputs)]


def linear_solve(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term]) -> Sequence[Term]:
    """The function that solves a linear system; what differentiates it has no part in it."""
    bodies, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    systems = args[before + lengths.solve + lengths.transpose_solve :]
    return evaluator.run(bodies.solve, [*args[before:][: lengths.solve], *systems])


def _grouped(effects: Sequence[Term], ordered: Sequence[bool]) -> Iterator[tuple[list[Term], bool]]:
    """The effects of an iteration: those that keep their order together, any other by itself."""
    pairs = list(zip(effects, ordered, strict=True))
    if in_order := [t for t, is_ordered in pairs if is_ordered]:
        yield in_order, True
    for t, is_ordered in pairs:
        if not is_ordered:
            yield [t], False


#: The number of rows up to which a loop is taken for one of each row.
_ROWS = 128


def while_loop(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term]) -> list[Term]:
    """A loop of unknown length, whose body runs once; one of each row if it treats these apart."""
    p = eqn.params
    for_cond, for_body = p["cond_nconsts"], p["body_nconsts"]
    parts = args[:for_cond], args[for_cond:][:for_body], args[for_cond + for_body :]
    made = _while_of_rows(evaluator, eqn, *parts)
    return _whole_while(evaluator, eqn, *parts) if made is None else made


def _while_of_rows(
    evaluator: "Evaluator",
    eqn: Eqn,
    cond_consts: Sequence[Term],
    body_consts: Sequence[Term],
    carry: Sequence[Term],
) -> list[Term] | None:
    """A loop for each row of what a loop carries, as `jax.vmap` makes one of several."""
    terms, p = evaluator.terms, eqn.params
    count = max(((math.prod(c.shape), *c.shape[:1]) for c in carry), default=(0,))[-1]
    having = [c.shape[:1] == (count,) for c in carry]
    if not any(having) or not 0 < count <= _ROWS:
        return None

    def of_row(t: Term, has_rows: bool, i: int) -> Term:
        return terms.rows(t, i, i + 1) if has_rows else t

    with evaluator.bound([]) as (depth, _), evaluator.collected() as happened:
        shapes = [
            (1, *c.shape[1:]) if own else c.shape for c, own in zip(carry, having, strict=True)
        ]
        rows = [
            [
                terms.term("bound", (depth, k, i), (), shape, c.dtype)
                for i in range(count if own else 1)
            ]
            for k, (c, shape, own) in enumerate(zip(carry, shapes, having, strict=True))
        ]
        symbols = [terms.join_rows(own) if own[1:] else own[0] for own in rows]
        (test,) = evaluator.run(p["cond_jaxpr"], [*cond_consts, *symbols])
        after = evaluator.run(p["body_jaxpr"], [*body_consts, *symbols])
        if happened or test.shape not in ((), (count,)):
            return None
        terms.eqn, made = eqn, []
        for i in range(count):
            own = [each[i] if has else each[0] for each, has in zip(rows, having, strict=True)]
            first = [of_row(c, has, i) for c, has in zip(carry, having, strict=True)]
            loop = _TermLoop(evaluator, depth, own, first)
            loop.next = [of_row(t, has, i) for t, has in zip(after, having, strict=True)]
            own_test = of_row(test, test.shape != (), i)
            if not _bound_in([*loop.next, own_test], depth) <= {*own}:
                return None
            made.append([loop.closed("while", (), [s, own_test], s) for s in own])
    each = zip(zip(*made, strict=True), having, strict=True)
    return [terms.join_rows(own) if has else own[0] for own, has in each]


def _bound_in(roots: Iterable[Term], depth: int) -> set[Term]:
    """Finds the terms that stand for the carried values of the loop at a depth."""
    seen, stack = set[Term](), [*roots]
    while stack:
        t = stack.pop()
        if t not in seen and t.free >> depth & 1:
            seen.add(t)
            stack.extend(t.args)
    return {t for t in seen if t.name == "bound" and t.op.params[0] == depth}


def _whole_while(
    evaluator: "Evaluator",
    eqn: Eqn,
    cond_consts: Sequence[Term],
    body_consts: Sequence[Term],
    carry: Sequence[Term],
) -> list[Term]:
    terms, p = evaluator.terms, eqn.params
    with evaluator.bound([(c.shape, c.dtype) for c in carry]) as (depth, symbols):
        loop = _TermLoop(evaluator, depth, symbols, carry)
        with evaluator.collected() as of_test:
            (test,) = evaluator.run(p["cond_jaxpr"], [*cond_consts, *symbols])
        with evaluator.collected() as of_body:
            loop.next = evaluator.run(p["body_jaxpr"], [*body_consts, *symbols])
        terms.eqn = eqn
        for place, happened in (("test", of_test), ("body", of_body)):
            for own, is_ordered in _grouped([t for t, _ in happened], [own for _, own in happened]):
                effect = loop.closed("effect while", (place,), [*own, test], own[0])
                evaluator.happens(effect, is_ordered)
        return [loop.closed("while", (), [s, test], s) for s in symbols]


def cond(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term]) -> Sequence[Term]:
    """A choice of each output; the branches run where the index is known."""
    terms, branches = evaluator.terms, eqn.params["branches"]
    count = len(branches)
    index, operands = terms.index_of_case(args[0], count), args[1:]
    if index.value is not None:
        return evaluator.run(branches[int(index.value)], operands)
    cases = []
    for k, branch in enumerate(branches):
        with evaluator.guarded(index, k, count):
            # A residual of the branch is what its forward made, and not a choice.
            known = [terms.where_known(t, index, k, count) for t in operands]
            cases.append(evaluator.run(branch, known))
    terms.eqn = eqn
    return [terms.choice(index, own) for own in zip(*cases, strict=True)]
