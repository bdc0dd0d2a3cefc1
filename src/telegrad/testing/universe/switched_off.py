"""Switches off one rule of the protocol, to show that universes notice. Nothing in telegrad itself knows of this.

>>> with switched_off("duplicate-drop"):
...     pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from msgspec.structs import replace

from telegrad.backward import island_engine
from telegrad.connection.handshake import Opener
from telegrad.protocol.backward import BackwardPass
from telegrad.protocol.lanes import Lanes
from telegrad.protocol.membership import Membership
from telegrad.protocol.ownership import Ownership
from telegrad.protocol.ownership_effects import DeleteFork
from telegrad.protocol.session_events import Disposition
from telegrad.protocol.termination import Termination
from telegrad.wire.handshake_messages import Challenge

Patch = tuple[Any, str, Callable[..., Any]]
"""What to replace: the name of a member, of a class or module, and by what."""


def _deliver_duplicates(self: Lanes, *args: Any, **kwargs: Any) -> Disposition:
    disposition = _received(self, *args, **kwargs)
    return Disposition.DELIVER if disposition is Disposition.DUPLICATE else disposition


def _resend_nothing(self: Lanes) -> list[tuple[int, int, object]]:
    _retransmissions(self)
    return []


def _acknowledge_at_once(self: Termination[Any], ticket: Any, sender: Any = None) -> list[Any]:
    """Acknowledge the message that engages a worker, too, before the worker has acted on it."""
    tickets = _flow_received(self, ticket, sender)
    if ticket is None or tickets:
        return tickets
    self._parent = None
    return [ticket]


def _drop_at_once(self: Ownership, fork: Any, held: Any) -> list[Any]:
    """Delete a fork although the owner may not know the forks that were made from it."""
    for child in held.children:
        self._parents.pop(child, None)
    del self._held[fork]
    return [] if held.void else [DeleteFork(held.owner, held.rref, fork)]


def _any_incarnation(self: Opener, challenge: Challenge) -> None:
    """Take whoever listens at the address of a worker for the incarnation that is wanted."""
    _check_target(self, replace(challenge, incarnation=self._target.incarnation))


def _reversed_gates(waits: Sequence[Any]) -> Any:
    return _chain_gates(list(waits)[::-1])


_received = Lanes.received
_retransmissions = Lanes._retransmissions
_flow_received = Termination.received
_check_target = Opener._check_target
_chain_gates = island_engine.chain_gates

RULES: dict[str, list[Patch]] = {
    "duplicate-drop": [(Lanes, "received", _deliver_duplicates)],
    "resend": [(Lanes, "_retransmissions", _resend_nothing)],
    "ack-rule": [(Termination, "received", _acknowledge_at_once)],
    "probe": [(BackwardPass, "partly_fed", lambda self: False)],
    "gate-order": [(island_engine, "chain_gates", _reversed_gates)],
    "reference-confirm": [(Ownership, "_delete", _drop_at_once)],
    "incarnation-check": [(Opener, "_check_target", _any_incarnation)],
    "membership-quorum": [(Membership, "is_quorum", lambda self, newcomer, voters: True)],
}
"""By name: the rules that can be switched off, and how."""


@contextmanager
def switched_off(rule: str | None) -> Iterator[None]:
    """Switch off a rule; None: no rule."""
    with ExitStack() as stack:
        for owner, name, other in RULES[rule] if rule is not None else ():
            stack.enter_context(mock.patch.object(owner, name, other))
        yield
