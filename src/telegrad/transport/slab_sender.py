"""The sending side of shared memory: offers slabs to one peer and leases regions of them for messages."""

from __future__ import annotations

import logging
import os
from collections import deque

from telegrad.errors import ProtocolError, is_shortage
from telegrad.transport.base import Link
from telegrad.transport.memory_map import SharedMapping, make_memory
from telegrad.transport.slab_pool import Lease, Slab, SlabPool
from telegrad.wire.allocator import rounded_size
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_offer, pack_slab_unmap, unpack_slab_reply

_log = logging.getLogger("telegrad")

_MIN_SLAB = 1024 * 1024


class SlabSender:
    """The slabs that this worker shares with one peer, and the regions that the peer has not released."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._pool = pool
        self._link = link
        self.slabs: list[Slab] = []
        self._in_use: dict[int, tuple[Slab, int]] = {}
        self._dropped: deque[tuple[Slab, int]] = deque()
        self._offered: Slab | None = None
        self._refused = False
        """The peer, or this system, does not permit shared memory: no more slabs are offered."""
        self._closed = not pool.limit

    def allocate(self, size: int) -> Lease | None:
        """Return a region of at least `size` bytes. None: there is none now, but there may be one next time."""
        if self._closed:
            return None
        pool = self._pool
        with pool.lock:
            lease, first = self._find(size)
            if lease is None:
                # Several threads get here at once, and only one offer may be open. So checking that there is none,
                # sending it and recording it is one step. Forgetting the slabs that make room belongs to that step,
                # too: their peer could otherwise be offered another slab first, which would exceed its limit.
                if self._offered is None and not (self._refused or self._closed or self._link.unsent()):
                    room = self._find_room(size)
                    if room is not None:
                        self._offer(*room)
                return None
        if first:
            pool.on_first_use()
        return lease

    def _find(self, size: int) -> tuple[Lease | None, bool]:
        """Return a free region, if there is one, and whether it is the first of its slab. Called with the lock held."""
        while self._dropped:
            slab, offset = self._dropped.popleft()
            slab.allocator.free(offset)
        for slab in self.slabs:
            found = slab.allocator.allocate(size) if slab.ready else None
            if found is not None:
                first, slab.used = not slab.used, True
                return Lease(slab, found, size, next(self._pool.numbers), self._dropped), first
        return None, False

    def _find_room(self, size: int) -> tuple[int, list[Slab]] | None:
        """Return the size of the next slab, and the slabs to forget for it. Called with the lock held."""
        pool = self._pool
        least = rounded_size(size)
        # Room for two: the next region is often needed before the last is released. Slabs grow, so they stay few.
        ample = max(_MIN_SLAB, 2 * least, sum(slab.allocator.size for slab in self.slabs))
        if pool.total + ample <= pool.limit:
            return ample, []
        removed = pool.make_room(least)
        return None if removed is None else (least, removed)

    def _offer(self, size: int, removed: list[Slab]) -> None:
        """Make a slab and offer it, after `removed` are forgotten. Called with the lock held: no send here waits."""
        pool = self._pool
        for slab in removed:
            slab.sender.forget(slab)
        try:
            fd = make_memory(size)
            try:
                slab = Slab(next(pool.numbers), SharedMapping(fd, size), self)
                if not self._link.offer(pack_slab_offer(slab.id, size), fd):
                    return
            finally:
                os.close(fd)
        except (OSError, MemoryError) as error:
            _log.info("cannot share memory with %s: %s", self._link.peer, error)
            self._refused = not is_shortage(error)  # a shortage is temporary: the next large message tries again
            return
        self._offered = slab
        self.slabs.append(slab)
        pool.slabs.append(slab)
        pool.total += size

    def forget(self, slab: Slab) -> None:
        """Tell the peer to unmap a slab that has no region in use."""
        self._link.send(Kind.SLAB_UNMAP, pack_slab_unmap(slab.id), 0, 0, 0)

    def mark_sent(self, lease: Lease) -> None:
        """Hand the region to the peer, with the frame that is sent next."""
        lease.sent = True
        with self._pool.lock:
            if not self._closed:  # otherwise it would never be released, and would keep its slab
                self._in_use[lease.number] = lease.location()

    def released(self, number: int) -> None:
        """Free a region that the peer has released."""
        with self._pool.lock:
            slab, offset = self._in_use.pop(number, (None, 0))
            if slab is not None:
                slab.allocator.free(offset)
        if slab is None and not self._closed:
            raise ProtocolError(f"the peer released region {number} of shared memory, which is not in use")

    def offer_answered(self, body: bytes | bytearray | memoryview) -> None:
        """Handle the peer's answer to an offer: it has mapped the slab, or could not."""
        number, accepted = unpack_slab_reply(body)
        with self._pool.lock:
            slab, self._offered = self._offered, None
            if slab is not None and slab.id == number:
                slab.ready = accepted
                if not accepted:
                    self._refused = True
                    self.slabs.remove(slab)
                    self._pool.remove(slab)
                return
        if not self._closed:
            raise ProtocolError(f"the peer answered an offer of slab {number}, which was not offered")

    def close(self) -> None:
        """Drop all slabs: the connection is gone, and nothing will be released."""
        with self._pool.lock:
            self._closed = True
            self._offered = None
            for slab in self.slabs:
                self._pool.remove(slab)
            self.slabs.clear()
            self._in_use.clear()
            self._dropped = deque()
