"""`Near`: messages between ranks of one process, from device to device."""

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpp import _compat
from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import Home, devices_of, sharding_in

#: The number of messages that a rank's dispatch may receive ahead of their arrival.
RUN_AHEAD = 2


class Near:
    """Moves arrays between ranks of one process, each shard from device to device.

    One thread dispatches all ranks, so a message has been sent when it is received.

    Dispatch is asynchronous, and a computation takes its memory when it is dispatched. If the host
    ran far ahead of the devices, a rank would hold more than its schedule says. So a receive waits
    for the arrival of the message that came `RUN_AHEAD` receives before.
    """

    def __init__(self, homes: Mapping[int, Home]):
        self._homes = homes
        self._mail: dict[int, Any] = {}
        self._recent: dict[int, deque[Any]] = {rank: deque() for rank in homes}

    def clear(self) -> None:
        """Forgets the messages of a step, also those that a failed step has left."""
        self._mail.clear()
        for recent in self._recent.values():
            recent.clear()

    def send(self, arrays: list[Any], message: Message, *, late: bool = False) -> None:
        """Starts to move arrays to a rank.

        If they are `late`, a later computation of the source may take their memory. Then ranks that
        share a device do not share them.
        """
        source, target = self._homes[message.source], self._homes[message.target]
        if late and not set(devices_of(source)).isdisjoint(devices_of(target)):
            arrays = jax.device_put(arrays, may_alias=False)
        if target is not source:
            kinds = tuple(map(_compat.memory_kind, message.avals))
            arrays = _mover(source, target, message.specs, kinds)(arrays)
        self._mail[message.tag] = arrays

    def copies_of(self, message: Message) -> tuple[Any, list[Any]] | None:
        """Returns the homes that a message goes between, and its arrays in the second one.

        None where both are one home. The message has been sent, and not been received.
        """
        link = self._homes[message.source], self._homes[message.target]
        return None if link[0] is link[1] else (link, self._mail[message.tag])

    def receive(self, message: Message) -> Any:
        """Returns the arrays of a message."""
        arrays = self._mail.pop(message.tag)
        recent = self._recent[message.target]
        if arrays:
            recent.append(arrays[0])
        if len(recent) > RUN_AHEAD:
            oldest = recent.popleft()
            if not oldest.is_deleted():
                oldest.block_until_ready()
        return arrays


@functools.cache
def _mover(
    source: Home, target: Home, specs: tuple[Spec, ...], kinds: tuple[str | None, ...]
) -> Callable[[list[Any]], Any]:
    """Returns the function that moves a message's arrays from one home to another."""
    if not isinstance(source, Mesh) and not isinstance(target, Mesh) and not any(kinds):
        return _compat.copier_to(target)
    split = specs or ((),) * len(kinds)
    shardings = [sharding_in(target, *own) for own in zip(split, kinds, strict=True)]
    return lambda arrays: jax.device_put(arrays, shardings)
