"""Assigns each equation of a jaxpr to a stage, by the marks in the jaxpr.

- An equation that a mark depends on belongs to the stage that the mark closes, or an earlier one.
- Any other equation belongs to the stage that was open where it was written.
- But an equation that only prepares arguments (a weight's transform, a mask) belongs to the
  earliest stage that reads it. If it makes a scalar (a weight's norm), or only a result (the next
  count of a counter), it belongs to the stage that reads the argument, which then does not travel.
- If a mark is put on a slice of an argument (the next part of a sequence), the stage that the mark
  opens takes the slice. So a stage that begins with data of its own waits for no other stage.
- An equation that depends on no argument (positions, causal masks) is repeated where it is read.
"""

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn, Flow, P, R, Var, definition_of, outline, primitives
from jaxpp.transforms.stages import _marks

#: An error lists so many lines.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Stages:
    """A flat jaxpr without marks, the stage of each equation, and the mark that opens each stage.

    The stage is None for an equation that is repeated where it is read. The mark is None for the
    first stage, unless it has one.
    """

    jaxpr: jex.ClosedJaxpr
    stage_of: tuple[int | None, ...]
    marks: tuple[Eqn | None, ...]
    #: The recorded calls of stages, by the first stage that is equal; see `_marks.record_stage`.
    calls: dict[Hashable, Eqn | None] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.marks)

    @property
    def names(self) -> tuple[str | None, ...]:
        """The name of each stage."""
        return tuple(None if mark is None else mark.params["name"] for mark in self.marks)

    @property
    def entrances(self) -> str:
        """Lists the names or else the user's lines of the marks, in brackets; empty without."""
        marks = [mark for mark in self.marks if mark is not None]
        names = dict.fromkeys(mark.params["name"] for mark in marks)
        if marks and None not in names and len(names) == len(marks):
            return f" (entered at {', '.join(map(repr, names))})"
        lines = list(map(_compat.source_line, marks))
        return f" (entered at {listed(lines)})" if any(lines) else ""

    @functools.cached_property
    def parts(self) -> tuple[jaxprs.Part, ...]:
        """The jaxpr of each stage: of its own equations, and of those that it repeats."""
        flow = Flow(self.jaxpr.eqns, self.jaxpr.jaxpr.outvars)
        group_of = {i: k for i, k in enumerate(self.stage_of) if k is not None}
        clusters = outline(flow, group_of, dict.fromkeys(range(self.num_stages), ()))
        return tuple(jaxprs.part(c.eqns, c.outputs, f"stage_{c.group}") for c in clusters)

    @functools.cached_property
    def like(self) -> tuple[int, ...]:
        """For each stage the first one that is equal to it, also where it is differentiated."""
        first: dict[Hashable, int] = {}
        keys = (jaxprs.structure(part.jaxpr, differentiable=True) for part in self.parts)
        return tuple(first.setdefault(key, k) for k, key in enumerate(keys))

    def run(self, inputs: Sequence[Any], run_stage: Callable) -> list[Any]:
        """Evaluates the program: `run_stage(self, k, values)` gives the outputs of stage `k`.

        A result that depends on no argument belongs to no stage, and is computed here.
        """
        values = dict(zip(self.jaxpr.jaxpr.invars, inputs, strict=True))
        for k, part in enumerate(self.parts):
            values.update(zip(part.outputs, run_stage(self, k, values), strict=True))
        outvars = self.jaxpr.jaxpr.outvars
        loose = [v for v in jaxprs.variables(outvars) if v not in values]
        free = [e for e, k in zip(self.jaxpr.eqns, self.stage_of, strict=True) if k is None]
        part = jaxprs.part(jaxprs.needed(free, loose), loose)
        values.update(zip(loose, jaxprs.run(part.jaxpr), strict=True))
        return jaxprs.read(outvars, values)


# ---- deciding once ------------------------------------------------------------------------------

#: The functions that decide the stages of those that `run_in_stages` made.
_DECISIONS: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()


