"""`microbatch`: runs a function on slices of its arguments, one after the other."""

import functools
from collections.abc import Callable

import jax.tree_util as jtu
import numpy as np
from jaxtyping import DTypeLike, PyTree

from jaxpp import jaxprs
from jaxpp._spellings import names_ours
from jaxpp.jaxprs import P, R, definition_of
from jaxpp.transforms import _signature
from jaxpp.transforms.microbatch import (
    _arguments,
    _outputs,
    _reductions,
    _slices,
)
from jaxpp.transforms.microbatch._reductions import CARRY


class _Default(str):
    """A reduction that the user did not ask for."""


@names_ours
def microbatch(
    fun: Callable[P, R],
    num_microbatches: int,
    *,
    in_axes: PyTree[int | str | None] = (None, 0),
    reduce: PyTree[str | _reductions.Operator] = _Default("mean"),  # noqa: B008
    accumulator_dtype: PyTree[DTypeLike | None] = _reductions.AUTO,
    replicas: int = 1,
    merge: PyTree[str | Callable | None] = None,
) -> Callable[P, R]:
    """Runs `fun` on slices of its arguments and combines the results, in the memory of one slice.

    It makes one `lax.scan` over the slices. `microbatch(jax.value_and_grad(f), M)` and
    `jax.value_and_grad(microbatch(f, M))` do the same work: the second accumulates the gradient of
    each scalar mean or sum slice by slice, in the forward pass; `jax.jit` leaves out gradients that
    are not read. If you differentiate another output, as in a loss over the whole batch of "concat"
    outputs, all gradients take a second pass over the slices, forwards and backwards. A function
    with a scalar mean or sum, or a "max", cannot be differentiated in forward mode; its gradient
    can.

    A state that each slice takes over from the slice before it (the running statistics of
    BatchNorm, a recurrent state, a random key) is `"carry"` in both `in_axes` and `reduce`: the
    arrays carried out of one slice go, in the order of their leaves, into the next one. The result
    is that of a loop over the slices in order; a schedule with another order is an error.

    If `fun` is a mean over examples that all count alike, the mean of the slices is that of the
    batch. A mean over the tokens that a mask keeps is the quotient of two sums: return the sum and
    the count, give `reduce="sum"`, and divide after the loop. The gradient of a sum is a `"sum"`.

    The "gradient" of some states is their new value (the scales and largest magnitudes of float8
    layers). It cannot be averaged: differentiate inside of the loop, and give it `"max"`. There is
    a warning if an output of the name `"_overwrite_with_gradient"`, as in Flax, is added up.

    With `replicas`, the batch has D replicas of M slices: replica d's m-th slice is number
    d * M + m. Each replica adds up its own, and after the loop the sums of the replicas are added
    up once, in their order. That is data parallelism: on a mesh, `place` gives each replica devices
    of its own, and nothing goes between them in the loop. Like `jax.pmap`, and unlike a sharded
    batch, it shows `fun` the examples of one replica: the statistics of a BatchNorm, a balance loss
    and a masked mean are those of its slice, so return sums and counts for what is meant of the
    whole batch. A `"sum"` has D * M slices. A function with replicas cannot be differentiated in
    forward mode.

    Args:
        fun: a function of pytrees.
        num_microbatches: the number of slices of a replica, M.
        in_axes: as in `jax.vmap`, an int or None for each argument, or a prefix of its pytree: the
            axis to slice; None passes the whole. Slice i holds the i-th run of `size / M` indices.
            The sizes are the same, or M for an array with an entry for each slice. Such an array,
            unless it is one of random keys, needs an entry of its own in `in_axes`; one that the
            entry of the batch covers is an error. `"carry"` passes the whole to the first slice,
            and to each further slice the value that the slice before it gave back. A keyword
            argument has the entry of its position in `fun`; as in `jax.vmap`, one without an entry
            is sliced along its first axis.
        reduce: how each output is combined, a prefix of the result's pytree: `"mean"`, `"sum"`,
            `"max"`, `"last"`, `"stack"` (a new first axis of size M), `"concat"` (along the first
            axis), `"carry"` (goes into the next slice; the last one is the result), or an object
            with `init`, `combine` and `finish` (see `jaxpp.Operator`). By default it is `"mean"`
            for all, with a warning where an output has an entry for each example (predictions that
            `has_aux` gives), which should be `"concat"`, or is a sum over the examples. A Python
            number is reduced as an array is; a number in an Equinox module, a bool and all else
            stay as they are. Integers have no `"mean"`.
        accumulator_dtype: the floating-point dtype in which `"mean"` and `"sum"` accumulate and
            return floats, and in which gradients taken of the loop are added up; a prefix of the
            result's pytree. By default, `"auto"`, float16, bfloat16 and float8 accumulate in
            float32, which takes the memory of float32, and come back in their own dtype. None
            accumulates in each output's own dtype. With float32 the gradients by bfloat16
            parameters come back as float32, too.
        replicas: the number of replicas, D. All that is said of M slices here is then said of
            D * M: an array with an entry for each slice has D * M entries, `"stack"` and
            `"concat"` keep the order of the examples, and `"last"` is that of the last replica. A
            `"carry"` begins as it is given in each replica.
        merge: with replicas, how the last values of a `"carry"` become one; a prefix of the
            result's pytree. A name (`"mean"`, which floats have by default, `"sum"`, `"max"` or
            `"last"`), or a function of the values stacked along a new first axis.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: if the size of a sliced axis is not a multiple of D * M, or differs between
            arguments; if an array in the batch has as many entries, which may be one for each
            slice; if an output has no such reduction, or it is not known how to merge it over
            replicas; if `accumulator_dtype` holds no floating dtype; or if what is carried out of
            a slice does not fit what is carried in.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> float(grad(3.0 * jnp.ones(()), jnp.arange(4.0)))
        21.0
        >>> masked = lambda w, x: (jnp.sum(jnp.where(x > 0, x * w, 0)), jnp.sum(x > 0))
        >>> total, count = jaxpp.microbatch(masked, 2, reduce="sum")(2.0, jnp.arange(4.0))
        >>> float(total / count)
        4.0
        >>> smooth = lambda state, x: (jnp.mean(x - state), state / 2 + jnp.mean(x) / 2)
        >>> follow = jaxpp.microbatch(smooth, 2, in_axes=("carry", 0), reduce=("stack", "carry"))
        >>> error, state = follow(jnp.zeros(()), jnp.arange(4.0))
        >>> error.tolist(), float(state)
        ([0.5, 2.25], 1.375)
        >>> apart = jaxpp.microbatch(jnp.sum, 2, in_axes=0, reduce="stack", replicas=2)
        >>> apart(jnp.arange(8.0)).tolist()
        [1.0, 5.0, 9.0, 13.0]
    """
    return microbatch_by(
        fun, num_microbatches, in_axes, lambda trace: reduce, accumulator_dtype, replicas, merge
    )


