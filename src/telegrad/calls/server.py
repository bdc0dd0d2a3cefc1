"""Runs the functions that others call here, and answers them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from telegrad.calls.call import Served, current_served
from telegrad.calls.error_texts import explain, sendable, text_of, traceback_of
from telegrad.calls.keeper import Keeper, Placed
from telegrad.calls.recorder import Recorder
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallCancelled, FunctionNotFound, TelegradError
from telegrad.execution import event_loop as coroutines
from telegrad.execution.autocast import entered
from telegrad.execution.event_loop import EventLoop, InGradMode
from telegrad.execution.executor import Executor
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Runtime
from telegrad.wire import function_names, payload
from telegrad.wire.frames import Message
from telegrad.wire.messages import AutogradMetadata, Creation, Failure, ForkInfo, Reply, Request, encode_head
from telegrad.wire.packing import pack
from telegrad.wire.tensors import RegionLayout, decode_tensors, encode_tensors

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_log = logging.getLogger("telegrad")

_is_grad_enabled = torch.is_grad_enabled
_CALLS_IT = (__name__, coroutines.__name__)
"""Modules whose lines a traceback of a user's function does not begin with."""
_EARLY = 256
"""Cancellations that are kept of calls that are not there: they may still come, or were answered."""
AT_ONCE = frozenset({torch.Tensor, type(None), bool, int, float, str, bytes, tuple, list, dict})
"""Types of results that are the answer themselves, as nearly all are."""

DEFERRED = "_telegrad_answers_later"
"""Functions with this attribute return a future; its result is the answer."""

ANY_FUTURE = torch._C.Future
"""The base class of torch's futures. Its own instances come from `torch.futures.Future.then`, `collect_all` and
`torch.jit.fork`: they are no `torch.futures.Future`."""


class ServerOwner(Protocol):
    """What serving needs of its agent."""

    runtime: Runtime
    me: WorkerRecord
    buffers: BufferPool
    recorder: Recorder | None
    keeper: Keeper | None
    executor: Executor
    draining: bool

    def as_agent(self) -> Agent:
        """The agent itself, for the functions that it runs."""

    def activity_ended(self) -> None:
        """A call was answered while a shutdown waits for quiet."""


