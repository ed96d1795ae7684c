"""Finds the calls of modules in a traced function.

While the function is traced, each call of a module of the wanted classes is under a
`jax.named_scope` of its own. The model keeps its types and structure, so that a user's
`isinstance`, `jax.tree.map` or `eqx.combine` see no change. The object tells which module was
called. If the object was rebuilt on the way (by a cast, `eqx.combine`, `eqx.filter_checkpoint`),
the model's arrays that the equations under the scope read tell it.
"""

import collections
import contextlib
import contextvars
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Jaxpr
from jaxpp.transforms.stages import _marks, _modules

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
        handlers = [(w.classes, w.make(model)) for w in watchers]
        token = _handlers.set(
            {cls: [h for kinds, h in handlers if cls in kinds] for cls in classes}
        )
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


class ModuleCall(NamedTuple):
    """A call of a module: its class by name, and its path in the model, if that is known."""

    module: str
    path: str | None

    def new_scope(self) -> str:
        """Makes a name for a scope that no other call has."""
        return f"{CALL}{next(_numbers)}:{self.module}:{self.path or ''}"

    @classmethod
    def of(cls, scope: str) -> "ModuleCall":
        """Reads the name of a scope."""
        _, module, path = scope.split(":", 2)
        return cls(module, path or None)


#: Begins the names of the scopes of calls; the name of the marks on their arguments.
CALL = "jaxpp_call_"
_numbers = itertools.count()


def scoping(
    modules: Sequence[_modules.Named], classes: Collection[type], *, marks: bool = False
) -> Watcher:
    """Puts each call of modules of some classes, and of classes of `modules`, under a scope.

    With `marks`, the arguments of each call are marked, as by `pipeline_enter_stage`; `mark_calls`
    keeps those of the calls that open stages.
    """
    classes = {c for cls in classes for c in subclasses(cls)}
    classes |= {type(module) for _, module in modules if not isinstance(module, _modules.Layer)}

    def make(model: Any) -> Handler:
        paths = {id(module): path for path, module in _modules.module_paths(model).items()}

        def call_in_scope(module: Any, call: Callable, *args, **kwargs) -> Any:
            known = ModuleCall(class_name(type(module)), paths.get(id(module)))
            with jax.named_scope(known.new_scope()):
                if marks:
                    args, kwargs = _marks.pipeline_enter_stage((args, kwargs), CALL)
                return call(*args, **kwargs)

        return call_in_scope

    return Watcher(frozenset(classes), make, marks)


def subclasses(cls: type) -> set[type]:
    """Returns a class and those derived from it."""
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def class_name(cls: type) -> str:
    """Names a class, so that it is told from others."""
    return f"{cls.__module__}.{cls.__qualname__}"


def scopes(eqn: Eqn) -> list[str]:
    """Returns the scopes of the calls of modules that an equation is in, the outermost first."""
    return [name for name in _compat.scope_names(eqn) if name.startswith(CALL)]


def scopes_inside(eqn: Eqn) -> list[str]:
    """Returns the scopes of the calls of modules inside an equation."""
    inner = [e for sub in jaxprs.sub_jaxprs(eqn) for e in sub.eqns]
    return [scope for e in inner for scope in [*scopes(e), *scopes_inside(e)]]


def calls_class(eqn: Eqn, cls: type) -> bool:
    """Tells whether a module of a class is called inside an equation."""
    return any(ModuleCall.of(scope).module == class_name(cls) for scope in scopes_inside(eqn))


def apart(call: Eqn, inner: Iterable[Eqn]) -> list[Eqn]:
    """Puts the calls of modules inside an equation `call` under scopes of their own.

    JAX traces a function once that several equations call.
    """
    outer, new = scopes(call), {}

    def renewed(scope: str) -> str:
        if scope in outer:
            return scope
        if scope not in new:
            new[scope] = ModuleCall.of(scope).new_scope()
        return new[scope]

    return _renamed(inner, renewed)


