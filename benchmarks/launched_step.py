"""Measures a step that computes next to nothing on a launched mesh, by the transport.

It starts processes as torchrun does, once for each transport in turn, and prints the median time of
a step: `in a loop`, and where each is waited for. What a step takes is what its messages take, and
the dispatch.

    python -m benchmarks.launched_step
    python -m benchmarks.launched_step --processes=4 --width=256
"""

import os
import socket
import statistics
import subprocess
import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("processes", 2, "How many processes, each of a rank.", 2)
flags.DEFINE_integer("microbatches", 8, "Slices of the batch.", 1)
flags.DEFINE_integer("width", 8, "Features of an example.", 1)
flags.DEFINE_integer("steps", 50, "Steps in a block.", 1)
flags.DEFINE_integer("blocks", 5, "How often each transport takes its turn.", 1)
flags.DEFINE_string("transport", "", "For the processes themselves: their transport.")


def main(argv):
    """Starts the processes of each transport in turn, and prints the medians."""
    del argv
    if FLAGS.transport:
        return measure()
    found = {"sockets": [], "device_put": []}
    for _ in range(FLAGS.blocks):
        for transport, times in found.items():
            times.append(start(transport))
    print("Milliseconds of a step      in a loop   waited for")
    for transport, times in found.items():
        loop, waited = map(statistics.median, zip(*times, strict=True))
        print(f"{transport:24}{loop:13.2f}{waited:13.2f}")


def start(transport):
    """Runs one job; returns the two times of its process 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.launched_step", *sys.argv[1:]]
    shared = {"WORLD_SIZE": FLAGS.processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"JAXPP_SECRET": "of the benchmark", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [*command, f"--transport={transport}"],
            env=os.environ | {k: str(v) for k, v in (shared | {"RANK": n}).items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(FLAGS.processes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    return tuple(map(float, outputs[0].split()))


def measure():
    """Trains in one process of a job; prints the times where it is process 0."""
    import optax

    import jaxpp
    from benchmarks.equal_blocks import Loop, draw, elapsed, placed_step

    optimizer, stages = optax.sgd(0.1), FLAGS.processes
    with jaxpp.LaunchedMpmdMesh((stages,), transport=FLAGS.transport) as mesh:
        state, batch = draw(stages, FLAGS.width, 4 * FLAGS.microbatches, optimizer)
        schedule = jaxpp.schedules.OneFOneB()
        step = placed_step(schedule, stages, FLAGS.microbatches, optimizer, mesh)
        loop = Loop(step, state, batch)

        def waited():
            for _ in range(FLAGS.steps):
                float(loop()[1])

        def in_a_loop():
            for _ in range(FLAGS.steps - 1):
                loop()
            float(loop()[1])

        waited()
        times = [elapsed(run) / FLAGS.steps * 1e3 for run in (in_a_loop, waited)]
        if mesh.process == 0:
            print(*times)


if __name__ == "__main__":
    app.run(main)
