"""The states of workers' processes, read on this host, or by an actor on another host."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: Seconds that the actors on other hosts have to start.
START = 30.0
#: States of a process that may still answer.
BUSY = ("running", "sleeping", "waiting for a disk", "idle")
DEAD, UNKNOWN = "dead", "unknown"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "U": "waiting for a disk",
    "I": "idle",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": DEAD,
    "X": DEAD,
}


def told(state: str) -> str:
    """Gives a state as the end of a sentence about a worker."""
    return "and its host does not answer" if state == UNKNOWN else f"and its process is {state}"


def process_state(pid: int) -> str:
    """Finds the state of a process of this host."""
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return DEAD
        letter = text.rpartition(")")[2].split()[0]
    else:
        found = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True)
        letter = found.stdout.decode().strip()[:1] or "X"
    return _STATES.get(letter, letter)


def end_stopped(pid: int) -> None:
    """Kills a stopped process of this host: Ray asks it to end itself, which it cannot."""
    if process_state(pid) == _STATES["T"]:
        os.kill(pid, signal.SIGKILL)


@ray.remote(num_cpus=0, max_restarts=-1)
class Lookout:
    """An actor on another host that tells the states of processes there."""

    def end_stopped(self, pid: int) -> None:
        """See `end_stopped`."""
        end_stopped(pid)

    def state(self, pid: int) -> str:
        """See `process_state`."""
        return process_state(pid)


def post_lookouts(nodes: set[str]) -> dict[str, Any]:
    """Starts a `Lookout` on each node but this one."""
    here = ray.get_runtime_context().get_node_id()
    actor: Any = Lookout
    lookouts = {
        node: actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes - {here}
    }
    if lookouts:  # an actor that has not started yet would look like a lost host
        started = [lookout.state.remote(os.getpid()) for lookout in lookouts.values()]
        ray.wait(started, num_returns=len(started), timeout=START, fetch_local=False)
    return lookouts
