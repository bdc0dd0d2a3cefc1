"""Large messages between processes of one host go through memory that both see: copied once, and used in place.

What is said about it is in `telegrad.wire.slab_messages`. Three rules keep it safe:

1. A region belongs to whoever it was lent to until it comes back. Nobody else writes to it, whatever happens to the
   connection: when that ends, its slabs are dropped with all that is out, and the kernel frees what nobody maps.
2. What comes back is found by the destructor of the memory behind a tensor, which runs in any thread. It appends to a
   deque, and nothing else.
3. All slabs of a worker together have at most `bound` bytes. What finds no room goes through the socket, as does
   everything where the system, the settings or the peer do not permit shared memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from telegrad.errors import ProtocolError, is_shortage
from telegrad.transport.base import Link
from telegrad.transport.mapping import IS_POSSIBLE, Mapping, check_memory, make_memory, view_of
from telegrad.wire.allocator import Allocator, rounded_size
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import (
    pack_region_free,
    pack_slab_offer,
    pack_slab_reply,
    pack_slab_unmap,
    unpack_region_free,
    unpack_slab_offer,
    unpack_slab_reply,
    unpack_slab_unmap,
)

_log = logging.getLogger("telegrad")

_SMALLEST = 1024 * 1024
_RIDING = 2  # regions that the header of one frame can give back


class Slab:
    """One block of memory, lent to one peer in regions."""

    __slots__ = ("arena", "id", "lender", "mapping", "ready", "used")

    def __init__(self, number: int, mapping: Mapping, lender: Lender) -> None:
        self.id = number
        self.mapping = mapping
        self.arena = Allocator(mapping.size)
        self.lender = lender
        self.ready = False
        """The peer has mapped it."""
        self.used = False


class Loan:
    """A region that is being filled. If it is dropped before it was handed over, it is free again."""

    __slots__ = ("_dropped", "_home", "handed_over", "number", "offset", "slab", "view")

    def __init__(self, home: Slab, offset: int, size: int, number: int, dropped: deque[tuple[Slab, int]]) -> None:
        self.view = view_of(home.mapping.block(offset, rounded_size(size)))
        self.slab = home.id
        self.offset = offset
        self.number = number
        self.handed_over = False
        self._home = home
        self._dropped = dropped

    def place(self) -> tuple[Slab, int]:
        """Where it is, for the one who keeps account of it."""
        return self._home, self.offset

    def __del__(self) -> None:
        if not self.handed_over:
            self._dropped.append((self._home, self.offset))


class SlabPool:
    """All slabs of one worker, and the bound that they share.

    `taken_up` is called when a slab is first used: what was sent before through the socket, and was kept for the next
    time, is not needed any more.
    """

    def __init__(self, bound: int, taken_up: Callable[[], None] = lambda: None) -> None:
        self.taken_up = taken_up
        self.bound = bound if IS_POSSIBLE else 0
        # Protects `slabs`, `total` and the books of every lender and borrower.
        self.lock = threading.Lock()
        self.slabs: list[Slab] = []
        self.total = 0
        self.numbers = itertools.count(1)
        self.borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        _keep_for_children(self)

    def make_room(self, size: int) -> list[Slab] | None:
        """Slabs to forget, oldest first, so that `size` more bytes are within the bound; None: they never are.

        Called with the lock held.
        """
        excess = self.total + size - self.bound
        victims: list[Slab] = []
        for slab in self.slabs:
            if excess <= 0:
                break
            if slab.ready and not slab.arena.in_use:
                victims.append(slab)
                excess -= slab.arena.size
        if excess > 0:
            return None
        for slab in victims:
            slab.lender.slabs.remove(slab)
            self.remove(slab)
        return victims

    def remove(self, slab: Slab) -> None:
        """It counts no longer. Called with the lock held."""
        self.slabs.remove(slab)
        self.total -= slab.arena.size


class Lender:
    """What this worker lends to one peer."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._pool = pool
        self._link = link
        self.slabs: list[Slab] = []
        self._lent: dict[int, tuple[Slab, int]] = {}
        self._dropped: deque[tuple[Slab, int]] = deque()
        self._offered: Slab | None = None
        self._refused = False
        """The peer, or this system, has said no: nothing more is offered."""
        self._closed = not pool.bound

    def take(self, size: int) -> Loan | None:
        """A region of at least `size` bytes; None: there is none now, and maybe next time."""
        if self._closed:
            return None
        pool = self._pool
        with pool.lock:
            loan, first = self._find(size)
            if loan is None:
                # Several threads come here at once, and one offer may be open. So to see that there is none, to send
                # it and to note it are one step; and a slab that makes room for it is forgotten in that step, too, or
                # the peer that it was lent to could be offered another one first, and find that too much.
                if self._offered is None and not (self._refused or self._closed or self._link.unsent()):
                    room = self._find_room(size)
                    if room is not None:
                        self._offer(*room)
                return None
        if first:
            pool.taken_up()
        return loan

    def _find(self, size: int) -> tuple[Loan | None, bool]:
        """A region, if there is one, and whether it is the first of its slab. Called with the lock held."""
        while self._dropped:
            slab, offset = self._dropped.popleft()
            slab.arena.free(offset)
        for slab in self.slabs:
            found = slab.arena.allocate(size) if slab.ready else None
            if found is not None:
                first, slab.used = not slab.used, True
                return Loan(slab, found, size, next(self._pool.numbers), self._dropped), first
        return None, False

    def _find_room(self, size: int) -> tuple[int, list[Slab]] | None:
        """How large the next slab is, and what is forgotten for it. Called with the lock held."""
        pool = self._pool
        least = rounded_size(size)
        # Room for two: the next region is often needed before the last is back. And slabs get larger, so they stay few.
        ample = max(_SMALLEST, 2 * least, sum(slab.arena.size for slab in self.slabs))
        if pool.total + ample <= pool.bound:
            return ample, []
        victims = pool.make_room(least)
        return None if victims is None else (least, victims)

    def _offer(self, size: int, victims: list[Slab]) -> None:
        """Make a slab and offer it, after `victims` are forgotten. Called with the lock held: no send here waits."""
        pool = self._pool
        for victim in victims:
            victim.lender.forget(victim)
        try:
            fd = make_memory(size)
            try:
                slab = Slab(next(pool.numbers), Mapping(fd, size), self)
                if not self._link.offer(pack_slab_offer(slab.id, size), fd):
                    return
            finally:
                os.close(fd)
        except (OSError, MemoryError) as error:
            _log.info("no memory is shared with %s: %s", self._link.peer, error)
            self._refused = not is_shortage(error)  # a shortage passes: the next large message tries again
            return
        self._offered = slab
        self.slabs.append(slab)
        pool.slabs.append(slab)
        pool.total += size

    def forget(self, slab: Slab) -> None:
        """Tell the peer that a slab, of which nothing is out, will not be used again."""
        self._link.send(Kind.SLAB_UNMAP, pack_slab_unmap(slab.id), 0, 0, 0)

    def hand_over(self, loan: Loan) -> None:
        """The region goes to the peer with the frame that is sent next."""
        loan.handed_over = True
        with self._pool.lock:
            if not self._closed:  # else it will never come back, and would keep its slab
                self._lent[loan.number] = loan.place()

    def returned(self, number: int) -> None:
        """The peer gives a region back."""
        with self._pool.lock:
            slab, offset = self._lent.pop(number, (None, 0))
            if slab is not None:
                slab.arena.free(offset)
        if slab is None and not self._closed:
            raise ProtocolError(f"a region of shared memory comes back that was not lent: {number}")

    def answered(self, body: bytes | bytearray | memoryview) -> None:
        """The peer has mapped a slab, or could not."""
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
            raise ProtocolError(f"an answer came about slab {number}, which was not offered")

    def close(self) -> None:
        """The connection is gone, and what is out with it."""
        with self._pool.lock:
            self._closed = True
            self._offered = None
            for slab in self.slabs:
                self._pool.remove(slab)
            self.slabs.clear()
            self._lent.clear()
            self._dropped = deque()


