"""The workers of the group as objects, by name, id and place, made when somebody looks for them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

from telegrad.connection.channel import Channel
from telegrad.connection.connector import Opening
from telegrad.connection.packed_group import PackedGroup
from telegrad.connection.worker_record import WorkerRecord
from telegrad.waiting import Event


class Peer:
    """One incarnation of a worker. This worker is its own peer, too, since it can call itself."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.gone = ""
        """Why the worker can no longer be called. Empty while it can."""
        self.left = False
        """Whether the worker is gone after an orderly shutdown."""
        self.failed_at: float | None = None
        """When the worker was lost, or ended with an error; None if neither has happened."""
        self.told: Event | None = None
        """Set when everybody in this process has heard that the worker is gone; None if nobody has to."""
        self.dying_until = 0.0
        """If the worker was lost: until when its process may still be exiting, and listening."""
        self.lock = threading.Lock()  # protects outgoing, incoming, opening, last_attempt, gone and told
        self.outgoing: Channel | None = None
        self.incoming: Channel | None = None
        self.opening: Opening | None = None
        self.last_attempt = 0
        """The number of the last connection that the worker opened to this one (`Hello.attempt`)."""

    def channels(self) -> list[Channel]:
        """Return the channels that exist."""
        return [channel for channel in (self.outgoing, self.incoming) if channel is not None]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent to and received from the worker."""
        channels = self.channels()
        return sum(channel.sent for channel in channels), sum(channel.receiver.received for channel in channels)


class PeerTable:
    """The workers of a group.

    In a `PackedGroup`, those that were looked for, connected to or lost are *used*. The others are alive, without
    connections, and as the group was formed with them. So they need no object, unless somebody lists all.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # protects all below
        self.by_name: dict[str, Peer] = {}
        """Those that are used."""
        self.by_id: dict[int, Peer] = {}
        """Those that are used."""
        self._packed: PackedGroup | None = None
        self._sorted: list[Peer] | None = None  # all, by id, once somebody has asked for them
        self._gone = ""  # why those that are not used are gone

    def fill(self, records: Iterable[WorkerRecord]) -> None:
        """Add the workers of a group."""
        with self.lock:
            self._packed = records if isinstance(records, PackedGroup) else None
            self._sorted = None
            for record in () if isinstance(records, PackedGroup) else records:
                self.add(record)

    def add(self, record: WorkerRecord) -> Peer:
        """Add a worker, in place of the incarnation before it."""
        peer = Peer(record)
        with self.lock:
            self.by_name[record.name] = self.by_id[record.id] = peer
            if self._packed is None or self._sorted is None:
                self._sorted = None
            else:  # the others stay the same objects
                self._sorted = [*self._sorted[: record.id], peer, *self._sorted[record.id + 1 :]]
        return peer

    def use(self, peer: Peer) -> None:
        """Note that a worker of `all` is about to be connected to, or is lost."""
        if peer.record.id not in self.by_id:  # else it is the one there, or was replaced by it
            with self.lock:
                self.by_id.setdefault(peer.record.id, peer)
                self.by_name.setdefault(peer.record.name, peer)

    def get(self, to: str | int) -> Peer | None:
        """Return the worker with that name or id."""
        peer = self.by_name.get(to) if isinstance(to, str) else self.by_id.get(to)
        return peer if peer is not None or self._packed is None else self._find(self._packed, to)

    def _find(self, packed: PackedGroup, to: str | int) -> Peer | None:
        with self.lock:
            place = to if isinstance(to, int) else packed.place_of(to)
            if not 0 <= place < len(packed):
                return None
            peer = self._make(packed, place)
            self.by_name[peer.record.name] = self.by_id[place] = peer
            return peer

    def _make(self, packed: PackedGroup, place: int) -> Peer:
        known = self.by_id.get(place)
        if known is None and self._sorted is not None:
            known = self._sorted[place]
        if known is not None:
            return known
        peer = Peer(packed[place])
        peer.gone, peer.left = self._gone, bool(self._gone)
        return peer

    def all(self) -> list[Peer]:
        """Return all workers, sorted by id. The list is not to be changed."""
        with self.lock:
            if self._sorted is None:
                if self._packed is None:
                    self._sorted = [self.by_id[worker] for worker in sorted(self.by_id)]
                else:
                    self._sorted = [self._make(self._packed, place) for place in range(len(self._packed))]
            return self._sorted

    def used(self) -> list[Peer]:
        """Return those that are used. Only they can have connections, or have been lost."""
        with self.lock:
            return list(self.by_id.values())

    def leave_others(self, reason: str) -> None:
        """Declare those that are not used gone, because this worker leaves."""
        with self.lock:
            self._gone = reason
            for peer in self._sorted or ():
                if peer.record.id not in self.by_id:
                    peer.gone, peer.left = reason, True

    def samples(self) -> list[WorkerRecord]:
        """Return the records of workers that stand for all (see `PackedGroup`), and of those that are used."""
        with self.lock:
            packed = [] if self._packed is None else self._packed.samples
            return [*packed, *(peer.record for peer in self.by_id.values())]

    # -- by place -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.by_id if self._packed is None else self._packed)

    def place_of(self, worker: int) -> int:
        """Return how many workers have a lower id."""
        # The ids of a packed group are 0 to n - 1, and it gets no others.
        return worker if self._packed is not None else bisect_left(self.all(), worker, key=lambda peer: peer.record.id)

    def at(self, place: int) -> Peer:
        """Return the worker with so many of a lower id."""
        peer = None if self._packed is None else self.get(place)
        return self.all()[place] if peer is None else peer

    def is_gone(self, place: int) -> bool:
        """Return whether the worker at a place is gone."""
        if self._packed is None:
            return bool(self.all()[place].gone)
        peer = self.by_id.get(place)
        return bool(self._gone if peer is None else peer.gone)

    def next(self, worker: int) -> Peer | None:
        """Return the worker with this id, or if there is none, with the next."""
        with self.lock:
            place = max(0, self.place_of(worker))
            return self.at(place) if place < len(self) else None
