"""A loop over microbatches that has a schedule: one record, from the scan that it was to its tasks.

`schedule` reads it off a scan, changes it pass by pass, and writes it as an equation of `loop_p`,
whose body is task equations. From the equation others read it again. On one device it runs as the
scan that it is (`_as_scan`); `place` runs it as the schedule's table says.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Aval, Eqn, Var, as_text
from jaxpp.schedules import Dependencies, Kind, Table

# ---- tasks --------------------------------------------------------------------------------------


class Key(NamedTuple):
    """The tasks of one kind of a stage: a pair, as `("F", 0)`; there is one a microbatch."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


def in_flow(key: Key) -> tuple[int, int]:
    """Returns the key that sorts the tasks of a microbatch: values flow from each to later ones.

    The forwards come first, up the stages, then the backwards, down the stages, then their second
    halves.
    """
    sweep = {Kind.F: 0, Kind.W: 2}.get(key.kind, 1)
    return sweep, -key.stage if sweep else key.stage


#: A task of a loop's body. Its parameters are its jaxpr, its `Key`, and whether it computes a part
#: of its stage's forward again.
task_p = jex.Primitive("pipeline_task")
task_p.multiple_results = True
task_p.def_impl(lambda *xs, jaxpr, **_: jaxprs.run(jaxpr, *xs))
task_p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))


def make_task(
    key: Key,
    jaxpr: jex.ClosedJaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    recomputes: bool = False,
) -> Eqn:
    """Makes the equation of a task."""
    params = {"key": key, "jaxpr": jaxpr, "recomputes": recomputes}
    eqn: Any = jex.new_jaxpr_eqn(list(invars), list(outvars), task_p, params, jaxpr.effects)
    return eqn


def remade(
    task: Eqn, jaxpr: jex.ClosedJaxpr, invars: Iterable[Atom], outvars: Iterable[Var]
) -> Eqn:
    """Makes the equation of a task anew, with another jaxpr."""
    return make_task(task.params["key"], jaxpr, [*invars], [*outvars], task.params["recomputes"])


# ---- the loop -----------------------------------------------------------------------------------

#: The equation of a loop whose body is tasks; its parameters are `ScheduledLoop.params`.
loop_p = jex.Primitive("pipeline_loop")
loop_p.multiple_results = True

#: An equation of a body, and its task.
Grouped = tuple[Eqn, Key | None]
#: Makes the result of a carry from those of its parts; None for one that stays as it is.
Join = Callable[..., Any] | None


