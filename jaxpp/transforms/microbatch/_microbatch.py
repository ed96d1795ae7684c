"""`microbatch`: runs a function on slices of its arguments, one after the other."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import DTypeLike, PyTree

from jaxpp import _jaxprs, _specs
from jaxpp._spellings import names_ours
from jaxpp._typing import P, R
from jaxpp.transforms import _keywords
from jaxpp.transforms.microbatch import _reductions, _slices
from jaxpp.transforms.microbatch._slices import CARRY

#: The reduction of all outputs where the user gives none; a string of the user is another object.
_BY_DEFAULT = "".join(("me", "an"))


@names_ours
def microbatch(
    fun: Callable[P, R],
    num_microbatches: int,
    *,
    in_axes: PyTree[int | str | None] = (None, 0),
    reduce: PyTree[str | _reductions.Operator] = _BY_DEFAULT,
    accumulator_dtype: PyTree[DTypeLike] | None = None,
) -> Callable[P, R]:
    """Runs `fun` on slices of its arguments and combines the results, in the memory of one slice.

    It is one `lax.scan` over the slices. `microbatch(jax.value_and_grad(f), M)` and
    `jax.value_and_grad(microbatch(f, M))` do the same work: the second accumulates the gradient of
    each scalar mean or sum slice by slice, in the forward pass; `jax.jit` leaves out gradients that
    are not read. If another output is differentiated, as by a loss over the whole batch of "concat"
    outputs, all gradients take a second pass over the slices, forwards and backwards. A function
    with a scalar mean or sum cannot be differentiated in forward mode; its gradient can.

    A state that each slice takes over from the slice before it (the running statistics of
    BatchNorm, a recurrent state, a random key) is `"carry"` in both `in_axes` and `reduce`: the
    arrays carried out of one slice go, in the order of their leaves, into the next one. The result
    is that of a loop over the slices in order; a schedule with another order is an error.

    Args:
        fun: a function of pytrees.
        num_microbatches: the number of slices, M.
        in_axes: as in `jax.vmap`, an int or None for each argument, or a prefix of its pytree: the
            axis to slice; None passes the whole. Slice i holds the i-th run of `size / M` indices.
            The sizes are the same, or M for an array with an entry for each slice, such as random
            keys. `"carry"` passes the whole to the first slice, and to each further slice the value
            that the slice before it gave back. A keyword argument has the entry of its position in
            `fun`; as in `jax.vmap`, one without an entry is sliced along its first axis.
        reduce: how each output is combined, a prefix of the result's pytree: `"mean"`, `"sum"`,
            `"max"`, `"last"`, `"stack"` (a new first axis of size M), `"concat"` (along the first
            axis), `"carry"` (goes into the next slice; the last one is the result), or an object
            with `init`, `combine` and `finish` (see `jaxpp.Operator`). By default it is `"mean"`
            for all, with a warning where an output has an entry for each example (predictions that
            `has_aux` gives), which should be `"concat"`.
        accumulator_dtype: the floating-point dtype in which `"mean"` and `"sum"` accumulate and
            return floats, a prefix of the result's pytree; None is each output's own. With float32
            the gradients by bfloat16 parameters are summed in, and come back as, float32.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: if the size of a sliced axis is not a multiple of M, or differs between
            arguments; if an output has no such reduction; if `accumulator_dtype` holds no floating
            dtype; or if the arrays carried out of a slice do not fit those carried in.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> float(grad(3.0 * jnp.ones(()), jnp.arange(4.0)))
        21.0
        >>> smooth = lambda state, x: (jnp.mean(x - state), state / 2 + jnp.mean(x) / 2)
        >>> follow = jaxpp.microbatch(smooth, 2, in_axes=("carry", 0), reduce=("stack", "carry"))
        >>> error, state = follow(jnp.zeros(()), jnp.arange(4.0))
        >>> error.tolist(), float(state)
        ([0.5, 2.25], 1.375)
    """
    return microbatch_by(fun, num_microbatches, in_axes, lambda traced: reduce, accumulator_dtype)


def microbatch_by(
    fun: Callable[P, R],
    num_microbatches: int,
    in_axes: PyTree[int | str | None],
    reduce: Callable[[_jaxprs.Traced], PyTree[str | _reductions.Operator]],
    accumulator_dtype: PyTree[DTypeLike] | None = None,
) -> Callable[P, R]:
    """Does as `microbatch`, with a `reduce` that is chosen after `fun` has been traced."""
    is_number = isinstance(num_microbatches, int | np.integer) and num_microbatches is not True
    if not is_number or num_microbatches < 1:
        raise ValueError(
            f"microbatch: num_microbatches must be an int and at least 1, got {num_microbatches!r}."
        )
    count = int(num_microbatches)

    @functools.wraps(fun)
    def microbatched(*args: P.args, **kwargs: P.kwargs) -> R:
        most = len(in_axes) if isinstance(in_axes, tuple | list) else None
        given = _keywords.as_positional(fun, args, kwargs, most)
        leaves, tree = jtu.tree_flatten(given)
        axes = _broadcast_axes(in_axes, given)
        axes = [a if _jaxprs.is_array(leaf) else None for a, leaf in zip(axes, leaves, strict=True)]
        paths = [jtu.keystr(p) for p, _ in jtu.tree_flatten_with_path(given)[0]]
        _check_sizes(leaves, axes, paths, count)
        small = [
            leaf if axis is None else _slice_type(leaf, axis, count)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        traced = _jaxprs.trace(_keywords.positional(fun), jtu.tree_unflatten(tree, small))
        chosen = reduce(traced)
        if chosen is _BY_DEFAULT:
            _warn_of_averaged_examples(traced, small, axes, count)
        operators = _resolve_outputs(chosen, accumulator_dtype, traced)
        carried = [(p, x) for p, a, x in zip(paths, axes, small, strict=True) if a == CARRY]
        _check_carried(carried, operators, traced)
        # Inputs of the traced jaxpr: the arrays closed over, then the array leaves in order.
        arrays = [i for i, leaf in enumerate(leaves) if _jaxprs.is_array(leaf)]
        inputs = list(traced.inputs[: traced.num_closed_over])
        roles = ["whole"] * len(inputs)
        for i in arrays:
            axis = axes[i]
            if isinstance(axis, int):
                inputs.append(_stack_slices(leaves[i], axis, count))
                roles.append("slice")
            else:
                inputs.append(leaves[i])
                roles.append("whole" if axis is None else CARRY)
        loop = _slices.loop_over_slices(traced.jaxpr, roles, operators, count)
        return traced.rebuild(loop(*inputs))

    return microbatched


def _warn_of_averaged_examples(
    traced: _jaxprs.Traced, small: Sequence[Any], axes: Sequence[Any], count: int
) -> None:
    """Warns of outputs with an entry for each example that the default reduction averages."""
    pairs = list(zip(small, axes, strict=True))
    sizes = {x.shape[axis] for x, axis in pairs if isinstance(axis, int)} - {1}
    whole = [x for x, axis in pairs if not isinstance(axis, int)]
    # An output with the shape of a parameter counts as its gradient.
    parameters = {np.shape(x) for x in [*whole, *traced.inputs[: traced.num_closed_over]]}
    for path, v in zip(traced.output_paths(), traced.jaxpr.jaxpr.outvars, strict=True):
        shape = v.aval.shape
        if shape and shape[0] in sizes and shape not in parameters:
            warnings.warn(
                f"microbatch: output{path} ({v.aval.dtype}{list(shape)}) seems to have an entry "
                f"for each of the {shape[0]} examples of a microbatch, and is averaged over the "
                f"{count} microbatches. Give reduce= for it: 'concat' keeps those of all examples, "
                f"'mean' says that the average is meant.",
                stacklevel=3,
            )


def _broadcast_axes(in_axes: Any, args: tuple) -> list[Any]:
    """Gives one axis, None or `CARRY` for each leaf of the arguments."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    count = len(_keywords.without_keywords(args))
    if isinstance(in_axes, tuple) and len(in_axes) != count:
        raise ValueError(
            f"microbatch: in_axes has {len(in_axes)} entries {in_axes}, but the function was "
            f"called with {count} arguments; give one entry for each."
        )
    in_axes = _keywords.with_keywords(in_axes, args, 0)
    axes = _broadcast(in_axes, args, "in_axes", lambda a: a is None)
    wrong = [
        a
        for a in axes
        if a not in (None, CARRY) and (isinstance(a, bool) or not isinstance(a, int))
    ]
    if wrong:
        raise ValueError(
            f"microbatch: in_axes holds {wrong[0]!r}; each of its leaves is an int, None or "
            f"{CARRY!r}."
        )
    return axes


def _broadcast(prefix: Any, tree: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Repeats each leaf of a prefix pytree for the leaves of `tree` below it."""
    result: list[Any] = []
    try:
        jtu.tree_map(
            lambda p, sub: result.extend([p] * len(jtu.tree_leaves(sub))),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"microbatch: {what} is not a prefix of the pytree it stands for: {error}"
        ) from None
    return result


def _resolve_outputs(reduce: Any, dtype: Any, traced: _jaxprs.Traced) -> list[Any]:
    paths = traced.output_paths()
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.jaxpr.outvars]
    outputs = traced.rebuild(avals)
    leaves = jtu.tree_leaves(outputs)

    def of_arrays(prefix: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
        named = _broadcast(prefix, outputs, what, is_leaf)
        return [
            n for n, x in zip(named, leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)
        ]

    named = of_arrays(reduce, "reduce", lambda r: r is None or isinstance(r, _reductions.Operator))
    dtypes = of_arrays(dtype, "accumulator_dtype", lambda d: d is None)
    return [
        _reductions.accumulate_in(_reductions.resolve(r, p, x), d, x)
        for r, d, p, x in zip(named, dtypes, paths, avals, strict=True)
    ]


def _check_carried(inputs: Sequence[tuple[str, Any]], operators, traced: _jaxprs.Traced) -> None:
    """Checks that a slice carries out the arrays that the next one takes."""
    outputs = [
        (path, v.aval)
        for path, op, v in zip(
            traced.output_paths(), operators, traced.jaxpr.jaxpr.outvars, strict=True
        )
        if isinstance(op, _reductions.Carry)
    ]
    if len(inputs) != len(outputs):
        raise ValueError(
            f"microbatch: in_axes carries {len(inputs)} arrays in, but reduce carries "
            f"{len(outputs)} out; what one microbatch carries out the next one takes, so give "
            f"{CARRY!r} in both for the same state."
        )
    for (path, x), (out_path, y) in zip(inputs, outputs, strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"microbatch: output{out_path} ({y.dtype}{list(y.shape)}) of a microbatch is "
                f"carried to args{path} ({x.dtype}{list(x.shape)}) of the next; give back what was "
                f"taken, with its shape and dtype."
            )


def _check_sizes(leaves, axes, paths, count: int) -> None:
    sizes = {}
    for leaf, axis, path in zip(leaves, axes, paths, strict=True):
        if axis in (None, CARRY):
            continue
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"microbatch: args{path} has shape {leaf.shape} and no axis {axis} to slice."
            )
        sizes[path] = leaf.shape[axis]
    if not sizes:
        raise ValueError(
            "microbatch: in_axes names no array to slice; give an axis for one argument."
        )
    for path, size in sizes.items():
        if size % count:
            near = max(size // count * count, count)
            raise ValueError(
                f"microbatch: args{path} has {size} examples, which {count} microbatches do not "
                f"divide; use {near} or {(size // count + 1) * count} examples, or another number "
                f"of microbatches."
            )
    # An array with an entry for each microbatch (random keys, numbers) has M, whatever the batch.
    if len(set(sizes.values()) - {count}) > 1:
        raise ValueError(
            f"microbatch: the sliced arguments differ in their number of examples: "
            f"{', '.join(f'args{p}: {n}' for p, n in sizes.items())}; give each as many, or one "
            f"entry for each of the {count} microbatches."
        )


def _slice_type(x, axis: int | str, count: int) -> jax.ShapeDtypeStruct:
    def first(x):
        return _stack_slices(x, axis, count)[0] if isinstance(axis, int) else x

    return _specs.types_of(first, x)  # NumPy's int64 is an int32 to JAX


def _stack_slices(x, axis: int, count: int):
    """Stacks the slices of an array along a new first axis."""
    x = jnp.asarray(x)
    axis = axis % x.ndim
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    split = _specs.in_type(x)
    if split is not None:  # explicit axes: the examples of each slice are split as the array is
        split = _specs.partition_spec((*split[:axis], (), *split[axis:]))
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)
