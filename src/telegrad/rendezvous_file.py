"""A store in a file, in the format of torch's FileStore, that a killed worker cannot tear.

Torch writes a record in several steps. A process that is killed between two of them leaves a part of a record, on which
every reader of torch's FileStore loops for ever. Here a record is one write, and what is left of an unfinished one is
ignored by readers and removed by the next writer. So it does no harm, whoever left it.

The file is a sequence of records: key and value, each after its length in 4 bytes. Later records replace earlier ones.
Keys begin with ``/``. A record that deletes one has ``-`` before it. Writers hold an exclusive lock (flock), readers a
shared one; the kernel releases those of a dead process.

Whoever deletes or replaces the file takes the store away. Those that have used it notice with their next operation, and
raise a RuntimeError, as torch's stores do when they are gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.interrupts import interruptible

_LENGTH = struct.Struct("<I")
_KEY, _DELETED = b"/", b"-"
_PAUSE = 0.005  # seconds between two attempts to get the lock


class Prefixed(PrefixStore):
    """A PrefixStore of any store. Torch's own does not keep a store alive that is written in Python."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._store = store


class SharedFileStore(Store):
    """A store in a file that all workers of a group see."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__()
        self.path = path
        self._timeout = timeout
        self._lock = threading.Lock()  # protects all below
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._entries: dict[bytes, bytes] = {}

    # -- the operations of torch's stores that the rendezvous uses ----------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry."""
        with self._opened(exclusive=True) as file:
            self._append(file, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return an entry. Raises a RuntimeError if there is none: the rendezvous checks that first."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several entries."""
        with self._opened(exclusive=False):
            found = [self._entries.get(_KEY + key.encode()) for key in keys]
        for key, value in zip(keys, found, strict=True):
            if value is None:
                raise RuntimeError(f"the rendezvous file {self.path} has no entry {key!r}")
        return [value for value in found if value is not None]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set an entry if it has the expected value (empty: or if there is none), and return what it is then."""
        with self._opened(exclusive=True) as file:
            found = self._entries.get(_KEY + key.encode())
            if found != _bytes(expected) and (found is not None or expected):
                return _bytes(expected) if found is None else found
            self._append(file, key, _bytes(desired))
            return _bytes(desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether there are all these entries."""
        with self._opened(exclusive=False):
            return all(_KEY + key.encode() in self._entries for key in keys)

    # -- the file -----------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, *, exclusive: bool) -> Iterator[int]:
        """Lock the file, and read what others have written since."""
        with self._lock:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if self._identity is None else 0)
            try:
                file = os.open(self.path, flags, 0o644)
            except FileNotFoundError as error:
                raise RuntimeError(f"the rendezvous file {self.path} was deleted") from error
            except OSError as error:
                raise RuntimeError(f"the rendezvous file {self.path} cannot be opened: {error}") from error
            try:
                self._take_lock(file, exclusive=exclusive)
                self._refresh(file, exclusive=exclusive)
                yield file
            except OSError as error:
                raise RuntimeError(f"the rendezvous file {self.path} cannot be used: {error}") from error
            finally:
                os.close(file)  # which releases the lock

    def _take_lock(self, file: int, *, exclusive: bool) -> None:
        deadline = time.monotonic() + self._timeout
        operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(file, operation | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        f"the rendezvous file {self.path} was locked by another process for {self._timeout:g} s: a "
                        "worker was stopped while it used the file"
                    ) from error
                _pause()
            else:
                return

    def _refresh(self, file: int, *, exclusive: bool) -> None:
        """Read the records that were added, up to the first unfinished one."""
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino
        if self._identity not in (None, identity) or status.st_size < self._position:
            raise RuntimeError(f"the rendezvous file {self.path} was replaced by another one")
        self._identity = identity
        data = (
            os.pread(file, status.st_size - self._position, self._position) if status.st_size > self._position else b""
        )
        offset = 0
        while (record := _record(data, offset)) is not None:
            key, value, offset = record
            if key.startswith(_DELETED):
                self._entries.pop(key[1:], None)
            else:
                self._entries[key] = value
        self._position += offset
        if exclusive and self._position < status.st_size:  # whoever wrote the rest has no lock any more: it is dead
            os.ftruncate(file, self._position)

    def _append(self, file: int, key: str, value: bytes) -> None:
        name = _KEY + key.encode()
        record = b"".join((_LENGTH.pack(len(name)), name, _LENGTH.pack(len(value)), value))
        try:
            if os.pwrite(file, record, self._position) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, self._position)
            raise
        self._position += len(record)
        self._entries[name] = value


@interruptible
def _pause() -> None:
    time.sleep(_PAUSE)


def _record(data: bytes, offset: int) -> tuple[bytes, bytes, int] | None:
    """Return the key and the value of the record at an offset, and where it ends; None if it is not complete."""
    parts = []
    for _ in range(2):
        if offset + _LENGTH.size > len(data):
            return None
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if offset + length > len(data):
            return None
        parts.append(data[offset : offset + length])
        offset += length
    return parts[0], parts[1], offset


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
