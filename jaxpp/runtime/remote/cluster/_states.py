"""The states of workers' processes on the hosts of a Ray session."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: Seconds that another host has to tell the state of a process: a task of Ray has to start there.
ANSWER = 5.0
#: States of a process that may still answer.
RUNS = ("running", "sleeping", "waiting for a disk", "idle")
DEAD, STOPPED = "dead", "stopped"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "U": "waiting for a disk",
    "I": "idle",
    "T": STOPPED,
    "t": "stopped by a debugger",
    "Z": DEAD,
    "X": DEAD,
}


def process_state(pid: int, node: str = "") -> str:
    """Finds the state of a process on a node of Ray, in a word; empty where it does not answer."""
    if _is_here(node):
        return _state(pid)
    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(_start(node, _state, pid), timeout=ANSWER)
    return ""


def end_stopped(pid: int, node: str = "") -> None:
    """Kills a stopped process: Ray asks it to end itself, which it cannot; does not wait."""
    if _is_here(node):
        _end_stopped(pid)
    else:
        _start(node, _end_stopped, pid)


def _is_here(node: str) -> bool:
    return node in ("", ray.get_runtime_context().get_node_id())


def _start(node: str, function: Any, pid: int) -> Any:
    """Starts a task of Ray on a node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


def _state(pid: int) -> str:
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


def _end_stopped(pid: int) -> None:
    if _state(pid) == STOPPED:
        os.kill(pid, signal.SIGKILL)
