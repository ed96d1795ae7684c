"""`certify`: proves that the programs of a placed step compute what its function does."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxpp import _compat, _definitions, _jaxprs
from jaxpp._ambient import without_mesh
from jaxpp._garbage import without_collections
from jaxpp._program import PROVIDED, Argument, Bundle, Result, cuts_of
from jaxpp.certification import _definition
from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._explain import explain, origin
from jaxpp.certification._fingerprints import Fingerprints
from jaxpp.certification._machine import Machine
from jaxpp.certification._refuted import Refuted, Undecided
from jaxpp.certification._steps import argument_term, run_step
from jaxpp.certification._table import Term
from jaxpp.certification._terms import Terms

#: Where a difference shows, if it is not a pass.
_TRANSFORMS, _PROGRAMS = "the transforms before schedule", "the programs"

#: Why the transforms before `place` are not decided, if rules edit loops.
_EDITED = "edited"
#: Why none is decided where a loop is batched and does not look like its function.
_BATCHED = "a loop is under jax.vmap, by which JAX batches its tasks in another form than the loop"


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
        equations: the number of equations that were run on these values.
        exact: whether the ranks do the same operations in the same order as the scheduled function
            on one device. If not, they are equal over the real numbers, and round to the same
            types: sums are in another order.
        regrouped: how many results are equal over the real numbers alone.
        rounded: how many results of the scheduled function are rounded at other places than by the
            definitions, such as a gradient that is taken of a loop whose loss has a narrow type.
        transforms: the transforms that are proven.
        undecided: why those before `schedule` are not proven, if they are not.
        edits: the rules of `jaxpp.extend.edit_loops` that change values, or add some: the edited
            loops are then what the programs compute, and the transforms before are not decided.
        passes: the passes of `place` after each of which the step was compared.
        seconds: how long it took, in seconds.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
        >>> certificate = jaxpp.certify(step, jnp.eye(2), jnp.ones((4, 2)))
        >>> certificate.exact, certificate.ranks, certificate.transforms[-1]
        (True, 1, 'place')
    """

    results: int
    ranks: int
    tasks: int
    messages: int
    effects: int
    terms: int
    equations: int
    exact: bool
    regrouped: int
    rounded: int
    transforms: tuple[str, ...]
    undecided: str
    passes: tuple[str, ...]
    seconds: float
    edits: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = "bit by bit" if self.exact else "but for the order of sums"
        what = "edited function" if self.edits else "function"
        verb = "are" if len(self.transforms) > 1 else "is"
        lines = [
            f"{self.results} results of {self.ranks} ranks are those of the {what}, {how}: "
            f"{', '.join(self.transforms)} {verb} proven",
            f"  {self.tasks} tasks, {self.messages} messages, {self.effects} effects; "
            f"{self.equations} equations on {self.terms} values in {self.seconds:.2f} s",
        ]
        if self.regrouped:
            lines.append(f"  {self.regrouped} results have sums in another order")
        if self.rounded:
            lines.append(f"  {self.rounded} results are rounded at other places than by definition")
        if self.edits:
            lines.append(f"  edited, as no transform is defined to do, by {', '.join(self.edits)}")
        if self.undecided:
            lines.append(f"  not decided of the other transforms: {self.undecided}")
        return "\n".join(lines)


class Lowered(Protocol):
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
    def retrace(self) -> Callable[[], _jaxprs.Traced]:
        """Traces the function again, as when it was lowered."""
        ...


