"""Compares a function with other forms of it: scheduled, after each pass, as programs."""

import collections
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxpp import jaxprs
from jaxpp._program import Argument, Bundle, Result, cuts_of
from jaxpp.certification import _definition
from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._explain import explain, origin
from jaxpp.certification._fingerprints import Fingerprints
from jaxpp.certification._machine import SymbolicRanks
from jaxpp.certification._refuted import Refuted
from jaxpp.certification._steps import argument_term, run_step
from jaxpp.certification._table import Term, shown, type_of
from jaxpp.certification._terms import Terms

#: The places where a difference shows, if it is not a pass.
_TRANSFORMS, _PROGRAMS = "the transforms before schedule", "the programs"
#: Why the transforms before `place` are not decided, if rules edit loops.
EDITED = "edited"
#: Why they are not where a loop is batched and does not look like its function.
_BATCHED = "a loop is under jax.vmap, by which JAX batches its tasks in another form than the loop"


class LoweredStep(Protocol):
    """A step that has been lowered, as `step.lower` gives it."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def passes(self) -> Mapping[str, Any]: ...

    @property
    def context(self) -> Any:
        """JAX's settings when it was lowered."""
        ...

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positions of the arguments that the user donates."""
        ...

    @property
    def retrace(self) -> Callable[[], jaxprs.Traced]:
        """Traces the function again, as when it was lowered."""
        ...


def retraced(
    lowered: LoweredStep, definitions: Mapping[str, Callable[..., Any]], rules: list[str]
) -> jaxprs.Traced:
    edits = _definition.unedited(rules)
    with jaxprs.by_definition({**definitions, "edit_loops": edits}):
        return lowered.retrace()


def _num_microbatches(lowered: LoweredStep) -> int:
    """The number of microbatches; of loops of several numbers the greatest."""
    step = next(iter(lowered.passes.values()))
    loops = [e.params for e in step.jaxpr.eqns if e.primitive.name == "pipeline_loop"]
    return max((p["table"].num_microbatches * p["replicas"] for p in loops), default=1)


class How(enum.IntEnum):
    """The ways in which a result is that of the function, from strong to weak."""

    #: By the same operations in the same order.
    BITS = 0
    #: But for the order of sums.
    SUMS = 1
    #: Over the real numbers.
    REALS = 2
    #: Over the real numbers, if casts do not count.
    ROUNDED = 3


class Proof:
    """The comparison of a function with other forms of it, in one table of terms.

    Args:
        lowered: the step.
        function: the function.
        whole: the lengths of scans that are not unrolled.
        scheduled: whether the scheduled function is what is wanted, with its edited loops.
    """

    def __init__(
        self,
        lowered: LoweredStep,
        function: jaxprs.Traced,
        whole: frozenset[int],
        scheduled: bool = False,
    ):
        self.lowered, self.bundle = lowered, lowered.bundle
        self.terms = Terms(_num_microbatches(lowered))
        #: The models that may tell that results are equal, and how, from strong to weak: those for
        #: programs, and those for transforms.
        self.sums = self._models(How.SUMS, strict=True)
        self.laws = [
            *self.sums,
            *self._models(How.SUMS, strict=True, zeros=False),
            *self._models(How.REALS, strict=False),
            *self._models(How.ROUNDED, strict=False, rounding=False),
        ]
        self.evaluator = Evaluator(self.terms, whole)
        traced = next(iter(lowered.passes.values())).jaxpr
        programs = [traced, *(c.jaxpr for c in lowered.bundle.computations)]
        self.evaluator.parameters.note_shared([function.jaxpr], programs)
        self.passes: list[str] = []
        self.tasks = self.messages = 0
        #: The proof that each result of the scheduled function, and of the programs, has.
        self.scheduled: list[How] = []
        self.placed: list[How] = []
        paths = {a.array: a.path for a in self.bundle.arguments}
        variables = function.jaxpr.jaxpr.invars[function.num_closed_over :]
        self._check_arguments([v.aval for v in variables])
        self.arrays = [
            argument_term(self.terms, n, paths[n], v.aval, cut)
            for n, (v, cut) in enumerate(
                zip(variables, cuts_of(self.bundle.arguments), strict=True)
            )
        ]
        self.paths = function.output_paths()
        self.types = [v.aval for v in function.jaxpr.jaxpr.outvars]
        first = next(iter(lowered.passes))
        self._want(self._run_pass(first) if scheduled else self._run_traced(function))

    def _models(self, how: How, **options: bool) -> list[tuple[Fingerprints, How]]:
        return [(Fingerprints(self.terms, apart=apart, **options), how) for apart in (False, True)]

    def _want(self, results: Sequence[Term]) -> None:
        """Takes results, and the effects that have happened, for those that are wanted."""
        self.wanted = results
        self.effects, self.ordered = self._effects()
        self.known = len(self.terms.terms)

    def _effects(self) -> tuple[collections.Counter[Term], list[Term]]:
        """The effects that have happened, and in order those that keep it."""
        happened = self.evaluator.effects
        return collections.Counter(t for t, _ in happened), [
            t for t, ordered in happened if ordered
        ]

    def _run_traced(self, traced: jaxprs.Traced) -> Sequence[Term]:
        self.evaluator.start()
        self.terms.where = "the function"
        closed_over = map(self.terms.constant, traced.inputs[: traced.num_closed_over])
        return self.evaluator.run(traced.jaxpr, [*closed_over, *self.arrays])

    def _run_pass(self, name: str) -> Sequence[Term]:
        """The results of the step after a pass, put together of their rows."""
        step = self.lowered.passes[name]
        self.evaluator.start()
        self.terms.where = f"the step after {name}"
        self._check_records(self._name(name), "result", step.results, self.types, self.paths)
        results = run_step(self.evaluator, step, self.arrays)
        own = zip(results, step.jaxpr.jaxpr.outvars, step.results, strict=True)
        for term, v, record in own:
            what = f"result{self.paths[record.array]}"
            self._check_type(self._name(name), record, term, v.aval, what)
        rows = collections.defaultdict[int, list[Term]](list)
        for term, record in zip(results, step.results, strict=True):
            rows[record.array].append(term)
        whole = range(len(self.types))
        return [self.terms.join_rows(rows[n]) if rows[n][1:] else rows[n][0] for n in whole]

    def of_transforms(self, rules: list[str]) -> str:
        """Compares the scheduled function, which is then what is wanted.

        Args:
            rules: who edits its loops.

        Returns:
            Why the transforms before `place` are not decided; empty if they are.

        Raises:
            Refuted: one of them changes the function.
        """
        results, undecided = self._run_pass(next(iter(self.lowered.passes))), ""
        try:
            self.scheduled = self._compare(_TRANSFORMS, results, self.laws)
            self._compare_numbers_of_effects()
        except Refuted:
            undecided = self._why_undecided(rules)
            if not undecided:
                raise
        else:
            # An edit that rounds changes values; the backward of a loop may round elsewhere.
            if rules and max(self.scheduled) > How.SUMS:
                undecided = self._why_undecided(rules)
        if undecided:
            self.scheduled = []
        self._want(results)
        return undecided

    def _why_undecided(self, rules: list[str]) -> str:
        """Says why the schedule and its edits may change values of the other transforms.

        Raises:
            Refuted: they do, and there is no such reason.
        """
        unscheduled = retraced(self.lowered, _definition.UNSCHEDULED, rules)
        self._want(self._run_traced(unscheduled))
        results = self._run_pass(next(iter(self.lowered.passes)))
        try:
            laws = [(model, how) for model, how in self.laws if how is How.SUMS]
            self._compare("schedule", results, laws)
            self._compare_effects("schedule")
        except Refuted:
            if rules:
                return EDITED
            if self._is_batched():
                return _BATCHED
            raise
        return ""

    def _is_batched(self) -> bool:
        step = next(iter(self.lowered.passes.values()))
        loops = [e for e in step.jaxpr.eqns if e.primitive.name == "pipeline_loop"]
        return any(e.params["is_batched"] for e in loops)

    def of_programs(self, passes: bool) -> None:
        """Compares the step after each pass, and the programs."""
        first, *rest = self.lowered.passes
        self.passes.append(first)
        for name in rest if passes else ():
            self._compare(name, self._run_pass(name), self.sums)
            self._compare_effects(name)
            self.passes.append(name)
        self._check_records(_PROGRAMS, "result", self.bundle.results, self.types, self.paths)
        machine, found = self._run_programs()
        for n, record in enumerate(self.bundle.results):
            path = self.paths[record.array]
            if n not in found:
                raise Refuted(f"{_PROGRAMS}: no rank gives result{path}", path=path)
            for rank, (term, aval) in found[n].items():
                self._check_type(_PROGRAMS, record, term, aval, f"result{path} on rank {rank}")
            self.placed.append(
                max(
                    self._compare_result(_PROGRAMS, record, term, self.sums, rank)
                    for rank, (term, _) in found[n].items()
                )
            )
        self._compare_effects(_PROGRAMS)
        self.tasks, self.messages = machine.tasks, machine.messages

    def _run_programs(self) -> tuple[SymbolicRanks, Mapping[int, Mapping[int, tuple[Term, Any]]]]:
        self.evaluator.start()
        machine = SymbolicRanks(self.evaluator, self.bundle, self._argument)
        return machine, machine.run()

    def _argument(self, record: Argument) -> Term:
        whole = self.arrays[record.array]
        return whole if record.rows is None else self.terms.rows(whole, *record.rows)

    # ---- types -------------------------------------------------------------------------------

    def _check_arguments(self, types: Sequence[Any]) -> None:
        """Checks that the records of arguments are of each array once, and of its type."""
        paths = {a.array: a.path for a in self.bundle.arguments}
        self._check_records(_PROGRAMS, "argument", self.bundle.arguments, types, paths)
        for record in self.bundle.arguments:
            own, wanted = type_of(record.aval), type_of(_rows_of(types[record.array], record.rows))
            position = record.path[1:].partition("]")[0]  # of a keyword it is no number
            is_given = position.isdigit() and int(position) in self.lowered.donate_argnums
            if record.donated and not is_given:
                why = f"argument{record.name} is taken, which is not donated"
                raise self._refuted(_PROGRAMS, record.path, why)
            if own[:3] != wanted[:3]:
                why = f"argument{record.name} is {shown(own)}, and to the function {shown(wanted)}"
                raise self._refuted(_PROGRAMS, record.path, why)

    def _check_records(
        self,
        where: str,
        what: str,
        records: Sequence[Argument] | Sequence[Result],
        types: Sequence[Any],
        paths: Any,
    ) -> None:
        """Checks that records are of each array once, with all of its rows in their order."""
        own = collections.defaultdict[int, list[Any]](list)
        for record in records:
            own[record.array].append(record.rows)
        for n, aval in enumerate(types):
            rows = own.pop(n, [])
            cuts = [0, *(high for _, high in filter(None, rows))]
            all_rows = [*itertools.pairwise(cuts)], cuts[-1]
            if rows != [None] and (rows, *aval.shape[:1]) != all_rows:
                path = paths[n]
                raise self._refuted(where, path, f"{what}{path} is there with the rows {rows}")
        if own:
            raise self._refuted(where, "", f"{what}s {sorted(own)} are none of the function's")

    def _check_type(self, where: str, record: Result, term: Term, aval: Any, what: str) -> None:
        """Checks that the type of a value is that of the function's result, or of its rows."""
        wanted, path = self.types[record.array], self.paths[record.array]
        own = type_of(_rows_of(wanted, record.rows))
        for said in (type_of(aval), type_of(record.aval)):
            if said != own or (term.shape, term.dtype) != own[:2]:
                raise self._refuted(
                    where, path, f"{what} is {shown(said)}, and that of the function {shown(own)}"
                )

    def _refuted(self, where: str, path: str, why: str) -> Refuted:
        return Refuted(f"{self._after(where)}: {why}", pass_name=where, path=path)

    def _after(self, where: str) -> str:
        return f"after the pass {where}" if where in self.lowered.passes else where

    def _name(self, name: str) -> str:
        """Names a pass; the first gives the scheduled function."""
        return _TRANSFORMS if name == next(iter(self.lowered.passes)) else name

    # ---- values ------------------------------------------------------------------------------

    def _compare(
        self, where: str, results: Sequence[Term], models: Sequence[tuple[Fingerprints, How]]
    ) -> list[How]:
        records = [Result(aval, n) for n, aval in enumerate(self.types)]
        return [
            self._compare_result(where, record, term, models)
            for record, term in zip(records, results, strict=True)
        ]

    def _compare_result(
        self,
        where: str,
        record: Result,
        now: Term,
        models: Sequence[tuple[Fingerprints, How]],
        rank: int | None = None,
    ) -> How:
        """Compares a result with what is wanted of it.

        Returns:
            How it is equal.

        Raises:
            Refuted: it differs in each of the models.
        """
        wanted, path = self.wanted[record.array], self.paths[record.array]
        if record.rows is not None:
            wanted = self.terms.rows(wanted, *record.rows)
            path += f"[{record.rows[0]}:{record.rows[1]}]"
        if now is wanted:
            return How.BITS
        for model, how in models:
            if model.of(now) == model.of(wanted):
                return how
        if models is self.laws:
            bare = [self.terms.without_zeros(t) for t in (now, wanted)]
            for model, how in models:
                if model.of(bare[0]) == model.of(bare[1]):
                    return how
        known, (model, _) = self.known, self.sums[0]
        cause = explain(
            now, wanted, known, self._makers(where), lambda a, b: model.of(a) == model.of(b)
        )
        on = "" if rank is None else f" on rank {rank}"
        raise Refuted(
            f"{self._after(where)}: result{path}{on} is not that of the function:"
            f"\n      {cause.words}",
            pass_name=where,
            path=path,
            rank=rank,
            task=cause.task,
            line=cause.line,
        )

    def _makers(self, where: str) -> dict[Term, str]:
        """The tasks that make terms first: the programs run once more to tell."""
        if where != _PROGRAMS:
            return {}
        self.evaluator.note_makers()
        self._run_programs()
        return self.evaluator.maker or {}

    def _compare_numbers_of_effects(self) -> None:
        # The backward of a loss is run for a cotangent of one, and scaled after the loop: so a
        # callback in it may see another value.
        own, wanted = (
            collections.Counter(t.op for t in happened.elements())
            for happened in (self._effects()[0], self.effects)
        )
        if own != wanted:
            said = ", ".join(sorted({op.name for op in {**(own - wanted), **(wanted - own)}}))
            raise Refuted(f"{_TRANSFORMS}: the number differs of {said}", pass_name=_TRANSFORMS)

    def _compare_effects(self, where: str) -> None:
        own, ordered = self._effects()
        if own != self.effects:
            said = [f"it lacks {n} x {origin(t, {})}" for t, n in (self.effects - own).items()]
            said += [f"it has {n} x {origin(t, {})}" for t, n in (own - self.effects).items()]
            raise Refuted(f"{where}: the effects differ: {'; '.join(said[:4])}", pass_name=where)
        if ordered != self.ordered:
            raise Refuted(f"{where}: ordered effects are in another order", pass_name=where)


def _rows_of(aval: Any, rows: tuple[int, int] | None) -> Any:
    """The type of some rows of an array; of all, if None."""
    return aval if rows is None else aval.update(shape=(rows[1] - rows[0], *aval.shape[1:]))
