"""The turns of the calls that this worker makes on ordered objects: see `telegrad.rref.ordered` for their other end."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

from telegrad.errors import ReferenceGone
from telegrad.protocol.ownership import LIFE, Ref
from telegrad.rref.owner import show
from telegrad.wire.messages import StreamPosition


@dataclass(slots=True)
class _Stream:
    number: int
    next_call: int = 0
    handles: int = 0


class Streams:
    """One stream for each ordered object that has a reference here: all of them share it, and so keep their order."""

    def __init__(self, life: int) -> None:
        self._lock = threading.Lock()  # protects the two below
        self._numbers = itertools.count(life << LIFE)  # the mark of this life tells the owner what ends with it
        self._streams: dict[tuple[int, Ref], _Stream] = {}

    def opened(self, owner: int, rref: Ref) -> None:
        """There is another handle here."""
        with self._lock:
            stream = self._streams.get((owner, rref))
            if stream is None:
                stream = self._streams[owner, rref] = _Stream(next(self._numbers))
            stream.handles += 1

    def next_turn(self, owner: int, rref: Ref) -> StreamPosition:
        """The turn of the next call."""
        with self._lock:
            stream = self._streams.get((owner, rref))
            if stream is None:  # another thread released the handle meanwhile
                raise ReferenceGone(f"{show(rref)} was released, and cannot be used any more")
            stream.next_call += 1
            return StreamPosition(rref, stream.number, stream.next_call - 1)

    def closed(self, owner: int, rref: Ref) -> StreamPosition | None:
        """A handle is gone. The turn at which the stream ends, if it was the last and calls were made."""
        with self._lock:
            stream = self._streams[owner, rref]
            stream.handles -= 1
            if stream.handles:
                return None
            del self._streams[owner, rref]
            return StreamPosition(rref, stream.number, stream.next_call) if stream.next_call else None

    def count(self) -> int:
        """How many streams there are."""
        return len(self._streams)
