"""`Loop`: a scheduled loop as those see it who edit it: tasks, the values between them, a table."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Aval, Eqn, Var
from jaxpp.schedules import Kind, Table, Task
from jaxpp.transforms.tasks._loop import Key, ScheduledLoop
from jaxpp.transforms.tasks._open_task import OpenTask

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that tasks of a loop read; see `Loop.values` and `Loop.constants`.

    Args:
        aval: its type: it has a `shape` and a `dtype`.
        maker: the kind and stage of the task that makes it; None of what the loop gets.
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

    aval: Aval
    maker: Key | None
    readers: tuple[Key, ...]
    #: Its variable: of the loop's body, or of the task that makes it if it is a gradient.
    _var: Var = dataclasses.field(repr=False)
    _is_gradient: bool = dataclasses.field(default=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return self.aval.size * getattr(self.aval.dtype, "itemsize", 4)


class _AddedResult(NamedTuple):
    """A result that a rule adds to a loop, and the structure of its arrays."""

    name: str
    tree: Any


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

    _loop: ScheduledLoop = dataclasses.field(repr=False)
    _who: str = dataclasses.field(repr=False)
    _results: tuple[_AddedResult, ...] = dataclasses.field(default=(), repr=False)
    #: The values that functions of the rule close over, with their variables: the last constants.
    _consts: tuple[tuple[Var, Any], ...] = dataclasses.field(default=(), repr=False)

    @property
    def table(self) -> Table:
        """For each rank, its tasks in order."""
        return self._loop.table

    @property
    def tasks(self) -> tuple[Key, ...]:
        """The kinds and stages of the tasks of a microbatch, in an order in which they can run.

        A backward without work has no task: that of the first stage's inputs, for instance. Nor
        are there those of the kinds `R` and `H`, which do again what an `F` or a `G` does, edits
        included. A `G` is there where the table has some.
        """
        return tuple(map(_key, self._loop.tasks))

    @property
    def values(self) -> tuple[Value, ...]:
        """The values that tasks make for others of their microbatch, in the order of making."""
        of_all = {*self._loop.outputs, *self._loop.of_stages}
        results = jaxprs.results_of(self._loop.tasks)
        return tuple(self._values_of(v for v in results if v not in of_all))

    @property
    def constants(self) -> tuple[Value, ...]:
        """The values that are the same for all microbatches: parameters, for example.

        Those that the loop gets have no maker. Others are made of these, by tasks of a kind that is
        `of_stage`; see `insert`.
        """
        read = {v for task in self._loop.tasks for v in task.invars}
        of_stages = [v for v in jaxprs.results_of(self._loop.tasks) if v in self._loop.of_stages]
        return tuple(self._values_of([*(v for v in self._loop.consts if v in read), *of_stages]))

    def gradients(self, key: tuple[str, int]) -> tuple[Value, ...]:
        """The gradients that a backward adds up over the microbatches: of a stage's parameters.

        Each is that of one microbatch. A parameter that several stages read has a part of its
        gradient in each.
        """
        task = self._task(key)
        if task.key.kind == "F":
            return ()
        variables = dict.fromkeys(v for _, v in task.additions(self._loop))
        return tuple(Value(v.aval, task.key, (), v, True) for v in variables)

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
        loop, new, _ = self._after(key, fun, values)
        return loop, loop._values_of(new)

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
        task = self._task(key)
        old = self._input(task, of)
        self._check_known(values)
        sent = list(map(self._sent, values))
        task, new = task.reading(sent), Var(of.aval)
        task, given = task.renamed(old, new), [task.inputs[v] for v in sent]
        where = f"at the start of {task.key}"
        put = self._put(task, fun, given, where, types=[of.aval], at=0)
        task = put.task.renamed(new, put.atoms[0])
        return put.loop._with(task if of._var in sent else task.without(of._var))

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

        A task of a kind that is `of_stage` makes values of constants, for the tasks of its stage
        that come after it on its rank, up to the next one. It runs as often as the table says, by
        default once, before the first of these, and makes what they read. Tasks whose kind `makes`
        the same are in the table alone. Parameters that `place(..., zero3=)` splits it gathers:
        what it makes is split as if they were whole.

        Args:
            kind: the kind; of the library's own only `G`.
            stage: the stage.
            fun: the function.
            values: its arguments.
            before: a task of its rank that it comes right before, in place of after what it reads.
                It is needed if the new task reads from another rank.

        Returns:
            The loop, and the new values, which no task reads yet.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp
            >>> def loss(w, x):
            ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
            ...     return jnp.mean((h @ w) ** 2)
            >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
            >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
            >>> E = jaxpp.extend.Kind("E", "round", of_stage=True)
            >>> def round_once(loop):
            ...     (weights,) = loop.constants
            ...     loop, rounded = loop.insert(E, 1, lambda w: w.round(), [weights])
            ...     loop = loop.read(("F", 1), rounded[0], of=weights)
            ...     print(*loop.table.ranks[1][:3])
            ...     return loop
            >>> rounding = jaxpp.extend.edit_loops(grad, round_once)
            >>> shape = jax.eval_shape(rounding, jnp.eye(2), jnp.ones((8, 2)))
            E1.0 F1.0 B1.0
        """
        name, there = f"{kind}{stage}", (kind, stage) in self.tasks
        if kind not in Kind or (Kind(kind).is_own and kind != Kind.G) or there:
            why = "is there already" if there else "is not of a new kind"
            raise self._error(
                f"inserts {name}, which {why}; make a kind of your own by "
                f"jaxpp.extend.Kind('Q', 'what it does'), and one task of a stage."
            )
        has = self.table.num_stages
        if not (isinstance(stage, int) and 0 <= stage < has):
            raise self._error(f"inserts {name}: the loop has {has} stages, numbered from 0.")
        if not values:
            raise self._error(
                f"inserts {name}, which would make values of none; name values, or leave out a "
                f"stage that reads none."
            )
        if Kind(kind).of_stage and (Kind(kind).takes or Kind(kind).makes):
            raise self._error(
                f"inserts {name}, but its work is that of other kinds, which it takes or makes "
                f"again; put such tasks into the table alone."
            )
        known = [(t.kind, t.stage) for t in self.table.tasks]
        if before and not (isinstance(before, list | tuple) and tuple(before) in known):
            other = "".join(map(str, before)) if isinstance(before, Iterable) else repr(before)
            raise self._error(f"inserts {name} before {other}, which the table does not have.")
        if before and (ranks := self._ranks_of(*before)) != (wanted := self._ranks_of("F", stage)):
            raise self._error(
                f"inserts {name} before {''.join(map(str, before))}, which {_ranks(ranks)} runs; "
                f"{name} is a task of {_ranks(wanted)}: name a task of that rank."
            )
        self._check_known(values)
        makers = {v.maker for v in values if v.maker}
        sent = list(map(self._sent, values))
        task = OpenTask(Key(Kind(kind), stage)).reading(sent)
        put = self._put(task, fun, [task.inputs[v] for v in sent], f"as {name}")
        task, new = put.given()
        table = _with_tasks(self.table, Kind(kind), stage, makers, before)
        grouped = (*self._loop.grouped, (task.closed(), task.key))
        loop = put.loop._replace(grouped=grouped, table=table)
        return loop, loop._values_of(new)

    def read(
        self, key: tuple[str, int], new: Value | Sequence[Value], of: Value | Sequence[Value]
    ) -> "Loop":
        """Lets a task read a value in place of another of its type, or several of several."""
        task = self._task(key)
        there, gone = ([given] if isinstance(given, Value) else given for given in (new, of))
        self._check_known(there)
        self._check_known(gone)
        if len(there) != len(gone):
            raise self._error(
                f"lets {task.key} read {len(there)} values in place of {len(gone)}; give one for "
                f"each."
            )
        for now, old in zip(there, gone, strict=True):
            self._input(task, old)
            if _type(now.aval) != _type(old.aval):
                raise self._error(
                    f"lets {task.key} read {now.aval.str_short()} in place of "
                    f"{old.aval.str_short()}; convert it by Loop.before."
                )
        sent = zip((old._var for old in gone), map(self._sent, there), strict=True)
        return self._with(task.reading_instead(dict(sent)))

    def replace(
        self, key: tuple[str, int], values: Sequence[Value], fun: Callable[..., Any]
    ) -> "Loop":
        """Puts other arrays in place of values that a task makes, or of gradients that it adds up.

        Args:
            key: the task.
            values: the values, for whoever reads them; the task itself goes on with the old ones.
            fun: a function of them, which gives as many of the same types.
        """
        task = self._task(key)
        self._check_known(values)
        if not values:
            has = " ".join(str(k) for k in self.tasks if self.gradients(k)) or "no task"
            raise self._error(f"replaces no value in {task.key}; gradients are added up by {has}.")
        if stranger := next((v for v in values if v.maker != task.key), None):
            raise self._error(
                f"replaces in {task.key} a value that {stranger.maker or 'no task'} makes; "
                + ("replace it there." if stranger.maker else "let it read another by Loop.read.")
            )
        gradients = {v._var for v in values if v._is_gradient}
        adding = {id(e) for e, v in task.additions(self._loop) if v in gradients}
        added = jaxprs.results_of(e for e in task.eqns if id(e) in adding)
        late = jaxprs.descendants(task.eqns, added)
        first, second = (
            [e for e in task.eqns if late.isdisjoint(e.outvars) is early] for early in (True, False)
        )
        atoms, types = self._atoms(task, values), [v.aval for v in values]
        task = dataclasses.replace(task, eqns=(*first, *second))
        put = self._put(task, fun, atoms, types=types, at=len(first))
        pairs = [(v._var, new) for v, new in zip(values, put.atoms, strict=True)]
        known = jaxprs.Substitution(pair for pair in pairs if pair[0] in gradients)
        eqns = tuple(known.rename(e) if id(e) in adding else e for e in put.task.eqns)
        outputs = {v: new for v, new in pairs if v not in gradients}
        return put.loop._with(dataclasses.replace(put.task, eqns=eqns).giving(outputs))

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
            raise self._error(f"adds two results named {name!r}; put the stage in the name.")
        loop, new, tree = self._after(key, fun, values)
        loop = loop._replace(ys=(*loop._loop.ys, *new))
        return dataclasses.replace(loop, _results=(*self._results, _AddedResult(name, tree)))

    def order(self, change: Callable[[tuple[Task, ...]], Iterable[Task]]) -> "Loop":
        """Changes the order of each rank's tasks.

        Args:
            change: gives the new order of a rank's tasks. It may add tasks of kinds of your own.
        """
        wrong, ranks = [change], ()
        if callable(change):
            found = map(change, self.table.ranks)
            ranks = tuple(tuple(own) if isinstance(own, Iterable) else (own,) for own in found)
            wrong = [own for own in itertools.chain(*ranks) if not isinstance(own, Task)]
        if wrong:
            raise self._error(
                f"orders tasks by {wrong[0]!r}; give Loop.order a function that takes the tasks of "
                f"a rank and returns those of its new order."
            )
        before, now = (
            {pair for order in orders for pair in itertools.pairwise(order)}
            for orders in (self.table.ranks, ranks)
        )
        kept = frozenset(task for task, _ in before & now if task in self.table.overlaps)
        return self._replace(table=dataclasses.replace(self.table, ranks=ranks, overlaps=kept))

    # ---- inside ---------------------------------------------------------------------------------

    def _ranks_of(self, kind: str, stage: int) -> list[int]:
        """The ranks that run a task of the table."""
        orders = enumerate(self.table.ranks)
        return [n for n, tasks in orders if any((t.kind, t.stage) == (kind, stage) for t in tasks)]

    def _check_known(self, values: Any) -> None:
        """Refuses what is no list of values, and a value that no task of this loop makes."""
        if not (isinstance(values, list | tuple) and all(isinstance(v, Value) for v in values)):
            raise self._error(f"gives {values!r} where a list of values is due.")
        known = {*self._loop.consts, *jaxprs.results_of(self._loop.tasks)}
        for value in values:
            if value._is_gradient or value._var in known:
                continue
            raise self._error(
                f"names a value of {value.maker} that this loop does not make. An edit returns a "
                f"new loop, with the values that it makes: write `loop, new = loop.after(...)`, "
                f"and go on with that loop."
            )

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self._who} {what}")

    def _task(self, key: tuple[str, int]) -> OpenTask:
        """Opens a task."""
        is_key = isinstance(key, list | tuple)
        found = next((t for t in self._loop.tasks if is_key and _key(t) == tuple(key)), None)
        if found is None:
            name = "".join(map(str, key)) if is_key else repr(key)
            has = " ".join(map(str, self.tasks))
            raise self._error(f"edits {name}, which the loop does not have; its tasks are {has}.")
        return OpenTask.of(found)

    def _input(self, task: OpenTask, value: Value) -> Var:
        """The variable in a task of a value that it reads."""
        self._check_known([value])
        if value._is_gradient or value._var not in task.inputs:
            makers = " and ".join(str(v.maker) for v in self.values if v._var in task.inputs)
            raise self._error(
                f"names a value of {value.maker}, which {task.key} does not read; it reads "
                f"values of {makers or 'no task'}."
            )
        return task.inputs[value._var]

    def _atoms(self, task: OpenTask, values: Sequence[Value]) -> list[Atom]:
        """The atoms in a task of values that it makes or reads."""
        known = {**task.inputs, **task.outputs}
        inside = {*task.inputs.values(), *jaxprs.results_of(task.eqns)}
        atoms = []
        for value in values:
            atom = value._var if value._is_gradient else known.get(value._var)
            if atom is None or (value._is_gradient and atom not in inside):
                raise self._error(
                    f"names a value of {value.maker} at the end of {task.key}, which neither "
                    f"makes nor reads it; let it read the value, or take another task."
                )
            atoms.append(atom)
        return atoms

    def _values_of(self, variables: Iterable[Var]) -> list[Value]:
        """Makes the values of variables of the loop's body."""
        readers: dict[Var, list[Key]] = {}
        for task in self._loop.tasks:
            for v in jaxprs.variables(task.invars):
                readers.setdefault(v, []).append(_key(task))
        makers = {v: _key(task) for task in self._loop.tasks for v in task.outvars}
        return [Value(v.aval, makers.get(v), tuple(readers.get(v, ())), v) for v in variables]

    def _sent(self, value: Value) -> Var:
        """The variable of a value between tasks."""
        if value._is_gradient:
            raise self._error(
                f"lets a task read a gradient of {value.maker}, which is no value between tasks; "
                f"make one of it by Loop.after."
            )
        return value._var

    def _after(
        self, key: tuple[str, int], fun: Callable, values: Sequence[Value]
    ) -> tuple["Loop", list[Var], Any]:
        """Does as `after`; gives the variables of the new values, and the tree that they are in."""
        task = self._task(key)
        self._check_known(values)
        put = self._put(task, fun, self._atoms(task, values))
        task, new = put.given()
        return put.loop._with(task), new, put.tree

    def _put(
        self,
        task: OpenTask,
        fun: Callable,
        atoms: Sequence[Atom],
        where: str = "",
        types: Sequence[Aval] | None = None,
        at: int | None = None,
    ) -> "_Made":
        """Adds what a function does with atoms of a task to its equations.

        They come before the equation number `at`, by default at the end. If types are given, the
        results have to be of these.
        """
        where = where or f"at the end of {task.key}"
        try:
            traced, tree = jax.make_jaxpr(fun, return_shape=True)(*(a.aval for a in atoms))
        except Exception as error:
            error.add_note(f"{self._who} runs {jaxprs.describe_function(fun)} {where}.")
            raise
        jaxpr, arrays = jaxprs.without_constants(traced)
        jaxpr = jaxprs.inline(jaxpr, lambda e: True)
        if types is not None and list(map(_type, jaxpr.out_avals)) != list(map(_type, types)):
            given, wanted = (
                ", ".join(a.str_short() for a in avals) or "nothing"
                for avals in (jaxpr.out_avals, types)
            )
            raise self._error(
                f"runs {jaxprs.describe_function(fun)} {where}, which gives {given}, but is to "
                f"give {wanted}; convert what it returns."
            )
        consts, read = list(self._consts), []
        for array, v in zip(arrays, jaxpr.jaxpr.invars, strict=False):
            same = next((var for var, known in consts if known is array), None)
            if same is None:
                consts.append((same := jaxprs.fresh_var(v), array))
            read.append(same)
        task = task.reading(read)
        eqns, results = jaxprs.inline_body(jaxpr, [*(task.inputs[v] for v in read), *atoms])
        at = len(task.eqns) if at is None else at
        task = dataclasses.replace(task, eqns=(*task.eqns[:at], *eqns, *task.eqns[at:]))
        new = [v for v, _ in consts[len(self._consts) :]]
        loop = dataclasses.replace(self, _consts=tuple(consts))
        loop = loop._replace(consts=(*self._loop.consts, *new))
        return _Made(loop, task, results, jtu.tree_structure(tree))

    def _with(self, task: OpenTask) -> "Loop":
        """The loop with another equation of a task."""
        tasks = [task.closed() if _key(t) == task.key else t for t in self._loop.tasks]
        return self._replace(grouped=tuple((t, _key(t)) for t in self._sorted(tasks)))

    def _replace(self, **changes: Any) -> "Loop":
        return dataclasses.replace(self, _loop=dataclasses.replace(self._loop, **changes))

    def _sorted(self, tasks: Iterable[Eqn]) -> list[Eqn]:
        """Puts tasks in an order in which they can run, and else as they are."""
        left, order, known = list(tasks), [], {*self._loop.inputs}
        while left:
            ready = next((t for t in left if known.issuperset(t.invars)), None)
            if ready is None:
                names = " and ".join(str(_key(t)) for t in left)
                first = [str(_key(t)) for t in left if _key(t).kind.of_stage]
                way = f" {' and '.join(first)} make values of constants for other tasks: let none "
                way += "read what another makes, or schedule without Gather."
                raise self._error(
                    f"makes a circle: {names} read values of each other, and none can run first; "
                    f"let a task read values of tasks before it alone.{way if first[1:] else ''}"
                )
            left.remove(ready)
            order.append(ready)
            known.update(ready.outvars)
        return order