@dataclasses.dataclass(frozen=True)
class ScheduledLoop:
    """A scan over microbatches with a schedule: its body in groups, and what is around it.

    When `schedule` has made it, each equation of the body is a task. A variable that a task makes
    is read by other tasks, or it is one result of the body. A result that no task makes is a carry
    that passes through.

    Args:
        consts: the body's inputs that are the same for all microbatches.
        carries: its inputs that are handed from a microbatch to the next: `carry_outs[i]` is what
            carry i becomes.
        xs: its inputs that are slices of a microbatch.
        grouped: its equations, in an order that respects their dependence, each with the `Key` of
            its task; None if it is outside of all calls of stages, or if each task that reads it
            repeats it.
        carry_outs: what the carries become.
        ys: the results of each microbatch.
        table: which rank runs the tasks, in which order. Each of its directions has carries and
            results of its own: the equation has as many of each of the body's, side by side.
        reverse: whether the loop takes the last slices first.
        folds: for each carry that takes its microbatches in any order, the primitive that combines
            it with what each adds.
        replicas: their number. Where there are several, all operands but constants, and all
            results, have a first axis with a row for each, which runs by itself.
        is_batched: whether the loop is under `jax.vmap`.
        recomputing: the stages whose backwards compute a part of the forward again.
        outside: for each input of the body the atom outside of the loop; none where the loop is an
            equation, which has them.
        outvars: the variables outside of the loop that have its results: the last carries, then the
            stacked `ys`.
        before: equations that run before the loop.
        after: equations that run after it.
    """

    consts: tuple[Var, ...]
    carries: tuple[Var, ...]
    xs: tuple[Var, ...]
    grouped: tuple[Grouped, ...]
    carry_outs: tuple[Atom, ...]
    ys: tuple[Atom, ...]
    table: Table
    reverse: bool = False
    folds: Mapping[Var, jex.Primitive] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    is_batched: bool = False
    recomputing: frozenset[int] = frozenset()
    outside: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    outvars: tuple[Var, ...] = ()
    before: tuple[Eqn, ...] = ()
    after: tuple[Eqn, ...] = ()

    # ---- as an equation -------------------------------------------------------------------------

    @classmethod
    def of(cls, eqn: Eqn) -> "ScheduledLoop":
        """Reads the loop of an equation."""
        return cls.of_params(**eqn.params)

    @classmethod
    def of_params(
        cls,
        body: jex.ClosedJaxpr,
        num_consts: int,
        folds: Sequence[jex.Primitive | None],
        **others: Any,
    ) -> "ScheduledLoop":
        """Reads the loop of an equation's parameters."""
        inputs, outputs, num_carry = body.jaxpr.invars, body.jaxpr.outvars, len(folds)
        carries = tuple(inputs[num_consts:][:num_carry])
        return cls(
            tuple(inputs[:num_consts]),
            carries,
            tuple(inputs[num_consts + num_carry :]),
            tuple((task, task.params["key"]) for task in body.eqns),
            tuple(outputs[:num_carry]),
            tuple(outputs[num_carry:]),
            folds={v: fold for v, fold in zip(carries, folds, strict=True) if fold},
            **others,
        )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the loop's equation."""
        return {
            "body": self.body,
            "num_consts": self.num_consts,
            "folds": tuple(map(self.folds.get, self.carries)),
            "table": self.table,
            "reverse": self.reverse,
            "replicas": self.replicas,
            "is_batched": self.is_batched,
        }

    @functools.cached_property
    def body(self) -> jex.ClosedJaxpr:
        """The body of a microbatch."""
        return _compat.make_closed_jaxpr(self.inputs, self.outputs, self.eqns)

    @functools.cached_property
    def num_directions(self) -> int:
        return 1 + max(self.table.direction_of)

    @property
    def operands(self) -> list[tuple[Var, int | None]]:
        """The variable of each operand, and its direction; None where it is that of all."""
        carries = [(v, d) for v in self.carries for d in range(self.num_directions)]
        return [*((v, None) for v in self.consts), *carries, *((v, None) for v in self.xs)]

    @property
    def results(self) -> list[tuple[Any, int]]:
        """The variable of each result, and its direction."""
        return [(v, d) for v in self.outputs for d in range(self.num_directions)]

    def stage_number(self, stage: int, direction: int) -> int:
        """The number of a stage in a direction, among those of all directions."""
        return direction * self.num_stages + stage

    # ---- its body -------------------------------------------------------------------------------

    @functools.cached_property
    def eqns(self) -> list[Eqn]:
        """The equations of the body."""
        return [e for e, _ in self.grouped]

    @property
    def tasks(self) -> list[Eqn]:
        """The equations of the body, which are tasks."""
        return self.eqns

    @property
    def inputs(self) -> tuple[Var, ...]:
        return (*self.consts, *self.carries, *self.xs)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The results of the body: variables, or literals before there are tasks."""
        return (*self.carry_outs, *self.ys)

    @property
    def num_consts(self) -> int:
        return len(self.consts)

    @property
    def num_carry(self) -> int:
        return len(self.carries)

    @property
    def num_stages(self) -> int:
        return self.table.num_stages

    @property
    def length(self) -> int:
        """The number of microbatches."""
        return self.table.num_microbatches

    @property
    def last_forward(self) -> Key:
        return Key(Kind.F, self.num_stages - 1)

    def becomes(self) -> dict[Var, Any]:
        """The next value of each carry."""
        return dict(zip(self.carries, self.carry_outs, strict=True))

    def read(self) -> set[Var]:
        """Finds the variables that equations or results read."""
        return jaxprs.operands_of(self.eqns, self.outputs)

    def owner(self) -> dict[Var, Key]:
        """Finds for each variable the task that makes it, if one task does."""
        return {v: key for e, key in self.grouped if key for v in e.outvars}

    def readers(self) -> dict[Var, set[Key]]:
        """Finds for each variable the tasks that read it."""
        readers: dict[Var, set[Key]] = {}
        for e, key in self.grouped:
            if key:
                for v in jaxprs.variables(e.invars):
                    readers.setdefault(v, set()).add(key)
        return readers

    # ---- changed --------------------------------------------------------------------------------

    def with_equations(self, grouped: Iterable[Grouped], **changes: Any) -> "ScheduledLoop":
        """Replaces the equations by others."""
        return dataclasses.replace(self, grouped=tuple(grouped), **changes)

    def renamed(
        self, grouped: Iterable[Grouped], known: jaxprs.Substitution, **changes: Any
    ) -> "ScheduledLoop":
        """Replaces the equations by others, and its results by what is known of them."""
        outs, ys = (tuple(map(known, variables)) for variables in (self.carry_outs, self.ys))
        return self.with_equations(grouped, carry_outs=outs, ys=ys, **changes)

    def rewritten(self, rule: Callable[[Eqn], jaxprs.Replacement | None]) -> "ScheduledLoop":
        """Replaces equations by a rule; what takes the place of one is in its task."""
        known = jaxprs.Substitution()
        grouped = [
            (e, key) for eqn, key in self.grouped for e in jaxprs.rewritten([eqn], rule, known)
        ]
        return self.renamed(grouped, known)

    def divided(
        self, parts: Sequence[Sequence[Var]], joins: Sequence[Join], **changes: Any
    ) -> "ScheduledLoop":
        """Puts several carries, its `parts`, in the place of each.

        `joins` has for each the function that makes its result from those of its parts; None where
        it stays as it is.
        """
        outvars, after = [], []
        for old, carries, join in zip(self.outvars, parts, joins, strict=False):
            new = [old] if join is None else list(map(jaxprs.fresh_var, carries))
            after += [] if join is None else jaxprs.splice(join, new, [old])
            outvars += new
        return dataclasses.replace(
            self,
            carries=tuple(itertools.chain(*parts)),
            outvars=(*outvars, *self.outvars[len(parts) :]),
            after=(*after, *self.after),
            **changes,
        )

    def as_text(self) -> str:
        """Writes the body as a jaxpr, the task in front of each equation, and what is around it."""
        inputs = {"constants": self.consts, "carries": self.carries, "slices": self.xs}
        lines = [f"{self.length} microbatches{', the last first' if self.reverse else ''}"]
        lines += [", ".join(f"{name}: {len(variables)}" for name, variables in inputs.items())]
        for where, eqns in (("before", self.before), ("after", self.after)):
            if eqns:
                lines += [
                    f"{where} the loop:",
                    str(jaxprs.part(eqns, jaxprs.results_of(eqns)).jaxpr),
                ]
        names = [str(key or "") for _, key in self.grouped]
        return "\n".join([*lines, "the body:", as_text(self.body, names)])

    # ---- its tasks ------------------------------------------------------------------------------

    @functools.cached_property
    def recomputations(self) -> tuple[Eqn, ...]:
        """The tasks `R`, for the stages for which the table has some.

        They are not in the body, which has all tasks of a microbatch without a schedule. They make
        variables that the forwards of their stages make, too.
        """
        stages = {task.stage for task in self.table.tasks if task.kind is Kind.R}
        forwards = [t for t, key in self.grouped if key and key.kind is Kind.F]
        again = [_recomputation(self, t) for t in forwards if t.params["key"].stage in stages]
        return tuple(task for task in again if task is not None)

    @functools.cached_property
    def dependencies(self) -> Dependencies:
        """For each kind and stage, the tasks of the same microbatch whose values it reads."""
        tasks = (*self.tasks, *self.recomputations)
        makers: dict[Var, list[Key]] = {}
        for task in tasks:
            for v in task.outvars:
                makers.setdefault(v, []).append(task.params["key"])
        return {
            (key := task.params["key"]): tuple(
                dict.fromkeys(
                    maker
                    for v in jaxprs.variables(task.invars)
                    if v not in self.of_stages
                    for maker in makers.get(v, ())
                    if maker.kind is not Kind.R or maker.stage == key.stage
                )
            )
            for task in tasks
        }

    @functools.cached_property
    def of_stages(self) -> set[Var]:
        """The variables that tasks make for all microbatches of their stage."""
        return {*jaxprs.results_of(t for t in self.tasks if t.params["key"].kind.of_stage)}

    @property
    def stage_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose forwards its forward reads, once all have their stage.

        A carry that several stages read comes from the one that makes its next value.
        """
        owner, readers = self.owner(), self.readers()
        becomes = {v: out for v, out in self.becomes().items() if not jaxprs.is_literal(out)}
        owner |= {v: owner[out] for v, out in becomes.items() if out in owner}
        edges = {
            (reader.stage, owner[v].stage)
            for v, reading in readers.items()
            for reader in reading
            if v in owner and reader.kind is owner[v].kind is Kind.F
        }
        return tuple(
            tuple(source for source in range(stage) if (stage, source) in edges)
            for stage in range(self.num_stages)
        )

    @functools.cached_property
    def ordered(self) -> dict[Key, str]:
        """The tasks whose microbatches must keep their order, for the sake of a carry.

        Each has the place in the user's code that makes the carry, ` at file:line`.
        """
        ordered = {out for v, out in self.becomes().items() if v not in self.folds}
        found: dict[Key, str] = {}
        for task in self.tasks:
            key, jaxpr = task.params["key"], task.params["jaxpr"]
            maker = {v: e for e in jaxpr.eqns for v in e.outvars}
            for result, v in zip(task.outvars, jaxpr.jaxpr.outvars, strict=True):
                if result in ordered:
                    eqn = None if jaxprs.is_literal(v) else maker.get(v)
                    line = "" if eqn is None else _compat.at_source_line(eqn)
                    found[key] = found.get(key) or line
        return found


