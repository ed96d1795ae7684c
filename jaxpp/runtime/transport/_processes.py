"""Joins the processes of a rank by `jax.distributed`."""

import contextlib
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpp import _compat
from jaxpp.runtime.arrays import Home, home_over

#: Seconds that a process waits for the others when all leave.
LEAVE_TIMEOUT = 1


def free_port(host: str = "127.0.0.1") -> int:
    """Finds a port of this host that nothing listens on, and keeps it for this process.

    A socket that never listens keeps it. JAX's own sockets may share the port with that (both have
    the options for it); those of other programs may not.
    """
    kept = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        kept.setsockopt(socket.SOL_SOCKET, option, 1)
    kept.bind((host, 0))
    _kept_ports.append(kept)
    return kept.getsockname()[1]


#: The sockets that keep ports, as long as the process lives.
_kept_ports: list[socket.socket] = []


def join_processes(coordinator: str, num_processes: int, process_id: int, *, host: str) -> None:
    """Joins this process with the others of its rank; JAX must not have been used before.

    The death of process 0, which has the coordinator, ends the others at once. The death of another
    one ends them when its heartbeats have been missed for 100 s; collectives with it fail at once.

    Process 0 listens at the `coordinator`, `"127.0.0.1:12345"`, whose port is not 0. The others
    reach this host at `host`.
    """
    _compat.serve_collectives_at(host)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is to end the process
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=[],  # no choice among those that are visible; None is JAX's environment
        cluster_detection_method="deactivate",  # a launcher knows only what has started Ray
        coordinator_bind_address=coordinator if process_id == 0 else None,
        shutdown_timeout_seconds=LEAVE_TIMEOUT,
    )


def leave_processes() -> None:
    """Leaves the other processes of the rank, which have to leave too."""
    with contextlib.suppress(Exception):  # one of them is gone
        jax.distributed.shutdown()


def rank_home(sizes: Mapping[str, int], rank: int) -> Home:
    """Makes the home of a rank from its joined processes: their devices, process after process."""
    count = jax.process_count()
    each = [first_devices(jax.local_devices(n), sizes, rank, count) for n in range(count)]
    return home_over([device for own in each for device in own], sizes)


def first_devices(
    devices: Sequence[Any], sizes: Mapping[str, int], rank: int, processes: int = 1
) -> list[Any]:
    """Returns the first devices of a process: as many as its rank needs of each of its `processes`.

    Raises a `ValueError` if there are fewer.
    """
    needed = math.prod(sizes.values()) // processes
    if len(devices) < needed:
        share = f", {needed} in each of its {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"Rank {rank} needs {needed * processes} devices for its axes {dict(sizes)}{share}, "
            f"and its process has "
            f"{len(devices)}: {list(devices)}. On GPUs, look at CUDA_VISIBLE_DEVICES there; on "
            f"CPU, take xla_force_host_platform_device_count out of XLA_FLAGS."
        )
    return list(devices[:needed])
