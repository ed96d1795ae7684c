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
