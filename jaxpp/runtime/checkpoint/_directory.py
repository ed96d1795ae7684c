"""Checkpoints as directories: there whole or not at all, whenever the process that saves dies.

A save writes its data into a directory of its own inside the checkpoint's, and makes the data
durable. Then it renames its manifest into place, which POSIX makes atomic. With this step the new
checkpoint begins, and an old one that it overwrites ends. If a process dies before, the manifest
names other data or is not there, and the next save cleans the leftovers.

A process that writes or reads data holds a shared lock (`flock`) on a file in the data, which the
operating system drops when the process dies. Only data that nobody locks are removed. On a file
system without locks leftovers stay for a day.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxpp.runtime.checkpoint import _manifest
from jaxpp.runtime.checkpoint._manifest import Manifest

DATA_PREFIX = "data-"
LOCK_NAME = "lock"
#: The end of the name of data that are being removed.
REMOVED_SUFFIX = ".removed"
#: Seconds after which data that cannot be locked count as left by a process that has died.
UNLOCKABLE_AGE = 24 * 3600.0


@dataclasses.dataclass
class Draft:
    """A checkpoint that is being written into `data`; no reader sees it until it is published."""

    path: Path
    data: Path
    created: bool
    _lock: int
    published: bool = False

    @staticmethod
    def begin(path: Path, overwrite: bool) -> "Draft":
        """Makes the directory of a new checkpoint, and the directory of its data inside.

        Raises:
            FileExistsError: if there is something that must not be replaced.
            OSError: if the directory cannot be written to.
        """
        _check_free(path, overwrite)
        created = make_directories(path)
        clean(path)
        while True:  # another save may clean the new data before they are locked: try again
            data = path / f"{DATA_PREFIX}{uuid.uuid4().hex[:12]}"
            data.mkdir()
            lock = _lock(data, exclusive=False)
            if lock is not None:
                return Draft(path, data, created, lock)

    def publish(self, leaves: tuple[_manifest.Leaf, ...]) -> None:
        """Makes the checkpoint visible to readers; its data must be durable already."""
        written = self.data / _manifest.FILE_NAME
        with open(written, "wb") as file:
            file.write(_manifest.encode(Manifest(self.data.name, leaves)))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.data)
        sync_directory(self.path)
        os.rename(written, self.path / _manifest.FILE_NAME)
        self.published = True
        sync_directory(self.path)
        clean(self.path)

    def abandon(self) -> None:
        """Removes the data that have been written, unless they have been published."""
        if self.published:
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(self.data)
        if self.created:
            with contextlib.suppress(OSError):  # not empty: somebody else saves here too
                self.path.rmdir()

    def close(self) -> None:
        """Drops the lock of the data."""
        _unlock(self._lock)


@contextlib.contextmanager
def drafting(path: Path, overwrite: bool) -> Iterator[Draft]:
    """Begins a draft for the block; removes the draft if the block raises."""
    draft = Draft.begin(path, overwrite)
    try:
        yield draft
    except BaseException:
        draft.abandon()
        raise
    finally:
        draft.close()


def _check_free(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if (path / _manifest.FILE_NAME).exists():
        if not overwrite:
            raise FileExistsError(
                errno.EEXIST, "A checkpoint is there already; pass overwrite=True", str(path)
            )
    elif not path.is_dir() or not all(p.name.startswith(DATA_PREFIX) for p in path.iterdir()):
        raise FileExistsError(
            errno.EEXIST, "Something that is not a checkpoint is there; save elsewhere", str(path)
        )
    elif any(_is_locked(data) for data in _data_directories(path)):
        raise FileExistsError(errno.EEXIST, "Another process is saving there", str(path))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[tuple[Manifest, Path]]:
    """Opens a checkpoint: gives its manifest and its data, which stay there for the block.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if what is there is not a whole checkpoint.
    """
    for _ in range(100):
        manifest = read_manifest(path)
        data = path / manifest.data
        lock = _lock(data, exclusive=False)
        # The checkpoint may have been overwritten or removed before the lock was taken.
        if lock is not None and _names(path, manifest.data):
            try:
                yield manifest, data
            finally:
                _unlock(lock)
            return
        _unlock(lock)
        if not data.is_dir() and _names(path, manifest.data):
            raise _manifest.damaged(str(path), f"its data {manifest.data} are gone")
        time.sleep(0.01)
    raise ValueError(f"The checkpoint {path} is being removed or overwritten; load another one.")


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint; see `reading`."""
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, "There is no checkpoint", str(path))
    try:
        content = (path / _manifest.FILE_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir() and _data_directories(path):
            raise ValueError(
                f"The checkpoint {path} is half-written: it is still being saved, or the process "
                f"that saved it died. Load another one."
            ) from None
        raise ValueError(
            f"{path} is not a checkpoint: it has no {_manifest.FILE_NAME}. Pass a path that was "
            f"given to save_state."
        ) from None
    return _manifest.decode(content, str(path))


def is_whole(path: Path) -> bool:
    """Tells whether a checkpoint has been published."""
    return (path / _manifest.FILE_NAME).is_file()


def clean(path: Path) -> None:
    """Removes data that dead saves have left in a checkpoint's directory."""
    try:
        current = read_manifest(path).data
    except FileNotFoundError:
        return
    except ValueError:
        if is_whole(path):  # a damaged manifest does not tell which data are its own
            return
        current = None
    for data in _data_directories(path):
        if data.name != current:
            _remove_data(data)


def remove(path: Path) -> bool:
    """Removes a checkpoint, or the rest of one, unless somebody reads or writes it.

    Returns:
        Whether it has gone.
    """
    whole = is_whole(path)
    locks = [
        _lock(data, exclusive=True, unsupported=whole or _is_old(data))
        for data in _data_directories(path)
    ]
    try:
        if None in locks:
            return False
        # The manifest goes first, so that no reader finds a checkpoint without its data.
        (path / _manifest.FILE_NAME).unlink(missing_ok=True)
        sync_directory(path)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        for lock in locks:
            _unlock(lock)


# ---- locks --------------------------------------------------------------------------------------


def _lock(data: Path, *, exclusive: bool, unsupported: bool = True) -> int | None:
    """Locks data by a file in them.

    Args:
        data: the data's directory.
        exclusive: whether nobody else may hold a lock.
        unsupported: what to take for granted on a file system without locks: having it, or not.

    Returns:
        The lock, or None where others hold it, or the data are gone.
    """
    writable = exclusive or os.access(data, os.W_OK)
    try:
        descriptor = os.open(
            data / LOCK_NAME, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o644
        )
    except FileNotFoundError:
        return None
    locked = unsupported
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        # The process that had the lock before may have removed the data.
        locked = os.stat(data / LOCK_NAME).st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        locked = False
    except OSError:
        pass
    if not locked:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _is_locked(data: Path) -> bool:
    lock = _lock(data, exclusive=True, unsupported=_is_old(data))
    _unlock(lock)
    return lock is None and data.exists()


def _is_old(data: Path) -> bool:
    try:
        return time.time() - data.stat().st_mtime > UNLOCKABLE_AGE
    except FileNotFoundError:
        return False


def _remove_data(data: Path) -> None:
    lock = _lock(data, exclusive=True, unsupported=_is_old(data))
    if lock is None:
        return
    removed = data.with_name(data.name.removesuffix(REMOVED_SUFFIX) + REMOVED_SUFFIX)
    with contextlib.suppress(OSError):
        os.rename(data, removed)  # so that no other process uses them
    shutil.rmtree(removed, ignore_errors=True)
    _unlock(lock)


# ---- files --------------------------------------------------------------------------------------


def _data_directories(path: Path) -> list[Path]:
    return [p for p in path.iterdir() if p.name.startswith(DATA_PREFIX)]


def _names(path: Path, data: str) -> bool:
    """Tells whether the manifest is there and names these data."""
    try:
        return read_manifest(path).data == data
    except (FileNotFoundError, ValueError):
        return False


def make_directories(path: Path) -> bool:
    """Makes a directory and those above it durably; tells whether it was not there before."""
    if path.is_dir():
        return False
    if not path.parent.is_dir():
        make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)
    return True


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    _sync(directory)


def sync_tree(directory: Path) -> None:
    """Makes all files and names below a directory durable."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
