"""One order of all transfers of a step, for transports that need the same order on all ranks."""

from collections.abc import Sequence

from jaxpp._program import Message, Program, Send
from jaxpp.runtime.executor import interleave


def transfer_order(programs: Sequence[Program]) -> tuple[Message, ...]:
    """Gives the messages of all ranks in the order of their sends in one serial run of the step.

    A transfer between devices holds both ranks until both have come to it. So ranks that meet
    transfers in different orders wait for each other for ever. With this order they cannot: the
    first transfer that is not done is the next one of both its ranks, and its sender needs only
    earlier transfers to compute it. Any order is right in which a send comes after all that its
    rank receives before it. This one is that of a run in which each computation takes one unit of
    time, which delays transfers little.

    Args:
        programs: of all ranks.

    Returns:
        Each message once.

    Raises:
        RuntimeError: if the programs wait for each other.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        ...     return jnp.mean((h @ w[1]) ** 2)
        >>> step = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2)
        >>> step = jaxpp.schedule(step, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
        >>> lowered = jaxpp.place(step, mesh).lower([jnp.ones((3, 3))] * 2, jnp.ones((4, 3)))
        >>> [(m.names, m.source, m.target) for m in transfer_order(lowered.programs)][:3]
        [...]
    """
    order = interleave(programs)
    return tuple(i.message for _, chunk in order for i in chunk if isinstance(i, Send))
