"""A microbatch loop on its way to tasks: its stage calls opened, and each equation's task known.

A task has a position: 0..S-1 are the forwards of stages 0..S-1, S..2S-1 the backwards of stages
S-1..0, and 2S..3S-1 their second halves, where the schedule has those. So values flow from lower
positions to higher ones.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._groups import as_text
from jaxpp._typing import Atom, Eqn, Var
from jaxpp.schedules import Kind
from jaxpp.transforms.stages import dissolve_marks, is_backward_call, is_stage_call, stage_of_call

#: Makes the result of a carry from those of its parts; None for one that stays as it is.
Join = Callable[..., Any] | None


@dataclasses.dataclass(frozen=True)
class MicrobatchLoop:
    """A microbatch loop on its way to tasks: its body, and the equations before and after it.

    Args:
        consts: the body's inputs that are the same for all microbatches.
        carries: its inputs that are handed from a microbatch to the next: `carry_outs[i]` is what
            carry i becomes.
        xs: its inputs that are slices of a microbatch.
        eqns: its equations.
        position: of each equation the position of its task; None if it is outside of all calls of
            stages, or if each task that reads it repeats it.
        carry_outs: what the carries become.
        ys: the results of each microbatch.
        num_stages: the number of stages.
        recomputing: the positions whose tasks compute a part of a forward again.
        operands: for each input of the body the atom outside of the loop.
        results: the variables outside of the loop that have its results: the last carries, then the
            stacked `ys`.
        length: the number of microbatches.
        reverse: whether the loop takes the last slices first.
        splits_backward: whether the schedule has the tasks I and W in place of B.
        before: equations that run before the loop.
        after: equations that run after it.
        folds: for each carry that takes its microbatches in any order, the primitive that combines
            them.
    """

    consts: tuple[Var, ...]
    carries: tuple[Var, ...]
    xs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    position: tuple[int | None, ...]
    carry_outs: tuple[Atom, ...]
    ys: tuple[Atom, ...]
    num_stages: int
    recomputing: frozenset[int]
    operands: Mapping[Var, Atom]
    results: tuple[Var, ...]
    length: int
    reverse: bool
    splits_backward: bool
    before: tuple[Eqn, ...] = ()
    after: tuple[Eqn, ...] = ()
    folds: Mapping[Var, jex.Primitive] = dataclasses.field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return (*self.carry_outs, *self.ys)

    @property
    def inputs(self) -> list[Atom]:
        """The operands of the scheduled loop: atoms outside of it."""
        return [self.operands[v] for v in (*self.consts, *self.carries, *self.xs)]

    def placed(self) -> Iterator[tuple[Eqn, int | None]]:
        """Pairs each equation with its position."""
        return zip(self.eqns, self.position, strict=True)

    def with_equations(self, placed, **changes: Any) -> "MicrobatchLoop":
        """Replaces the equations by others, which are given with their positions."""
        placed = list(placed)
        return dataclasses.replace(
            self, eqns=tuple(e for e, _ in placed), position=tuple(p for _, p in placed), **changes
        )

    def renamed(self, placed, known: _jaxprs.Substitution, **changes: Any) -> "MicrobatchLoop":
        """Replaces the equations by others, and its results by what is known of them."""
        outs = tuple(map(known, self.carry_outs))
        return self.with_equations(
            placed, carry_outs=outs, ys=tuple(map(known, self.ys)), **changes
        )

    def rewritten(self, rule: Callable[[Eqn], _jaxprs.Replacement | None]) -> "MicrobatchLoop":
        """Replaces equations by a rule; what takes the place of one is in its task."""
        known = _jaxprs.Substitution()
        placed = [(e, p) for eqn, p in self.placed() for e in _jaxprs.rewritten([eqn], rule, known)]
        return self.renamed(placed, known)

    def divided(
        self, parts: Sequence[Sequence[Var]], joins: Sequence[Join], **changes: Any
    ) -> "MicrobatchLoop":
        """Puts several carries, its `parts`, in the place of each; further parts are of results.

        `joins` has for each the function that makes its result from those of its parts; None where
        it stays as it is, or where the carry goes and its result is made before the loop.
        """
        results, after = [], []
        for old, own, join in zip(self.results, parts, joins, strict=False):
            new = [old] * len(own) if join is None else list(map(_jaxprs.fresh_var, own))
            after += [] if join is None else _jaxprs.splice(join, new, [old])
            results += new
        return dataclasses.replace(
            self,
            carries=tuple(itertools.chain(*parts[: len(self.carries)])),
            results=(*results, *self.results[len(parts) :]),
            after=(*after, *self.after),
            **changes,
        )

    def read(self) -> set[Var]:
        """Finds the variables that equations or results read."""
        return _jaxprs.operands_of(self.eqns, self.outputs)

    def owner(self) -> dict[Var, int]:
        """Finds for each variable the position of the task that makes it, if one task does."""
        return {v: p for e, p in self.placed() if p is not None for v in e.outvars}

    def readers(self) -> dict[Var, set[int]]:
        """Finds for each variable the positions of the tasks that read it."""
        readers: dict[Var, set[int]] = {}
        for e, p in self.placed():
            if p is not None:
                for v in _jaxprs.variables(e.invars):
                    readers.setdefault(v, set()).add(p)
        return readers

    def from_stages(self, more: Iterable[Var]) -> set[Var]:
        """Finds all that depends on `more`, or on what a stage makes of a microbatch."""
        varying = _jaxprs.descendants(self.eqns, [*self.carries, *self.xs])
        staged = [v for e, p in self.placed() if p is not None for v in e.outvars if v in varying]
        return _jaxprs.descendants(self.eqns, [*staged, *more])

    def stage(self, position: int) -> int:
        """The stage of the task at a position."""
        sweep, at = divmod(position, self.num_stages)
        return self.num_stages - 1 - at if sweep else at

    def kind(self, position: int) -> Kind:
        """The kind of the task at a position."""
        return (Kind.F, Kind.I if self.splits_backward else Kind.B, Kind.W)[
            position // self.num_stages
        ]

    def task_name(self, position: int) -> str:
        """Names the task at a position for an error message."""
        return f"{'B' if position >= self.num_stages else 'F'} of stage {self.stage(position)}"

    def as_text(self) -> str:
        """Writes the body as a jaxpr, the task in front of each equation, and what is around it."""
        inputs = {"constants": self.consts, "carries": self.carries, "slices": self.xs}
        lines = [f"{self.length} microbatches{', the last first' if self.reverse else ''}"]
        lines += [", ".join(f"{name}: {len(own)}" for name, own in inputs.items())]
        for where, eqns in (("before", self.before), ("after", self.after)):
            if eqns:
                lines += [
                    f"{where} the loop:",
                    str(_jaxprs.part(eqns, _jaxprs.results_of(eqns)).jaxpr),
                ]
        invars = [v for own in inputs.values() for v in own]
        body = _compat.make_closed_jaxpr(invars, self.outputs, self.eqns)
        names = ["" if p is None else f"{self.kind(p)}{self.stage(p)}" for p in self.position]
        return "\n".join([*lines, "the body:", as_text(body, names)])


def read_loop(eqn: Eqn, splits_backward: bool) -> MicrobatchLoop:
    """Reads a scan over microbatches, and opens the stage calls in its body.

    Args:
        eqn: the scan.
        splits_backward: whether the schedule has the tasks I and W in place of B.

    Raises:
        ValueError: if stages are called inside a loop or conditional, or differ in their number.
    """
    num_consts, num_carry = _compat.scan_parts(eqn)
    jaxpr, values = _jaxprs.without_constants(eqn.params["jaxpr"])
    jaxpr = _compat.eliminate_dead_code(jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    num_consts += len(values)
    closed = zip(values, jaxpr.jaxpr.invars, strict=False)
    operands = [*(_jaxprs.literal(value, v.aval) for value, v in closed), *eqn.invars]
    flat, again = _inline_to_calls(jaxpr)
    sizes = sorted({call[1] for e in flat.eqns if (call := stage_of_call(e))})
    if len(sizes) > 1:
        raise ValueError(
            f"schedule: one microbatch loop calls functions of "
            f"{' and '.join(map(str, sizes))} stages; split them alike, or give each a loop of its "
            f"own."
        )
    (num_stages,) = sizes
    known = _jaxprs.Substitution()
    placed: list[tuple[Eqn, int | None]] = []
    edges: set[Var] = set()
    recomputing: set[int] = set()
    for e in map(known.rename, flat.eqns):
        call, computed_again = stage_of_call(e), not again.isdisjoint(e.outvars)
        if call is None:
            if _rounds_nothing(e) and e.invars[0] in edges:
                known.of[e.outvars[0]] = e.invars[0]
            else:
                placed.append((e, None))
            continue
        backward = computed_again or is_backward_call(e)
        position = 2 * num_stages - 1 - call[0] if backward else call[0]
        opened = _jaxprs.part(*_jaxprs.inline_call(e, e.invars))
        clean, _ = dissolve_marks(opened.jaxpr)
        if computed_again or _jaxprs.contains(e, _recomputes):
            recomputing.add(position)
        placed.extend((inner, position) for inner in clean.eqns)
        known.of.update((o, known(r)) for o, r in zip(e.outvars, clean.jaxpr.outvars, strict=True))
        edges.update(_jaxprs.variables(clean.jaxpr.outvars))
    invars = tuple(flat.jaxpr.invars)
    outvars = tuple(known(v) for v in flat.jaxpr.outvars)
    return MicrobatchLoop(
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        invars[num_consts + num_carry :],
        tuple(e for e, _ in placed),
        tuple(p for _, p in placed),
        outvars[:num_carry],
        outvars[num_carry:],
        num_stages,
        frozenset(recomputing),
        dict(zip(invars, operands, strict=True)),
        tuple(eqn.outvars),
        eqn.params["length"],
        eqn.params["reverse"],
        splits_backward,
    )


def _inline_to_calls(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, set[Var]]:
    """Brings the calls of stages to the top of a loop's body.

    Also gives the results of the equations that a checkpoint computes again for a backward in it.
    Where a stage in the checkpoint reads the forward of an earlier one, they are forwards of the
    loop, for the earlier one's backward comes later. So it is for the gradient of a loss over the
    batch.
    """
    again: set[Var] = set()

    def holds_calls(eqn: Eqn) -> bool:
        return not is_stage_call(eqn) and _jaxprs.contains(eqn, is_stage_call)

    def opening(computed_again: bool) -> Callable[[Eqn], _jaxprs.Replacement | None]:
        def rule(eqn: Eqn) -> _jaxprs.Replacement | None:
            if not holds_calls(eqn):
                again.update(eqn.outvars if computed_again else ())
                return None
            if _jaxprs.called_jaxpr(eqn) is None:
                raise ValueError(
                    f"schedule: stages are called inside a `{eqn.primitive.name}`"
                    f"{_compat.at_source_line(eqn)}; a schedule needs them directly in the "
                    f"microbatch loop."
                )
            called, results = _jaxprs.inline_call(eqn, eqn.invars)
            is_again = False
            if _recomputes(eqn):
                inner = _jaxprs.inline(_jaxprs.part(called, results).jaxpr, holds_calls).eqns
                is_again = any(map(is_backward_call, inner)) and not _are_chained(inner)
            known = _jaxprs.Substitution()
            eqns = _jaxprs.rewritten(called, opening(computed_again or is_again), known)
            return eqns, map(known, results)

        return rule

    return _jaxprs.rewrite(jaxpr, opening(False)), again


def _are_chained(eqns: Sequence[Eqn]) -> bool:
    """Tells whether a stage reads a value that the forward of an earlier stage makes."""
    behind: dict[Var, set[int]] = {}
    for eqn in eqns:
        stages = set().union(*(behind.get(v, ()) for v in _jaxprs.variables(eqn.invars)))
        if (call := stage_of_call(eqn)) is not None:
            if any(stage < call[0] for stage in stages):
                return True
            if not is_backward_call(eqn):
                stages.add(call[0])
        behind.update(dict.fromkeys(eqn.outvars, stages))
    return False


def _recomputes(eqn) -> bool:
    """Tells whether an equation is the backward of a checkpoint: it computes its forward again."""
    return eqn.primitive.name in _primitives.CHECKPOINTS and eqn.params["differentiated"]


def _rounds_nothing(eqn) -> bool:
    """Tells whether an equation rounds a value to its own dtype, as checkpoints do to keep one."""
    if eqn.primitive.name != "reduce_precision":
        return False
    kind = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)
