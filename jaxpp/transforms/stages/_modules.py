"""Finds the submodules of an Equinox model, and their calls in a traced function.

While the function is traced, each call of a module of the wanted classes leaves an announcement: an
identity on the call's arrays that also reads the module's own arrays. The model keeps its types and
structure, so that a user's `isinstance`, `jax.tree.map` or `eqx.combine` see no change. The object
tells which module was called. If the object was rebuilt on the way (by a cast, `eqx.combine`,
`eqx.filter_checkpoint`), the arguments that its arrays were computed from tell it.
"""

import collections
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import inspect
import operator
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir

from jaxpp import _compat, _jaxprs
from jaxpp.transforms.stages import _layers, _marks

# ---- naming modules -----------------------------------------------------------------------------


def resolve_modules(model: Any, at: Any) -> list[tuple[str, Any]] | None:
    """Finds the submodules that `at` names, with their paths; None if `at` does not name modules.

    A path that ends with the index of a layer of stacked modules gives a `_layers.Layer`.
    """
    if not isinstance(model, eqx.Module):
        if callable(at):
            raise ValueError(
                "split_stages: `at` and `whole` can be functions only where the first argument is "
                "an Equinox model; name jax.named_scope scopes instead."
            )
        return None
    if callable(at):
        # In a copy, a module that stands in two places becomes two modules.
        model = jtu.tree_map(lambda leaf: leaf, model)
        paths = module_paths(model)
        chosen = at(model)
        found = []
        for module in chosen if isinstance(chosen, list | tuple) else [chosen]:
            path = next((p for p, m in paths.items() if m is module), None)
            if path is None:
                name = repr(module) if isinstance(module, str) else type(module).__name__
                raise ValueError(
                    f"The function given for a cut returned {name}, which is not a submodule of "
                    f"{type(model).__name__}: {listed(paths)}."
                )
            found.append((path, module))
    else:
        paths = module_paths(model)
        at = [re.sub(r"\[(\d+)\]", r".\1", name) for name in at]
        found = [(n, paths[n] if n in paths else _layers.layer_at(model, n)) for n in at]
        if all(module is None for _, module in found):
            return None
        for name, module in found:
            if module is None:
                raise ValueError(
                    f"{type(model).__name__} has no submodule {name!r}: {listed(paths, name)}."
                )
    for path, module in found:
        if not isinstance(module, _layers.Layer) and not callable(module):
            raise ValueError(
                f"{path!r} is a {type(module).__name__}, which is not called: cut at a module that "
                f"has a __call__."
            )
    return found


def module_paths(model: eqx.Module) -> dict[str, eqx.Module]:
    """Finds every submodule by its path (`blocks.2.mlp`), outermost first."""
    found: dict[str, eqx.Module] = {}

    def visit(node: Any, path: str):
        if isinstance(node, eqx.Module):
            found.setdefault(path, node)
        for name, child in _children(node).items():
            visit(child, f"{path}.{name}" if path else str(name))

    visit(model, "")
    found.pop("", None)
    return found


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, eqx.Module):
        return vars(node)
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    return node if isinstance(node, dict) else {}


