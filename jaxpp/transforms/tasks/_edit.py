"""`Loop`: a scheduled loop as those see it who edit it: tasks, the values between them, a table."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, _jaxprs, _primitives, schedules
from jaxpp.schedules import Kind, Table, Task
from jaxpp.transforms.tasks._loop import LoopTasks, Ref, TaskBody
from jaxpp.transforms.tasks._schedule import check

_T = TypeVar("_T")


class Key(NamedTuple):
    """The tasks of one kind of a stage: a pair, as `("F", 0)`; there is one a microbatch."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that a task of a loop makes, for each microbatch; see `Loop.values`.

    Args:
        aval: its type: it has a `shape` and a `dtype`.
        maker: the kind and stage of the task that makes it.
        readers: those of the tasks that read it; none of a gradient, which is added up.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.sin(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> def show(loop):
        ...     for value in loop.values:
        ...         print(value.maker, "->", *value.readers, value.aval.str_short(), value.nbytes)
        ...     return loop
        >>> edited = jaxpp.extend.edit_loops(grad, show)
        >>> shape = jax.eval_shape(edited, jnp.eye(2), jnp.ones((8, 2)))
        F0 -> F1 B1 float32[2,2] 16
        F0 -> B0 float32[2,2] 16
        F1 -> B1 float32[2,2] 16
        B1 -> B0 float32[2,2] 16
    """

    aval: Any
    maker: Key
    readers: tuple[Key, ...]
    _ref: Ref | None = dataclasses.field(repr=False)
    _var: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return self.aval.size * getattr(self.aval.dtype, "itemsize", 4)


class _Result(NamedTuple):
    """A result that a rule adds to a loop: the structure of its arrays, and the number of each."""

    name: str
    tree: Any
    ys: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scheduled loop: the tasks of a microbatch, the values between them, and the table.

    A task is named by its kind and stage, as `("F", 0)`: it runs once for each microbatch, and so
    do its edits. Each edit gives a new loop. Where microbatches go through the ranks in two
    directions, an edit is one of the tasks of both.

    The functions that edits take are of arrays, of a microbatch's values in the order in which they
    are named; they are traced, as by `jax.jit`. They give arrays in any pytree. What they close
    over is the same for all microbatches; it may be an argument of the step.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.ZeroBubbleH1())
        >>> def show(loop):
        ...     print(*loop.tasks, loop.table)
        ...     return loop
        >>> edited = jaxpp.extend.edit_loops(grad, show)
        >>> shape = jax.eval_shape(edited, jnp.eye(2), jnp.ones((8, 2)))
        F0 F1 I1 W1 W0 Table(2 ranks, 2 stages, 4 microbatches)
    """

    _tasks: LoopTasks = dataclasses.field(repr=False)
    _who: str = dataclasses.field(repr=False)
    _results: tuple[_Result, ...] = dataclasses.field(default=(), repr=False)
    #: What functions of the rule close over: further constants of the loop.
    _consts: tuple[Any, ...] = dataclasses.field(default=(), repr=False)

    @property
    def table(self) -> Table:
        """For each rank, its tasks in order."""
        return self._tasks.table

    @property
    def tasks(self) -> tuple[Key, ...]:
        """The kinds and stages of the tasks of a microbatch, in an order in which they can run.

        A backward without work has no task: that of the first stage's inputs, for instance. Nor
        are there those of the kind `R`, which do again what an `F` does, edits included.
        """
        return tuple(map(_key, self._tasks.bodies))

    @property
    def values(self) -> tuple[Value, ...]:
        """The values that tasks make for others of their microbatch, in the order of making."""
        readers: dict[Ref, list[Key]] = {}
        for body in self._tasks.bodies:
            for ref in dict.fromkeys(body.inputs):
                readers.setdefault(ref, []).append(_key(body))
        return tuple(
            Value(v.aval, _key(body), tuple(readers.get(ref, ())), ref)
            for body in self._tasks.bodies
            for ref, v in zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True)
            if ref.source == "value"
        )

    def gradients(self, key: tuple[str, int]) -> tuple[Value, ...]:
        """The gradients that a backward adds up over the microbatches: of a stage's parameters.

        Each is that of one microbatch. A parameter that several stages read has a part of its
        gradient in each.
        """
        body = self._body(key)
        if body.kind == "F":
            return ()
        found = (fold.value for fold in _folds(body, self._tasks))
        variables = dict.fromkeys(v for v in found if not _jaxprs.is_literal(v))
        return tuple(Value(v.aval, _key(body), (), None, v) for v in variables)

    # ---- edits ----------------------------------------------------------------------------------

    def after(
        self, key: tuple[str, int], fun: Callable[..., Any], values: Sequence[Value]
    ) -> tuple["Loop", list[Value]]:
        """Computes new values at the end of a task.

        Args:
            key: the task.
            fun: the function.
            values: its arguments: what the task makes or reads, gradients included.

        Returns:
            The loop, and the new values, which no task reads yet.
        """
        body = self._body(key)
        made = self._record_in(body, fun, values)
        refs = self._new_refs(len(made.atoms))
        loop = made.loop._with(_extended(body, made, refs))
        return loop, loop._values_of(refs)

    def before(
        self, key: tuple[str, int], fun: Callable[..., Any], values: Sequence[Value], of: Value
    ) -> "Loop":
        """Computes what a task reads as one value from others, at its start.

        Args:
            key: the task.
            fun: the function; it gives one array, of the type of `of`.
            values: its arguments, which the task need not have read so far.
            of: the value that the task has read so far.
        """
        body = self._body(key)
        old, known = self._input(body, of), _inputs(body)
        read = {self._ref(v): known.get(self._ref(v)) or jex.Var(v.aval) for v in values}
        given = [read[self._ref(v)] for v in values]
        made = self._record(fun, given, f"at the start of {body.name}", known, [of.aval])
        del known[self._ref(of)]
        new = _jaxprs.Substitution([(old, made.atoms[0])])
        eqns = [*made.eqns, *map(new.rename, body.jaxpr.eqns)]
        outvars = list(map(new, body.jaxpr.jaxpr.outvars))
        return made.loop._with(_body_of(body, {**known, **read, **made.consts}, eqns, outvars))

    def insert(
        self,
        kind: Kind,
        stage: int,
        fun: Callable[..., Any],
        values: Sequence[Value],
        *,
        before: tuple[str, int] | None = None,
    ) -> tuple["Loop", list[Value]]:
        """Adds a task of a further kind to a stage, which makes new values of others.

        If the table has no such tasks, each comes right after the last task of its microbatch, on
        its rank, that it reads from or that its kind comes after. A schedule may have put them
        elsewhere.

        Args:
            kind: the kind; it is not one of the library's own.
            stage: the stage.
            fun: the function.
            values: its arguments.
            before: a task of the table that it comes right before, in place of after what it reads.

        Returns:
            The loop, and the new values, which no task reads yet.
        """
        name = f"{kind}{stage}"
        if kind not in Kind or Kind(kind).is_own or (kind, stage) in self.tasks:
            why = "is there already" if (kind, stage) in self.tasks else "is not of a new kind"
            raise self._error(
                f"inserts {name}, which {why}; make a kind of your own by "
                f"jaxpp.extend.Kind('Q', 'what it does'), and one task of a stage."
            )
        if not 0 <= stage < self.table.num_stages or not values:
            has = f"{self.table.num_stages} stages, numbered from 0"
            raise self._error(f"inserts {name}: it needs values, and the loop has {has}.")
        if before and tuple(before) not in [(t.kind, t.stage) for t in self.table.tasks]:
            other = "".join(map(str, before))
            raise self._error(f"inserts {name} before {other}, which the table does not have.")
        read = {self._ref(v): jex.Var(v.aval) for v in values}
        made = self._record(fun, [read[self._ref(v)] for v in values], f"as {name}", {})
        refs = self._new_refs(len(made.atoms))
        empty = TaskBody(Kind(kind), stage, _compat.make_closed_jaxpr([], [], []), (), (), False)
        body = _body_of(empty, {**read, **made.consts}, made.eqns, made.atoms)
        body = dataclasses.replace(body, outputs=tuple(refs))
        makers = {v.maker for v in values}
        table = _with_tasks(self.table, Kind(kind), stage, makers, before)
        loop = made.loop._replace(bodies=(*self._tasks.bodies, body), table=table)
        return loop, loop._values_of(refs)

    def read(self, key: tuple[str, int], new: Value, of: Value) -> "Loop":
        """Lets a task read one value in place of another, which has the same type."""
        body = self._body(key)
        old, known, ref = self._input(body, of), _inputs(body), self._ref(new)
        if _type(new.aval) != _type(of.aval):
            raise self._error(
                f"lets {body.name} read {new.aval.str_short()} in place of "
                f"{of.aval.str_short()}; convert it by Loop.before."
            )
        del known[self._ref(of)]
        same = _jaxprs.Substitution([(old, known.setdefault(ref, old))])
        eqns, outvars = map(same.rename, body.jaxpr.eqns), map(same, body.jaxpr.jaxpr.outvars)
        return self._with(_body_of(body, known, list(eqns), list(outvars)))

    def replace(
        self, key: tuple[str, int], values: Sequence[Value], fun: Callable[..., Any]
    ) -> "Loop":
        """Puts other arrays in place of values that a task makes, or of gradients that it adds up.

        Args:
            key: the task.
            values: the values, for whoever reads them; the task itself goes on with the old ones.
            fun: a function of them, which gives as many of the same types.
        """
        body = self._body(key)
        if stranger := next((v for v in values if v.maker != _key(body)), None):
            raise self._error(f"replaces in {body.name} a value that {stranger.maker} makes.")
        made = self._record_in(body, fun, values, [v.aval for v in values])
        of = {v._ref: new for v, new in zip(values, made.atoms, strict=True) if v._ref}
        sums = {v._var: new for v, new in zip(values, made.atoms, strict=True) if not v._ref}
        adding = {id(f.eqn) for f in _folds(body, self._tasks) if f.value in sums}
        added = [e for e in body.jaxpr.eqns if id(e) in adding]
        late = _jaxprs.descendants(body.jaxpr.eqns, [v for e in added for v in e.outvars])
        new = _jaxprs.Substitution(sums.items())
        first = [e for e in body.jaxpr.eqns if late.isdisjoint(e.outvars)]
        second = [
            new.rename(e) if id(e) in adding else e
            for e in body.jaxpr.eqns
            if not late.isdisjoint(e.outvars)
        ]
        eqns, outputs = [*first, *made.eqns, *second], _outputs(body).items()
        outvars = [of.get(ref, v) for ref, v in outputs]
        return made.loop._with(_body_of(body, {**_inputs(body), **made.consts}, eqns, outvars))

    def result(
        self, name: str, key: tuple[str, int], fun: Callable[..., Any], values: Sequence[Value]
    ) -> "Loop":
        """Adds a result: what a function gives at the end of a task, of each microbatch.

        Args:
            name: its name in the dictionary that `edit_loops` gives with `has_aux`.
            key: the task.
            fun: the function; it gives a pytree of arrays.
            values: its arguments: what the task makes or reads, gradients included.
        """
        if name in [result.name for result in self._results]:
            raise self._error(f"adds two results named {name!r}.")
        body = self._body(key)
        made = self._record_in(body, fun, values)
        first = self._tasks.num_ys
        ys = tuple(range(first, first + len(made.atoms)))
        new = _extended(body, made, [Ref("y", n) for n in ys])
        loop = made.loop._with(new)._replace(num_ys=first + len(ys))
        return dataclasses.replace(loop, _results=(*self._results, _Result(name, made.tree, ys)))

    def order(self, change: Callable[[tuple[Task, ...]], Iterable[Task]]) -> "Loop":
        """Changes the order of each rank's tasks.

        Args:
            change: gives the new order of a rank's tasks. It may add tasks of kinds of your own.
        """
        ranks = tuple(tuple(change(tasks)) for tasks in self.table.ranks)
        before, now = (
            {pair for own in orders for pair in itertools.pairwise(own)}
            for orders in (self.table.ranks, ranks)
        )
        kept = frozenset(task for task, _ in before & now if task in self.table.overlaps)
        return self._replace(table=dataclasses.replace(self.table, ranks=ranks, overlaps=kept))

    # ---- inside ---------------------------------------------------------------------------------

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self._who} {what}")

    def _body(self, key: tuple[str, int]) -> TaskBody:
        found = next((b for b in self._tasks.bodies if _key(b) == tuple(key)), None)
        if found is None:
            name = "".join(map(str, key))
            has = " ".join(map(str, self.tasks))
            raise self._error(f"edits {name}, which the loop does not have; its tasks are {has}.")
        return found

    def _input(self, body: TaskBody, value: Value) -> Any:
        """The variable of a value that a task reads."""
        known = _inputs(body)
        if value._ref not in known:
            makers = " and ".join(str(v.maker) for v in self.values if v._ref in known)
            raise self._error(
                f"names a value of {value.maker}, which {body.name} does not read; it reads values "
                f"of {makers or 'no task'}."
            )
        return known[value._ref]

    def _atoms(self, body: TaskBody, values: Sequence[Value]) -> list[Any]:
        """The atoms in a task of values that it makes or reads."""
        known = {**_inputs(body), **_outputs(body)}
        own = {*body.jaxpr.jaxpr.invars, *(v for e in body.jaxpr.eqns for v in e.outvars)}
        atoms = []
        for value in values:
            atom = known.get(value._ref) if value._ref else value._var
            if atom is None or (value._ref is None and atom not in own):
                raise self._error(
                    f"names a value of {value.maker} at the end of {body.name}, which neither "
                    f"makes nor reads it; let it read the value, or take another task."
                )
            atoms.append(atom)
        return atoms

    def _new_refs(self, count: int) -> list[Ref]:
        """References for new values, which have numbers that no value has."""
        refs = (r for b in self._tasks.bodies for r in (*b.inputs, *b.outputs))
        first = 1 + max((r.index for r in refs if r.source == "value"), default=-1)
        return [Ref("value", first + n) for n in range(count)]

    def _values_of(self, refs: Sequence[Ref]) -> list[Value]:
        found = {v._ref: v for v in self.values}
        return [found[ref] for ref in refs]

    def _ref(self, value: Value) -> Ref:
        if value._ref is None:
            raise self._error(
                f"lets a task read a gradient of {value.maker}, which is no value between tasks; "
                f"make one of it by Loop.after."
            )
        return value._ref

    def _record_in(
        self,
        body: TaskBody,
        fun: Callable,
        values: Sequence[Value],
        types: Sequence[Any] | None = None,
    ) -> "_Made":
        """Traces a function of values at the end of a task."""
        where = f"at the end of {body.name}"
        return self._record(fun, self._atoms(body, values), where, _inputs(body), types)

    def _record(
        self,
        fun: Callable,
        atoms: Sequence[Any],
        where: str,
        inputs: Mapping[Ref, Any],
        types: Sequence[Any] | None = None,
    ) -> "_Made":
        """Traces a function of atoms in a task with some inputs.

        If types are given, the results have to be of these.
        """
        try:
            traced, tree = jax.make_jaxpr(fun, return_shape=True)(*(a.aval for a in atoms))
        except Exception as error:
            error.add_note(f"{self._who} runs {_jaxprs.described(fun)} {where}.")
            raise
        jaxpr, arrays = _jaxprs.without_constants(traced)
        jaxpr = _jaxprs.inline(jaxpr, lambda e: True)
        if types is not None and list(map(_type, jaxpr.out_avals)) != list(map(_type, types)):
            given, wanted = (
                ", ".join(a.str_short() for a in own) or "nothing"
                for own in (jaxpr.out_avals, types)
            )
            raise self._error(
                f"runs {_jaxprs.described(fun)} {where}, which gives {given}, but is to give "
                f"{wanted}; convert what it returns."
            )
        consts, refs = list(self._consts), []
        for array in arrays:
            same = [n for n, known in enumerate(consts) if known is array]
            consts += [] if same else [array]
            refs.append(Ref("const", self._first_const + (same or [len(consts) - 1])[0]))
        variables = zip(refs, jaxpr.jaxpr.invars, strict=False)
        own = [inputs.get(ref) or jex.Var(v.aval) for ref, v in variables]
        eqns, made = _jaxprs.inline_body(jaxpr, [*own, *atoms])
        loop = dataclasses.replace(self, _consts=tuple(consts))
        loop = loop._replace(num_consts=self._first_const + len(consts))
        return _Made(loop, eqns, made, dict(zip(refs, own, strict=True)), jtu.tree_structure(tree))

    @property
    def _first_const(self) -> int:
        return self._tasks.num_consts - len(self._consts)

    def _with(self, body: TaskBody) -> "Loop":
        """The loop with another body of a task."""
        bodies = [body if _key(b) == _key(body) else b for b in self._tasks.bodies]
        return self._replace(bodies=self._sorted(bodies))

    def _replace(self, **changes: Any) -> "Loop":
        return dataclasses.replace(self, _tasks=dataclasses.replace(self._tasks, **changes))

    def _sorted(self, bodies: Iterable[TaskBody]) -> tuple[TaskBody, ...]:
        """Puts tasks in an order in which they can run, and else as they are."""
        left, order, made = list(bodies), [], set()
        while left:
            ready = next(
                (b for b in left if all(r in made for r in b.inputs if r.source == "value")), None
            )
            if ready is None:
                names = " and ".join(b.name for b in left)
                raise self._error(
                    f"makes a circle: {names} read values of each other, and none can run first; "
                    f"let a task read values of tasks before it alone."
                )
            left.remove(ready)
            order.append(ready)
            made.update(ready.outputs)
        return tuple(order)

    def _checked(self) -> "Loop":
        """Checks the loop as `schedule` checks its own."""
        lacking = [
            Task(key.kind, key.stage, i)
            for key in self.tasks
            for i in range(self.table.num_microbatches)
            if Task(key.kind, key.stage, i) not in self.table.tasks
        ]
        if lacking:
            raise schedules.ScheduleError(
                f"{self._who} leaves {lacking[0].describe()} out of the table; each task runs for "
                f"every microbatch."
            )
        try:
            check("the schedule", self.table, self._tasks)
        except schedules.ScheduleError as error:
            raise schedules.ScheduleError(
                f"{self._who} leaves a loop that cannot run: {error}"
            ) from None
        return self


