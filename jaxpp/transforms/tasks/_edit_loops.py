"""`edit_loops`: a transform whose rule edits the scheduled loops of a function."""

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any, Literal, overload

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs, schedules
from jaxpp.jaxprs import Eqn, P, R, Var, definition_of
from jaxpp.schedules import Task
from jaxpp.transforms.tasks import _loop, _write
from jaxpp.transforms.tasks._edit import Loop
from jaxpp.transforms.tasks._schedule import check


@overload
def edit_loops(
    fun: Callable[P, R], rule: Callable[[Loop], Loop], *, has_aux: Literal[False] = False
) -> Callable[P, R]: ...


@overload
def edit_loops(
    fun: Callable[P, R], rule: Callable[[Loop], Loop], *, has_aux: Literal[True]
) -> Callable[P, tuple[R, dict[str, Any]]]: ...


def edit_loops(
    fun: Callable[..., Any], rule: Callable[[Loop], Loop], *, has_aux: bool = False
) -> Callable[..., Any]:
    """Lets a rule edit each scheduled loop of a function.

    A transform between `schedule` and `place`. The edited loop goes through the checks of a
    scheduled one. On one device the function runs with the same values as on ranks, and it can be
    vmapped; differentiate before you schedule.

    Args:
        fun: a function of pytrees, whose loops `schedule` has scheduled.
        rule: gives a loop for a loop, each time that `fun` is traced. It is called for each loop.
        has_aux: whether the function is to give what rules add by `Loop.result`, too.

    Returns:
        A function with the same arguments and results. With `has_aux` it gives a pair: the result,
        and a dictionary of what was added, by name. Each array in it has one more axis, the first:
        the microbatches, in order.

    Raises:
        TypeError: the function is placed already.
        ValueError: there is no scheduled loop; or the rule names tasks or values that are not
            there, or gives arrays of other types. The error names the rule and the task, with their
            lines.
        jaxpp.schedules.ScheduleError: the edited loop lacks a task in its table, or deadlocks.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> def in_half(loop):
        ...     value = next(v for v in loop.values if ("F", 1) in v.readers)
        ...     loop, half = loop.after(("F", 0), lambda x: x.astype("bfloat16"), [value])
        ...     return loop.before(("F", 1), lambda x: x.astype("float32"), half, of=value)
        >>> edited = jaxpp.extend.edit_loops(grad, in_half)
        >>> edited(jnp.eye(2), jnp.ones((8, 2))).shape
        (2, 2)
    """
    if not callable(rule):
        raise TypeError(f"edit_loops takes a rule, a function from a loop to a loop, got {rule!r}.")
    who = f"edit_loops: the rule {jaxprs.describe_function(rule)}"
    if hasattr(fun, "with_edit"):  # in a trace, it is the function that was placed
        raise TypeError(
            f"edit_loops edits loops before they are placed, got {fun!r}: place(edit_loops(...))."
        )

    @functools.wraps(fun)
    def edited(*args: Any, **kwargs: Any) -> Any:
        if define := definition_of("edit_loops"):
            return define(fun, jaxprs.describe_function(rule), has_aux)(*args, **kwargs)
        if _compat.is_jit_disabled() and not has_aux:  # there are no scheduled loops
            return fun(*args, **kwargs)
        traced = jaxprs.trace(fun, args, kwargs)
        with jax.debug_key_reuse(False):  # tasks may share an array of keys
            flat = jaxprs.inline(traced.jaxpr, lambda e: jaxprs.contains(e, _loop.is_loop))
            jaxpr, consts, trees = _edited(flat, rule, who, has_aux)
            results = jaxprs.run(jaxpr, *consts, *traced.inputs)
        count = len(flat.jaxpr.outvars)
        result = traced.rebuild(results[:count])
        if not has_aux:
            return result
        rest = iter(results[count:])
        return result, {
            name: jtu.tree_unflatten(tree, list(itertools.islice(rest, tree.num_leaves)))
            for name, tree in trees.items()
        }

    return edited


