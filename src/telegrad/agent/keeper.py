"""Where references meet calls: what an agent asks of whoever keeps the references that travel in its messages.

The agent knows nothing of ownership. `telegrad.rpc` gives it a keeper; without one, references cannot be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from telegrad.wire.messages import Creation, ForkInfo
from telegrad.wire.payload import Reference

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

    def close(self) -> None:
        """The agent is shutting down."""
