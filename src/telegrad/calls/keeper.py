"""Where references meet calls: what an agent asks of whoever keeps the references that travel in its messages.

The agent knows nothing of ownership. `telegrad.rpc` gives it a keeper; without one, references cannot be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from telegrad.wire.messages import Creation, ForkInfo, StreamPosition
from telegrad.wire.reference import Reference


class Traffic(NamedTuple):
    """How busy a keeper is: see `Shutdown`."""

    pending: bool
    """Whether it is about to send."""
    sent: dict[int, int]
    """How many messages ever, by the worker that they were for."""
    received: dict[int, int]
    """The same, by the worker that they were from, when all that follows from them has been sent."""


Placed = tuple[int, Reference]
"""A reference and its position in a message."""


class Keeper(Protocol):
    """Keeps the books of references."""

    def outgoing(self, to: int, references: Sequence[Placed]) -> tuple[ForkInfo, ...]:
        """A message with these references is about to leave for worker `to`."""

    def not_sent(self, to: int, forks: Sequence[ForkInfo]) -> None:
        """It did not leave."""

    def incoming(self, sender: int, forks: Sequence[ForkInfo]) -> list[Placed]:
        """A message brought these. Whoever drops the result drops the references."""

    def when_confirmed(self, references: Sequence[Placed], action: Callable[[], None]) -> bool:
        """Whether the owners know of all of them; if not, `action` is called when they do, or are lost."""

    def creating(self, creation: Creation, caller: int) -> None:
        """A call came whose result stays here."""

    def computed(self, creation: Creation, value: object, error: BaseException | None) -> None:
        """It has ended."""

    def not_in_turn(self, turn: StreamPosition, caller: int) -> None:
        """A call of an ordered object was answered before it could take its turn."""

    def held(self) -> list[str]:
        """What is kept here for others, and what of others is held here, for people."""

    def traffic(self) -> Traffic:
        """What would show that the books of the group still change."""

    def close(self) -> None:
        """The agent is shutting down."""