def listed(names: Sequence[str] | Mapping[str, Any], wanted: str = "") -> str:
    """Lists the possible names for an error message, and the one nearest to `wanted`."""
    shown = list(names)[:12]
    more = f", ... ({len(names)} in all)" if len(names) > len(shown) else ""
    there = f"there are {', '.join(map(repr, shown))}{more}" if shown else "there are none"
    return there + nearest(wanted, names)


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Suggests the name nearest to `wanted`, as the end of a sentence; empty if none is near."""
    found = difflib.get_close_matches(wanted, names, 1)
    return f"; the nearest is {found[0]!r}" if found else ""


def repeated_classes(model: Any) -> set[type]:
    """Finds the classes of the modules in each list that holds several modules of one class."""
    found: set[type] = set()
    nodes = [model]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            classes = [type(m) for m in node if isinstance(m, eqx.Module) and callable(m)]
            if len(set(classes)) < len(classes):
                found.update(classes)
        nodes.extend(_children(node).values())
    return found


def subclasses(cls: type) -> set[type]:
    """Gives a class and those derived from it."""
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


# ---- watching calls -----------------------------------------------------------------------------

#: Runs at a call of a module: `handler(module, call, *args, **kwargs)` gives the call's result.
Handler = Callable[..., Any]
#: Classes, and a function that makes the handler of their calls from a function's first argument.
Watcher = tuple[frozenset[type], Callable[[Any], Handler]]


def watched(fun: Callable, watchers: Sequence[Watcher]) -> Callable:
    """Wraps `fun` so that, while it runs, handlers take each call of a module of their classes."""
    classes = frozenset().union(*(classes for classes, _ in watchers))
    if not classes:
        return fun

    @functools.wraps(fun)
    def watching(*args, **kwargs):
        model = args[0] if args else None
        made = [(own, make(model)) for own, make in watchers]
        token = _handlers.set({cls: [h for own, h in made if cls in own] for cls in classes})
        try:
            with _intercepted(classes), _cache_key(tuple(own for own, _ in watchers)):
                return fun(*args, **kwargs)
        finally:
            _handlers.reset(token)

    return watching


# The handlers of this thread. A class is intercepted for all threads, but only a thread that traces
# has handlers. The key keeps JAX from using a trace that was made with other handlers, or none.
_handlers = contextvars.ContextVar[dict[type, list[Handler]]]("handlers")
_cache_key = jax.make_user_context(())
_lock = threading.Lock()
#: The classes that are intercepted: how often, and how to undo it.
_times = collections.Counter[type]()
_undo: dict[type, Callable[[], None]] = {}


@contextlib.contextmanager
def _intercepted(classes: frozenset[type]):
    with _lock:
        _times.update(classes)
        _undo.update((cls, _intercept(cls)) for cls in classes if cls not in _undo)
    try:
        yield
    finally:
        with _lock:
            _times.subtract(classes)
            for cls in classes:
                if not _times[cls]:
                    _undo.pop(cls)()


def _intercept(cls: type) -> Callable[[], None]:
    """Replaces the `__call__` of a class; gives the function that puts it back."""
    original = inspect.getattr_static(cls, "__call__")

    def __call__(self, *args, **kwargs):
        call = original.__get__(self, type(self))
        # A subclass may call this method by `super()`: only the subclass's own call is handled.
        for handler in _handlers.get({}).get(cls, ()) if type(self) is cls else ():
            call = functools.partial(handler, self, call)
        return call(*args, **kwargs)

    is_inherited = "__call__" not in vars(cls)
    cls.__call__ = functools.update_wrapper(__call__, original)
    if is_inherited:
        return functools.partial(delattr, cls, "__call__")
    return functools.partial(setattr, cls, "__call__", original)


# ---- announcing calls ---------------------------------------------------------------------------


def announcing(modules: Sequence[tuple[str, Any]], classes: Collection[type]) -> Watcher:
    """Announces in the jaxpr the calls of modules of some classes, and of classes of `modules`."""
    classes = {c for cls in classes for c in subclasses(cls)}
    classes |= {type(module) for _, module in modules if not isinstance(module, _layers.Layer)}

    def make(model: Any) -> Handler:
        paths = {id(module): path for path, module in module_paths(model).items()}

        def announce(module: Any, call: Callable, *args, **kwargs) -> Any:
            path = paths.get(id(module))
            args, kwargs = _announce(module, path, (args, kwargs), begins=True)
            return _announce(module, path, call(*args, **kwargs), begins=False)

        return announce

    return frozenset(classes), make


def _announce(module: Any, path: str | None, values: Any, *, begins: bool) -> Any:
    own = [leaf for leaf in jtu.tree_leaves(module) if _jaxprs.is_array(leaf)]
    leaves, tree = jtu.tree_flatten(values)
    arrays = [leaf for leaf in leaves if _jaxprs.is_array(leaf)]
    if not arrays:
        return values
    passed = iter(
        call_p.bind(*own, *arrays, own=len(own), module=type(module), path=path, begins=begins)
    )
    return tree.unflatten(next(passed) if _jaxprs.is_array(leaf) else leaf for leaf in leaves)


call_p = jex.Primitive("module_call")
call_p.multiple_results = True
call_p.def_impl(lambda *xs, own, **_: list(xs[own:]))
call_p.def_abstract_eval(lambda *avals, own, **_: list(avals[own:]))
mlir.register_lowering(call_p, lambda _, *xs, own, **__: xs[own:])
batching.primitive_batchers[call_p] = lambda xs, dims, own, **params: (
    call_p.bind(*xs, own=own, **params),
    dims[own:],
)
ad.primitive_jvps[call_p] = lambda xs, ts, own, **params: (
    call_p.bind(*xs, own=own, **params),
    list(ts[own:]),
)


# ---- reading announcements ----------------------------------------------------------------------


def mark_calls(
    traced: _jaxprs.Traced, model: Any, modules: Sequence[tuple[str, Any]]
) -> jex.ClosedJaxpr:
    """Turns the announcement of the i-th module's call into a mark that opens stage i + 1.

    Raises:
        ValueError: where a module is not called, or the modules not in their order. Where a model
            is called several times, each call has to come in that order.
    """
    stages = {
        path: i + 1 for i, (path, m) in enumerate(modules) if not isinstance(m, _layers.Layer)
    }
    entered: list[str] = []

    def mark(eqn, path, passed):
        if path not in stages:
            return None
        entered.append(path)
        enter = _marks.enter_equation(passed, eqn.outvars, stages[path], path)
        return enter.replace(source_info=eqn.source_info)

    jaxpr = read_announcements(traced, model, stages, mark=mark)
    for path in stages:
        if path not in entered:
            raise ValueError(
                f"The cut at {path!r} cannot be made: the function never calls it with arrays."
            )
    most = max(stages, key=entered.count, default="")
    if entered.count(most) * len(stages) != len(entered):
        raise ValueError(
            f"The cut at {most!r} is not unique: the function calls it {entered.count(most)} times,"
            f" and others not as often. Mark one of the calls with pipeline_enter_stage instead."
        )
    if entered != list(stages) * (len(entered) // max(len(stages), 1)):
        raise ValueError(
            f"The cuts {list(stages)} are out of order: the function calls them in the "
            f"order {entered}; list them so."
        )
    return jaxpr


def calls_class(eqn, cls: type) -> bool:
    """Tells whether a call of a module of a class is announced inside an equation."""
    return _jaxprs.contains(eqn, lambda e: e.primitive is call_p and e.params["module"] is cls)


WHOLE = "jaxpp_whole_"


def scope_calls(
    traced: _jaxprs.Traced, model: Any, paths: Sequence[str], classes: Collection[type]
) -> tuple[_jaxprs.Traced, dict[str, type | None]]:
    """Puts the equations of each call of some modules under a scope of its own.

    Returns:
        The program, and the scopes, each with the class of its module; None if `paths` names it.
    """
    scopes: dict[str, type | None] = {}
    named: set[str] = set()

    def scope(eqn, path: str | None) -> str | None:
        if path is None and eqn.params["module"] not in classes:
            return None
        named.add(path or "")
        name = f"{WHOLE}{eqn.params['path'] or path or eqn.params['module'].__name__}"
        name += f"#{len(scopes)}" if name in scopes else ""
        scopes[name] = eqn.params["module"] if path is None else None
        return name

    jaxpr = read_announcements(traced, model, paths, scope=scope)
    for path in paths:
        if path not in named:
            raise ValueError(f"{path!r} cannot stay whole: the function never calls it.")
    return dataclasses.replace(traced, jaxpr=jaxpr), scopes


def read_announcements(
    traced: _jaxprs.Traced,
    model: Any,
    wanted: Collection[str] = (),
    *,
    mark: Callable | None = None,
    scope: Callable | None = None,
) -> jex.ClosedJaxpr:
    """Removes all announcements from the jaxpr of a traced function.

    `mark(eqn, path, passed)` may give an equation to put in place of an announcement; with `mark`,
    marks that were there before are removed. `scope(eqn, path)` may name a scope for the equations
    between the beginning of a call and its end. A path that is not `wanted` is given as None.
    """
    invars, given = traced.jaxpr.jaxpr.invars, model_arrays(traced, model)
    bits = {v: 1 << i for i, v in enumerate(given[: len(given) - traced.num_closed_over])}
    find = _finder(model, wanted) if wanted else lambda *_: None
    reader = _Reader(find, mark, scope)
    return reader.read(traced.jaxpr, [bits.get(v, 0) for v in invars])[0]


def model_arrays(traced: _jaxprs.Traced, model: Any) -> list[Any]:
    """Gives the inputs that are arrays of the first argument, then those closed over."""
    invars, first = traced.jaxpr.jaxpr.invars, traced.num_closed_over
    count = sum(map(_jaxprs.is_array, jtu.tree_leaves(model)))
    return [*invars[first : first + count], *invars[:first]]


@dataclasses.dataclass(frozen=True)
class _Reader:
    find: Callable
    mark: Callable | None
    scope: Callable | None

    def read(
        self, jaxpr: jex.ClosedJaxpr, sources: Sequence[int]
    ) -> tuple[jex.ClosedJaxpr, list[int]]:
        """Removes announcements from a jaxpr; also gives the arguments (as bits) of each output."""
        opened = jaxpr.jaxpr
        source_of = dict(zip(opened.invars, sources, strict=True))
        known = _jaxprs.Substitution()
        calls: list[tuple[type, str | None]] = []  # calls that have begun, with their scopes
        eqns = []

        def sources_of(atoms):
            return [0 if _jaxprs.is_literal(v) else source_of.get(v, 0) for v in atoms]

        for old in opened.eqns:
            eqn = known.rename(old) if known.of else old
            given = sources_of(eqn.invars)
            put, passed = None, eqn.invars
            if eqn.primitive is call_p:
                own = eqn.params["own"]
                passed, made = eqn.invars[own:], given[own:]
                put = self._announced(eqn, passed, _union(given[:own]), calls)
            elif self.mark is not None and _marks.is_enter(eqn):
                made = given
            else:
                put, made = self._inside(eqn, given)
                for _, scope in calls:
                    put = put if scope is None else _compat.in_scope(put, scope)
            source_of.update(zip(eqn.outvars, made, strict=True))
            if put is None:
                known.of.update(zip(eqn.outvars, passed, strict=True))
            else:
                eqns.append(put)
        outvars = [known(v) for v in opened.outvars]
        if len(eqns) < len(opened.eqns) or any(map(operator.is_not, eqns, opened.eqns)):
            jaxpr = _compat.with_equations(jaxpr, eqns, outvars)
        return jaxpr, sources_of(outvars)

    def _announced(self, eqn, passed, sources: int, calls: list) -> Any:
        """Gives the equation in place of an announcement, or None, and updates the open `calls`."""
        module = eqn.params["module"]
        if eqn.params["begins"]:
            path = self.find(eqn, sources)
            if self.mark is not None:
                return self.mark(eqn, path, passed)
            calls.append((module, None if self.scope is None else self.scope(eqn, path)))
        elif any(begun is module for begun, _ in calls):
            while calls.pop()[0] is not module:
                pass
        return None

    def _inside(self, eqn, given: Sequence[int]):
        """Reads the jaxprs in an equation, each of which takes some of its last inputs."""
        made = [_union(given)] * len(eqn.outvars)
        is_call = _jaxprs.called_jaxpr(eqn) is not None

        def read(jaxpr):
            nonlocal made
            num = len(jaxpr.in_avals)
            padded = [*([_union(given)] * num), *given]
            jaxpr, results = self.read(jaxpr, padded[len(padded) - num :])
            made = results if is_call else made
            return jaxpr

        new = _jaxprs.map_jaxprs(eqn, read)
        changed = any(new.params[name] is not value for name, value in eqn.params.items())
        return (new if changed else eqn), made


def _union(bits: Sequence[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _finder(model: Any, wanted) -> Callable[[Any, int], str | None]:
    """Makes a function that gives the path of an announced module, if the path is wanted."""
    arrays_of = {
        path: (type(module), _layers.arrays_of(module))
        for path, module in module_paths(_layers.numbered(model)).items()
    }

    def find(eqn, sources: int) -> str | None:
        if eqn.params["path"] is not None:
            return eqn.params["path"] if eqn.params["path"] in wanted else None
        # Candidates are the modules of this class whose arrays are all among the sources. One whose
        # arrays are only a part of another candidate's, or that has none, gives way to that one.
        held = {
            path: bits
            for path, (cls, bits) in arrays_of.items()
            if cls is eqn.params["module"] and not bits & ~sources
        }
        largest = [
            path
            for path, bits in held.items()
            if not any(other != bits and other & bits == bits for other in held.values())
        ]
        chosen = [path for path in largest if path in wanted]
        if chosen and len(largest) > 1:
            raise ValueError(
                f"The call{_compat.at_source_line(eqn)} of {chosen[0]!r} cannot be told from that "
                f"of {next(p for p in largest if p != chosen[0])!r}: the function rebuilds them "
                f"from the same arrays, or they have none. Mark the call with "
                f"pipeline_enter_stage."
            )
        return chosen[0] if chosen else None

    return find
