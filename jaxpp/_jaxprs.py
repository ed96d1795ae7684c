"""Reads and rebuilds jaxprs: traces, inlines calls, slices by dependence, compares by structure.

A pass maps a closed jaxpr without constants to another. Equations are moved unchanged, so their
names and source lines survive.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from jaxpp import _compat, _in_place, _primitives
from jaxpp._program import Fed
from jaxpp._typing import Atom, Aval, Eqn, Jaxpr, Literal, Var

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_STATIC_OUTPUT = object()

#: The dtypes that JAX narrows unless 64 bits are switched on.
WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced at given arguments.

    `jaxpr` takes `inputs`: the arrays that the function closes over, then the array leaves of the
    arguments.
    """

    jaxpr: jex.ClosedJaxpr
    inputs: list[Any]
    num_closed_over: int
    out_tree: Any
    out_static: list[Any]

    def rebuild(self, outputs: Iterable[Any]) -> Any:
        """Puts the jaxpr's outputs and the static leaves back into the function's result."""
        outputs = iter(outputs)
        leaves = [next(outputs) if s is _STATIC_OUTPUT else s for s in self.out_static]
        return jtu.tree_unflatten(self.out_tree, leaves)

    def output_paths(self) -> list[str]:
        """Returns the path of each array in the function's result, as `keystr` of JAX writes it."""
        # JAX asks user-defined pytrees to accept an `object()` for a leaf.
        tree = jtu.tree_unflatten(self.out_tree, [object() for _ in self.out_static])
        leaves = jtu.tree_flatten_with_path(tree)[0]
        return [
            jtu.keystr(path)
            for (path, _), static in zip(leaves, self.out_static, strict=True)
            if static is _STATIC_OUTPUT
        ]


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf is traced: a JAX or NumPy array, or an object that stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | Fed)


def refuse_array_likes(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuses a leaf that stands for an array by `__jax_array__`, as `jax.jit` does.

    It would be static, and the function compiled for its values.
    """
    for tree in (args, kwargs or {}):
        if not any(map(_is_array_like, jtu.tree_leaves(tree))):
            continue
        path, leaf = next(x for x in jtu.tree_leaves_with_path(tree) if _is_array_like(x[1]))
        raise ValueError(
            f"args{jtu.keystr(path)} is a {type(leaf).__name__}, which stands for an array by its "
            f"`__jax_array__`, but is neither an array nor a pytree of arrays. Pass the array, "
            f"jnp.asarray(x), or register the class as a pytree."
        )


def _is_array_like(leaf: Any) -> bool:
    known = is_array(leaf) or _compat.is_tracer(leaf)  # one of a `jax.new_ref` is no array
    return hasattr(type(leaf), "__jax_array__") and not known


def is_key(x: Any) -> bool:
    """Tells whether an array, or a type, is of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def with_cloned_keys(values: Iterable[Any]) -> list[Any]:
    """Replaces random keys by clones, which `jax.debug_key_reuse` takes for keys not used yet."""
    return [jax.random.clone(x) if is_key(x) else x for x in values]


def trace(fun: Callable, args: Sequence[Any], kwargs: dict | None = None) -> Traced:
    """Traces `fun`; every leaf of the arguments that is not an array is static, as in Equinox.

    A value that `fun` writes to a `jax.new_ref` of its own becomes plain data.

    Raises:
        ValueError: `fun` changes an argument in place, and the change is lost; or a leaf stands for
            an array by `__jax_array__`.
    """
    leaves, tree = jtu.tree_flatten((tuple(args), kwargs or {}))
    refuse_array_likes(tuple(args), kwargs)
    traced = [is_array(leaf) for leaf in leaves]
    static = [None if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
    result = {}

    def flat(*named):
        arrays = iter([array for own in named for array in own.arrays])
        full = [next(arrays) if t else s for t, s in zip(traced, static, strict=True)]
        args, kwargs = jtu.tree_unflatten(tree, full)
        out_leaves, result["tree"] = jtu.tree_flatten(fun(*args, **kwargs))
        out_leaves = list(map(_fixed_if_empty, out_leaves))
        flows = [is_array(leaf) and leaf.dtype != jax.dtypes.float0 for leaf in out_leaves]
        pairs = list(zip(out_leaves, flows, strict=True))
        result["static"] = [_STATIC_OUTPUT if flows else leaf for leaf, flows in pairs]
        written = _in_place.writes(tree, full, (args, kwargs))
        result["writes"] = [write for write, _ in written]
        return [leaf for leaf, flows in pairs if flows] + [value for _, value in written]

    arrays = [leaf for leaf, t in zip(leaves, traced, strict=True) if t]
    # JAX's errors name the user's function and its arguments.
    named, signature = _named(fun, args, kwargs or {})
    vars(flat).update(__wrapped__=fun, __signature__=signature)
    jaxpr = without_refs(jax.make_jaxpr(flat)(*named))
    opened, consts = without_constants(jaxpr)
    if result["writes"]:
        opened = _without_writes(opened, result["writes"], fun)
    return Traced(opened, [*consts, *arrays], len(consts), result["tree"], result["static"])


@jtu.register_pytree_with_keys_class
class _Arrays:
    """The arrays of one argument, with their paths in it, which JAX reads where it has an error."""

    def __init__(self, paths: tuple[str, ...], arrays: Iterable[Any]):
        self.paths, self.arrays = paths, list(arrays)

    def tree_flatten_with_keys(self):
        return tuple(zip(self.paths, self.arrays, strict=True)), self.paths

    def tree_flatten(self):
        return self.arrays, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], arrays: Iterable[Any]) -> "_Arrays":
        return cls(paths, arrays)


