"""Counts the operations of products in jaxprs, those with the same operands once."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from jaxpp import _compat
from jaxpp.jaxprs import primitives
from jaxpp.jaxprs._equations import called_jaxpr, is_literal, manual_axes, opened, sub_jaxprs
from jaxpp.jaxprs._flops import flops
from jaxpp.jaxprs._same import key_of_params, key_of_value
from jaxpp.jaxprs._typing import Eqn

_PRODUCTS = primitives.CONTRACTIONS | {"ragged_dot_general"}
#: Their results have the values of their operands.
_SAME_VALUES = primitives.HANDS_ON | {"copy", "name", "optimization_barrier", "stop_gradient"}


class Products:
    """Counts the floating-point operations of products, each once for the same operands.

    The products are those of matrices, and convolutions, as `flops` counts them. Each value gets a
    number, by which the same operation on the same operands is known again (value numbering:
    Alpern, Wegman, Zadeck, "Detecting equality of variables in programs", POPL 1988). In a loop a
    number stands for the value of any one iteration. It sees through calls, checkpoints and loops:
    what a checkpoint computes again has the numbers of what was computed first.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> twice = jax.make_jaxpr(lambda x, w: (x @ w) * (x @ w))(x, w)
        >>> products = Products()
        >>> operands = [products.number(name) for name in "xw"]
        >>> _ = products.run(twice, operands)
        >>> products.flops
        48.0
    """

    def __init__(self) -> None:
        #: The operations that have been counted.
        self.flops = 0.0
        self._numbers: dict[Hashable, int] = {}
        self._counted: set[Hashable] = set()
        #: By the id of an equation: itself, so that the id stays its own, a key, and its products.
        self._facts: dict[int, tuple[Eqn, Hashable, float]] = {}
        self._literals: dict[int, tuple[Any, int]] = {}
        #: The number of an iteration's value, by that of the array which a loop stacks them to and
        #: the loop's depth; and of a shard's value, by that of the whole and its spec.
        self._element: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        """Returns the number of the value that a key stands for."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(
        self,
        jaxpr: Any,
        inputs: Sequence[int],
        within: Hashable = None,
        *,
        times: float = 1.0,
        depth: int = 0,
    ) -> list[int]:
        """Counts the products of a jaxpr.

        Args:
            jaxpr: the jaxpr, open or closed.
            inputs: the numbers of its inputs.
            within: a product is counted once for the same operands and the same of these.
            times: how often the jaxpr runs; 0 counts nothing.
            depth: how many loops are around it.

        Returns:
            The numbers of its results.
        """
        inside = opened(jaxpr)
        constants = _compat.constants_of(jaxpr)
        known = {
            v: self.number(("constant", id(c)))
            for v, c in zip(inside.constvars, constants, strict=False)
        }
        known |= dict(zip(inside.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return self._literal(atom) if is_literal(atom) else known[atom]

        for eqn in inside.eqns:
            results = self._equation(eqn, [read(a) for a in eqn.invars], within, times, depth)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in inside.outvars]

    def _equation(
        self, eqn: Eqn, operands: list[int], within: Hashable, times: float, depth: int
    ) -> list[int]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in _SAME_VALUES and len(operands) == count:
            return operands
        if (body := called_jaxpr(eqn)) is not None and len(opened(body).invars) == len(operands):
            return self.run(body, operands, within, times=times, depth=depth)
        if name == "scan":
            return self._scan(eqn, operands, within, times, depth)
        if name == "while":
            return self._while(eqn, operands, within, times, depth)
        if name == "cond":
            return self._cond(eqn, operands, within, times, depth)
        if name == "shard_map":
            return self._shard_map(eqn, operands, within, times, depth)
        _, key, flops = self._facts_of(eqn)
        operation = self.number((key, *operands))
        if flops and times and (operation, within) not in self._counted:
            self._counted.add((operation, within))
            self.flops += times * flops
        return [self.number(("result", n, operation)) for n in range(count)]

    def _facts_of(self, eqn: Eqn) -> tuple[Eqn, Hashable, float]:
        if id(eqn) not in self._facts:
            key = self.number((eqn.primitive, key_of_params(eqn)))
            self._facts[id(eqn)] = eqn, ("operation", key), _products_of(eqn)
        return self._facts[id(eqn)]

    def _literal(self, atom: Any) -> int:
        if id(atom) not in self._literals:
            key = "literal", str(atom.aval), key_of_value(atom.val)
            self._literals[id(atom)] = atom, self.number(key)
        return self._literals[id(atom)][1]

    # ---- loops -----------------------------------------------------------------------------------

    def _carries(self, first: Sequence[int], kind: Hashable, body: Any) -> list[int]:
        """Numbers the carries of a loop, by how they begin and what the body makes of them.

        So a loop that is run again has the same, also where it then saves more.
        """
        seen: Counter[int] = Counter()
        guesses = []
        for n in first:
            guesses.append(self.number(("guess", kind, n, seen[n])))
            seen[n] += 1
        after = body(guesses)
        both = zip(first, after, strict=True)
        return [self.number(("carry", kind, begins, made)) for begins, made in both]

    def _scan(
        self, eqn: Eqn, operands: list[int], within: Hashable, times: float, depth: int
    ) -> list[int]:
        num_consts, num_carries = _compat.scan_parts(eqn)
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        consts, first = operands[:num_consts], operands[num_consts:][:num_carries]
        stacked = operands[num_consts + num_carries :]
        elements = [self._element_of(x, depth) for x in stacked]
        kind = "scan", length, eqn.params["reverse"], depth

        def run(carries: list[int], times: float) -> list[int]:
            inputs = [*consts, *carries, *elements]
            return self.run(body, inputs, within, times=times, depth=depth + 1)

        carries = self._carries(first, kind, lambda guesses: run(guesses, 0.0)[:num_carries])
        made = run(carries, times * length)
        results = [self.number(("last", carry, n)) for carry, n in zip(carries, made, strict=False)]
        for n in made[num_carries:]:
            results.append(self._joined(kind, n, depth))
        return results

    def _element_of(self, array: int, way: Hashable) -> int:
        return self._element.get((array, way), self.number(("element", array, way)))

    def _joined(self, kind: Hashable, element: int, way: Hashable) -> int:
        array = self.number(("joined", kind, element, way))
        self._element[array, way] = element
        return array

    def _shard_map(
        self, eqn: Eqn, operands: list[int], within: Hashable, times: float, depth: int
    ) -> list[int]:
        """Counts what all devices do."""
        sizes, axes = eqn.params["mesh"].shape, frozenset(manual_axes(eqn))
        ways = [
            [(axes, str(spec)) for spec in eqn.params[f"{name}_specs"]] for name in ("in", "out")
        ]
        shards = [self._element_of(x, way) for x, way in zip(operands, ways[0], strict=True)]
        times *= math.prod(sizes[axis] for axis in axes)
        made = self.run(eqn.params["jaxpr"], shards, within, times=times, depth=depth)
        both = zip(made, ways[1], strict=True)
        return [self._joined("shards", n, way) for n, way in both]

    def _while(
        self, eqn: Eqn, operands: list[int], within: Hashable, times: float, depth: int
    ) -> list[int]:
        before, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, first = operands[before : before + own], operands[before + own :]

        def run(carries: list[int], times: float) -> list[int]:
            body = eqn.params["body_jaxpr"]
            return self.run(body, [*consts, *carries], within, times=times, depth=depth + 1)

        carries = self._carries(first, ("while", depth), lambda guesses: run(guesses, 0.0))
        made = run(carries, times)
        return [self.number(("last", carry, n)) for carry, n in zip(carries, made, strict=True)]

    def _cond(
        self, eqn: Eqn, operands: list[int], within: Hashable, times: float, depth: int
    ) -> list[int]:
        """Counts the dearest branch."""
        before, most, made = self.flops, 0.0, []
        for branch in eqn.params["branches"]:
            made.append(self.run(branch, operands[1:], within, times=times, depth=depth))
            most, self.flops = max(most, self.flops - before), before
        self.flops += most
        return [self.number(("cond", operands[0], own)) for own in zip(*made, strict=True)]


def _products_of(eqn: Eqn) -> float:
    """Counts the operations of the products of an equation, of a kernel as its author says."""
    if eqn.primitive.name in _PRODUCTS:
        return flops(eqn)
    if estimate := eqn.params.get("cost_estimate"):
        return float(getattr(estimate, "flops", 0.0))
    return sum(_products_of(inner) for sub in sub_jaxprs(eqn) for inner in sub.eqns)
