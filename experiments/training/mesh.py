"""The mesh of a training: devices of this process, or processes of a Ray session."""

import contextlib
import itertools
from collections.abc import Iterator

import jax

import jaxpp
from experiments.training.config import PROFILED_STEP, Config

Mesh = jaxpp.MpmdMesh | jaxpp.RemoteMpmdMesh


def make_devices(config: Config) -> None:
    """Gives the ranks of the local mesh CPU devices of their own, where there is no accelerator."""
    if config.mesh == "local":
        jax.config.update("jax_num_cpu_devices", config.devices)


def make_mesh(config: Config) -> contextlib.AbstractContextManager[Mesh]:
    """Opens the mesh of a training; processes end with it."""
    axes = (config.ranks,), ("mpmd",)
    if config.is_split:
        axes = (config.ranks, config.dp, config.mp), ("mpmd", "data", "model")
    if config.mesh == "local":
        # In turn, so that ranks share devices where these are too few.
        devices = list(itertools.islice(itertools.cycle(jax.devices()), config.devices))
        return contextlib.nullcontext(jaxpp.MpmdMesh(*axes, devices=devices))
    return jaxpp.RemoteMpmdMesh(
        *axes,
        processes_per_rank=config.processes_per_rank,
        gpus_per_rank=config.gpus_per_rank,
        cores=config.cores,
        address="auto" if config.several_hosts else None,
        environment=dict(variable.split("=", 1) for variable in config.worker_environment),
    )


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
