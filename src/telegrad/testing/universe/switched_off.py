"""Switches off one rule of the protocol, to show that universes notice. Nothing in telegrad itself knows of this.

>>> with switched_off("duplicate-drop"):
...     pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from telegrad.backward import island_engine
from telegrad.backward.gates import chain_gates
from telegrad.protocol.backward import BackwardPass, IdleReport
from telegrad.protocol.lanes import Lanes
from telegrad.protocol.membership import Admission, Identity, Member, Membership, State
from telegrad.protocol.ownership import Ownership
from telegrad.protocol.ownership_effects import DeleteFork
from telegrad.protocol.session_events import Disposition
from telegrad.protocol.termination import Termination

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


def _report_nothing(self: BackwardPass[Any]) -> None:
    """Report that no island waits for gradients, whether one does or not."""
    self._number += 1
    self._reports[self.me] = IdleReport(self._number, False)


def _drop_at_once(self: Ownership, fork: Any, held: Any) -> list[Any]:
    """Delete a fork although the owner may not know the forks that were made from it."""
    for child in held.children:
        self._parents.pop(child, None)
    del self._held[fork]
    return [] if held.void else [DeleteFork(held.owner, held.rref, fork)]


def _admit_any(self: Membership, identity: Identity, now: float) -> Admission:
    """Let any incarnation take the place of any other, also an older one."""
    member = self.find(identity.name)
    if member is None or identity.name == self.me.name or member.identity.incarnation == identity.incarnation:
        return _admit(self, identity, now)
    self._members[identity.name] = Member(identity, State.ALIVE, now)
    return Admission.REPLACES


def _reversed_gates(waits: Sequence[Any]) -> Any:
    return _chain_gates(list(waits)[::-1])


_received = Lanes.received
_retransmissions = Lanes._retransmissions
_flow_received = Termination.received
_admit = Membership.admit
_chain_gates = chain_gates

RULES: dict[str, list[Patch]] = {
    "duplicate-drop": [(Lanes, "received", _deliver_duplicates)],
    "resend": [(Lanes, "_retransmissions", _resend_nothing)],
    "ack-rule": [(Termination, "received", _acknowledge_at_once)],
    "probe": [(BackwardPass, "_report", _report_nothing)],
    "gate-order": [(island_engine, "chain_gates", _reversed_gates)],
    "reference-confirm": [(Ownership, "_delete", _drop_at_once)],
    "incarnation-check": [(Membership, "admit", _admit_any)],
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
