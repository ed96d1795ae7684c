"""Measures how long `save_state` and `load_state` take, in one process and on two workers.

Another tree of this project, such as one of an older commit, is measured beside this one: the two
take turns, so that a busy machine slows both, and the ratio says more than the seconds.

    python -m benchmarks.checkpoints --other=/path/to/another/tree
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("other", "", "A directory with another tree of this project to compare with.")
flags.DEFINE_list("cases", ["400x32", "8x4096"], "Number of square arrays, and their width.")
flags.DEFINE_list("places", ["local", "workers"], "Where the arrays are.")
flags.DEFINE_integer("repeats", 5, "How often to measure each; the least counts.")
flags.DEFINE_string("directory", "", "Where to save; by default a temporary directory.")


def main(argv):
    """Prints a table of the times, and of the ratios to those of the other tree."""
    del argv
    trees = [os.getcwd(), *([FLAGS.other] if FLAGS.other else [])]
    print(f"{'':22}{'save':>9}{'load':>9}{'' if not FLAGS.other else '   ratios to the other'}")
    for place in FLAGS.places:
        for case in FLAGS.cases:
            rows = measure(trees, place, case)
            ratios = [new / old for new, old in zip(rows[0], rows[-1], strict=True)]
            cells = [f"{seconds:8.3f}s" for seconds in rows[0]]
            cells += [f"{ratio:9.2f}" for ratio in ratios if FLAGS.other]
            print(f"{place:10}{case:12}" + "".join(cells), flush=True)


def measure(trees: list[str], place: str, case: str) -> list[list[float]]:
    """Measures trees in turns; gives for each the least time of a save and of a load."""
    workers = []
    for tree in trees:
        command = [sys.executable, os.path.abspath(__file__), place, case, FLAGS.directory]
        environment = {**os.environ, "PYTHONPATH": tree}
        workers.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=tree,  # in which the workers look for modules
            )
        )
    found: list[list[list[float]]] = [[] for _ in workers]
    for _ in range(FLAGS.repeats + 1):
        for worker, rows in zip(workers, found, strict=True):
            worker.stdin.write("\n")
            worker.stdin.flush()
            while not (line := worker.stdout.readline()).startswith("times "):
                if not line:
                    raise RuntimeError(f"A measurement of {place} {case} has failed.")
            rows.append([float(word) for word in line.split()[1:]])
    for worker in workers:
        worker.communicate()
    return [[min(times) for times in zip(*rows[1:], strict=True)] for rows in found]


def work(place: str, case: str, directory: str) -> None:
    """Saves and loads once for each line that it is sent, and answers with the times."""
    import jax  # here, because the other tree is imported in processes of its own
    import jax.numpy as jnp

    import jaxpp

    count, width = map(int, case.split("x"))
    arrays = [jnp.zeros((width, width)) + jnp.float32(number) for number in range(count)]
    folder = tempfile.mkdtemp(dir=directory or None)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        if place == "workers":
            arrays = on_workers(stack.enter_context(jaxpp.RemoteMpmdMesh((2,))), arrays)
        jax.block_until_ready(arrays)
        for number, _ in enumerate(sys.stdin):
            path = f"{folder}/{number}"
            started = time.perf_counter()
            jaxpp.save_state(path, arrays)
            saved = time.perf_counter()
            jax.block_until_ready(jaxpp.load_state(path, arrays))
            loaded = time.perf_counter()
            shutil.rmtree(path)
            print(f"times {saved - started} {loaded - saved}", flush=True)


def on_workers(mesh, weights):
    """Returns gradients of weights, which a step leaves with the ranks of a mesh."""
    import jax
    import jax.numpy as jnp

    import jaxpp

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    split = jaxpp.wrap_forward(jaxpp.split_stages(loss, 2))
    gradient = jaxpp.microbatch(jax.value_and_grad(split), 2)
    step = jaxpp.place(jaxpp.schedule(gradient, jaxpp.schedules.OneFOneB()), mesh)
    return step(weights, jnp.ones((2, len(weights[0]))))[1]


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("local", "workers"):
        work(*sys.argv[1:])
    else:
        app.run(main)
