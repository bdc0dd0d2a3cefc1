"""Shared memory of one connection, in both directions, and the frames about it."""

from __future__ import annotations

from telegrad.transport.base import Link
from telegrad.transport.slab_pool import SlabPool
from telegrad.transport.slab_receiver import SlabReceiver
from telegrad.transport.slab_sender import SlabSender
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_region_free, unpack_region_free

_RELEASES_PER_HEADER = 2


class SharedMemory:
    """Regions that this worker sends to a peer and receives from it (see `slab_pool` for the rules)."""

    def __init__(self, pool: SlabPool, link: Link) -> None:
        self._link = link
        self._sender = SlabSender(pool, link)
        self._receiver = SlabReceiver(pool, link)
        # Bound methods of the two sides, so that a message costs no delegating call.
        self.allocate = self._sender.allocate
        self.mark_sent = self._sender.mark_sent
        self.open_region = self._receiver.open_region
        self.unreferenced = self._receiver.unreferenced
        """Regions to release; `take_releases` and `send_releases` take from it."""

    def take_releases(self) -> tuple[int, int]:
        """Return the regions that the header of the next frame releases, in the fields for acks."""
        first, second, *_ = (*self._receiver.take_unreferenced(_RELEASES_PER_HEADER), 0, 0)
        return (first, second)

    def apply_releases(self, first: int, second: int) -> None:
        """Free the regions that the header of a received frame releases."""
        for number in (first, second):
            if number:
                self._sender.released(number)

    def send_releases(self, at_least: int = _RELEASES_PER_HEADER + 1) -> None:
        """Release regions with a separate frame, if there are more of them than the next header can carry."""
        if len(self.unreferenced) >= at_least:
            numbers = self._receiver.take_unreferenced(len(self.unreferenced))
            if numbers:
                self._link.send(Kind.REGION_FREE, pack_region_free(numbers), 0, 0, 0)

    def handle_frame(self, kind: int, body: bytes | bytearray | memoryview) -> None:
        """Handle a received frame about slabs."""
        if kind == Kind.SLAB_OFFER:
            self._receiver.offered(body)
        elif kind == Kind.SLAB_REPLY:
            self._sender.offer_answered(body)
        elif kind == Kind.REGION_FREE:
            for number in unpack_region_free(body):
                self._sender.released(number)
        else:
            self._receiver.forget(body)

    def close(self) -> None:
        """Drop everything: the connection is gone."""
        self._sender.close()
        self._receiver.close()
