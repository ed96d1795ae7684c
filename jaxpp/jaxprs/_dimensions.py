"""Finds the dimensions of an equation's operands again among those of its results.

There is one small function for each kind of primitive, in a table by primitive name. Shardy calls
this an operation's sharding rule (openxla.org/shardy, "Sharding propagation").
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpp.jaxprs import primitives

#: For each operand and each of its dimensions, the same dimension of the results, which they share.
#: A number past these is for a dimension that operands alone have, the same where they share it: it
#: is summed, or reduced in another way. `None` is for one that nothing else has: it is indexed ...
Found = list[tuple[int | None, ...]]


def found_again(eqn) -> Found | None:
    """Finds the dimensions of an equation's operands in its results.

    Args:
        eqn: an equation whose primitive has one result, or several of the same dimensions.

    Returns:
        for each operand a tuple with an entry for each of its dimensions, or `None` for a primitive
        that has no rule here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> found_again(jaxpr.eqns[0])
        [(0, 2), (2, 1)]
    """
    rule = RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, [shape_of(v) for v in eqn.invars])


def shape_of(atom) -> tuple[int, ...]:
    """Returns the shape of an atom's value; `()` for one that is not an array."""
    return tuple(getattr(atom.aval, "shape", ()))


def _where_equal(shape: Sequence[int], result: Sequence[int]) -> tuple[int | None, ...]:
    """Finds dimensions in the same order, but for those of another size."""
    return tuple(i if i < len(result) and n == result[i] else None for i, n in enumerate(shape))


def _removed(shape: Sequence[int], dropped: Sequence[int]) -> tuple[int | None, ...]:
    """Finds dimensions in the same order, in results that lack those dropped."""
    order = [*(i for i in range(len(shape)) if i not in dropped), *dropped]
    return tuple(order.index(i) for i in range(len(shape)))


def _same(eqn, shapes) -> Found:
    """Finds each dimension, even of another size: a result has a part of it, or has it padded."""
    return [tuple(range(len(shape))) for shape in shapes]


def _aligned(eqn, shapes) -> Found:
    """Finds each dimension, but for those repeated (of size 1) or of which a part is taken.

    A key has its bits in further dimensions, and an element its bytes.
    """
    return [_where_equal(shape, shape_of(eqn.outvars[0])) for shape in shapes]


def _dot_general(eqn, shapes) -> Found:
    summed, batch = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(shape)) if d not in (*own, *shared)]
        for shape, own, shared in zip(shapes, summed, batch, strict=True)
    ]
    left = [*batch[0], *free[0], *(None for _ in free[1]), *summed[0]]
    right = [*batch[1], *(None for _ in free[0]), *free[1], *summed[1]]
    return [
        tuple(order.index(d) for d in range(len(shape)))
        for order, shape in zip((left, right), shapes, strict=True)
    ]


def _transpose(eqn, shapes) -> Found:
    permutation = list(eqn.params["permutation"])
    return [tuple(permutation.index(i) for i in range(len(permutation)))]


def _broadcast(eqn, shapes) -> Found:
    to, result = eqn.params["broadcast_dimensions"], shape_of(eqn.outvars[0])
    operand = tuple(int(d) if n == result[d] else None for n, d in zip(shapes[0], to, strict=True))
    return [operand, *((None,) * len(s) for s in shapes[1:])]


def _reduction(eqn, shapes) -> Found:
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    return [_removed(shape, axes) for shape in shapes]


_ALIGNED = """
    bitcast_convert_type dynamic_slice random_bits random_split random_unwrap random_wrap
""".split()

_SAME = "concatenate cumlogsumexp cummax cummin cumprod cumsum pad rev slice sort split".split()

_REDUCTIONS = """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor squeeze
""".split()

RULES: dict[str, Callable[[Any, list[tuple[int, ...]]], Found]] = {
    **dict.fromkeys(primitives.ELEMENTWISE | primitives.CONVERGING, _aligned),
    **dict.fromkeys([*primitives.HANDS_ON, *_ALIGNED], _aligned),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "transpose": _transpose,
    "unstack": lambda eqn, shapes: [_removed(shapes[0], (eqn.params["axis"],))],
}
