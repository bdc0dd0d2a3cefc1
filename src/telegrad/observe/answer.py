"""Answers observers that are not members, whichever way they have come."""

from __future__ import annotations

import logging
import os

import msgspec

from telegrad.agent.agent import Agent
from telegrad.observe.attach_protocol import (
    MOST_ANSWER,
    MOST_TIMEOUT,
    AttachAnswer,
    AttachRequest,
    Identity,
    decode_attach_request,
    encode,
)
from telegrad.observe.gather import gather

_log = logging.getLogger("telegrad")


def answer(agent: Agent, data: bytes | bytearray | memoryview) -> bytes:
    """Return the answer to a request. Never raises: what goes wrong is the answer."""
    try:
        reply = _answer(agent, decode_attach_request(data))
        encoded = encode(reply)
    except msgspec.MsgspecError as error:
        return encode(AttachAnswer(f"worker {agent.me.name!r} cannot read the request: {error}"))
    except Exception as error:  # noqa: BLE001 - the observer gets it
        _log.exception("worker %r cannot answer an observer", agent.me.name)
        return encode(AttachAnswer(f"worker {agent.me.name!r} failed to answer: {error!r}"))
    if len(encoded) > MOST_ANSWER:
        text = f"the view of the group has {len(encoded):,} bytes, more than {MOST_ANSWER:,}: ask for fewer events"
        return encode(AttachAnswer(text))
    return encoded


def _answer(agent: Agent, request: AttachRequest) -> AttachAnswer:
    me = agent.me
    if request.who:
        group = {member.identity.name: member.identity.incarnation for member in agent.peers.members.all()}
        now = agent.runtime.now()
        return AttachAnswer(identity=Identity(me.name, me.id, me.incarnation, os.getpid(), now, me.addresses, group))
    timeout = min(max(0.1, request.timeout), MOST_TIMEOUT)
    view = gather(agent, request.view, since=request.since, timeout=timeout, clocks=request.clocks, only=request.only)
    return AttachAnswer(group=view)
