"""Memory that two processes see: made here, passed on as a file descriptor, gone with the last process that maps it.

Python's `mmap` keeps a file descriptor for every mapping; this one does not. A mapping is undone when neither it nor
any block of it is referred to: a tensor made over a block keeps the block, and the block its mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

IS_POSSIBLE = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether this system has what is needed here."""

_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> tuple[Callable[..., Any], Callable[..., Any]]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc.mmap, libc.munmap


@functools.lru_cache(256)
def _block_type(size: int) -> Any:
    """A row of bytes that can say which mapping it lies in. Making a type costs more than everything else here."""
    return type("Block", (ctypes.c_ubyte * size,), {})


def make_memory(size: int) -> int:
    """A file descriptor of `size` bytes of memory that nobody can make larger or smaller. Raises OSError."""
    fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_memory(fd: int, size: int) -> None:
    """Raise OSError unless `fd` is `size` bytes and stays so: touching what a peer cut off would kill this process."""
    if os.fstat(fd).st_size != size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError(f"the file descriptor that came is not {size:,} bytes of sealed memory")


class Mapping:
    """`size` bytes of a file descriptor, which may be closed at once."""

    __slots__ = ("_address", "_munmap", "size")

    def __init__(self, fd: int, size: int) -> None:
        self._address = None
        self.size = size
        map_memory, self._munmap = _libc()
        address = map_memory(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"{size:,} bytes of shared memory cannot be mapped: {os.strerror(number)}")
        self._address = address

    def block(self, offset: int, size: int) -> Any:
        """The memory from `offset` on. It can be referred to weakly: it lives as long as anything made over it."""
        if offset < 0 or size < 1 or offset + size > self.size or self._address is None:
            raise ValueError(f"{size} bytes at {offset} are not in a mapping of {self.size}")
        block = _block_type(size).from_address(self._address + offset)
        block.mapping = self
        return block

    def __del__(self) -> None:
        if self._address is not None:
            self._munmap(self._address, self.size)


def view_of(block: Any) -> memoryview:
    """The bytes of a block; they keep it."""
    return pickle.PickleBuffer(block).raw()
