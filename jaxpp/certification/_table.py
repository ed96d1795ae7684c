"""Hash-consed terms: the symbolic values of a program, of which equal ones are one."""

import enum
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Literal

Shape = tuple[int, ...]

#: The number of elements of a constant up to which its value is kept, to compute with.
SMALL = 4096


#: The elementwise operations that rules make without an equation.
MADE_HERE = frozenset("add and convert_element_type max min not or".split())


@functools.cache
def name_of(dtype: Any) -> str:
    """The name of a dtype, which is slow to find."""
    return str(dtype)


def type_of(aval: Any) -> tuple[Any, ...]:
    """All that a type says of a value: shape, dtype, memory, and whether it is weak."""
    is_weak = bool(getattr(aval, "weak_type", False))
    return tuple(aval.shape), name_of(aval.dtype), _compat.memory_kind(aval), is_weak


def shown(own: tuple[Any, ...]) -> str:
    """A type in words."""
    shape, dtype, memory, is_weak = own
    said = f"{dtype}[{','.join(map(str, shape))}]"
    said += " of a weak type" if is_weak else ""
    return f"{said} in {memory}" if memory else said


def inputs_of(jaxpr: Any) -> list[Any]:
    """The inputs of a jaxpr; an open one takes its constants as the first."""
    opened = jaxprs.opened(jaxpr)
    return [*(() if _compat.constants_of(jaxpr) else opened.constvars), *opened.invars]


class Op:
    """An operation: a primitive or a rewritten form, with its parameters and its result's type.

    `out` is the number of the result among those of the equation. `eqn` is the first equation that
    was such an operation. `is_elementwise` tells whether each element is made of the elements at
    the same place; operands that are scalars, or of size 1 along an axis, serve for all places.
    """

    __slots__ = ("dtype", "eqn", "is_elementwise", "name", "of_rows", "out", "params", "shape")

    def __init__(self, name: str, params: Any, shape: Shape, dtype: str, eqn: Any, out: int):
        self.name, self.params, self.shape, self.dtype = name, params, shape, dtype
        self.eqn, self.out = eqn, out
        self.is_elementwise = name in MADE_HERE
        self.of_rows: dict[int, Op] = {}

    @property
    def family(self) -> tuple[Any, ...]:
        """All that it has in common with the same operation on more or fewer rows."""
        return self.name, self.params, self.shape[1:], self.dtype, self.out, self.is_elementwise


class Form(enum.IntEnum):
    """The forms of a term, by its dependence on the number of a microbatch."""

    #: Not at all.
    WHOLE = 0
    #: It is the value of a template for one number.
    INSTANCE = 1
    #: It is made of several instances.
    MIXED = 2
    #: It is a template: a function of the number, made of slices of the batch.
    TEMPLATE = 3


class Term:
    """A symbolic value: an operation on terms.

    `eqn` and `where` say where it was made first: the equation, and the task or part of the step.
    `value` is the value of a number, or of a small constant; `indices` has a bit for each index of
    a choice in it, and `free` one for each loop around, by its depth, of whose iteration it is a
    function.
    """

    __slots__ = (
        "args", "dtype", "eqn", "form", "free", "indices", "name", "number", "op", "shape", "value",
        "where",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        args: tuple["Term", ...],
        number: int,
        eqn: Any,
        where: str,
        value: np.ndarray | None,
    ):
        self.op, self.args, self.number, self.eqn, self.where = op, args, number, eqn, where
        self.name, self.shape, self.dtype = op.name, op.shape, op.dtype
        self.value = value
        self.indices, self.form, self.free = 0, Form.WHOLE, 0
        for a in args:
            self.indices |= a.indices
            self.free |= a.free
            self.form = max(self.form, a.form)
        if op.name in _OF_ITERATIONS:
            self.free |= 1 << op.params[0]
        elif op.name in _OF_LOOPS:
            self.free &= ~(1 << op.params[0])
        if op.name in _FORMS:
            self.form = _FORMS[op.name]
        elif self.form is Form.INSTANCE:
            self.form = Form.MIXED


#: Terms that are functions of the iteration of a loop around, and those of a whole loop; the first
#: parameter of each is the depth of the loop.
_OF_ITERATIONS = frozenset({"at", "bound", "carried", "step"})
_OF_LOOPS = frozenset({"each", "effect each", "effect while", "last", "while"})
#: Terms whose operands are those of any iteration.
OF_BODIES = _OF_LOOPS | {"carried"}
_FORMS = {"slice of the batch": Form.TEMPLATE, "instance": Form.INSTANCE}