def microbatch_by(
    fun: Callable[P, R],
    num_microbatches: int,
    in_axes: PyTree[int | str | None],
    reduce: Callable[[Callable[[], jaxprs.Traced]], PyTree[str | _reductions.Operator]],
    accumulator_dtype: PyTree[DTypeLike | None] = _reductions.AUTO,
    replicas: int = 1,
    merge: PyTree[str | Callable | None] = None,
) -> Callable[P, R]:
    """Does as `microbatch`, with a `reduce` that may ask for `fun`, traced on a slice."""
    for name, number in (("num_microbatches", num_microbatches), ("replicas", replicas)):
        if not isinstance(number, int | np.integer) or number is True or number < 1:
            raise ValueError(f"microbatch: {name} must be an int and at least 1, got {number!r}.")
    if merge is not None and replicas == 1:
        raise ValueError(
            "microbatch: merge says how the values of several replicas become one; give replicas, "
            "or leave it out."
        )
    replicas = int(replicas)
    count = int(num_microbatches) * replicas

    @functools.wraps(fun)
    def microbatched(*args: P.args, **kwargs: P.kwargs) -> R:
        if define := definition_of("microbatch"):
            options = (count, in_axes, reduce, accumulator_dtype, replicas, merge)
            return define(fun, *options)(*args, **kwargs)
        most = len(in_axes) if isinstance(in_axes, tuple | list) else None
        given = _signature.as_positional(fun, args, kwargs, most)
        jaxprs.refuse_array_likes(given)
        jaxprs.warn_of_shared("microbatch", given)
        arguments = _arguments.with_axes(in_axes, given)
        handed_on = [a.value for a in arguments if a.axis == CARRY and not jaxprs.is_array(a.value)]
        arguments = [a.whole_unless_array() for a in arguments]
        _arguments.check_sizes(given, arguments, count, replicas)
        small = [a.of_slice(count) for a in arguments]
        try:
            slices = jtu.tree_unflatten(jtu.tree_structure(given), small)
            traced = jaxprs.trace(_with_arrays(fun), slices)
        except (TypeError, ValueError) as error:
            if not _arguments.note_on_keys(error, arguments):
                _arguments.note_on_slices(error, arguments, count)
            raise
        chosen = reduce(lambda: traced)
        if isinstance(chosen, _Default):
            _outputs.warn_of_averages(traced, small, arguments, count)
        operators = _outputs.resolve_outputs(chosen, accumulator_dtype, traced, replicas, merge)
        _outputs.warn_of_overwritten(traced, operators)
        pairs = zip(arguments, small, strict=True)
        carried = [(a.path, x) for a, x in pairs if a.axis == CARRY]
        _outputs.check_carried(carried, operators, traced)
        _outputs.check_static(chosen, handed_on, traced)
        # Inputs of the traced jaxpr: the arrays closed over, then the array leaves in order.
        inputs = list(traced.inputs[: traced.num_closed_over])
        roles = ["whole"] * len(inputs)
        for a in arguments:
            if isinstance(a.axis, int):
                inputs.append(_arguments.stack_slices(a.value, a.axis, count))
                roles.append("slice")
            elif jaxprs.is_array(a.value):
                inputs.append(_outputs.watched(a.value, a.path))
                roles.append("whole" if a.axis is None else CARRY)
        loop = _slices.loop_over_slices(traced.jaxpr, roles, operators, count, replicas)
        return traced.rebuild(loop(*inputs))

    return microbatched


def _with_arrays(fun: Callable) -> Callable:
    """Makes `fun` a function of positional arguments, in whose result numbers are arrays.

    As in the arguments of `place`, a number in an Equinox module stays as it is.
    """
    positional = _signature.positional(fun)

    @functools.wraps(fun)
    def call(*args):
        return _signature.with_arrays((positional(*args),), ())[0]

    return call
