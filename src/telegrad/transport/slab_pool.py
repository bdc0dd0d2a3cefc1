"""Slabs of shared memory that this worker made, and the limit on their total size.

Large messages between processes of one host go through memory that both map: copied once, and used in place. The frames
about it are described in `telegrad.wire.slab_messages`. Three rules keep it safe:

1. A region belongs to the receiver of its message until the receiver releases it. Nobody else writes to it, whatever
   happens to the connection: when that ends, its slabs are dropped with all regions that are in use, and the kernel
   frees what nobody maps.
2. The destructor of the memory behind a tensor notices that a region is unused. It runs in any thread, so it appends to
   a deque and does nothing else.
3. All slabs of a worker together have at most `limit` bytes. A message that does not fit goes through the socket, as
   does every message where the system, the settings or the peer do not permit shared memory.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.transport.memory_map import IS_SUPPORTED, SharedMapping, view_of
from telegrad.wire.allocator import Allocator, rounded_size

if TYPE_CHECKING:
    from telegrad.transport.slab_receiver import SlabReceiver
    from telegrad.transport.slab_sender import SlabSender


class Slab:
    """One block of shared memory. Its sender leases regions of it to one peer."""

    __slots__ = ("allocator", "id", "mapping", "ready", "sender", "used")

    def __init__(self, number: int, mapping: SharedMapping, sender: SlabSender) -> None:
        self.id = number
        self.mapping = mapping
        self.allocator = Allocator(mapping.size)
        self.sender = sender
        self.ready = False
        """The peer has mapped it."""
        self.used = False


class Lease:
    """A region that is being filled. If it is dropped before it was sent, it is free again."""

    __slots__ = ("_dropped", "_home", "number", "offset", "sent", "slab", "view")

    def __init__(self, home: Slab, offset: int, size: int, number: int, dropped: deque[tuple[Slab, int]]) -> None:
        self.view = view_of(home.mapping.block(offset, rounded_size(size)))
        self.slab = home.id
        self.offset = offset
        self.number = number
        self.sent = False
        self._home = home
        self._dropped = dropped

    def location(self) -> tuple[Slab, int]:
        """Return the slab, and the offset in it."""
        return self._home, self.offset

    def __del__(self) -> None:
        if not self.sent:
            self._dropped.append((self._home, self.offset))


class SlabPool:
    """All slabs of one worker, and the limit that they share.

    `on_first_use` is called when a slab is used for the first time: buffers that were kept for sending through the
    socket are probably not needed any more.
    """

    def __init__(self, limit: int, on_first_use: Callable[[], None] = lambda: None) -> None:
        self.on_first_use = on_first_use
        self.limit = limit if IS_SUPPORTED else 0
        # Protects `slabs`, `total` and the state of every SlabSender and SlabReceiver of this pool.
        self.lock = threading.Lock()
        self.slabs: list[Slab] = []
        self.total = 0
        self.numbers = itertools.count(1)
        self.receivers: weakref.WeakSet[SlabReceiver] = weakref.WeakSet()
        _pools.add(self)

    def make_room(self, size: int) -> list[Slab] | None:
        """Remove idle slabs, oldest first, until `size` more bytes fit, and return them. None: that is impossible.

        Called with the lock held.
        """
        excess = self.total + size - self.limit
        removed: list[Slab] = []
        for slab in self.slabs:
            if excess <= 0:
                break
            if slab.ready and not slab.allocator.in_use:
                removed.append(slab)
                excess -= slab.allocator.size
        if excess > 0:
            return None
        for slab in removed:
            slab.sender.slabs.remove(slab)
            self.remove(slab)
        return removed

    def remove(self, slab: Slab) -> None:
        """Stop counting a slab. Called with the lock held."""
        self.slabs.remove(slab)
        self.total -= slab.allocator.size


_pools: weakref.WeakSet[SlabPool] = weakref.WeakSet()
_locked: dict[int, list[SlabPool]] = {}  # by thread: the pools whose locks it holds during a fork


def _pin_regions_before_fork() -> None:
    """Never release a region that a forked child can see: it must not change under the child."""
    pools = _locked[threading.get_ident()] = sorted(_pools, key=id)  # in one order, if two threads fork
    for pool in pools:
        pool.lock.acquire()
        for receiver in pool.receivers:
            receiver.pin_all()


def _unlock_after_fork() -> None:
    for pool in _locked.pop(threading.get_ident()):
        pool.lock.release()


os.register_at_fork(
    before=_pin_regions_before_fork, after_in_parent=_unlock_after_fork, after_in_child=_unlock_after_fork
)
