"""The rules of primitives: for an equation, the function of terms that it is."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpp import _compat
from jaxpp.certification import _control
from jaxpp.certification._definition import SLICES
from jaxpp.certification._rows import ALL
from jaxpp.certification._table import MADE_HERE, SMALL, Term, full_of, name_of
from jaxpp.certification._terms import REDUCTIONS, moved_to_front
from jaxpp.jaxprs import Eqn

if TYPE_CHECKING:
    from jaxpp.certification._evaluate import Evaluator

Rule = Callable[[Sequence[Term]], Sequence[Term]]

#: They give their operands on, with a note to the compiler or to a transform.
_IDENTITIES = frozenset(
    """
    copy copy_p device_put layout_constraint name optimization_barrier pipeline_enter_stage
    random_clone reshard sharding_constraint stage_edge stop_gradient tie
    """.split()
)
#: They run a body as it is; each has it in one parameter.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "segment": "jaxpr",
}
#: These parameters say where arrays are, and not what they are.
_OF_PLACES = frozenset("in_layouts operand_sharding out_sharding sharding".split())
#: Their bits depend on a setting of JAX.
_RANDOM = frozenset("random_bits random_fold_in random_seed random_split threefry2x32".split())


def rule_of(evaluator: "Evaluator", eqn: Eqn) -> Rule:
    """The function of terms that an equation is."""
    name = eqn.primitive.name
    if not _compat.is_of_library(eqn.primitive):
        return unknown(evaluator, eqn)
    if name == "name" and eqn.params["name"] == SLICES:
        return lambda args: [evaluator.terms.slice_by_microbatch(args[0])]
    if name in _IDENTITIES:
        return lambda args: args
    if name in CALLS:
        body = body_of(eqn)
        return lambda args: evaluator.run(body, args)
    if name == "pipeline_loop":
        return functools.partial(evaluator.run_loop, eqn)
    if name in evaluator.control:
        return functools.partial(evaluator.control[name], evaluator, eqn)
    if eqn.effects:
        return unknown(evaluator, eqn)
    return _MOVES.get(name, operation)(evaluator, eqn)


def unknown(evaluator: "Evaluator", eqn: Eqn) -> Rule:
    """The rule of an equation as a whole, whatever is in it; it may have effects."""
    if not eqn.effects:
        return operation(evaluator, eqn)
    params = params_of(evaluator, eqn)
    return lambda args: _control.effect(evaluator, eqn, args, params)


def body_of(eqn: Eqn) -> Any:
    """The jaxpr that a call runs."""
    return eqn.params[CALLS[eqn.primitive.name]]


def params_of(evaluator: "Evaluator", eqn: Eqn) -> Any:
    """The parameters of an equation, hashable; equal for two traces of one function."""
    return tuple(
        (k, evaluator.parameters.key(v))
        for k, v in sorted(eqn.params.items())
        if k not in _OF_PLACES
    )


def _types(eqn: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(v.aval.shape, name_of(v.aval.dtype)) for v in eqn.outvars]


def operation(evaluator: "Evaluator", eqn: Eqn) -> Rule:
    terms, name = evaluator.terms, eqn.primitive.name
    if name == "convert_element_type":
        params: Any = ()
    elif name == "reduce_precision":
        params = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    else:
        params = params_of(evaluator, eqn)
    if name == "gather":
        sizes = zip(eqn.params["slice_sizes"], eqn.invars[0].aval.shape, strict=True)
        own = tuple(ALL if size == n else size for size, n in sizes)
        params = (*(p for p in params if p[0] != "slice_sizes"), ("slice_sizes", own))
    is_elementwise = name in MADE_HERE or evaluator.parameters.is_elementwise(eqn)
    if not _compat.is_of_library(eqn.primitive):
        name, is_elementwise = f"{name} of a user", False  # whatever its name says
    if name not in MADE_HERE:
        params += (("primitive", eqn.primitive),)
    if name in _RANDOM or name.startswith("random_"):
        params += (("partitionable", eqn.ctx.threefry_partitionable),)
    ops = [terms.op(name, params, *own, eqn, k) for k, own in enumerate(_types(eqn))]
    for op in ops:
        op.is_elementwise = is_elementwise
    return lambda args: [terms.operation(op, args) for op in ops]


# ---- moves --------------------------------------------------------------------------------------


def _reshape(evaluator, eqn) -> Rule:
    terms, (shape, _) = evaluator.terms, _types(eqn)[0]
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return operation(evaluator, eqn)
    return lambda args: (terms.reshape(args[0], shape),)


def _transpose(evaluator, eqn) -> Rule:
    terms, permutation = evaluator.terms, eqn.params["permutation"]
    return lambda args: (terms.transpose(args[0], permutation),)


def _broadcast(evaluator, eqn) -> Rule:
    terms, (shape, _) = evaluator.terms, _types(eqn)[0]
    if len(eqn.invars) > 1:
        return operation(evaluator, eqn)
    return lambda args: (terms.broadcast(args[0], shape, eqn.params["broadcast_dimensions"]),)


def _iota(evaluator, eqn) -> Rule:
    terms, (shape, dtype) = evaluator.terms, _types(eqn)[0]
    dimension, size = eqn.params["dimension"], shape[eqn.params["dimension"]]
    if size > SMALL or len(eqn.invars):
        return operation(evaluator, eqn)
    numbers = terms.constant(np.arange(size).astype(jnp.dtype(dtype)))
    return lambda args: (terms.broadcast(numbers, shape, (dimension,)),)


def _zeros(evaluator, eqn) -> Rule:
    terms, (shape, dtype) = evaluator.terms, _types(eqn)[0]
    return lambda args: (terms.full(0, shape, dtype),)


def _concatenate(evaluator, eqn) -> Rule:
    if eqn.params["dimension"]:
        return operation(evaluator, eqn)
    return lambda args: (evaluator.terms.join_rows(args),)


def _stack(evaluator, eqn) -> Rule:
    if eqn.params["axis"]:
        return operation(evaluator, eqn)
    return lambda args: (evaluator.terms.stack(args),)


def _split(evaluator, eqn) -> Rule:
    if eqn.params["axis"]:
        return operation(evaluator, eqn)
    cuts = [*itertools.accumulate(eqn.params["sizes"], initial=0)]
    return lambda args: [
        evaluator.terms.rows(args[0], low, high) for low, high in itertools.pairwise(cuts)
    ]


def _unstack(evaluator, eqn) -> Rule:
    if eqn.params["axis"]:
        return operation(evaluator, eqn)
    terms = evaluator.terms
    return lambda args: [terms.row(args[0], i) for i in range(args[0].shape[0])]


def _slice(evaluator, eqn) -> Rule:
    p = eqn.params
    bounds = p["start_indices"], p["limit_indices"], p["strides"]
    return lambda args: (_sliced(evaluator, args[0], *bounds),)


def _sliced(evaluator, t: Term, starts, limits, strides=None) -> Term:
    terms = evaluator.terms
    strides = strides or (1,) * len(starts)
    sizes = [high - low for low, high in zip(starts, limits, strict=True)]
    is_dense = all(stride == 1 for stride in strides)
    if is_dense and (axis := _only_cut(sizes, t.shape)) is not None:
        first, back = moved_to_front(axis, len(sizes))
        rows = terms.rows(terms.transpose(t, first), int(starts[axis]), int(limits[axis]))
        return terms.transpose(rows, back)
    if starts and strides[0] == 1:
        t = terms.rows(t, int(starts[0]), int(limits[0]))
        starts, limits = (0, *starts[1:]), (t.shape[0], *limits[1:])
    each = zip(starts, limits, strides, strict=True)
    shape = tuple(-(-(high - low) // step) for low, high, step in each)
    if shape == t.shape:
        return t
    if (number := full_of(t)) is not None:
        return terms.broadcast(number, shape, ())
    if t.name == "rows_joined" and strides[0] == 1:
        parts = [_sliced(evaluator, p, starts, (p.shape[0], *limits[1:]), strides) for p in t.args]
        return terms.join_rows(parts)
    params = (tuple(map(int, starts)), tuple(map(int, limits)), tuple(map(int, strides)))
    return terms.term("slice", params, (t,), shape, t.dtype)


def _pad(evaluator, eqn) -> Rule:
    terms, config, (shape, _) = evaluator.terms, eqn.params["padding_config"], _types(eqn)[0]
    if not any(map(any, config)):
        return lambda args: (args[0],)
    axes = [axis for axis, own in enumerate(config) if any(own)]
    low, high, inner = config[axes[0]]
    if len(axes) > 1 or inner or min(low, high) < 0:
        return operation(evaluator, eqn)
    first, back = moved_to_front(axes[0], len(shape))

    def pad_rows(args):
        moved = terms.transpose(args[0], first)
        sizes = [(n, *moved.shape[1:]) for n in (low, high)]
        below, above = (terms.broadcast(args[1], size, ()) for size in sizes)
        return (terms.transpose(terms.join_rows([below, moved, above]), back),)

    return pad_rows


def _clamped(starts: Sequence[Term], sizes: Sequence[int], shape: Sequence[int]) -> Any:
    """The start of a dynamic slice; None if it is not known."""
    values = [s.value for s in starts if s.value is not None]
    if len(values) < len(starts):
        return None
    each = zip(values, sizes, shape, strict=True)
    return [max(0, min(int(value), n - size)) for value, size, n in each]


def _only_cut(sizes: Sequence[int], shape: Sequence[int]) -> int | None:
    """The axis of which a slice has a part, if it has all of the others."""
    cut = [d for d, (n, own) in enumerate(zip(sizes, shape, strict=True)) if n != own]
    return cut[0] if len(cut) == 1 else None


def _dynamic_slice(evaluator, eqn) -> Rule:
    sizes, plain = eqn.params["slice_sizes"], operation(evaluator, eqn)

    def run(args):
        at = _clamped(args[1:], sizes, args[0].shape)
        if at is None:
            return plain(args)
        return (_sliced(evaluator, args[0], at, [a + n for a, n in zip(at, sizes, strict=True)]),)

    return run


def _dynamic_update_slice(evaluator, eqn) -> Rule:
    terms, plain = evaluator.terms, operation(evaluator, eqn)

    def run(args):
        whole, new, *starts = args
        at = _clamped(starts, new.shape, whole.shape)
        if new.shape == whole.shape:
            return (new,)
        if at is None or (axis := _only_cut(new.shape, whole.shape)) is None:
            return plain(args)
        first, back = moved_to_front(axis, len(at))
        whole, new = terms.transpose(whole, first), terms.transpose(new, first)
        end = at[axis] + new.shape[0]
        below, above = terms.rows(whole, 0, at[axis]), terms.rows(whole, end, whole.shape[0])
        return (terms.transpose(terms.join_rows([below, new, above]), back),)

    return run


def _reduce(evaluator, eqn) -> Rule:
    terms, name, axes = evaluator.terms, eqn.primitive.name, eqn.params["axes"]
    return lambda args: (terms.reduce(args[0], name, axes),)


_MOVES = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
    "zeros_like": _zeros,
    **dict.fromkeys(REDUCTIONS, _reduce),
}
