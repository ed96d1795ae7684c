"""The environment that a worker starts with: its place, variables, import paths and cores.

All of this has to be settled before JAX starts its backends, so nothing here starts them.
"""

import contextlib
import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

import jax
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxpp import _compat
from jaxpp._messages import warn
from jaxpp.runtime.remote._places import Reservation

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
    place = reservation.places[rank][process]
    worker = reservation.worker
    gpus = worker.get("GPU", 0)
    variables = {"PYTHONPATH": os.pathsep.join(_import_paths())}
    # On a GPU it is empty, so that a driver or a session that is held to CPU does not hold it.
    variables["JAX_PLATFORMS"] = "" if gpus else "cpu"
    if 0 < gpus < 1:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{MEMORY_FRACTION * gpus:.3f}"
    if not gpus:
        variables |= KEEPS_MEMORY
    if cores is not None:
        variables["NPROC"] = str(cores)  # the number of threads that XLA takes on CPU
    variables |= environment or {}
    return {
        "num_cpus": worker["CPU"],
        "num_gpus": gpus,
        "enable_task_events": False,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            reservation.group, placement_group_bundle_index=place.bundle
        ),
        "runtime_env": {"env_vars": variables},
    }


def prepare_process(cores: int | None = None, number: int = 0) -> None:
    """Binds this worker's process to some of its host's cores; call it before JAX starts.

    Workers take the cores in turn, by their `number`. XLA takes a thread for each.

    Where the environment has both variables for the fraction of a GPU's memory, which JAX refuses,
    the old one goes: it is the one that `worker_options` sets.
    """
    if "XLA_CLIENT_MEM_FRACTION" in os.environ:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return
    there = sorted(os.sched_getaffinity(0))
    own = {there[(number * cores + n) % len(there)] for n in range(cores)}
    for thread in os.listdir("/proc/self/task"):  # those that Ray has started; later ones inherit
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), own)


def warn_of_driver(reservation: Reservation) -> None:
    """Warns where JAX in this process takes memory of GPUs that ranks of its node want."""
    here = ray.get_runtime_context().get_node_id()
    near = [any(place.node_id == here for place in own) for own in reservation.places]
    ranks = [str(rank) for rank, is_here in enumerate(near) if is_here]
    platform = _compat.started_platform()
    takes = "has taken" if platform else "takes, as soon as it is used,"
    if platform is None:
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        config: Any = jax.config
        platform = config.jax_platforms or ",".join(plugin.name for plugin in plugins)
    if (
        ranks
        and "GPU" in reservation.worker
        and any(name in platform for name in ("gpu", "cuda", "rocm"))
        and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in ("0", "false", "False")
        and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    ):
        warn(
            f"JAX in this process {takes} most of the memory of the GPUs of this host, which ranks "
            f"{', '.join(ranks)} want for themselves. Run the driver with JAX_PLATFORMS=cpu, or "
            f"with XLA_PYTHON_CLIENT_PREALLOCATE=false."
        )


def warn_of_platform(here: str, there: str) -> None:
    """Warns where a step is traced on another platform than the workers run it on."""
    if here != there:
        warn(
            f"JAX runs on {here} in this process, which traces the steps, and on {there} in the "
            f"workers. A step that asks for jax.default_backend() or the kind of GPU is told of "
            f"{here}: it needs JAX here on {there}, with XLA_PYTHON_CLIENT_PREALLOCATE=false. "
            f"`jax.nn.dot_product_attention` with implementation='cudnn' is traced on a host with "
            f"a GPU alone, there also with JAX_PLATFORMS=cpu."
        )


def _import_paths() -> list[str]:
    """Returns the driver's `sys.path`, without the folders that any Python of its version has.

    With these paths a worker on this machine (or on one with the same folders) imports what the
    driver imports, and nothing is uploaded.
    """
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    python = (*folders, *site.getsitepackages(), site.getusersitepackages())
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path)
    return [path for path in paths if not path.startswith(python) and not path.endswith(".zip")]
