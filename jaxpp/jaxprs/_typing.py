"""The types that signatures name: of a user's function, and of the parts of a jaxpr.

The parts of a jaxpr are JAX's own classes. JAX annotates an `aval` by a class that has no shape,
and the parts of an `eqns` not at all; for the type checker they are written down here as they are.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import jax.core
import jax.extend.core as jex

#: The parameters and the result of a function, for the signatures of its transforms.
P = ParamSpec("P")
R = TypeVar("R")

#: The type of an array: its shape, its dtype, its sharding.
Aval: TypeAlias = jax.core.ShapedArray

if TYPE_CHECKING:

    class Var:
        """A variable of a jaxpr; each object is another one."""

        aval: Aval

        def __init__(self, aval: Aval): ...

    class Literal:
        """A number or an array that stands in a jaxpr; it is no key of a dictionary."""

        aval: Aval
        val: Any
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __init__(self, val: Any, aval: Aval): ...

    class Eqn:
        """An equation: a primitive with its parameters, what it reads and what it makes."""

        invars: list["Atom"]
        outvars: list[Var]
        primitive: jex.Primitive
        params: dict[str, Any]
        effects: Collection[Any]
        source_info: Any
        ctx: Any

        def replace(
            self,
            *,
            invars: Sequence["Atom"] | None = None,
            outvars: Sequence[Var] | None = None,
            primitive: jex.Primitive | None = None,
            params: dict[str, Any] | None = None,
            effects: Collection[Any] | None = None,
            source_info: Any = None,
            ctx: Any = None,
        ) -> "Eqn": ...

    class Jaxpr:
        """A jaxpr without its constants; of one with them, JAX leaves the parts open."""

        constvars: list[Var]
        invars: list[Var]
        outvars: list["Atom"]
        eqns: list[Eqn]
        effects: Collection[Any]
        debug_info: Any

        def replace(self, **new: Any) -> "Jaxpr": ...

else:
    Var, Literal, Eqn, Jaxpr = jex.Var, jex.Literal, jex.JaxprEqn, jex.Jaxpr

#: An operand of an equation, or a result of a jaxpr.
Atom: TypeAlias = Var | Literal