def _recomputation(loop: ScheduledLoop, forward: Eqn) -> Eqn | None:
    """Makes the `R` of an `F`; None if the stage's other tasks read nothing that it can make again.

    It is the same program, so that it makes the same bits; but it has no effect. What depends on a
    carry, or comes from an effect, the `F` alone makes: of the `R` nothing reads it.
    """
    key, jaxpr = Key(Kind.R, forward.params["key"].stage), forward.params["jaxpr"]
    eqns, inputs = jaxpr.eqns, jaxpr.jaxpr.invars
    source = dict(zip(inputs, forward.invars, strict=True))
    carries, results = {*loop.carries}, {*loop.outputs}
    lost = jaxprs.descendants(eqns, jaxprs.results_of(e for e in eqns if e.effects))
    stale = jaxprs.descendants(eqns, [v for v, start in source.items() if start in carries])
    outputs = []
    for v, result in zip(jaxpr.jaxpr.outvars, forward.outvars, strict=True):
        if jaxprs.is_literal(v) or v not in lost:
            again = result not in results and (jaxprs.is_literal(v) or v not in stale)
            outputs.append((v, result if again else jaxprs.fresh_var(result)))
    others = (t for t in loop.tasks if t.params["key"].stage == key.stage)
    if not {result for _, result in outputs} & {v for t in others for v in t.invars}:
        return None
    if any(e.effects for e in eqns):
        kept = [e for e in eqns if not (e.effects or lost & set(jaxprs.variables(e.invars)))]
        jaxpr, inputs, _ = jaxprs.part(kept, [v for v, _ in outputs], str(key))
    again = [result for _, result in outputs]
    return make_task(key, jaxpr, [source[v] for v in inputs], again, forward.params["recomputes"])


