"""Asks Shardy how XLA would split the values of a jaxpr over the devices of a rank.

The jaxpr is lowered for the mesh of a rank without its devices, and Shardy's propagation, which is
XLA's own, runs on the module (openxla.org/shardy/propagation). Nothing is compiled. So a step has
the same programs on every mesh and in every schedule.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import func, sdy
from jax.sharding import AbstractMesh, NamedSharding

from jaxpp import _compat, jaxprs
from jaxpp._messages import warn
from jaxpp._specs import Spec, filled, partition_spec, replicated, type_of
from jaxpp.jaxprs import Atom, Eqn, Var

#: A spec, or None for a value that may be split in any way: it is made of nothing that is given
#: (zeros, positions, random bits), and is split as the values that it is combined with.
MaybeSpec = Spec | None

#: The platforms to lower for: the first for which each primitive can be lowered.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def variable_specs(
    jaxpr: jex.ClosedJaxpr,
    variables: Collection[Var],
    specs: Sequence[MaybeSpec],
    sizes: Mapping[str, int],
) -> dict[Var, MaybeSpec]:
    """Finds how variables of a jaxpr, and all values that they are made of, are split.

    Args:
        jaxpr: a jaxpr.
        variables: some of its variables.
        specs: one for each of its inputs, or None where it may be split in any way.
        sizes: the number of devices along each axis.
    """
    eqns = jaxprs.needed([e for e in jaxpr.eqns if not e.effects], variables)
    wanted = [*jaxpr.jaxpr.invars, *jaxprs.results_of(eqns)]
    part = _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, wanted, eqns)
    return dict(zip(wanted, propagate(part, specs, sizes)[1], strict=True))


def propagate(
    jaxpr: jex.ClosedJaxpr, specs: Sequence[MaybeSpec], sizes: Mapping[str, int]
) -> tuple[list[MaybeSpec], list[MaybeSpec]]:
    """Finds how the inputs and outputs of a jaxpr are split.

    Args:
        jaxpr: a jaxpr.
        specs: one for each of its inputs, or None where it may be split in any way.
        sizes: the number of devices along each axis.

    Returns:
        The specs of the inputs, of which those that may be split in any way have that of their
        uses, and the specs of the outputs. None still is for what may be split in any way.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> args = jnp.ones((4, 8)), jnp.ones((4, 8))
        >>> jaxpr = jax.make_jaxpr(lambda x, y: ((x + y).sum(1), jnp.zeros(3)))(*args)
        >>> inputs, outputs = propagate(jaxpr, [(("data",), ()), None], {"data": 2})
        >>> inputs[1], outputs
        ((('data',), ()), [(('data',),), None])
    """
    given = [v for v, spec in zip(jaxpr.jaxpr.invars, specs, strict=True) if spec]
    reached = jaxprs.descendants(jaxpr.eqns, given)
    inputs, outputs = tuple(specs), (None,) * len(jaxpr.out_avals)
    if any(axes for spec in specs if spec for axes in spec) or any(
        jaxprs.contains(e, _splits) for e in jaxpr.eqns
    ):
        key = jaxprs.structure(jaxpr), tuple(specs), tuple(sizes.items())
        inputs, outputs = _answer(_Question(key, jaxpr))

    def known(atom: Atom, spec: MaybeSpec) -> MaybeSpec:
        whole = not atom.aval.shape or jaxprs.is_literal(atom) or atom in reached
        return replicated(len(atom.aval.shape)) if spec is None and whole else spec

    return (
        [asked if spec is None else spec for asked, spec in zip(inputs, specs, strict=True)],
        list(map(known, jaxpr.jaxpr.outvars, outputs)),
    )


def _splits(eqn: Eqn) -> bool:
    """Tells whether an equation may split arrays by itself."""
    named = eqn.primitive.name in ("sharding_constraint", "shard_map")
    return named or bool(jaxprs.shardings_of(eqn))


# ---- the question to Shardy ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Question:
    """A question to Shardy: how are a jaxpr's outputs split?

    `key` has the jaxpr's structure, its inputs' specs and the axes.
    """

    key: tuple[Any, tuple[MaybeSpec, ...], tuple[tuple[str, int], ...]]
    jaxpr: jex.ClosedJaxpr = dataclasses.field(compare=False)  # keeps what the structure names


#: The specs of a jaxpr's inputs and outputs; None for what nothing splits.
_Answer = tuple[tuple[MaybeSpec, ...], tuple[MaybeSpec, ...]]


@functools.lru_cache(maxsize=512)
def _answer(question: _Question) -> _Answer:
    """Asks Shardy."""
    (_, specs, axes), jaxpr = question.key, question.jaxpr
    mesh = AbstractMesh(tuple(n for _, n in axes), tuple(name for name, _ in axes))
    quiet = _without_effects(jaxpr)

    shardings: Any = [
        None if spec is None else NamedSharding(mesh, partition_spec(spec)) for spec in specs
    ]
    with jax.sharding.use_abstract_mesh(mesh), jaxprs.with_its_types(jaxpr):
        run = jax.jit(
            functools.partial(jaxprs.run, quiet), in_shardings=shardings, keep_unused=True
        )
        lowered = _lower(run.trace(*map(type_of, jaxpr.in_avals)), jaxpr)
    if lowered is None:
        return specs, (None,) * len(jaxpr.out_avals)
    main = _propagated(lowered.compiler_ir("stablehlo"))
    return (
        _specs(main, "arg_attrs", jaxpr.in_avals),
        _specs(main, "res_attrs", jaxpr.out_avals),
    )


def _lower(traced: Any, jaxpr: jex.ClosedJaxpr) -> jax.stages.Lowered | None:
    """Lowers for the first platform that has all primitives; None where no platform has."""
    for platform in _PLATFORMS:
        try:
            return traced.lower(lowering_platforms=(platform,))
        except Exception as error:
            failure = error
    line = next(filter(None, map(_compat.at_source_line, jaxpr.eqns)), "")
    warn(
        f"place: a computation{line} cannot be lowered here, so that nothing is known of how it "
        f"splits arrays, and each device makes its results whole: {failure}"  # pyright: ignore[reportPossiblyUnboundVariable]
    )
    return None


def _without_effects(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Puts zeros in place of what equations with effects give: a callback is split in no way."""

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        if not eqn.effects:
            return None
        if any(True for _ in jaxprs.sub_jaxprs(eqn)):
            inner = jaxprs.map_jaxprs(eqn, _without_effects)
            return [inner.replace(effects=set())], inner.outvars
        return jaxprs.record(lambda: [filled(v.aval, 0) for v in eqn.outvars], [], eqn)

    return jaxprs.rewrite(jaxpr, rule) if jaxpr.effects else jaxpr


