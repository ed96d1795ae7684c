"""Fingerprints of terms: terms that are equal by the laws of a model have the same one.

A fingerprint is a few numbers modulo a large prime, the values of a term in a random model: a
scalar is a number, and an array is a few of its elements. There are two models.

- The *strict* one knows of floating-point numbers what is true of all of them, NaN and infinity
  included, but for the order of sums: a sum is one of the field, a move of elements is a random
  matrix, a maximum a random function of a set, and all else a random function. The opposite of a
  value is a random multiple of it, so that nothing cancels.
- The *real* one also knows the laws of real numbers: products and quotients are those of the field,
  a linear operation is a random matrix, a bilinear one a random tensor. A cast is a random
  function in it, or gives its operand where rounding does not count.

Values that differ have other numbers but for a chance of about one in the prime for each
comparison: Schwartz, "Fast probabilistic algorithms for verification of polynomial identities"
(1980), lemma 1; with random functions as in Gulwani and Necula, "Global value numbering using
random interpretation" (2004).
"""

import collections
import fractions
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpp.certification._table import Form, Op, Term
from jaxpp.certification._terms import REDUCTIONS, Terms, rows_in

Fingerprint = tuple[int, ...]

PRIME = 2**61 - 1
#: The elements of an array that a fingerprint has. Matrices of this size fulfil no law of fewer
#: than 720 products in some order that others do not (Amitsur, Levitzki, 1950).
_ELEMENTS = 3

#: For each operation that moves elements, or adds them up, in some operands together: the first of
#: these operands, and the one after the last (None for all); the other operands say how.
_MOVES: dict[str, tuple[int, int | None]] = {
    "at": (0, 1),
    "broadcast": (0, 1),
    "concatenate": (0, None),
    "copy": (0, 1),
    "cumsum": (0, 1),
    "dynamic_slice": (0, 1),
    "dynamic_update_slice": (0, 2),
    "each": (0, 1),
    "gather": (0, 1),
    "pad": (0, 2),
    "reduce_sum": (0, 1),
    "reduce_window_sum": (0, 1),
    "rev": (0, 1),
    "select_and_gather_add": (0, 1),
    "select_and_scatter_add": (0, 1),
    "slice": (0, 1),
    "split": (0, 1),
    "stack": (0, None),
    "transpose": (0, 1),
    "unstack": (0, 1),
}
#: The other linear operations.
_LINEAR: dict[str, tuple[int, int | None]] = {
    "fft": (0, 1),
    "scatter-mul": (0, 1),
    "triangular_solve": (1, 2),
}
#: The other operations of the field, of real numbers.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mul": operator.mul,
    "square": lambda a: a * a,
}
_BILINEAR = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})


