"""The values of a placed step, by its variables."""

from collections.abc import Hashable, Iterable

import numpy as np

from jaxpp import jaxprs
from jaxpp._program import Argument
from jaxpp._specs import Spec, replicated
from jaxpp.jaxprs import Atom, Eqn, Literal, Var
from jaxpp.transforms._step import Step
from jaxpp.transforms.graph import GraphValue
from jaxpp.transforms.place._segments import is_segment
from jaxpp.transforms.tasks import ScheduledLoop, is_loop


class Values:
    """Makes the values of a step's variables; `current` has those that they have so far.

    The variable of an accumulator has one value after the other.
    """

    def __init__(self, step: Step):
        inside = step.jaxpr.jaxpr
        self.inside, self.fact = step.inside, step.fact
        self.current: dict[Var, GraphValue] = {}
        self._constants: dict[Hashable, GraphValue] = {}
        #: For each variable that is sent to be put together with others, the reason.
        self._why_gathered = {
            v: why
            for segment in filter(is_segment, step.jaxpr.eqns)
            for e in segment.params["jaxpr"].eqns
            if e.outvars and (why := step.fact(e.outvars[0]).gathered)
            for v in jaxprs.variables(e.invars)
        }
        #: The specs of the results that have one, and the buffers that values of variables begin.
        self._specs: dict[Var, Spec] = {}
        for v, result in zip(inside.outvars, step.results, strict=True):
            if result.spec is not None:
                self._specs.setdefault(v, result.spec)
        self._begun = _first_values(step.jaxpr.eqns)
        for v, argument in zip(inside.invars, step.arguments, strict=True):
            self.add(v, "argument", f"args{argument.name}", argument=argument)

    def add(
        self,
        var: Var,
        kind: str,
        name: str,
        memory: Hashable = None,
        argument: Argument | None = None,
    ) -> GraphValue:
        """Makes the value that a variable has from now on.

        Args:
            var: the variable.
            kind: its kind in a message, if it is no scalar.
            name: its name in a message.
            memory: the buffer whose next value it is.
            argument: the argument that it is.
        """
        if why := self._why_gathered.get(var):
            kind, name = "gathered", f"{name} {why}"
        begins = memory is None and var in self._begun
        spec = argument.spec if argument and self.inside else None
        self.current[var] = value = GraphValue(
            var.aval,
            "scalar" if var.aval.size == 1 else kind,
            name,
            argument,
            memory=self._begun[var] if begins else memory,
            begins=begins,
            spec=self._specs.get(var) if spec is None else spec,
        )
        return value

    def operand(self, atom: Atom) -> GraphValue:
        """Returns the value of an atom; that of a literal is a constant."""
        return self._constant(atom) if jaxprs.is_literal(atom) else self.current[atom]

    def _constant(self, literal: Literal) -> GraphValue:
        """Returns the value of an array, which is known by its identity, or of a number."""
        aval = literal.aval
        if jaxprs.is_array_literal(literal):
            key = id(literal.val)
        else:
            key = aval.dtype.name, np.asarray(literal.val, aval.dtype).tobytes()
        if key not in self._constants:
            spec = replicated(len(aval.shape)) if self.inside else None
            self._constants[key] = GraphValue(
                aval,
                "gathered",
                "constant",
                constant=jaxprs.copied_to_host(literal.val, aval),
                spec=spec,
            )
        return self._constants[key]


def operands_of(loop: ScheduledLoop) -> list[tuple[Var, int | None]]:
    """The operands of a loop; those of a placed step have the buffers of its results last."""
    return [*loop.operands, *loop.results[loop.num_directions * loop.num_carry :]]


def _first_values(eqns: Iterable[Eqn]) -> dict[Var, Hashable]:
    """Finds the first values of the accumulators of loops, each with its buffer."""
    found: dict[Var, Hashable] = {}
    for number, eqn in enumerate(filter(is_loop, eqns)):
        loop = ScheduledLoop.of(eqn)
        results = {v for task in loop.tasks for v in task.outvars}
        kept = {v for v, out in loop.becomes().items() if out in results} | {*loop.ys}
        for (v, direction), atom in zip(operands_of(loop), eqn.invars, strict=True):
            if v in kept and not jaxprs.is_literal(atom):
                found[atom] = number, v, direction
    return found
