"""Real text as bytes: files into a training and a held-out part, and batches by (seed, step)."""

import dataclasses
import os
import pathlib
import random
import sysconfig
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, UInt8

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text for training and, disjoint from it, text to evaluate on; uint8 arrays, [bytes]."""

    train: UInt8[np.ndarray, " train_bytes"]
    held_out: UInt8[np.ndarray, " held_out_bytes"]


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    limit_mib: float = 8.0,
    held_out_fraction: float = 0.05,
) -> Corpus:
    """Reads text from disk and splits it; the same files always give the same corpus.

    Args:
        path: a file, or a folder whose files are all read. By default the sources (`*.py`) of
            Python's standard library, without its tests and without installed packages.
        limit_mib: how much is read at most, in MiB.
        held_out_fraction: the part at the end of what was read that is kept for evaluation.

    Raises:
        FileNotFoundError: when `path` does not exist, or is a folder without files.
    """
    if path is None:
        folder, pattern = pathlib.Path(sysconfig.get_paths()["stdlib"]), "*.py"
    else:
        folder, pattern = pathlib.Path(path), "*"
    text = np.frombuffer(_read(_find(folder, pattern), int(limit_mib * MEBIBYTE)), np.uint8)
    boundary = len(text) - int(held_out_fraction * len(text))
    return Corpus(train=text[:boundary], held_out=text[boundary:])


def batch(
    text: UInt8[np.ndarray, " bytes"],
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    step: int,
) -> Int32[np.ndarray, "batch time_plus_1"]:
    """The batch of `step`: random windows of `text`, the same for the same seed and step.

    Args:
        text: the bytes to draw from, uint8, [bytes].
        batch_size: number of windows.
        sequence_length: predictions in each window, which is one byte longer than this.
        seed: of the whole run.
        step: number of the batch in the run.

    Returns:
        the windows, int32, [batch_size, sequence_length + 1].

    Raises:
        ValueError: when `text` is shorter than the windows of one batch laid end to end.
    """
    window = sequence_length + 1
    if len(text) < batch_size * window:
        raise ValueError(
            f"A batch of {batch_size} windows of {window} bytes needs at least "
            f"{batch_size * window} bytes of text, got {len(text)}; give more text, shorter "
            f"sequences or smaller batches."
        )
    starts = np.random.default_rng((seed, step)).integers(len(text) - window + 1, size=batch_size)
    return text[starts[:, None] + np.arange(window)].astype(np.int32)


def _find(root: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """The files under `root` (or `root` itself), in an order that depends on their names alone."""
    if root.is_file():
        return [root]
    if not root.exists():
        raise FileNotFoundError(f"No text at {root}: there is no such file or folder.")
    files = sorted(_walk(root, pattern))
    if not files:
        raise FileNotFoundError(f"No text at {root}: the folder holds no {pattern} files.")
    # Neighbouring files are alike; shuffled, the start and the end of the text are alike too.
    random.Random(0).shuffle(files)
    return files


def _walk(root: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_text_folder(name)]
        paths = (pathlib.Path(folder, name) for name in names)
        yield from (path for path in paths if path.match(pattern) and path.is_file())


def _is_text_folder(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith((".", "__pycache__"))


def _read(files: list[pathlib.Path], limit: int) -> bytes:
    """The contents of `files` one after the other, up to `limit` bytes."""
    contents, total = [], 0
    for file in files:
        if total >= limit:
            break
        contents.append(file.read_bytes()[: limit - total])
        total += len(contents[-1])
    return b"".join(contents)
