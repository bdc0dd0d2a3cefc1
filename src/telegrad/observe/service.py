"""Lets the members of the group look at this worker, if its settings allow that.

A request is answered by an urgent task: also when all functions that may run at once do, or are blocked.
"""

from __future__ import annotations

import logging

import msgspec

from telegrad.agent.agent import Agent
from telegrad.calls.pipeline import pack_head
from telegrad.connection.channel import Channel
from telegrad.errors import TelegradError
from telegrad.observe.describe import describe
from telegrad.observe.explain import Explainer
from telegrad.observe.model import ViewRequest, decode_request
from telegrad.observe.remote_observers import RemoteObservers
from telegrad.wire.frames import Message
from telegrad.wire.messages import ObserveReq, ObserveResp

_log = logging.getLogger("telegrad")

GROUP, LOCAL, OFF = "group", "local", "off"
_LARGEST = 64 << 20
"""Bytes of a view. A larger one is sent without its events, nodes and stacks."""


def allowed(agent: Agent) -> str:
    """Return who may look at a worker: ``group``, ``local`` or ``off``."""
    return agent.settings.observe or (LOCAL if agent.registry is not None else GROUP)


def encoded_view(agent: Agent, request: ViewRequest) -> bytes:
    """Return the view of a worker as bytes."""
    view = describe(agent, request)
    data = msgspec.msgpack.encode(view)
    if len(data) > _LARGEST:
        data = msgspec.msgpack.encode(describe(agent, ViewRequest(contexts=False)))
    return data


class Observation:
    """Answers the members of the group. Make it before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.explainer = Explainer(agent)
        agent.handle(ObserveReq, self._on_request, urgent=True)
        if allowed(agent) == GROUP:
            RemoteObservers(agent)

    def _on_request(self, channel: Channel, head: ObserveReq, message: Message) -> None:
        refusal, data, name = "", b"", self._agent.me.name
        if allowed(self._agent) != GROUP:
            refusal = f"worker {name!r} does not let other workers look at it: set observe='group' in its options"
        else:
            try:
                data = encoded_view(self._agent, decode_request(message.data))
            except msgspec.MsgspecError as error:
                refusal = f"worker {name!r} cannot read the request: {error}"
            except Exception as error:  # noqa: BLE001 - a bug of ours must not leave the observer waiting
                _log.exception("worker %r cannot describe itself", name)
                refusal = f"worker {name!r} failed to describe itself: {error!r}"
        try:
            channel.post(pack_head(channel, ObserveResp(head.call, refusal), data))
        except TelegradError as error:  # the observer is gone
            _log.debug("worker %r asked for a view and is gone: %s", channel.peer, error)