def _named(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[_Arrays], inspect.Signature]:
    """Returns the arrays of each argument of a call, and the arguments' names as a signature."""
    named = []
    for tree in (*args, *(kwargs[name] for name in sorted(kwargs))):
        leaves = [x for x in jtu.tree_leaves_with_path(tree) if is_array(x[1])]
        paths = tuple(jtu.keystr(path) for path, _ in leaves)
        named.append(_Arrays(paths, [x for _, x in leaves]))
    try:
        parameters = list(inspect.signature(fun).parameters.values())[: len(args)]
    except (TypeError, ValueError):  # `fun` has no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += sorted(kwargs)
    if len(set(names)) < len(named):
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        return named, inspect.Signature([rest])
    kind = inspect.Parameter.POSITIONAL_ONLY
    return named, inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _without_writes(
    jaxpr: jex.ClosedJaxpr, found: Sequence[_in_place.Write], fun: Callable
) -> jex.ClosedJaxpr:
    """Removes the values that a function has written to its arguments; they come last.

    Raises:
        ValueError: one is lost: it is no result, and no result or effect depends on it.
    """
    inside = jaxpr.jaxpr
    results, values = inside.outvars[: -len(found)], inside.outvars[-len(found) :]
    maker = {v: e for e in inside.eqns for v in e.outvars}

    def origin(atom):
        """Returns the variable that calls have only handed through."""
        if is_literal(atom) or atom not in maker or called_jaxpr(maker[atom]) is None:
            return atom
        eqn = maker[atom]
        inner = opened(called_jaxpr(eqn))
        at = inner.outvars[eqn.outvars.index(atom)]
        return origin(eqn.invars[inner.invars.index(at)]) if at in inner.invars else atom

    kept = {origin(v) for v in variables(results)}.union(inside.invars)
    effects = [v for e in inside.eqns if e.effects for v in variables(e.invars)]
    lost: list[tuple[_in_place.Write, str]] = []
    for write, value in zip(found, values, strict=True):
        source = origin(value)
        if is_literal(source) or source in kept:
            continue
        read = descendants(inside.eqns, [value])
        if write.keeps or read.isdisjoint([*variables(results), *effects]):
            lost.append((write, _compat.at_source_line(maker[value])))
    if lost:
        name = getattr(fun, "__name__", "The function")
        raise _in_place.lost(name, [write for write, _ in lost], lost[0][1])
    return _compat.with_equations(jaxpr, inside.eqns, results)


