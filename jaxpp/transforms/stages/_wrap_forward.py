"""`wrap_forward`: outlines each stage in a jaxpr of its own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import P, R, Var
from jaxpp.transforms.stages import _marks, _stages

#: Says which values are kept for a backward pass, as `jax.checkpoint` takes it.
Policy = Callable[..., bool]


def wrap_forward(
    fun: Callable[P, R], *, policy: Policy | Mapping[int, Policy | None] | None = None
) -> Callable[P, R]:
    """Outlines each stage of `fun`, so that differentiation gives a backward call per stage.

    The marks in `fun` open the stages (see `split_stages`). Without `wrap_forward`, differentiation
    would interleave the stages in the backward pass.

    Args:
        fun: a function of pytrees, with marks; its arrays may have any shape and dtype.
        policy: a `jax.checkpoint` policy: it says which values a stage keeps for its backward pass
            instead of computing them again (`jax.checkpoint_policies.nothing_saveable` keeps its
            inputs only). `jax.checkpoint(wrap_forward(fun), policy=...)` does the same: values that
            go from stage to stage are kept under any policy. None keeps the values that JAX keeps.
            A mapping from numbers of stages to policies gives each its own; others have None.

    Returns:
        A function with the same arguments and results, in whose jaxpr each stage is one call.

    Raises:
        ValueError: if the marks are repeated, out of order, or inside a loop, or `policy` has a
            number that no stage has.
        TypeError: if `policy` is none of these.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def net(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return (h @ w).sum()
        >>> jaxpr = jax.make_jaxpr(jaxpp.wrap_forward(net))(jnp.eye(2), jnp.ones((1, 2)))
        >>> [eqn.params["name"] for eqn in jaxpr.eqns]
        ['pipeline_stage_0_of_2', 'pipeline_stage_1_of_2']
    """
    by_stage, otherwise = (policy, None) if isinstance(policy, Mapping) else ({}, policy)
    for given in (otherwise, *by_stage.values()):
        if given is not None and not callable(given):
            raise TypeError(
                f"wrap_forward: policy is one of jax.checkpoint, such as "
                f"jax.checkpoint_policies.nothing_saveable, or {{stage: policy}}, got {given!r}."
            )

    def run_stage(stages: _stages.Stages, k: int, values: dict[Var, Any]) -> list[Any]:
        unknown = [n for n in by_stage if n not in range(stages.num_stages)]
        if unknown:
            raise ValueError(
                f"wrap_forward: policy is given for stage {unknown[0]!r}, but the function has "
                f"{stages.num_stages} stage(s), numbered from 0."
            )
        stage_policy = by_stage.get(k, otherwise)
        part = stages.parts[k]
        stage = _with_cloned_keys(functools.partial(jaxprs.run, part.jaxpr))
        if stage_policy is not None:
            stage = jax.checkpoint(stage, policy=stage_policy)
        inputs = jaxprs.read(part.inputs, values)
        if not _compat.writes_jaxpr():  # nothing is there to outline; a new call would be compiled
            return stage(*inputs)
        first = stages.like[k]
        if stages.like.count(first) > 1:
            key = first, id(stage_policy)
            if key not in stages.calls:
                stages.calls[key] = _marks.record_stage(stage, inputs)
            call = stages.calls[key]
            if call is not None:
                return _marks.call_again(call, k, stages.num_stages, inputs)
        return _marks.call_stage(stage, k, stages.num_stages, inputs)

    return _stages.run_in_stages(fun, _stages.decision_of(fun), run_stage)


def _with_cloned_keys(stage: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Lets a stage give clones of random keys.

    Stages may share an array of keys, which `jax.debug_key_reuse` would take for used up by the
    first of them. Whether a key is used twice has been checked in the function as a whole.
    """

    def run(*args: Any) -> list[Any]:
        return jaxprs.with_cloned_keys(stage(*args))

    return run
