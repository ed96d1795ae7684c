"""Puts the equations of a program into groups: by rules that sweep over them, then as parts.

A group is whatever runs as one: a stage, a task, the stages that share a computation, a rank. The
same three steps divide a program into any of them: facts flow along the variables (`Flow.down`,
`Flow.up`), each equation is given a group from the groups around it, and `outline` makes a part of
each group. An equation without a group is repeated in each group that reads its results.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax.extend.core as jex

from jaxpp.jaxprs._equations import is_literal, variables
from jaxpp.jaxprs._typing import Atom, Eqn, Var


class Ordered(Protocol):
    """Whatever can be compared."""

    def __lt__(self, other: Any, /) -> bool: ...


#: Anything by which equations are grouped; groups can be compared.
Group = TypeVar("Group", bound=Ordered)

#: The fact that a sweep knows of a variable.
Fact = TypeVar("Fact")


class Flow:
    """Equations in order, by number: what each reads, and who makes and reads each variable.

    Args:
        eqns: the equations.
        outputs: the atoms that the caller reads, whose number is None.
        more: gives the variables that an equation reads beside its operands, such as a guard's.
    """

    def __init__(
        self,
        eqns: Sequence[Eqn],
        outputs: Iterable[Atom] = (),
        more: Callable[[Eqn], Iterable[Var]] = lambda eqn: (),
    ):
        self.eqns = eqns
        self.reads = [[*variables(e.invars), *dict.fromkeys(more(e))] for e in eqns]
        self._outputs = variables(outputs)

    @functools.cached_property
    def maker(self) -> dict[Var, int]:
        """The equation that makes each variable, if one does."""
        return {v: i for i, e in enumerate(self.eqns) for v in e.outvars}

    @functools.cached_property
    def readers(self) -> dict[Var, set[int | None]]:
        """The equations that read each variable."""
        readers: dict[Var, set[int | None]] = {}
        for i, read in [*enumerate(self.reads), (None, self._outputs)]:
            for v in read:
                readers.setdefault(v, set()).add(i)
        return readers

    def maker_of(self, atom: Atom) -> int | None:
        """Returns the number of the equation that makes an atom; None where none does."""
        return None if is_literal(atom) else self.maker.get(atom)

    def down(
        self,
        start: Mapping[Var, Fact],
        rule: Callable[[int, list[Fact]], Fact | dict[Var, Fact] | None],
    ) -> dict[Var, Fact]:
        """Hands facts of variables on from operands to results.

        `rule(i, near)` gives the fact of equation i's results, from those of its operands: one for
        all, or a dictionary by result; None for none.
        """
        facts = dict(start)
        for i, eqn in enumerate(self.eqns):
            fact: Any = rule(i, [facts[v] for v in self.reads[i] if v in facts])
            if isinstance(fact, dict):
                facts.update(fact)
            elif fact is not None:
                facts.update((v, fact) for v in eqn.outvars)
        return facts

    def up(
        self,
        start: Mapping[Var, Fact],
        rule: Callable[[int, list[Fact]], Fact | dict[Var, Fact] | None],
        join: Callable[[Fact, Fact], Fact] = operator.or_,
    ) -> dict[Var, Fact]:
        """Hands facts of variables on from results to operands.

        `rule(i, near)` gives the fact of equation i's operands, from those of its results: one for
        all, or a dictionary by operand; None for none. `join` combines those of several readers.
        """
        facts = dict(start)
        for i in reversed(range(len(self.eqns))):
            fact: Any = rule(i, [facts[v] for v in self.eqns[i].outvars if v in facts])
            if fact is None:
                continue
            for v in fact if isinstance(fact, dict) else self.reads[i]:
                own = fact[v] if isinstance(fact, dict) else fact
                facts[v] = join(facts[v], own) if v in facts else own
        return facts

    def behind(
        self, variables: Iterable[Var], ends: Callable[[int], bool] = lambda i: False
    ) -> Iterator[tuple[Var, int | None]]:
        """Walks back from variables, each with the number of its equation, if one makes it.

        `ends` tells which equations the walk does not go behind.
        """
        stack, seen = list(variables), set()
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            i = self.maker.get(var)
            yield var, i
            if i is not None and not ends(i):
                stack.extend(self.reads[i])


@dataclasses.dataclass(frozen=True)
class Cluster(Generic[Group]):
    """The equations of a group in order, with the ungrouped ones that they need.

    Of the variables that its own equations make, `sent` are those that equations outside read, and
    `left` those that the caller reads; `wanted` are further ones, which ungrouped equations make.
    """

    group: Group
    eqns: list[Eqn]
    sent: list[Var]
    left: list[Var]
    wanted: list[Var]

    @property
    def outputs(self) -> list[Var]:
        """The variables that others read, in the order in which they are made."""
        read = {*self.sent, *self.left, *self.wanted}
        return [v for e in self.eqns for v in e.outvars if v in read]


def outline(
    flow: Flow,
    group_of: Mapping[int, Group],
    wanted: Mapping[Group, Sequence[Var]] | None = None,
    fixed: Collection[int] = (),
) -> list[Cluster[Group]]:
    """Makes a cluster of each group, in the order of the groups.

    Args:
        flow: the equations.
        group_of: the group of each equation that is not repeated; groups can be compared.
        wanted: for a group, variables of ungrouped equations that it is to give, too.
        fixed: the numbers of equations that are in no group, and not repeated either.
    """
    wanted, fixed = wanted or {}, {*fixed, *group_of}
    members: dict[Group, list[int]] = {group: [] for group in sorted({*group_of.values(), *wanted})}
    for i in sorted(group_of):
        members[group_of[i]].append(i)
    clusters = []
    for group, own in members.items():
        more, inside = list(wanted.get(group, ())), set(own)
        read = [*more, *(v for i in own for v in flow.reads[i])]
        again = {i for _, i in flow.behind(read, fixed.__contains__) if i is not None}
        numbers = sorted(inside | (again - fixed))
        made = [(v, flow.readers.get(v, set())) for i in own for v in flow.eqns[i].outvars]
        clusters.append(
            Cluster(
                group,
                [flow.eqns[i] for i in numbers],
                [v for v, readers in made if not readers <= inside | {None}],
                [v for v, readers in made if None in readers],
                more,
            )
        )
    return clusters


def in_levels(
    flow: Flow, group_of: Mapping[int, Group], sources: Callable[[int], Iterable[int]]
) -> dict[int, int]:
    """Divides groups whose equations need each other's results into levels.

    Equations of one level and group run at once: an equation is at the last level that those which
    read it allow, so that little is computed before the transfers that it waits for.
    """
    level: dict[int, int] = {}
    consumers: dict[int, list[int]] = {}
    order = sorted(group_of)
    for i in order:
        level[i] = 0
        for j in sources(i):
            level[i] = max(level[i], level[j] + (group_of[j] != group_of[i]))
            consumers.setdefault(j, []).append(i)
    last: dict[Group, int] = {}
    for i, n in level.items():
        last[group_of[i]] = max(last.get(group_of[i], 0), n)
    for i in reversed(order):
        level[i] = min(
            (level[c] - (group_of[c] != group_of[i]) for c in consumers.get(i, ())),
            default=last[group_of[i]],
        )
    return level


def union(groups: Iterable[frozenset]) -> frozenset:
    """Joins groups that are sets."""
    return functools.reduce(operator.or_, groups, frozenset())


def as_text(jaxpr: jex.ClosedJaxpr, groups: Sequence[str]) -> str:
    """Writes a jaxpr, with a name in front of each of its equations."""
    lines = str(jaxpr).splitlines()
    # JAX begins an equation four columns in, and what belongs to it further in, or by a bracket.
    first = [n for n, line in enumerate(lines) if re.match(r"    [a-zA-Z_]", line)]
    if len(first) == len(groups):
        names = dict(zip(first, groups, strict=True))
        width = 1 + max(map(len, groups), default=0)
        lines = [names.get(n, "").ljust(width) + line for n, line in enumerate(lines)]
    return "\n".join(line.rstrip() for line in lines)
