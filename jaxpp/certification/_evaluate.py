"""Runs jaxprs on terms."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp import _compat, jaxprs
from jaxpp.certification import _control, _devices, _equations
from jaxpp.certification._definition import microbatch_of
from jaxpp.certification._parameters import Parameters
from jaxpp.certification._refuted import Undecided
from jaxpp.certification._table import (
    Form,
    Term,
    inputs_of,
    name_of,
    number_of,
    template_of,
)
from jaxpp.certification._terms import Terms

#: The iterations up to which a scan is unrolled that a pass may cut.
UNROLLED = 4096

#: Runs a scheduled loop on terms.
LoopRunner = Callable[[Any, Sequence[Term]], list[Term]]


def _no_loop(eqn: Any, args: Sequence[Term]) -> list[Term]:
    raise Undecided(
        f"certify: the function has a loop{_compat.at_source_line(eqn)} that was scheduled before "
        f"it was traced."
    )


class Evaluator:
    """Runs jaxprs on terms, and notes the effects that happen.

    Args:
        terms: the terms.
        whole: the lengths of scans that no pass cuts.
    """

    #: The rules of equations that run jaxprs in a way of their own.
    control: Mapping[str, Callable[..., Sequence[Term]]] = {
        "cond": _control.cond,
        "custom_linear_solve": _control.linear_solve,
        "scan": _control.scan,
        "shard_map": _devices.shard_map,
        "while": _control.while_loop,
    }

    def __init__(self, terms: Terms, whole: frozenset[int] = frozenset()):
        self.terms, self.whole = terms, whole
        self.parameters = Parameters(self)
        self.equations = 0
        #: The effects that happened, in order, and whether they have to keep it.
        self.effects: list[tuple[Term, bool]] = []
        #: The choices that what runs is a case of: the index, the case, and how many there are.
        self.guards: tuple[tuple[Term, int, int], ...] = ()
        #: The microbatch whose task runs.
        self.microbatch: int | None = None
        #: The ways in which a scheduled loop runs.
        self.run_loop: LoopRunner = _no_loop
        #: The task that first made a term, if it is asked for.
        self.maker: dict[Term, str] | None = None
        self._depth = 0
        self._times = collections.Counter[Any]()
        self._codes: dict[int, _Code] = {}
        self._results: dict[tuple[Any, ...], Sequence[Term]] = {}

    def run(self, jaxpr: Any, args: Sequence[Term]) -> Sequence[Term]:
        """The results of an open or closed jaxpr; what has run on the same terms does not again.

        What depends on one microbatch runs once for all, on the templates of its values.
        """
        code = self._codes.get(id(jaxpr))
        if code is None:
            code = self._codes[id(jaxpr)] = _Code(self, jaxpr)
        values = list(code.values)
        for slot, a in zip(code.inputs, args, strict=True):
            values[slot] = a
        code.run(values, code.slices)
        if code.has_effects:
            code.run(values, code.steps)
        else:
            self._run_shared(code, values)
        return [values[slot] for slot in code.outputs]

    def _run_shared(self, code: "_Code", values: list[Term]) -> None:
        """Runs on templates what depends on no operand that several microbatches made."""
        operands = [values[slot] for slot in code.operands]
        mixed = tuple(k for k, a in enumerate(operands) if a.form is Form.MIXED)
        number = number_of(a for a in operands if a.form is not Form.MIXED)
        if number is None:
            mixed = ()
        else:
            operands = [template_of(a) for a in operands]
        alike, others, between = code.parted(mixed)
        key = (code, mixed, *(a for k, a in enumerate(operands) if k not in mixed))

        def run():
            own = list(values)
            for slot, a in zip(code.operands, operands, strict=True):
                own[slot] = a
            code.run(own, alike)
            return [own[slot] for slot in between]

        made = self.once(key, run, False)
        if number is not None:
            made = self._instances(made, number)
        for slot, t in zip(between, made, strict=True):
            values[slot] = t
        code.run(values, others)

    def _instances(self, made: Sequence[Any], number: int) -> Sequence[Term]:
        made = [self.terms.instance(t, number) for t in made]
        if self.maker is not None:
            for t in made:
                self.maker.setdefault(t, self.terms.where)
        return made

    def once(self, key: tuple[Any, ...], run: Callable[[], Any], has_effects: bool) -> Any:
        """Runs something once for a key; each time if it has effects."""
        if has_effects:
            return run()
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = run()
        return found

    def start(self) -> None:
        """Forgets the effects that have happened: another form of the step begins."""
        self.effects, self.microbatch = [], None
        self._times.clear()

    def note_makers(self) -> None:
        """Has the tasks that make terms first noted, from here on: what has run runs again."""
        self.maker = {}
        self._results.clear()

    def happens(self, effect: Term, is_ordered: bool) -> Any:
        """Notes an effect; tells which time it is, so that what it gives is told from another's.

        Ordered effects are counted all together, and others by microbatch, of which no rank knows
        the order.
        """
        if is_ordered:
            time = sum(ordered for _, ordered in self.effects)
        else:
            self._times[effect, self.microbatch] += 1
            time = self.microbatch, self._times[effect, self.microbatch]
        self.effects.append((effect, is_ordered))
        return time

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[tuple[Term, bool]]]:
        """Keeps the effects of a body from the others: they happen in each of its iterations."""
        before = self.effects, self._times, self.microbatch
        self.effects, self._times, self.microbatch = [], collections.Counter(), None
        try:
            yield self.effects
        finally:
            self.effects, self._times, self.microbatch = before

    @contextlib.contextmanager
    def guarded(self, index: Term, case: int, count: int) -> Iterator[None]:
        before, self.guards = self.guards, (*self.guards, (index, case, count))
        try:
            yield
        finally:
            self.guards = before

    @contextlib.contextmanager
    def bound(
        self, types: Sequence[tuple[tuple[int, ...], str]]
    ) -> Iterator[tuple[int, list[Term]]]:
        """The depth of a body that is run once, and terms for any values of some types."""
        self._depth += 1
        depth = self._depth
        where, eqn = self.terms.where, self.terms.eqn
        try:
            symbols = [
                self.terms.term("bound", (depth, k), (), *own) for k, own in enumerate(types)
            ]
            yield depth, symbols
        finally:
            self._depth -= 1
            self.terms.where, self.terms.eqn = where, eqn

    def iterations(self) -> list[Term]:
        """Terms that stand for the iterations of the loops around that run their bodies once."""
        depths = range(1, self._depth + 1)
        return [self.terms.term("bound", (d, "iteration"), (), (), "int32") for d in depths]

    def is_whole(self, length: int) -> bool:
        """Tells whether a scan of a length runs its body once."""
        return length > UNROLLED or length in self.whole


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that results depend on, and those with effects."""
    read, found = set(filter(_is_variable, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(filter(_is_variable, eqn.invars))
    return found[::-1]


def _only_cuts(eqn: Any) -> bool:
    """Tells whether an equation does no more than to cut its operands, or to count."""
    if eqn.primitive.name in _equations.CALLS:
        return all(map(_only_cuts, jaxprs.opened(_equations.body_of(eqn)).eqns))
    counts = all(v.aval.shape == () and v.aval.dtype in ("int32", "bool") for v in eqn.outvars)
    return eqn.primitive.name in ("dynamic_slice", "squeeze") or (counts and not eqn.effects)


def _is_variable(atom: Any) -> bool:
    return not jaxprs.is_literal(atom)


#: A rule, its equation, and the slots of its operands and its results.
_Step = tuple[_equations.Rule, Any, list[int], list[int]]


class _Code:
    """A jaxpr made ready to run: each equation is a function of terms."""

    def __init__(self, evaluator: Evaluator, jaxpr: Any):
        self.evaluator, self.jaxpr = evaluator, jaxpr  # which keeps the jaxpr alive
        terms, opened = evaluator.terms, jaxprs.opened(jaxpr)
        number: dict[Any, int] = {}
        self.values: list[Term] = []

        def slot(atom):
            if not jaxprs.is_literal(atom):
                if atom in number:
                    return number[atom]
                number[atom] = len(self.values)
            self.values.append(
                terms.of_literal(atom)
                if jaxprs.is_literal(atom)
                else terms.nothing(atom.aval.shape, name_of(atom.aval.dtype))
            )
            return len(self.values) - 1

        self.inputs = [slot(v) for v in inputs_of(jaxpr)]
        if constants := _compat.constants_of(jaxpr):
            for v, value in zip(opened.constvars, constants, strict=True):
                self.values[slot(v)] = terms.constant(value)
        self.steps: list[_Step] = [
            (
                _equations.rule_of(evaluator, eqn),
                eqn,
                [slot(v) for v in eqn.invars],
                [slot(v) for v in eqn.outvars],
            )
            for eqn in _needed(opened)
        ]
        self.outputs = [slot(v) for v in opened.outvars]
        self.has_effects = any(eqn.effects for _, eqn, _, _ in self.steps)
        self.slices = self._take_slices()
        given = {*self.inputs, *(i for step in self.slices for i in step[3])}
        read = {*self.outputs, *(i for step in self.steps for i in step[2])}
        #: The slots of what the other steps are given.
        self.operands = sorted(given & read)
        self._parted: dict[tuple[int, ...], Any] = {}

    def _take_slices(self) -> list[_Step]:
        """Takes from the steps those that cut inputs by number, so that the others see slices."""
        made, slices, steps = set[int](), [], []
        for step in self.steps:
            _, eqn, inputs, outputs = step
            if made.isdisjoint(inputs) and _only_cuts(eqn):
                slices.append(step)
            else:
                steps.append(step)
                made.update(outputs)
        self.steps = steps
        return slices

    def run(self, values: list[Term], steps: Sequence[_Step]) -> None:
        evaluator, terms = self.evaluator, self.evaluator.terms
        evaluator.equations += len(steps)
        maker = evaluator.maker
        for rule, eqn, inputs, outputs in steps:
            terms.eqn = eqn
            operands = [values[i] for i in inputs]
            if eqn.effects and (number := microbatch_of(eqn)) is not None:
                evaluator.microbatch = number
            # A call finds its number by itself, once it has cut its slices.
            alone = eqn.effects or eqn.primitive.name in _equations.CALLS
            number = None if alone else number_of(operands)
            if number is None:
                made = rule(operands)
            else:
                made = rule([template_of(a) for a in operands])
                made = [terms.instance(t, number) for t in made]
            for i, t in zip(outputs, made, strict=True):
                values[i] = t
                if maker is not None:
                    maker.setdefault(t, terms.where)

    def parted(self, mixed: tuple[int, ...]) -> tuple[list[_Step], list[_Step], list[int]]:
        """The steps that depend on none of some operands, those that do, and the slots between."""
        found = self._parted.get(mixed)
        if found is None:
            reached = {self.operands[k] for k in mixed}
            alike, others = [], []
            for step in self.steps:
                if reached.isdisjoint(step[2]):
                    alike.append(step)
                else:
                    others.append(step)
                    reached.update(step[3])
            read = {*self.outputs, *(i for step in others for i in step[2])}
            found = self._parted[mixed] = alike, others, sorted(read - reached)
        return found
