"""What a worker knows of a reference whose value another worker owns."""

from __future__ import annotations

from collections.abc import Callable

from telegrad.calls.call import Call
from telegrad.errors import CallError
from telegrad.protocol.rref_ids import ForkId


class UserRRef:
    """The state of one fork of a reference on a worker that is not the owner."""

    __slots__ = ("confirmed", "creation", "creator", "error", "fork", "owner_lost", "refused", "settled", "waiters")

    def __init__(self, fork: ForkId, *, creator: bool = False) -> None:
        self.fork = fork
        self.creator = creator
        """This worker made the call that computes the value."""
        self.confirmed = False
        self.settled = False
        """Confirmed by the owner, or never going to be."""
        self.owner_lost = False
        self.refused = False
        """The owner no longer has the value, because the worker that sent us the reference was lost."""
        self.creation: Call | None = None
        """The call that computes the value, once it is over."""
        self.error: CallError | None = None
        """Why that call failed."""
        self.waiters: list[Callable[[], None]] = []
