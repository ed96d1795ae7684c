"""`certify`: proves that the programs of a placed step compute what its function does."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp import _definitions
from jaxpp._program import Argument, Result, cuts_of
from jaxpp.certify import _reference
from jaxpp.certify._evaluate import Evaluator
from jaxpp.certify._explain import explain, origin
from jaxpp.certify._machine import Machine
from jaxpp.certify._refuted import Refuted
from jaxpp.certify._steps import argument_term, run_step
from jaxpp.certify._table import Term
from jaxpp.certify._terms import Equality, Terms


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The proof that the programs of a step compute its function; see `certify`.

    Args:
        results: the number of results that were compared.
        ranks: the number of ranks.
        tasks: the number of tasks, and of parts around the loops, that the ranks run.
        messages: the number of messages between ranks.
        effects: the number of effects, such as prints.
        terms: the number of different values that were met.
        equations: the number of equations that were run on terms.
        exact: whether the ranks do the same operations in the same order. If not, they are equal
            over the real numbers: sums are in another order, or in parts.
        rewrites: how often each rewrite was used that holds over the real numbers alone.
        transforms: the transforms that are proven.
        passes: the passes of `place` after each of which the step was compared.
        seconds: how long it took, in seconds.
    """

    results: int
    ranks: int
    tasks: int
    messages: int
    effects: int
    terms: int
    equations: int
    exact: bool
    definition: Any
    rewrites: Mapping[str, int]
    transforms: tuple[str, ...]
    passes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        how = (
            "the same operations in the same order"
            if self.exact
            else "equal but for the order of sums"
        )
        lines = [
            f"{self.results} results of {self.ranks} ranks are those of the function: {how}",
            f"  by {', '.join(self.transforms)}",
            f"  {self.tasks} tasks, {self.messages} messages, {self.effects} effects; "
            f"{self.equations} equations on {self.terms} terms in {self.seconds:.2f} s",
        ]
        return "\n".join(lines + [f"  {n} x {name}" for name, n in self.rewrites.items()])


def certify(step: Any, *args: Any, passes: bool = True, **kwargs: Any) -> Certificate:
    return certify_lowered(step.lower(*args, **kwargs), passes=passes)


def certify_lowered(lowered: Any, *, passes: bool = True) -> Certificate:
    """Does as `certify`, for a step that has been lowered."""
    start = time.perf_counter()
    with _definitions.by_definition(_reference.UNSCHEDULED):
        function = lowered.retrace()
    with _definitions.by_definition(_reference.PLAIN):
        plain = lowered.retrace()
    equality, _ = _closest(
        (Equality.EXACT, Equality.SUMS, Equality.REALS),
        lambda equality: _Proof(lowered, plain, equality).run_function(function),
    )
    _, proof = _closest(
        (Equality.EXACT, Equality.SUMS),
        lambda equality: _Proof(lowered, function, equality).run(passes),
    )
    return proof.certificate(equality, time.perf_counter() - start)


def _closest(
    equalities: Sequence[Equality], prove: Callable[[Equality], "_Proof"]
) -> tuple[Equality, "_Proof"]:
    """The first of some equalities that can be proven."""
    for equality in equalities[:-1]:
        try:
            return equality, prove(equality)
        except Refuted:
            pass
    return equalities[-1], prove(equalities[-1])


