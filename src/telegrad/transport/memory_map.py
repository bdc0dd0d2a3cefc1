"""Memory that two processes map: created here, passed on as a file descriptor, freed with the last mapping.

Python's `mmap` keeps a file descriptor for every mapping; this one does not. Memory is unmapped when nothing refers to
the mapping or to a block of it: a tensor made over a block keeps the block alive, and the block its mapping.
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

IS_SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether this system has sealed, anonymous shared memory."""

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
    """Return an array type whose instances can refer to their mapping. Cached, because making a type is slow."""
    return type("Block", (ctypes.c_ubyte * size,), {})


def make_memory(size: int) -> int:
    """Return a file descriptor of `size` bytes of memory that nobody can resize. Raises OSError."""
    fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_memory(fd: int, size: int) -> None:
    """Raise OSError unless `fd` has `size` bytes for good: touching truncated memory would kill this process."""
    if os.fstat(fd).st_size != size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError(f"the received file descriptor is not {size:,} bytes of sealed memory")


class SharedMapping:
    """A mapping of `size` bytes of a file descriptor, which may be closed afterwards."""

    __slots__ = ("_address", "_munmap", "size")

    def __init__(self, fd: int, size: int) -> None:
        self._address = None
        self.size = size
        map_memory, self._munmap = _libc()
        address = map_memory(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {size:,} bytes of shared memory: {os.strerror(number)}")
        self._address = address

    def block(self, offset: int, size: int) -> Any:
        """Return the memory from `offset` on. It supports weak references and lives as long as what is made over it."""
        if offset < 0 or size < 1 or offset + size > self.size or self._address is None:
            raise ValueError(f"{size} bytes at offset {offset} are not in a mapping of {self.size} bytes")
        block = _block_type(size).from_address(self._address + offset)
        block.mapping = self
        return block

    def __del__(self) -> None:
        if self._address is not None:
            self._munmap(self._address, self.size)


def view_of(block: Any) -> memoryview:
    """Return the bytes of a block. The view keeps the block alive."""
    return pickle.PickleBuffer(block).raw()
