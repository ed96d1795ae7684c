"""The norm of the gradient of each stage and microbatch, out of the loop; and clipping inside it.

grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
(loss, grads), norms = gradient_norms(grad_fn, clip=1.0)(model, batch)
norms["stage 0"]   # one for each microbatch
"""

from typing import Any

import jax.numpy as jnp

from jaxpp import extend


def norm(*grads):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads))


def gradient_norms(fun, clip: Any = None):
    """Gives the result of a function, and for each stage the norms of all microbatches.

    With `clip`, the gradient of each stage and microbatch is scaled down to that norm, before it is
    added up. It may be an argument of the step.
    """

    def clipped(*grads):
        scale = jnp.minimum(1.0, clip / norm(*grads))
        return [(g * scale).astype(g.dtype) for g in grads]

    def rule(loop):
        for key in loop.tasks:
            if grads := loop.gradients(key):
                loop = loop.result(f"stage {key.stage}", key, norm, grads)
                if clip is not None:
                    loop = loop.replace(key, grads, clipped)
        return loop

    return extend.edit_loops(fun, rule, has_aux=True)
