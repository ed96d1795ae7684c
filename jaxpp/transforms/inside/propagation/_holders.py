"""Sharding propagation through the equations that hold jaxprs of their own: calls and loops.

Each rule is given `outputs(jaxpr, specs)`, which gives the specs of such a jaxpr's outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp._specs import replicated, spec_of
from jaxpp.transforms.inside.propagation._dimensions import shape_of
from jaxpp.transforms.inside.propagation._specs import MaybeSpec, merge, pinned
from jaxpp.transforms.tasks import LoopTasks, Ref

Outputs = Callable[[Any, Sequence[MaybeSpec]], list[MaybeSpec]]

_ROUNDS = 3  # after which a loop's carries have the specs of its body's results


def call(eqn, specs: Sequence[MaybeSpec], outputs: Outputs) -> list[MaybeSpec]:
    """Gives the specs of the results of an equation that calls its body once."""
    return outputs(_jaxprs.called_jaxpr(eqn), specs)


def _jit(eqn, specs, outputs) -> list[MaybeSpec]:
    """Gives the specs of the results of a nested `jit`, which may have shardings of its own."""
    pinned_in = eqn.params.get("in_shardings", (None,) * len(specs))
    specs = [pinned(s, p, v) for s, p, v in zip(specs, pinned_in, eqn.invars, strict=True)]
    results = call(eqn, specs, outputs)
    pinned_out = eqn.params.get("out_shardings", (None,) * len(results))
    return [pinned(s, p, v) for s, p, v in zip(results, pinned_out, eqn.outvars, strict=True)]


def _cond(eqn, specs, outputs) -> list[MaybeSpec]:
    branches = [outputs(b, specs[1:]) for b in eqn.params["branches"]]
    return [merge(results) for results in zip(*branches, strict=True)]


def _while(eqn, specs, outputs) -> list[MaybeSpec]:
    skipped, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts = specs[skipped : skipped + num_consts]

    def body(carry):
        return outputs(eqn.params["body_jaxpr"], [*consts, *carry]), None

    return _fixpoint(body, specs[skipped + num_consts :])[0]


def _scan(eqn, specs, outputs) -> list[MaybeSpec]:
    num_consts, num_carry = _compat.scan_parts(eqn)
    consts, xs = specs[:num_consts], specs[num_consts + num_carry :]
    rows = [_row(s) for s in xs]

    def body(carry):
        results = outputs(eqn.params["jaxpr"], [*consts, *carry, *rows])
        return results[:num_carry], results[num_carry:]

    carry, ys = _fixpoint(body, specs[num_consts : num_consts + num_carry])
    return [*carry, *map(_stacked, ys)]


def _fixpoint(body: Callable, carry: Sequence[MaybeSpec]) -> tuple[list[MaybeSpec], Any]:
    """Finds the specs of a loop's carries, and the other results of `body` for these specs."""
    carry = list(carry)
    for _ in range(_ROUNDS):
        results, rest = body(carry)
        merged = [merge(pair) for pair in zip(carry, results, strict=True)]
        if merged == carry:
            break
        carry = merged
    return carry, rest  # pyright: ignore[reportPossiblyUnboundVariable]


def _row(spec: MaybeSpec) -> MaybeSpec:
    """Gives the spec of a slice along the first dimension."""
    return None if spec is None else spec[1:]


def _stacked(spec: MaybeSpec) -> MaybeSpec:
    """Gives the spec of values stacked along a new first dimension."""
    return None if spec is None else ((), *spec)


def loop_specs(eqn, specs: Sequence[MaybeSpec], outputs: Outputs) -> dict[Ref, MaybeSpec]:
    """Finds the specs of all values that tasks of a scheduled loop read and make, by reference."""
    tasks: LoopTasks = eqn.params["tasks"]
    xs = specs[tasks.num_consts + tasks.num_carry :]
    known: dict[Ref, MaybeSpec] = {
        Ref(source, i): spec
        for source, own in (("const", specs[: tasks.num_consts]), ("x", map(_row, xs)))
        for i, spec in enumerate(own)
    }
    carries = [Ref("carry", i) for i in range(tasks.num_carry)]

    def body(carry):
        known.update(zip(carries, carry, strict=True))
        made = dict(known)
        for task in tasks.bodies:
            results = outputs(task.jaxpr, [known[r] for r in task.inputs])
            made.update(zip(task.outputs, results, strict=True))
            known.update((r, made[r]) for r in task.outputs if r.source != "carry")
        return [made[r] for r in carries], None

    initial = specs[tasks.num_consts : tasks.num_consts + tasks.num_carry]
    known.update(zip(carries, _fixpoint(body, initial)[0], strict=True))
    return known


def _pipeline_loop(eqn, specs, outputs) -> list[MaybeSpec]:
    tasks: LoopTasks = eqn.params["tasks"]
    known = loop_specs(eqn, specs, outputs)
    ys = [known[Ref("y", i)] for i in range(tasks.num_ys)]
    return [*(known[Ref("carry", i)] for i in range(tasks.num_carry)), *map(_stacked, ys)]


def _shard_map(eqn, specs, outputs) -> list[MaybeSpec]:
    """Takes the `out_specs` for the `shard_map`'s own axes, and the body's specs for the others."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))

    def without(spec: MaybeSpec) -> MaybeSpec:
        return spec and tuple(tuple(a for a in e if a not in manual) for e in spec)

    inside = outputs(params["jaxpr"], [without(s) for s in specs])
    results = []
    for var, p, inner in zip(eqn.outvars, params["out_specs"], inside, strict=True):
        outer = spec_of(p, len(shape_of(var)))
        results.append(
            tuple(o + i for o, i in zip(outer, inner or replicated(len(outer)), strict=True))
        )
    return results


HOLDERS: dict[str, Callable[[Any, Sequence[MaybeSpec], Outputs], list[MaybeSpec]]] = {
    "cond": _cond,
    "jit": _jit,
    "pipeline_loop": _pipeline_loop,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