def run_in_stages(fun: Callable[P, R], decide: Callable, run_stage: Callable) -> Callable[P, R]:
    """Makes a function that traces `fun` and decides its stages, then runs them one by one."""

    @functools.wraps(fun)
    def staged(*args: P.args, **kwargs: P.kwargs) -> R:
        if define := definition_of("stages"):
            return define(fun)(*args, **kwargs)
        traced, stages = decide(*args, **kwargs)
        return traced.rebuild(stages.run(traced.inputs, run_stage))

    _DECISIONS[staged] = decide
    return staged


def decision_of(fun: Callable) -> Callable[..., tuple[jaxprs.Traced, Stages]]:
    """Finds the function that decides the stages of `fun`: its own, or one that reads its marks."""
    if isinstance(fun, types.FunctionType) and fun in _DECISIONS:
        return _DECISIONS[fun]

    def read(*args, **kwargs):
        traced = jaxprs.trace(fun, args, kwargs)
        return traced, read_stages(traced.jaxpr)

    return read


# ---- reading marks ------------------------------------------------------------------------------


def has_marks(jaxpr: jex.ClosedJaxpr) -> bool:
    """Tells whether a mark stands anywhere in a jaxpr."""
    return any(jaxprs.contains(eqn, _marks.is_enter) for eqn in jaxpr.eqns)


def order_of_transforms(eqn: Eqn) -> str:
    """Says, to end an error about what cannot be cut, what to do with the loop of `microbatch`."""
    if not jaxprs.contains(eqn, lambda e: e.primitive.name == "scan"):
        return ""
    return (
        "; if it is the loop of microbatch, cut the function that microbatch runs, not the one "
        "that it makes: microbatch(value_and_grad(wrap_forward(split_stages(f, S))), M)"
    )


def listed(lines: Sequence[str]) -> str:
    """Lists the user's lines that open stages, for an error; says why some are there twice."""
    counts = collections.Counter(lines)
    shown = [f"{line} ({n} times)" if n > 1 else line for line, n in counts.items()]
    text = ", ".join(shown[:_SHOWN]) + ", ..." * (len(shown) > _SHOWN)
    if len(counts) == len(lines):
        return text
    return (
        f"{text}; a line of a loop over layers opens a stage each time, and so does one of a model "
        f"that is called twice: call the model once on both inputs, joined along the batch, or "
        f"give its marks a stage_id"
    )


def _refuse_marks_inside(jaxpr: jex.ClosedJaxpr) -> None:
    for eqn in jaxpr.eqns:
        if not _marks.is_enter(eqn) and jaxprs.contains(eqn, _marks.is_enter):
            raise ValueError(
                f"A stage is entered inside a `{eqn.primitive.name}`{_compat.at_source_line(eqn)}, "
                f"which cannot be cut there: {_why_not(eqn)} Enter the stage before or after it, "
                f"or write the loop over layers in Python{order_of_transforms(eqn)}."
            )


def _why_not(eqn: Eqn) -> str:
    if eqn.primitive.name != "scan":
        return "its body is one unit."
    return (
        f"its body is the same program for each of {eqn.params['length']} iterations. Drop the mark"
        f" and cut between them: split_stages(fun, num_stages), or at=['blocks.2'] where it goes "
        f"over the layers of `blocks`."
    )


