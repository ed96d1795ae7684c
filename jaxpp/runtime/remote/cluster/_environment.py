"""The environment that a worker starts with: its place, variables, import paths and cores.

All of this has to be settled before JAX starts its backends, so nothing here starts them.
"""

import contextlib
import importlib.metadata
import os
import secrets
import site
import socket
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxpp import _compat
from jaxpp._warn import warn
from jaxpp.runtime.remote.cluster._cluster import Reservation

#: The fraction of a GPU's memory that JAX takes by default; the workers on one GPU share it.
MEMORY_FRACTION = 0.75

#: glibc's own settings, for workers on CPU: memory that a task frees stays with the process. Else
#: the next task takes it anew, and each new page is a fault, which took 2.5 us where it was
#: measured. Of threads that share one arena (`MALLOC_ARENA_MAX=1`), which would do this for arrays
#: above 32 MB, too, compilation on two cores took half as long again.
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}

#: Seconds that a worker waits at most for others that choose their cores.
CHOICE_TIMEOUT = 5.0


def worker_options(
    reservation: Reservation,
    rank: int,
    process: int = 0,
    *,
    environment: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> dict[str, Any]:
    """Returns the options of the Ray actor for a worker: a rank's `process` of that number.

    The variables of `environment` go above those that are set here: the driver's `sys.path`, the
    platform of JAX, the share of the GPU's memory, and the number of `cores`.
    """
    variables = {"PYTHONPATH": os.pathsep.join(_import_paths())}
    gpus = reservation.gpus
    # On a GPU it is empty, so that a driver or a session that is held to CPU does not hold it.
    variables["JAX_PLATFORMS"] = "" if gpus else "cpu"
    if 0 < gpus < 1:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{MEMORY_FRACTION * gpus:.3f}"
    if not gpus:
        variables |= KEEPS_MEMORY
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


def warn_of_driver(reservation: Reservation) -> None:
    """Warns where JAX in this process takes memory of GPUs that ranks of its node want."""
    here = ray.get_runtime_context().get_node_id()
    near = [any(place.node_id == here for place in own) for own in reservation.places]
    ranks = [rank for rank, is_here in enumerate(near) if is_here and reservation.gpus]
    platform = _compat.started_platform()
    takes = "has taken" if platform else "takes, as soon as it is used,"
    if platform is None:
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        config: Any = jax.config
        platform = config.jax_platforms or ",".join(plugin.name for plugin in plugins)
    if (
        ranks
        and any(name in platform for name in ("gpu", "cuda", "rocm"))
        and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in ("0", "false", "False")
        and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    ):
        warn(
            f"JAX in this process {takes} most of the memory of the GPUs of this host, which ranks "
            f"{', '.join(map(str, ranks))} want for themselves. Run the driver with "
            f"JAX_PLATFORMS=cpu, or with XLA_PYTHON_CLIENT_PREALLOCATE=false."
        )


def warn_of_platform(here: str, there: str) -> None:
    """Warns where a step is traced on another platform than the workers run it on."""
    if here != there:
        warn(
            f"JAX runs on {here} in this process, which traces the steps, and on {there} in the "
            f"workers. What a step asks while it is traced has the answer for {here}: "
            f"jax.default_backend(), the kind of GPU. A step whose code asks such things needs JAX "
            f"here on {there}, with XLA_PYTHON_CLIENT_PREALLOCATE=false, but for "
            f"jax.lax.platform_dependent. `jax.nn.dot_product_attention` with "
            f"implementation='cudnn' is traced on a host with a GPU alone, there also with "
            f"JAX_PLATFORMS=cpu."
        )


def prepare_process(cores: int | None = None) -> None:
    """Binds this worker's process to some of its host's cores; call it before JAX starts.

    It takes the cores that the fewest live workers of the host are bound to, whatever their mesh,
    and shares them where there are too few. Workers in another network namespace (a container) do
    not count. XLA takes as many threads as the process has cores.

    Where the environment has both variables for the fraction of a GPU's memory, which JAX refuses,
    the old one goes: it is the one that `worker_options` sets.
    """
    if "XLA_CLIENT_MEM_FRACTION" in os.environ:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return
    own = take_cores(cores)
    for thread in os.listdir("/proc/self/task"):  # those that Ray has started; later ones inherit
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), own)


#: Sockets whose names tell other processes which cores this one has, as long as it lives.
_taken: list[socket.socket] = []


def take_cores(count: int, name: str = "jaxpp-core") -> set[int]:
    """Takes the cores that the fewest live processes have taken under the same name.

    A process has an abstract Unix socket for each of its cores, which is in no folder and which
    the system closes with the process. They are counted by one process at a time.

    Raises:
        RuntimeError: another process holds the name by which processes take turns.
    """
    end = time.monotonic() + CHOICE_TIMEOUT
    with socket.socket(socket.AF_UNIX) as choosing:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):  # another process chooses
                choosing.bind(f"\0{name}")
                break
            time.sleep(0.01)
        else:
            raise RuntimeError(
                f"RemoteMpmdMesh: another process of this host has held the socket name @{name} "
                f"for {CHOICE_TIMEOUT:g} s, by which workers with cores= choose their cores one "
                f"after the other: a worker that was stopped, or a program of another user (`ss "
                f"-xlp` as root names it). End it, or make the mesh without cores=."
            )
        found = Path("/proc/net/unix").read_text().split()
        users = Counter(int(n.split(":")[1]) for n in found if n.startswith(f"@{name}:"))
        own = sorted(os.sched_getaffinity(0), key=lambda core: (users[core], core))[:count]
        for core in own:
            _taken.append(socket.socket(socket.AF_UNIX))
            _taken[-1].bind(f"\0{name}:{core}:{secrets.token_hex(8)}")
    return set(own)


def _import_paths() -> list[str]:
    """Returns the driver's `sys.path`, without the folders that any Python of its version has.

    With these paths a worker on this machine (or on one with the same folders) imports what the
    driver imports, and nothing is uploaded.
    """
    installed = {*sysconfig.get_paths().values(), *site.getsitepackages()}
    installed.add(site.getusersitepackages())
    own = {os.path.realpath(path) for path in installed}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    paths = dict.fromkeys(os.path.realpath(path or os.getcwd()) for path in sys.path)
    return [path for path in paths if path not in own and not path.endswith(".zip")]
