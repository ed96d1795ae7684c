"""Memory that messages are received into, and that arrays then use without a copy."""

import ctypes
import mmap
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

from jaxpp.runtime.transport._frames import ALIGNMENT

#: The bytes from which on a buffer is reused. A fresh buffer takes longer to fill than a used one:
#: 1.05 times as long at 1 MiB, where the allocator itself reuses memory, and 2.2, 1.5 and 1.6 times
#: at 4, 16 and 64 MiB, where it asks the system for pages (measured while others are in use).
REUSED_FROM = 4 << 20


class BufferPool:
    """Buffers that come back when the last array that reads them has gone.

    A computation may still read the memory of an array whose last Python reference has gone. So a
    finalizer on the array, or on a view of its memory, runs too early. JAX holds the object below
    all views for as long as the memory is in use. So each use of a buffer has such an object of its
    own, a ctypes array that lends the buffer's memory. The buffer is free again when that object
    goes.

    Args:
        limit: how many bytes to keep for later messages; what comes back beyond is freed.
    """

    def __init__(self, limit: int = 1 << 30):
        self._limit = limit
        #: The bytes of free buffers that wait for a message.
        self.kept = 0
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """Returns `nbytes` bytes of memory that nobody else uses, from a multiple of 64 on."""
        if nbytes < REUSED_FROM:
            memory = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            return memory[start : start + nbytes]
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            kept = self._free[size]
            buffer = kept.pop() if kept else None
            if buffer is not None:
                self.kept -= size
        if buffer is None:
            buffer = mmap.mmap(-1, size)
        lent: Any = (ctypes.c_char * size).from_buffer(buffer)
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return np.frombuffer(lent, np.uint8, nbytes)

    def _give_back(self, buffer: mmap.mmap) -> None:
        # This runs where the last reference goes, which may be within `take` on the same thread. So
        # it must not wait for the lock. If the lock is taken, the memory is freed instead.
        if self._lock.acquire(blocking=False):
            try:
                if self.kept + len(buffer) <= self._limit:
                    self._free[len(buffer)].append(buffer)
                    self.kept += len(buffer)
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Frees the buffers that wait for a message."""
        with self._lock:
            self._free.clear()
            self.kept = 0