class Server:
    """The calls that this worker serves."""

    def __init__(self, owner: ServerOwner, loop: EventLoop) -> None:
        self._owner = owner
        self._agent = owner.as_agent()
        self.loop = loop
        self._lock = threading.Lock()  # protects the three below; `active` only where it and _leaving must agree
        self._services: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._leaving: set[Served] = set()  # those whose answers are being made and sent
        self._early: dict[tuple[Channel, int], str] = {}  # cancellations that overtook a large request, perhaps
        self.active: dict[tuple[Channel, int], Served] = {}
        """The calls that have come and are not answered, also those that wait for a thread."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told of every exception that a function raised, before its caller is."""

    def register(self, name: str, function: Callable[..., Any], *, deferred: bool = False) -> None:
        """Let others call `function` as ``@name``. A deferred one gets, first, a function to answer with."""
        with self._lock:
            self._services["@" + name] = (function, deferred)

    def unanswered(self) -> list[Served]:
        """The calls whose answers have not left."""
        with self._lock:
            return [*list(self.active.values()), *list(self._leaving)]

    # -- one call ---------------------------------------------------------------------------------------------

    def take(self, channel: Channel, request: Request, message: Message) -> None:
        """A request has come: have a runner serve it. Until then it can be cancelled, and is never run."""
        now = self._owner.runtime.now()
        served = Served(
            self._agent,
            request.call,
            channel.worker,
            request.function,
            now,
            now + request.timeout if request.timeout else None,
            0 if request.nested else message.size,
        )
        if request.rref_access is not None:
            served.visit, served.turn = request.rref_access, request.rref_access.stream_position
        if request.autocast is not None:
            served.autocast = request.autocast
        self.active[channel, request.call] = served
        if self._early:
            with self._lock:
                served.cancelled = self._early.pop((channel, request.call), "")
        if request.creation is None and not request.references:
            task = partial(self._serve, channel, served, request, [message], ())
        else:
            task = partial(self._begin, channel, served, request, [message])
        self._owner.executor.submit(task)

    def refuse(self, channel: Channel, call: int, error: Exception) -> None:
        """A request has come that cannot be taken: answer it with `error`."""
        served = self.active.get((channel, call))
        if served is None:
            served = Served(self._agent, call, channel.worker, "", self._owner.runtime.now(), None, 0)
            self.active[channel, call] = served
        self._answer(channel, served, None, None, error)

    def _begin(self, channel: Channel, served: Served, request: Request, parcel: list[Message]) -> None:
        """Serve a request that makes a reference, or brings some, when these are confirmed."""
        keeper = self._owner.keeper
        references: list[Placed] | tuple[()] = ()
        if keeper is not None:
            if channel.session.state.is_over:
                # What a lost worker held has been given up, and this came too late for that.
                _log.debug("%s of worker %r came after its loss", request.function, channel.peer)
                self.active.pop((channel, request.call), None)
                if self._owner.draining:
                    self._owner.activity_ended()
                return
            caller = channel.worker.id
            if request.creation is not None:
                keeper.creating(request.creation, caller)
            if request.references:
                references = keeper.incoming(caller, request.references)
                later = partial(self._serve, channel, served, request, parcel, references)
                if not keeper.when_confirmed(references, lambda: self._owner.executor.submit(later)):
                    return
        self._serve(channel, served, request, parcel, references)

    def _serve(
        self,
        channel: Channel,
        served: Served,
        request: Request,
        parcel: list[Message],
        references: list[Placed] | tuple[()],
    ) -> None:
        """Run the function, and answer. The parcel holds the message until it is decoded, and nobody else does: its
        memory can go back to the sender when the function is done with it."""
        if not _is_grad_enabled():  # a function that ran on this thread before left it so
            torch.set_grad_enabled(True)
        token = current_served.set(served)
        recorder, entered = self._owner.recorder, None
        try:
            if request.autograd is None:
                self._run(channel, served, request, parcel, references)
            else:
                if recorder is not None:
                    served.autograd = request.autograd
                    served.scope, entered = recorder.enter(request.autograd, channel.worker)
                    if channel.session.state.is_over:  # its loss may have come before, and would not come again
                        recorder.lost(served.scope, channel.worker)
                if request.autograd.grad_mode:
                    self._run(channel, served, request, parcel, references)
                else:
                    with torch.no_grad():
                        self._run(channel, served, request, parcel, references)
        except Exception as error:  # noqa: BLE001 - a fault of ours, and the caller must not wait for it
            _log.exception("worker %r failed to serve %s", self._owner.me.name, request.function)
            self._answer(channel, served, request.creation, None, error)
        finally:
            current_served.reset(token)
            if entered is not None and recorder is not None:
                recorder.leave(entered)

    def serve_message(self, channel: Channel, call: int, what: str, run: Callable[[], None], done: Any) -> None:
        """Serve a call that is a message of its own kind: `run` it, and answer with the head `done`, or the error."""
        served = Served(self._agent, call, channel.worker, what, self._owner.runtime.now(), None, 0)
        self.active[channel, call] = served
        token = current_served.set(served)
        try:
            run()
            frames = pack(encode_head(done), b"", None, channel.room)
        except BaseException as error:  # noqa: BLE001 - whatever it raises belongs to the caller
            frames = self._pack_failure(channel, served, error)
        finally:
            current_served.reset(token)
            self.active.pop((channel, call), None)
        try:
            channel.post(frames)
        except TelegradError as failure:  # the caller is gone
            _log.debug("the answer to %s of worker %r has no taker: %s", what, served.caller, failure)
        self._owner.activity_ended()

    def _run(
        self,
        channel: Channel,
        served: Served,
        request: Request,
        parcel: list[Message],
        references: list[Placed] | tuple[()],
    ) -> None:
        creation = request.creation
        try:
            if served.cancelled:  # while it waited for a thread, or for its references
                served.check()
            name = request.function
            message = parcel.pop()
            attachments = decode_tensors(request.attachments, message.region) if request.attachments else []
            if served.autograd is not None and served.autograd.message:
                attachments = self._incoming(channel, served.autograd, attachments)
            values: Any = payload.decode(message.data, attachments, references)
            del message  # or the region would live as long as the function runs
            if references:
                references.clear()
            if name.startswith("@"):
                function, deferred = self._services.get(name) or self._unknown(name)
                if deferred:
                    function = partial(function, partial(self._answer, channel, served, creation))
                    if request.autocast is None:
                        function(*values[0], **values[1])
                    else:
                        with entered(request.autocast):
                            function(*values[0], **values[1])
                    return
                args, kwargs = values
            elif name:
                function = function_names.resolve_function(name)
                args, kwargs = values
            else:
                function, args, kwargs = values
                served.function = getattr(function, "__qualname__", repr(function))
            if served.cancelled:
                served.check()
            if request.autocast is None:
                result = function(*args, **kwargs)
            else:
                with entered(request.autocast):
                    result = function(*args, **kwargs)
            # Or what was sent would live until the answer has left, and its memory go back with the next one only.
            del args, kwargs, values, attachments
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller
            if self.on_failure is not None:
                self.on_failure(error)
            self._answer(channel, served, creation, None, error)
            return
        if type(result) in AT_ONCE:
            self._answer(channel, served, creation, result, None)
        else:
            self.conclude(served, function, result, partial(self._answer, channel, served, creation))

    def conclude(
        self, served: Served, function: object, result: Any, answer: Callable[[object, BaseException | None], None]
    ) -> None:
        """Answer with what a function returned; if that is a coroutine or an announced future, with what it becomes."""
        if type(result) is CoroutineType:
            self._run_coroutine(served, result, answer)
        elif isinstance(result, ANY_FUTURE) and getattr(function, DEFERRED, False):
            served.deferred = True
            result.add_done_callback(lambda future: _pass_on(future, answer))
        else:
            answer(result, None)

    def _incoming(self, channel: Channel, autograd: AutogradMetadata, attachments: list[Any]) -> list[Any]:
        recorder = self._owner.recorder
        if recorder is None:
            return attachments
        return recorder.incoming(channel.worker, autograd, attachments)

    def _run_coroutine(
        self,
        served: Served,
        coroutine: Coroutine[Any, Any, Any],
        answer: Callable[[object, BaseException | None], None],
    ) -> None:
        def done(value: object, error: BaseException | None) -> None:
            if isinstance(error, asyncio.CancelledError):
                error = CallCancelled(f"{served.function} was cancelled: {served.cancelled or 'by itself'}")
            answer(value, error)

        if served.autograd is not None and served.autograd.context == self.loop.blocked_for:
            coroutine.close()
            answer(None, self._never_runs(served))
            return
        mode = served.autograd is None or served.autograd.grad_mode
        cancel = served.on_cancel = self.loop.run(InGradMode(coroutine, mode, served.autocast), done)
        if served.cancelled:
            cancel()
        if served.answered:
            served.on_cancel = None  # see _answer, which came before it was set

    def _never_runs(self, served: Served) -> TelegradError:
        return TelegradError(
            f"worker {self._owner.me.name!r} cannot run {served.function}: a coroutine there blocks the event loop in "
            f"backward() of context {served.autograd.context if served.autograd else 0:#x}, and that pass may need "
            "this call. Run the pass on a thread of its own: await asyncio.to_thread(telegrad.autograd.backward, ...)"
        )

    def _unknown(self, name: str) -> NoReturn:
        known = ", ".join(sorted(n[1:] for n in list(self._services) if not n.startswith("@telegrad."))) or "none"
        raise FunctionNotFound(f"no function is registered as {name[1:]!r}; registered: {known}")

    # -- answers ----------------------------------------------------------------------------------------------

    def _answer(
        self,
        channel: Channel,
        served: Served,
        creation: Creation | None,
        value: object,
        error: BaseException | None,
    ) -> None:
        if creation is not None and self._owner.keeper is not None:
            self._owner.keeper.computed(creation, value, error)
            value = None
        with self._lock:
            if self.active.pop((channel, served.id), None) is None:
                return  # answered already
            self._leaving.add(served)
        served.answered = True
        served.on_cancel = None  # it knows the coroutine, and that knows its result
        if served.turn is not None and self._owner.keeper is not None:
            self._owner.keeper.not_in_turn(served.turn, channel.worker.id)
        try:
            try:
                if error is None:
                    frames = self._pack_reply(channel, served, value)
                else:
                    frames = self._pack_failure(channel, served, error)
            except BaseException as failure:  # noqa: BLE001 - whatever pickling raises belongs to the caller
                frames = self._pack_failure(channel, served, failure)
            if served.charge:
                with channel.lock:
                    channel.credits.answered(served.charge)
            channel.post(frames)
        except TelegradError as failure:  # the caller is gone
            _log.debug("the answer to %s of worker %r has no taker: %s", served.function, served.caller, failure)
        finally:
            self._leaving.discard(served)
            if served.scope is not None and self._owner.recorder is not None and not channel.session.state.is_over:
                self._owner.recorder.answered(served.scope, channel.worker)
            if self._owner.draining:
                self._owner.activity_ended()

    def _pack_reply(self, channel: Channel, served: Served, value: object) -> Any:
        caller = channel.worker
        by_name = bool(self._owner.me.main) and caller.main == self._owner.me.main
        encoded = payload.encode(value, main_by_name=by_name, root="result", edges=served.scope is not None)
        if not encoded.attachments and not encoded.references:
            return pack(encode_head(Reply(served.id)), encoded.data, None, channel.room)
        recorder, autograd = self._owner.recorder, None
        forks: tuple[ForkInfo, ...] = ()
        if encoded.references and self._owner.keeper is not None:
            forks = self._owner.keeper.outgoing(caller.id, encoded.references)
        try:
            layout: RegionLayout = encode_tensors(encoded.attachments)  # first: it finds what cannot be sent
            if served.scope is not None and recorder is not None:
                autograd = recorder.outgoing(served.scope, caller, encoded, request=False)
            head = encode_head(Reply(served.id, layout.descriptors, autograd, forks))
            return pack(head, encoded.data, layout, channel.room)
        except BaseException:
            if forks and self._owner.keeper is not None:
                self._owner.keeper.not_sent(caller.id, forks)
            raise

    def _pack_failure(self, channel: Channel, served: Served, error: BaseException) -> Any:
        explain(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in _CALLS_IT:
            trace = trace.tb_next
        text = traceback_of(error, trace)
        data, layout = b"", None
        if isinstance(error, Exception):
            try:
                encoded = payload.encode(error, main_by_name=True, root="error", edges=False)
                if not encoded.references:  # an error is shown in many places, and would keep them alive
                    # Without history: that of an error is not recorded, and a leaf would look as if it had none.
                    parts = [part.detach() if isinstance(part, torch.Tensor) else part for part in encoded.attachments]
                    data, layout = encoded.data, encode_tensors(parts)
            except Exception as failure:  # noqa: BLE001 - then the caller gets a RemoteError with the text
                _log.debug("%s cannot be pickled: %s", type(error).__name__, failure)
        head = Failure(
            served.id,
            sendable(f"{type(error).__module__}.{type(error).__qualname__}"),
            text_of(error),
            text,
            isinstance(error, FunctionNotFound),
            layout.descriptors if layout is not None else (),
        )
        return pack(encode_head(head), data, layout, channel.room)

    # -- cancelling -------------------------------------------------------------------------------------------

    def cancel(self, channel: Channel, call: int, reason: str) -> list[Served]:
        """The caller of `call` no longer wants the answer. Returns what was cancelled, if it still ran."""
        served = self.active.get((channel, call))
        if served is None:
            with self._lock:
                self._early[channel, call] = reason
                if len(self._early) > _EARLY:
                    del self._early[next(iter(self._early))]
            return []
        served.cancelled = reason
        on_cancel = served.on_cancel  # which goes when the call is answered
        if on_cancel is not None:
            on_cancel()
        return [served]

    def close(self) -> None:
        """End what runs in the event loop."""
        self.loop.close()

    def cancel_all(self, channel: Channel, reason: str) -> list[Served]:
        """The caller is gone."""
        with self._lock:
            for key in [key for key in self._early if key[0] is channel]:
                del self._early[key]
        return [
            served for key in list(self.active) if key[0] is channel for served in self.cancel(channel, key[1], reason)
        ]


def _pass_on(future: Any, answer: Callable[[object, BaseException | None], None]) -> None:
    try:
        value = future.value()
    except Exception as error:  # noqa: BLE001 - it belongs to the caller
        answer(None, error)
    else:
        answer(value, None)
