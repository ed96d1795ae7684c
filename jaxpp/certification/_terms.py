"""The rewrites of terms: by them two programs that do the same give the same terms.

Each rewrite is exact: data movement, rows that are cut and joined, numbers that are known, choices
between cases. The rules are this module's own: they share nothing with the tables by which the
compiler decides.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.certification._rows import operands_with_rows
from jaxpp.certification._table import (
    OF_BODIES,
    SMALL,
    Form,
    Op,
    Shape,
    Term,
    TermTable,
    full_of,
    number_of,
    template_of,
)

#: The reductions, and what two parts of one are combined by.
REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
#: They are computed where their operands are known numbers.
_FOLDED = frozenset(
    """
    add and clamp convert_element_type div eq floor ge gt le lt max min mul ne neg not or rem
    select_n sign sub xor
    """.split()
)


_WHOLE_NUMBERS = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())


def _of_templates(rewrite: Callable[..., Term]) -> Callable[..., Term]:
    """Has an instance rewritten as its template is."""

    @functools.wraps(rewrite)
    def run(self: "Terms", t: Term, *args: Any) -> Term:
        if t.form is Form.INSTANCE:
            return self.instance(run(self, t.args[0], *args), t.op.params)
        return rewrite(self, t, *args)

    return run


class Terms(TermTable):
    """Terms with their rewrites.

    Args:
        count: the number of microbatches.
    """

    def __init__(self, count: int = 1):
        super().__init__()
        self.count = count
        #: The arrays that are cut into microbatches.
        self._batch: set[Term] = set()
        self._is_marking = False
        self._rows: dict[tuple[Term, int, int], Term] = {}
        self._starts: dict[Term, list[int]] = {}
        self._merged: dict[tuple[Term, Term], Term | None] = {}
        self._folds: dict[tuple[Any, ...], Term] = {}
        self._without_zeros: dict[Term, Term] = {}
        self._known: dict[tuple[Term, Term, int, int], Term] = {}

    # ---- moves -------------------------------------------------------------------------------

    @_of_templates
    def reshape(self, t: Term, shape: Iterable[int]) -> Term:
        shape, own = tuple(shape), t.shape
        if own == shape:
            return t
        if t.name == "reshape":
            return self.reshape(t.args[0], shape)
        if (number := full_of(t)) is not None:
            return self.broadcast(number, shape, ())
        if t.name == "rows_joined" and own and shape:
            if own[0] == shape[0]:
                parts = [self.reshape(p, (p.shape[0], *shape[1:])) for p in t.args]
                return self.join_rows(parts)
            # Single rows, (M, B, ...), as (M * B, ...).
            if len(t.args) == own[0] and shape[0] == math.prod(own[:2]) and shape[1:] == own[2:]:
                return self.join_rows([self.reshape(p, own[1:]) for p in t.args])
        if t.name == "constant" and t.value is not None:
            return self.constant(t.value.reshape(shape))
        return self.term("reshape", (), (t,), shape, t.dtype)

    @_of_templates
    def transpose(self, t: Term, permutation: Iterable[int]) -> Term:
        permutation = tuple(permutation)
        if permutation == tuple(range(len(permutation))):
            return t
        shape = tuple(t.shape[p] for p in permutation)
        if (number := full_of(t)) is not None:
            return self.broadcast(number, shape, ())
        if t.name == "transpose":
            return self.transpose(t.args[0], (t.op.params[p] for p in permutation))
        long = [p for p in permutation if t.shape[p] != 1]
        if long == sorted(long):  # the elements stay in their order
            return self.reshape(t, shape)
        if t.name == "rows_joined" and permutation[0] == 0:
            return self.join_rows([self.transpose(p, permutation) for p in t.args])
        if t.name == "concatenate" and int(dict(t.op.params)["dimension"][1]) == permutation[0]:
            return self.join_rows([self.transpose(a, permutation) for a in t.args])
        return self.term("transpose", permutation, (t,), shape, t.dtype)

    @_of_templates
    def broadcast(self, t: Term, shape: Iterable[int], dimensions: Iterable[int]) -> Term:
        """As `jax.lax.broadcast_in_dim`."""
        shape, dimensions, own = tuple(shape), tuple(dimensions), t.shape
        if own == shape and dimensions == tuple(range(len(shape))):
            return t
        if t.name == "literal":
            return self.term("broadcast", (), (t,), shape, t.dtype)
        if (number := full_of(t)) is not None:
            return self.broadcast(number, shape, ())
        fits = all(shape[d] == n for d, n in zip(dimensions, own, strict=True))
        if fits and math.prod(own) == math.prod(shape) and sorted(dimensions) == [*dimensions]:
            return self.reshape(t, shape)
        if t.name == "rows_joined" and dimensions[:1] == (0,) and own[0] == shape[0]:
            parts = [self.broadcast(p, (p.shape[0], *shape[1:]), dimensions) for p in t.args]
            return self.join_rows(parts)
        if t.value is not None and own and math.prod(shape) <= SMALL:
            axes = {d: n for d, n in zip(dimensions, own, strict=True)}
            view = t.value.reshape([axes.get(d, 1) for d in range(len(shape))])
            return self.constant(np.ascontiguousarray(np.broadcast_to(view, shape)))
        return self.term("broadcast", dimensions, (t,), shape, t.dtype)

    def constant(self, value: Any) -> Term:
        """The term of an array that is there before the step, or of the number it is full of."""
        t = super().constant(value)
        if t.name == "constant" and t.value is not None and t.value.size:
            first = t.value.reshape(-1)[:1]
            if t.value.tobytes() == first.tobytes() * t.value.size:
                return self.broadcast(self.literal(first[0], t.dtype), t.shape, ())
        return t

    def full(self, value: Any, shape: Shape, dtype: str) -> Term:
        """An array full of a number."""
        return self.broadcast(self.literal(np.asarray(value, jnp.dtype(dtype)), dtype), shape, ())

    def slice_by_microbatch(self, t: Term) -> Term:
        """Has each row of a term stand for a microbatch."""
        if len(t.shape) and t.shape[0] == self.count > 1 and t.form is Form.WHOLE:
            self._is_marking = True
            self.row(t, 0)
            self._is_marking = False
        return t

    def op_like(self, op: Op, shape: Shape) -> Op:
        """The same operation, with a result of another shape."""
        new = self.op(op.name, op.params, shape, op.dtype, op.eqn, op.out)
        new.is_elementwise = op.is_elementwise
        return new

    def _fitted(self, t: Term, shape: Shape) -> Term:
        """An operand of an elementwise operation, in the shape of its result."""
        return t if t.shape == shape else self.broadcast(t, shape, range(len(t.shape)))

    # ---- rows --------------------------------------------------------------------------------

    @_of_templates
    def rows(self, t: Term, low: int, high: int) -> Term:
        """Rows `low` to `high`, along the first axis."""
        if (low, high) == (0, t.shape[0]):
            return t
        if low == high:
            return self.term("empty", (), (), (0, *t.shape[1:]), t.dtype)
        key = t, low, high
        if (found := self._rows.get(key)) is None:
            found = self._rows[key] = self._rows_of(t, low, high)
        return found

    def _rows_of(self, t: Term, low: int, high: int) -> Term:
        op, args, shape = t.op, t.args, (high - low, *t.shape[1:])
        match t.name:
            case "rows":
                return self.rows(args[0], op.params[0] + low, op.params[0] + high)
            case "rows_joined":
                if (starts := self._starts.get(t)) is None:
                    starts = list(itertools.accumulate((p.shape[0] for p in args), initial=0))
                    self._starts[t] = starts
                first, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
                each = zip(args[first:last], starts[first:last], strict=True)
                own = [
                    self.rows(p, max(low - start, 0), min(high - start, p.shape[0]))
                    for p, start in each
                ]
                return self.join_rows(own)
        if (number := full_of(t)) is not None:
            return self.broadcast(number, shape, ())
        if t.value is not None:
            return self.constant(t.value[low:high])
        if t.name == "transpose":
            own = self._cut(args[0], op.params[0], low, high)
            if own is not None:
                return self.transpose(own, op.params)
        if t.name == "reshape" and args[0].shape:
            each, rest = divmod(args[0].shape[0], t.shape[0])
            if each == 1 and not rest:
                return self.reshape(self.rows(args[0], low, high), shape)
            if len(op.shape) > 1 and not rest:  # (n * each, ...) as (n, each, ...)
                return self.reshape(self.rows(args[0], low * each, high * each), shape)
        if t.name == "broadcast":
            if op.params[:1] == (0,) and args[0].shape[0] == t.shape[0]:
                return self.broadcast(self.rows(args[0], low, high), shape, op.params)
            if 0 not in op.params or args[0].shape[0] == 1:
                return self.broadcast(args[0], shape, op.params)
        if op.is_elementwise or t.name == "choice":
            own = [self.rows(a, low, high) if _has_rows(a, op) else a for a in args]
            return self._row_wise(op, own, high - low)
        if t.name in REDUCTIONS and 0 not in op.params:
            return self.reduce(self.rows(args[0], low, high), t.name, op.params)
        if (having := operands_with_rows(op, args)) is not None:
            each = zip(args, having, strict=True)
            own = [self.rows(a, low, high) if has else a for a, has in each]
            return self._row_wise(op, own, high - low)
        if self._is_marking:
            self._batch.add(t)
        if t in self._batch:
            number, start = divmod(low, size := t.shape[0] // self.count)
            if start + high - low <= size:
                of_batch = self.term("slice of the batch", (), (t,), (size, *shape[1:]), op.dtype)
                return self.instance(self.rows(of_batch, start, start + high - low), number)
        return self.term("rows", (low, high), (t,), shape, op.dtype)

    def _cut(self, t: Term, axis: int, low: int, high: int) -> Term | None:
        """A part of a term along an axis, by that of what it moves; None if it moves nothing."""
        if axis == 0:
            return self.rows(t, low, high)
        match t.name:
            case "rows":
                own = self._cut(t.args[0], axis, low, high)
                return own and self.rows(own, *t.op.params)
            case "transpose":
                own = self._cut(t.args[0], t.op.params[axis], low, high)
                return own and self.transpose(own, t.op.params)
            case "rows_joined":
                first, back = moved_to_front(axis, len(t.shape))
                moved = (self.transpose(p, first) for p in t.args)
                parts = [self.transpose(self.rows(own, low, high), back) for own in moved]
                return self.join_rows(parts)
        return None

    def join_rows(self, parts: Sequence[Term]) -> Term:
        """The concatenation of terms along their first axis."""
        if (number := number_of(parts)) is not None:
            return self.instance(self.join_rows([template_of(p) for p in parts]), number)
        flat: list[Term] = []
        for part in parts:
            for own in self._parts_of(part):
                if not own.shape[0]:
                    continue
                if flat and (merged := self._adjacent(flat[-1], own)) is not None:
                    flat[-1] = merged
                else:
                    flat.append(own)
        if len(flat) < 2:
            return flat[0] if flat else parts[0]
        shape = (sum(p.shape[0] for p in flat), *flat[0].shape[1:])
        return self.term("rows_joined", (), flat, shape, flat[0].dtype)

    def _parts_of(self, t: Term) -> Sequence[Term]:
        """The terms whose rows are joined in a term."""
        if t.form is Form.INSTANCE:
            return [self.instance(p, t.op.params) for p in self._parts_of(t.args[0])]
        return t.args if t.name == "rows_joined" else (t,)

    def _adjacent(self, a: Term, b: Term) -> Term | None:
        """Joins rows that follow each other in one array, or are full of one number."""
        key = a, b
        if key not in self._merged:
            self._merged[key] = None
            self._merged[key] = self._merged_rows(a, b)
        return self._merged[key]

    def _merged_rows(self, a: Term, b: Term) -> Term | None:
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            return None
        if (one := rows_in(a)) and (other := rows_in(b)) and one[::2] == other[:2]:
            return self.rows(one[0], one[1], other[2])
        shape = (a.shape[0] + b.shape[0], *a.shape[1:])
        if (number := full_of(a)) is not None and number is full_of(b):
            return self.broadcast(number, shape, ())
        if a.form is b.form is Form.INSTANCE and a.op.params == b.op.params:
            if (whole := self._adjacent(a.args[0], b.args[0])) is not None:
                return self.instance(whole, a.op.params)
        one, other = (template_of(t) for t in (a, b))
        if one.name == other.name == "reshape" and one.args[0].shape and other.args[0].shape:
            # As in memory, the elements of both follow each other.
            one, other = (self._unshaped(t) for t in (a, b))
            whole = self._adjacent(one, other)
            return whole and self.reshape(whole, shape)
        if a.form is not Form.INSTANCE and a.op.family == b.op.family:
            return self._adjacent_results(a, b, shape)
        return None

    def _adjacent_results(self, a: Term, b: Term, shape: Shape) -> Term | None:
        """Joins what one row-wise operation makes of rows that follow each other."""
        if a.op.is_elementwise or a.name == "choice":
            having = [_has_rows(t, a.op) for t in a.args]
        elif (a.name == "transpose" and a.op.params[0] == 0) or (
            a.name in REDUCTIONS and 0 not in a.op.params
        ):
            having = [True]
        elif (found := operands_with_rows(a.op, a.args)) is not None:
            having = found
        else:
            return None
        args = []
        for x, y, has in zip(a.args, b.args, having, strict=True):
            whole = self._adjacent(x, y) if has else x if x is y else None
            if whole is None:
                return None
            args.append(whole)
        return self._again(self.op_like(a.op, shape), args)

    def _unshaped(self, t: Term) -> Term:
        """The operand of a reshape."""
        if t.form is Form.INSTANCE:
            return self.instance(t.args[0].args[0], t.op.params)
        return t.args[0]

    def row(self, t: Term, i: int) -> Term:
        """Row `i`, without the first axis."""
        return self.reshape(self.rows(t, i, i + 1), t.shape[1:])

    def stack(self, parts: Sequence[Term]) -> Term:
        return self.join_rows([self.reshape(p, (1, *p.shape)) for p in parts])

    def _row_wise(self, op: Op, args: Sequence[Term], count: int) -> Term:
        """An operation that makes each row of the same rows of its operands, for some rows."""
        if op.name == "choice":
            return self.choice(args[0], args[1:])
        new = op.of_rows.get(count)
        if new is None:
            shape = (count, *op.shape[1:])
            new = op.of_rows[count] = self.op_like(op, shape)
        return self.operation(new, args)

    def operation(self, op: Op, args: Sequence[Term]) -> Term:
        """The result of any operation, part by part where its operands are joined rows."""
        if op.is_elementwise:
            return self.elementwise(op, args)
        if (number := number_of(args)) is not None:
            return self.instance(self.operation(op, [template_of(a) for a in args]), number)
        if any(template_of(a).name == "rows_joined" for a in args):
            having = operands_with_rows(op, args)
            if having is not None:
                made = self._in_parts(args, having, lambda own, n: self._row_wise(op, own, n))
                if made is not None:
                    return made
        return self.make(op, args)

    def _in_parts(
        self,
        args: Sequence[Term],
        having: Sequence[bool],
        make: Callable[[list[Term], int], Term],
    ) -> Term | None:
        """Makes a row-wise operation part by part where operands are joined rows; None if not.

        Args:
            args: the operands.
            having: whether each has the rows of the result, and does not serve all of them.
            make: makes some rows, of a number, of those of the operands.
        """
        cuts: set[int] = set()
        for a, has in zip(args, having, strict=True):
            if has:
                cuts.update(itertools.accumulate(p.shape[0] for p in self._parts_of(a)))
        if len(cuts) < 2:
            return None
        parts = []
        for low, high in itertools.pairwise([0, *sorted(cuts)]):
            each = zip(args, having, strict=True)
            own = [self.rows(a, low, high) if has else a for a, has in each]
            parts.append(make(own, high - low))
        return self.join_rows(parts)

    # ---- loops -------------------------------------------------------------------------------

    @_of_templates
    def at(self, t: Term, depth: int) -> Term:
        """The row of an iteration of the loop at a depth, without the first axis."""
        op, args, shape = t.op, t.args, t.shape[1:]
        match t.name:
            case "each" if op.params[0] == depth:
                return args[0]
            case "transpose" if op.params[0] == 0:
                return self.transpose(self.at(args[0], depth), [p - 1 for p in op.params[1:]])
            case "reshape" if args[0].shape[:1] == t.shape[:1]:
                return self.reshape(self.at(args[0], depth), shape)
            case "broadcast" if 0 not in op.params:
                return self.broadcast(args[0], shape, [d - 1 for d in op.params])
            case "broadcast" if op.params[0] == 0 and args[0].shape[0] == t.shape[0]:
                row, others = self.at(args[0], depth), [d - 1 for d in op.params[1:]]
                return self.broadcast(row, shape, others)
            case "choice":
                return self.choice(args[0], [self.at(a, depth) for a in args[1:]])
        if op.is_elementwise:
            own = [self.at(a, depth) if _has_rows(a, op) else a for a in args]
            return self.elementwise(self.op_like(op, shape), own)
        if t.name in REDUCTIONS and 0 not in op.params:
            return self.reduce(self.at(args[0], depth), t.name, [d - 1 for d in op.params])
        return self.term("at", (depth,), (t,), shape, t.dtype)

    @_of_templates
    def each(self, t: Term, depth: int, length: int) -> Term:
        """Stacks what each iteration of a loop makes along a new first axis."""
        shape = (length, *t.shape)
        if not t.free >> depth & 1:
            return self.broadcast(t, shape, range(1, len(shape)))
        if t.name == "at" and t.op.params == (depth,) and t.args[0].shape[0] == length:
            return t.args[0]
        return self.term("each", (depth, length), (t,), shape, t.dtype)

    @_of_templates
    def last(self, t: Term, depth: int) -> Term:
        """Gives what a loop carries out of its last iteration."""
        if not t.free >> depth & 1:
            return t
        return self.term("last", (depth,), (t,), t.shape, t.dtype)

    def with_terms(self, roots: Sequence[Term], new: Mapping[Term, Term], depth: int) -> list[Term]:
        """Terms with others in the place of some that are functions of a loop at a depth."""
        made = dict(new)
        for root in roots:
            stack = [root]
            while stack:
                t = stack[-1]
                if t in made or not t.free >> depth & 1:
                    made.setdefault(t, t)
                    stack.pop()
                    continue
                missing = [a for a in t.args if a not in made]
                stack += missing
                if not missing:
                    made[t] = self._again(t.op, [made[a] for a in t.args]) if t.args else t
                    stack.pop()
        return [made[root] for root in roots]

    # ---- elements ----------------------------------------------------------------------------

    def elementwise(self, op: Op, args: Sequence[Term]) -> Term:
        if (number := number_of(args)) is not None:
            return self.instance(self.elementwise(op, [template_of(a) for a in args]), number)
        args = [self._fitted(a, op.shape) if a.shape else a for a in args]
        if any(template_of(a).name == "rows_joined" for a in args):
            having = [_has_rows(a, op) for a in args]
            made = self._in_parts(args, having, lambda own, n: self._row_wise(op, own, n))
            if made is not None:
                return made
        turned = (template_of(a) for a in args)
        turned = (t for t in turned if t.name == "transpose" and t.args[0].name == "rows_joined")
        if (t := next(turned, None)) is not None:  # parts along another axis
            order = t.op.params
            back = tuple(order.index(axis) for axis in range(len(order)))
            own = [self.transpose(a, back) if a.shape else a for a in args]
            shape = tuple(op.shape[axis] for axis in back)
            return self.transpose(self.elementwise(self.op_like(op, shape), own), order)
        name = op.name
        if name in _FOLDED and op.shape == () and all(a.value is not None for a in args):
            return self._folded(op, args)
        if name in _FOLDED and op.dtype in _WHOLE_NUMBERS:
            full = [number for a in args if (number := full_of(a)) is not None]
            if len(full) == len(args):
                return self.broadcast(self._folded(self.op_like(op, ()), full), op.shape, ())
        match name:
            case "convert_element_type":
                return self._cast(op, args[0])
            case "reduce_precision":
                kind = jnp.finfo(op.dtype)
                if op.params == (kind.nexp, kind.nmant):
                    return args[0]
            case "select_n":
                return self._select(op, args)
            case "eq" if op.shape == ():
                for truth, number in (args, args[::-1]):
                    if _is_cast_of_bool(truth) and number.value is not None:
                        return self._is(truth.args[0], number.value.item())
            case "add" | "add_any":  # to what changes nothing: -0, or 0 of integers
                for a, zero in (args, args[::-1]):
                    number = full_of(template_of(zero))
                    if number is not None and number.value == 0 and a.dtype == op.dtype:
                        is_minus = "float" in op.dtype and np.signbit(number.value)
                        if is_minus or op.dtype in _WHOLE_NUMBERS:
                            return self._fitted(a, op.shape)
            case "mul" | "div":  # by one
                for a, one in (args, args[::-1])[: 2 if name == "mul" else 1]:
                    number = full_of(one) if "complex" not in op.dtype else None
                    if number is not None and number.value == 1 and a.dtype == op.dtype:
                        return self._fitted(a, op.shape)
        return self.make(op, args)

    def _is(self, truth: Term, number: Any) -> Term:
        """The truth value of: a truth value, as a number, is this one."""
        if number not in (0, 1):
            return self.literal(np.asarray(False), "bool")
        return truth if number else self.term("not", (), (truth,), (), "bool")

    def _cast(self, op: Op, a: Term) -> Term:
        if a.dtype == op.dtype:
            return a
        if a.name == "literal":
            return self._folded(op, [a])
        if a.name == "convert_element_type" and a.args[0].dtype == op.dtype:
            if op.dtype == "bool" or keeps_values(op.dtype, a.dtype):
                return a.args[0]  # it was widened, and is what it was
        if (number := full_of(a)) is not None:
            scalar = self.op(op.name, op.params, (), op.dtype)
            return self.broadcast(self._folded(scalar, [number]), op.shape, ())
        return self.make(op, [a])

    def _select(self, op: Op, args: Sequence[Term]) -> Term:
        which, *cases = args
        if which.shape == ():
            return self.choice(self.index_of_case(self.as_index(which), len(cases)), cases)
        if which.value is not None and which.value.size:
            rows = which.value.reshape(which.shape[0], -1)
            if (rows == rows[:, :1]).all():  # each row is whole one case's
                chosen = enumerate(map(int, rows[:, 0]))
                return self.join_rows([self.rows(cases[k], i, i + 1) for i, k in chosen])
        if len(set(cases)) == 1:
            return cases[0]
        if (number := full_of(which)) is not None:
            return cases[int(number.value or 0)]
        return self.make(op, args)

    def as_index(self, which: Term) -> Term:
        """A truth value as the number of a case."""
        if which.dtype == "int32":
            return which
        return self.elementwise(self.op("convert_element_type", (), (), "int32"), [which])

    def index_of_case(self, index: Term, count: int) -> Term:
        """The number of the case of a conditional; XLA takes the last where there is none."""
        if index.value is not None:
            number = int(index.value)
            return self.literal(np.asarray(number if 0 <= number < count else count - 1), "int32")
        inner = self.unclamped(index, count)
        if inner is not index or _is_cast_of_bool(index):
            return inner
        return self.term("case", (count,), (index,), (), index.dtype)

    def unclamped(self, index: Term, count: int) -> Term:
        """The index of a choice, without what clamps it to the cases that there are."""
        while index.name == "clamp" and _clamps_to(index, count):
            index = index.args[1]
        return index

    def choice(self, index: Term, cases: Sequence[Term]) -> Term:
        """The case of an index, which is clamped to those that there are."""
        if (number := number_of([index, *cases])) is not None:
            made = self.choice(template_of(index), [template_of(c) for c in cases])
            return self.instance(made, number)
        index = self.unclamped(index, len(cases))
        if index.value is not None:
            return cases[max(0, min(int(index.value), len(cases) - 1))]
        cases = [self.where_known(c, index, k, len(cases)) for k, c in enumerate(cases)]
        if len(set(cases)) == 1:
            return cases[0]
        if len(cases) == 2 and _is_cast_of_bool(index) and index.args[0].name == "not":
            return self.choice(self.as_index(index.args[0].args[0]), cases[::-1])
        op = self.op("choice", (len(cases),), cases[0].shape, cases[0].dtype)
        having = [_has_rows(c, op) for c in cases]
        made = self._in_parts(cases, having, lambda own, n: self.choice(index, own))
        return self.make(op, (index, *cases)) if made is None else made

    def where_known(self, t: Term, index: Term, k: int, count: int) -> Term:
        """A term where the index of a choice is known to be `k`, as one of `count` cases.

        The last case also stands for all greater indices: so a choice of more cases stays open.
        """
        if not self.depends_on(t, index):
            return t
        if t.name in OF_BODIES and index.free >> t.op.params[0] & 1:
            return t  # its body is of all iterations, and the index of one
        if t.name == "choice" and t.args[0] is not index and self.depends_on(t.args[0], index):
            return t  # a later choice would be another one for each case of all earlier ones
        if t.form is index.form is Form.INSTANCE:
            if t.op.params != index.op.params:
                return t
            known = self.where_known(t.args[0], index.args[0], k, count)
            return self.instance(known, t.op.params)
        if (
            t.name == "choice"
            and t.args[0] is index
            and (k < count - 1 or len(t.args) - 1 <= count)
        ):
            return self.where_known(t.args[1 + min(k, len(t.args) - 2)], index, k, count)
        key = t, index, k, count
        if (found := self._known.get(key)) is None:
            found = self._again(t.op, [self.where_known(a, index, k, count) for a in t.args])
            self._known[key] = found
        return found

    def _again(self, op: Op, args: Sequence[Term]) -> Term:
        """An operation of a term, on other operands of the same types."""
        match op.name:
            case "reshape":
                return self.reshape(args[0], op.shape)
            case "transpose":
                return self.transpose(args[0], op.params)
            case "broadcast":
                return self.broadcast(args[0], op.shape, op.params)
            case "rows":
                return self.rows(args[0], *op.params)
            case "rows_joined":
                return self.join_rows(args)
            case "choice":
                return self.choice(args[0], args[1:])
            case "instance":
                return self.instance(args[0], op.params)
            case "at":
                return self.at(args[0], *op.params)
            case "each":
                return self.each(args[0], *op.params)
            case "last":
                return self.last(args[0], *op.params)
        if op.name in REDUCTIONS:
            return self.reduce(args[0], op.name, op.params)
        return self.operation(op, args)

    def without_zeros(self, root: Term) -> Term:
        """A term in which nothing is added to zero: it is equal but for the signs of zeros."""
        made, stack = self._without_zeros, [root]
        while stack:
            t = stack[-1]
            missing = [a for a in t.args if a not in made]
            stack += missing
            if not missing:
                made[t] = self._summand(t.op, [made[a] for a in t.args]) if t.args else t
                stack.pop()
        return made[root]

    def _summand(self, op: Op, args: Sequence[Term]) -> Term:
        if op.name in ("add", "add_any"):
            for zero, other in (args, args[::-1]):
                number = full_of(template_of(zero))
                if number is not None and number.value == 0:
                    return self._fitted(other, op.shape)
        return self._again(op, args)

    def _folded(self, op: Op, args: Sequence[Term]) -> Term:
        """Computes a number of numbers.

        Arithmetic of floats keeps its form beside its value: a quotient is a fraction, not rounded.
        """
        if (found := self._folds.get((op, *args))) is not None:
            return found
        values = [jnp.asarray(a.value, a.dtype) for a in args]
        with jax.ensure_compile_time_eval():
            if op.name == "convert_element_type":
                value = np.asarray(values[0].astype(op.dtype))
            else:
                value = np.asarray(op.eqn.primitive.bind(*values, **op.eqn.params))
        is_cast = op.name == "convert_element_type" and args[0].name == "literal"
        if op.dtype in _WHOLE_NUMBERS or is_cast:
            found = self.literal(value, op.dtype)
        else:
            found = self.make(op, args, value)
        self._folds[op, *args] = found
        return found

    # ---- reductions --------------------------------------------------------------------------

    @_of_templates
    def reduce(self, t: Term, name: str, axes: Sequence[int]) -> Term:
        """A reduction over axes."""
        shape = tuple(n for d, n in enumerate(t.shape) if d not in axes)
        if name == "reduce_sum" and t.name == "empty":
            return self.full(0, shape, t.dtype)
        if all(t.shape[d] == 1 for d in axes):
            return self.reshape(t, shape)
        if t.name == "rows_joined" and 0 not in axes:
            return self.join_rows([self.reduce(p, name, axes) for p in t.args])
        return self.term(name, tuple(axes), (t,), shape, t.dtype)


def moved_to_front(axis: int, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The permutation that brings an axis to the front, where it has rows, and the one back."""
    first = (axis, *(d for d in range(count) if d != axis))
    return first, tuple(map(first.index, range(count)))


def _has_rows(t: Term, op: Op) -> bool:
    """Tells whether an operand has the rows of a row-wise operation, and not one for all."""
    return len(t.shape) == len(op.shape) > 0 and t.shape[:1] == op.shape[:1]


def rows_in(t: Term) -> tuple[Term, int, int] | None:
    """Of what a term is some rows, and which; None if it is not."""
    start, of = 0, t
    if t.form is Form.INSTANCE:
        of = t.args[0]
    low, high = (0, of.shape[0] if of.shape else 0)
    if of.name == "rows":
        (low, high), of = of.op.params, of.args[0]
    if t.form is Form.INSTANCE:
        if of.name != "slice of the batch":
            return None
        start, of = t.op.params * of.shape[0], of.args[0]
    return None if of is t else (of, start + low, start + high)


def _is_cast_of_bool(t: Term) -> bool:
    return t.name == "convert_element_type" and t.args[0].dtype == "bool"


def _clamps_to(t: Term, count: int) -> bool:
    low, high = t.args[0].value, t.args[2].value
    return low is not None and high is not None and (int(low), int(high)) == (0, count - 1)


#: The floating-point types of IEEE 754, or like them: with infinities, NaN and -0.
_IEEE = frozenset("bfloat16 float16 float32 float64".split())


def keeps_values(old: str, new: str) -> bool:
    """Tells whether a cast from one floating-point type to another keeps each value."""
    if old == new or "float" not in old or new not in _IEEE:
        return old == new
    from_, to = jnp.finfo(old), jnp.finfo(new)
    return to.nmant >= from_.nmant and to.nexp >= from_.nexp