def number_of(terms: Iterable[Term]) -> int | None:
    """The number of the microbatch whose instances terms are; None if they are of none or several.

    Terms that do not depend on the number may be among them.
    """
    number = None
    for t in terms:
        if t.form is not Form.WHOLE:
            if t.form is not Form.INSTANCE or number not in (None, t.op.params):
                return None
            number = t.op.params
    return number


def template_of(t: Term) -> Term:
    """The template of an instance; any other term itself."""
    return t.args[0] if t.form is Form.INSTANCE else t


class TermTable:
    """All terms of a proof: makes each once.

    What is done with instances of one microbatch is done once, with their templates.
    """

    def __init__(self):
        self.terms: list[Term] = []
        #: The equation that runs, and the task or part of the step that it is in.
        self.eqn: Any = None
        self.where = "the function"
        self._found: dict[tuple[Any, ...], Term] = {}
        self._ops: dict[tuple[Any, ...], Op] = {}
        self._bits: dict[Term, int] = {}
        self._constants: dict[int, tuple[Any, Term]] = {}

    def op(
        self, name: str, params: Any, shape: Shape, dtype: str, eqn: Any = None, out: int = 0
    ) -> Op:
        """The operation of this name, with hashable parameters and a type."""
        key = (name, params, shape, dtype, out)
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = Op(name, params, shape, dtype, eqn or self.eqn, out)
        return op

    def make(self, op: Op, args: Sequence[Term], value: np.ndarray | None = None) -> Term:
        """The term of an operation on terms, as it is; `value` is its value where it is known."""
        if 0 in op.shape and op.name != "empty":
            op, args = self.op("empty", (), op.shape, op.dtype), []
        if (number := number_of(args)) is not None:
            return self.instance(self.make(op, [template_of(a) for a in args]), number)
        key = (op, *args)
        term = self._found.get(key)
        if term is None:
            term = Term(op, tuple(args), len(self.terms), self.eqn, self.where, value)
            self._found[key] = term
            self.terms.append(term)
            if op.name == "choice":
                index = template_of(args[0])
                term.indices |= self._bits.setdefault(index, 1 << len(self._bits))
        return term

    def instance(self, t: Term, number: int) -> Term:
        """The value of a term for the number of a microbatch."""
        if t.form is not Form.TEMPLATE:
            return t
        op = self.op("instance", number, t.shape, t.dtype)
        if (term := self._found.get((op, t))) is None:
            term = self._found[op, t] = Term(op, (t,), len(self.terms), self.eqn, self.where, None)
            self.terms.append(term)
        return term

    def depends_on(self, term: Term, index: Term) -> bool:
        """Tells whether a term may have a choice by an index in it."""
        return bool(term.indices & self._bits.get(template_of(index), 0))

    def term(self, name: str, params: Any, args: Sequence[Term], shape: Any, dtype: str) -> Term:
        return self.make(self.op(name, params, tuple(shape), dtype), args)

    def nothing(self, shape: Shape, dtype: str) -> Term:
        """The term of memory that nothing has been put into."""
        return self.term("nothing", (), (), shape, dtype)

    def literal(self, value: Any, dtype: str) -> Term:
        """The term of a number."""
        value = np.asarray(value)
        return self.make(self.op("literal", value.tobytes(), (), dtype), (), value)

    def constant(self, value: Any) -> Term:
        """The term of an array that is there before the step; equal bits are one term."""
        kept = self._constants.get(id(value))
        if kept is not None:
            return kept[1]
        is_extended = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        data = np.asarray(jax.random.key_data(value) if is_extended else value)
        dtype = name_of(value.dtype)
        if data.shape == () and not is_extended:
            term = self.literal(data, dtype)
        else:
            digest = hashlib.sha256(data.tobytes()).hexdigest()
            is_small = data.size <= SMALL and not is_extended
            op = self.op("constant", digest, np.shape(value), dtype)
            term = self.make(op, (), data if is_small else None)
        self._constants[id(value)] = value, term
        return term

    def of_literal(self, atom: Literal) -> Term:
        """The term of a literal of a jaxpr."""
        aval: Any = atom.aval
        if aval.shape or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return self.constant(atom.val)
        return self.literal(np.asarray(atom.val, aval.dtype), name_of(aval.dtype))


def full_of(term: Term) -> Term | None:
    """The number that a term is full of; None if it is not known to be full of one."""
    while term.name in ("broadcast", "reshape", "transpose"):
        term = term.args[0]
    return term if term.name == "literal" else None
