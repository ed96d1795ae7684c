"""The definitions of the transforms, which stand for them in the function to compute.

They take what the user gave to a transform, and read it by rules of their own.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpp import _compat, _specs, jaxprs

#: The name of values whose rows are microbatches.
SLICES = "slices"


#: The scope of what one microbatch does, if it has effects; its number follows.
_MICROBATCH = "microbatch "


def microbatch_of(eqn: Any) -> int | None:
    """The number of the microbatch that an equation with an effect is of, in a definition."""
    for name in _compat.scope_names(eqn):
        if name.startswith(_MICROBATCH) and name.removeprefix(_MICROBATCH).isdigit():
            return int(name.removeprefix(_MICROBATCH))
    return None


def _itself(fun: Callable, *_: Any) -> Callable:
    return fun


def _microbatch(
    fun: Callable,
    count: int,
    in_axes: Any,
    reduce: Callable[[Callable[[], jaxprs.Traced]], Any],
    accumulator_dtype: Any,
    replicas: int,
    merge: Any,
) -> Callable:
    """A loop that keeps the outputs of each slice, and combines them after the last one.

    Args:
        fun: the function of a slice.
        count: the number of slices.
        in_axes: as the user gave it, and so is `accumulator_dtype`.
        reduce: gives `reduce`; it may ask for `fun`, traced on a slice.
        accumulator_dtype: the dtypes of sums.
        replicas: the number of groups of slices that are combined each for itself, and then with
            one another; what is carried begins anew in each.
        merge: as the user gave it: how what is carried out of the groups becomes one.
    """

    def own(given):
        args, kwargs = given
        return _with_arrays(fun(*args, **kwargs))

    def looped(*args, **kwargs):
        leaves, tree = jtu.tree_flatten((args, kwargs))
        numbers = jtu.tree_leaves(_with_arrays((args, kwargs)))
        inputs, roles = [], []
        for n, axis in enumerate(_axes(fun, in_axes, args, kwargs)):
            x = numbers[n] if axis == "carry" else leaves[n]
            if not jaxprs.is_array(x):
                continue
            is_cut = isinstance(axis, int)
            inputs.append(_slices(x, axis, count) if is_cut else x)
            roles.append("slice" if is_cut else axis or "whole")
            leaves[n] = _specs.types_of(lambda x: x[0], inputs[-1]) if is_cut else x
        trace = functools.partial(jaxprs.trace, own, [jtu.tree_unflatten(tree, leaves)])
        traced = trace()
        with jaxprs.by_definition({}):
            reduce_by = reduce(trace)
        outputs = traced.rebuild(_specs.type_of(v.aval) for v in traced.jaxpr.jaxpr.outvars)
        how = _of_arrays(reduce_by, outputs)
        dtypes = _of_arrays(accumulator_dtype, outputs)
        roles = ["whole"] * traced.num_closed_over + roles
        inputs = [*traced.inputs[: traced.num_closed_over], *inputs]
        merges = _of_arrays(merge, outputs)
        rows = _run(traced.jaxpr, inputs, roles, how, dtypes, count, replicas, merges)
        avals = [v.aval for v in traced.jaxpr.jaxpr.outvars]
        return traced.rebuild(_combined(how, rows, avals, dtypes, count, replicas))

    return looped


# ---- what the user gave --------------------------------------------------------------------------


def _axes(fun: Callable, in_axes: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The axis of each leaf of the arguments: that of its position in `fun`, or the first."""
    of_all = not isinstance(in_axes, tuple | list)
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # it has none
        parameters = ()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def of_keyword(name):
        if name not in names or (not of_all and names.index(name) >= len(in_axes)):
            return 0
        return in_axes if of_all else in_axes[names.index(name)]

    entries = [in_axes] * len(args) if of_all else in_axes
    pairs = [*zip(entries, args, strict=False)]
    pairs += [(of_keyword(name), kwargs[name]) for name in sorted(kwargs)]
    return [axis for entry, x in pairs for axis in _spread(entry, x)]


def _spread(prefix: Any, tree: Any) -> Iterator[Any]:
    """The leaf of a prefix of a tree, for each leaf of the tree."""
    found: list[Any] = []

    def add(leaf, below):
        found.extend([leaf] * len(jtu.tree_leaves(below)))

    jtu.tree_map(add, prefix, tree, is_leaf=lambda x: x is None or hasattr(x, "combine"))
    return iter(found)