def handed_on(task: Eqn) -> dict[Var, Var]:
    """Finds what a task hands on as it reads it: for each such result the variable."""
    inside = task.params["jaxpr"].jaxpr
    read = dict(zip(inside.invars, jaxprs.variables(task.invars), strict=True))
    pairs = zip(task.outvars, inside.outvars, strict=True)
    return {v: read[out] for v, out in pairs if not jaxprs.is_literal(out) and out in read}


def is_loop(eqn) -> bool:
    """Tells whether an equation is a scheduled loop."""
    return eqn.primitive is loop_p


def row_type(aval: Aval) -> Aval:
    """Returns the type of a row of an array that has one for each replica."""
    sharding = aval.sharding
    spec = jax.sharding.PartitionSpec(*tuple(sharding.spec)[1:])
    return aval.update(shape=aval.shape[1:], sharding=sharding.update(spec=spec))


def rows_type(aval: Aval, replicas: int) -> Aval:
    """Returns the type of an array that has a row of a type for each replica."""
    sharding = aval.sharding
    spec = jax.sharding.PartitionSpec(None, *tuple(sharding.spec))
    return aval.update(shape=(replicas, *aval.shape), sharding=sharding.update(spec=spec))


def error_inside(who: str, what: str, eqn) -> ValueError:
    """Makes the error of the transform `who` for a loop, `what`, that is inside an equation."""
    name = eqn.primitive.name
    way_out = "Move it to the top of the step."
    if name in ("scan", "while"):
        way_out = (
            "Write that loop in Python: a `for` over steps or batches, in the step or around its "
            "calls. To accumulate gradients over batches, join them and give microbatch more "
            "microbatches."
        )
    elif name == "cond":
        way_out = (
            "Decide in Python, between the calls of steps; or run the loop each time, and choose "
            "among its results (jnp.where, jax.lax.cond)."
        )
    return ValueError(
        f"{who}: {what} is inside a `{name}`{_compat.at_source_line(eqn)}, but a pipeline starts "
        f"at the top of a step only. {way_out}"
    )


def operand_stages(eqn) -> dict[Var, frozenset[int]]:
    """Finds the stages that read each operand of a loop."""
    loop = ScheduledLoop.of(eqn)
    readers: dict[Var, set[int]] = {}
    for task in loop.tasks:
        for v in jaxprs.variables(task.invars):
            readers.setdefault(v, set()).add(task.params["key"].stage)
    stages: dict[Var, frozenset[int]] = {}
    for atom, (v, d) in zip(eqn.invars, loop.operands, strict=False):
        if v in readers and not jaxprs.is_literal(atom):
            directions = range(loop.num_directions) if d is None else [d]
            reading = {loop.stage_number(stage, d) for stage in readers[v] for d in directions}
            stages[atom] = stages.get(atom, frozenset()) | reading
    return stages


def result_stages(eqn) -> list[frozenset[int]]:
    """Finds the stage that makes each result of a loop (none for a carry that passes through)."""
    loop = ScheduledLoop.of(eqn)
    maker = {v: task.params["key"].stage for task in loop.tasks for v in task.outvars}
    numbers = ([loop.stage_number(maker[v], d)] if v in maker else [] for v, d in loop.results)
    return list(map(frozenset, numbers))