def read_stages(jaxpr: jex.ClosedJaxpr, checkpoints: jaxprs.Checkpoints | None = None) -> Stages:
    """Assigns each equation of a jaxpr to a stage by the marks in it.

    A checkpoint that has marks inside becomes one in each stage; so does an open checkpoint.
    """
    if checkpoints is None:
        jaxpr, checkpoints = jaxprs.open_calls(jaxpr, lambda e: jaxprs.contains(e, _marks.is_enter))
    _refuse_marks_inside(jaxpr)
    jaxpr = _expose_preparations(jaxpr)
    chain = argument_chains(jaxpr)
    marked = _Marked(jaxpr, chain, _number_marks(jaxpr, chain))
    stage = marked.place_chains(marked.place_computation())
    if marked.last > 0 and marked.last not in stage:
        mark = next(i for i, k in marked.opens.items() if k == marked.last)
        raise ValueError(
            f"Nothing is computed in the last stage, {marked.last}, which is entered"
            f"{_compat.at_source_line(jaxpr.eqns[mark])}: a mark opens the stage of what reads its "
            f"result. Drop it, or put it before what the stage is to compute."
        )
    marks: list[Eqn | None] = [None] * (marked.last + 1)
    for i, k in marked.opens.items():
        marks[k] = jaxpr.eqns[i]
    flat, kept = dissolve_marks(jaxpr)
    outvars = flat.jaxpr.outvars
    closed = jaxprs.close_checkpoints(flat.eqns, [stage[i] for i in kept], checkpoints, outvars)
    flat = _compat.make_closed_jaxpr(flat.jaxpr.invars, outvars, [e for e, _ in closed])
    return Stages(flat, tuple(k for _, k in closed), tuple(marks))


