"""Edits of what is said of results and arguments, and of constants beside computations."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp._program import Bundle


def _with_result(bundle: Bundle, n: int, **changes: Any) -> Bundle:
    results = list(bundle.results)
    results[n] = dataclasses.replace(results[n], **changes)
    return dataclasses.replace(bundle, results=tuple(results))


def without_result(rng: random.Random, bundle: Bundle) -> Bundle | None:
    n = rng.randrange(len(bundle.results))
    kept = [k for k in range(len(bundle.results)) if k != n]
    programs = tuple(
        dataclasses.replace(p, outputs=tuple((kept.index(k), s) for k, s in p.outputs if k != n))
        for p in bundle.programs
    )
    return dataclasses.replace(
        bundle, results=tuple(bundle.results[k] for k in kept), programs=programs
    )


def other_weak_type(rng: random.Random, bundle: Bundle) -> Bundle | None:
    n = rng.randrange(len(bundle.results))
    aval = bundle.results[n].aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    return _with_result(bundle, n, aval=aval.update(weak_type=not aval.weak_type))


def other_dtype(rng: random.Random, bundle: Bundle) -> Bundle | None:
    n = rng.randrange(len(bundle.results))
    aval = bundle.results[n].aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    other = rng.choice([d for d in ("float32", "bfloat16", "int32", "bool") if d != aval.dtype])
    return _with_result(bundle, n, aval=aval.update(dtype=jnp.dtype(other)))


def other_memory(rng: random.Random, bundle: Bundle) -> Bundle | None:
    n = rng.randrange(len(bundle.results))
    aval, host = bundle.results[n].aval, jax.memory.Space.Host
    other = jax.memory.Space.Device if aval.memory_space == host else host
    return _with_result(bundle, n, aval=aval.update(memory_space=other))


def other_array(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """Two results change their arrays."""
    results = bundle.results
    pairs = [
        (a, b)
        for a in range(len(results))
        for b in range(a)
        if results[a].array != results[b].array and results[a].rows == results[b].rows
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    new = list(results)
    new[a] = dataclasses.replace(results[a], array=results[b].array)
    new[b] = dataclasses.replace(results[b], array=results[a].array)
    return dataclasses.replace(bundle, results=tuple(new))


def other_rows(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """Two results that are rows of an array change places, or arguments."""
    name = rng.choice(["results", "arguments"])
    records: Any = getattr(bundle, name)
    pairs = [
        (a, b)
        for a in range(len(records))
        for b in range(a)
        if records[a].array == records[b].array and records[a].aval.shape == records[b].aval.shape
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    new = list(records)
    new[a] = dataclasses.replace(records[a], rows=records[b].rows)
    new[b] = dataclasses.replace(records[b], rows=records[a].rows)
    return dataclasses.replace(bundle, **{name: tuple(new)})


def _with_program(bundle: Bundle, rank: int, **changes: Any) -> Bundle:
    programs = list(bundle.programs)
    programs[rank] = dataclasses.replace(programs[rank], **changes)
    return dataclasses.replace(bundle, programs=tuple(programs))


def one_slot(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """Two results of a rank are in one slot."""
    rank = rng.randrange(len(bundle.programs))
    outputs = list(bundle.programs[rank].outputs)
    pairs = [
        (a, b)
        for a in range(len(outputs))
        for b in range(len(outputs))
        if a != b
        and str(bundle.results[outputs[a][0]].aval) == str(bundle.results[outputs[b][0]].aval)
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    outputs[a] = outputs[a][0], outputs[b][1]
    return _with_program(bundle, rank, outputs=tuple(outputs))


def swap_arguments(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """Two arguments of a rank change places."""
    rank = rng.randrange(len(bundle.programs))
    inputs = list(bundle.programs[rank].inputs)
    pairs = [
        (a, b)
        for a in range(len(inputs))
        for b in range(a)
        if str(bundle.arguments[inputs[a][0]].aval) == str(bundle.arguments[inputs[b][0]].aval)
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    inputs[a], inputs[b] = (inputs[a][0], inputs[b][1]), (inputs[b][0], inputs[a][1])
    return _with_program(bundle, rank, inputs=tuple(inputs))


def other_constant(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """An element of a constant that is there before the step is another one."""
    rank = rng.randrange(len(bundle.programs))
    constants = list(bundle.programs[rank].constants)
    if not constants:
        return None
    k = rng.randrange(len(constants))
    slot, value = constants[k]
    if jnp.issubdtype(value.dtype, jax.dtypes.extended) or not np.size(value):
        return None
    new = np.array(value)
    at = tuple(rng.randrange(n) for n in new.shape)
    new[at] = ~new[at] if new.dtype.kind in "b" else new[at] + 1
    kind = jnp.asarray if isinstance(value, jax.Array) else np.asarray
    constants[k] = slot, kind(new, dtype=new.dtype)
    return _with_program(bundle, rank, constants=tuple(constants))


def not_donated(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """A record says that the caller keeps an argument, whose memory is taken."""
    n = rng.randrange(len(bundle.arguments))
    arguments = list(bundle.arguments)
    arguments[n] = dataclasses.replace(arguments[n], donated=not arguments[n].donated)
    return dataclasses.replace(bundle, arguments=tuple(arguments))


def other_donation(rng: random.Random, bundle: Bundle) -> Bundle | None:
    """A computation takes the memory of one more of its operands, or of one less."""
    n = rng.randrange(len(bundle.computations))
    computation = bundle.computations[n]
    if not computation.jaxpr.in_avals:
        return None
    i, donated = rng.randrange(len(computation.jaxpr.in_avals)), set(computation.donated)
    donated = tuple(sorted(donated ^ {i}))
    computations = list(bundle.computations)
    computations[n] = dataclasses.replace(computation, donated=donated)
    return dataclasses.replace(bundle, computations=tuple(computations))


KINDS = [
    without_result,
    other_weak_type,
    other_dtype,
    other_memory,
    other_array,
    other_rows,
    one_slot,
    swap_arguments,
    other_constant,
    other_donation,
    not_donated,
]
