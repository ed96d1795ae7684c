"""`Step`: a whole step as one flat jaxpr, with records of its arguments and results, and facts.

`place` traces a function to a step, and takes it through passes. A pass is a function from a step
to a step. All that is known of an argument or a result is in its record, and of a variable in
`facts`. A pass that replaces variables by others also gives the facts of the new ones.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping

import jax.extend.core as jex
from jax.sharding import AbstractMesh

from jaxpp import _compat, jaxprs
from jaxpp._program import Argument, Result, Role, counted
from jaxpp._specs import Spec, axis_sizes
from jaxpp.jaxprs import Var

#: The condition of an equation: it runs if each of these variables has its number.
Guard = tuple[tuple[Var, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """All that is known of a variable beside its type.

    Args:
        anywhere: whether it is made wherever it is read: a slice of an array that had to be whole,
            or the combination of the parts' reductions.
        gathered: why it is put together from parts of several stages; empty if it is not.
        guard: when its equation runs; empty for always.
        whole: how it is split where the parameters that it is made of are gathered; None if that is
            as it is split anyway.
    """

    anywhere: bool = False
    gathered: str = ""
    guard: Guard = ()
    whole: Spec | None = None

    def as_text(self, name: Callable[[Var], str]) -> str:
        """Writes the fact; `name` gives the name that a variable has in the text of the jaxpr."""
        when = ", ".join(f"{name(v)} is {k}" for v, k in self.guard)
        said = ["made anywhere"] * self.anywhere
        said += [f"gathered {self.gathered}"] if self.gathered else []
        said += [f"in tasks split {self.whole}"] if self.whole is not None else []
        return ", ".join([*said, *([f"where {when}"] if when else [])])


#: The fact of most variables.
NOTHING = Fact()


@dataclasses.dataclass(frozen=True)
class Inside:
    """The axes inside a rank.

    Args:
        mesh: the mesh of a rank, without its devices.
        zero: for each role, such as optimizer state, the axes over which its arguments are split
            further.
        examples: the axes whose devices share the examples of a microbatch, for want of replicas.
        replicas: the axis whose devices have replicas of their own.
    """

    mesh: AbstractMesh
    zero: Mapping[Role, tuple[str, ...]]
    examples: tuple[str, ...] = ()
    replicas: str = "data"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return axis_sizes(self.mesh)


@dataclasses.dataclass(frozen=True)
class Step:
    """A whole step.

    Args:
        jaxpr: the step, its calls inlined but for those of stages.
        arguments: the records of its arguments, in the order of the jaxpr's inputs.
        results: the records of its results, in the order of the jaxpr's outputs.
        facts: the facts of variables.
        inside: the axes inside a rank; None where a rank is one device.
    """

    jaxpr: jex.ClosedJaxpr
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    facts: Mapping[Var, Fact] = dataclasses.field(default_factory=dict)
    inside: Inside | None = None

    def __repr__(self):
        arguments, results = len(self.arguments), len(self.results)
        return (
            f"Step({counted(arguments, 'argument')}, {counted(results, 'result')}, "
            f"{counted(len(self.jaxpr.eqns), 'equation')})"
        )

    def fact(self, var: Var) -> Fact:
        """Returns the fact of a variable."""
        return self.facts.get(var, NOTHING)

    @property
    def pairs(self) -> dict[int, int]:
        """For each result that becomes an argument of the next call, the two numbers."""
        return {n: r.becomes for n, r in enumerate(self.results) if r.becomes is not None}

    @property
    def guards(self) -> dict[Var, Guard]:
        """The guards of variables whose equations run only at times."""
        return {v: fact.guard for v, fact in self.facts.items() if fact.guard}

    def with_guards(self, jaxpr: jex.ClosedJaxpr, guards: Mapping[Var, Guard]) -> "Step":
        """Replaces the jaxpr of the step, and all guards by these."""
        facts = {v: dataclasses.replace(self.fact(v), guard=()) for v in self.facts}
        for v, guard in guards.items():
            facts[v] = dataclasses.replace(facts.get(v, NOTHING), guard=guard)
        return dataclasses.replace(self, jaxpr=jaxpr, facts=facts)

    def as_text(self) -> str:
        """Writes the arguments, the results and the facts, a line each, and the jaxpr."""
        lines = [f"argument {n}: {_line(a)}" for n, a in enumerate(self.arguments)]
        lines += [f"result {n}: {_line(r)}" for n, r in enumerate(self.results)]
        name = _names(self.jaxpr, {v: None for g in self.guards.values() for v, _ in g}).__getitem__
        lines += [
            f"{', '.join(said)}: made by {eqn.primitive.name}"
            for eqn in self.jaxpr.eqns
            if (said := [text for v in eqn.outvars if (text := self.fact(v).as_text(name))])
        ]
        return "\n".join([*lines, str(_with_bodies_as_text(self.jaxpr))])


def _with_bodies_as_text(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Lets the body of a loop have names of its own in a text: they stay from pass to pass."""
    eqns = [
        e.replace(params={**e.params, "body": f"\n{e.params['body']}"})
        if e.primitive.name == "pipeline_loop"
        else e
        for e in jaxpr.eqns
    ]
    return _compat.with_equations(jaxpr, eqns)


def _names(jaxpr: jex.ClosedJaxpr, variables: Collection[Var]) -> dict[Var, str]:
    """Finds the names that variables have in the text of a jaxpr; `_` for one that is not read."""
    if not variables:
        return {}
    opened = jaxpr.jaxpr
    read = set(jaxprs.variables([*opened.outvars, *(v for e in opened.eqns for v in e.invars)]))
    named = [v for v in variables if v in read]
    # A variable has its name from where the text has it first; the results come last.
    shown = _compat.with_equations(jaxpr, opened.eqns, [*named, *opened.outvars])
    text = str(_with_bodies_as_text(shown))
    names = map(str.strip, text.rpartition(" in (")[2].partition(")")[0].split(","))
    return dict.fromkeys(variables, "_") | dict(zip(named, names, strict=False))


def _line(record: Argument | Result) -> str:
    """Writes the fields of a record that are not empty."""
    said: list[str] = [record.aval.str_short()]
    if isinstance(record, Argument):
        said = [f"args{record.name}", *said, str(record.role)]
        said += [word for word in ("donated", "fed") if getattr(record, word)]
    elif record.rows is not None:
        said.append(f"rows {record.rows[0]}:{record.rows[1]}")
    if record.stages:
        said.append(f"of stages {' '.join(map(str, sorted(record.stages)))}")
    if isinstance(record, Result) and record.becomes is not None:
        said.append(f"becomes argument {record.becomes}")
    if record.spec and any(record.spec):
        said.append(f"split {record.spec}")
    return " ".join(said)


def changes(texts: Mapping[str, str]) -> str:
    """Writes the first text, and the lines that changed in each further one, by their names."""
    (first, *lines), *rest = ([name, *text.splitlines()] for name, text in texts.items())
    said = [f"==== {first}", *lines]
    for name, *text in rest:
        # Without the names of files, and the numbers of lines, of a diff.
        said += [f"==== {name}", *[*difflib.unified_diff(lines, text, n=0, lineterm="")][2:]]
        lines = text
    return "\n".join(line for line in said if not line.startswith("@@"))