def named(jaxpr: jex.ClosedJaxpr, calls: Mapping[str, ModuleCall] | None = None) -> jex.ClosedJaxpr:
    """Renames the scopes of calls to the paths of their modules, or else to the classes."""

    def name(scope: str) -> str:
        call = (calls or {}).get(scope) or ModuleCall.of(scope)
        return call.path or call.module.rpartition(".")[2]

    return _compat.with_equations(jaxpr, _renamed(jaxpr.eqns, name), jaxpr.jaxpr.outvars)


def _renamed(eqns: Iterable[Eqn], name: Callable[[str], str]) -> list[Eqn]:
    """Renames the scopes of calls that equations are in, and those inside them."""

    @functools.cache  # so that equations which share a body still do
    def inside(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        return _compat.with_equations(jaxpr, map(renamed, jaxpr.eqns), jaxpr.jaxpr.outvars)

    def renamed(eqn: Eqn) -> Eqn:
        if not jaxprs.contains(eqn, lambda e: bool(scopes(e))):
            return eqn
        names = {scope: name(scope) for scope in scopes(eqn)}
        return jaxprs.map_jaxprs(_compat.rename_scopes(eqn, names), inside)

    return list(map(renamed, eqns))


# ---- modules of Flax NNX -------------------------------------------------------------------------

# NNX makes no scopes. A function may get its model as a module, or as a state that it merges into a
# module. While the function is traced, a call of `model.layers[2].linear` is under the scope
# `linear`, inside the scope `layers.2` of the call around it.

Path = tuple[str, ...]


def scoping_nnx() -> Watcher:
    """Puts each call of a module of Flax NNX under a scope."""
    nnx = sys.modules.get("flax.nnx")  # a user with such a module has imported it
    classes = set() if nnx is None else subclasses(nnx.Module)
    called = (c for c in classes if any("__call__" in vars(b) for b in c.__mro__))
    return Watcher(frozenset(called), _scoper)


def _scoper(model: Any) -> Handler:
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
        below = path[len(outer) :] if path[: len(outer)] == outer else path
        around.append(path)
        try:
            with jax.named_scope(".".join(below)) if below else contextlib.nullcontext():
                return call(*args, **kwargs)
        finally:
            around.pop()

    return call_in_scope


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
    """Lists the leaves of a module or a state, with the names on their paths."""
    leaves = jtu.tree_flatten_with_path(tree)[0]
    return [(tuple(jtu.keystr((k,), simple=True) for k in path), leaf) for path, leaf in leaves]


# ---- which module a call is of ------------------------------------------------------------------


def find_calls(traced: jaxprs.Traced, model: Any, wanted: Collection[str]) -> dict[str, ModuleCall]:
    """Finds the calls of modules by their scopes, with the path of each that can be told.

    Raises:
        ValueError: a module that was rebuilt may be a `wanted` one, and cannot be told from others.
    """
    reads = _reads(traced, model)
    arrays_of: dict[str, dict[str, int]] = {}
    for path, module in _modules.module_paths(_modules.counted(model)).items() if reads else ():
        arrays_of.setdefault(class_name(type(module)), {})[path] = _modules.arrays_of(module)
    found = {}
    for scope, (eqn, read) in reads.items():
        call = ModuleCall.of(scope)
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
#: The sources of a variable, and the calls that it was made in, as bits.
_Sources = tuple[int, int]


def _nearest(read: Collection[int], arrays_of: Mapping[str, int]) -> list[str]:
    """Finds the modules whose arrays are most of those that a call has read.

    What was computed from arrays of a model alone counts most, then what was computed from arrays
    of one module and other sources (an average with another model). Of modules whose arrays are
    read alike, the smallest is nearest; one without arrays is if there is no other.
    """
    from_model = _modules.joined_bits(arrays for arrays in read if not arrays & _OTHER)

    def nearness(module: int) -> tuple[int, int, int]:
        from_own = _modules.joined_bits(
            arrays for arrays in read if not arrays & ~(module | _OTHER)
        )
        missing = module & ~(from_model | from_own)
        counts = (module & from_model).bit_count(), (module & from_own).bit_count()
        return (*counts, -missing.bit_count())

    every = _modules.joined_bits(read)
    near = {
        p: nearness(module << 1)
        for p, module in arrays_of.items()
        if module << 1 & every or not module
    }
    near = {path: n for path, n in near.items() if any(n[:2]) or not arrays_of[path]}
    return [path for path, n in near.items() if n == max(near.values())]


def _reads(traced: jaxprs.Traced, model: Any) -> dict[str, tuple[Eqn, set[int]]]:
    """Finds by scope the first equation of each call, and what arrays its operands were made from.

    A result of another call is no array of a module, and does not count.
    """
    number: dict[str, int] = {}
    reads: dict[str, tuple[Eqn, set[int]]] = {}

    def visit(jaxpr: Jaxpr, given: Sequence[_Sources], around: list[str]) -> list[_Sources]:
        facts = dict(zip(jaxpr.invars, given, strict=True))

        def of(atom: Atom) -> _Sources:
            return (0, 0) if jaxprs.is_literal(atom) else facts.get(atom, (0, 0))

        for eqn in jaxpr.eqns:
            operands, inside = list(map(of, eqn.invars)), 0
            for scope in [*around, *scopes(eqn)]:
                inside |= number.setdefault(scope, 1 << len(number))
                _, read = reads.setdefault(scope, (eqn, set()))
                read.update(arrays for arrays, calls in operands if not calls & ~inside)
            sources = _modules.joined_bits(arrays for arrays, _ in operands)
            every = sources, _modules.joined_bits(calls for _, calls in operands) | inside
            results = [every] * len(eqn.outvars)
            for body in jaxprs.sub_jaxprs(eqn):  # it takes some of the last operands
                taken = [*([every] * len(body.invars)), *operands][len(operands) :]
                body_results = visit(body, taken, [*around, *scopes(eqn)])
                results = results if jaxprs.called_jaxpr(eqn) is None else body_results
            facts.update(zip(eqn.outvars, results, strict=True))
        return list(map(of, jaxpr.outvars))

    arrays = _modules.model_arrays(traced, model)
    bits = {v: 2 << i for i, v in enumerate(arrays[: len(arrays) - traced.num_closed_over])}
    visit(traced.jaxpr.jaxpr, [(bits.get(v, _OTHER), 0) for v in traced.jaxpr.jaxpr.invars], [])
    return reads


# ---- what calls are to the stages ---------------------------------------------------------------


def mark_calls(
    jaxpr: jex.ClosedJaxpr, modules: Sequence[_modules.Named], calls: Mapping[str, ModuleCall]
) -> jex.ClosedJaxpr:
    """Lets the mark on the arguments of the i-th module open stage i + 1; removes other marks.

    Raises:
        ValueError: where a module is not called, or the modules not in their order. Where a model
            is called several times, each call has to come in that order.
    """
    stages = {
        path: i + 1 for i, (path, m) in enumerate(modules) if not isinstance(m, _modules.Layer)
    }
    entered: list[str] = []

    def number(mark: Eqn) -> Eqn | None:
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
    model: Any, paths: Sequence[str], classes: Collection[type], calls: Mapping[str, ModuleCall]
) -> dict[str, str | None]:
    """Returns the scopes of the calls that stay whole, each with the class of its module.

    There is none in place of the class if `paths` names the module.
    """
    called = {call.path for call in calls.values()}
    modules = _modules.module_paths(_modules.counted(model))
    arrays_of = {path: _modules.arrays_of(module) for path, module in modules.items()}
    for path in paths:
        if path not in called and arrays_of[path]:  # one without arrays may compute nothing
            raise ValueError(f"{path!r} cannot stay whole: the function never calls it.")
    layers = set(map(class_name, classes))
    return {
        scope: None if call.path in paths else call.module
        for scope, call in calls.items()
        if call.path in paths or call.module in layers
    }