def _propagated(module: Any) -> Any:
    """Runs Shardy's propagation on a module; gives its main function."""
    with module.context:
        module.operation.walk(_add_rule)
        passes = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        passes.enable_verifier(False)  # it takes longer than the passes
        passes.run(module.operation)
        functions = (op for op in module.body.operations if isinstance(op, func.FuncOp))
        return next(op for op in functions if op.name.value == "main")


#: The names of dimensions in Shardy's rules, in this order.
_FACTORS = "ijklmnopqrstuvwxyz"


def _add_rule(operation: Any) -> Any:
    """Gives an operation of CHLO a rule: XLA puts others in its place before it asks Shardy.

    Operands and results share their dimensions, but for the last one of `top_k`.
    """
    if operation.name.startswith("chlo."):
        sizes: dict[str, int] = {}

        def factors(value: Any) -> str:
            shape = ir.RankedTensorType(value.type).shape
            names = list(_FACTORS[: len(shape)])
            if operation.name == "chlo.top_k":
                names[-1] = _FACTORS[max(len(sizes), len(shape) - 1)]
            sizes.update(zip(names, shape, strict=True))
            return f"[{', '.join(names)}]"

        sides = (
            ", ".join(map(factors, values)) for values in (operation.operands, operation.results)
        )
        rule = ")->(".join(sides), ", ".join(f"{name}={size}" for name, size in sizes.items())
        operation.attributes["sdy.sharding_rule"] = ir.Attribute.parse(
            f"#sdy.op_sharding_rule<({rule[0]}) {{{rule[1]}}}>"
        )
    return ir.WalkResult.ADVANCE


def _specs(main: Any, name: str, avals: Sequence[Any]) -> tuple[MaybeSpec, ...]:
    """Reads the specs of a function's arguments or results off their attributes."""
    with main.context:
        found = main.attributes[name] if name in main.attributes else [{}] * len(avals)
        return tuple(map(_spec, found, avals))


def _spec(attributes: Any, aval: Any) -> MaybeSpec:
    """Reads a spec off attributes; Shardy makes whole what a part of an axis would split."""
    if "sdy.sharding" not in attributes:
        return None
    entries = []
    for dimension in sdy.TensorShardingAttr(attributes["sdy.sharding"]).dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        entries.append(tuple(axis.name for axis in axes))
    return tuple(entries[: len(aval.shape)])  # keys have a dimension more, of their bits
