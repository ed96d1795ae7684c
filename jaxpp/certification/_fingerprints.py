"""Fingerprints of terms: terms that are equal over the real numbers have the same one.

A fingerprint is a few numbers modulo a large prime, the values of a term in a random model: a
scalar is a number, and an array is a few of its elements. Sums, products and quotients are those of
the field; a linear operation is a random matrix, a bilinear one a random tensor, and any other
operation a random function. So all that holds by the laws of arithmetic, by linearity, and for any
functions, holds in the model. Values that differ have other numbers but for a chance of about one
in the prime for each comparison: Schwartz, "Fast probabilistic algorithms for verification of
polynomial identities" (1980), lemma 1; with random functions as in Gulwani and Necula, "Global
value numbering using random interpretation" (2004).
"""

import collections
import fractions
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp.certification._table import Form, Op, Term
from jaxpp.certification._terms import ELEMENTWISE, REDUCTIONS, Terms, keeps_values, rows_in

Fingerprint = tuple[int, ...]

PRIME = 2**61 - 1
#: The elements of an array that a fingerprint has. Matrices of this size fulfil no law of fewer
#: than 720 products in some order that others do not (Amitsur, Levitzki, 1950).
_ELEMENTS = 3

#: For each operation that is linear in some operands together the first of them, and the one after
#: the last (None for all); the other operands say how.
_LINEAR: dict[str, tuple[int, int | None]] = {
    "broadcast": (0, 1),
    "concatenate": (0, None),
    "copy": (0, 1),
    "cumsum": (0, 1),
    "dynamic_slice": (0, 1),
    "dynamic_update_slice": (0, 2),
    "fft": (0, 1),
    "gather": (0, 1),
    "pad": (0, 2),
    "reduce_sum": (0, 1),
    "reduce_window_sum": (0, 1),
    "rev": (0, 1),
    "scatter-mul": (0, 1),
    "select_and_gather_add": (0, 1),
    "select_and_scatter_add": (0, 1),
    "slice": (0, 1),
    "split": (0, 1),
    "stack": (0, None),
    "transpose": (0, 1),
    "triangular_solve": (1, 2),
    "unstack": (0, 1),
}
#: The operations of the field.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "add_any": operator.add,
    "mul": operator.mul,
    "neg": operator.neg,
    "square": lambda a: a * a,
    "sub": operator.sub,
}
_BILINEAR = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})