class _Borrowed(weakref.ref[Any]):
    """Notices that nothing refers to a region any more."""

    __slots__ = ("kept", "number")

    number: int
    kept: bool


class Borrower:
    """What one peer lends to this worker."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._pool = pool
        self._link = link
        self._mappings: dict[int, Mapping] = {}
        self._unused: set[int] = set()
        self._alive: dict[int, _Borrowed] = {}
        self.dead: deque[_Borrowed] = deque()
        """Regions to which nothing refers any more, and which the peer does not know of yet."""
        self._closed = False
        pool.borrowers.add(self)

    def offered(self, body: bytes | bytearray | memoryview) -> None:
        """Map a slab, if that is possible and within the bound, and say so."""
        number, size = unpack_slab_offer(body)
        fd = self._link.take_fd()
        accepted = False
        try:
            with self._pool.lock:
                if number in self._mappings:
                    raise ProtocolError(f"slab {number} is offered twice")
                fits = sum(mapping.size for mapping in self._mappings.values()) + size <= self._pool.bound
            if fd is not None and fits:
                check_memory(fd, size)
                mapping = Mapping(fd, size)
                with self._pool.lock:
                    if not self._closed:  # else nobody would ever let it go
                        self._mappings[number] = mapping
                        self._unused.add(number)
                        accepted = True
        except (OSError, MemoryError) as error:
            _log.info("no memory is shared with %s: %s", self._link.peer, error)
        finally:
            if fd is not None:
                os.close(fd)
        self._link.send(Kind.SLAB_REPLY, pack_slab_reply(number, accepted), 0, 0, 0)

    def region(self, slab: int, offset: int, size: int, number: int) -> memoryview:
        """The memory of a region, which is given back when nothing refers to it any more."""
        with self._pool.lock:
            mapping = self._mappings.get(slab)
            if mapping is None:
                raise ProtocolError(f"a message lies in slab {slab}, which was not offered")
            if number in self._alive or not number:
                raise ProtocolError(f"a message lies in region {number}, which was lent before")
            taken = rounded_size(size)
            if offset < 0 or offset % 16 or size < 1 or offset + taken > mapping.size:
                raise ProtocolError(f"a message of {size:,} bytes at {offset:,} in a slab of {mapping.size:,}")
            block = mapping.block(offset, taken)
            borrowed = _Borrowed(block, self.dead.append)
            borrowed.number, borrowed.kept = number, False
            self._alive[number] = borrowed
            first = slab in self._unused
            self._unused.discard(slab)
        if first:
            self._pool.taken_up()
        return view_of(block)[:size]

    def forget(self, body: bytes | bytearray | memoryview) -> None:
        """The peer will use a slab no longer."""
        number = unpack_slab_unmap(body)
        with self._pool.lock:
            if self._mappings.pop(number, None) is None:
                raise ProtocolError(f"slab {number} is to be forgotten, and is not known")

    def due(self, most: int) -> list[int]:
        """Up to `most` numbers of regions that go back now."""
        numbers: list[int] = []
        with self._pool.lock, suppress(IndexError):
            while len(numbers) < most:
                borrowed = self.dead.popleft()
                if self._alive.pop(borrowed.number, None) is not None and not borrowed.kept:
                    numbers.append(borrowed.number)
        return numbers

    def keep_all(self) -> None:
        """Give back nothing of what is used now: a child of a fork may look at it. Called with the lock held."""
        for borrowed in self._alive.values():
            borrowed.kept = True

    def close(self) -> None:
        """The connection is gone; what tensors use stays as long as they do."""
        with self._pool.lock:
            self._closed = True
            self._mappings.clear()
            self._alive.clear()
        self.dead.clear()


class SharedMemory:
    """Both directions of one connection."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._link = link
        self._lender = Lender(pool, link)
        self._borrower = Borrower(pool, link)
        self.take = self._lender.take
        self.hand_over = self._lender.hand_over
        self.region = self._borrower.region
        self.dead = self._borrower.dead
        """What is due back to the peer; `riding` and `give_back` take from it."""

    def riding(self) -> tuple[int, int]:
        """What the header of the next frame gives back, in the place of acks."""
        first, second, *_ = (*self._borrower.due(_RIDING), 0, 0)
        return (first, second)

    def came_back(self, first: int, second: int) -> None:
        """The header of a frame gave these back."""
        for number in (first, second):
            if number:
                self._lender.returned(number)

    def give_back(self, at_least: int = _RIDING + 1) -> None:
        """Give back what is due, with a frame of its own, if it is more than the next frame will carry."""
        if len(self.dead) >= at_least:
            numbers = self._borrower.due(len(self.dead))
            if numbers:
                self._link.send(Kind.REGION_FREE, pack_region_free(numbers), 0, 0, 0)

    def heard(self, kind: int, body: bytes | bytearray | memoryview) -> None:
        """Take a frame about slabs."""
        if kind == Kind.SLAB_OFFER:
            self._borrower.offered(body)
        elif kind == Kind.SLAB_REPLY:
            self._lender.answered(body)
        elif kind == Kind.REGION_FREE:
            for number in unpack_region_free(body):
                self._lender.returned(number)
        else:
            self._borrower.forget(body)

    def close(self) -> None:
        """The connection is gone."""
        self._lender.close()
        self._borrower.close()


def _keep_for_children(pool: SlabPool) -> None:
    """A region that the child of a fork can see must not change under it, so this process never gives it back."""
    reference = weakref.ref(pool)

    def before() -> None:
        kept = reference()
        if kept is not None:
            kept.lock.acquire()
            for borrower in kept.borrowers:
                borrower.keep_all()

    def after() -> None:
        kept = reference()
        if kept is not None:
            kept.lock.release()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)
