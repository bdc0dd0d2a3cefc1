"""Answers calls that are not run: they exceed a limit of their caller, or this worker cannot take them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from telegrad.calls.call import Served
from telegrad.calls.extension import IncomingMessage
from telegrad.calls.replier import Replier
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.errors import LimitExceeded, ProtocolError, TelegradError
from telegrad.wire.messages import Request

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_log = logging.getLogger("telegrad")


class Refusals:
    """Refuses calls of other workers."""

    def __init__(self, agent: Agent, local: LocalWorker, replier: Replier) -> None:
        self._agent = agent
        self._local = local
        self._replier = replier

    def reject(self, channel: Channel, call: int, error: Exception) -> None:
        """Answer a request that exceeds a limit. It was never taken, so a call with the same number is not affected."""
        served = Served(self._agent, channel, call, channel.worker, "", self._local.runtime.now(), None, 0)
        try:
            channel.post(self._replier.pack_failure(served, error.with_traceback(None)))
        except TelegradError as failure:  # the caller is gone
            _log.debug("the refusal of call %d of worker %r cannot be delivered: %s", call, channel.peer, failure)

    def cannot_take(self, channel: Channel, call: int, error: Exception) -> None:
        """Answer a request that this worker cannot take, or began to take."""
        active = self._replier.active
        served = active.get((channel, call))
        if served is None:
            served = Served(self._agent, channel, call, channel.worker, "", self._local.runtime.now(), None, 0)
            active[channel, call] = served
        self._replier.answer(served, None, error)

    def exceeded(self, served: Served, error: LimitExceeded) -> None:
        """Answer a call that was taken and exceeds a limit, before its function has run."""
        self._replier.answer(served, None, error)
        account = served.channel.account
        reason = account.count_refusal(error) if account is not None else ""
        if reason:
            served.channel.give_up(reason)

    def check(self, served: Served, request: Request, arrived: IncomingMessage) -> bool:
        """Check the references of a request. Returns False if it was refused."""
        account = served.channel.account
        if account is None:
            return True
        try:
            for extension in served.extensions:
                extension.check(arrived, account)
            return True
        except LimitExceeded as error:
            excess = error
        arrived.autograd, arrived.account = request.autograd, account
        try:
            for extension in served.extensions:  # its place in an order of calls is skipped when it is answered
                extension.refused(arrived)
        except ProtocolError as error:
            self._replier.answer(served, None, error)
        else:
            self.exceeded(served, excess)
        return False