class _Made(NamedTuple):
    """What a function of atoms does: equations, results, and the constants that it closes over."""

    loop: Loop
    eqns: list[Any]
    atoms: list[Any]
    consts: dict[Ref, Any]
    tree: Any


class _Fold(NamedTuple):
    """The equation by which a task adds a value to an accumulator."""

    eqn: Any
    value: Any


def _key(body: TaskBody) -> Key:
    return Key(body.kind, body.stage)


def _inputs(body: TaskBody) -> dict[Ref, Any]:
    return dict(zip(body.inputs, body.jaxpr.jaxpr.invars, strict=True))


def _outputs(body: TaskBody) -> dict[Ref, Any]:
    return dict(zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True))


def _type(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, _compat.memory_kind(aval)


def _folds(body: TaskBody, tasks: LoopTasks) -> list[_Fold]:
    """Finds how a task adds to the loop's sums."""
    maker, taken = {v: e for e in body.jaxpr.eqns for v in e.outvars}, _inputs(body)
    found = []
    for ref, v in _outputs(body).items():
        fold = tasks.folds.get(ref.index) if ref.source == "carry" else None
        if fold is None or fold.name not in _primitives.ADDS or v not in maker:
            continue
        own = _jaxprs.descendants(body.jaxpr.eqns, [taken[ref]])  # the accumulator, perhaps cast
        found += [
            _Fold(maker[v], o) for o in maker[v].invars if _jaxprs.is_literal(o) or o not in own
        ]
    return found


def _body_of(body: TaskBody, inputs: Mapping[Ref, Any], eqns, outvars) -> TaskBody:
    jaxpr = _compat.make_closed_jaxpr(list(inputs.values()), outvars, eqns, body.name)
    return dataclasses.replace(body, jaxpr=jaxpr, inputs=tuple(inputs))


def _extended(body: TaskBody, made: _Made, refs: Sequence[Ref]) -> TaskBody:
    """A task with further equations at its end, whose results are further outputs."""
    inputs, eqns = {**_inputs(body), **made.consts}, [*body.jaxpr.eqns, *made.eqns]
    new = _body_of(body, inputs, eqns, [*body.jaxpr.jaxpr.outvars, *made.atoms])
    return dataclasses.replace(new, outputs=(*body.outputs, *refs))


def _with_tasks(
    table: Table,
    kind: Kind,
    stage: int,
    makers: Collection[tuple[Kind, int]],
    before: tuple[str, int] | None,
) -> Table:
    """Puts the tasks of a kind and a stage into a table, unless it has some."""
    if any(task.kind == kind and task.stage == stage for task in table.tasks):
        return table
    ranks, before_it = [], {*makers, *((k, stage) for k in kind.after)}
    for order in table.ranks:
        own = list(order)
        for i in [task.microbatch for task in order if (task.kind, task.stage) == ("F", stage)]:
            anchor = before and Task(Kind(before[0]), before[1], i)
            if anchor in own:
                at = own.index(anchor)
            else:
                numbers = [n for n, t in enumerate(own) if t.microbatch == i]
                made = [(own[n].kind, own[n].kind.makes) for n in numbers]
                near = [
                    n + 1
                    for n, kinds in zip(numbers, made, strict=True)
                    if any((k, own[n].stage) in before_it for k in kinds)
                ]
                at = max(near, default=min(n for n in numbers if own[n].stage == stage))
            if at and own[at - 1] in table.overlaps:  # not between two that run together
                at += -1 if anchor in own else 1
            own.insert(at, Task(kind, stage, i))
        ranks.append(tuple(own))
    return dataclasses.replace(table, ranks=tuple(ranks))
