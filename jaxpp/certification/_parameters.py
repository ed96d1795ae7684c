"""The parameters of equations as hashable keys, equal for what two traces of one function make."""

import array
import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp.certification._table import inputs_of, name_of
from jaxpp.jaxprs import Eqn

if TYPE_CHECKING:
    from jaxpp.certification._evaluate import Evaluator


class Parameters:
    """Makes keys of parameters; it runs the jaxprs among them."""

    def __init__(self, evaluator: "Evaluator"):
        self._evaluator = evaluator
        self._inside: set[int] = set()
        self._elementwise: dict[Any, bool] = {}
        #: The objects that no trace made.
        self._shared: set[int] = set()

    def is_elementwise(self, eqn: Eqn) -> bool:
        """Tells whether JAX batches an operation on numbers by doing the same on arrays of them."""
        if eqn.effects or not eqn.invars:
            return False
        dtypes = tuple(getattr(v.aval, "dtype", None) for v in eqn.invars)
        key = eqn.primitive, tuple(map(str, dtypes)), str({**eqn.params, "sharding": None})
        if key not in self._elementwise:
            # Of an array of random keys only Threefry makes for each what it makes of it alone.
            apart = all(str(d) == "key<fry>" or not _is_extended(d) for d in dtypes)
            self._elementwise[key] = apart and _is_batched_as_it_is(eqn, dtypes)
        return self._elementwise[key]

    def note_shared(self, *traces: Iterable[Any]) -> None:
        """Notes which objects in the parameters of all traces are the same ones.

        These are told from others that are alike: a callback may change them.

        Args:
            *traces: the jaxprs of each trace.
        """
        self._shared = set.intersection(*({*_objects_in(trace)} for trace in traces))

    def key(self, value: Any) -> Any:
        """A hashable key of a parameter."""
        if id(value) in self._shared:
            return ("this", id(value))
        if isinstance(value, _compat.JaxprTypes):
            return self._of_jaxpr(value)
        if isinstance(value, tuple | list):
            return tuple(map(self.key, value))
        if isinstance(value, dict):
            pairs = ((self.key(k), self.key(v)) for k, v in value.items())
            return tuple(sorted(pairs, key=str))
        if isinstance(value, np.integer):
            value = int(value)
        if _compat.is_tracer(value):  # of the trace that made the object, and over
            return ("tracer", str(value.aval))
        if isinstance(value, jax.Array | np.ndarray):
            return ("array", self._evaluator.terms.constant(value))
        if isinstance(value, jax.sharding.AbstractMesh):  # the types of its axes are of places
            return ("mesh", value.axis_names, value.axis_sizes)
        if isinstance(value, functools.partial):
            return ("partial", *map(self.key, (value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return ("method", self.key(value.__func__), self.key(value.__self__))
        if isinstance(value, types.FunctionType):
            return self._once(value, self._of_function)
        if isinstance(value, int | float | complex) and not isinstance(value, enum.Enum):
            return (type(value), repr(value))  # 0.0 is not -0.0, nor 1 True
        if (params := _compat.params_of_hi_primitive(value)) is not None:
            return (type(value), self.key(params))
        if _is_record(value):
            record: Any = value
            fields = [getattr(value, f.name) for f in dataclasses.fields(record)]
            return (type(value), *map(self.key, fields))
        if isinstance(value, set | frozenset):
            return (type(value), frozenset(map(self.key, value)))
        if isinstance(value, slice):
            return ("slice", *map(self.key, (value.start, value.stop, value.step)))
        if isinstance(value, collections.deque | bytearray | array.array):
            return (type(value), *map(self.key, value))
        if _is_made_anew(value):
            return self._once(value, self._of_object)
        return value if isinstance(value, Hashable) else ("object", id(value))

    def _of_jaxpr(self, jaxpr: Any) -> Any:
        """Runs a jaxpr for any inputs: a kernel has no results, but writes to references."""
        evaluator, inputs = self._evaluator, inputs_of(jaxpr)
        types = [(v.aval.shape, name_of(getattr(v.aval, "dtype", ""))) for v in inputs]
        with evaluator.bound(types) as (_, symbols), evaluator.collected() as happened:
            made = evaluator.run(jaxpr, symbols)
        return ("jaxpr", tuple(made), tuple(happened))

    def _once(self, value: Any, key: Callable[[Any], Any]) -> Any:
        """The key of an object that may lead to itself."""
        if id(value) in self._inside:
            return ("itself", type(value))
        self._inside.add(id(value))
        try:
            return key(value)
        finally:
            self._inside.discard(id(value))

    def _of_function(self, fun: types.FunctionType) -> Any:
        """Functions are the same if they have the same code and close over the same."""
        closed_over, defaults = _compat.captured(fun), (fun.__defaults__, fun.__kwdefaults__)
        return ("function", fun.__code__, self.key(closed_over), self.key(defaults))

    def _of_object(self, value: Any) -> Any:
        """Objects are the same if they are of one type and have the same attributes."""
        return ("object", type(value), self.key(_attributes(value)))


def _is_extended(dtype: Any) -> bool:
    return dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended)


def _is_batched_as_it_is(eqn: Eqn, dtypes: Sequence[Any]) -> bool:
    """Tells whether an operation on numbers, under `jax.vmap`, is one equation, and the same."""
    params = {**eqn.params, **({"sharding": None} if "sharding" in eqn.params else {})}

    def on_numbers(*args):
        return eqn.primitive.bind(*args, **params)

    numbers = [jax.ShapeDtypeStruct((2,), dtype) for dtype in dtypes]
    try:
        made = jax.make_jaxpr(jax.vmap(on_numbers))(*numbers).jaxpr
    except Exception:  # it is none on numbers, whatever the error of its rule
        return False
    if len(made.eqns) != 1 or made.eqns[0].primitive is not eqn.primitive:
        return False
    (batched,) = made.eqns
    same = all(str(batched.params.get(k)) == str(v) for k, v in params.items())
    in_order = list(batched.invars) == list(made.invars)
    return same and in_order and all(v.aval.shape == (2,) for v in batched.outvars)


def _is_made_anew(value: Any) -> bool:
    """Tells whether an object is equal to itself alone, and is its attributes.

    A primitive is itself, and so is an object without attributes, of which nothing is known.
    """
    if isinstance(value, type | types.ModuleType | jex.Primitive):
        return False
    is_by_identity = type(value).__hash__ in (None, object.__hash__)
    return is_by_identity and (hasattr(value, "__dict__") or bool(_attributes(value)))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object."""
    slots = [n for c in type(value).__mro__ for n in _slots_of(c) if hasattr(value, n)]
    return {**{n: getattr(value, n) for n in slots}, **getattr(value, "__dict__", {})}


def _slots_of(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [n for n in names if n not in ("__weakref__", "__dict__")]


def _objects_in(trace: Iterable[Any]) -> Iterator[int]:
    """The ids of what the parameters of equations lead to, and what a callback may change."""
    stack, seen, opened = list[Any](), dict[int, Any](), list(map(jaxprs.opened, trace))
    while opened:
        jaxpr = opened.pop()
        if id(jaxpr) not in seen:
            seen[id(jaxpr)] = jaxpr  # which stays, and keeps its id
            for eqn in jaxpr.eqns:
                opened += jaxprs.sub_jaxprs(eqn)
                stack += [v for v in eqn.params.values() if not isinstance(v, _PLAIN)]
    while stack:
        value = stack.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, _MUTABLE) or _is_made_anew(value):
            yield id(value)
        stack += _inside(value)


_MUTABLE = (list, dict, set, np.ndarray, collections.deque, bytearray, array.array)
#: Parameters that lead to nothing else.
_PLAIN = (int, float, str, type, types.NoneType, enum.Enum, np.dtype, *_compat.JaxprTypes)


def _inside(value: Any) -> Iterable[Any]:
    """Lists what an object holds."""
    match value:
        case tuple() | list() | set() | frozenset() | collections.deque():
            return value
        case dict():
            return [*value, *value.values()]
        case functools.partial():
            return value.func, value.args, value.keywords
        case types.MethodType():
            return value.__func__, value.__self__
        case types.FunctionType():
            return *_compat.captured(value).values(), value.__defaults__, value.__kwdefaults__
    return _attributes(value).values() if _is_made_anew(value) or _is_record(value) else ()


def _is_record(value: Any) -> bool:
    """Tells whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
