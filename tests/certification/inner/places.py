"""The equations of a bundle's computations, also inside others, and a change of one of them."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp._program import Bundle, Run


class Step(NamedTuple):
    """A step into an equation: its position, and which of its parameters has the jaxpr."""

    eqn: int
    name: str
    item: int | None


class Site(NamedTuple):
    """An equation: of which computation, in which jaxpr in it, at which position."""

    computation: int
    path: tuple[Step, ...]
    at: int


class Change(NamedTuple):
    """All equations of a jaxpr, and its results, after an edit."""

    eqns: Sequence[Any]
    outvars: Sequence[Any]


def sites_of(bundle: Bundle) -> list[Site]:
    """Finds all equations."""
    return [
        Site(n, path, at)
        for n, computation in enumerate(bundle.computations)
        for path, jaxpr in _jaxprs_in(computation.jaxpr, ())
        for at in range(len(jaxpr.eqns))
    ]


def _jaxprs_in(jaxpr: Any, path: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], Any]]:
    inside = jaxprs.opened(jaxpr)
    yield path, inside
    for i, eqn in enumerate(inside.eqns):
        for name, value in eqn.params.items():
            if isinstance(value, _compat.JaxprTypes):
                yield from _jaxprs_in(value, (*path, Step(i, name, None)))
            elif isinstance(value, tuple):
                for k, item in enumerate(value):
                    if isinstance(item, _compat.JaxprTypes):
                        yield from _jaxprs_in(item, (*path, Step(i, name, k)))


def _inner(eqn: Any, step: Step) -> Any:
    value = eqn.params[step.name]
    return value if step.item is None else value[step.item]


@dataclasses.dataclass
class Place:
    """An equation that an edit changes; `shards` are the sizes of the axes of a `shard_map`."""

    rng: random.Random
    site: Site
    jaxpr: Any
    eqn: Any
    shards: dict[str, int]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def before(self) -> list[Any]:
        """The equations before it."""
        return list(self.jaxpr.eqns[: self.site.at])

    @property
    def after(self) -> list[Any]:
        return list(self.jaxpr.eqns[self.site.at + 1 :])

    def scope(self) -> list[Any]:
        """The variables that it may read."""
        found = [*self.jaxpr.constvars, *self.jaxpr.invars, *jaxprs.results_of(self.before)]
        return [v for v in found if not _compat.is_ref(v) and hasattr(v.aval, "dtype")]

    def like(self, atom: Any) -> list[Any]:
        """The other variables of an atom's type that it may read."""
        return [v for v in self.scope() if v is not atom and is_like(v, atom)]

    def change(self, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Change:
        """Puts equations in its place."""
        results = self.jaxpr.outvars if outvars is None else outvars
        return Change([*self.before, *eqns, *self.after], results)

    def replaced(self, **changes: Any) -> Change:
        """Puts one with other operands or parameters in its place."""
        return self.change([self.eqn.replace(**changes)])

    def trace(self, fun: Callable, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with self._axes():
            return jaxprs.record(fun, operands, self.eqn)

    @contextlib.contextmanager
    def _axes(self):
        if not self.shards:
            yield
            return
        with jax.sharding.use_abstract_mesh(_compat.mesh_of(self.eqn)):
            yield

    def instead(self, fun: Callable, operands: Sequence[Any] | None = None) -> Change | None:
        """Puts a function of its operands in its place; None if the results have other types."""
        given = self.eqn.invars if operands is None else operands
        eqns, made = self.trace(fun, given)
        if len(made) != len(self.eqn.outvars):
            return None
        if not all(map(is_like, made, self.eqn.outvars)):
            return None
        return self.change(jaxprs.with_results(eqns, made, self.eqn.outvars))

    def on_operand(self, k: int, fun: Callable, others: Sequence[Any] = ()) -> Change | None:
        """Gives it a function of operand number `k`, and of other variables, for that operand."""
        atom = self.eqn.invars[k]
        eqns, (made,) = self.trace(fun, [atom, *others])
        if not is_like(made, atom):
            return None
        invars = list(self.eqn.invars)
        invars[k] = made
        return self.change([*eqns, self.eqn.replace(invars=invars)])

    def on_result(self, k: int, fun: Callable, others: Sequence[Any] = ()) -> Change | None:
        """Gives a function of result number `k`, and of other variables, for that result."""
        result = self.eqn.outvars[k]
        plain = jaxprs.fresh_var(result)
        eqns, made = self.trace(fun, [plain, *others])
        if not is_like(made[0], result):
            return None
        outvars = list(self.eqn.outvars)
        outvars[k] = plain
        eqns = jaxprs.with_results(eqns, made, [result])
        return self.change([self.eqn.replace(outvars=outvars), *eqns])

    def bind(self, params: dict[str, Any] | None = None) -> Callable:
        """Its operation as a function, with other parameters if given."""
        own: Any = self.eqn.params if params is None else params
        return lambda *args: self.eqn.primitive.bind(*args, **own)


def is_like(a: Any, b: Any) -> bool:
    """Tells whether two atoms have one shape and dtype."""
    one, other = a.aval, b.aval
    if not (hasattr(one, "dtype") and hasattr(other, "dtype")):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def at(rng: random.Random, bundle: Bundle, site: Site) -> Place:
    """Finds the equation of a site."""
    jaxpr, shards = jaxprs.opened(bundle.computations[site.computation].jaxpr), {}
    for step in site.path:
        eqn = jaxpr.eqns[step.eqn]
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            shards |= dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        jaxpr = jaxprs.opened(_inner(eqn, step))
    return Place(rng, site, jaxpr, jaxpr.eqns[site.at], shards)


def changed(bundle: Bundle, site: Site, change: Change, in_run: random.Random | None) -> Bundle:
    """Makes the bundle with a change; for a run of its own if `in_run` draws one."""
    computation = bundle.computations[site.computation]
    new = dataclasses.replace(computation, jaxpr=_rebuilt(computation.jaxpr, site.path, change))
    computations = list(bundle.computations)
    if in_run is None:
        computations[site.computation] = new
        return dataclasses.replace(bundle, computations=tuple(computations))
    runs = [
        (r, i)
        for r, program in enumerate(bundle.programs)
        for i, run in enumerate(program.instructions)
        if isinstance(run, Run) and run.computation == site.computation
    ]
    rank, i = in_run.choice(runs)
    programs = list(bundle.programs)
    instructions: list[Any] = list(programs[rank].instructions)
    instructions[i] = dataclasses.replace(instructions[i], computation=len(computations))
    programs[rank] = dataclasses.replace(programs[rank], instructions=tuple(instructions))
    return dataclasses.replace(bundle, computations=(*computations, new), programs=tuple(programs))


def _rebuilt(jaxpr: Any, path: Sequence[Step], change: Change) -> Any:
    inside = jaxprs.opened(jaxpr)
    eqns, outvars = list(change.eqns), list(change.outvars)
    if path:
        step, *rest = path
        eqns, outvars = list(inside.eqns), list(inside.outvars)
        eqn = eqns[step.eqn]
        new = _rebuilt(_inner(eqn, step), rest, change)
        value = eqn.params[step.name]
        if step.item is not None:
            items = list(value)
            items[step.item] = new
            kind: Any = type(value)
            new = kind(*items) if hasattr(value, "_fields") else kind(items)
        params = {**eqn.params, step.name: new}
        subs = [jaxprs.opened(s).effects for s in jaxprs.sub_jaxprs(eqn.replace(params=params))]
        eqns[step.eqn] = eqn.replace(params=params, effects=_effects(eqn.effects, subs))
    effects = _effects(inside.effects, [e.effects for e in eqns])
    new = inside.replace(eqns=eqns, outvars=outvars, effects=effects)
    return jaxpr.replace(jaxpr=new) if isinstance(jaxpr, jex.ClosedJaxpr) else new


def _effects(old: Any, inner: Sequence[Any]) -> Any:
    """The effects of what has inner ones; those on references keep their numbers."""
    now = {e for own in inner for e in own if not hasattr(e, "input_index")}
    return frozenset(e for e in old if hasattr(e, "input_index")) | now
