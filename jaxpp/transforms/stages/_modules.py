"""Finds the submodules of an Equinox model, and their calls in a traced function.

While the function is traced, each call of a module of the wanted classes is under a
`jax.named_scope` of its own. The model keeps its types and structure, so that a user's
`isinstance`, `jax.tree.map` or `eqx.combine` see no change. The object tells which module was
called. If the object was rebuilt on the way (by a cast, `eqx.combine`, `eqx.filter_checkpoint`),
the model's arrays that the equations under the scope read tell it.
"""

import collections
import contextlib
import contextvars
import difflib
import functools
import inspect
import itertools
import operator
import re
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu

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
    """Returns a class and those derived from it."""
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


# ---- watching calls -----------------------------------------------------------------------------

#: Runs at a call of a module: `handler(module, call, *args, **kwargs)` gives the call's result.
Handler = Callable[..., Any]


class Watcher(NamedTuple):
    """Classes, and what makes the handler of their calls from a function's first argument.

    `effect` tells handlers apart that leave other things in a trace.
    """

    classes: frozenset[type]
    make: Callable[[Any], Handler]
    effect: Hashable = None


def watched(fun: Callable, watchers: Sequence[Watcher]) -> Callable:
    """Wraps `fun` so that, while it runs, handlers take each call of a module of their classes."""
    classes = frozenset().union(*(w.classes for w in watchers))
    key = tuple((w.classes, w.effect) for w in watchers)
    if not classes:
        return fun

    @functools.wraps(fun)
    def watching(*args, **kwargs):
        model = args[0] if args else None
        made = [(w.classes, w.make(model)) for w in watchers]
        token = _handlers.set({cls: [h for own, h in made if cls in own] for cls in classes})
        try:
            with _intercepted(classes), _cache_key(key):
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


# ---- the scopes of calls ------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a module: its class by name, and its path in the model, if that is known."""

    module: str
    path: str | None

    def new_scope(self) -> str:
        """Makes a name for a scope that no other call has."""
        return f"{CALL}{next(_numbers)}:{self.module}:{self.path or ''}"

    @classmethod
    def of(cls, scope: str) -> "Call":
        """Reads the name of a scope."""
        _, module, path = scope.split(":", 2)
        return cls(module, path or None)


#: Begins the names of the scopes of calls; the name of the marks on their arguments.
CALL = "jaxpp_call_"
_numbers = itertools.count()


def scoping(
    modules: Sequence[tuple[str, Any]], classes: Collection[type], *, marks: bool = False
) -> Watcher:
    """Puts each call of modules of some classes, and of classes of `modules`, under a scope.

    With `marks`, the arguments of each call are marked, as by `pipeline_enter_stage`; `mark_calls`
    keeps those of the calls that open stages.
    """
    classes = {c for cls in classes for c in subclasses(cls)}
    classes |= {type(module) for _, module in modules if not isinstance(module, _layers.Layer)}

    def make(model: Any) -> Handler:
        paths = {id(module): path for path, module in module_paths(model).items()}

        def call_in_scope(module: Any, call: Callable, *args, **kwargs) -> Any:
            known = Call(class_name(type(module)), paths.get(id(module)))
            with jax.named_scope(known.new_scope()):
                if marks:
                    args, kwargs = _marks.pipeline_enter_stage((args, kwargs), CALL)
                return call(*args, **kwargs)

        return call_in_scope

    return Watcher(frozenset(classes), make, marks)


def class_name(cls: type) -> str:
    """Names a class, so that it is told from others."""
    return f"{cls.__module__}.{cls.__qualname__}"


def scopes(eqn) -> list[str]:
    """Returns the scopes of the calls of modules that an equation is in, the outermost first."""
    return [name for name in _compat.scope_names(eqn) if name.startswith(CALL)]


def scopes_inside(eqn) -> list[str]:
    """Returns the scopes of the calls of modules inside an equation."""
    inner = [e for sub in _jaxprs.sub_jaxprs(eqn) for e in sub.eqns]
    return [scope for e in inner for scope in [*scopes(e), *scopes_inside(e)]]


