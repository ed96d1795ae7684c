"""A rank is lost for good: training goes on with one rank fewer, to the bit as a fresh run there.

    python -m benchmarks.fewer_ranks --ranks=3

Trains a stack of blocks on worker processes, with a checkpoint every few steps, and kills one. Then
it shuts the mesh down, makes one of a rank fewer, cuts the same model anew, loads the last
checkpoint onto it, and goes on. It compares losses and state with a fresh run on another mesh of
that size, which starts from plain arrays with the checkpoint's values. It fails if a bit differs.
"""

import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import app, flags

import jaxpp
from benchmarks import equal_blocks

_RANKS = flags.DEFINE_integer("ranks", 3, "Ranks before one is lost.", 2)
_BLOCKS = flags.DEFINE_integer("blocks", 6, "Blocks of the model, cut into a stage for each rank.")
_WIDTH = flags.DEFINE_integer("width", 32, "Features of the model.", 1)
_STEPS = flags.DEFINE_integer("steps", 12, "Steps of the training.", 2)
_LOST_AFTER = flags.DEFINE_integer("lost_after", 7, "Steps after which a worker is killed.", 1)
_EVERY = flags.DEFINE_integer("checkpoint_every", 3, "Steps between checkpoints.", 1)

OPTIMIZER = optax.adamw(1e-2)
EXAMPLES, MICROBATCHES = 16, 4


def start() -> tuple[Any, Any]:
    """The model and optimizer state of a training."""
    return equal_blocks.draw(_BLOCKS.value, _WIDTH.value, 1, OPTIMIZER)[0]


def batch_of(number: int) -> tuple[jax.Array, jax.Array]:
    """The batch of a step."""
    keys = jax.random.split(jax.random.key(number))
    shape = (EXAMPLES, _WIDTH.value)
    return jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape)


def placed(mesh: jaxpp.RemoteMpmdMesh) -> Any:
    """The train step, cut into as many stages as the mesh has ranks."""
    staged = jaxpp.wrap_forward(jaxpp.split_stages(equal_blocks.loss_fn, num_stages=mesh.num_ranks))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), MICROBATCHES)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    train_step = equal_blocks.train_step_of(grad_fn, OPTIMIZER)
    return jaxpp.place(train_step, mesh, donate_argnums=(0, 1))


def train(step: Any, state: Any, first: int) -> Iterator[tuple[int, Any, float]]:
    """Trains from a step on; gives the number of steps done, the state and the loss of each."""
    for number in range(first, _STEPS.value):
        *state, loss = step(*state, batch_of(number))
        yield number + 1, state, float(loss)


def train_until_lost(manager: ocp.CheckpointManager) -> None:
    """Trains on all ranks, until the worker of the last rank is killed."""
    with jaxpp.RemoteMpmdMesh((_RANKS.value,), ("mpmd",)) as mesh:
        try:
            for done, state, loss in train(placed(mesh), start(), 0):
                print(f"step {done:2} on {mesh.num_ranks} ranks: loss {loss:.6f}")
                if done % _EVERY.value == 0:
                    manager.save(done, args=jaxpp.save_args(state))
                if done == _LOST_AFTER.value:
                    manager.wait_until_finished()
                    mesh.apply(kill, {mesh.num_ranks - 1: ()})
        except jaxpp.RankError as error:
            print(f"rank {error.rank} is lost: {str(error).splitlines()[0]}")
            return
    raise SystemExit("No rank was lost; --lost_after has to be less than --steps.")


def kill(process: Any) -> None:
    """Kills the worker that it runs in."""
    del process
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(manager: ocp.CheckpointManager) -> tuple[list[float], Any]:
    """Loads the last checkpoint onto one rank fewer, each its own part, and trains to the end."""
    with jaxpp.RemoteMpmdMesh((_RANKS.value - 1,), ("mpmd",)) as mesh:
        step = placed(mesh)
        like = eqx.filter_eval_shape(start)
        compiled = step.lower(*like, batch_of(0)).compile()
        first = manager.latest_step()
        places = compiled.input_shardings[:2]
        state = manager.restore(first, args=jaxpp.restore_args(like, places))
        return finish(step, state, first or 0)


def fresh_run(manager: ocp.CheckpointManager) -> tuple[list[float], Any]:
    """Starts on one rank fewer from plain arrays of the checkpoint's values."""
    with jaxpp.RemoteMpmdMesh((_RANKS.value - 1,), ("mpmd",)) as mesh:
        first = manager.latest_step()
        like = eqx.filter_eval_shape(start)
        state = manager.restore(first, args=jaxpp.restore_args(like))
        return finish(placed(mesh), state, first or 0)


def finish(step: Any, state: Any, first: int) -> tuple[list[float], Any]:
    """Trains to the end; gives the losses, and the last state on the host."""
    trained = list(train(step, state, first))
    for done, _, loss in trained:
        print(f"step {done:2} on {_RANKS.value - 1} ranks: loss {loss:.6f}")
    _, last, _ = trained[-1]
    return [loss for *_, loss in trained], jax.device_get(eqx.filter(last, eqx.is_array))


def main(_: list[str]) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(pathlib.Path(folder, "checkpoints")) as manager:
            train_until_lost(manager)
            print(f"go on from the checkpoint of step {manager.latest_step()}:")
            losses, state = go_on(manager)
            print("a fresh run from that state:")
            fresh_losses, fresh = fresh_run(manager)
    assert losses == fresh_losses, (losses, fresh_losses)
    leaves = list(zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True))
    for got, expected in leaves:
        np.testing.assert_array_equal(got, expected, strict=True)
    print(
        f"{len(losses)} losses and {len(leaves)} arrays are the same to the bit; "
        f"{time.monotonic() - began:.0f} s in all"
    )


if __name__ == "__main__":
    app.run(main)
