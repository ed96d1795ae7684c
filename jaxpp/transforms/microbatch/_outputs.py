"""The outputs of a slice: the operator of each, whether it fits, and whether it was meant."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxpp import jaxprs
from jaxpp._messages import warn
from jaxpp._specs import type_of
from jaxpp.jaxprs import Atom, Eqn, Jaxpr, Var, primitives
from jaxpp.transforms.microbatch import _reductions
from jaxpp.transforms.microbatch._arguments import ArgumentLeaf, broadcast, is_none
from jaxpp.transforms.microbatch._reductions import CARRY, Reduction


def resolve_outputs(
    reduce: Any, dtype: Any, traced: jaxprs.Traced, replicas: int = 1, merge: Any = None
) -> list[Reduction]:
    """Finds the operator of each array in the result, of its reduction and accumulator's dtype.

    With more than one of `replicas`, also how it merges their values.
    """
    paths = traced.output_paths()
    avals = [type_of(v.aval) for v in traced.jaxpr.jaxpr.outvars]
    outputs = traced.rebuild(avals)
    leaves = jtu.tree_leaves(outputs)

    def of_arrays(prefix: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
        named = broadcast(prefix, outputs, what, is_leaf)
        return [
            n for n, x in zip(named, leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)
        ]

    named = of_arrays(reduce, "reduce", _is_reduction)
    dtypes = of_arrays(dtype, "accumulator_dtype", is_none)
    operators = [
        _reductions.accumulate_in(_reductions.resolve(r, p, x), d, x)
        for r, d, p, x in zip(named, dtypes, paths, avals, strict=True)
    ]
    if replicas == 1:
        return operators
    merges = of_arrays(merge, "merge", is_none)
    return list(map(_reductions.with_merge, operators, merges, paths, avals))


def _is_reduction(x: Any) -> bool:
    return x is None or isinstance(x, _reductions.Operator)


def check_carried(
    inputs: Sequence[tuple[str, Any]], operators: Sequence[Reduction], traced: jaxprs.Traced
) -> None:
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


#: The reductions that give one value that all microbatches have; None is for what has no arrays.
_KEEPING = (None, "mean", "max", "last")


def check_static(reduce: Any, handed_on: Sequence[Any], traced: jaxprs.Traced) -> None:
    """Checks the outputs that are no arrays: they are the same in each slice, and in the result.

    Raises:
        ValueError: if a number among them would be another one, reduced.
    """
    outputs = traced.rebuild(np.zeros(()) for _ in traced.jaxpr.jaxpr.outvars)
    given_back = []
    for (path, x), how in zip(
        jtu.tree_flatten_with_path(outputs)[0],
        broadcast(reduce, outputs, "reduce", _is_reduction),
        strict=True,
    ):
        if jaxprs.is_array(x):
            continue
        if how == CARRY:
            given_back.append(x)
        elif isinstance(x, bool | int | float | complex) and how not in _KEEPING:
            raise ValueError(
                f"microbatch: output{jtu.keystr(path)} is {x!r}, a bool of Python or a number in "
                f"an Equinox module, which stays as it is, and has no {how!r}; return an array, "
                f"such as jnp.asarray({x!r})."
            )
    if len(handed_on) != len(given_back):
        raise ValueError(
            f"microbatch: {len(handed_on)} leaves that are no arrays are carried in, but "
            f"{len(given_back)} out; give them back as they were."
        )
    for x, y in zip(handed_on, given_back, strict=True):
        if not _is_same(x, y):
            raise ValueError(
                f"microbatch: {x!r} is carried in, and {y!r} out; they are no arrays, so that each "
                f"microbatch would get what the first one got. Give it back as it was, or carry an "
                f"array, such as jnp.asarray(0)."
            )


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and bool(x == y))


# ---- warnings of reductions that were hardly meant -----------------------------------------------

#: The name under which flax keeps values that a "gradient" overwrites: scales of float8, maxima.
_OVERWRITTEN = "_overwrite_with_gradient"


def warn_of_averages(
    traced: jaxprs.Traced, small: Sequence[Any], arguments: Sequence[ArgumentLeaf], count: int
) -> None:
    """Warns of outputs that the default reduction averages: entries of examples, and sums."""
    pairs = list(zip(small, arguments, strict=True))
    sizes = {x.shape[a.axis] for x, a in pairs if a.is_sliced} - {1}
    whole = [x for x, a in pairs if not a.is_sliced and jaxprs.is_array(x)]
    # An output with the shape of a parameter counts as its gradient.
    parameters = {x.shape for x in [*whole, *traced.inputs[: traced.num_closed_over]]}

    def of_examples(v: Atom) -> bool:
        shape = v.aval.shape
        return bool(shape) and shape[0] in sizes and shape not in parameters

    def sums_examples(eqn: Eqn) -> bool:
        return 0 in _summed_axes(eqn) and of_examples(eqn.invars[0])

    def keeps_sum(factor: float) -> bool:
        """Tells whether a sum over examples, times a number, is one still, and no mean of them."""
        if not factor or not math.isfinite(factor):
            return True
        shares = [1 / abs(factor * size) for size in sizes]
        return all(round(n) < 1 or abs(n / round(n) - 1) > 1e-3 for n in shares)

    jaxpr = traced.jaxpr.jaxpr
    for path, v in zip(traced.output_paths(), jaxpr.outvars, strict=True):
        where = f"microbatch: output{path} ({v.aval.dtype}{list(v.aval.shape)})"
        if of_examples(v):
            warn(
                f"{where} seems to have an entry for each of the {v.aval.shape[0]} examples of a "
                f"microbatch, and is averaged over the {count} microbatches. Give reduce= for it: "
                f"'concat' keeps those of all examples, 'mean' says that the average is meant."
            )
        elif () not in parameters and any(map(sums_examples, _sums(v, jaxpr, keeps_sum))):
            warn(
                f"{where} seems to be a sum over the examples of a microbatch, and is averaged "
                f"over the {count} microbatches: it, and each gradient of it, is {count} times "
                f"smaller than that of the batch. Give reduce='sum' for them; 'mean' says that the "
                f"average is meant."
            )


#: The primitives that a sum may go through before it is an output: it is a sum still.
_PASSED = primitives.FREE | primitives.ADDS | {"convert_element_type", "neg", "sub"}


def _summed_axes(eqn: Eqn) -> Sequence[int]:
    """Returns the axes of its first operand that an equation sums up, if its result is a number."""
    if eqn.primitive.name == "dot_general":
        return () if eqn.outvars[0].aval.shape else eqn.params["dimension_numbers"][0][0]
    return eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else ()


def _factor(eqn: Eqn) -> tuple[Atom, float] | None:
    """Returns what an equation multiplies by a number, or divides by one, and the factor."""
    if eqn.primitive.name not in ("mul", "div") or jnp.iscomplexobj(eqn.outvars[0].aval):
        return None
    a, b = eqn.invars
    if eqn.primitive.name == "div":
        return (a, 1 / float(b.val)) if jaxprs.is_literal(b) and b.val else None
    a, b = (b, a) if jaxprs.is_literal(a) else (a, b)
    return (a, float(b.val)) if jaxprs.is_literal(b) else None


def _sums(output: Atom, jaxpr: Jaxpr, keeps_sum: Callable[[float], bool]) -> list[Eqn]:
    """Finds the equations that sum up the terms of a scalar over axes of an array.

    `keeps_sum` tells whether a sum, times a number, is still one.
    """

    def enter(body: Jaxpr, operands: Sequence[Any]) -> tuple[dict[Var, Eqn], dict[Var, Any]]:
        makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        return makers, dict(zip(body.invars, operands, strict=True))

    found: list[Eqn] = []
    seen, rest = set(), [(output, enter(jaxpr, [None] * len(jaxpr.invars)))]
    while rest:
        v, (makers, operands) = rest.pop()
        if jaxprs.is_literal(v) or (v, id(makers)) in seen or v.aval.shape:
            continue
        seen.add((v, id(makers)))
        eqn, operand = makers.get(v), operands.get(v)
        if operand is not None:
            rest.append(operand)
        elif eqn is None or not jnp.issubdtype(v.aval.dtype, jnp.inexact):
            continue
        elif (called := jaxprs.called_jaxpr(eqn)) is not None:
            body = jaxprs.opened(called)
            inside = enter(body, [(x, (makers, operands)) for x in eqn.invars])
            rest.append((body.outvars[eqn.outvars.index(v)], inside))
        elif _summed_axes(eqn):
            found.append(eqn)
        elif (scaled := _factor(eqn)) is not None:
            rest += [(scaled[0], (makers, operands))] if keeps_sum(scaled[1]) else []
        elif eqn.primitive.name in _PASSED:
            rest += [(x, (makers, operands)) for x in eqn.invars]
    return found


def warn_of_overwritten(traced: jaxprs.Traced, operators: Sequence[Reduction]) -> None:
    """Warns of gradients that are added up, although they are the new values of a state."""
    for path, operator in zip(traced.output_paths(), operators, strict=True):
        if _OVERWRITTEN in path and _reductions.is_sum(operator):
            warn(
                f"microbatch: output{path} overwrites a state, as its name says, and has the "
                f"reduction {operator.name!r}. Give reduce= for what is in "
                f"{_OVERWRITTEN!r}: 'max' for the maxima and scales of float8."
            )
            return


def watched(x: Any, path: str) -> Any:
    """Finds an argument; if it is overwritten by its gradient, a derivative by it is warned of."""
    if _OVERWRITTEN not in path or not _reductions.is_inexact(x):
        return x
    same = jax.custom_jvp(lambda x: x)

    def along(primals, tangents):
        if not isinstance(tangents[0], SymbolicZero):
            warn(
                f"microbatch: the gradient by args{path} overwrites it, as its name says, but one "
                f"that is taken of the loop is a sum over the microbatches. Differentiate first: "
                f"microbatch(value_and_grad(f), M, reduce=...), with 'max' for it."
            )
        return primals[0], tangents[0]

    same.defjvp(along, symbolic_zeros=True)
    return same(x)
