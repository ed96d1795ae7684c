"""`Checkpointer`: checkpoints of a training loop, written while it goes on."""

import contextlib
import os
import re
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxpp.runtime.checkpoint import _directory, _store
from jaxpp.runtime.checkpoint._load import load_state
from jaxpp.runtime.checkpoint._save import Plan, absolute


class Checkpointer:
    """Writes checkpoints of a training loop in the background, and keeps the last ones.

    Each step's checkpoint is a directory with the step as its name, which `load_state` loads. The
    checkpoint is there whole or not at all, whenever the process or a rank dies. The next call of a
    method raises an error of the background.

    Args:
        directory: where the checkpoints are; it is made. On a remote mesh on a file system that
            all hosts share.
        keep: how many to keep, those of the highest steps and the one written last; None keeps all.

    Raises:
        ValueError: if `keep` is less than 1.
        OSError: if the directory cannot be made.
        ImportError: if TensorStore is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax.numpy as jnp, jaxpp, tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with jaxpp.Checkpointer(directory, keep=2) as checkpointer:
        ...         state = {"weights": jnp.zeros(3)}
        ...         for step in range(5):
        ...             state = {"weights": state["weights"] + 1.0}
        ...             checkpointer.save(step, state)
        ...         checkpointer.wait()
        ...         checkpointer.latest(), checkpointer.restore(state, step=3)
        (4, {'weights': Array([4., 4., 4.], dtype=float32)})
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3):
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpointer needs to keep 1 checkpoint at least, got keep={keep}.")
        _store.check_installed()  # now, and not after the first steps of a training
        self.directory, self.keep = absolute(directory), keep
        _directory.make_directories(self.directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpp-checkpointer")
        self._writing: Future[None] | None = None
        self._closed = False
        self._owner = uuid.uuid4().hex

    def save(self, step: int, tree: Any) -> None:
        """Saves a tree as the checkpoint of a step; returns once it has been copied.

        After this call the arrays may be donated. A checkpoint of the same step is replaced. The
        call waits for the checkpoint before, so that there is never more than one copy.

        Args:
            step: 0 or more.
            tree: as for `save_state`.
        """
        if self._closed:
            raise RuntimeError("The Checkpointer has been closed; make another one.")
        if step < 0:
            raise ValueError(f"Checkpointer needs a step of 0 or more, got {step}.")
        plan = Plan.of(tree)
        self.wait()
        snapshot = plan.snapshot(self._owner)
        self._writing = self._pool.submit(self._write, int(step), snapshot)

    def wait(self) -> None:
        """Waits until the last checkpoint has been written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except BaseException:
                if not writing.done():  # the wait was interrupted; the write goes on
                    self._writing = writing
                raise

    def steps(self) -> list[int]:
        """Lists the steps whose checkpoints are whole, in order."""
        self._raise_error()
        return self._steps()

    def latest(self) -> int | None:
        """Returns the last step whose checkpoint is whole; None where there is none."""
        return max(self.steps(), default=None)

    def restore(self, like: Any, step: int | None = None, shardings: Any = None) -> Any:
        """Loads a checkpoint, by default the latest; see `load_state`.

        Raises:
            FileNotFoundError: if there is none.
        """
        self.wait()
        step = self.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"There is no checkpoint in {self.directory}.")
        return load_state(self._path(step), like, shardings)

    def close(self) -> None:
        """Waits for the last checkpoint, and ends the background thread."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:  # the error of the block is the one to raise
            error.add_note(f"The last checkpoint was not written: {failed!r}")

    # ---- in the background ----------------------------------------------------------------------

    def _write(self, step: int, snapshot: Plan) -> None:
        try:
            with _directory.drafting(self._path(step), overwrite=True) as draft:
                draft.publish(snapshot.write(draft.data))
        except BaseException:
            with contextlib.suppress(Exception):
                snapshot.drop()
            raise
        self._prune(step)

    def _prune(self, written: int) -> None:
        """Removes checkpoints beyond `keep`, and remains of those whose process died."""
        whole = self._steps()
        kept = set(whole if self.keep is None else whole[-self.keep :]) | {written}
        for path in self._paths():
            if int(path.name) not in kept:
                _directory.remove(path)

    def _raise_error(self) -> None:
        if self._writing is not None and self._writing.done():
            self.wait()

    def _steps(self) -> list[int]:
        return sorted(int(p.name) for p in self._paths() if _directory.is_whole(p))

    def _paths(self) -> list[Path]:
        return [p for p in self.directory.iterdir() if re.fullmatch(r"0|[1-9]\d*", p.name)]

    def _path(self, step: int) -> Path:
        return self.directory / str(step)