def _edited(
    flat: jex.ClosedJaxpr, rule: Callable[[Loop], Loop], who: str, has_aux: bool
) -> tuple[jex.ClosedJaxpr, list[Any], dict[str, Any]]:
    """Edits the loops of a flat program.

    Returns:
        The program, which takes further constants first, and gives further results last; the
        constants; and for each further result, by name, its structure.
    """
    eqns, results, consts, trees = [], [], {}, {}
    for eqn in flat.eqns:
        if not _loop.is_loop(eqn):
            if jaxprs.contains(eqn, _loop.is_loop):
                raise _loop.error_inside("edit_loops", "a scheduled loop", eqn)
            eqns.append(eqn)
            continue
        given = Loop(_loop.ScheduledLoop.of(eqn), who)
        loop = rule(given)
        if not isinstance(loop, Loop):
            hint = "; Loop.after and Loop.insert give a pair" if isinstance(loop, tuple) else ""
            raise ValueError(f"{who} gave {loop!r}; a rule gives the loop, edited or not{hint}.")
        if not {*given._loop.inputs} <= {*loop._loop.inputs}:
            raise ValueError(
                f"{who} gave another loop than the one that it got, such as that of an earlier "
                f"call; edit the loop that the rule is given."
            )
        _check(loop, given.table.tasks)
        if loop._results and not has_aux:
            names = ", ".join(repr(result.name) for result in loop._results)
            raise ValueError(f"{who} adds results, {names}, which has_aux=True returns.")
        consts |= loop._consts
        more, added = _bound(eqn, loop)
        eqns += more
        results += added
        for result in loop._results:
            if result.name in trees:
                raise ValueError(f"{who} adds {result.name!r} in two loops; name it by its loop.")
            trees[result.name] = result.tree
    if not any(map(_loop.is_loop, flat.eqns)):
        raise ValueError(
            "edit_loops: the function has no scheduled loop to edit; apply schedule first: "
            "edit_loops(schedule(grad_fn, OneFOneB()), rule)."
        )
    invars = [*consts, *flat.jaxpr.invars]
    outvars = [*flat.jaxpr.outvars, *results]
    return _compat.make_closed_jaxpr(invars, outvars, eqns), list(consts.values()), trees


def _check(edited: Loop, before: Collection[Task]) -> None:
    """Checks an edited loop as `schedule` checks its own, and that its new tasks do something."""
    who, table = edited._who, edited.table
    expected = (Task(*key, i) for key in edited.tasks for i in range(table.num_microbatches))
    lacking = next((t for t in expected if t not in table.tasks and not t.kind.of_stage), None)
    if lacking:
        raise schedules.ScheduleError(
            f"{who} leaves {lacking.describe()} out of the table; each task runs for every "
            f"microbatch."
        )
    work = {t: t.kind.makes or t.kind for t in table.tasks if t.kind.of_stage and not t.kind.takes}
    for task in sorted(work.keys() - before, key=str):
        if (work[task], task.stage) not in edited.tasks:
            raise schedules.ScheduleError(
                f"{who} puts {task.describe()} into the table, and no {work[task]}{task.stage} of "
                f"the loop says what it makes; add that by Loop.insert."
            )
    for task in edited._loop.tasks:
        if task.params["key"].kind.of_stage:
            _check_of_stage(edited, task)
    try:
        check("the schedule", edited._loop)
    except schedules.ScheduleError as error:
        raise schedules.ScheduleError(
            f"{who} leaves a loop that cannot run: {error}\n"
            f"Loop.insert(before=) and Loop.order say where a new task is."
        ) from None


def _check_of_stage(edited: Loop, task: Eqn) -> None:
    """Checks that a task that is of its stage reads constants, and is there for all its readers."""
    who, loop, key = edited._who, edited._loop, task.params["key"]
    if not {*task.invars} <= {*loop.consts} or not loop.of_stages.isdisjoint(loop.outputs):
        raise ValueError(
            f"{who} lets {key}, which is of its stage, read or give what is of a microbatch; it "
            f"reads constants that the loop gets, and makes others for the tasks of its stage."
        )
    if _compat.acts(task):
        raise ValueError(
            f"{who} lets {key}, which is of its stage, have an effect, such as a print: how often "
            f"it runs is the table's choice; let a task of a microbatch have it."
        )
    results, handed = {*task.outvars}, _loop.handed_on(task)
    read = {t.params["key"]: results.intersection(t.invars) for t in loop.tasks}
    windows = [(t.kind.makes or t.kind, window) for t, window in loop.table.windows.items()]
    there = {t for kind, window in windows if kind == key.kind for t in window}
    for other in itertools.chain(*loop.table.ranks):
        values = read.get(_loop.Key(other.kind, other.stage))
        if values and (other.stage != key.stage or not (other in there or values <= handed.keys())):
            raise schedules.ScheduleError(
                f"{who} lets {other.describe()} read what {key} makes, but no {key.kind} of that "
                f"stage comes before it; add one to the table, or let it read another value."
            )


def _bound(eqn: Eqn, loop: Loop) -> tuple[list[Eqn], list[Var]]:
    """The equations of a loop in place of the one it was, and its further results."""
    edited, first = loop._loop, eqn.params["num_consts"]
    invars = [*eqn.invars[:first], *(v for v, _ in loop._consts), *eqn.invars[first:]]
    run = functools.partial(_loop.loop_p.bind, **edited.params)
    (new,) = jax.make_jaxpr(run)(*(v.aval for v in invars)).eqns
    added = new.outvars[len(eqn.outvars) :]
    outvars = [*eqn.outvars, *added]
    eqns = [eqn.replace(invars=invars, outvars=outvars, params=new.params, effects=new.effects)]
    count = edited.num_directions
    if count == 1 and edited.replicas == 1:
        return eqns, added
    join, joined = _write.row_by_direction(edited), []
    for n in range(0, len(added), count):
        more, (result,) = jaxprs.record(join, added[n : n + count], eqn)
        eqns += more
        joined.append(result)
    return eqns, joined