def without_refs(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Puts plain values in place of the `jax.new_ref`s that a program makes.

    Raises:
        ValueError: a loop or a call takes a reference from outside it, and has a function with a
            derivative rule in it, which would be lost.
    """

    def open_inner(eqn):
        if any(map(_compat.is_ref, eqn.invars)):
            if contains(eqn, lambda e: e.primitive.name in _primitives.CUSTOM_RULES):
                raise ValueError(
                    f"The `{eqn.primitive.name}`{_compat.at_source_line(eqn)} reads or writes a "
                    f"jax.new_ref made outside of it, and calls a function with a derivative rule "
                    f"of its own (jax.custom_jvp or custom_vjp), which would be lost. Carry a "
                    f"value in place of the ref, or make the ref inside."
                )
            return eqn
        if not _compat.makes_refs(eqn) or not any(True for _ in sub_jaxprs(eqn)):
            return eqn
        return _compat.without_ref_effects(map_jaxprs(eqn, without_refs))

    if not _compat.makes_refs(jaxpr):
        return jaxpr
    eqns = list(map(open_inner, jaxpr.eqns))
    return _compat.discharge_refs(_compat.with_equations(jaxpr, eqns))


def _fixed_if_empty(leaf: Any) -> Any:
    """Returns the leaf; a new array for a gradient by an integer, which has no bits."""
    if getattr(leaf, "dtype", None) != jax.dtypes.float0:
        return leaf
    return np.zeros(leaf.shape, jax.dtypes.float0)


def run(jaxpr: jex.ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr, under its equations' own names and source lines."""
    results = jex.jaxpr_as_fun(jaxpr)(*args)
    return [
        literal_array(v) if is_literal(v) else x
        for v, x in zip(jaxpr.jaxpr.outvars, results, strict=True)
    ]


def run_equations(eqns: Sequence[Eqn], values: dict[Any, Any]) -> None:
    """Evaluates equations of which `values` has the operands; puts the results there, too."""
    own = part(eqns, results_of(eqns))
    values.update(zip(own.outputs, run(own.jaxpr, *read(own.inputs, values)), strict=True))


def run_compiled(fun: Callable[..., Any], *args: Any) -> Any:
    """Evaluates a function; where no jaxpr records it, equal programs share an executable.

    `jax.jit` would know the function by its identity, and so compile a new function of each call
    anew. Here it is traced at each call, so that it sees what Python has by then.
    """
    return fun(*args) if _compat.writes_jaxpr() else compiled(fun, *args)(*args)


def compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns a function for arguments of these types; equal programs share an executable.

    What is differentiated or batched eagerly shares those of its derivatives, too.
    """
    if _compat.is_jit_disabled():
        return fun
    traced = trace(fun, args)
    key = structure(traced.jaxpr, differentiable=_compat.is_differentiating())
    run = _compiled(_Program(key, traced.jaxpr))
    consts = traced.inputs[: traced.num_closed_over]

    def call(*args: Any) -> Any:
        arrays = [leaf for leaf in jtu.tree_leaves(args) if is_array(leaf)]
        return traced.rebuild(run(*consts, *arrays))

    return call


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr that equals those of the same structure; it keeps alive what the structure names."""

    structure: Any
    jaxpr: jex.ClosedJaxpr = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _compiled(program: _Program) -> Callable[..., list[Any]]:
    return jax.jit(functools.partial(run, program.jaxpr))


def with_its_types(jaxpr: jex.ClosedJaxpr) -> contextlib.AbstractContextManager:
    """Makes the context in which a jaxpr with 64-bit types can be evaluated; else the present one.

    A function may have such types in a part of it alone: under a `jax.enable_x64` of its own.
    """

    def is_wide(eqn) -> bool:
        dtypes = (getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars))
        return any(getattr(dtype, "name", "") in WIDE for dtype in dtypes)

    wide = any(contains(eqn, is_wide) for eqn in jaxpr.eqns)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def read(atoms: Iterable[Atom], values: Mapping[Var, Any]) -> list[Any]:
    """Returns the values of atoms: arrays for literals, and those in `values` for variables."""
    return [literal_array(a) if is_literal(a) else values[a] for a in atoms]