def certify(step: Any, *args: Any, passes: bool = True, **kwargs: Any) -> Certificate:
    """Proves that the programs of a placed step compute what its function does, effects included.

    Nothing is compiled, and no array is read: the function and the programs of all ranks run on
    symbols, and the symbols of their results are compared. It is a proof for these shapes and for
    all values. First the function runs with each transform by its definition: `split_stages`,
    `wrap_forward` and `schedule` are the identity, and `microbatch` is a loop that keeps each
    output, and combines them after the last slice. `jaxpp.extend.edit_loops` is the identity, too;
    if an edit changes or rounds values, or adds results, the programs have to compute the edited
    function.
    Then follow the scheduled function, the step after each pass of `place`, and the programs. They
    run on a machine that also refutes a deadlock, a message that is lost or mixed up, a value that
    is read after it was freed or its memory reused, and an effect that happens too often, not at
    all, or in the wrong order.

    Programs that do the same operations in the same order are equal bit by bit. Where sums are in
    another order, such as those of a parameter that several stages read, the programs are equal
    over the real numbers: they have the same value in a model of random numbers. Different values
    are equal in the model with a chance below one in a million million.

    It does not see what comes after: XLA, which may round in another way, and transfers. If it has
    no rule for an operation, such as a custom call or a kernel, it takes the operation for the same
    function wherever it is.

    Args:
        step: a placed step.
        *args: its arguments, or `jax.ShapeDtypeStruct`s in place of their arrays.
        passes: whether the step is compared after each pass, which tells which one is wrong.
        **kwargs: its arguments by keyword.

    Returns:
        The certificate. Its text has one headline.

    Raises:
        Refuted: the step does not compute its function; it has the pass, the result, the rank, the
            task and the user's line.
        Undecided: JAX's settings are not those under which it was lowered, or a loop over devices
            that share a microbatch is not proven yet.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh)
        >>> certificate = jaxpp.certify(step, jnp.eye(2), jnp.ones((8, 2)))
        >>> print(str(certificate).splitlines()[0])
        1 results of 2 ranks are those of the function, bit by bit: split_stages, wrap_forward, ...
    """
    return certify_lowered(step.lower(*args, **kwargs), passes=passes)


@without_mesh
def certify_lowered(lowered: Lowered, passes: bool = True) -> Certificate:
    """Does as `certify`, for a step that has been lowered."""
    start = time.perf_counter()
    _check_decidable(lowered)
    rules: list[str] = []
    with without_collections():
        try:
            proof = _Proof(lowered, _retraced(lowered, _definition.PLAIN, rules))
            undecided = proof.of_transforms(rules)
        except _definition.Edited:
            proof, undecided = _Proof(lowered, lowered.retrace(), scheduled=True), _EDITED
        proof.of_programs(passes)
    transforms = () if undecided else ("split_stages", "wrap_forward", "microbatch")
    if undecided not in (_EDITED, _BATCHED):
        transforms = (*transforms, "schedule", *["edit_loops"] * bool(rules))
    return Certificate(
        results=len(lowered.bundle.results),
        ranks=len(lowered.bundle.programs),
        tasks=proof.tasks,
        messages=proof.messages,
        effects=proof.effects.total(),
        terms=len(proof.terms.terms),
        equations=proof.evaluator.equations,
        exact=not proof.regrouped,
        regrouped=proof.regrouped,
        rounded=proof.rounded,
        transforms=(*transforms, "place"),
        undecided="" if undecided == _EDITED else undecided,
        passes=tuple(proof.passes),
        seconds=time.perf_counter() - start,
        edits=tuple(rules) if undecided == _EDITED else (),
    )


PROVIDED["certify"] = certify_lowered


def _retraced(
    lowered: Lowered, definitions: Mapping[str, Callable[..., Any]], rules: list[str]
) -> _jaxprs.Traced:
    edits = _definition.unedited(rules)
    with _definitions.by_definition({**definitions, "edit_loops": edits}):
        return lowered.retrace()


def _check_decidable(lowered: Lowered) -> None:
    if lowered.context != _compat.trace_context():
        raise Undecided(
            "certify: the step was lowered under other settings of JAX (such as jax.enable_x64 or "
            "jax.set_mesh), under which its function is another one. Certify it under the same."
        )


def _num_microbatches(lowered: Lowered) -> int:
    """The number of microbatches; of loops of several numbers the greatest."""
    step = next(iter(lowered.passes.values()))
    loops = [e.params for e in step.jaxpr.eqns if e.primitive.name == "pipeline_loop"]
    return max((p["table"].num_microbatches * p["replicas"] for p in loops), default=1)


