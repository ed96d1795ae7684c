"""`wrap_forward`: each stage in a jaxpr of its own."""

import functools
from collections.abc import Callable

import jax

from jaxpp import _jaxprs
from jaxpp.transforms import _marks, _stages


def wrap_forward(fun: Callable, *, policy: Callable | None = None) -> Callable:
    """Outlines each stage of `fun`, so that differentiation gives a backward call per stage.

    The stages are those that the marks in `fun` open (see `split_stages`). Without it,
    differentiation interleaves the stages of the backward pass.

    Args:
        fun: a function of pytrees, with marks; its arrays may have any shape and dtype.
        policy: a `jax.checkpoint` policy: what a stage keeps for its backward pass instead of
            computing it again (`jax.checkpoint_policies.nothing_saveable` keeps its inputs only).
            None keeps what JAX keeps. `jax.checkpoint(wrap_forward(fun), policy=...)` does the
            same: what goes from stage to stage is kept, whatever the policy.

    Returns:
        A function with the same arguments and results, in whose jaxpr each stage is one call.

    Raises:
        ValueError: if the marks are repeated, out of order, or inside a loop.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def net(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return (h @ w).sum()
        >>> jaxpr = jax.make_jaxpr(jaxpp.wrap_forward(net))(jnp.eye(2), jnp.ones((1, 2)))
        >>> [eqn.params["name"] for eqn in jaxpr.eqns]
        ['pipeline_stage_0_of_2', 'pipeline_stage_1_of_2']
    """

    @functools.wraps(fun)
    def outlined(*args, **kwargs):
        traced = _jaxprs.trace(fun, args, kwargs)
        return traced.rebuild(_run_stages(_stages.read_stages(traced.jaxpr), policy, traced.inputs))

    return outlined


def _run_stages(stages: _stages.Stages, policy: Callable | None, inputs: list) -> list:
    jaxpr = stages.jaxpr.jaxpr
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    for k in range(stages.num_stages):
        part = _stages.stage_part(stages, k)
        stage = functools.partial(_jaxprs.run, part.jaxpr)
        if policy is not None:
            stage = jax.checkpoint(stage, policy=policy)
        outputs = _marks.call_stage(stage, k, stages.num_stages, [values[v] for v in part.inputs])
        values.update(zip(part.outputs, outputs, strict=True))
    return _stages.read_outputs(stages, values)
