"""Replies to the calls that this worker serves: with what the function returned, or with what it raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.calls.call import Served
from telegrad.calls.exceptions import explain, traceback_of
from telegrad.calls.extension import OutgoingMessage
from telegrad.calls.pipeline import Frames, Pipeline, pack_head
from telegrad.calls.service_names import GATHER
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.errors import FunctionNotFound, LimitExceeded, TelegradError
from telegrad.events import SERVE, Entry
from telegrad.execution import event_loop
from telegrad.wire.messages import Failure, Reply

_log = logging.getLogger("telegrad")

_SERVERS = ("telegrad.calls.server", "telegrad.calls.pipeline", __name__, event_loop.__name__)
"""Modules whose frames a traceback of a user's function does not begin with."""


_SHOWN = 200
"""Characters of a function's name in the log, and in the event of a call that failed."""


class Replier:
    """The calls that this worker has not answered, and how it answers them."""

    def __init__(self, local: LocalWorker, pipeline: Pipeline) -> None:
        self._local = local
        self._events = local.events
        self._pipeline = pipeline
        self._encode = pipeline.encode
        self._lock = threading.Lock()  # protects the two below, `active` only where they must agree
        self._leaving: set[Served] = set()  # those whose replies are being made and sent
        self.active: dict[tuple[Channel, int], Served] = {}
        """The calls that have arrived and are not answered, also those that wait for a thread."""
        self._now = local.runtime.now
        self.answered = 0
        """How many calls were answered, without collectives. Protected by the lock."""

    def unanswered(self) -> list[Served]:
        """Return the calls whose replies have not left."""
        with self._lock:
            return [*list(self.active.values()), *list(self._leaving)]

    def answer(self, served: Served, value: object, error: BaseException | None) -> None:
        """Reply to a call, unless that has been done."""
        channel = served.channel
        if served.on_result is not None:
            value = served.on_result(value, error)
            served.owns_result = False  # it may have been stored
        with self._lock:
            if self.active.pop((channel, served.id), None) is None:
                return  # answered already
            self._leaving.add(served)
            if served.function != GATHER:  # collectives are not in `Client.made` either
                self.answered += 1
        served.answered = True
        if error is not None:
            served.outcome = type(error).__name__
            served.function = served.function[:_SHOWN]  # it is recorded, and may be any text of the caller's
        computed = self._now()
        served.on_cancel = served.coroutine = None  # the coroutine refers to its result
        if error is None and channel.account is not None:
            try:
                channel.account.check_unread(channel.unread())
            except LimitExceeded as excess:
                error, served.outcome = excess, type(excess).__name__
        message: OutgoingMessage | None = None
        size = 0
        try:
            try:
                if error is None:
                    main = self._local.me.main
                    by_name = bool(main) and channel.worker.main == main
                    context = served.context
                    encoded = self._encode(value, main_by_name=by_name, root="result", edges=context is not None)
                    if not encoded.attachments and not encoded.references:
                        context = None  # nothing of it is recorded
                    placement = channel.placements.for_reply(served.devices) if served.devices else None
                    head: Callable[..., Any] = partial(Reply, served.id)
                    if (on_head := served.on_head) is not None:
                        head = partial(_changed, on_head, head)
                    frames, message = self._pipeline.pack(
                        channel, encoded, head, (), context, placement=placement, owned=served.owns_result
                    )
                else:
                    frames = self.pack_failure(served, error)
            except BaseException as failure:  # noqa: BLE001 - whatever pickling raises belongs to the caller
                served.outcome = type(failure).__name__
                frames = self.pack_failure(served, failure)
            if served.charge:
                with channel.lock:
                    channel.credits.complete(served.charge)
            if served.held is not None:
                served.held.release()
            size = channel.post(frames) or 0
        except TelegradError as failure:  # the caller is gone, and perhaps replaced by one that must not get anything
            self._pipeline.unsent(message)
            _log.debug("the reply to %s of worker %r cannot be delivered: %s", served.function, served.caller, failure)
        finally:
            self._leaving.discard(served)
            ring = self._events
            if ring.on:
                append, now = ring.append, self._now  # looked up first: see `EventRing`
                try:
                    append(
                        (
                            next(ring.numbers),
                            _whole,
                            served.started,
                            now(),
                            served.id,
                            channel.peer,
                            served.function,
                            served.autograd,
                            served.outcome,
                            size,
                            served.received,
                            served.thread,
                            served.running,
                            computed,
                        )
                    )
                except MemoryError:
                    _log.debug("no memory to record the call of %s", served.function)
            if served.held is not None:
                served.held.release()
            for extension in served.extensions:
                try:
                    extension.answered(served)
                except Exception:  # noqa: BLE001 - a bug in telegrad, and the other extensions must hear of it
                    _log.exception("an extension failed after the reply to %s", served.function)
            if (on_idle := self._local.on_idle) is not None:  # it may be removed now
                on_idle()

    def pack_failure(self, served: Served, error: BaseException) -> Frames:
        explain(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in _SERVERS:
            trace = trace.tb_next
        codec = self._pipeline.exceptions
        text = ""
        if codec.tracebacks:
            text = traceback_of(error, trace)
        elif _log.isEnabledFor(logging.INFO):
            what = served.function[:_SHOWN]  # as the caller named it
            _log.info("%r, called by worker %r, raised\n%s", what, served.caller, traceback_of(error, trace))
        encoded = codec.encode(error)
        not_found = isinstance(error, FunctionNotFound)

        def make_head(descriptors: Any, *_: Any) -> Any:
            head = Failure(served.id, encoded.type_name, encoded.text, text, not_found, descriptors)
            return head if served.on_head is None else served.on_head(head)

        try:
            channel = served.channel
            placement = channel.placements.for_reply(served.devices) if served.devices else None
            return self._pipeline.pack(channel, encoded.value, make_head, placement=placement)[0]
        except Exception as failure:  # noqa: BLE001 - then the caller gets a RemoteError with the text
            _log.debug("%s cannot be sent: %s", encoded.type_name, failure)
            return pack_head(served.channel, make_head(()))


def _whole(entry: Entry) -> Entry:
    """Return the event of a call with all fields."""
    autograd = entry[7]
    return (entry[0], SERVE, *entry[2:7], 0 if autograd is None else autograd.context, 0, None, *entry[8:])


def _changed(on_head: Callable[[Any], Any], make_head: Callable[..., Any], *fields: Any) -> Any:
    """Make a head, and have an extension change it."""
    return on_head(make_head(*fields))
