"""Starts a script in several processes of this host, with the variables that torchrun sets."""

import os
import pathlib
import secrets
import socket
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent


def free_port() -> int:
    """A port that is free, and the one behind it, too, at which launched processes meet."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue


def torchrun(number: int, count: int, port: int) -> dict[str, str]:
    """The variables of a process of a job on this host."""
    values = {"RANK": number, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values |= {"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count}
    return {name: str(value) for name, value in values.items()}


def launch(
    count: int, command: Sequence[str], without: Collection[int] = (), **options: Any
) -> dict[int, "subprocess.Popen[str]"]:
    """Starts a command in several processes; gives them by their numbers.

    Args:
        count: how many there are, as each is told.
        command: what they run.
        without: those that are not started.
        **options: more of `subprocess.Popen`; those that are functions get the number.
    """
    port, secret = free_port(), secrets.token_hex(8)
    known = os.environ | {"JAX_PLATFORMS": "cpu", "JAXPP_SECRET": secret}

    def start(number: int) -> "subprocess.Popen[str]":
        own: Any = {n: value(number) if callable(value) else value for n, value in options.items()}
        env = known | torchrun(number, count, port)
        return subprocess.Popen(command, env=env, cwd=REPOSITORY, text=True, **own)

    return {number: start(number) for number in range(count) if number not in without}