def _expose_preparations(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Opens calls that prepare several arguments at once (a jitted cast of all parameters).

    So each stage prepares the arguments that it reads.
    """
    while True:
        prepares = argument_chains(jaxpr)
        prepared = {
            v
            for e, prepare in zip(jaxpr.eqns, prepares, strict=True)
            if prepare and len(e.outvars) > 1 and e.primitive.name == "jit"
            for v in e.outvars
        }
        if not prepared:
            return jaxpr
        jaxpr = jaxprs.inline(jaxpr, lambda e: any(v in prepared for v in e.outvars))  # noqa: B023


def argument_chains(jaxpr: jex.ClosedJaxpr) -> list[bool]:
    """Tells for each equation whether it only prepares arguments: a cast, a mask, a norm.

    Such an equation reads one argument, or several if it is light, directly or through other such
    equations. If all are such (a program of elementwise operations), none counts as preparation.
    """
    varying = jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    # The argument that a prepared value was computed from, or None where there are several.
    source: dict[Var, Var | None] = {v: v for v in jaxpr.jaxpr.invars}
    chain, others = [], 0
    for eqn in jaxpr.eqns:
        read = [v for v in jaxprs.variables(eqn.invars) if v in varying]
        sources = {source.get(v) for v in read}
        single = sources.pop() if len(sources) == 1 else None
        light = single is not None or not jaxprs.contains(eqn, _is_heavy)
        simple = light and not eqn.effects and not _marks.is_enter(eqn)
        chain.append(bool(read) and simple and all(v in source for v in read))
        if chain[-1]:
            source.update((v, single) for v in eqn.outvars)
        elif read:
            others += 1
    return chain if others else [False] * len(chain)


def _is_heavy(eqn: Eqn) -> bool:
    return eqn.primitive.name in primitives.HEAVY


@dataclasses.dataclass(frozen=True)
class _Marked:
    """A jaxpr with marks, and for each equation whether it only prepares arguments.

    `opens` has the stage that each mark opens, by the index of the mark's equation.
    """

    jaxpr: jex.ClosedJaxpr
    chain: Sequence[bool]
    opens: dict[int, int]

    @functools.cached_property
    def last(self) -> int:
        """The last stage."""
        return max(self.opens.values(), default=0)

    def place_computation(self) -> list[int | None]:
        """Places the equations that compute; None for others, and for those without arguments.

        Each is placed where it was written, but after what it reads, and before all marks that
        depend on it.
        """
        latest = self._latest()
        varying = jaxprs.descendants(self.jaxpr.eqns, self.jaxpr.jaxpr.invars)
        stage: list[int | None] = []
        written = 0

        def after_operands(i: int, near: list[int]) -> int:
            nonlocal written
            eqn, earliest, place = self.jaxpr.eqns[i], max(near, default=0), None
            if _marks.is_enter(eqn):
                of_results = written = self.opens[i]
                if earliest >= max(written, 1):
                    raise ValueError(
                        f"Stage {written} is entered{_compat.at_source_line(eqn)} with a value of "
                        f"stage {earliest}: the cuts are out of order. Number the stages in the "
                        f"order the data flows."
                    )
            elif self.chain[i] or not (eqn.effects or not varying.isdisjoint(eqn.outvars)):
                of_results = 0
            elif earliest > latest[i]:
                raise ValueError(
                    f"The `{eqn.primitive.name}`{_compat.at_source_line(eqn)} reads a value of "
                    f"stage {earliest}, but stage {latest[i] + 1}, which is entered later, needs "
                    f"its result: this cut puts a consumer before its producer. Move the mark, or "
                    f"number the stages in the order the data flows."
                )
            else:
                of_results = place = min(max(written, earliest), latest[i])
            stage.append(place)
            return of_results

        self.flow.down({}, after_operands)
        return stage

    @functools.cached_property
    def flow(self) -> Flow:
        """The equations as a graph."""
        return Flow(self.jaxpr.eqns)

    def _latest(self) -> dict[int, int]:
        """Finds the last stage in which each equation may stand: before marks that read it."""
        latest: dict[int, int] = {}

        def before_marks(i: int, near: list[int]) -> int:
            latest[i] = min(near, default=self.last)
            if i in self.opens:
                latest[i] = max(self.opens[i] - 1, 0)
            return latest[i]

        self.flow.up({}, before_marks, min)
        return latest

    def place_chains(self, stage: Sequence[int | None]) -> list[int | None]:
        """Places argument chains at their first reader, or a norm where its argument is read."""
        readers, _ = self._first_readers(stage, None)
        largest = {v: v for v in self.jaxpr.jaxpr.invars}
        homes = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            arguments = [largest[v] for v in jaxprs.variables(eqn.invars) if v in largest]
            if self.chain[i] and arguments:
                argument = max(arguments, key=lambda v: v.aval.size)
                largest.update(dict.fromkeys(eqn.outvars, argument))
                if argument in readers:
                    homes[i] = readers[argument]
        return self._first_readers(stage, homes)[1]

    def _first_readers(
        self, stage: Sequence[int | None], homes: Mapping[int, int] | None
    ) -> tuple[dict[Var, int], list[int | None]]:
        """Finds the first stage that reads each variable, and places argument chains there.

        An equation that makes a scalar, or only results, does not draw its argument to itself: it
        is placed at `homes`, where others read the argument; with None it is left out.
        """
        stage = list(stage)
        readers = dict.fromkeys(jaxprs.variables(self.jaxpr.jaxpr.outvars), self.last)
        computed_with: set[Var] = set()  # variables that are read for more than the results
        read_by_mark = self._reads_of_marks(readers)
        for i, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            for_results = self.chain[i] and computed_with.isdisjoint(eqn.outvars)
            place = stage[i]
            if self.chain[i]:
                place = min((readers[v] for v in eqn.outvars if v in readers), default=self.last)
                if for_results or _makes_float_scalar(eqn):
                    if homes is None:
                        continue
                    place = min(place, homes.get(i, place))
                stage[i] = place
            if _marks.is_enter(eqn):
                read = read_by_mark(i)
            elif place is None:
                continue
            else:
                read = dict.fromkeys(jaxprs.variables(eqn.invars), place)
            for v, k in read.items():
                readers[v] = min(readers.get(v, k), k)
            computed_with.update(() if for_results else read)
        return readers, stage

    def _reads_of_marks(self, readers: Mapping[Var, int]) -> Callable[[int], dict[Var, int]]:
        """Makes a function that gives the stage that reads each operand of a mark.

        `readers` has the first readers of the mark's results by then.
        """
        eqns, first = self.jaxpr.eqns, min(self.opens.values(), default=0)
        data = _data(self.jaxpr)
        prepared = {v for e, c in zip(eqns, self.chain, strict=True) if c for v in e.outvars}
        given = prepared.union(self.jaxpr.jaxpr.invars)

        def read_by_mark(i: int) -> dict[Var, int]:
            opened, operands = self.opens[i], list(jaxprs.variables(eqns[i].invars))
            takes_slice = opened > first and data.issuperset(operands)
            read = dict.fromkeys(operands, opened if takes_slice else max(opened - 1, 0))
            if not given.issuperset(operands):
                # A prepared value that is marked along with computed ones (a bias that a module is
                # called with) is read by its readers behind the mark.
                for v, out in zip(eqns[i].invars, eqns[i].outvars, strict=True):
                    if not jaxprs.is_literal(v) and v in prepared:
                        read[v] = readers.get(out, self.last)
            return read

        return read_by_mark


def _data(jaxpr: jex.ClosedJaxpr) -> set[Var]:
    """Finds the arguments, and the variables that are slices, reshapes or transposes of them."""
    data = set(jaxpr.jaxpr.invars)
    for eqn in jaxpr.eqns:
        read = jaxprs.variables(eqn.invars)
        if read and all(v in data for v in read) and not _marks.is_enter(eqn):
            if eqn.primitive.name in primitives.MOVES:
                data.update(eqn.outvars)
    return data


def _makes_float_scalar(eqn: Eqn) -> bool:
    return (
        all(v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        and any(not jaxprs.is_literal(v) and v.aval.shape != () for v in eqn.invars)
    )  # fmt: skip


def _number_marks(jaxpr: jex.ClosedJaxpr, chain: Sequence[bool]) -> dict[int, int]:
    """Finds the stage that each mark opens, by the index of the mark's equation."""
    marks = [(i, e) for i, e in enumerate(jaxpr.eqns) if _marks.is_enter(e)]
    if not marks:
        return {}
    numbered = [e.params["stage"] is not None for _, e in marks]
    if any(numbered) and not all(numbered):
        i, eqn = marks[numbered.index(False)]
        raise ValueError(
            f"Some stages are numbered and the one entered{_compat.at_source_line(eqn)} is not: "
            f"give stage_id to all calls of pipeline_enter_stage, or to none."
        )
    if not numbered[0]:
        start = 0 if _is_at_start(jaxpr, marks[0][0], chain) else 1
        return {i: start + n for n, (i, _) in enumerate(marks)}
    opens = {i: e.params["stage"] for i, e in marks}
    found = sorted(set(opens.values()))  # the calls of a model may open a stage together
    wanted = list(range(found[0], found[0] + len(found)))
    if found != wanted or found[0] > 1:
        raise ValueError(
            f"Stages are numbered {found}, but must be numbered without gaps from 0 (the very "
            f"start) or from 1 (the first cut)."
        )
    return opens


def _is_at_start(jaxpr: jex.ClosedJaxpr, mark: int, chain: Sequence[bool]) -> bool:
    """Tells whether a mark is on bare arguments, and all equations before it only prepare."""
    eqns = jaxpr.eqns
    varying = jaxprs.descendants(eqns, jaxpr.jaxpr.invars)
    before = zip(eqns[:mark], chain[:mark], strict=True)
    invars = set(jaxpr.jaxpr.invars)
    return all(jaxprs.is_literal(v) or v in invars for v in eqns[mark].invars) and all(
        prepares or not any(v in varying for v in e.outvars) for e, prepares in before
    )


def dissolve_marks(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Removes marks and edges at the top of a jaxpr; also gives the indices of the rest."""

    def is_mark(eqn: Eqn) -> bool:
        return _marks.is_enter(eqn) or _marks.is_edge(eqn)

    kept = [i for i, eqn in enumerate(jaxpr.eqns) if not is_mark(eqn)]
    return jaxprs.rewrite(jaxpr, lambda e: ([], e.invars) if is_mark(e) else None), kept