def literal_array(literal: Literal) -> Any:
    """Returns a literal's value as an array of its type; in a jaxpr it may be a Python scalar."""
    aval = literal.aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return literal.val
    return jnp.asarray(literal.val, None if aval.weak_type else aval.dtype)


def kept(value: Any, aval: Aval) -> Any:
    """Copies a constant of a trace to the host: whoever has the array may write to it or delete it.

    `jax.jit` has such a copy, too, in its executable.
    """
    if is_key(aval):
        data: Any = np.array(jax.device_get(jax.random.key_data(value)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return np.array(jax.device_get(value), aval.dtype)


def with_kept_constants(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Copies the arrays that stand in a jaxpr or inside its equations, each once."""
    copies: dict[int, tuple[Any, Any]] = {}

    def copy(value, aval):
        if id(value) not in copies:
            copies[id(value)] = value, _compat.typed(kept(value, aval), aval)
        return copies[id(value)][1]

    def visit_atom(a):
        is_array = is_literal(a) and is_array_literal(a) and not _compat.is_tracer(a.val)
        return Literal(copy(a.val, a.aval), a.aval) if is_array else a

    def visit(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        inside = closed.jaxpr
        eqns = [
            map_jaxprs(e, visit).replace(invars=list(map(visit_atom, e.invars)))
            for e in closed.eqns
        ]
        new = _compat.with_equations(closed, eqns, list(map(visit_atom, inside.outvars)))
        consts = zip(closed.consts, inside.constvars, strict=True)
        return new.replace(consts=[copy(c, v.aval) for c, v in consts])

    return visit(jaxpr)


def without_devices(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Lets each `jax.device_put` of a task name a memory, and no devices: these are its rank's.

    A split over the axes of the rank stays.
    """

    def own(eqn):
        eqn = map_jaxprs(eqn, without_devices)
        if eqn.primitive.name != "device_put":
            return eqn
        mesh = _compat.mesh_of(eqn)

        def place(given, var):
            if isinstance(given, NamedSharding) and set(mesh.axis_names) >= set(given.mesh.shape):
                return NamedSharding(mesh, given.spec, memory_kind=given.memory_kind)
            return _compat.memory_space(var.aval)

        devices = tuple(map(place, eqn.params["devices"], eqn.outvars))
        return eqn.replace(
            params={**eqn.params, "devices": devices, "srcs": (None,) * len(devices)}
        )

    return _compat.with_equations(jaxpr, map(own, jaxpr.eqns))


def without_constants(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[Any]]:
    """Turns a jaxpr's constants into its first inputs."""
    invars = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    opened = _compat.make_closed_jaxpr(invars, jaxpr.jaxpr.outvars, jaxpr.jaxpr.eqns)
    return opened, list(jaxpr.consts)


def bind_constants(jaxpr: jex.ClosedJaxpr, values: Sequence[Any]) -> jex.ClosedJaxpr:
    """Replaces a jaxpr's first inputs by literals of the given values."""
    pairs = zip(jaxpr.jaxpr.invars, values, strict=False)
    known = Substitution((v, literal(value, v.aval)) for v, value in pairs)
    return rewrite(jaxpr, lambda eqn: None, known)


def called_jaxpr(eqn: Eqn) -> Any | None:
    """Returns the body of an equation that calls it once (a jit, a checkpoint ...), or None."""
    body = _primitives.CALLS.get(eqn.primitive.name)
    return None if body is None else eqn.params[body]


def opened(jaxpr: Any) -> Jaxpr:
    """Returns a jaxpr without its constants, whether it is open or closed."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def shardings_of(eqn: Eqn) -> list[jax.sharding.Sharding]:
    """Returns the shardings that a `jax.jit` call has for its arguments and results."""
    given = [eqn.params.get(name) or () for name in ("in_shardings", "out_shardings")]
    return [s for own in given for s in own if isinstance(s, jax.sharding.Sharding)]


def contains(eqn: Eqn, wanted: Callable[[Eqn], bool]) -> bool:
    """Tells whether an equation, or one anywhere inside it, is wanted."""
    return wanted(eqn) or any(
        contains(inner, wanted) for sub in sub_jaxprs(eqn) for inner in sub.eqns
    )


def sub_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters, opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, _compat.JaxprTypes):
                yield opened(item)


def map_jaxprs(eqn: Eqn, fun: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> Eqn:
    """Applies a function of closed jaxprs to each jaxpr among an equation's parameters."""

    def new(value):
        if isinstance(value, _compat.JaxprTypes):
            closed = value if isinstance(value, jex.ClosedJaxpr) else jex.ClosedJaxpr(value, ())
            return _compat.with_closed_type(fun(closed), value)
        if isinstance(value, tuple) and any(isinstance(v, _compat.JaxprTypes) for v in value):
            kind: Any = type(value)
            return kind(*map(new, value)) if hasattr(value, "_fields") else kind(map(new, value))
        return value

    return eqn.replace(params={name: new(value) for name, value in eqn.params.items()})


def described(fun: Any) -> str:
    """Names a function, and the file and line where it is defined: `` `encode` (a.py:3) ``."""
    plain = inspect.unwrap(fun)
    while isinstance(plain, functools.partial):
        plain = plain.func
    name = getattr(plain, "__qualname__", repr(plain)).split("<locals>.")[-1]
    code = getattr(plain, "__code__", None)
    return f"`{name}`" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def is_literal(atom: Atom) -> "TypeIs[Literal]":
    """Tells whether an atom is a literal and not a variable."""
    return isinstance(atom, Literal)


def literal(value: Any, aval: Aval) -> Literal:
    """Makes a literal, of a number of Python or NumPy: JAX takes its own arrays for constants."""
    is_number = not aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if is_number and not _compat.is_tracer(value):
        value = _compat.typed(np.array(value, aval.dtype), aval)
    return Literal(value, aval)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the atoms that are variables."""
    return [a for a in atoms if not isinstance(a, Literal)]


class Substitution:
    """The atoms that stand for variables; a variable that is not in it stands for itself."""

    def __init__(self, pairs: Iterable[tuple[Var, Atom]] = ()):
        self.of = dict(pairs)

    def __call__(self, atom: Atom) -> Atom:
        return atom if is_literal(atom) else self.of.get(atom, atom)

    def rename(self, eqn: Eqn) -> Eqn:
        """Replaces the inputs of an equation."""
        return eqn.replace(invars=[self(v) for v in eqn.invars])

    def rename_all(self, eqn: Eqn) -> Eqn:
        """Replaces what an equation reads and makes."""
        outvars: list[Any] = list(map(self, eqn.outvars))
        return self.rename(eqn).replace(outvars=outvars)


#: What takes the place of an equation: equations, and the atoms that stand for its results.
Replacement: TypeAlias = tuple[Iterable[Eqn], Iterable[Atom]]


def rewritten(
    eqns: Iterable[Eqn], rule: Callable[[Eqn], Replacement | None], known: Substitution
) -> list[Eqn]:
    """Replaces equations by a rule.

    Args:
        eqns: equations in order.
        rule: gives what takes the place of an equation, whose operands are renamed already; None
            for one that stays.
        known: what stands for the operands; gets what stands for results.
    """
    found = []
    for eqn in map(known.rename, eqns):
        if (new := rule(eqn)) is None:
            found.append(eqn)
            continue
        found += new[0]
        pairs = zip(eqn.outvars, new[1], strict=True)
        known.of.update((v, atom) for v, atom in pairs if atom is not v)
    return found


def rewrite(
    jaxpr: jex.ClosedJaxpr,
    rule: Callable[[Eqn], Replacement | None],
    known: Substitution | None = None,
) -> jex.ClosedJaxpr:
    """Does as `rewritten` with the equations of a jaxpr; an input that `known` names goes."""
    known = Substitution() if known is None else known
    eqns = rewritten(jaxpr.eqns, rule, known)
    inside = jaxpr.jaxpr
    invars = [v for v in inside.invars if v not in known.of]
    return _compat.make_closed_jaxpr(invars, list(map(known, inside.outvars)), eqns)


def inline_call(eqn: Eqn, args: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of a called jaxpr with new variables, and its result atoms."""
    return inline_body(called_jaxpr(eqn), args, eqn)


def inline_body(
    body: Any, args: Sequence[Atom], eqn: Eqn | None = None
) -> tuple[list[Eqn], list[Atom]]:
    """Does as `inline_call`, with any jaxpr; if given, it is among the parameters of `eqn`."""
    inside = opened(body)
    fresh = Substitution(zip(inside.invars, args, strict=True))
    for var, value in zip(inside.constvars, _compat.constants_of(body), strict=True):
        fresh.of[var] = literal(value, var.aval)
    eqns = []
    for inner in inside.eqns:
        renamed = fresh.rename(inner)
        outvars = [fresh_var(v) for v in inner.outvars]
        fresh.of.update(zip(inner.outvars, outvars, strict=True))
        new = renamed.replace(outvars=outvars)
        eqns.append(new if eqn is None else _compat.under_scope(new, eqn))
    return eqns, [fresh(v) for v in inside.outvars]


def record(
    fun: Callable, operands: Sequence[Atom], source: Eqn | None = None
) -> tuple[list[Eqn], list[Atom]]:
    """Traces a function of atoms; gives its equations, calls inlined, and the atoms it returns.

    With an equation `source`, the new equations have its names and source line.
    """
    known = Substitution()
    eqns, results = inline_body(jax.make_jaxpr(fun)(*(v.aval for v in operands)), operands)
    eqns = rewritten(eqns, inlining(lambda e: True), known)
    if source is not None:
        eqns = [e.replace(source_info=source.source_info) for e in eqns]
    return eqns, [known(v) for v in results]


def splice(
    fun: Callable, operands: Sequence[Atom], results: Sequence[Var], source: Eqn | None = None
) -> list[Eqn]:
    """Records a function of atoms, whose results are the given variables."""
    return with_results(*record(fun, operands, source), results)


def with_results(eqns: Iterable[Eqn], made: Sequence[Atom], results: Sequence[Var]) -> list[Eqn]:
    """Renames the results of equations to the given variables.

    Where a result is an input, a literal, or there twice, adds a copy.
    """
    eqns = list(eqns)
    own = set(results_of(eqns))
    rename, copies = Substitution(), []
    for atom, wanted in zip(made, results, strict=True):
        if is_literal(atom) or atom not in own or atom in rename.of:
            copies.append((atom, wanted))
        else:
            rename.of[atom] = wanted
    eqns = list(map(rename.rename_all, eqns))
    for atom, wanted in copies:
        if atom is not wanted:
            eqns += splice(jax.lax.optimization_barrier, [rename(atom)], [wanted])
    return eqns


def own_outputs(jaxpr: jex.ClosedJaxpr, taken: Iterable[Var]) -> jex.ClosedJaxpr:
    """Copies an output that is a literal, another output, or among the variables that are `taken`.

    Then each of them has memory of its own.
    """
    eqns, outvars, taken = list(jaxpr.eqns), [], set(taken)
    for v in jaxpr.jaxpr.outvars:
        if is_literal(v) or v in taken:
            own = fresh_var(v)
            eqns += splice(jnp.copy, [v], [own])
            v = own
        outvars.append(v)
        taken.add(v)
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)


def fresh_var(var: Atom) -> Var:
    """Makes a new variable of the same type."""
    return Var(var.aval)


def inline(
    jaxpr: jex.ClosedJaxpr,
    wanted: Callable[[Eqn], bool],
    change: Callable[[Eqn, list[Eqn]], list[Eqn]] = lambda call, inner: inner,
) -> jex.ClosedJaxpr:
    """Replaces each call that is `wanted` by the equations of its body, inside such calls too.

    `change(call, inner)` may change the equations of a body.
    """
    return rewrite(jaxpr, inlining(wanted, change))


def inlining(
    wanted: Callable[[Eqn], bool],
    change: Callable[[Eqn, list[Eqn]], list[Eqn]] = lambda call, inner: inner,
) -> Callable[[Eqn], Replacement | None]:
    """Makes the rule by which `inline` rewrites."""

    def rule(eqn):
        if called_jaxpr(eqn) is None or not wanted(eqn):
            return None
        known = Substitution()
        inner, results = inline_call(eqn, eqn.invars)
        return rewritten(change(eqn, inner), rule, known), map(known, results)

    return rule


class Part(NamedTuple):
    """Equations as a jaxpr: `inputs` are the variables it reads, `outputs` the atoms it gives."""

    jaxpr: jex.ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]


def part(eqns: Sequence[Eqn], outputs: Sequence[Atom], name: str = "part") -> Part:
    """Makes a jaxpr of equations; its inputs are the variables that none of them makes."""
    made, inputs = set(), {}
    for eqn in eqns:
        for var in eqn.invars:
            if not is_literal(var) and var not in made:
                inputs[var] = None
        made.update(eqn.outvars)
    for var in outputs:
        if not is_literal(var) and var not in made:
            inputs[var] = None
    return Part(
        _compat.make_closed_jaxpr(inputs, outputs, eqns, name), tuple(inputs), tuple(outputs)
    )


def lift_arrays(part: Part) -> tuple[Part, tuple[Literal, ...]]:
    """Turns the arrays among a part's literals into its last inputs; also gives these literals.

    So an array that a function closes over is in no executable, nor in the key of one.

    Raises:
        ValueError: a derivative rule closes over a value that was traced with the function.
    """
    lifted: dict[int, tuple[Var, Literal]] = {}

    def lift(atom, eqn=None):
        if is_literal(atom) and _compat.is_tracer(atom.val):
            raise ValueError(
                f"A function with a derivative rule (jax.custom_vjp or custom_jvp), called"
                f"{_compat.at_source_line(eqn)}, closes over a value that JAX traces, such as an "
                f"argument of the loss. It cannot be called as part of a jaxpr then, as inside "
                f"jax.jit; give it the value as an argument."
            )
        if not is_literal(atom) or not is_array_literal(atom):
            return atom
        return lifted.setdefault(id(atom.val), (fresh_var(atom), atom))[0]

    eqns = [e.replace(invars=[lift(v, e) for v in e.invars]) for e in part.jaxpr.eqns]
    outvars = list(map(lift, part.jaxpr.jaxpr.outvars))
    if not lifted:
        return part, ()
    variables, literals = zip(*lifted.values(), strict=True)
    invars = [*part.jaxpr.jaxpr.invars, *variables]
    return part._replace(jaxpr=_compat.make_closed_jaxpr(invars, outvars, eqns)), literals


def literal_of(number: np.generic) -> Literal:
    """Makes the literal of a number of NumPy."""
    return Literal(number, jax.typeof(number))


def is_array_literal(literal: Literal) -> bool:
    """Tells whether a literal is an array, or a random key, and not a number."""
    return bool(literal.aval.shape) or jnp.issubdtype(literal.aval.dtype, jax.dtypes.extended)


def operands_of(eqns: Iterable[Eqn], outputs: Iterable[Atom] = ()) -> set[Var]:
    """Finds the variables that equations read, with those among some outputs."""
    return {v for e in eqns for v in variables(e.invars)}.union(variables(outputs))


def results_of(eqns: Iterable[Eqn]) -> list[Var]:
    """Returns the variables that equations make, in order."""
    return [v for e in eqns for v in e.outvars]


def ancestors(eqns: Sequence[Eqn], outputs: Iterable[Atom]) -> list[bool]:
    """Tells for each equation whether the outputs depend on it; those with effects are needed."""
    needed = {v for v in outputs if not is_literal(v)}
    keep = [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        if eqns[i].effects or any(v in needed for v in eqns[i].outvars):
            keep[i] = True
            needed.update(v for v in eqns[i].invars if not is_literal(v))
    return keep


def needed(eqns: Sequence[Eqn], outputs: Iterable[Atom]) -> list[Eqn]:
    """Returns the equations that the outputs depend on, and those with effects."""
    return [e for e, keep in zip(eqns, ancestors(eqns, outputs), strict=True) if keep]


def descendants(eqns: Sequence[Eqn], sources: Iterable[Var]) -> set[Var]:
    """Finds all variables that depend on the sources, with the sources."""
    reached = set(sources)
    for eqn in eqns:
        if any(not is_literal(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def structure(jaxpr, *, differentiable: bool = False) -> Any:
    """Makes a hashable key, equal for jaxprs that JAX itself could not tell apart.

    They compute the same thing in the same order, with the same primitives, under the same
    configuration. Source lines and the names of `jax.jit` calls do not count. The rules of
    `jax.custom_jvp` and `jax.custom_vjp` count where the jaxprs may still be differentiated.
    """
    inside = opened(jaxpr)
    number: dict[Any, int] = {}

    def atom(a):
        if is_literal(a):
            return ("literal", a.aval, _hashable(a.val, differentiable))
        return number.setdefault(a, len(number))

    def typed(v):
        return atom(v), v.aval

    head = tuple(map(typed, [*inside.constvars, *inside.invars]))
    body = tuple(
        (
            eqn.primitive,
            eqn.ctx,
            tuple(map(atom, eqn.invars)),
            _params(eqn, differentiable),
            tuple(map(typed, eqn.outvars)),
        )
        for eqn in inside.eqns
    )
    # An array of JAX never changes, one of NumPy may.
    consts = tuple(
        id(c) if isinstance(c, jax.Array) else _hashable(c, differentiable)
        for c in _compat.constants_of(jaxpr)
    )
    return head, body, tuple(map(atom, inside.outvars)), consts


_DERIVATIVE_RULES = frozenset(
    {"jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "bwd", "fwd", "out_trees", "symbolic_zeros"}
)


def _params(eqn, differentiable: bool):
    ignored = {"name"} if eqn.primitive.name == "jit" else set()
    if eqn.primitive.name in _primitives.CUSTOM_RULES and not differentiable:
        ignored |= _DERIVATIVE_RULES
    rules = {"jvp_jaxpr_fun": _compat.derivative_rule}
    return tuple(
        (k, _hashable(rules[k](v) if k in rules else v, differentiable))
        for k, v in sorted(eqn.params.items())
        if k not in ignored
    )


def _hashable(value, differentiable: bool):
    if isinstance(value, _compat.JaxprTypes):
        return structure(value, differentiable=differentiable)
    if isinstance(value, tuple | list):
        return tuple(_hashable(v, differentiable) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v, differentiable)) for k, v in sorted(value.items()))
    # A class of NumPy, such as np.float32, has these methods, too.
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not isinstance(value, type):
        return (value.dtype, value.shape, value.tobytes())
    if isinstance(value, int | float | complex):  # 0.0 is not -0.0, nor 1 True
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return value