def _of_arrays(prefix: Any, outputs: Any) -> list[Any]:
    """The leaf of a prefix of the outputs, for each type of an array in them."""
    leaves = jtu.tree_leaves(outputs)
    pairs = zip(_spread(prefix, outputs), leaves, strict=True)
    return [leaf for leaf, x in pairs if isinstance(x, jax.ShapeDtypeStruct)]


def _with_arrays(tree: Any) -> Any:
    """A tree with arrays for Python's numbers, but for those in Equinox modules."""

    def of(x):
        return jnp.asarray(x) if type(x) in (int, float, complex) else x

    return jtu.tree_map(of, tree, is_leaf=lambda x: isinstance(x, eqx.Module))


def _slices(x: Any, axis: int, count: int) -> Any:
    """The runs of an axis, each as long as the others, along a new first axis."""
    axis, x = axis % len(x.shape), jnp.asarray(x)
    before, own, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    split = _specs.in_type(x)
    if split is not None:
        split = _specs.partition_spec((*split[:axis], (), *split[axis:]))
    shape = (*before, count, own // count, *after)
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)


def _sum_dtypes(asked: Any, own: Any) -> tuple[Any, Any]:
    """The dtype of a sum, and that of its result, where a dtype was asked for or `"auto"`."""
    if asked is None or not jnp.issubdtype(own, jnp.floating):
        return own, own
    if isinstance(asked, str) and asked == "auto":
        return (jnp.dtype("float32") if own.itemsize < 4 else own), own
    return jnp.dtype(asked), jnp.dtype(asked)


# ---- the loop ------------------------------------------------------------------------------------


