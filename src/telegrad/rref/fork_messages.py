"""Handles the messages of other workers about forks: requests, acceptances and deletions.

`telegrad.protocol.ownership` decides what they mean. In registered mode, `telegrad.rref.authorization` decides first
whether their sender may say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from telegrad.connection.channel import Channel
from telegrad.errors import LimitExceeded
from telegrad.protocol.ownership_effects import AcceptFork, OwnershipEffect
from telegrad.rref.authorization import is_permitted
from telegrad.rref.context import RRefContext
from telegrad.rref.ids import describe
from telegrad.rref.owner import OwnerValue
from telegrad.wire.frames import Message
from telegrad.wire.messages import RRefChildAccept, RRefForkAccept, RRefForkRequest, RRefUserDelete

_log = logging.getLogger("telegrad")


class ForkMessages:
    """The handlers of one agent. Its rules are called with the lock of the `RRefContext` held."""

    def __init__(self, context: RRefContext) -> None:
        self.context = context
        self._rules = rules = context.rules
        self._handle(RRefForkRequest, self._fork_requested)
        self._handle(RRefForkAccept, lambda _, head: rules.fork_accepted(head.fork, refused=head.refused))
        self._handle(RRefChildAccept, lambda _, head: rules.child_accepted(head.fork))
        self._handle(RRefUserDelete, self._fork_deleted)

    def _handle(self, kind: type, rule: Callable[[Channel, Any], list[OwnershipEffect]]) -> None:
        context = self.context

        def handle(channel: Channel, head: Any, message: Message) -> None:
            sender = channel.worker.id
            with context.lock:
                if channel.session.state.is_over:
                    return  # the sender is lost, and may have been restarted
                if context.strict and sender != context.me and not is_permitted(self._rules, sender, head):
                    refused = isinstance(head, RRefForkRequest)
                    effects: list[OwnershipEffect] = [AcceptFork(sender, head.fork, True)] if refused else []
                else:
                    effects = rule(channel, head)
            context.perform(effects)
            context.count_received(sender)

        context.agent.handle(kind, handle, urgent=True)

    def _fork_requested(self, channel: Channel, head: RRefForkRequest) -> list[OwnershipEffect]:
        context, sender = self.context, channel.worker.id
        try:
            context.check_references(sender, channel.account)
        except LimitExceeded as error:
            _log.info("refused a fork of %s: %s", describe(head.rref), error)
            return self._rules.fork_refused(sender, head.rref, head.fork)
        effects = self._rules.fork_requested(sender, head.rref, head.fork)
        if self._rules.owns(head.rref):
            context.values.setdefault(head.rref, OwnerValue())
        return effects

    def _fork_deleted(self, channel: Channel, head: RRefUserDelete) -> list[OwnershipEffect]:
        sender = channel.worker.id
        if channel.account is not None and self._rules.is_pending(head.rref):
            try:
                channel.account.check_count("references", self._rules.early_deletions(sender) + 1)
            except LimitExceeded as error:  # the fork that it deletes, if it ever comes, counts for its sender
                _log.info("ignored an early deletion of %s: %s", describe(head.rref), error)
                return []
        effects = self._rules.fork_deleted(sender, head.rref, head.fork)
        self.context.forget_unexpected(head.rref)
        return effects