class _Made(NamedTuple):
    """A function that is put into a task: its results, and the tree that they are in."""

    loop: Loop
    task: OpenTask
    atoms: list[Atom]
    tree: Any

    def given(self) -> tuple[OpenTask, list[Var]]:
        """Lets the task give the results; also gives their variables in the loop's body."""
        new = {Var(atom.aval): atom for atom in self.atoms}
        return self.task.giving(new), list(new)


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _key(task: Eqn) -> Key:
    return task.params["key"]


def _type(aval: Aval) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, _compat.memory_kind(aval)


def _with_tasks(
    table: Table,
    kind: Kind,
    stage: int,
    makers: Collection[tuple[Kind, int]],
    before: tuple[str, int] | None,
) -> Table:
    """Puts the tasks of a kind and a stage into a table, unless it has some."""
    if any((t.kind.makes or t.kind) == kind and t.stage == stage for t in table.tasks):
        return table
    if kind.of_stage:
        return _with_first(table, kind, stage, before)
    ranks, before_it = [], {*makers, *((k, stage) for k in kind.after)}
    for order in table.ranks:
        tasks = list(order)
        for i in [task.microbatch for task in order if (task.kind, task.stage) == ("F", stage)]:
            anchor = before and Task(Kind(before[0]), before[1], i)
            if anchor in tasks:
                at = tasks.index(anchor)
            else:
                numbers = [n for n, t in enumerate(tasks) if t.microbatch == i]
                kinds_there = [(tasks[n].kind, tasks[n].kind.makes) for n in numbers]
                near = [
                    n + 1
                    for n, kinds in zip(numbers, kinds_there, strict=True)
                    if any((k, tasks[n].stage) in before_it for k in kinds)
                ]
                at = max(near, default=min(n for n in numbers if tasks[n].stage == stage))
            if at and tasks[at - 1] in table.overlaps:  # not between two that run together
                at += -1 if anchor in tasks else 1
            tasks.insert(at, Task(kind, stage, i))
        ranks.append(tuple(tasks))
    return dataclasses.replace(table, ranks=tuple(ranks))


def _with_first(table: Table, kind: Kind, stage: int, before: tuple[str, int] | None) -> Table:
    """Puts a task that is of its stage before the first one of that, or of those of `before`."""
    ranks = []
    for order in table.ranks:
        key = before and tuple(before)
        reading = [t for t in order if key == (t.kind, t.stage) or (not key and t.stage == stage)]
        at = order.index(reading[0]) if reading else 0
        added = [Task(kind, stage, task.microbatch) for task in reading[:1]]
        ranks.append((*order[:at], *added, *order[at:]))
    return dataclasses.replace(table, ranks=tuple(ranks))
