"""Checkpoints as directories: there whole or not at all, whenever the process that saves dies.

    manifest.json           the manifest; there only if the checkpoint is whole
    data-<token>/           the data of the save that wrote it
        lock                those who write or read the data hold a shared lock on this file
        driver/             a TensorStore database of the saving process's own arrays
        rank-0/, ...        such a database of each process of a remote mesh

A save writes into a data directory of its own, makes it durable, and renames its manifest into
place, which POSIX makes atomic. With this step the new checkpoint begins, and an old one that it
overwrites ends: a rename of the whole directory could not replace one that is there. If a process
dies before, the manifest names other data or is not there, and the next save cleans the leftovers.

The operating system drops a lock (`flock`) when its process dies, on whichever host that is. So
leftovers differ from data in use, and data in use stay. On a file system without locks leftovers
stay for a day. A copy without the lock file is read as it is where nobody can write to it.
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
#: Seconds after which data that cannot be locked count as left by a process that has died.
UNLOCKABLE_AGE = 24 * 3600.0
#: The errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


# ---- writing ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Draft:
    """A checkpoint that is being written into `data`; no reader sees it until it is published."""

    path: Path
    data: Path
    published: bool = False

    def publish(self, leaves: tuple[_manifest.Leaf, ...]) -> None:
        """Makes the checkpoint visible to readers; its data must be durable already."""
        written = self.data / _manifest.FILE_NAME
        with open(written, "wb") as file:
            file.write(_manifest.encode(Manifest(self.data.name, leaves)))
            file.flush()
            os.fsync(file.fileno())
        _sync(self.data)
        _sync(self.path)
        os.rename(written, self.path / _manifest.FILE_NAME)
        self.published = True
        _sync(self.path)
        clean(self.path)


@contextlib.contextmanager
def drafting(path: Path, overwrite: bool) -> Iterator[Draft]:
    """Makes a draft for the block; removes it at the end unless the block has published it.

    Raises:
        FileExistsError: if there is something that must not be replaced.
        OSError: if the directory cannot be written to.
    """
    _check_free(path, overwrite)
    created = make_directories(path)
    clean(path)
    for _ in range(100):  # another save may clean the new data before they are locked: try again
        data = path / f"{DATA_PREFIX}{uuid.uuid4().hex[:12]}"
        data.mkdir()
        with _locked(data) as locked:
            if not locked:
                continue
            draft = Draft(path, data)
            try:
                yield draft
            finally:
                if not draft.published:
                    with contextlib.suppress(OSError):
                        shutil.rmtree(data)
                        if created:
                            path.rmdir()  # refused where somebody else saves here, too
            return
    raise FileExistsError(errno.EEXIST, "Other processes remove what is saved there", str(path))


def _check_free(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if (path / _manifest.FILE_NAME).exists():
        why = "" if overwrite else "A checkpoint is there already; pass overwrite=True"
    elif not path.is_dir() or not all(p.name.startswith(DATA_PREFIX) for p in path.iterdir()):
        why = "Something that is not a checkpoint is there; save elsewhere"
    else:
        why = "Another process is saving there" if any(map(_in_use, _data_in(path))) else ""
    if why:
        raise FileExistsError(errno.EEXIST, why, str(path))


# ---- reading ------------------------------------------------------------------------------------


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
        with _locked(data) as locked:
            # It may have been overwritten or removed before the lock was taken.
            named = _names(path, manifest.data)
            if locked and named:
                yield manifest, data
                return
        if named and not data.is_dir():
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
        if path.is_dir() and _data_in(path):
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


def _names(path: Path, data: str) -> bool:
    try:
        return read_manifest(path).data == data
    except (FileNotFoundError, ValueError):
        return False


# ---- removing -----------------------------------------------------------------------------------


def clean(path: Path) -> None:
    """Removes data that dead saves have left in a checkpoint's directory."""
    try:
        current = read_manifest(path).data if is_whole(path) else None
    except (FileNotFoundError, ValueError):
        return  # a damaged manifest does not tell which data are its own
    for data in _data_in(path):
        if data.name != current:
            with _locked(data, exclusive=True) as unused:
                if unused:
                    shutil.rmtree(data, ignore_errors=True)


def remove(path: Path) -> bool:
    """Removes a checkpoint, or the rest of one, unless somebody reads or writes it.

    Returns:
        Whether it has gone.
    """
    whole = is_whole(path)
    with contextlib.ExitStack() as stack:
        for data in _data_in(path):
            if not stack.enter_context(_locked(data, exclusive=True, old=whole)):
                return False
        # The manifest goes first, so that no reader finds a checkpoint without its data.
        (path / _manifest.FILE_NAME).unlink(missing_ok=True)
        _sync(path)
        shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


# ---- locks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(data: Path, *, exclusive: bool = False, old: bool = False) -> Iterator[bool]:
    """Locks data for the block, by a file in them.

    Args:
        data: the data's directory.
        exclusive: whether nobody else may hold a lock.
        old: whether the data may go on a file system without locks, however young they are.

    Yields:
        Whether the data are there, and nobody holds a lock that excludes this one.
    """
    writable = exclusive or os.access(data, os.W_OK)
    flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    unlockable = not exclusive or old or _is_old(data)  # before a new file makes them young
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(data / LOCK_NAME, flags, 0o644)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            # The process that had the lock before may have removed the data.
            locked = os.stat(data / LOCK_NAME).st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:
            locked = not writable and data.is_dir()
        except BlockingIOError:
            locked = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            locked = unlockable
        yield locked


def _in_use(data: Path) -> bool:
    with _locked(data, exclusive=True) as unused:
        return not unused and data.exists()


def _is_old(data: Path) -> bool:
    try:
        return time.time() - data.stat().st_mtime > UNLOCKABLE_AGE
    except FileNotFoundError:
        return False


# ---- files --------------------------------------------------------------------------------------


def _data_in(path: Path) -> list[Path]:
    return list(path.glob(f"{DATA_PREFIX}*"))


def make_directories(path: Path) -> bool:
    """Makes a directory and those above it durably; tells whether it was not there before."""
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)
    return bool(missing)


def sync_tree(directory: Path) -> None:
    """Makes all files and names below a directory durable."""
    for folder, _, files in os.walk(directory):
        for path in (*files, ""):
            _sync(Path(folder, path))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