def calls_class(eqn, cls: type) -> bool:
    """Tells whether a module of a class is called inside an equation."""
    return any(Call.of(scope).module == class_name(cls) for scope in scopes_inside(eqn))


def apart(call, inner: Iterable[Any]) -> list[Any]:
    """Gives the calls of modules inside an equation `call` scopes of their own.

    JAX traces a function once that several equations call.
    """
    outer, new = scopes(call), {}

    def own(scope: str) -> str:
        if scope in outer:
            return scope
        if scope not in new:
            new[scope] = Call.of(scope).new_scope()
        return new[scope]

    return _renamed(inner, own)


def named(jaxpr: jex.ClosedJaxpr, calls: Mapping[str, Call] | None = None) -> jex.ClosedJaxpr:
    """Renames the scopes of calls to the paths of their modules, or else to the classes."""

    def name(scope: str) -> str:
        call = (calls or {}).get(scope) or Call.of(scope)
        return call.path or call.module.rpartition(".")[2]

    return _compat.with_equations(jaxpr, _renamed(jaxpr.eqns, name), jaxpr.jaxpr.outvars)


def _renamed(eqns: Iterable[Any], name: Callable[[str], str]) -> list[Any]:
    """Renames the scopes of calls that equations are in, and those inside them."""

    @functools.cache  # so that equations which share a body still do
    def inside(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        return _compat.with_equations(jaxpr, map(renamed, jaxpr.eqns), jaxpr.jaxpr.outvars)

    def renamed(eqn) -> Any:
        if not _jaxprs.contains(eqn, lambda e: bool(scopes(e))):
            return eqn
        names = {scope: name(scope) for scope in scopes(eqn)}
        return _jaxprs.map_jaxprs(_compat.rename_scopes(eqn, names), inside)

    return list(map(renamed, eqns))


# ---- which module a call is of ------------------------------------------------------------------


def model_arrays(traced: _jaxprs.Traced, model: Any) -> list[Any]:
    """Returns the inputs that are arrays of the first argument, then those closed over."""
    invars, first = traced.jaxpr.jaxpr.invars, traced.num_closed_over
    count = sum(map(_jaxprs.is_array, jtu.tree_leaves(model)))
    return [*invars[first : first + count], *invars[:first]]


def find_calls(traced: _jaxprs.Traced, model: Any, wanted: Collection[str]) -> dict[str, Call]:
    """Finds the calls of modules by their scopes, with the path of each that can be told.

    Raises:
        ValueError: a module that was rebuilt may be a `wanted` one, and cannot be told from others.
    """
    reads = _reads(traced, model)
    arrays_of: dict[str, dict[str, int]] = {}
    for path, module in module_paths(_layers.numbered(model)).items() if reads else ():
        arrays_of.setdefault(class_name(type(module)), {})[path] = _layers.arrays_of(module)
    found = {}
    for scope, (eqn, read) in reads.items():
        call = Call.of(scope)
        nearest = [call.path] if call.path else _nearest(read, arrays_of.get(call.module, {}))
        chosen = next((path for path in nearest if path in wanted), None)
        if chosen and len(nearest) > 1:
            raise ValueError(
                f"The call{_compat.at_source_line(eqn)} of {chosen!r} cannot be told from that of "
                f"{next(p for p in nearest if p != chosen)!r}: the function rebuilds them from the "
                f"same arrays, or they have none. Mark the call with pipeline_enter_stage."
            )
        found[scope] = call._replace(path=nearest[0] if len(nearest) == 1 else None)
    return found


#: The arrays of the model that a value was computed from, a bit each; the bit of other sources.
_OTHER = 1


def _nearest(read: Collection[int], arrays_of: Mapping[str, int]) -> list[str]:
    """Finds the modules whose arrays are most of those that a call has read.

    What was computed from arrays of a model alone counts most, then what was computed from arrays
    of one module and other sources (an average with another model). Of modules whose arrays are
    read alike, the smallest is nearest; one without arrays is if there is no other.
    """
    from_model = _union(arrays for arrays in read if not arrays & _OTHER)

    def nearness(own: int) -> tuple[int, int, int]:
        from_own = _union(arrays for arrays in read if not arrays & ~(own | _OTHER))
        missing = own & ~(from_model | from_own)
        counts = (own & from_model).bit_count(), (own & from_own).bit_count()
        return (*counts, -missing.bit_count())

    every = _union(read)
    near = {p: nearness(own << 1) for p, own in arrays_of.items() if own << 1 & every or not own}
    near = {path: n for path, n in near.items() if any(n[:2]) or not arrays_of[path]}
    return [path for path, n in near.items() if n == max(near.values())]


def _reads(traced: _jaxprs.Traced, model: Any) -> dict[str, tuple[Any, set[int]]]:
    """Finds by scope the first equation of each call, and what arrays its operands were made from.

    A result of another call is no array of a module, and does not count.
    """
    number: dict[str, int] = {}
    reads: dict[str, tuple[Any, set[int]]] = {}

    def visit(jaxpr, given: Sequence[tuple[int, int]], around: list[str]) -> list[tuple[int, int]]:
        # Of each variable the sources, and the calls that it was made in, as bits.
        facts = dict(zip(jaxpr.invars, given, strict=True))

        def of(atom) -> tuple[int, int]:
            return (0, 0) if _jaxprs.is_literal(atom) else facts.get(atom, (0, 0))

        for eqn in jaxpr.eqns:
            own, inside = list(map(of, eqn.invars)), 0
            for scope in [*around, *scopes(eqn)]:
                inside |= number.setdefault(scope, 1 << len(number))
                _, read = reads.setdefault(scope, (eqn, set()))
                read.update(arrays for arrays, made in own if not made & ~inside)
            every = _union(a for a, _ in own), _union(made for _, made in own) | inside
            results = [every] * len(eqn.outvars)
            for body in _jaxprs.sub_jaxprs(eqn):  # it takes some of the last operands
                taken = [*([every] * len(body.invars)), *own][len(own) :]
                made = visit(body, taken, [*around, *scopes(eqn)])
                results = results if _jaxprs.called_jaxpr(eqn) is None else made
            facts.update(zip(eqn.outvars, results, strict=True))
        return list(map(of, jaxpr.outvars))

    arrays = model_arrays(traced, model)
    bits = {v: 2 << i for i, v in enumerate(arrays[: len(arrays) - traced.num_closed_over])}
    visit(traced.jaxpr.jaxpr, [(bits.get(v, _OTHER), 0) for v in traced.jaxpr.jaxpr.invars], [])
    return reads


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


# ---- what calls are to the stages ---------------------------------------------------------------


def mark_calls(
    jaxpr: jex.ClosedJaxpr, modules: Sequence[tuple[str, Any]], calls: Mapping[str, Call]
) -> jex.ClosedJaxpr:
    """Lets the mark on the arguments of the i-th module open stage i + 1; removes other marks.

    Raises:
        ValueError: where a module is not called, or the modules not in their order. Where a model
            is called several times, each call has to come in that order.
    """
    stages = {
        path: i + 1 for i, (path, m) in enumerate(modules) if not isinstance(m, _layers.Layer)
    }
    entered: list[str] = []

    def number(mark) -> Any:
        path = calls[scopes(mark)[-1]].path if mark.params["name"] == CALL else None
        if path not in stages:
            return None
        entered.append(path)
        return mark.replace(params={"stage": stages[path], "name": path})

    jaxpr = _marks.replace_marks(jaxpr, number)
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


def whole_calls(
    model: Any, paths: Sequence[str], classes: Collection[type], calls: Mapping[str, Call]
) -> dict[str, str | None]:
    """Returns the scopes of the calls that stay whole, each with the class of its module.

    There is none in place of the class if `paths` names the module.
    """
    called = {call.path for call in calls.values()}
    arrays_of = {p: _layers.arrays_of(m) for p, m in module_paths(_layers.numbered(model)).items()}
    for path in paths:
        if path not in called and arrays_of[path]:  # one without arrays may compute nothing
            raise ValueError(f"{path!r} cannot stay whole: the function never calls it.")
    layers = set(map(class_name, classes))
    return {
        scope: None if call.path in paths else call.module
        for scope, call in calls.items()
        if call.path in paths or call.module in layers
    }
