"""Where a program is cut: at modules of an Equinox model, at named scopes, or by balance."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _balance, _costs, _marks

# ---- modules of an Equinox model ----------------------------------------------------------------


def resolve_modules(model: Any, at: Any) -> list[tuple[str, Any]] | None:
    """The submodules that `at` names, with their paths; None where `at` does not name modules."""
    if not isinstance(model, eqx.Module):
        return None
    paths = module_paths(model)
    if callable(at):
        chosen = at(model)
        chosen = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
        found = []
        for module in chosen:
            path = next((p for p, m in paths.items() if m is module), None)
            if path is None:
                raise ValueError(
                    f"The function given for a cut returned {_describe(module)}, which is not a "
                    f"submodule of {type(model).__name__}; {_known(paths)}"
                )
            found.append((path, module))
        return found
    if not any(name in paths for name in at):
        return None
    for name in at:
        if name not in paths:
            raise ValueError(
                f"{type(model).__name__} has no submodule {name!r} to cut at; {_known(paths)}"
            )
    return [(name, paths[name]) for name in at]


def module_paths(model: eqx.Module) -> dict[str, eqx.Module]:
    """Every submodule by its path (`blocks.2.mlp`), outermost first."""
    found: dict[str, eqx.Module] = {}

    def visit(node: Any, path: str):
        if isinstance(node, eqx.Module):
            found.setdefault(path, node)
            children = vars(node).items()
        elif isinstance(node, list | tuple):
            children = enumerate(node)
        elif isinstance(node, dict):
            children = node.items()
        else:
            return
        for name, child in children:
            visit(child, f"{path}.{name}" if path else str(name))

    visit(model, "")
    found.pop("", None)
    return found


def _describe(value: Any) -> str:
    return type(value).__name__ if not isinstance(value, str | int | float) else repr(value)


def _known(paths: Sequence[str] | dict[str, Any]) -> str:
    shown = list(paths)[:12]
    more = f", ... ({len(paths)} in all)" if len(paths) > len(shown) else ""
    return f"it has {', '.join(map(repr, shown))}{more}." if shown else "it has none."


def around_calls(model: Any, modules: Sequence[tuple[str, Any]], around: Callable) -> Any:
    """The model with `around(i, call, self, args, kwargs)` in place of the call of module i.

    The modules keep their type (a subclass of it), fields and tree paths.
    """
    for i, (path, module) in enumerate(modules):
        if not callable(module):
            raise ValueError(
                f"{path!r} is a {type(module).__name__}, which is not called: cut at a module that "
                f"has a __call__."
            )
        model = eqx.tree_at(_getter(path), model, _subclassed(module, i, around))
    return model


def _getter(path: str) -> Callable[[Any], Any]:
    def get(node):
        for name in path.split("."):
            if isinstance(node, list | tuple):
                node = node[int(name)]
            elif isinstance(node, dict):
                node = next(v for k, v in node.items() if str(k) == name)
            else:
                node = getattr(node, name)
        return node

    return get


def _subclassed(module: eqx.Module, index: int, around: Callable) -> eqx.Module:
    base = type(module)

    def __call__(self, *args, **kwargs):
        return around(index, base.__call__, self, args, kwargs)

    # A field for field copy: the class is made anew because a pytree's type carries its methods.
    cls = type(base)(
        base.__name__,
        (base,),
        {"__call__": __call__, "__module__": base.__module__, "__qualname__": base.__qualname__,
         "_jaxpp_original": base},
    )  # fmt: skip
    new = object.__new__(cls)
    for name, value in vars(module).items():
        object.__setattr__(new, name, value)
    return new


def restore_modules(tree: Any) -> Any:
    """Gives modules changed by `around_calls` their own type again, wherever they are in a tree."""

    def changed(node):
        return isinstance(node, eqx.Module) and "_jaxpp_original" in vars(type(node))

    def restore(node):
        if not changed(node):
            return node
        new = object.__new__(type(node)._jaxpp_original)
        for name, value in vars(node).items():
            object.__setattr__(new, name, restore_modules(value))
        return new

    return jtu.tree_map(restore, tree, is_leaf=changed)


def mark_modules(args: Sequence[Any], modules: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
    """The arguments with a mark put where each module of the first one is called."""

    def enter(i, call, self, args, kwargs):
        args, kwargs = _marks.pipeline_enter_stage((args, kwargs), modules[i][0], i + 1)
        return call(self, *args, **kwargs)

    return (around_calls(args[0], modules, enter), *args[1:])


def check_modules_called(jaxpr: jex.ClosedJaxpr, modules: Sequence[tuple[str, Any]]) -> None:
    """Raises where a module of a cut is not called exactly once, or modules out of order."""
    called: list[int] = []

    def collect(eqns):
        for eqn in eqns:
            if _marks.is_enter(eqn) and eqn.params["stage"] is not None:
                called.append(eqn.params["stage"] - 1)
            for sub in _jaxprs.sub_jaxprs(eqn):
                collect(sub.eqns)

    collect(jaxpr.eqns)
    for i, (path, _) in enumerate(modules):
        if i not in called:
            raise ValueError(f"The cut at {path!r} cannot be made: the function never calls it.")
        if called.count(i) > 1:
            raise ValueError(
                f"The cut at {path!r} is not unique: the function calls it {called.count(i)} times. "
                f"Mark one of the calls with pipeline_enter_stage instead."
            )
    if called != sorted(called):
        order = [modules[i][0] for i in called]
        raise ValueError(
            f"The cuts {[p for p, _ in modules]} are out of order: the function calls them in the "
            f"order {order}; list them so."
        )


# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(jaxpr: jex.ClosedJaxpr, names: Sequence[str]) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`."""
    flat, sunk = sink_argument_chains(_inline_plain_calls(jaxpr))
    positions = []
    for name in names:
        position = next((i for i, e in enumerate(flat.eqns) if _in_scope(e, name)), None)
        if position is None:
            nested = next((e for e in flat.eqns if _contains_scope(e, name)), None)
            if nested is not None and nested.primitive.name in _jaxprs.CHECKPOINTS:
                position = flat.eqns.index(nested)
                inner = next(_jaxprs.sub_jaxprs(nested)).eqns
                if not _in_scope(inner[0], name):
                    nested, position = inner[0], None
            if position is None and nested is not None:
                raise ValueError(
                    f"The scope {name!r} is inside a `{nested.primitive.name}` at "
                    f"{_compat.source_line(nested)}, whose body is one unit: no cut can be made there."
                )
        if position is None:
            raise ValueError(f"No equation is under jax.named_scope({name!r}); {_known(_scopes(flat))}")
        while position > 0 and flat.eqns[position - 1] in sunk:
            position -= 1
        positions.append(position)
    if positions != sorted(positions):
        order = [n for _, n in sorted(zip(positions, names, strict=True))]
        raise ValueError(f"The cuts {list(names)} are out of order: they run in the order {order}.")
    if len(set(positions)) < len(positions):
        raise ValueError(f"Two of the cuts {list(names)} are at the same equation; drop one of them.")
    return insert_marks(flat, positions, names)


