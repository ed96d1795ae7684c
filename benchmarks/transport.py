"""Measures how long arrays take from one process to another, by their size and the connection.

Two processes send a message to and fro; half the time of a round trip is what one way takes, until
a `jax.Array` is there. Beside it is the time of a copy of as many bytes within a process: where
machines differ, or others use them too, the ratio says more than the time.

    python -m benchmarks.transport --kinds=unix,tcp,jax,device_put
"""

import dataclasses
import multiprocessing
import os
import statistics
import time
from typing import Any

from absl import app, flags

from jaxpp.runtime.transport import leave_processes

FLAGS = flags.FLAGS
flags.DEFINE_list("kinds", ["unix", "tcp", "jax"], "The sorts of connection to measure.")
flags.DEFINE_list("kib", ["1", "1024", "16384", "65536"], "The sizes of the messages, in KiB.")
flags.DEFINE_integer("arrays", 1, "How many arrays a message has.")
flags.DEFINE_integer("repeats", 5, "How often to measure each; the median counts.")
flags.DEFINE_bool("pin", True, "Keep each process on a core of its own, where the system can.")


@dataclasses.dataclass(frozen=True)
class Case:
    """Messages of some size over some sort of connection."""

    kind: Any
    nbytes: int
    arrays: int
    repeats: int

    @property
    def rounds(self) -> int:
        """How many round trips one measurement has."""
        return max(4, min(400, (256 << 20) // self.nbytes))


def main(argv):
    """Prints a table of what was measured between this process and another."""
    del argv
    cores = (
        sorted(os.sched_getaffinity(0)) if FLAGS.pin and hasattr(os, "sched_getaffinity") else []
    )
    sizes = [int(kib) << 10 for kib in FLAGS.kib]
    cases = [[Case(k, n, FLAGS.arrays, FLAGS.repeats) for k in FLAGS.kinds] for n in sizes]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    flat = [case for row in cases for case in row]
    other = context.Process(target=run, args=(1, theirs, flat, cores), daemon=True)
    other.start()
    times = iter(run(0, ours, flat, cores))
    other.join()
    print("One way in microseconds, and as a multiple of a copy")
    print(f"{'KiB':>8}{'copy':>10}" + "".join(f"{kind:>12}{'':9}" for kind in FLAGS.kinds))
    for nbytes, row in zip(sizes, cases, strict=True):
        copied = copy_time(nbytes)
        cells = [f"{(t := next(times)) * 1e6:12.1f} {t / copied:7.1f}x" for _ in row]
        print(f"{nbytes >> 10:8}{copied * 1e6:10.1f}" + "".join(cells))


def run(rank, pipe, cases, cores):
    """One of the two processes; gives the time of each case, one way, in seconds."""
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    joined = any(case.kind == "device_put" for case in cases)
    if joined:
        join(rank, pipe)
    found = [one_way(rank, pipe, case) for case in cases]
    if joined:
        leave_processes()  # both at once
    return found


def join(rank, pipe):
    """Joins the two processes for JAX's transfers between them."""
    import jax

    from jaxpp.runtime.transport import free_port, join_processes

    host = "127.0.0.1"
    jax.config.update("jax_cross_host_transfer_socket_address", f"{host}:{free_port()}")
    jax.config.update("jax_cross_host_transport_addresses", f"{host}:0")
    if rank == 0:
        pipe.send(f"{host}:{free_port()}")
    coordinator = pipe.recv()
    if rank:
        pipe.send(coordinator)
    join_processes(coordinator, 2, rank, host=host)


def one_way(rank, pipe, case):
    """Measures one case; `pipe` leads to the other process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpp._program import Message
    from jaxpp.runtime.launched._puts import Puts, PutTransport
    from jaxpp.runtime.transport import Pulls, SocketTransport

    length = case.nbytes // 4 // case.arrays
    values = [jnp.arange(length, dtype=jnp.int32) + n for n in range(case.arrays)]
    avals, names = tuple(v.aval for v in values), ("x",) * case.arrays
    there, back = [Message(r, r, 1 - r, names, names, avals) for r in (0, 1)]
    home, secret = jax.local_devices()[0], b"of the benchmark"
    if case.kind == "device_put":
        homes = {device.process_index: device for device in jax.devices()}
        puts = Puts(homes, {rank}, lambda program: None)
        transport = PutTransport({rank: home}, secret, puts=puts)
    else:
        pulls = Pulls(home) if case.kind == "jax" else None
        kind: Any = "auto" if pulls else case.kind
        transport = SocketTransport({rank: home}, secret, kind=kind, pulls=pulls)
    try:
        pipe.send(transport.addresses)
        transport.connect({1 - rank: pipe.recv()})
        pipe.send("connected")
        pipe.recv()  # only when both have, they are
        transport.expect([there, back], transfers=[there, back])
        samples = []
        for repeat in range(case.repeats + 1):
            start = time.perf_counter()
            arrived = values
            for n in range(case.rounds):
                transport.begin(repeat * case.rounds + n)
                if rank == 0:
                    transport.send(arrived, there)
                    arrived = jax.block_until_ready(transport.receive(back))
                else:
                    arrived = jax.block_until_ready(transport.receive(there))
                    transport.send(arrived, back)
            transport.flush()
            samples.append((time.perf_counter() - start) / case.rounds / 2)
            for found, sent in zip(arrived, values, strict=True):
                np.testing.assert_array_equal(found, sent)
        pipe.send("done")
        pipe.recv()
        return statistics.median(samples[1:])
    finally:
        transport.close()


def copy_time(nbytes):
    """The seconds of a copy of some bytes, to memory that has been used before."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    count = max(3, min(1000, (64 << 20) // nbytes))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(target, source)
        samples.append((time.perf_counter() - start) / count)
    return statistics.median(samples)


if __name__ == "__main__":
    app.run(main)