class Fingerprints:
    """A random model of terms, with what it has chosen for operations so far.

    Args:
        terms: the terms.
        rounding: whether a cast that rounds is told from none.
        apart: whether a template has a value for each microbatch, so that the laws of arithmetic
            hold between microbatches, too. Without, it has one, of which that of a microbatch is a
            random function: this is much less work.
    """

    def __init__(self, terms: Terms, rounding: bool, apart: bool = False):
        self._terms, self.rounding, self._apart = terms, rounding, apart
        self._random = random.Random(20261125)
        self._chosen: dict[Any, Any] = {}
        #: By the number of the microbatch: of what does not depend on it, or for all, by None.
        self._found = collections.defaultdict[int | None, dict[Term, Fingerprint]](dict)
        #: Of an extreme the values that it is one of.
        self._among: dict[tuple[str, int], frozenset[int]] = {}

    def of(self, term: Term, number: int | None = None) -> Fingerprint:
        """The fingerprint of a term; that of a template for the number of a microbatch."""
        whole, own, stack = self._found[None], self._found[number], [term]
        while stack:
            now = stack[-1]
            operands = self._operands(now)
            missing = [a for a in operands if a not in own and a not in whole]
            stack += missing
            if not missing:
                given = [whole[a] if a in whole else own[a] for a in operands]
                found = own if now.form is Form.TEMPLATE else whole
                found[now] = self._of_operation(now, operands, given, number)
                stack.pop()
        return whole[term] if term in whole else own[term]

    def _operands(self, t: Term) -> Sequence[Term]:
        """The terms of whose values its value is made."""
        if t.form is Form.INSTANCE and self._apart:
            return ()
        if t.name in REDUCTIONS and 0 in t.op.params and t.args[0].name == "rows_joined":
            return [self._terms.reduce(part, t.name, t.op.params) for part in t.args[0].args]
        if t.name == "rows_joined":
            return [*t.args, *(part[0] for part in map(rows_in, t.args) if part)]
        return t.args

    def _of_operation(
        self, t: Term, operands: Sequence[Term], given: Sequence[Fingerprint], number: int | None
    ) -> Fingerprint:
        name, op = t.name, t.op
        if name in _ARITHMETIC:
            return _each(_ARITHMETIC[name], *given)
        match name:
            case "instance":
                if self._apart:
                    return self.of(t.args[0], op.params)
                return self._numbers((name, op.params, given[0]), len(given[0]))
            case "slice of the batch":
                return self._linear((name, number, t.args[0].shape), _size(op), given)
            case "literal":
                return self._of_number(t.value)
            case "empty":
                return (0,) * _ELEMENTS
            case "rows_joined":
                return self._joined(t, dict(zip(operands, given, strict=True)))
            case "reshape":  # the same elements
                return given[0]
            case "broadcast" if len(given[0]) == 1:
                return given[0] * _size(op)
            case "transpose" if len(given[0]) > 1 and len(op.shape) <= 4:
                return self._transposed(t, given[0])
            case "integer_pow":
                return _each(lambda a: pow(a, _power(op), PRIME) if a else 0, *given)
            case "div" if _is_inexact(op.dtype):
                return _each(lambda a, b: a * self._inverse(b), *given)
            case "reduce_precision" if not self.rounding:
                return given[0]
            case "convert_element_type":
                if (factor := self._rounding(t.args[0].dtype, op.dtype)) is not None:
                    return _each(lambda a: a * factor, *given)
            case "choice" | "select_n":
                return _each(self._choice, *given)
            case "complex" | "conj" | "imag" | "real":
                parts = self._numbers((name, "parts"), len(given))
                return _each(lambda *x: _dot(parts, x), *given)
            case "max" | "min" | "and" | "or":
                return _each(lambda *values: self._extreme(name, values), *given)
        if name in REDUCTIONS and len(given) > 1:  # of rows in parts
            combine = REDUCTIONS[name]
            if combine == "add":
                return _each(lambda *values: sum(values), *given)
            return _each(lambda *values: self._extreme(combine, values), *given)
        if name in ELEMENTWISE:
            own = (name, op.params, op.out, op.dtype, *(a.dtype for a in operands))
            return _each(lambda *values: self._numbers((own, values), 1)[0], *given)
        key = (op, *((a.shape, a.dtype) for a in operands))
        if name == "rows":
            return self._linear(("rows", *op.params, operands[0].shape), _size(op), given)
        if name in _BILINEAR:
            return self._bilinear((key, *given[2:]), _size(op), *given[:2])
        if name in ("scatter", "scatter-add"):
            return self._linear((key, given[1]), _size(op), [given[0], given[2]])
        if name in _LINEAR or name == "custom_linear_solve":
            start, stop = _LINEAR.get(name) or (_num_constants(op), None)
            how = (*given[:start], *(given[stop:] if stop is not None else ()))
            return self._linear((key, how), _size(op), given[start:stop])
        return self._numbers((key, *given), _size(op))

    def _joined(self, t: Term, values: Mapping[Term, Fingerprint]) -> Fingerprint:
        """Rows after one another; those that follow each other in one array are taken together."""
        pieces: list[tuple[Any, Fingerprint, int, int]] = []  # of what, its value, low, high
        for part in t.args:
            of, low, high = rows_in(part) or (None, 0, part.shape[0])
            key, value = None, values[part]
            if of is not None:
                key = values[of], of.shape
                if pieces and pieces[-1][0] == key and pieces[-1][3] == low:
                    low = pieces.pop()[2]
                    if high - low == of.shape[0] == t.shape[0]:
                        return values[of]
                    size = _ELEMENTS if math.prod(t.shape[1:]) * (high - low) > 1 else 1
                    value = self._linear(("rows", low, high, of.shape), size, [values[of]])
            pieces.append((key, value, low, high))
        total, start = (0,) * _size(t.op), 0
        for _, value, low, high in pieces:
            at = ("joined", t.shape, start, high - low)
            total = _each(operator.add, total, self._linear(at, len(total), [value]))
            start += high - low
        return total

    def _of_number(self, value: Any) -> Fingerprint:
        """The fingerprint of a number: itself, as far as it is a fraction."""
        number = value.item()
        if isinstance(number, complex) or not math.isfinite(number):
            return self._numbers(("number", repr(number)), 1)
        fraction = fractions.Fraction(number)
        return (fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME,)

    # ---- the model -----------------------------------------------------------------------------

    def _number(self) -> int:
        return self._random.randrange(1, PRIME)

    def _numbers(self, key: Any, count: int) -> tuple[int, ...]:
        """Random numbers, always the same for a key."""
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = tuple(self._number() for _ in range(count))
        return found

    def _extreme(self, name: str, values: Sequence[int]) -> int:
        """A random function of the values of which something is the extreme, in any order."""
        among = frozenset().union(*(self._among.get((name, v), (v,)) for v in values))
        if len(among) == 1:
            return values[0]
        extreme = self._numbers((name, among), 1)[0]
        self._among[name, extreme] = among
        return extreme

    def _choice(self, which: int, *cases: int) -> int:
        """A mean of the cases whose weights are random and add up to one."""
        weights = self._numbers(("choice", which, len(cases)), len(cases) - 1)
        weights = (1 - sum(weights), *weights)
        return _dot(weights, cases)

    def _inverse(self, b: int) -> int:
        return pow(b, -1, PRIME) if b else self._numbers("the inverse of zero", 1)[0]

    def _rounding(self, old: str, new: str) -> int | None:
        """The factor of a cast: 1 where it keeps each value; None for one that is not linear."""
        if not _is_inexact(new):
            return 1 if old == "bool" else None
        if not _is_inexact(old):
            return 1
        if not self.rounding or keeps_values(old, new):
            return 1
        return self._numbers(("rounding", old, new), 1)[0]

    def _transposed(self, t: Term, given: Fingerprint) -> Fingerprint:
        """A transpose, of which two are the transpose by the product of their permutations.

        Each shape has a basis of its own, in which a transpose is its permutation.
        """
        count, old = len(t.shape), t.args[0].shape
        before, after = (self._numbers(("basis", shape), _ELEMENTS) for shape in (old, t.shape))
        own = [x * pow(b, -1, PRIME) for x, b in zip(given, before, strict=True)]
        # Of four axes: of numbers that are four with the sum zero, the first three.
        own = [*own[:count], -sum(own)] if count == 4 else own
        new = [*(own[axis] for axis in t.op.params), *own[count:]]
        return tuple(x * b % PRIME for x, b in zip(new, after, strict=False))

    def _linear(self, key: Any, size: int, given: Sequence[Fingerprint]) -> Fingerprint:
        """The sum of a random matrix for each operand times the operand."""
        vector = [x for g in given for x in g]
        width = len(vector)
        matrix = self._numbers(("linear", key), size * width)
        rows = (matrix[i * width : (i + 1) * width] for i in range(size))
        return tuple(_dot(row, vector) for row in rows)

    def _bilinear(self, key: Any, size: int, a: Fingerprint, b: Fingerprint) -> Fingerprint:
        products = [x * y % PRIME for x in a for y in b]
        return self._linear(("bilinear", key), size, [tuple(products)])


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(map(operator.mul, a, b)) % PRIME


def _each(fun: Callable[..., int], *given: Fingerprint) -> Fingerprint:
    """Applies a function of elements; a scalar serves for all elements."""
    size = max(map(len, given))
    wide = [g if len(g) == size else g * size for g in given]
    return tuple([value % PRIME for value in map(fun, *wide)])


def _size(op: Op) -> int:
    return 1 if math.prod(op.shape) == 1 else _ELEMENTS


def _power(op: Op) -> int:
    return int(dict(op.params)["y"][1])


def _num_constants(op: Op) -> int:
    """The operands of a linear solve that its functions close over, which come first."""
    return sum(int(n[1]) for n in dict(op.params)["const_lengths"] if n is not None)


def _is_inexact(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype
