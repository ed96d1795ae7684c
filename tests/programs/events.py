"""What the effects of a program leave behind: how often, in which order, with which values."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np

LOG: list[tuple[str, np.ndarray]] = []


def recorder(tag: str) -> Callable[..., None]:
    """A callback that takes down what it is given."""

    def record(*values):
        LOG.append((tag, np.concatenate([np.ravel(np.asarray(v)) for v in values])))

    return record


def doubler(tag: str) -> Callable:
    """A callback that gives back twice what it is given."""

    def double(x):
        LOG.append((tag, np.ravel(np.asarray(x))))
        return np.float32(2 * np.asarray(x))

    return double


def reader(tag: str) -> Callable:
    """A callback with a state: it gives 1, 2, 3, ... as it is called, as a reader of data does."""

    def read(*_):
        LOG.append((tag, np.zeros(0)))
        return np.float32(sum(other == tag for other, _ in LOG))

    return read


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, np.ndarray]]]:
    """Gives a list of what happens inside, complete when the context is left."""
    LOG.clear()
    happened: list[tuple[str, np.ndarray]] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield happened
        jax.effects_barrier()
        sys.stdout.flush()
    happened += LOG
    for line in printed.getvalue().splitlines():
        tag, _, value = line.rpartition(": ")
        happened.append((tag, np.atleast_1d(np.float64(value))))
    LOG.clear()
