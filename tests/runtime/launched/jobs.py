"""Starts scripts in several processes, as launchers do."""

import os
import pathlib
import random
import subprocess
import sys
import time

from benchmarks.launching import free_port, torchrun

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = pathlib.Path(__file__).with_name("script.py")


def slurm(number, count, port):
    own = {"SLURM_JOB_ID": port % 4096, "SLURM_STEP_NODELIST": "localhost"}
    own |= {"SLURM_STEP_TASKS_PER_NODE": f"{count}(x1)"}
    return own | {"SLURM_NTASKS": count, "SLURM_PROCID": number, "SLURM_LOCALID": number}


def open_mpi(number, count, port):
    own = {"OMPI_MCA_orte_hnp_uri": f"{port % 4096 * 4096}.0;tcp://127.0.0.1:1"}
    of_world = {"SIZE": count, "RANK": number, "LOCAL_RANK": number, "LOCAL_SIZE": count}
    return own | {f"OMPI_COMM_WORLD_{name}": value for name, value in of_world.items()}


def mpich(number, count, port):
    own = {"PMI_RANK": number, "PMI_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    return own | {"MASTER_PORT": port, "MPI_LOCALRANKID": number, "MPI_LOCALNRANKS": count}


def jax_itself(number, count, port):
    own = {"JAX_PROCESS_ID": number, "JAX_NUM_PROCESSES": count}
    return own | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}


LAUNCHERS = {f.__name__: f for f in (torchrun, slurm, open_mpi, mpich, jax_itself)}
#: What other launchers, the test's own too, would leave in the environment.
FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI_", "JAX_PROCESS")


def environment(secret="of the tests"):
    own = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    return own | {"PYTHONPATH": path, "JAXPP_SECRET": secret, "JAX_PLATFORMS": "cpu"}


class Job:
    """The processes of a script."""

    def __init__(self, count, *args, launcher="torchrun", started=None):
        self.args, port = args, free_port() if launcher != "slurm" else random.randrange(4095)
        variables = [LAUNCHERS[launcher](n, count, port) for n in range(count)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, args)],
                env=environment() | {k: str(v) for k, v in own.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for own in variables[:started]
        ]

    def wait(self, timeout=120.0):
        """The exit code and the output of each process; none lives longer."""
        end = time.monotonic() + timeout
        try:
            outputs = [
                process.communicate(timeout=max(0.1, end - time.monotonic()))[0]
                for process in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()
        return [(p.returncode, out) for p, out in zip(self.processes, outputs, strict=True)]

    def succeed(self):
        """Waits, and checks that all is well; returns the outputs."""
        found = self.wait()
        assert [code for code, _ in found] == [0] * len(found), "\n".join(out for _, out in found)
        return [out for _, out in found]
