"""`split_stages`: decides where a program is cut into pipeline stages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from jaxpp import _compat, jaxprs
from jaxpp._messages import warn
from jaxpp.jaxprs import P, R, Var
from jaxpp.transforms import stacked
from jaxpp.transforms.stages import (
    _calls,
    _cut_balanced,
    _cuts,
    _describe,
    _marks,
    _modules,
    _stages,
)

At = Sequence[str] | Callable[[PyTree], PyTree]
Whole = At | type | Sequence[str | type]


def split_stages(
    fun: Callable[P, R],
    num_stages: int | None = None,
    *,
    at: At | _cut_balanced.UnitCuts | None = None,
    balance: _cut_balanced.Balance = "flops",
    whole: Whole | None = None,
    tolerance: float = 0.05,
) -> Callable[P, R]:
    """Cuts `fun` into stages, and marks each cut; each equation is in exactly one stage.

    If `at` is given, it names the cuts. Otherwise the marks of `pipeline_enter_stage` in `fun` are
    the cuts. Without marks, `num_stages` makes a balanced cut: the slowest stage is as fast, and
    the idlest as busy, as can be, up to the share `tolerance`. Among such cuts it prefers those
    between layers, then those that the fewest bytes cross, then those that let several stages read
    the fewest bytes of parameters, then those of the most equal stages.

    A balanced cut is made between the layers of a model, and each stage gets a layer where there
    are enough. Layers are repeated blocks that do most of the work: calls of modules of one class
    that are in a list of an Equinox model; equations under scopes such as `layer_0`, `layer_1`
    (Flax and haiku make them); iterations of a `lax.scan` over arrays of the first argument, which
    becomes several scans, each over a slice of the layers; and checkpoints of one structure. The
    body of a `jax.checkpoint` may be cut, too, and each stage then has a checkpoint of its own.
    Without layers, blocks of equations that repeat have borders: a cut is elsewhere only if that
    makes the slowest stage faster by more than `tolerance`. Where a cut parts what reads a state
    from what makes its next value, `schedule` says so, if microbatches carry the state.

    Args:
        fun: a function of pytrees. Arrays, of any shape and dtype, are traced; other leaves are
            static. Where `at` names modules, its first argument is an Equinox model, or a model of
            Flax NNX or its state.
        num_stages: the number of stages to make, or to expect where the cuts are given.
        at: the modules or scopes that open stages, in the order of execution: paths in the first
            argument (`["blocks.2", "blocks.4"]`), a function of an Equinox model
            (`lambda model: [model.blocks[2], model.blocks[4]]`), or names of `jax.named_scope`. In
            a dictionary or another pytree a path names the part that the stage begins to read.
            `blocks.2`, `blocks[2]` and, for scopes, `blocks/2` are the same; they may also name a
            layer of stacked modules `blocks`, or of the scan under the scope `blocks`. Or the cuts
            of a plan, `jaxpp.plan(...).cuts`. Marks in `fun` then do not count.
        balance: the cost of an equation for a balanced cut: `"flops"` or a function of a
            `jax.extend.core.JaxprEqn`. With `"layers"` each stage gets the same number of layers,
            and the last stages the remainder: 6 layers in 4 stages are 1, 1, 2 and 2. A result of
            `jaxpp.profile`, or its `within` a memory limit, does not cut units inside.
        whole: the units that a balanced cut does not divide: modules or scopes, named as in `at`,
            or classes of modules of any library, whose calls are then the layers. By default these
            are the layers that it finds; `()` allows cuts inside layers.
        tolerance: the share by which the slowest stage of a balanced cut may be slower than it
            could be, so that the stages are regular.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: for a cut that is unknown, repeated, out of order, inside a loop, or before a
            value that it needs, and for more stages than there are places to cut.

    Warns:
        UserWarning: where a call that cannot be cut inside (one with a derivative rule of its own,
            a `while`) has most of the work, with the shares of the stages; and where several stages
            of a balanced cut multiply by the same parameters, with their bytes.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> net = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> jaxpr = jax.make_jaxpr(jaxpp.split_stages(net, 2))(jnp.eye(2), jnp.ones((1, 2)))
        >>> [eqn.primitive.name for eqn in jaxpr.eqns]
        ['dot_general', 'tanh', 'pipeline_enter_stage', 'dot_general', 'tanh', 'reduce_sum']
    """
    if isinstance(at, _cut_balanced.UnitCuts):
        at, num_stages, balance = None, len(at.firsts) + 1, at
    if num_stages is not None and num_stages < 1:
        raise ValueError(f"split_stages: num_stages must be at least 1, got {num_stages}.")
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"split_stages: tolerance is a share, at least 0 and less than 1, got {tolerance}."
        )
    cuts = _listed(at)
    names, classes = _named_whole(whole)
    if cuts is not None and not callable(at) and len(set(cuts)) < len(cuts):
        twice = next(name for name in cuts if list(cuts).count(name) > 1)
        raise ValueError(f"split_stages: the cut at {twice!r} is given twice; name each once.")
    _cut_balanced.cost_of(balance)

    def decide(*args, **kwargs):
        model = args[0] if args else None
        modules = None if cuts is None else _modules.resolve_modules(model, cuts)
        if modules is not None and len({p for p, _ in modules}) < len(modules):
            raise ValueError(f"split_stages: a module is named twice in {[p for p, _ in modules]}.")
        units, layers = None, set()
        if cuts is None and num_stages is not None:
            units = _modules.resolve_modules(model, names) if names else None
            layers = _modules.repeated_classes(model) if whole is None else classes
        named = modules or units or ()
        watchers = [_calls.scoping_nnx(), _calls.scoping(named, layers, marks=modules is not None)]
        traced = jaxprs.trace(_calls.watched(fun, watchers), args, kwargs)
        if isinstance(balance, _cut_balanced.Finest | _cut_balanced.UnitCuts):  # marks do not count
            unmarked = _marks.replace_marks(traced.jaxpr, lambda _: None)
            traced = dataclasses.replace(traced, jaxpr=unmarked)
        if cuts is None and (num_stages == 1 or _stages.has_marks(traced.jaxpr)):
            stages = _stages.read_stages(_calls.named(traced.jaxpr))
        else:
            if any(map(_marks.is_stage_call, traced.jaxpr.eqns)):
                raise ValueError(
                    "split_stages: the function is in the stages of wrap_forward already. Cut "
                    "first, and wrap then: wrap_forward(split_stages(f, num_stages=4))."
                )
            _check_first(model, args, cuts)
            jaxpr, checkpoints = _cuts.open_program(traced.jaxpr)
            opened = dataclasses.replace(traced, jaxpr=jaxpr)
            opened = _walking_stacks(opened, _modules.model_arrays(opened, model))
            jaxpr = opened.jaxpr
            paths = [path for path, _ in named]
            calls = _calls.find_calls(opened, model, paths)
            if cuts is not None:
                jaxpr = _cuts.cut_at(opened, model, cuts, modules, calls)
            elif num_stages is None:
                raise ValueError(
                    "split_stages: nothing says where to cut: give num_stages or at=, or mark the "
                    "stages in the function with pipeline_enter_stage."
                )
            else:
                scopes = None if whole is None else () if units else names
                jaxpr = _cut_balanced.cut_balanced(
                    opened,
                    model,
                    checkpoints,
                    num_stages,
                    balance,
                    _calls.whole_calls(model, paths, layers, calls),
                    scopes,
                    tolerance,
                )
            stages = _stages.read_stages(_calls.named(jaxpr, calls), checkpoints)
        if cuts is None and num_stages is not None:
            _describe.warn_of_shared(traced, stages, model)
        expected = None if isinstance(balance, _cut_balanced.Finest) else num_stages
        if expected is not None and stages.num_stages != expected:
            raise ValueError(
                f"split_stages: num_stages={num_stages}, but the cuts in the function make "
                f"{stages.num_stages} stages{stages.entrances}; drop num_stages or change the cuts."
            )
        return traced, stages

    return _stages.run_in_stages(fun, decide, _run_behind_mark)


def _walking_stacks(traced: jaxprs.Traced, arrays: Sequence[Var]) -> jaxprs.Traced:
    """Makes scans over layers of loops that take layers by their number, and says so."""
    jaxpr, walking = stacked.walk_stacks(traced.jaxpr, arrays)
    for eqn in walking:
        warn(
            f"split_stages: the loop{_compat.at_source_line(eqn)} takes the layers of a stack by "
            f"their number, and is cut as a scan over the layers, with the stack as xs. Write it "
            f"so, and it is what runs on one device, too."
        )
    return dataclasses.replace(traced, jaxpr=jaxpr)


def _check_first(model: Any, args: Sequence[Any], cuts: Any) -> None:
    """Checks that the model is the first argument, where modules of another one are named."""
    if isinstance(model, eqx.Module) or cuts is None or callable(cuts):
        return
    for n, other in enumerate(args[1:], 1):
        paths = _modules.module_paths(other) if isinstance(other, eqx.Module) else {}
        if any(name in paths for name in cuts):
            raise ValueError(
                f"split_stages: at={list(cuts)} names modules of args[{n}] "
                f"({type(other).__name__}), but the model is the first argument of the function, "
                f"which here is a {type(model).__name__}. Write f(model, batch)."
            )


def _named_whole(whole: Any) -> tuple[Any, set[type]]:
    """Takes `whole` apart: the names (or the function) in it, and the classes in it."""
    if isinstance(whole, type):
        return (), {whole}
    if whole is None or callable(whole):
        return whole, set()
    listed = _listed(whole)
    classes = {c for c in listed if isinstance(c, type)}
    return [name for name in listed if not isinstance(name, type)], classes


def _listed(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


def _run_behind_mark(stages: _stages.Stages, k: int, values: dict[Var, Any]) -> list[Any]:
    """Evaluates a stage, and before it marks all values that cross into it or a later stage."""
    if k > 0:
        later = {v for part in stages.parts[k:] for v in part.inputs}
        live = [v for part in stages.parts[:k] for v in part.outputs if v in later]
        arrays = jaxprs.read(live, values)
        marked = _marks.enter_p.bind(*arrays, stage=k, name=stages.names[k])
        values.update(zip(live, marked, strict=True))
    part = stages.parts[k]
    return jaxprs.run(part.jaxpr, *jaxprs.read(part.inputs, values))
