"""Puts calls of modules of Flax NNX under scopes of their paths, as other libraries do.

NNX makes no scopes. A function may get its model as a module, or as a state that it merges into a
module. While the function is traced, a call of `model.layers[2].linear` is under the scope
`linear`, inside the scope `layers.2` of the call around it.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from jaxpp.transforms.stages import _modules

Path = tuple[str, ...]


def scoping() -> _modules.Watcher:
    """Puts each call of a module of Flax NNX under a scope."""
    nnx = sys.modules.get("flax.nnx")  # a user with such a module has imported it
    classes = set() if nnx is None else _modules.subclasses(nnx.Module)
    called = (c for c in classes if any("__call__" in vars(b) for b in c.__mro__))
    return _modules.Watcher(frozenset(called), _scoper)


def _scoper(model: Any) -> _modules.Handler:
    arrays = {id(leaf): path for path, leaf in _leaves(model)}
    paths: dict[int, Path] = {}
    known: list[Any] = []  # keeps the modules alive whose ids are in `paths`
    around: list[Path] = []

    def learn(module: Any) -> None:
        """Notes the paths of a module that is called, and of the modules inside it."""
        found = [(path, arrays[id(leaf)]) for path, leaf in _leaves(module) if id(leaf) in arrays]
        # The module's path in the first argument, by one of its arrays; empty if it has none there.
        start = found[0][1][: len(found[0][1]) - len(found[0][0])] if found else ()
        for path, inner in sys.modules["flax.nnx"].iter_modules(module):
            paths[id(inner)] = (*start, *map(str, path))
            known.append(inner)

    def call_in_scope(module: Any, call: Callable, *args, **kwargs) -> Any:
        if id(module) not in paths:
            learn(module)
        path = paths[id(module)]
        outer = around[-1] if around else ()
        own = path[len(outer) :] if path[: len(outer)] == outer else path
        around.append(path)
        try:
            with jax.named_scope(".".join(own)) if own else contextlib.nullcontext():
                return call(*args, **kwargs)
        finally:
            around.pop()

    return call_in_scope


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
    """Lists the leaves of a module or a state, with the names on their paths."""
    leaves = jtu.tree_flatten_with_path(tree)[0]
    return [(tuple(jtu.keystr((k,), simple=True) for k in path), leaf) for path, leaf in leaves]