class _Proof:
    """The comparison of a function with other forms of it, in one table of terms.

    If the function is `scheduled`, it is what is wanted, with its edited loops.
    """

    def __init__(self, lowered: Lowered, function: _jaxprs.Traced, scheduled: bool = False):
        self.lowered, self.bundle = lowered, lowered.bundle
        self.terms = Terms(_num_microbatches(lowered))
        #: Equal over the real numbers, with rounding or without; from strong to weak.
        self.models = [
            Fingerprints(self.terms, rounding, apart)
            for rounding in (True, False)
            for apart in (False, True)
        ]
        self.sums = self.models[:2]
        # A loop of microbatches has fewer iterations than a rank has instructions.
        longest = max(len(program.instructions) for program in lowered.bundle.programs)
        self.evaluator = Evaluator(self.terms, longest)
        self.passes: list[str] = []
        self.tasks = self.messages = self.regrouped = self.rounded = 0
        paths = {a.array: a.path for a in self.bundle.arguments}
        variables = function.jaxpr.jaxpr.invars[function.num_closed_over :]
        self.arrays = [
            argument_term(self.terms, paths[n], v.aval, cut)
            for n, (v, cut) in enumerate(
                zip(variables, cuts_of(self.bundle.arguments), strict=True)
            )
        ]
        self.paths = function.output_paths()
        first = next(iter(lowered.passes))
        self._want(self._run_pass(first) if scheduled else self._run_traced(function))

    def _want(self, results: Sequence[Term]) -> None:
        """Takes results, and the effects that have happened, for those that are wanted."""
        self.wanted = results
        self.effects = collections.Counter(self.evaluator.effects)
        self.ordered = list(self.evaluator.ordered)
        self.known = len(self.terms.terms)

    def _run_traced(self, traced: _jaxprs.Traced) -> Sequence[Term]:
        self.evaluator.start()
        self.terms.where = "the function"
        closed_over = map(self.terms.constant, traced.inputs[: traced.num_closed_over])
        return self.evaluator.run(traced.jaxpr, [*closed_over, *self.arrays])

    def _run_pass(self, name: str) -> Sequence[Term]:
        self.evaluator.start()
        self.terms.where = f"the step after {name}"
        return run_step(self.evaluator, self.lowered.passes[name], self.arrays)

    def of_transforms(self, rules: list[str]) -> str:
        """Compares the scheduled function, which is then what is wanted.

        Args:
            rules: who edits its loops.

        Returns:
            Why the transforms before `schedule` are not decided; empty if they are.
        """
        name = next(iter(self.lowered.passes))
        records = self.lowered.passes[name].results
        results, undecided = self._run_pass(name), ""
        try:
            self._compare(_TRANSFORMS, records, results, self.models)
            self._compare_numbers_of_effects()
        except Refuted as error:
            undecided = str(error)
        # An edit that rounds changes values; that the backward of a loop rounds elsewhere does not.
        if undecided or (rules and self.rounded):
            unscheduled = _retraced(self.lowered, _definition.UNSCHEDULED, rules)
            self._want(self._run_traced(unscheduled))
            self._run_pass(name)
            try:
                self._compare("schedule", records, results, self.sums)
                self._compare_effects("schedule")
            except Refuted:
                if not rules and not self._is_batched():
                    raise
                undecided = _EDITED if rules else _BATCHED
        if undecided == _EDITED:
            self.rounded = 0  # by definition no longer
        self._want(results)
        return undecided

    def _is_batched(self) -> bool:
        step = next(iter(self.lowered.passes.values()))
        loops = [e for e in step.jaxpr.eqns if e.primitive.name == "pipeline_loop"]
        return any(e.params["is_batched"] for e in loops)

    def of_programs(self, passes: bool) -> None:
        """Compares the step after each pass, and the programs."""
        first, *rest = self.lowered.passes
        self.passes.append(first)
        for name in rest if passes else ():
            results = self._run_pass(name)
            self._compare(name, self.lowered.passes[name].results, results, self.sums)
            self._compare_effects(name)
            self.passes.append(name)
        machine, found = self._run_programs()
        for n, record in enumerate(self.bundle.results):
            if n not in found:
                path = self.paths[record.array]
                raise Refuted(f"{_PROGRAMS}: no rank gives result{path}", path=path)
            for rank, term in found[n].items():
                if not self._compare_result(_PROGRAMS, record, term, self.sums, rank):
                    self.regrouped += 1
                    break
        self._compare_effects(_PROGRAMS)
        self.tasks, self.messages = machine.tasks, machine.messages

    def _run_programs(self) -> tuple[Machine, Mapping[int, Mapping[int, Term]]]:
        self.evaluator.start()
        machine = Machine(self.evaluator, self.bundle, self._argument)
        return machine, machine.run()

    def _argument(self, record: Argument) -> Term:
        whole = self.arrays[record.array]
        return whole if record.rows is None else self.terms.rows(whole, *record.rows)

    def _compare(
        self,
        where: str,
        records: Sequence[Result],
        results: Sequence[Term],
        models: Sequence[Fingerprints],
    ) -> None:
        for record, term in zip(records, results, strict=True):
            self._compare_result(where, record, term, models)

    def _compare_result(
        self,
        where: str,
        record: Result,
        now: Term,
        models: Sequence[Fingerprints],
        rank: int | None = None,
    ) -> bool:
        """Compares a result with what is wanted of it.

        Returns:
            Whether it is made by the same operations in the same order.

        Raises:
            Refuted: it differs in each of the models.
        """
        wanted, path = self.wanted[record.array], self.paths[record.array]
        if record.rows is not None:
            wanted = self.terms.rows(wanted, *record.rows)
            path += f"[{record.rows[0]}:{record.rows[1]}]"
        if now is wanted:
            return True
        if (model := next((m for m in models if m.of(now) == m.of(wanted)), None)) is not None:
            self.rounded += not model.rounding
            return False
        maker = self._makers() if where == _PROGRAMS else {}
        cause = explain(self.terms, self.known, now, maker)
        after = f"after the pass {where}" if where in self.lowered.passes else where
        on = "" if rank is None else f" on rank {rank}"
        raise Refuted(
            f"{after}: result{path}{on} is not that of the function:\n      {cause.words}",
            pass_name=where,
            path=path,
            rank=rank,
            task=cause.task,
            line=cause.line,
        )

    def _makers(self) -> dict[Term, str]:
        """The tasks that make terms first: the programs run once more to tell."""
        self.evaluator.note_makers()
        self._run_programs()
        return self.evaluator.maker or {}

    def _compare_numbers_of_effects(self) -> None:
        # The backward of a loss is run for a cotangent of one, and scaled after the loop: so a
        # callback in it may see another value.
        own, wanted = (
            collections.Counter(t.op for t in happened)
            for happened in (self.evaluator.effects, self.effects.elements())
        )
        if own != wanted:
            said = ", ".join(sorted({op.name for op in {**(own - wanted), **(wanted - own)}}))
            raise Refuted(f"{_TRANSFORMS}: the number differs of {said}", pass_name=_TRANSFORMS)

    def _compare_effects(self, where: str) -> None:
        own = collections.Counter(self.evaluator.effects)
        if own != self.effects:
            said = [f"it lacks {n} x {origin(t, {})}" for t, n in (self.effects - own).items()]
            said += [f"it has {n} x {origin(t, {})}" for t, n in (own - self.effects).items()]
            raise Refuted(f"{where}: the effects differ: {'; '.join(said[:4])}", pass_name=where)
        if self.evaluator.ordered != self.ordered:
            raise Refuted(f"{where}: ordered effects are in another order", pass_name=where)
