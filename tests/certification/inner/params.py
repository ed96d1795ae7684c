"""Edits of numbers and parameters."""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from jaxpp import _compat, jaxprs
from tests.certification.inner.places import Change, Place


def other_number(p: Place) -> Change | None:
    """A literal, or an element of an array that stands in an equation, is another one."""
    places = [
        k
        for k, v in enumerate(p.eqn.invars)
        if jaxprs.is_literal(v) and getattr(v.aval, "dtype", None) is not None
        and np.dtype(v.aval.dtype).kind in "fiubcV"
    ]  # fmt: skip
    if not places:
        return None
    k = p.rng.choice(places)
    old = p.eqn.invars[k]
    value = np.array(old.val, old.aval.dtype)
    if not value.size:
        return None
    at = tuple(p.rng.randrange(n) for n in value.shape)
    new, one = value.copy(), value[at]
    if value.dtype.kind == "b":
        new[at] = not one
    elif value.dtype.kind in "iu":
        with np.errstate(all="ignore"):
            new[at] = one + value.dtype.type(1) if p.rng.random() < 0.5 else ~one
    else:
        with np.errstate(all="ignore"):
            numbers = [one + 1, -one, one * 1.0009765625, 0 * one, 1 / one, np.nan, -np.inf, -0.0]
            new[at] = p.rng.choice(numbers)
    if new.tobytes() == value.tobytes():
        return None
    invars = list(p.eqn.invars)
    invars[k] = jaxprs.literal(new, old.aval)
    return p.replaced(invars=invars)


#: Their values say where or how something runs, and not what it gives.
NEUTRAL = frozenset(
    """
    name in_layouts out_layouts in_shardings out_shardings donated_invars keep_unused inline
    compiler_options_kvs ctx_mesh sharding out_sharding mesh in_specs out_specs newly_manual_axes
    check_vma prevent_cse differentiated policy debug_info jvp_jaxpr_fun fwd_jaxpr_thunk bwd
    length unroll _split_transpose num_consts linear const_lengths cond_nconsts body_nconsts
    num_carry out_trees symbolic_zeros weak_type jaxpr branches cond_jaxpr body_jaxpr call_jaxpr
    callback effect accuracy
    """.split()
)


def other_parameter(p: Place) -> Change | None:
    """A parameter is another one: a number, an axis, a flag, a mode."""
    names = [n for n in p.eqn.params if n not in NEUTRAL]
    if not names:
        return None
    name = p.rng.choice(sorted(names))
    old = p.eqn.params[name]
    new = _other(p, old)
    if old is None and name == "fill_value":
        new = p.rng.choice([0.0, 5.0])
    if new is None or new == old:
        return None
    if name.startswith(("ax", "dim")) and _has_negative(new):
        return None
    if p.name in COLLECTIVES and not _fits(p, name, new):
        return None
    params = {**p.eqn.params, name: new}
    if p.name in (*COLLECTIVES, "get", "swap", "addupdate", "scan", "pallas_call"):
        return p.replaced(params=params)
    return p.instead(p.bind(params))


def _fits(p: Place, name: str, new: Any) -> bool:
    """Whether a collective can have a parameter: a dimension that there is, or other devices."""
    if name in ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis"):
        return 0 <= new < len(p.eqn.invars[0].aval.shape)
    return name in ("perm", "axis_index_groups")


def _has_negative(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_negative, value))
    return isinstance(value, int) and value < 0


#: They cannot be traced outside of the devices.
COLLECTIVES = frozenset(
    """
    psum psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_to_all
    reduce_scatter axis_index pvary
    """.split()
)


def _other(p: Place, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return p.rng.choice([m for m in type(value) if m is not value] or [None])
    if isinstance(value, int):
        return value + p.rng.choice([-1, 1])
    if isinstance(value, float):
        return p.rng.choice([value + 1, -value, 0.0])
    if isinstance(value, tuple | list) and value:
        kind: Any = type(value)
        make = (lambda items: kind(*items)) if hasattr(value, "_fields") else kind
        items = list(value)
        if p.rng.random() < 0.5:
            p.rng.shuffle(items)
            return make(items)
        k = p.rng.randrange(len(items))
        if (new := _other(p, items[k])) is None:
            return None
        items[k] = new
        return make(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        field = p.rng.choice(dataclasses.fields(value)).name
        if (new := _other(p, getattr(value, field))) is None:
            return None
        return dataclasses.replace(value, **{field: new})
    return None


def other_length(p: Place) -> Change | None:
    """A scan over nothing runs once more, or less."""
    if p.name != "scan":
        return None
    num_consts, num_carry = _compat.scan_parts(p.eqn)
    if len(p.eqn.invars) > num_consts + num_carry or len(p.eqn.outvars) > num_carry:
        return None
    length = p.eqn.params["length"] + p.rng.choice([-1, 1])
    return p.replaced(params={**p.eqn.params, "length": length})


def other_settings(p: Place) -> Change | None:
    """Random numbers are made under another setting of JAX."""
    if not p.name.startswith(("random_", "threefry")):
        return None
    with jax.threefry_partitionable(not p.eqn.ctx.threefry_partitionable):
        return p.instead(p.bind())


KINDS = [other_number, other_number, other_parameter, other_parameter, other_length, other_settings]
