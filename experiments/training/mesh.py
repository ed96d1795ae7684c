"""The mesh of a training: devices of this process, processes of Ray, or of a launcher."""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator

import jax

import jaxpp
from experiments.training.config import PROFILED_STEP, Config

Mesh = jaxpp.MpmdMesh | jaxpp.RemoteMpmdMesh | jaxpp.LaunchedMpmdMesh

#: Seconds without a sign of life after which JAX takes a process that it has joined for lost.
JOINED_TIMEOUT = 10


def make_devices(config: Config) -> None:
    """Gives the ranks of the local mesh CPU devices of their own, where there is no accelerator."""
    if config.mesh == "local":
        jax.config.update("jax_num_cpu_devices", config.devices)
    if config.mesh == "launched" and (config.checkpoint_every or config.resume):
        _join_processes()


def _join_processes() -> None:
    """Joins launched processes by `jax.distributed`: Orbax's manager of checkpoints needs it.

    The manager waits for a process that has failed until JAX misses it, by default for 100 s.
    """
    own = os.environ
    join = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds=JOINED_TIMEOUT)
    if {"JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"} <= own.keys():
        address = own["JAX_COORDINATOR_ADDRESS"]
        names = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= own.keys():
        # torchrun itself may listen at its port.
        address = f"{own['MASTER_ADDR']}:{int(own['MASTER_PORT']) + 1}"
        names = "WORLD_SIZE", "RANK"
    else:  # of Slurm and Open MPI JAX knows
        join()
        return
    count, number = (int(own[name]) for name in names)
    if count > 1:
        join(address, count, number, cluster_detection_method="deactivate")


def make_mesh(config: Config) -> contextlib.AbstractContextManager[Mesh]:
    """Opens the mesh of a training; processes end with it."""
    axes = (config.ranks,), ("mpmd",)
    if config.is_split:
        axes = (config.ranks, config.dp, config.mp), ("mpmd", "data", "model")
    if config.mesh == "local":
        # In turn, so that ranks share devices where these are too few.
        devices = list(itertools.islice(itertools.cycle(jax.devices()), config.devices))
        return contextlib.nullcontext(jaxpp.MpmdMesh(*axes, devices=devices))
    if config.mesh == "launched":
        return jaxpp.LaunchedMpmdMesh(*axes)
    return jaxpp.RemoteMpmdMesh(
        *axes,
        processes_per_rank=config.processes_per_rank,
        gpus_per_rank=config.gpus_per_rank,
        cores=config.cores,
        address="auto" if config.several_hosts else None,
        environment=dict(variable.split("=", 1) for variable in config.worker_environment),
    )


def is_first(mesh: Mesh) -> bool:
    """Whether this process writes and prints: of those of a launcher the first one does."""
    return getattr(mesh, "process", 0) == 0


#: How the kinds of devices begin in JAX, by their names in `jaxpp.planning.DEVICES`. Those of
#: NVIDIA are the SXM modules, whose peaks these are.
_KINDS = {
    "a100": ("NVIDIA A100-SXM",),
    "h100": ("NVIDIA H100 80GB HBM3",),
    "h200": ("NVIDIA H200",),
    "tpu_v4": ("TPU v4",),
    "tpu_v5e": ("TPU v5 lite", "TPU v5e"),
    "tpu_v5p": ("TPU v5",),
    "tpu_v6e": ("TPU v6",),
}


def device_name(config: Config) -> str | None:
    """The name in `jaxpp.planning.DEVICES` of the devices of a training; None if it has none."""
    if config.device or config.mesh == "ray":  # whose devices are those of other processes
        return config.device
    kind = jax.local_devices()[0].device_kind
    # The H200 NVL has another peak, the "TPU v4 lite" is for inference.
    if kind.endswith("NVL") or kind == "TPU v4 lite":
        return None
    return next((name for name, begins in _KINDS.items() if kind.startswith(begins)), None)


@contextlib.contextmanager
def profiling(config: Config, mesh: Mesh, step: int) -> Iterator[None]:
    """Traces a step, from 1, if it is the one that `config.profile` asks for.

    The timeline goes to `profile` in the output folder, and the JAX profile of rank r to
    `profile-r` in it.
    """
    if not config.profile or step != PROFILED_STEP:
        yield
        return
    mesh.start_trace(str(config.folder / "profile"))
    try:
        yield
    finally:
        mesh.stop_trace()
