"""Reads from the environment the number of a process, how many there are, where they meet.

Of Slurm, Open MPI and Kubernetes JAX itself knows; torchrun, MPICH and JAX's own variables are read
here.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Mapping

from jaxpp import _compat

#: The variables of a process's number, and of how many there are.
_COUNTED = (
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)
#: Those of its number on its host, and of how many are there.
_ON_HOST = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # such as 2(x4), on four hosts
)
#: The variable with the secret of a job.
SECRET = "JAXPP_SECRET"


@dataclasses.dataclass(frozen=True)
class Position:
    """The place of a process among those of its job.

    Args:
        number: its number.
        count: how many there are.
        host: the host of process 0.
        port: the port at which process 0 waits for the others.
        on_host: its number among the processes of its host, and how many these are; (0, 1) where
            that is not known.
    """

    number: int
    count: int
    host: str = "127.0.0.1"
    port: int = 0
    on_host: tuple[int, int] = (0, 1)


def find_position(environment: Mapping[str, str] = os.environ) -> Position:
    """Reads the place of this process from its environment, or from `jax.distributed`.

    The processes meet at the port behind the one that the launcher names, where torchrun or JAX
    may listen.

    Raises:
        ValueError: no launcher has started this process, or it does not say where to meet.
    """
    number, count, address = _counted(environment)
    if not 0 <= number < count:
        raise ValueError(
            f"LaunchedMpmdMesh: the launcher says that this is process {number} of {count}; "
            f"processes are counted from 0."
        )
    on_host = (0, 1)
    for names in _ON_HOST:
        own, every = (re.match(r"\d+", environment.get(name, "")) for name in names)
        if own and every:
            on_host = int(own[0]), int(every[0])
            break
    if count == 1:
        return Position(0, 1)
    if address is None:
        raise ValueError(
            f"LaunchedMpmdMesh: this is process {number} of {count}, and its launcher does not say "
            f"where they are to meet: set MASTER_ADDR and MASTER_PORT to the host of process 0 and "
            f"a free port there, or JAX_COORDINATOR_ADDRESS to HOST:PORT."
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"LaunchedMpmdMesh: the processes are to meet at {address!r}, which is not HOST:PORT; "
            f"look at MASTER_ADDR and MASTER_PORT, or JAX_COORDINATOR_ADDRESS."
        )
    behind = int(port) + 1 if int(port) < 65535 else int(port) - 1
    return Position(number, count, host.strip("[]"), behind, on_host)


def _counted(environment: Mapping[str, str]) -> tuple[int, int, str | None]:
    """Returns the number of this process, how many there are, and the address of process 0."""
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address is None and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    if (joined := _compat.joined_processes()) is not None:
        told, count, number = joined
        return number, count, told
    for names in _COUNTED:
        if all(environment.get(name, "").isdigit() for name in names):
            number, count = (int(environment[name]) for name in names)
            if address is None and count > 1 and (found := _compat.detect_cluster()) is not None:
                address = found[0]  # as where srun --mpi=pmi2 sets the variables of PMI, too
            return number, count, address
    found = _compat.detect_cluster()
    if found is None:
        raise ValueError(
            "LaunchedMpmdMesh: no launcher has started this process: it has the variables neither "
            "of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), nor of srun, mpirun or "
            "JAX (JAX_PROCESS_ID, JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS). Start the script "
            "with one of them; MpmdMesh runs all ranks in one process."
        )
    told, count, number = found
    return number, count, address or told


def visible_gpus(place: Position, needed: int, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the numbers of the GPUs that a process takes of its host's; empty for all it sees.

    Of several processes of a host each takes its share, unless the launcher has given each some.

    Example:
        >>> visible_gpus(Position(3, 4, on_host=(1, 2)), 2, {})
        '2,3'
        >>> visible_gpus(Position(3, 4, on_host=(1, 2)), 1, {"CUDA_VISIBLE_DEVICES": "5"})
        ''
    """
    number, count = place.on_host
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if count == 1 or (given is not None and len(given.split(",")) < count * needed):
        return ""
    return ",".join(str(n) for n in range(number * needed, (number + 1) * needed))


def find_secret() -> bytes:
    """Returns what the processes of a job know, and nobody else: `JAXPP_SECRET`, or the user's own.

    The latter is in `~/.jaxpp_secret`, which the first process makes, and only the user can read.

    Raises:
        PermissionError: others can read the file.
    """
    if secret := os.environ.get(SECRET):
        return secret.encode()
    path = pathlib.Path.home() / ".jaxpp_secret"
    if not path.exists():
        own = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole or not at all, whoever comes first
        own.unlink()
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"Others can read {path}; run chmod 600 on it, or set {SECRET}.")
    return path.read_bytes()
