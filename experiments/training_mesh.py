"""The mesh of a training and its flags: devices of this process, or processes of a Ray session."""

import contextlib
import itertools
from collections.abc import Iterator

import jax
from absl import app, flags

import jaxpp

_MESH = flags.DEFINE_enum(
    "mesh", "local", ["local", "ray"], "Whether ranks are devices of this process, or processes."
)
_RANKS = flags.DEFINE_integer("ranks", None, "Ranks of the pipeline; by default 4.", lower_bound=1)
_PP = flags.DEFINE_integer("pp", None, "The same as --ranks.", lower_bound=1)
_DP = flags.DEFINE_integer("dp", 1, "Devices of a rank that share a microbatch.", lower_bound=1)
_MP = flags.DEFINE_integer("mp", 1, "Devices of a rank that share its layers.", lower_bound=1)
_ZERO1 = flags.DEFINE_bool(
    "zero1", False, "Whether the --dp devices share the optimizer state instead of each having it."
)
_CORES = flags.DEFINE_integer(
    "cores", None, "CPU cores that a process of --mesh=ray is bound to; by default it has all.", 1
)
_GPUS_PER_RANK = flags.DEFINE_float(
    "gpus_per_rank", 0.0, "GPUs for each of the --dp * --mp devices of a rank of --mesh=ray.", 0.0
)
_PROCESSES_PER_RANK = flags.DEFINE_integer(
    "processes_per_rank", 1, "Processes of each rank of --mesh=ray, which share its devices.", 1
)
_HOSTS = flags.DEFINE_bool(
    "several_hosts", False, "Whether the processes of --mesh=ray may be on several hosts."
)
_WORKER_ENVIRONMENT = flags.DEFINE_list(
    "worker_environment", [], "Variables for the processes of --mesh=ray, as NAME=value."
)
_PROFILE = flags.DEFINE_bool("profile", False, "Whether to trace the 6th step of this run.")

#: The steps before it compile and fill caches.
PROFILED_STEP = 6

Mesh = jaxpp.MpmdMesh | jaxpp.RemoteMpmdMesh


def ranks() -> int:
    return either(_RANKS, _PP, default=4)


def devices() -> int:
    """All devices of the mesh."""
    return _DP.value * ranks() * _MP.value


def replicas() -> int:
    """Devices of a rank that share a microbatch."""
    return _DP.value


def parts() -> int:
    """Devices of a rank that share its layers."""
    return _MP.value


def is_split() -> bool:
    """Whether a rank is several devices."""
    return replicas() * parts() > 1


def zero1() -> tuple[str, ...]:
    """The axes that the optimizer state is split over."""
    return ("data",) if _ZERO1.value else ()


def is_remote() -> bool:
    return _MESH.value == "ray"


def either(*names: flags.FlagHolder[int | None], default: int) -> int:
    """The value of a flag that has several names."""
    given = {name.value: name.name for name in names if name.value is not None}
    if len(given) > 1:
        shown = " and ".join(f"--{name}={value}" for value, name in given.items())
        raise app.UsageError(f"{shown} are two values for one thing; give one of them.")
    return next(iter(given), default)


def check(steps: int) -> None:
    """Says what is wrong with the flags before anything is compiled."""
    ranks()
    if replicas() * parts() % _PROCESSES_PER_RANK.value:
        raise app.UsageError(
            f"--processes_per_rank={_PROCESSES_PER_RANK.value} divides the {replicas() * parts()} "
            f"devices of a rank, --dp * --mp, and has to divide their number."
        )
    if _ZERO1.value and replicas() == 1:
        raise app.UsageError("--zero1 shares optimizer state between the --dp devices; use --dp=2.")
    if not is_remote():
        for flag in (_CORES, _GPUS_PER_RANK, _PROCESSES_PER_RANK, _HOSTS, _WORKER_ENVIRONMENT):
            if flag.value != flag.default:
                raise app.UsageError(f"--{flag.name} is for --mesh=ray.")
    for variable in _WORKER_ENVIRONMENT.value:
        if "=" not in variable:
            raise app.UsageError(f"--worker_environment takes NAME=value, got {variable!r}.")
    if _PROFILE.value and steps < PROFILED_STEP:
        raise app.UsageError(
            f"--profile traces step {PROFILED_STEP}, got {steps} steps; use more --steps."
        )


def make_devices() -> None:
    """Gives the ranks of the local mesh CPU devices of their own, where there is no accelerator."""
    if not is_remote():
        jax.config.update("jax_num_cpu_devices", devices())


def make_mesh() -> contextlib.AbstractContextManager[Mesh]:
    return remote_mesh() if is_remote() else contextlib.nullcontext(local_mesh())


def local_mesh() -> jaxpp.MpmdMesh:
    """Devices for each rank, in turn, so that ranks share devices where these are too few."""
    own = list(itertools.islice(itertools.cycle(jax.devices()), devices()))
    return jaxpp.MpmdMesh(*axes(), devices=own)


def axes() -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes and names of the axes; of the pipeline's alone where ranks are single devices."""
    if not is_split():
        return (ranks(),), ("mpmd",)
    return (ranks(), replicas(), parts()), ("mpmd", "data", "model")


def remote_mesh() -> jaxpp.RemoteMpmdMesh:
    """Processes for each rank, wherever the Ray session has room for them."""
    return jaxpp.RemoteMpmdMesh(
        *axes(),
        processes_per_rank=_PROCESSES_PER_RANK.value,
        gpus_per_rank=_GPUS_PER_RANK.value,
        cores=_CORES.value,
        address="auto" if _HOSTS.value else None,
        environment=dict(variable.split("=", 1) for variable in _WORKER_ENVIRONMENT.value),
    )


@contextlib.contextmanager
def profiling(mesh: Mesh, step: int, folder: str) -> Iterator[None]:
    """Traces a step into `folder`, if it is the one that `--profile` asks for.

    Args:
        mesh: the mesh that runs it.
        step: its number, from 1.
        folder: where the trace goes; the JAX profile of rank r goes to `folder-r`.
    """
    if not _PROFILE.value or step != PROFILED_STEP:
        yield
        return
    mesh.start_trace(folder)
    try:
        yield
    finally:
        mesh.stop_trace()
