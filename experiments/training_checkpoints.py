"""What a training leaves in its output folder to go on from, and the flags that say so."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

import jaxpp
from experiments import training_log, training_mesh
from experiments.training_log import Row

_OUTPUT = flags.DEFINE_string("output", "outputs/train_lm", "Folder for metrics and pictures.")
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 0, "Steps between checkpoints, of which the last is kept; 0 for none.", 0
)
_RESUME = flags.DEFINE_bool(
    "resume", False, "Whether to go on from the last checkpoint in the output folder."
)
_RESTARTS = flags.DEFINE_integer(
    "restarts", 0, "How often --mesh=ray goes on from the last checkpoint when a process dies.", 0
)


def output() -> pathlib.Path:
    return pathlib.Path(_OUTPUT.value)


def restarts() -> int:
    return _RESTARTS.value


def checkpointer() -> jaxpp.Checkpointer:
    return jaxpp.Checkpointer(output() / "checkpoints", keep=1)


def metrics_file() -> pathlib.Path:
    return output() / "metrics.jsonl"


def check() -> None:
    """Says what is wrong with the flags before anything is compiled."""
    if _RESTARTS.value and not training_mesh.is_remote():
        raise app.UsageError("--restarts is for --mesh=ray.")
    if _RESTARTS.value and not _CHECKPOINT_EVERY.value:
        raise app.UsageError("--restarts needs --checkpoint_every, or there is nothing to load.")


def check_output() -> None:
    """Says so where a new run would mix with what another has left in the output folder."""
    with checkpointer() as checkpoints:
        last = checkpoints.latest()
    if last is not None and not _RESUME.value:
        raise app.UsageError(
            f"--output={_OUTPUT.value} has the checkpoint of step {last} of another run; go on "
            f"from it with --resume, or use another folder."
        )


@contextlib.contextmanager
def recording(
    checkpoints: jaxpp.Checkpointer, metrics: Sequence[Row], last_step: int
) -> Iterator[Callable[[Row, Any], None]]:
    """A hook for each step of a training that writes its row to a file, and checkpoints.

    Args:
        checkpoints: where to.
        metrics: the rows that the file starts with; what it had more of is of steps that a run did
            after its last checkpoint, and are done again.
        last_step: the number of the step after which there is a checkpoint in any case.
    """
    every = _CHECKPOINT_EVERY.value
    with training_log.writing(metrics_file(), metrics) as add_row:

        def after_step(row: Row, state: Any) -> None:
            add_row(row)  # before the checkpoint: a step that is not done again has its row
            step = int(row["step"])
            if every > 0 and (step % every == 0 or step == last_step):
                checkpoints.save(step, state)

        yield after_step
