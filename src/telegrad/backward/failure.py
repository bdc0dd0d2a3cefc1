"""Failures of a pass: what the caller of backward() gets, and how other workers learn of it."""

from __future__ import annotations

import logging

from telegrad.agent.agent import Agent
from telegrad.backward.anomaly import origin_of
from telegrad.backward.contexts import DistAutogradContext
from telegrad.calls.exceptions import RemoteTraceback, sendable, text_of, traceback_of
from telegrad.errors import BackwardError, DeadlineExceeded, TelegradError, UnknownWorker, WorkerLost
from telegrad.wire.messages import AbortPass, PassFailure, PassInfo

_log = logging.getLogger("telegrad")


class PassAborted(TelegradError):
    """Unwinds an island of a pass that has failed. The failure itself is reported by `PassRun.fail`."""


def name_of(agent: Agent, worker: int) -> str:
    """Return the name of a worker, or its number if there is none with that id: a peer may have made it up."""
    try:
        return agent.peers.find(worker).record.name
    except UnknownWorker:
        return f"number {worker}"


def deadline_exceeded(agent: Agent, info: PassInfo, unanswered: int) -> DeadlineExceeded:
    """Return the error of a pass that did not end in time."""
    messages = "1 message" if unanswered == 1 else f"{unanswered} messages"
    return DeadlineExceeded(
        f"the backward pass of context {info.context:#x} did not end before its deadline; {messages} of worker "
        f"{agent.me.name!r} {'is' if unanswered == 1 else 'are'} not answered",
        worker=agent.me.name,
        context=info.context,
    )


def as_failure(agent: Agent, error: BaseException, worker: int | None) -> Exception:
    """Return the exception that the caller of backward() gets for an error on `worker` (None: on this one)."""
    if isinstance(error, WorkerLost | DeadlineExceeded | BackwardError):
        return error
    worker = agent.me.id if worker is None else worker
    name = name_of(agent, worker)
    text = f"Error on Node {worker}: {text_of(error)}\n(worker {name!r}, {type(error).__name__})"
    origin = origin_of(error)
    if origin and agent.pipeline.exceptions.tracebacks:
        text = f"{text}\n{sendable(origin)}"
    elif origin:
        _log.info("a backward pass failed. %s", origin)
    failure = BackwardError(text, worker=name)
    failure.__cause__ = error
    return failure


def broadcast(agent: Agent, context: DistAutogradContext, info: PassInfo, failure: Exception) -> None:
    """Send a failure to every worker that this one exchanges messages with in the context."""
    packed, data = pack_failure(agent, failure)
    head = AbortPass(info, packed)
    others = context.workers() | {info.number >> 48}
    for worker in sorted(others - {agent.me.id}):
        agent.tell(worker, head, data)


def pack_failure(agent: Agent, failure: Exception) -> tuple[PassFailure, bytes]:
    """Return a failure for the wire: its text, and the encoded exception if it can be sent."""
    cause, codec = failure.__cause__, agent.pipeline.exceptions
    text = ""
    if isinstance(cause, Exception):
        if codec.tracebacks:
            text = traceback_of(cause, cause.__traceback__)
        elif _log.isEnabledFor(logging.INFO):
            _log.info("a backward pass failed\n%s", traceback_of(cause, cause.__traceback__))
    encoded = codec.encode(failure)
    data = b"" if encoded.value.attachments else encoded.value.data  # tensors do not travel with a failure
    return PassFailure(agent.me.id, encoded.text, text), data


def unpack_failure(agent: Agent, packed: PassFailure, data: memoryview) -> Exception:
    """Return the failure that another worker reported."""
    failure, reason = agent.pipeline.exceptions.decode(data)
    if data and failure is None:
        _log.debug("cannot decode the error of a pass: %s", reason)
    name = name_of(agent, packed.worker)
    if not isinstance(failure, TelegradError):
        failure = BackwardError(packed.text, worker=name)
    if packed.traceback:
        failure.__cause__ = RemoteTraceback(name, packed.traceback)
    return failure