def _run(
    jaxpr: Any,
    inputs: Sequence[Any],
    roles: Sequence[str],
    how,
    dtypes,
    count: int,
    replicas: int,
    merges: Sequence[Any],
):
    """The outputs of all slices, each along a new first axis, and the last of what is carried."""

    def wide(x):
        """The dtype in which the shares of the slices in a gradient are added up."""
        own = [_sum_dtypes(asked, x.dtype)[0] for asked in dtypes]
        return max([x.dtype, *own], key=lambda dtype: dtype.itemsize)

    # Each slice reads it in its own dtype, and so the gradients of slices are made wide, and added.
    wholes = [_as(x, wide(x)) for x, role in zip(inputs, roles, strict=True) if role == "whole"]
    first, slices = (
        [x for x, role in zip(inputs, roles, strict=True) if role == own]
        for own in ("carry", "slice")
    )
    slices = [checkpoint_name(x, SLICES) for x in slices]

    def body(carry, one):
        given = {"whole": iter(wholes), "carry": iter(carry), "slice": iter(one)}
        own = [next(given[role]) for role in roles]
        types = [v.aval.dtype for v in jaxpr.jaxpr.invars]
        outputs = jaxprs.run(jaxpr, *map(_as, own, types))
        return [y for y, op in zip(outputs, how, strict=True) if op == "carry"], outputs

    def of_group(slices, start=0):
        if not jaxpr.effects:  # the derivative of a scan would drop some
            return jax.lax.scan(body, first, slices, length=count // replicas)
        last, made = first, []
        for i in range(count // replicas):
            with jax.named_scope(f"{_MICROBATCH}{start + i}"):
                last, outputs = body(last, [x[i] for x in slices])
            made.append(outputs)
        return last, [jnp.stack(rows) for rows in zip(*made, strict=True)]

    if replicas == 1:
        last, outputs = of_group(slices)
    else:
        size = count // replicas
        starts = range(0, count, size)
        groups = [of_group([x[start : start + size] for x in slices], start) for start in starts]
        asked = [merge for merge, op in zip(merges, how, strict=True) if op == "carry"]
        ends = zip(*(last for last, _ in groups), strict=True)
        last = [_merged(ask, rows) for ask, rows in zip(asked, ends, strict=True)]
        outputs = [jnp.concatenate(ys) for ys in zip(*(ys for _, ys in groups), strict=True)]
    carry = iter(last)
    return [next(carry) if op == "carry" else y for y, op in zip(outputs, how, strict=True)]


def _merged(asked: Any, ends: Sequence[Any]) -> Any:
    """The value that stands for those at the ends of groups: their mean, if nothing is asked."""
    match asked or "mean":
        case "last":
            return ends[-1]
        case "max":
            return functools.reduce(jnp.maximum, ends)
        case "sum":
            return functools.reduce(jnp.add, ends)
        case "mean":
            return _as(functools.reduce(jnp.add, ends) / len(ends), ends[0].dtype)
        case own:
            return own(jnp.stack(ends))


def _as(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def _combined(how, rows, avals, dtypes, count: int, replicas: int) -> list[Any]:
    """Combines the outputs of all slices, each of which is stacked along a new first axis."""
    results, folds, size = [], {}, count // replicas
    for n, (op, y, aval) in enumerate(zip(how, rows, avals, strict=True)):
        match op:
            case "max":
                start = _start(_lowest(aval.dtype), aval, aval.dtype)
                folds[n] = jnp.maximum, start, y, aval.dtype
            case "mean" | "sum":
                dtype, _ = _sum_dtypes(dtypes[n], aval.dtype)
                folds[n] = jnp.add, _start(0, aval, dtype), y, dtype
            case "concat":
                y = y.reshape(count * y.shape[1], *y.shape[2:])
            case "last":
                y = y[count - 1]
            case "carry" | "stack":
                pass
            case _:
                starts = range(0, count, size)
                accs = [_by_operator(op, aval, y[start : start + size]) for start in starts]
                acc = functools.reduce(op.merge, accs) if accs[1:] else accs[0]
                y = op.finish(acc, count)
        results.append(y)
    for n, total in _in_groups(folds, size, replicas).items():
        total = total / count if how[n] == "mean" else total
        results[n] = _as(total, _sum_dtypes(dtypes[n], avals[n].dtype)[1])
    return results


def _by_operator(op: Any, aval: Any, rows: Any) -> Any:
    acc = op.init(_specs.type_of(aval))
    for row in rows:
        acc = op.combine(acc, row)
    return acc


def _in_groups(
    folds: Mapping[int, tuple[Callable, Any, Any, Any]], size: int, replicas: int
) -> dict[int, Any]:
    """Combines the rows of each group, and then what has come of the groups, in order."""
    groups = []
    for start in range(0, size * replicas, size):
        own = {n: (f, x, y[start : start + size], d) for n, (f, x, y, d) in folds.items()}
        groups.append(_folded(own))
    return {n: functools.reduce(f, [g[n] for g in groups]) for n, (f, *_) in folds.items()}


def _folded(folds: Mapping[int, tuple[Callable, Any, Any, Any]]) -> dict[int, Any]:
    """Combines a value with rows, each in a dtype, from the first to the last."""
    others = {n: rows[1:] for n, (_, _, rows, _) in folds.items()}

    def combined(n, acc, row):
        combine, _, _, dtype = folds[n]
        return combine(acc, _as(row, dtype))

    def body(acc, row):
        return {n: combined(n, acc[n], row[n]) for n in acc}, None

    first = {n: combined(n, start, rows[0]) for n, (_, start, rows, _) in folds.items()}
    return jax.lax.scan(body, first, others)[0] if folds else {}


def _start(value: Any, aval: Any, dtype: Any) -> Any:
    if aval.weak_type and not aval.shape and dtype == aval.dtype:
        return dtype.type(value).item()
    return _specs.filled(aval, value, dtype)


def _lowest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min
    has_infinity = np.isinf(np.asarray(-np.inf, dtype))
    return -jnp.inf if has_infinity else jnp.finfo(dtype).min


class Edited(Exception):
    """An edit of loops adds results, so that the function has no definition without it."""


def unedited(rules: list[str]) -> Callable[..., Callable]:
    """The definition of `edit_loops`: an edit changes no value. `rules` collects who edits.

    Raises:
        Edited: when the edit adds results.
    """

    def define(fun: Callable, rule: str, has_aux: bool) -> Callable:
        if rule not in rules:
            rules.append(rule)
        if has_aux:
            raise Edited
        return fun

    return define


#: The tasks and the ranks of a loop are those of the loop.
UNSCHEDULED = {"schedule": _itself}
#: Stages are pieces of the function, and a microbatch loop is a loop over slices.
PLAIN = {"schedule": _itself, "stages": _itself, "microbatch": _microbatch}
