"""What a training leaves in its output folder to go on from."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orbax.checkpoint as ocp

import jaxpp
from experiments.training import rows
from experiments.training.config import Config
from experiments.training.rows import Row


def manager(config: Config) -> ocp.CheckpointManager:
    """The checkpoints of a training, of which the last is kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    return ocp.CheckpointManager(folder_of(config), options=options)


def folder_of(config: Config) -> pathlib.Path:
    """The folder of the checkpoints of a training."""
    return (config.folder / "checkpoints").absolute()


def metrics_file(config: Config) -> pathlib.Path:
    return config.folder / "metrics.jsonl"


def open_output(config: Config) -> None:
    """Makes the output folder, where it has nothing that a new run would mix with."""
    config.folder.mkdir(parents=True, exist_ok=True)
    folder = folder_of(config)  # no manager: it would start JAX, before the devices are chosen
    steps = ocp.utils.checkpoint_steps(folder) if folder.exists() else []
    if steps and not config.resume:
        raise ValueError(
            f"output={config.output} has the checkpoint of step {max(steps)} of another run; go on "
            f"from it with resume, or use another folder."
        )


@contextlib.contextmanager
def recording(
    config: Config,
    checkpoints: ocp.CheckpointManager,
    metrics: Sequence[Row],
    writes: bool = True,
) -> Iterator[Callable[[Row, Any], None]]:
    """A hook for each step of a training that writes its row to a file, and checkpoints.

    Args:
        config: the training.
        checkpoints: where to.
        metrics: the rows that the file starts with; what it had more of is of steps that a run did
            after its last checkpoint, and are done again.
        writes: whether this process writes the rows; all processes save their checkpoints.
    """
    every = config.checkpoint_every
    unwritten = contextlib.nullcontext(lambda row: None)
    with rows.writing(metrics_file(config), metrics) if writes else unwritten as add_row:

        def after_step(row: Row, state: Any) -> None:
            add_row(row)  # before the checkpoint: a step that is not done again has its row
            step = int(row["step"])
            if every > 0 and (step % every == 0 or step == config.steps):
                checkpoints.save(step, args=jaxpp.save_args(state))

        yield after_step