def _scope_path(eqn) -> str:
    return str(eqn.source_info.name_stack)


def _in_scope(eqn, name: str) -> bool:
    return re.search(rf"(^|[/(]){re.escape(name)}($|[/)])", _scope_path(eqn)) is not None


def _contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: _in_scope(e, name))


def _scopes(jaxpr) -> list[str]:
    return list(dict.fromkeys(s for e in jaxpr.eqns if (s := _scope_path(e))))


# ---- balance ------------------------------------------------------------------------------------


def cut_balanced(
    jaxpr: jex.ClosedJaxpr, num_stages: int, cost: _costs.Cost, is_whole: Callable[[str], Any]
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    Equations for whose name stack `is_whole` gives the same key are not cut apart.
    """
    flat, sunk = sink_argument_chains(_inline_plain_calls(jaxpr))
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    free = [not any(v in varying for v in e.outvars) for e in flat.eqns]
    eqns = [e for e, f in zip(flat.eqns, free, strict=True) if not f]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    units = [is_whole(_scope_path(e)) for e in eqns]
    last = {u: i for i, u in enumerate(units) if u is not None}
    open_until = -1
    for i in range(1, len(eqns)):
        open_until = max(open_until, last.get(units[i - 1], -1))
        if eqns[i - 1] in sunk or i <= open_until:
            crossing[i] = float("inf")
    try:
        cuts = _balance.balanced_cuts([cost(e) for e in eqns], crossing, num_stages)
    except ValueError as error:
        raise ValueError(f"split_stages: {error}") from None
    index = {id(e): i for i, e in enumerate(flat.eqns)}
    return insert_marks(flat, [index[id(eqns[c])] for c in cuts], [None] * len(cuts))


def _crossing_bytes(jaxpr, eqns) -> list[float]:
    """For each position, the bytes of the values made before it and read from it on."""
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    change = [0.0] * (len(eqns) + 2)
    for var, i in made.items():
        if var in last:
            change[i + 1] += _costs.nbytes(var)
            change[last[var] + 1] -= _costs.nbytes(var)
    crossing, live = [], 0.0
    for i in range(len(eqns) + 1):
        live += change[i]
        crossing.append(live)
    return crossing


# ---- shared -------------------------------------------------------------------------------------


def _inline_plain_calls(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return _jaxprs.inline(
        jaxpr,
        lambda e: e.primitive.name not in _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS
        and not _marks.is_stage_call(e),
    )


class _Equations:
    """A set of equations, told apart by identity."""

    def __init__(self, eqns):
        self._ids = {id(e) for e in eqns}
        self._keep = eqns

    def __contains__(self, eqn) -> bool:
        return id(eqn) in self._ids


def sink_argument_chains(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, _Equations]:
    """Moves what is computed from arguments alone, and lightly, to just before its first reader.

    So that a weight's cast, transpose or stacking goes with the stage that reads it: no cut should
    be made right after one of the equations moved, which are returned too.
    """
    roots: dict[Any, frozenset[Any]] = {v: frozenset([v]) for v in jaxpr.jaxpr.invars}
    arguments = set(jaxpr.jaxpr.invars)
    sunk: dict[Any, Any] = {}
    order: list[Any] = []
    placed: set[int] = set()

    def place(eqn):
        stack = [eqn]
        while stack:
            top = stack[-1]
            waiting = [
                sunk[v]
                for v in top.invars
                if not _jaxprs.is_literal(v) and v in sunk and id(sunk[v]) not in placed
            ]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if id(top) not in placed:
                placed.add(id(top))
                order.append(top)

    for eqn in jaxpr.eqns:
        union = frozenset().union(*(roots[v] for v in eqn.invars if not _jaxprs.is_literal(v)))
        roots.update((v, union) for v in eqn.outvars)
        light = eqn.primitive.name not in _HEAVY and all(
            _jaxprs.is_literal(v) or v in sunk or v in arguments for v in eqn.invars
        )
        if not eqn.effects and (len(union) <= 1 or light):
            sunk.update((v, eqn) for v in eqn.outvars)
        else:
            place(eqn)
    for var in jaxpr.jaxpr.outvars:
        if not _jaxprs.is_literal(var) and var in sunk:
            place(sunk[var])
    moved = _Equations(list(sunk.values()))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


_HEAVY = frozenset(
    {"dot_general", "conv_general_dilated", "gather", "scan", "while", "cond", "dynamic_slice"}
)


def insert_marks(jaxpr, positions: Sequence[int], names: Sequence[str | None]) -> jex.ClosedJaxpr:
    """Marks all values made before and read after each position as the entrance of a stage."""
    varying = _jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    known = _jaxprs.Substitution()
    made: list[Any] = []
    eqns: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in positions:
            k = positions.index(i)
            live = [v for v in made if last.get(v, -1) >= i]
            marked = [_jaxprs.fresh_var(v) for v in live]
            eqns.append(_marks.enter_equation([known(v) for v in live], marked, k + 1, names[k]))
            known.of.update(zip(live, marked, strict=True))
        eqns.append(known.rename(eqn))
        made.extend(v for v in eqn.outvars if v in varying)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)
