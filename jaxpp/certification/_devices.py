"""The rule of `shard_map`: a computation on several devices, equation by equation on all."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxpp import _compat, jaxprs
from jaxpp.certification import _equations
from jaxpp.certification._table import Term, inputs_of, name_of
from jaxpp.certification._terms import moved_to_front
from jaxpp.jaxprs import Eqn

if TYPE_CHECKING:
    from jaxpp.certification._evaluate import Evaluator

#: The terms of one value, one for each device.
Parts = tuple[Term, ...]

#: The iterations up to which a scan with collectives in it is unrolled.
_UNROLLED = 256


class _Unknown(Exception):
    """A computation on devices for which there is no rule."""


def shard_map(evaluator: "Evaluator", eqn: Eqn, args: Sequence[Term]) -> Sequence[Term]:
    """Runs a computation on several devices.

    If there is no rule for something in it, it is an unknown function of all operands: its body is
    the same on all devices.
    """
    body = eqn.params["jaxpr"]
    specs = [*eqn.params["in_specs"], *eqn.params["out_specs"]]
    names = {axis for spec in specs for entry in spec for axis in _axes_of(entry)}
    names |= {axis for inner in jaxprs.opened(body).eqns for axis in _named_in(inner)}
    mesh = eqn.params["mesh"]
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if not names <= sizes.keys():
        return _equations.unknown(evaluator, eqn)(args)
    devices = _Devices(evaluator, {axis: sizes[axis] for axis in mesh.axis_names if axis in names})
    happened = len(evaluator.effects)
    try:
        given = zip(args, eqn.params["in_specs"], strict=True)
        made = devices.run(body, [devices.parts(t, spec) for t, spec in given])
    except _Unknown:
        del evaluator.effects[happened:]
        return _equations.unknown(evaluator, eqn)(args)
    evaluator.terms.eqn = eqn
    results = zip(made, eqn.params["out_specs"], strict=True)
    return [devices.put_together(own, spec) for own, spec in results]


def _axes_of(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _own_axes(eqn: Eqn) -> tuple[Any, ...]:
    """The axes that an equation says it works over: names, and numbers of dimensions."""
    return _axes_of(eqn.params.get("axis_name", eqn.params.get("axes")))


def _is_collective(eqn: Eqn) -> bool:
    """Tells whether what an equation gives on a device may depend on which one it is."""
    return any(isinstance(axis, str) for axis in _own_axes(eqn))


def _named_in(eqn: Eqn) -> set[str]:
    """The axes that an equation names, or one inside it."""
    own = {axis for axis in _own_axes(eqn) if isinstance(axis, str)}
    inner = (e for sub in jaxprs.sub_jaxprs(eqn) for e in sub.eqns)
    return own.union(*map(_named_in, inner))


class _Devices:
    """The devices along some axes: one for each position, the last axis the fastest.

    Args:
        evaluator: runs what is the same on each device.
        sizes: the axes and their sizes.
    """

    def __init__(self, evaluator: "Evaluator", sizes: dict[str, int]):
        self.evaluator, self.terms, self.sizes = evaluator, evaluator.terms, sizes
        positions = itertools.product(*map(range, sizes.values()))
        self.positions = [dict(zip(sizes, own, strict=True)) for own in positions]
        #: The terms that were scattered, by the dimension and the parts.
        self._wholes: dict[tuple[int, Parts], Term] = {}

    # ---- arrays and their parts --------------------------------------------------------------

    def index(self, device: int, axes: Iterable[str]) -> int:
        """The number of a device along some axes, the first of them the slowest."""
        position = self.positions[device]
        return functools.reduce(lambda n, axis: n * self.sizes[axis] + position[axis], axes, 0)

    def groups(self, axes: Sequence[str], groups: Any = None) -> list[list[int]]:
        """The devices that differ along axes alone, in order; or those of groups of numbers."""
        found: dict[Any, list[int]] = {}
        for device, position in enumerate(self.positions):
            number = self.index(device, axes)
            own = next(k for k, group in enumerate(groups) if number in group) if groups else 0
            others = tuple(n for axis, n in position.items() if axis not in axes)
            found.setdefault((others, own), []).append(device)
        order = {n: k for group in groups for k, n in enumerate(group)} if groups else None

        def place(device):
            number = self.index(device, axes)
            return order[number] if order else number

        return [sorted(own, key=place) for own in found.values()]

    def parts(self, t: Term, spec: Any) -> Parts:
        """The part of an array that each device has."""
        parts = [t] * len(self.positions)
        for dimension, entry in enumerate(spec):
            if axes := _axes_of(entry):
                for group in self.groups(axes):
                    cut = self._cut(parts[group[0]], dimension, len(group))
                    for device in group:
                        parts[device] = cut[self.index(device, axes)]
        return tuple(parts)

    def put_together(self, parts: Parts, spec: Any) -> Term:
        """The array of which each device has a part."""
        own = list(parts)
        for dimension, entry in reversed([*enumerate(spec)]):
            if axes := _axes_of(entry):
                for group in self.groups(axes):
                    whole = self._joined([own[device] for device in group], dimension)
                    for device in group:
                        own[device] = whole
        if len(set(own)) == 1:
            return own[0]
        # Its copies differ, so that the result is any of them.
        return self.terms.term("copies", (), own, own[0].shape, own[0].dtype)

    def _cut(self, t: Term, dimension: int, count: int) -> list[Term]:
        size = t.shape[dimension] // count
        first, back = moved_to_front(dimension, len(t.shape))
        moved = self.terms.transpose(t, first)
        rows = [self.terms.rows(moved, d * size, (d + 1) * size) for d in range(count)]
        return [self.terms.transpose(own, back) for own in rows]

    def _joined(self, parts: Sequence[Term], dimension: int) -> Term:
        if (whole := self._wholes.get((dimension, tuple(parts)))) is not None:
            return whole
        first, back = moved_to_front(dimension, len(parts[0].shape))
        moved = [self.terms.transpose(t, first) for t in parts]
        return self.terms.transpose(self.terms.join_rows(moved), back)

    # ---- equations ---------------------------------------------------------------------------

    def run(self, jaxpr: Any, args: Sequence[Parts]) -> list[Parts]:
        """The results of a jaxpr on all devices, equation by equation.

        Raises:
            _Unknown: there is no rule for something in it.
        """
        opened, all_devices = jaxprs.opened(jaxpr), range(len(self.positions))
        known = dict(zip(inputs_of(jaxpr), args, strict=True))
        for v, value in zip(opened.constvars, _compat.constants_of(jaxpr), strict=False):
            known[v] = (self.terms.constant(value),) * len(all_devices)

        def read(atom) -> Parts:
            if jaxprs.is_literal(atom):
                return (self.terms.of_literal(atom),) * len(all_devices)
            return known[atom]

        for eqn in opened.eqns:
            operands = [read(v) for v in eqn.invars]
            self.terms.eqn = eqn
            if _named_in(eqn):
                made = self._together(eqn, operands)
            else:
                rule = _equations.rule_of(self.evaluator, eqn)
                each = [rule([own[d] for own in operands]) for d in all_devices]
                made = [tuple(own) for own in zip(*each, strict=True)]
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in opened.outvars]

    def _together(self, eqn: Eqn, operands: list[Parts]) -> list[Parts]:
        """The results of an equation in which devices depend on each other."""
        name = eqn.primitive.name
        if not _compat.is_of_library(eqn.primitive):
            raise _Unknown
        if name in _RULES:
            made = [tuple(parts) for parts in _RULES[name](self, eqn, operands)]
            types = [(v.aval.shape, name_of(v.aval.dtype)) for v in eqn.outvars]
            if any((own[0].shape, own[0].dtype) != t for own, t in zip(made, types, strict=True)):
                raise _Unknown
            return made
        if name in _equations.CALLS:
            return self.run(_equations.body_of(eqn), operands)
        if name == "scan" and eqn.params["length"] <= _UNROLLED:
            return self._scan(eqn, operands)
        if name == "cond" and len(set(operands[0])) == 1:
            return self._cond(eqn, operands)
        raise _Unknown

    def _scan(self, eqn: Eqn, args: Sequence[Parts]) -> list[Parts]:
        terms, (num_consts, num_carry) = self.terms, _compat.scan_parts(eqn)
        consts, carry = args[:num_consts], list(args[num_consts:][:num_carry])
        xs, length = args[num_consts + num_carry :], eqn.params["length"]
        ys: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            rows = [tuple(terms.row(t, i) for t in x) for x in xs]
            made = self.run(eqn.params["jaxpr"], [*consts, *carry, *rows])
            carry, ys[i] = made[:num_carry], made[num_carry:]
        if not length:
            raise _Unknown
        each = zip(*ys, strict=True)
        return [*carry, *(tuple(map(terms.stack, zip(*own, strict=True))) for own in each)]

    def _cond(self, eqn: Eqn, args: Sequence[Parts]) -> list[Parts]:
        terms, branches = self.terms, eqn.params["branches"]
        index, count = terms.index_of_case(args[0][0], len(branches)), len(branches)
        if index.value is not None:
            return self.run(branches[int(index.value)], args[1:])
        cases = []
        for k, branch in enumerate(branches):
            with self.evaluator.guarded(index, k, count):
                known = [
                    tuple(terms.where_known(t, index, k, count) for t in own) for own in args[1:]
                ]
                cases.append(self.run(branch, known))
        return [
            tuple(terms.choice(index, parts) for parts in zip(*own, strict=True))
            for own in zip(*cases, strict=True)
        ]

    # ---- collectives -------------------------------------------------------------------------

    def _groups_of(self, eqn: Eqn) -> list[list[int]]:
        names = [axis for axis in _own_axes(eqn) if isinstance(axis, str)]
        return self.groups(names, eqn.params.get("axis_index_groups"))

    def _by_group(self, eqn: Eqn, parts: Parts, make: Callable[[list[Term]], Sequence[Term]]):
        """Gives each device of a group what is made for it of the values of all."""
        made: list[Any] = [None] * len(parts)
        for group in self._groups_of(eqn):
            for device, term in zip(group, make([parts[d] for d in group]), strict=True):
                made[device] = term
        return made

    def _combined(self, how: str, parts: Sequence[Term]) -> Term:
        op = self.terms.op(how, (), parts[0].shape, parts[0].dtype, self.terms.eqn, 0)
        return functools.reduce(lambda a, b: self.terms.elementwise(op, [a, b]), parts)

    def _reduce(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        how = _COMBINED_BY[eqn.primitive.name]
        dimensions = [axis for axis in _own_axes(eqn) if not isinstance(axis, str)]

        def total(parts):
            own = [self.terms.reduce(t, f"reduce_{_REDUCED_BY[how]}", dimensions) for t in parts]
            return [self._combined(how, own)] * len(parts)

        return [self._by_group(eqn, parts, total) for parts in operands]

    def _gather(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        dimension, tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]

        def whole(parts):
            own = parts if tiled else [self._with_dimension(t, dimension) for t in parts]
            return [self._joined(own, dimension)] * len(parts)

        return [self._by_group(eqn, operands[0], whole)]

    def _scatter(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        dimension, tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]

        def cut(parts):
            total = self._combined("add", parts)
            own = self._cut(total, dimension, len(parts))
            self._wholes[dimension, tuple(own)] = total
            return own if tiled else [self._without_dimension(t, dimension) for t in own]

        return [self._by_group(eqn, operands[0], cut)]

    def _exchange(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]

        def exchanged(parts):
            cut = [self._cut(t, split, len(parts)) for t in parts]
            return [self._joined(own, concat) for own in zip(*cut, strict=True)]

        return [self._by_group(eqn, operands[0], exchanged)]

    def _permute(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        source = {to: of for of, to in eqn.params["perm"]}

        def permuted(parts):
            nothing = self.terms.full(0, parts[0].shape, parts[0].dtype)
            return [parts[source[d]] if d in source else nothing for d in range(len(parts))]

        return [self._by_group(eqn, own, permuted) for own in operands]

    def _index(self, eqn: Eqn, operands: Sequence[Parts]) -> list[Any]:
        axes, dtype = _own_axes(eqn), name_of(eqn.outvars[0].aval.dtype)
        numbers = [self.index(d, axes) for d in range(len(self.positions))]
        return [[self.terms.full(number, (), dtype) for number in numbers]]

    def _with_dimension(self, t: Term, dimension: int) -> Term:
        return self.terms.reshape(t, (*t.shape[:dimension], 1, *t.shape[dimension:]))

    def _without_dimension(self, t: Term, dimension: int) -> Term:
        return self.terms.reshape(t, (*t.shape[:dimension], *t.shape[dimension + 1 :]))


_COMBINED_BY = {"psum": "add", "psum_invariant": "add", "pmax": "max", "pmin": "min"}
_REDUCED_BY = {"add": "sum", "max": "max", "min": "min"}
_RULES: dict[str, Callable[[_Devices, Eqn, list[Parts]], Sequence[Any]]] = {
    **dict.fromkeys(_COMBINED_BY, _Devices._reduce),
    "all_gather": _Devices._gather,
    "all_gather_invariant": _Devices._gather,
    "all_to_all": _Devices._exchange,
    "axis_index": _Devices._index,
    "ppermute": _Devices._permute,
    "pvary": lambda devices, eqn, operands: operands,
    "reduce_scatter": _Devices._scatter,
}
