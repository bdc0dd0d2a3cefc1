"""Where autograd meets calls: what an agent asks of whoever records the tensors that it sends and receives.

The agent knows nothing of gradients. `telegrad.autograd` gives it a recorder; without one, tensors travel as values.
"""

from __future__ import annotations

from typing import Any, Protocol

from telegrad.connection.worker_record import WorkerRecord
from telegrad.wire.messages import AutogradMetadata
from telegrad.wire.payload import Encoded

Scope = Any
"""What a call is made or served in: a context of the recorder's."""


class Recorder(Protocol):
    """Attaches autograd to messages."""

    def scope(self) -> Scope | None:
        """What the current thread or task works in; None: nothing is to be recorded."""

    def outgoing(
        self, scope: Scope | None, peer: WorkerRecord, encoded: Encoded, *, request: bool
    ) -> AutogradMetadata | None:
        """A call or a reply leaves for `peer`. The tensors have been collected, and none has left yet."""

    def not_sent(self, peer: WorkerRecord, metadata: AutogradMetadata) -> None:
        """A call for which `outgoing` returned this did not leave."""

    def incoming(self, peer: WorkerRecord, metadata: AutogradMetadata, attachments: list[Any]) -> list[Any]:
        """The attachments of a call or a reply from `peer`, with edges where they need them."""

    def enter(self, metadata: AutogradMetadata, peer: WorkerRecord) -> tuple[Scope, object]:
        """Begin to serve a call that was made in a scope; the second value is for `leave`."""

    def lost(self, scope: Scope, peer: WorkerRecord) -> None:
        """`enter` returned the scope for a call of a worker that is lost."""

    def leave(self, token: object) -> None:
        """The function has returned (its answer may come later)."""

    def answered(self, scope: Scope, peer: WorkerRecord) -> None:
        """A call that `peer` made in a scope has been answered."""
