"""`certify`: proves that the programs of a placed step compute what its function does."""

import collections
import contextlib
import dataclasses
import enum
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxpp.certification._table import Term, shown, type_of
from jaxpp.certification._terms import Terms

#: Where a difference shows, if it is not a pass.
_TRANSFORMS, _PROGRAMS = "the transforms before schedule", "the programs"

#: Why the transforms before `place` are not decided, if rules edit loops.
_EDITED = "edited"
#: How transforms are proven.
_BITS, _ORDER = "bit by bit", "but for the order of sums"
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
            on one device. If not, sums are in another order.
        regrouped: how many results of the ranks are equal but for the order of sums.
        reordered: how many results of the scheduled function are those of the function, with each
            transform by its definition, but for the order of sums.
        rescaled: how many are so over the real numbers alone: they are added up or multiplied in
            another order, such as a gradient that is taken of a loop, and scaled after it.
        rounded: how many are so if casts do not count: they are cast at other places than by the
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
    reordered: int
    rescaled: int
    rounded: int
    transforms: tuple[str, ...]
    undecided: str
    passes: tuple[str, ...]
    seconds: float
    edits: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "edited function" if self.edits else "function"
        parts = [f"{self.results} results of {self.ranks} ranks are those of the {what}"]
        verb = "are" if len(self.transforms) > 1 else "is"
        parts += [f"{how}: {', '.join(names)}" for how, names in self._proven().items()]
        lines = [
            f"{parts[0]}, {'; '.join(parts[1:])} {verb} proven",
            f"  {self.tasks} tasks, {self.messages} messages, {self.effects} effects; "
            f"{self.equations} equations on {self.terms} values in {self.seconds:.2f} s",
        ]
        if self.regrouped:
            lines.append(f"  {self.regrouped} results of the ranks have sums in another order")
        for count, why in (
            (self.reordered, "have sums in another order than by definition"),
            (self.rescaled, "are those by definition over the real numbers"),
            (self.rounded, "are cast at other places than by definition"),
        ):
            if count:
                lines.append(f"  {count} results of the scheduled function {why}")
        if self.edits:
            lines.append(f"  edited, as no transform is defined to do, by {', '.join(self.edits)}")
        if self.undecided:
            lines.append(f"  NOT PROVEN of the other transforms: {self.undecided}")
        return "\n".join(lines)

    def _proven(self) -> dict[str, list[str]]:
        """The transforms that are proven, by how; those in the strongest way come first."""
        before = _BITS
        for count, how in (
            (self.reordered, _ORDER),
            (self.rescaled, "over the real numbers"),
            (self.rounded, "but for their rounding"),
        ):
            before = how if count else before
        placed = _ORDER if self.regrouped else _BITS
        found = collections.defaultdict[str, list[str]](list)
        for how in (_BITS, _ORDER, before):
            own = [n for n in self.transforms if (placed if n == "place" else before) == how]
            found |= {how: own} if own else {}
        return found


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
    another order, such as those of a parameter that several stages read, they are equal for all
    floating-point numbers but where a sum overflows on its way: they have the same value in a model
    of random numbers, in which nothing cancels and a cast is an unknown function. Different values
    are equal in the model with a chance below one in a million million. The transforms before
    `place` may also be equal over the real numbers alone, which the headline says.

    It does not see what comes after: XLA, which may round in another way, and transfers. If it has
    no rule for an operation, such as a custom call, it takes the operation for the same function
    wherever it is.

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
        1 results of 2 ranks are those of the function, bit by bit: place; but for the order of ...
    """
    return certify_lowered(step.lower(*args, **kwargs), passes=passes)


@without_mesh
def certify_lowered(lowered: Lowered, passes: bool = True) -> Certificate:
    """Does as `certify`, for a step that has been lowered."""
    start = time.perf_counter()
    _check_decidable(lowered)
    rules: list[str] = []
    with without_collections(), _deep_recursion():
        try:
            function = _retraced(lowered, _definition.PLAIN, rules)
        except _definition.Edited:
            function = None
        whole = _uncut_lengths(lowered, function)
        try:
            proof, undecided = _prove(lowered, function, rules, whole, passes)
        except Refuted:
            # Scans of different loops may have one length.
            if not whole or min(whole) > _TRIED_AGAIN:
                raise
            cut = frozenset(n for n in whole if n > _TRIED_AGAIN)
            proof, undecided = _prove(lowered, function, rules, cut, passes)
    transforms = ("split_stages", "wrap_forward", "microbatch", "schedule")
    transforms = () if undecided else (*transforms, *["edit_loops"] * bool(rules))
    regrouped = sum(how is not _How.BITS for how in proof.placed)
    return Certificate(
        results=len(lowered.bundle.results),
        ranks=len(lowered.bundle.programs),
        tasks=proof.tasks,
        messages=proof.messages,
        effects=proof.effects.total(),
        terms=len(proof.terms.terms),
        equations=proof.evaluator.equations,
        exact=not regrouped,
        regrouped=regrouped,
        reordered=sum(how is _How.SUMS for how in proof.scheduled),
        rescaled=sum(how is _How.REALS for how in proof.scheduled),
        rounded=sum(how is _How.ROUNDED for how in proof.scheduled),
        transforms=(*transforms, "place"),
        undecided="" if undecided == _EDITED else undecided,
        passes=tuple(proof.passes),
        seconds=time.perf_counter() - start,
        edits=tuple(rules) if undecided == _EDITED else (),
    )


PROVIDED["certify"] = certify_lowered


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Lets rewrites follow long chains of operations, each of which is one of Python's calls."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _prove(
    lowered: Lowered,
    function: _jaxprs.Traced | None,
    rules: list[str],
    whole: frozenset[int],
    passes: bool,
) -> tuple["_Proof", str]:
    """Proves a step; also says why the transforms before `place` are not decided.

    Args:
        lowered: the step.
        function: its function by definition; None if edits of loops add results.
        rules: who edits loops.
        whole: the lengths of scans that are not unrolled.
        passes: whether the step is compared after each pass.
    """
    if function is None:
        proof, undecided = _Proof(lowered, lowered.retrace(), whole, scheduled=True), _EDITED
    else:
        proof = _Proof(lowered, function, whole)
        undecided = proof.of_transforms(rules)
    proof.of_programs(passes)
    return proof, undecided


#: The iterations of a scan up to which it is unrolled wherever it is, and up to which it is where a
#: proof that takes it whole has failed.
_UNROLLED, _TRIED_AGAIN = 8, 128


def _uncut_lengths(lowered: Lowered, function: _jaxprs.Traced | None) -> frozenset[int]:
    """The lengths of scans that are in the function, the step after each pass, and the programs.

    A scan that a pass cuts is shorter after it.
    """
    seen = dict[int, set[int]]()

    def lengths(jaxpr):
        opened = _jaxprs.opened(jaxpr)
        if id(opened) not in seen:
            own = seen[id(opened)] = set()
            for eqn in opened.eqns:
                if eqn.primitive.name == "scan" and eqn.params["length"] > _UNROLLED:
                    own.add(eqn.params["length"])
                for inner in _jaxprs.sub_jaxprs(eqn):
                    own |= lengths(inner)
        return seen[id(opened)]

    forms = [lengths(step.jaxpr) for step in lowered.passes.values()]
    forms.append(set().union(*(lengths(c.jaxpr) for c in lowered.bundle.computations)))
    forms += [lengths(function.jaxpr)] if function is not None else []
    return frozenset(set.intersection(*forms))


def _retraced(
    lowered: Lowered, definitions: Mapping[str, Callable[..., Any]], rules: list[str]
) -> _jaxprs.Traced:
    edits = _definition.unedited(rules)
    with _definitions.by_definition({**definitions, "edit_loops": edits}):
        return lowered.retrace()


def _check_decidable(lowered: Lowered) -> None:
    if not _compat.is_in_context(lowered.context):
        raise Undecided(
            "certify: the step was lowered under other settings of JAX (such as jax.enable_x64 or "
            "jax.set_mesh), under which its function is another one. Certify it under the same."
        )


def _num_microbatches(lowered: Lowered) -> int:
    """The number of microbatches; of loops of several numbers the greatest."""
    step = next(iter(lowered.passes.values()))
    loops = [e.params for e in step.jaxpr.eqns if e.primitive.name == "pipeline_loop"]
    return max((p["table"].num_microbatches * p["replicas"] for p in loops), default=1)


class _How(enum.IntEnum):
    """How a result is that of the function, from strong to weak."""

    #: By the same operations in the same order.
    BITS = 0
    #: But for the order of sums.
    SUMS = 1
    #: Over the real numbers.
    REALS = 2
    #: Over the real numbers, if casts do not count.
    ROUNDED = 3


class _Proof:
    """The comparison of a function with other forms of it, in one table of terms.

    Args:
        lowered: the step.
        function: the function.
        whole: the lengths of scans that are not unrolled.
        scheduled: whether the scheduled function is what is wanted, with its edited loops.
    """

    def __init__(
        self,
        lowered: Lowered,
        function: _jaxprs.Traced,
        whole: frozenset[int],
        scheduled: bool = False,
    ):
        self.lowered, self.bundle = lowered, lowered.bundle
        self.terms = Terms(_num_microbatches(lowered))
        #: The models that may tell that results are equal, and how, from strong to weak: those for
        #: programs, and those for transforms.
        self.sums = self._models(_How.SUMS, strict=True)
        self.laws = [
            *self.sums,
            *self._models(_How.SUMS, strict=True, zeros=False),
            *self._models(_How.REALS, strict=False),
            *self._models(_How.ROUNDED, strict=False, rounding=False),
        ]
        self.evaluator = Evaluator(self.terms, whole)
        traced = next(iter(lowered.passes.values())).jaxpr
        programs = [traced, *(c.jaxpr for c in lowered.bundle.computations)]
        self.evaluator.parameters.note_shared([function.jaxpr], programs)
        self.passes: list[str] = []
        self.tasks = self.messages = 0
        #: How each result of the scheduled function, and of the programs, is the function's.
        self.scheduled: list[_How] = []
        self.placed: list[_How] = []
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

    def _models(self, how: _How, **options: bool) -> list[tuple[Fingerprints, _How]]:
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

    def _run_traced(self, traced: _jaxprs.Traced) -> Sequence[Term]:
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
            if rules and max(self.scheduled) > _How.SUMS:
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
        unscheduled = _retraced(self.lowered, _definition.UNSCHEDULED, rules)
        self._want(self._run_traced(unscheduled))
        results = self._run_pass(next(iter(self.lowered.passes)))
        try:
            laws = [(model, how) for model, how in self.laws if how is _How.SUMS]
            self._compare("schedule", results, laws)
            self._compare_effects("schedule")
        except Refuted:
            if rules:
                return _EDITED
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

    def _run_programs(self) -> tuple[Machine, Mapping[int, Mapping[int, tuple[Term, Any]]]]:
        self.evaluator.start()
        machine = Machine(self.evaluator, self.bundle, self._argument)
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
        """What a pass is called: the first gives the scheduled function."""
        return _TRANSFORMS if name == next(iter(self.lowered.passes)) else name

    # ---- values ------------------------------------------------------------------------------

    def _compare(
        self, where: str, results: Sequence[Term], models: Sequence[tuple[Fingerprints, _How]]
    ) -> list[_How]:
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
        models: Sequence[tuple[Fingerprints, _How]],
        rank: int | None = None,
    ) -> _How:
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
            return _How.BITS
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
