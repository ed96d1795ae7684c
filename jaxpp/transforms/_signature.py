"""The types of a placed step's arguments: for which calls it has been compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp import _jaxprs
from jaxpp._program import Fed


@dataclasses.dataclass(frozen=True)
class Signature:
    """The types of a call's leaves: an aval for an array, the value itself for a static leaf."""

    tree: Any
    avals: tuple[Any, ...]
    arrays: tuple[int, ...]
    static: tuple[Any, ...]

    @property
    def leaves(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The static leaves, None for an array, and the types of arrays, None for a static one."""
        return self.static, self.avals

    @staticmethod
    def of(leaves: Sequence[Any], tree: Any) -> "Signature":
        is_array = [_jaxprs.is_array(leaf) for leaf in leaves]
        avals = tuple(type_of(x) if a else None for x, a in zip(leaves, is_array, strict=True))
        static = tuple(None if a else x for x, a in zip(leaves, is_array, strict=True))
        return Signature(tree, avals, tuple(i for i, a in enumerate(is_array) if a), static)

    def matches(self, leaves: Sequence[Any], tree: Any) -> bool:
        if tree != self.tree:
            return False
        for leaf, aval, value in zip(leaves, self.avals, self.static, strict=True):
            if aval is None:
                if leaf is not value and (type(leaf) is not type(value) or leaf != value):
                    return False
                if _jaxprs.is_array(leaf):
                    return False
            elif isinstance(leaf, jax.Array):
                own = leaf.aval
                if own.shape != aval.shape or own.dtype != aval.dtype:
                    return False
                if own.weak_type != aval.weak_type:
                    return False
            elif not _jaxprs.is_array(leaf) or type_of(leaf) != aval:
                return False
        return True

    def changed_counts(self, leaves: Sequence[Any], tree: Any) -> frozenset[int]:
        """Where leaves differ by the value of an `int`, if they differ by nothing else."""
        if tree != self.tree:
            return frozenset()
        like, changed = list(leaves), set()
        for i, (leaf, aval, value) in enumerate(zip(leaves, self.avals, self.static, strict=True)):
            if type(leaf) is int and -(2**31) <= leaf < 2**31:
                if aval is not None:
                    like[i] = jnp.asarray(leaf)
                    changed.add(i)
                elif type(value) is int and leaf != value:
                    like[i] = value
                    changed.add(i)
        return frozenset(changed) if changed and self.matches(like, tree) else frozenset()

    def difference(self, args: Any) -> str:
        leaves, tree = jtu.tree_flatten_with_path(args)
        if tree != self.tree:
            own, known = jtu.treedef_children(tree), jtu.treedef_children(self.tree)
            if len(own) != len(known):
                return f"there are {len(own)} of them, not {len(known)}"
            apart = next(n for n, (a, b) in enumerate(zip(own, known, strict=True)) if a != b)
            return f"args[{apart}] has another structure"
        for (path, leaf), aval, value in zip(leaves, self.avals, self.static, strict=True):
            now = type_of(leaf) if _jaxprs.is_array(leaf) else leaf
            known = value if aval is None else aval
            if now != known:
                return f"args{jtu.keystr(path)} is {_describe(now)}, not {_describe(known)}"
        return "none"


def type_of(array: Any) -> jax.ShapeDtypeStruct:
    """An array's type without where it is, which differs between what a user and a step give."""
    # What lives in another process is an array with a type, and nothing else that JAX knows.
    aval = array.aval if isinstance(array, jax.Array | Fed) else jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _describe(value: Any) -> str:
    """A type as JAX writes it, or a static value."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return repr(value)
    weak = ", weakly typed" if value.weak_type else ""
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}]{weak}"
