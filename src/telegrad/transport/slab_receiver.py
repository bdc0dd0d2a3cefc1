"""The receiving side of shared memory: maps the slabs of one peer and releases regions that are not used any more."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.base import Link
from telegrad.transport.memory_map import SharedMapping, check_memory, view_of
from telegrad.transport.slab_pool import SlabPool
from telegrad.wire.allocator import rounded_size
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_reply, unpack_slab_offer, unpack_slab_unmap

_log = logging.getLogger("telegrad")


class _OpenRegion(weakref.ref[Any]):
    """Notices that nothing refers to a region any more."""

    __slots__ = ("number", "pinned")

    number: int
    pinned: bool
    """Never release it: a forked child may see it."""


class SlabReceiver:
    """The slabs of one peer that this worker has mapped, and the regions that are in use here."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._pool = pool
        self._link = link
        self._mappings: dict[int, SharedMapping] = {}
        self._unused: set[int] = set()
        self._open: dict[int, _OpenRegion] = {}
        self.unreferenced: deque[_OpenRegion] = deque()
        """Regions that nothing refers to any more, and that are not released yet."""
        self._closed = False
        pool.receivers.add(self)

    def offered(self, body: bytes | bytearray | memoryview) -> None:
        """Map a slab, if that is possible and within the limit, and answer the offer."""
        number, size = unpack_slab_offer(body)
        fd = self._link.take_fd()
        accepted = False
        try:
            with self._pool.lock:
                if number in self._mappings:
                    raise ProtocolError(f"the peer offered slab {number} twice")
                fits = sum(mapping.size for mapping in self._mappings.values()) + size <= self._pool.limit
            if fd is not None and fits:
                check_memory(fd, size)
                mapping = SharedMapping(fd, size)
                with self._pool.lock:
                    if not self._closed:  # otherwise nobody would ever unmap it
                        self._mappings[number] = mapping
                        self._unused.add(number)
                        accepted = True
        except (OSError, MemoryError) as error:
            _log.info("cannot share memory with %s: %s", self._link.peer, error)
        finally:
            if fd is not None:
                os.close(fd)
        self._link.send(Kind.SLAB_REPLY, pack_slab_reply(number, accepted), 0, 0, 0)

    def open_region(self, slab: int, offset: int, size: int, number: int) -> memoryview:
        """Return the memory of a region. It is released when nothing refers to it any more."""
        with self._pool.lock:
            mapping = self._mappings.get(slab)
            if mapping is None:
                raise ProtocolError(f"the peer sent a message in slab {slab}, which it has not offered")
            if number in self._open or not number:
                raise ProtocolError(f"the peer sent a message in region {number}, which is already in use")
            taken = rounded_size(size)
            if offset < 0 or offset % 16 or size < 1 or offset + taken > mapping.size:
                raise ProtocolError(
                    f"the peer sent a message of {size:,} bytes at offset {offset:,} of a slab of {mapping.size:,}"
                )
            block = mapping.block(offset, taken)
            region = _OpenRegion(block, self.unreferenced.append)
            region.number, region.pinned = number, False
            self._open[number] = region
            first = slab in self._unused
            self._unused.discard(slab)
        if first:
            self._pool.on_first_use()
        return view_of(block)[:size]

    def forget(self, body: bytes | bytearray | memoryview) -> None:
        """Unmap a slab that the peer will not use any more."""
        number = unpack_slab_unmap(body)
        with self._pool.lock:
            if self._mappings.pop(number, None) is None:
                raise ProtocolError(f"the peer asked to forget slab {number}, which it has not offered")

    def take_unreferenced(self, limit: int) -> list[int]:
        """Return the numbers of up to `limit` regions to release now."""
        numbers: list[int] = []
        with self._pool.lock, suppress(IndexError):
            while len(numbers) < limit:
                region = self.unreferenced.popleft()
                if self._open.pop(region.number, None) is not None and not region.pinned:
                    numbers.append(region.number)
        return numbers

    def pin_all(self) -> None:
        """Never release the regions that are in use now: a forked child may see them. Called with the lock held."""
        for region in self._open.values():
            region.pinned = True

    def close(self) -> None:
        """Forget all slabs: the connection is gone. Memory that tensors use stays as long as they do."""
        with self._pool.lock:
            self._closed = True
            self._mappings.clear()
            self._open.clear()
        self.unreferenced.clear()