class Fingerprints:
    """A random model of terms, with what it has chosen for operations so far.

    Args:
        terms: the terms.
        strict: whether it is the strict model.
        zeros: whether a sum with zero is told from none, in the strict model: it makes 0 of -0.
        rounding: whether casts between floating-point types count, in the real model.
        apart: whether a template has a value for each microbatch, so that the laws hold between
            microbatches, too. Without, it has one, of which that of a microbatch is a random
            function: this is much less work.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        strict: bool,
        zeros: bool = True,
        rounding: bool = True,
        apart: bool = False,
    ):
        self._terms, self.strict, self.rounding, self._apart = terms, strict, rounding, apart
        self._zeros = strict and zeros
        self._random = random.Random(20261125)
        self._chosen: dict[Any, Any] = {}
        #: By the number of the microbatch: of what does not depend on it, or for all, by None.
        self._found = collections.defaultdict[int | None, dict[Term, Fingerprint]](dict)
        #: Of an extreme the values that it is one of.
        self._among: dict[tuple[str, int], frozenset[int]] = {}
        self._opposite = self._number() if strict else -1

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
        if t.form is Form.INSTANCE and self._apart:
            return self.of(t.args[0], t.op.params)
        found = self._by_moves(t, operands, given, number)
        if found is None and not self.strict:
            found = self._over_the_reals(t, operands, given)
        return self._unknown(t, operands, given) if found is None else found

    def _unknown(
        self, t: Term, operands: Sequence[Term], given: Sequence[Fingerprint]
    ) -> Fingerprint:
        """The value of a random function."""
        op, types = t.op, [(a.shape, a.dtype) for a in operands]
        if op.is_elementwise:
            own = (t.name, op.params, op.out, op.dtype, *(dtype for _, dtype in types))
            return _each(lambda *values: self._of_elements(own, values), *given)
        return self._numbers((op, *types, *given), _size(op))

    def _of_elements(self, own: tuple[Any, ...], values: Sequence[int]) -> int:
        values = sorted(values) if own[0] == "mul" else values
        return self._numbers((own, *values), 1)[0]

    def _by_moves(
        self, t: Term, operands: Sequence[Term], given: Sequence[Fingerprint], number: int | None
    ) -> Fingerprint | None:
        """The value of a sum, or of moved elements."""
        name, op = t.name, t.op
        match name:
            case "add" | "add_any" | "neg" | "sub" if any(a.dtype != op.dtype for a in operands):
                return None
            case "add" | "add_any":
                return _each(operator.add, *given)
            case "neg":
                return _each(lambda a: self._opposite * a, *given)
            case "sub":
                return _each(lambda a, b: a + self._opposite * b, *given)
            case "slice of the batch":
                return self._linear((name, number, t.args[0].shape), _size(op), given)
            case "literal":
                return self._of_number(t.value)
            case "empty":
                return (0,) * _ELEMENTS
            case "rows_joined":
                return self._joined(t, dict(zip(operands, given, strict=True)))
            case "rows":
                return self._linear(("rows", *op.params, operands[0].shape), _size(op), given)
            case "reshape":  # the same elements
                return given[0]
            case "broadcast" if len(given[0]) == 1:
                return given[0] * _size(op)
            case "transpose" if len(given[0]) > 1 and len(op.shape) <= 4:
                return self._transposed(t, given[0])
            case "choice" | "select_n":
                return _each(self._choice, *given)
            case "max" | "min" | "and" | "or":
                return _each(lambda *values: self._extreme(name, values), *given)
        if name in REDUCTIONS and len(given) > 1:  # of rows in parts
            combine = REDUCTIONS[name]
            if combine == "add":
                return _each(lambda *values: sum(values), *given)
            return _each(lambda *values: self._extreme(combine, values), *given)
        if name in ("scatter", "scatter-add"):
            key = (op, *((a.shape, a.dtype) for a in operands))
            return self._linear((key, given[1]), _size(op), [given[0], given[2]])
        if name in _MOVES and not _fills(op):
            return self._linear_in(_MOVES[name], op, operands, given)
        return None

    def _over_the_reals(
        self, t: Term, operands: Sequence[Term], given: Sequence[Fingerprint]
    ) -> Fingerprint | None:
        """The value of an operation that has laws for real numbers."""
        name, op = t.name, t.op
        if name in _ARITHMETIC:
            return _each(_ARITHMETIC[name], *given)
        match name:
            case "integer_pow":
                return _each(lambda a: pow(a, _power(op), PRIME) if a else 0, *given)
            case "div" if _is_inexact(op.dtype):
                return _each(lambda a, b: a * self._inverse(b), *given)
            case "complex" | "conj" | "imag" | "real" if _size(op) > 1:
                # Linear, but no factors: the parts of two numbers do not change places.
                wide = [g if len(g) > 1 else g * _ELEMENTS for g in given]
                return self._linear((name, op.shape), _size(op), wide)
            case "convert_element_type" | "reduce_precision" if not self.rounding:
                if op.dtype == t.args[0].dtype or _fits(t.args[0].dtype, op.dtype):
                    return given[0]
        if name in _BILINEAR:
            key = (op, *((a.shape, a.dtype) for a in operands))
            return self._bilinear((key, *given[2:]), _size(op), *given[:2])
        if name in _LINEAR or name == "custom_linear_solve":
            which = _LINEAR.get(name) or (_num_constants(op), None)
            return self._linear_in(which, op, operands, given)
        return None

    def _linear_in(
        self,
        which: tuple[int, int | None],
        op: Op,
        operands: Sequence[Term],
        given: Sequence[Fingerprint],
    ) -> Fingerprint:
        """The value of an operation that is linear in some operands; the others say how."""
        (start, stop), types = which, [(a.shape, a.dtype) for a in operands]
        how = (*given[:start], *(given[stop:] if stop is not None else ()))
        return self._linear(((op, *types), how), _size(op), given[start:stop])

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
        """The fingerprint of a number: over the reals itself, as far as it is a fraction."""
        number: Any = value.item()
        is_known = not self.strict or (number == 0 and not self._zeros)
        if isinstance(number, complex) or not math.isfinite(number) or not is_known:
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


def _fills(op: Op) -> bool:
    """Tells whether an operation may give a number that is neither zero nor one of its operands."""
    if op.name != "gather":
        return False
    params = dict(op.params)
    if params["fill_value"] is not None:
        return float(params["fill_value"][1]) != 0
    return "FILL" in str(params["mode"]) and not _is_inexact(op.dtype)  # NaN of any sum is NaN


def _fits(old: str, new: str) -> bool:
    """Tells whether a cast does no more than to round a number to another floating-point type."""
    if not _is_inexact(new) or _is_inexact(old):
        return _is_inexact(new)
    return old == "bool" or jnp.iinfo(old).bits <= jnp.finfo(new).nmant + 1


def _is_inexact(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype
