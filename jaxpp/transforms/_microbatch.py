"""`microbatch`: runs a function on slices of its arguments, one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxpp import _jaxprs
from jaxpp.transforms import _reductions


def microbatch(
    fun: Callable,
    num_microbatches: int,
    *,
    in_axes: Any = (None, 0),
    reduce: Any = "mean",
) -> Callable:
    """Runs `fun` on slices of its arguments and combines the results, in the memory of one slice.

    One `lax.scan` over the slices. `microbatch(jax.value_and_grad(f), M)` and
    `jax.value_and_grad(microbatch(f, M))` do the same work: the second accumulates the gradient of
    its first scalar output slice by slice, in the forward pass (other outputs are differentiated by
    running the slices again). Forward-mode differentiation is not supported.

    Args:
        fun: a function of pytrees, called with positional arguments.
        num_microbatches: how many slices, M.
        in_axes: as in `jax.vmap`, an int or None for each argument, or a prefix of its pytree: the
            axis to slice; None passes the whole. Slice i holds the i-th run of `size / M` indices.
        reduce: how each output is combined, a prefix of the result's pytree: `"mean"`, `"sum"`,
            `"max"`, `"last"`, `"stack"` (a new first axis of size M), `"concat"` (along the first
            axis), or an object with `init`, `combine` and `finish` (see `jaxpp.Operator`).

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: if the size of a sliced axis is not a multiple of M, differs between arguments,
            or an output has no such reduction.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> float(grad(3.0 * jnp.ones(()), jnp.arange(4.0)))
        21.0
    """
    is_number = isinstance(num_microbatches, int | np.integer) and num_microbatches is not True
    if not is_number or num_microbatches < 1:
        raise ValueError(
            f"microbatch: num_microbatches must be an int and at least 1, got {num_microbatches!r}."
        )
    count = int(num_microbatches)

    @functools.wraps(fun)
    def microbatched(*args):
        leaves, tree = jtu.tree_flatten(args)
        axes = _broadcast_axes(in_axes, args)
        axes = [a if _jaxprs.is_array(leaf) else None for a, leaf in zip(axes, leaves, strict=True)]
        paths = [jtu.keystr(p) for p, _ in jtu.tree_flatten_with_path(args)[0]]
        _check_sizes(leaves, axes, paths, count)
        sliced = [i for i, a in enumerate(axes) if a is not None]
        small = [
            leaf if axis is None else _slice_type(leaf, axis, count)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        traced = _jaxprs.trace(fun, jtu.tree_unflatten(tree, small))
        operators = _resolve_outputs(reduce, traced)
        # Inputs of the traced jaxpr: what is closed over, then the array leaves in order.
        arrays = [i for i, leaf in enumerate(leaves) if _jaxprs.is_array(leaf)]
        is_sliced = [False] * traced.num_closed_over + [i in sliced for i in arrays]
        inputs = list(traced.inputs[: traced.num_closed_over])
        for i in arrays:
            axis = axes[i]
            inputs.append(leaves[i] if axis is None else _stack_slices(leaves[i], axis, count))
        return traced.rebuild(_loop(traced.jaxpr, is_sliced, operators, count)(*inputs))

    return microbatched


def _loop(jaxpr, is_sliced: Sequence[bool], operators: Sequence[Any], count: int) -> Callable:
    """The loop over slices as a function of the jaxpr's inputs, with its derivative."""

    def run_body(*inputs):
        return _jaxprs.run(jaxpr, *inputs)

    plain = functools.partial(_run_loop, run_body, is_sliced, operators, count)
    avals = [v.aval for v in jaxpr.jaxpr.outvars]
    main = next(
        (
            i
            for i, (op, aval) in enumerate(zip(operators, avals, strict=True))
            if getattr(op, "sums", False)
            and aval.shape == ()
            and jnp.issubdtype(aval.dtype, jnp.floating)
        ),
        None,
    )
    loop = jax.custom_vjp(plain)

    def forward(*primals):
        inputs = [p.value for p in primals]
        active = [
            i for i, p in enumerate(primals)
            if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact)
        ]  # fmt: skip
        if main is None or not active:
            return plain(*inputs), (inputs, None)
        first = main

        def with_gradient(*inputs):
            def of_active(*chosen):
                full = list(inputs)
                for i, x in zip(active, chosen, strict=True):
                    full[i] = x
                outputs = run_body(*full)
                return outputs[first], outputs

            value, pullback, outputs = jax.vjp(
                of_active, *(inputs[i] for i in active), has_aux=True
            )
            return [*outputs, *pullback(jnp.ones_like(value))]

        mean = _reductions.REDUCTIONS["mean"]
        total = _reductions.REDUCTIONS["sum"]
        share = operators[main]
        stacked = _reductions.Collect("stack", lambda s: s / count if share is mean else s)
        gradient_operators = [
            stacked if is_sliced[i] else (share if share is mean else total) for i in active
        ]
        results = _run_loop(
            with_gradient, is_sliced, [*operators, *gradient_operators], count, *inputs
        )
        outputs, gradients = results[: len(operators)], results[len(operators) :]
        return outputs, (inputs, dict(zip(active, gradients, strict=True)))

    def backward(residuals, cotangents):
        inputs, gradients = residuals
        result: list[Any] = [None] * len(inputs)
        rest = list(cotangents)
        if gradients is not None and main is not None:
            ct = cotangents[main]
            rest[main] = SymbolicZero(avals[main])
            if not isinstance(ct, SymbolicZero):
                for i, g in gradients.items():
                    result[i] = (ct * g).astype(g.dtype)
        if any(not isinstance(ct, SymbolicZero) for ct in rest):
            again = functools.partial(
                _run_loop, jax.checkpoint(run_body), is_sliced, operators, count
            )
            active = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]

            def of_active(*chosen):
                full = list(inputs)
                for i, x in zip(active, chosen, strict=True):
                    full[i] = x
                return again(*full)

            outputs, pullback = jax.vjp(of_active, *(inputs[i] for i in active))
            full = [
                _zero_cotangent(y) if isinstance(ct, SymbolicZero) else ct
                for ct, y in zip(rest, outputs, strict=True)
            ]
            for i, g in zip(active, pullback(full), strict=True):
                result[i] = g if result[i] is None else result[i] + g
        return tuple(result)

    loop.defvjp(forward, backward, symbolic_zeros=True)
    return loop


def _zero_cotangent(y):
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.zeros_like(y)
    return np.zeros(y.shape, jax.dtypes.float0)


def _run_loop(body: Callable, is_sliced, operators, count: int, *inputs: Any) -> list[Any]:
    """Scans `body` over the slices, folding or collecting each of its outputs."""
    whole = [x for x, s in zip(inputs, is_sliced, strict=True) if not s]
    slices = [x for x, s in zip(inputs, is_sliced, strict=True) if s]

    def call(whole, one):
        whole, one = iter(whole), iter(one)
        return body(*(next(one) if s else next(whole) for s in is_sliced))

    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in slices]
    shapes = jax.eval_shape(call, whole, one)
    folded = [i for i, op in enumerate(operators) if not isinstance(op, _reductions.Collect)]

    def step(accs, one):
        outputs = call(whole, one)
        accs = [operators[i].combine(acc, outputs[i]) for i, acc in zip(folded, accs, strict=True)]
        return accs, [y for i, y in enumerate(outputs) if i not in folded]

    init = [operators[i].init(shapes[i]) for i in folded]
    accs, stacked = jax.lax.scan(step, init, slices, length=count)
    accs, stacked = iter(accs), iter(stacked)
    return [
        op.finish(next(stacked))
        if isinstance(op, _reductions.Collect)
        else op.finish(next(accs), count)
        for op in operators
    ]


def _broadcast_axes(in_axes: Any, args: tuple) -> list[int | None]:
    """One axis or None per leaf of the arguments."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"microbatch: in_axes has {len(in_axes)} entries {in_axes}, but the function was "
            f"called with {len(args)} arguments; give one entry for each."
        )
    axes = _broadcast(in_axes, args, "in_axes", lambda a: a is None)
    wrong = [a for a in axes if a is not None and (isinstance(a, bool) or not isinstance(a, int))]
    if wrong:
        raise ValueError(
            f"microbatch: in_axes holds {wrong[0]!r}; each of its leaves is an int or None."
        )
    return axes


def _broadcast(prefix: Any, tree: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves of a prefix pytree, each repeated for the leaves of `tree` below it."""
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


def _resolve_outputs(reduce: Any, traced: _jaxprs.Traced) -> list[Any]:
    paths = traced.output_paths()
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.jaxpr.outvars]
    outputs = traced.rebuild(avals)
    named = _broadcast(
        reduce, outputs, "reduce", lambda r: r is None or isinstance(r, _reductions.Operator)
    )
    leaves = jtu.tree_leaves(outputs)
    named = [
        n for n, leaf in zip(named, leaves, strict=True) if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    return [_reductions.resolve(r, p, x) for r, p, x in zip(named, paths, avals, strict=True)]


def _check_sizes(leaves, axes, paths, count: int) -> None:
    sizes = {}
    for leaf, axis, path in zip(leaves, axes, paths, strict=True):
        if axis is None:
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
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"microbatch: the sliced arguments differ in their number of examples: "
            f"{', '.join(f'args{p}: {n}' for p, n in sizes.items())}."
        )


def _slice_type(x, axis: int, count: int) -> jax.ShapeDtypeStruct:
    x = jax.eval_shape(lambda x: x, x)  # NumPy's int64 is an int32 to JAX
    shape = list(x.shape)
    shape[axis] //= count
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _stack_slices(x, axis: int, count: int):
    """The slices of an array along a new first axis."""
    axis = axis % x.ndim
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0) if axis else x.reshape(shape)
