"""Sharding propagation: finds the specs of a jaxpr's values from those of its inputs.

A spec is never wrong; if a value is less split than it could be, XLA only moves more than it needs
to. The rules say what XLA's own propagation would, but on the jaxpr, so that a step has the same
programs on every mesh and in every schedule. Their source is Shardy's propagation
(openxla.org/shardy/propagation) and, before it, GSPMD (Xu et al., arXiv 2105.04663, section 3.5).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
from jax.sharding import PartitionSpec, Sharding

from jaxpp import _compat, _dimensions, _jaxprs, _primitives
from jaxpp._dimensions import found_again, shape_of
from jaxpp._specs import Spec, axes_of, only, replicated, spec_of
from jaxpp._typing import Atom, Eqn, Jaxpr, Var
from jaxpp.transforms.tasks import ScheduledLoop

#: A spec, or `None` for a value that may be split in any way: it is made of nothing that is split
#: (zeros, positions, random bits), and is split as the values that it is combined with.
MaybeSpec = Spec | None
Specs = Sequence[MaybeSpec]
Sizes = Mapping[str, int]
#: A jaxpr, open or closed.
AnyJaxpr = jex.ClosedJaxpr | Jaxpr
#: The specs of the variables of a jaxpr.
Known = dict[Var, MaybeSpec]
#: Finds the specs of the outputs of a jaxpr that an equation holds.
Outputs = Callable[[AnyJaxpr, Specs], list[MaybeSpec]]

_CONSTRAINTS = frozenset({"sharding_constraint", "shard_map"})
_SPLITTERS = _CONSTRAINTS | {"pipeline_loop"}
_SWEEPS = 2  # forward and back, after which the models of experiments/ change no more
_ROUNDS = 3  # after which a loop's carries have the specs of its body's results


def propagate(jaxpr: AnyJaxpr, specs: Specs, sizes: Sizes) -> Known:
    """Finds the spec of each variable of a jaxpr, forward from the specs of its inputs.

    A dimension that is split in one operand and whole in another is split in the result. If two
    operands disagree, the larger one wins, or the first of two of one size. Equations without a
    rule give values that are whole.

    Args:
        jaxpr: a jaxpr, open or closed; its constants count as values that may be split in any way.
        specs: one for each of its inputs, or `None` where it may be any.
        sizes: the number of devices along each axis.

    Returns:
        a spec, or `None` where it may be any, for each input and each variable that its equations
        make (not those inside calls and loops).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((4, 8)), jnp.ones((8, 6)))
        >>> batch, columns = (("data",), ()), ((), ("model",))
        >>> propagate(jaxpr, [batch, columns], {"data": 2, "model": 2})[jaxpr.jaxpr.outvars[0]]
        (('data',), ('model',))
    """
    known: Known = {}
    _forward(_jaxprs.opened(jaxpr), known, specs, functools.partial(_made, sizes=sizes), sizes)
    return known


def output_specs(jaxpr: AnyJaxpr, specs: Specs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs: as `propagate` finds them, then by their uses.

    An output that is used as well (a residual) is split where its uses split it: a dropout's mask
    is drawn for each head where the heads are.

    Returns:
        a spec, or `None` where it may be any, for each output; literals are whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: (x.sum(1), jnp.zeros(3)))(jnp.ones((4, 8)))
        >>> output_specs(jaxpr, [(("data",), ())], {"data": 2})
        [(('data',),), None]
    """

    def sweep(opened: Jaxpr, known: Known) -> None:
        for _ in range(_SWEEPS):
            _forward(opened, known, specs, functools.partial(output_specs, sizes=sizes), sizes)
            _backward(opened, known, sizes, {*opened.invars, *opened.constvars})

    return _outputs(jaxpr, specs, sweep)


