"""A task that is edited: its equations, and what it reads and makes of the loop's body."""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var, primitives
from jaxpp.transforms.tasks._loop import Key, ScheduledLoop, make_task


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """A task, whose equations and variables can be exchanged.

    Args:
        key: its kind and stage.
        inputs: for each variable of the loop's body that it reads, its own.
        eqns: its equations.
        outputs: for each variable of the loop's body that it makes, its own atom.
        recomputes: whether it computes a part of its stage's forward again.
    """

    key: Key
    inputs: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    eqns: tuple[Eqn, ...] = ()
    outputs: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    recomputes: bool = False

    @classmethod
    def of(cls, task: Eqn) -> "OpenTask":
        """Opens the equation of a task."""
        jaxpr, read = task.params["jaxpr"], jaxprs.variables(task.invars)
        return cls(
            task.params["key"],
            dict(zip(read, jaxpr.jaxpr.invars, strict=True)),
            tuple(jaxpr.eqns),
            dict(zip(task.outvars, jaxpr.jaxpr.outvars, strict=True)),
            task.params["recomputes"],
        )

    def closed(self) -> Eqn:
        """Makes the equation of the task."""
        atoms = list(self.inputs.values()), list(self.outputs.values())
        jaxpr = _compat.make_closed_jaxpr(*atoms, self.eqns, str(self.key))
        return make_task(self.key, jaxpr, [*self.inputs], [*self.outputs], self.recomputes)

    def reading(self, variables: Iterable[Var]) -> "OpenTask":
        """Reads further variables of the body."""
        more = {v: jaxprs.fresh_var(v) for v in variables if v not in self.inputs}
        return dataclasses.replace(self, inputs={**self.inputs, **more})

    def reading_instead(self, new: Mapping[Var, Var]) -> "OpenTask":
        """Reads other variables of the body in place of some."""
        inputs, known = dict[Var, Var](), jaxprs.Substitution()
        for v, inner in self.inputs.items():
            if (first := inputs.setdefault(new.get(v, v), inner)) is not inner:
                known.of[inner] = first
        outputs = {v: known(inner) for v, inner in self.outputs.items()}
        eqns = tuple(map(known.rename, self.eqns)) if known.of else self.eqns
        return dataclasses.replace(self, inputs=inputs, eqns=eqns, outputs=outputs)

    def without(self, variable: Var) -> "OpenTask":
        """Does not read a variable of the body any more."""
        inputs = {v: inner for v, inner in self.inputs.items() if v is not variable}
        return dataclasses.replace(self, inputs=inputs)

    def giving(self, outputs: Mapping[Var, Atom]) -> "OpenTask":
        """Makes further variables of the body, or makes them of other atoms."""
        return dataclasses.replace(self, outputs={**self.outputs, **outputs})

    def renamed(self, old: Var, new: Atom) -> "OpenTask":
        """Puts an atom in place of a variable of its own, wherever that is read."""
        known = jaxprs.Substitution([(old, new)])
        return dataclasses.replace(
            self,
            eqns=tuple(map(known.rename, self.eqns)),
            outputs={v: known(inner) for v, inner in self.outputs.items()},
        )

    def additions(self, loop: ScheduledLoop) -> list[tuple[Eqn, Var]]:
        """Finds the equations that add to the loop's sums, each with what it adds."""
        maker = {v: e for e in self.eqns for v in e.outvars}
        sums = {out: v for v, out in loop.becomes().items() if v in loop.folds}
        found = []
        for out, v in self.outputs.items():
            if out in sums and not jaxprs.is_literal(v) and v in maker:
                carry = sums[out]
                if loop.folds[carry].name in primitives.ADDS:
                    depends = jaxprs.descendants(self.eqns, [self.inputs[carry]])  # perhaps cast
                    read = jaxprs.variables(maker[v].invars)
                    found += [(maker[v], o) for o in read if o not in depends]
        return found