class _Proof:
    """The comparison of a step with its function, in one table of terms."""

    def __init__(self, lowered: Any, traced: Any, equality: Equality):
        self.lowered, self.traced = lowered, traced
        self.terms = Terms(equality)
        tables = [len(p.instructions) for p in lowered.programs]
        self.evaluator = Evaluator(self.terms, max(tables, default=0))
        self.passes: list[str] = []
        self.machine: Any = None

    def run_function(self, traced: Any) -> "_Proof":
        """Compares a trace of the same function."""
        self._run_function()
        self.evaluator.start()
        self.terms.where = "the microbatch loop"
        closed = [self.terms.constant(x) for x in traced.inputs[: traced.num_closed_over]]
        terms = self.evaluator.run(traced.jaxpr, [*closed, *self.arrays])
        records = [Result(None, n) for n in range(len(terms))]
        found = {n: {None: t} for n, t in enumerate(terms)}
        self._compare("the transforms", records, found, {})
        return self

    def run(self, passes: bool) -> "_Proof":
        """Compares the step after each pass, and the programs."""
        self._run_function()
        if passes:
            for name, step in self.lowered.passes.items():
                self.evaluator.start()
                self.terms.where = f"the step after {name}"
                terms = run_step(self.evaluator, step, self.arrays)
                found = {n: {None: t} for n, t in enumerate(terms)}
                self._compare(name, step.results, found, {})
                self.passes.append(name)
        self._run_programs()
        return self

    def _run_function(self) -> None:
        """Runs the function: what is wanted."""
        traced, terms = self.traced, self.terms
        closed = [terms.constant(x) for x in traced.inputs[: traced.num_closed_over]]
        variables = traced.jaxpr.jaxpr.invars[traced.num_closed_over :]
        paths = {a.array: a.path for a in self.lowered.bundle.arguments}
        cuts = cuts_of(self.lowered.bundle.arguments)
        self.arrays = [
            argument_term(terms, paths[n], v.aval, cut)
            for n, (v, cut) in enumerate(zip(variables, cuts, strict=True))
        ]
        self.wanted = self.evaluator.run(traced.jaxpr, [*closed, *self.arrays])
        self.effects = collections.Counter(self.evaluator.effects)
        self.ordered = list(self.evaluator.ordered)
        self.paths = traced.output_paths()
        self.known = len(terms.terms)

    def _run_programs(self) -> None:
        bundle = self.lowered.bundle
        self.machine, found = self._run_machine()
        missing = [n for n in range(len(bundle.results)) if n not in found]
        if missing:
            result = bundle.results[missing[0]]
            path = self.paths[result.array]
            raise Refuted(f"no rank gives result{path}", path=path)
        self._compare("the programs", bundle.results, found, None)

    def _run_machine(self) -> tuple[Machine, dict[int, dict[int, Term]]]:
        self.evaluator.start()
        machine = Machine(self.evaluator, self.lowered.bundle, self._argument)
        return machine, machine.run()

    def _argument(self, record: Argument) -> Term:
        whole = self.arrays[record.array]
        return whole if record.rows is None else self.terms.rows(whole, *record.rows)

    def _compare(
        self,
        pass_name: str,
        records: Sequence[Result],
        found: Mapping[int, Mapping[int | None, Term]],
        maker: dict[Term, str] | None,
    ) -> None:
        """Compares results, each on every rank that has it, and effects."""
        where = pass_name if pass_name == "the programs" else f"after the pass {pass_name}"
        for n, record in enumerate(records):
            wanted, path = self.wanted[record.array], self.paths[record.array]
            if record.rows is not None:
                wanted = self.terms.rows(wanted, *record.rows)
                path += f"[{record.rows[0]}:{record.rows[1]}]"
            for rank, is_now in found[n].items():
                if is_now is wanted:
                    continue
                cause = explain(self.terms, self.known, is_now, self._makers(maker))
                on = "" if rank is None else f" on rank {rank}"
                raise Refuted(
                    f"{where}: result{path}{on} is not that of the function:\n      {cause.words}",
                    pass_name=pass_name,
                    path=path,
                    rank=rank,
                    task=cause.task,
                    line=cause.line,
                )
        own = collections.Counter(self.evaluator.effects)
        if own != self.effects:
            said = [f"lacks {n} x {origin(t, {})}" for t, n in (self.effects - own).items()]
            said += [f"has {n} x {origin(t, {})}" for t, n in (own - self.effects).items()]
            raise Refuted(f"{where}: the effects differ: {'; '.join(said[:4])}", pass_name=pass_name)
        if self.evaluator.ordered != self.ordered:
            raise Refuted(f"{where}: ordered effects change their order", pass_name=pass_name)

    def _makers(self, maker: dict[Term, str] | None) -> dict[Term, str]:
        """The tasks that make terms first: the programs run once more to tell."""
        if maker is not None:
            return maker
        self.evaluator.note_makers()
        self._run_machine()
        return self.evaluator.maker or {}

    def certificate(self, equality, seconds: float) -> Certificate:
        bundle = self.lowered.bundle
        return Certificate(
            results=len(bundle.results),
            ranks=len(bundle.programs),
            tasks=self.machine.tasks,
            messages=self.machine.messages,
            effects=self.effects.total(),
            terms=len(self.terms.terms),
            equations=self.evaluator.equations,
            exact=not self.terms.regroup,
            definition=equality,
            rewrites=dict(self.terms.rewrites),
            transforms=("schedule", "place"),
            passes=tuple(self.passes),
            seconds=seconds,
        )
