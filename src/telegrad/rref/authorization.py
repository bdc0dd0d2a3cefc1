"""Who may use and share a reference in registered mode, where workers do not trust each other.

1. Only a worker that holds a reference may use its value: the owner sent it the reference, or it created the value.
2. A reference is sent only to or by its owner. So the owner decides who holds it, and needs nobody's word for that.
3. A message about a fork counts only if it comes from the worker that the fork is about.

In the other mode every worker may run any code on the owner, and none of this is checked.
"""

from __future__ import annotations

from typing import Any

from telegrad.errors import PayloadError, ProtocolError
from telegrad.protocol.ownership import Ownership
from telegrad.wire.messages import Creation, ForkInfo, RRefChildAccept, RRefForkAccept, RRefUserDelete


def is_permitted(rules: Ownership, sender: int, head: Any) -> bool:
    """Return whether a message about a fork may come from `sender` (rule 3).

    Not an RRefForkRequest: by rule 2 there is nobody who would have to send one.
    """
    if isinstance(head, RRefForkAccept):
        return rules.owner_of(head.fork) == sender
    if isinstance(head, RRefChildAccept):
        return rules.receiver_of(head.fork) == sender
    if isinstance(head, RRefUserDelete):
        if rules.owns(head.rref):
            return rules.holders_of(head.rref).get(head.fork) == sender
        return head.rref[0] == sender == head.fork[0]  # it may overtake the call that creates the value
    return False


def check_sent(owner: int, me: int, to: int, handle: object) -> None:
    """Raise unless a reference may be sent to `to` (rule 2)."""
    if owner not in (me, to):
        raise PayloadError(
            f"{handle!r} cannot be sent in registered mode: a reference is sent only to or by the worker that owns its "
            "value. Ask that worker to send it"
        )


def check_received(rules: Ownership, me: int, sender: int, fork: ForkInfo) -> None:
    """Raise unless `sender` may send this reference (rules 1 and 2)."""
    if sender == me:
        return
    if fork.owner == me:
        known = sender in rules.holders_of(fork.rref).values() or (
            fork.rref[0] == sender and rules.is_pending(fork.rref)
        )
    else:
        known = fork.owner == sender == fork.fork[0] and rules.owner_of(fork.fork) is None
    if not known:
        raise ProtocolError(f"worker number {sender} sent a reference that it does not hold")


def check_creation(rules: Ownership, caller: int, creation: Creation) -> None:
    """Raise unless `caller` may create a value under this id, which is its own: it has not been used."""
    if creation.fork[0] != caller or not rules.is_pending(creation.rref):
        raise ProtocolError(f"worker number {caller} creates a value under an id that was used before")
