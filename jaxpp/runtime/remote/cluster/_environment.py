"""The environment that a worker starts with: its place, variables, import paths and cores.

This file does not use JAX: all of this has to be settled before JAX starts its backends.
"""

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxpp.runtime.remote.cluster._cluster import Place, Reservation

#: The fraction of a GPU's memory that JAX takes by default; the workers on one GPU share it.
MEMORY_FRACTION = 0.75


def worker_options(
    reservation: Reservation,
    rank: int,
    process: int = 0,
    *,
    environment: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> dict[str, Any]:
    """Gives the options of the Ray actor for a worker.

    Args:
        reservation: from `reserve`.
        rank: the worker's rank.
        process: its number within the rank.
        environment: environment variables for it, above those that are set here: the driver's
            `sys.path`, the platform of JAX, and the share of the GPU's memory.
        cores: the number of cores that it may use, by default all; see `prepare_process`.
    """
    variables = {"PYTHONPATH": os.pathsep.join(_import_paths())}
    gpus = reservation.gpus[rank]
    # On a GPU it is empty, so that a driver or a session that is held to CPU does not hold it.
    variables["JAX_PLATFORMS"] = "" if gpus else "cpu"
    if 0 < gpus < 1:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{MEMORY_FRACTION * gpus:.3f}"
    if cores is not None:
        variables["NPROC"] = str(cores)  # the number of threads that XLA takes on CPU
    variables |= environment or {}
    place = reservation.places[rank][process]
    return {
        "num_cpus": reservation.cpus,
        "num_gpus": gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "enable_task_events": False,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            reservation.group, placement_group_bundle_index=place.bundle
        ),
        "runtime_env": {"env_vars": variables},
    }


def prepare_process(place: Place, cores: int | None = None) -> None:
    """Binds this worker's process to some of its host's cores; call it before JAX starts.

    Where the environment has both variables for the fraction of a GPU's memory, which JAX refuses,
    the old one goes: it is the one that `worker_options` sets.

    The workers of a node take its cores one after the other, and share them where there are too
    few. XLA takes as many threads as the process has cores.

    Args:
        place: where the worker is, from the reservation.
        cores: the number of cores; None for all.
    """
    if "XLA_CLIENT_MEM_FRACTION" in os.environ:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return
    available = sorted(os.sched_getaffinity(0))
    own = {available[(place.local_index * cores + i) % len(available)] for i in range(cores)}
    for thread in os.listdir("/proc/self/task"):  # those that Ray has started; later ones inherit
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), own)


def _import_paths() -> list[str]:
    """Gives the driver's `sys.path`, without the folders that any Python of its version has.

    With these paths a worker on this machine (or on one with the same folders) imports what the
    driver imports, and nothing is uploaded.
    """
    installed = {*sysconfig.get_paths().values(), *site.getsitepackages()}
    installed.add(site.getusersitepackages())
    own = {os.path.realpath(path) for path in installed}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    paths = dict.fromkeys(os.path.realpath(path or os.getcwd()) for path in sys.path)
    return [path for path in paths if path not in own and not path.endswith(".zip")]