def made_whole(jaxpr: jex.ClosedJaxpr, specs: Specs, sizes: Sizes) -> list[Eqn]:
    """Finds the equations, also inside calls and loops, that make values whole for want of a rule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(jnp.fft.fft(x)))(jnp.ones((4, 8)))
        >>> [e.primitive.name for e in made_whole(jaxpr, [(("data",), ())], {"data": 2})]
        ['fft']
    """
    found: dict[int, Eqn] = {}

    def outputs(inner: AnyJaxpr, specs: Specs) -> list[MaybeSpec]:
        def look(opened: Jaxpr, known: Known) -> None:
            _forward(opened, known, specs, outputs, sizes)
            for eqn in opened.eqns:
                axes = [a for s in _of_atoms(eqn.invars, known) for a in axes_of(s or ())]
                if any(sizes[a] > 1 for a in axes) and eqn.primitive.name not in RULES:
                    found[id(eqn)] = eqn

        return _outputs(inner, specs, look)

    outputs(jaxpr, specs)
    return list(found.values())


def _made(jaxpr: AnyJaxpr, specs: Specs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs, forward only."""
    return _outputs(jaxpr, specs, lambda j, known: known.update(propagate(j, specs, sizes)))


def _outputs(
    jaxpr: AnyJaxpr, specs: Specs, sweep: Callable[[Jaxpr, Known], None]
) -> list[MaybeSpec]:
    """Finds the specs of a jaxpr's outputs: those that `sweep` leaves, if any value is split."""
    opened, known = _jaxprs.opened(jaxpr), {}
    if not _splits_something(opened, specs):
        # What is made of values that are given is whole, the rest may be split in any way.
        given = [v for v, spec in zip(opened.invars, specs, strict=True) if spec]
        made = _jaxprs.descendants(opened.eqns, given)
        known.update((v, replicated(len(shape_of(v)))) for v in made)
    else:
        sweep(opened, known)
    return [
        replicated(len(shape_of(v))) if _jaxprs.is_literal(v) else known.get(v)
        for v in opened.outvars
    ]


def _splits_something(opened: Jaxpr, specs: Specs) -> bool:
    """Tells whether a value of a jaxpr is split: an input is, or an equation splits one."""

    def splits(eqn: Eqn) -> bool:
        return eqn.primitive.name in _SPLITTERS or bool(_jaxprs.shardings_of(eqn))

    return any(spec and any(spec) for spec in specs) or any(
        _jaxprs.contains(eqn, splits) for eqn in opened.eqns
    )


def _of_atoms(atoms: Sequence[Atom], known: Known) -> list[MaybeSpec]:
    return [None if _jaxprs.is_literal(v) else known[v] for v in atoms]


def _forward(opened: Jaxpr, known: Known, specs: Specs, outputs: Outputs, sizes: Sizes) -> None:
    """Adds to `known` the specs of a jaxpr's variables, from operands to results."""
    known.update(dict.fromkeys(opened.constvars))
    for var, spec in zip(opened.invars, specs, strict=True):
        known[var] = of_type(spec, var, sizes)
    for eqn in opened.eqns:
        results = _results(eqn, _of_atoms(eqn.invars, known), outputs, sizes)
        for var, spec in zip(eqn.outvars, results, strict=True):
            known[var] = of_type(merge([known.get(var), spec]), var, sizes)


# ---- from results to operands -------------------------------------------------------------------


def _backward(opened: Jaxpr, known: Known, sizes: Sizes, fixed: Collection[Var]) -> None:
    """Splits variables as their uses split them, but for those that are fixed or constrained."""
    constrained = (v for e in opened.eqns if e.primitive.name in _CONSTRAINTS for v in e.outvars)
    fixed = {*fixed, *constrained}
    for eqn in reversed(opened.eqns):
        for var, wanted in zip(eqn.invars, _wanted(eqn, known, sizes), strict=True):
            if not _jaxprs.is_literal(var) and var not in fixed and wanted and any(wanted):
                known[var] = of_type(merge([known[var], wanted]), var, sizes)


def _wanted(eqn: Eqn, known: Known, sizes: Sizes) -> Specs:
    """Returns the specs that an equation's operands would have, were they made of its results."""
    results = [known[v] for v in eqn.outvars]
    nothing: list[MaybeSpec] = [None] * len(eqn.invars)
    old, new = [[shape_of(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
    name = eqn.primitive.name
    if _jaxprs.called_jaxpr(eqn) is not None:
        return _wanted_by_call(eqn, known, sizes)
    if name == "reshape":
        return [results[0] and reshaped(results[0], new[0], old[0], sizes), *nothing[1:]]
    if name in EACH or name == "sharding_constraint":
        return results if old == new else nothing
    found = found_again(eqn)
    if found is None:
        return nothing
    entries: dict[int | None, tuple[str, ...]] = dict(enumerate(merge(results) or ()))
    # A dimension that is summed is split in one operand as it is in the other.
    for dimensions, spec in zip(found, _of_atoms(eqn.invars, known), strict=True):
        for to, axes in zip(dimensions, spec or (), strict=False):
            if to is not None and to >= len(new[0]):
                entries[to] = entries.get(to) or axes
    return [tuple(entries.get(to, ()) for to in dimensions) for dimensions in found]


def _wanted_by_call(eqn: Eqn, known: Known, sizes: Sizes) -> list[MaybeSpec]:
    opened = _jaxprs.opened(_jaxprs.called_jaxpr(eqn))
    inside = propagate(opened, _of_atoms(eqn.invars, known), sizes)
    for var, outer in zip(opened.outvars, eqn.outvars, strict=True):
        if not _jaxprs.is_literal(var):
            inside[var] = of_type(merge([inside[var], known[outer]]), var, sizes)
    _backward(opened, inside, sizes, opened.constvars)
    return [inside[v] for v in opened.invars]


# ---- the rule of each primitive ------------------------------------------------------------------


def _results(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    """Finds the specs of an equation's results; they are whole for want of a rule."""
    made = RULES.get(eqn.primitive.name, _whole)(eqn, specs, outputs, sizes)
    return [of_type(s, v, sizes) for s, v in zip(made, eqn.outvars, strict=True)]


def _whole(eqn: Eqn, specs: Specs, *_) -> list[MaybeSpec]:
    return [replicated(len(shape_of(v))) if any(specs) else None for v in eqn.outvars]


def _free(eqn: Eqn, *_) -> list[MaybeSpec]:
    return [None] * len(eqn.outvars)


def _combined(eqn: Eqn, specs: Specs, *_) -> list[MaybeSpec]:
    """Moves each operand's axes to the dimensions of the results where its own are found again."""
    if not any(specs):  # all free, or scalars
        return _free(eqn)
    found = found_again(eqn) or []
    order = sorted(range(len(specs)), key=lambda i: -math.prod(shape_of(eqn.invars[i])))
    entries = [
        (to, axes)
        for i in order
        if (spec := specs[i]) is not None
        for to, axes in zip(found[i], spec, strict=True)
        if to is not None
    ]
    ndims = [len(shape_of(v)) for v in eqn.outvars]
    return [overlay(n, [(to, axes) for to, axes in entries if to < n]) for n in ndims]


def _reshape(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    if specs[0] is None or eqn.params.get("dimensions") is not None:
        return [specs[0] and replicated(len(shape_of(eqn.outvars[0])))]
    return [reshaped(specs[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), sizes)]


def _sharding_constraint(eqn: Eqn, specs: Specs, *_) -> list[MaybeSpec]:
    return [pinned(specs[0], eqn.params["sharding"], eqn.invars[0])]


def _each(eqn: Eqn, specs: Specs, *_) -> list[MaybeSpec]:
    """Returns for each result the spec of its operand, one of the last, where dimensions agree.

    Under `vmap`, a collective that sums over devices also sums over dimensions.
    """
    summed = [a for a in eqn.params.get("axes", ()) if not isinstance(a, str)]

    def one(var: Atom, operand: Atom, spec: MaybeSpec) -> MaybeSpec:
        old, new = shape_of(operand), shape_of(var)
        kept = [d for d in range(len(old)) if d not in summed]
        if spec is None or len(kept) != len(new):
            return None if spec is None else replicated(len(new))
        return tuple(spec[d] if old[d] == n else () for d, n in zip(kept, new, strict=True))

    skipped = len(eqn.invars) - len(eqn.outvars)
    return list(map(one, eqn.outvars, eqn.invars[skipped:], specs[skipped:]))


def _call(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    return outputs(_jaxprs.opened(_jaxprs.called_jaxpr(eqn)), specs)


def _jit(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    """Returns the specs of the results of a nested `jit`, which may have shardings of its own."""
    pinned_in = eqn.params.get("in_shardings", (None,) * len(specs))
    specs = list(map(pinned, specs, pinned_in, eqn.invars))
    results = _call(eqn, specs, outputs, sizes)
    pinned_out = eqn.params.get("out_shardings", (None,) * len(results))
    return list(map(pinned, results, pinned_out, eqn.outvars))


def _cond(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    branches = [outputs(b, specs[1:]) for b in eqn.params["branches"]]
    return [merge(results) for results in zip(*branches, strict=True)]


def _while(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    skipped, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts = specs[skipped : skipped + num_consts]

    def body(carry):
        return outputs(eqn.params["body_jaxpr"], [*consts, *carry]), None

    return _fixpoint(body, specs[skipped + num_consts :])[0]


def _scan(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    num_consts, num_carry = _compat.scan_parts(eqn)
    carry, xs = specs[num_consts:][:num_carry], specs[num_consts + num_carry :]
    return _iterated(eqn.params["jaxpr"], specs[:num_consts], carry, xs, outputs)


def _iterated(
    jaxpr: AnyJaxpr,
    consts: Specs,
    carry: Specs,
    xs: Specs,
    outputs: Outputs,
) -> list[MaybeSpec]:
    rows = [_row(s) for s in xs]

    def body(carry):
        results = outputs(jaxpr, [*consts, *carry, *rows])
        return results[: len(carry)], results[len(carry) :]

    carry, ys = _fixpoint(body, carry)
    return [*carry, *map(_stacked, ys)]


def _pipeline_loop(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    """Does as `_scan` for each direction; replicas are rows, which keep the axes that some have."""
    loop = ScheduledLoop.of(eqn)
    axes, num_consts = (), loop.num_consts
    if loop.replicas > 1:
        axes = next((s[0] for s in specs[num_consts:] if s and s[0]), ())
        own = [*specs[:num_consts], *(s and s[1:] for s in specs[num_consts:])]
        specs = [s and only(s, [a for a in sizes if a not in axes]) for s in own]
    given = dict(zip(loop.operands, specs, strict=True))
    consts, xs = ([given[v, None] for v in own] for own in (loop.consts, loop.xs))
    each = []
    for direction in range(loop.num_directions):
        carry = [given[v, direction] for v in loop.carries]
        each.append(_iterated(loop.body, consts, carry, xs, outputs))
    made = [s for own in zip(*each, strict=True) for s in own]
    return made if loop.replicas == 1 else [None if s is None else (axes, *s) for s in made]


def _fixpoint(body: Callable, carry: Specs) -> tuple[list[MaybeSpec], Any]:
    """Finds the specs of a loop's carries, and the other results of `body` for these specs."""
    carry = list(carry)
    for _ in range(_ROUNDS):
        results, rest = body(carry)
        merged = [merge(pair) for pair in zip(carry, results, strict=True)]
        if merged == carry:
            break
        carry = merged
    return carry, rest  # pyright: ignore[reportPossiblyUnboundVariable]


def _row(spec: MaybeSpec) -> MaybeSpec:
    """Returns the spec of a slice along the first dimension."""
    return None if spec is None else spec[1:]


def _stacked(spec: MaybeSpec) -> MaybeSpec:
    """Returns the spec of values stacked along a new first dimension."""
    return None if spec is None else ((), *spec)


def _shard_map(eqn: Eqn, specs: Specs, outputs: Outputs, sizes: Sizes) -> list[MaybeSpec]:
    """Takes the `out_specs` for the `shard_map`'s own axes, and the body's specs for the others."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))
    others = [axis for axis in sizes if axis not in manual]
    inside: list[MaybeSpec] = [None] * len(eqn.outvars)
    if any(sizes[axis] > 1 for axis in others):  # else there is nothing to find
        inside = outputs(params["jaxpr"], [s and only(s, others) for s in specs])

    def both(var: Var, outer: PartitionSpec, inner: MaybeSpec) -> Spec:
        own = spec_of(outer, len(shape_of(var)))
        return tuple(o + i for o, i in zip(own, inner or replicated(len(own)), strict=True))

    return list(map(both, eqn.outvars, params["out_specs"], inside))


#: These hand on their operands, or combine those of several devices.
EACH = """
    all_gather all_gather_invariant optimization_barrier pcast pipeline_enter_stage
    pmax pmin ppermute psum psum_invariant pvary reduce_scatter
""".split()

RULES: dict[str, Callable[..., list[MaybeSpec]]] = {
    **dict.fromkeys(_dimensions.RULES, _combined),
    **dict.fromkeys(_primitives.CALLS, _call),
    **dict.fromkeys(EACH, _each),
    **dict.fromkeys(["empty", "iota", "rng_bit_generator", "rng_uniform"], _free),
    "cond": _cond,
    "jit": _jit,
    "pipeline_loop": _pipeline_loop,
    "reshape": _reshape,
    "scan": _scan,
    "shard_map": _shard_map,
    "sharding_constraint": _sharding_constraint,
    "while": _while,
}


# ---- specs ---------------------------------------------------------------------------------------


def merge(specs: Specs) -> MaybeSpec:
    """Merges several specs of a value: a dimension is split if one of them splits it.

    Where they disagree, the first wins.

    Example:
        >>> merge([None, (("data",), ()), ((), ("data",)), ((), ("model",))])
        (('data',), ('model',))
    """
    known = [s for s in specs if s is not None]
    if not known:
        return None
    return overlay(len(known[0]), ((i, e) for s in known for i, e in enumerate(s)))


def overlay(ndim: int, entries: Iterable[tuple[int, tuple[str, ...]]]) -> Spec:
    """Makes a spec of (dimension, axes) pairs, the most important first, each axis at most once."""
    spec: list[tuple[str, ...]] = [()] * ndim
    used: set[str] = set()
    for dim, axes in entries:
        have = spec[dim]
        if axes[: len(have)] != have:
            continue
        for axis in axes[len(have) :]:
            if axis in used:
                break
            used.add(axis)
            spec[dim] += (axis,)
    return tuple(spec)


def of_type(spec: MaybeSpec, var: Atom, sizes: Sizes) -> MaybeSpec:
    """Reduces a spec to what a variable's type allows.

    It keeps each axis once, and only where the axis divides the dimension.
    """
    shape = shape_of(var)
    if not shape:
        return ()
    if spec is None:
        return None
    fitting = []
    for n, axes in zip(shape, spec, strict=True):
        for axis in axes:
            if n % sizes[axis] == 0:
                n //= sizes[axis]
            else:
                axes = axes[: axes.index(axis)]
                break
        fitting.append(axes)
    return overlay(len(shape), enumerate(fitting))


def pinned(spec: MaybeSpec, sharding: Sharding | None, var: Atom) -> MaybeSpec:
    """Returns the spec that a sharding names; `spec` where it names none, or leaves one open."""
    named = getattr(sharding, "spec", None)
    if named is None:
        return spec
    open_ = {d for d, e in enumerate(named) if e is PartitionSpec.UNCONSTRAINED}
    entries = PartitionSpec(*(None if d in open_ else e for d, e in enumerate(named)))
    ndim = len(shape_of(var))
    given = [(d, e) for d, e in enumerate(spec or ()) if d in open_]
    return overlay(ndim, [*enumerate(spec_of(entries, ndim)), *given])


def reshaped(spec: Spec, old: Sequence[int], new: Sequence[int], sizes: Sizes) -> Spec:
    """Finds the spec of a reshaped array for which nothing moves; drops axes that would move it.

    An axis of size s gives the element at index i of the flattened array to the device of
    coordinate `i // weight % s`. The weight follows from the axis's place in its dimension. The
    axis splits the new dimension in which the next place has the same weight.

    Example:
        >>> reshaped((("data",), ("model",), ()), (4, 6, 5), (4, 30), {"data": 2, "model": 2})
        (('data',), ('model',))
        >>> reshaped((("data",), ("model",), ()), (4, 6, 5), (24, 5), {"data": 2, "model": 2})
        (('data',), ())
    """
    places = []  # (weight times size, axis), from the outermost
    for d, axes in enumerate(spec):
        span = math.prod(old[d:])
        for axis in axes:
            places.append((span, axis))
            span //= sizes[axis]
    result: list[tuple[str, ...]] = [()] * len(new)
    spans = [math.prod(new[d:]) for d in range(len(new))]
    rests = list(new)
    for span, axis in places:
        for d in range(len(new)):
            if spans[d] == span and rests[d] % sizes[axis] == 0:
                result[d] += (axis,)
                spans[d] //= sizes[axis]
                rests[d] //= sizes[axis]
                break
    return tuple(result)
