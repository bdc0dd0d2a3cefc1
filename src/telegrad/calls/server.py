"""Runs the functions that others call here, and replies to them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from sys import getrefcount
from threading import get_ident
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from telegrad.calls.call import DeferredWait, Served, current_served
from telegrad.calls.early_cancels import EarlyCancels
from telegrad.calls.extension import IncomingMessage, PlacedReference
from telegrad.calls.main_module import explain_name, wait_for_function
from telegrad.calls.pipeline import Pipeline, pack_head
from telegrad.calls.refusals import Refusals
from telegrad.calls.registry import Registry, check_arguments
from telegrad.calls.replier import Replier
from telegrad.calls.service_names import PREFIX
from telegrad.connection.channel import Channel
from telegrad.connection.goodbye import shortened
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_account import Held
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallCancelled, FunctionNotFound, ProtocolError, TelegradError
from telegrad.events import SERVE
from telegrad.execution.autocast import enter_autocast
from telegrad.execution.event_loop import EventLoop, InGradMode
from telegrad.torch_private import FutureBase
from telegrad.torch_private_ownership import nobody_else_holds, nobody_else_holds_any
from telegrad.wire import function_names
from telegrad.wire.devices import check_received_pairs
from telegrad.wire.frames import Message
from telegrad.wire.in_place import may_stay_in_place
from telegrad.wire.messages import GRAD_MODE, Request

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_log = logging.getLogger("telegrad")

_is_grad_enabled = torch.is_grad_enabled
_FOREVER = 1e9
"""Seconds. A peer may send any number as a timeout, also infinity, or one that is not a number."""
AT_ONCE = frozenset({torch.Tensor, type(None), bool, int, float, str, bytes, tuple, list, dict})
"""Types of results that need no further step before the reply, as nearly all are."""

DEFERRED = "_telegrad_answers_later"
"""Functions with this attribute return a future, and the reply is its result."""


class Server:
    """The calls that this worker serves."""

    def __init__(self, agent: Agent, local: LocalWorker, pipeline: Pipeline, loop: EventLoop) -> None:
        self._agent = agent  # for the functions that run here
        self._local = local
        self._pipeline = pipeline
        self._registry = agent.registry  # in registered mode
        self._unpack = pipeline.unpack if agent.registry is None else partial(_unpack_checked, agent.registry, pipeline)
        self.loop = loop
        self.replier = Replier(local, pipeline)
        self.refusals = Refusals(agent, local, self.replier)
        self._answer = self.replier.answer
        self.active, self.unanswered = self.replier.active, self.replier.unanswered
        self._lock = threading.Lock()  # protects _services
        self._services: dict[str, tuple[Callable[..., Any], bool]] = {}
        self.early_cancels = EarlyCancels()
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with every exception that a function raises, before the reply is sent."""

    def register(self, name: str, function: Callable[..., Any], *, deferred: bool = False) -> None:
        """Let others call `function` as ``@name``. A deferred one gets a function to reply with first."""
        with self._lock:
            self._services["@" + name] = (function, deferred)

    # -- one call ---------------------------------------------------------------------------------------------

    def take(self, channel: Channel, request: Request, message: Message, held: Held | None = None) -> None:
        """Have a worker thread serve a request. Until it does, a cancelled request is never run."""
        now = self._local.runtime.now()
        served = Served(
            self._agent,
            channel,
            request.call,
            channel.worker,
            request.function,
            now,
            now + request.timeout if 0.0 < request.timeout < _FOREVER else None,
            0 if request.nested else message.size,
            received=message.total,
            held=held,
        )
        references = request.creation is not None or bool(request.references)
        if request.rref_access is not None:
            served.rref_access, served.stream_position = request.rref_access, request.rref_access.stream_position
            references = references or served.stream_position is not None
        if type(request) is not Request:  # it carries state of its caller
            served.autocast, served.profiling, served.trace = request.autocast, request.profiling, request.trace
            if request.devices:
                served.devices = check_received_pairs(request.devices)
        key = channel, request.call
        if self.active.setdefault(key, served) is not served:
            raise ProtocolError(f"worker {channel.peer!r} sent call {request.call} twice")
        if self.early_cancels.reasons:
            served.cancelled = self.early_cancels.take(*key)
        served.extensions = self._pipeline.concerned[(request.autograd is not None) + (2 if references else 0)]
        if request.profiling is not None:
            served.extensions += self._pipeline.profiling
        # The message is in a list that is emptied when it is decoded, and nobody else holds it: its memory can go back
        # to the sender when the function is done with it.
        if request.creation is not None or request.references:
            task = partial(self._admit, served, request, [message])
        else:
            task = partial(self._serve, served, request, [message], ())
        submit = self._local.executor.submit if held is None else served.submit
        submit(task)

    def _admit(self, served: Served, request: Request, holder: list[Message]) -> None:
        """Serve a request that brings or makes references, when extensions say that it can be."""
        channel = served.channel
        if channel.session.state.is_over:
            # The references of the lost worker have been released already.
            _log.debug("dropped %s from lost worker %r", request.function, channel.peer)
            self.active.pop((channel, request.call), None)
            if (on_idle := self._local.on_idle) is not None:  # it may be removed now
                on_idle()
            return
        arrived = IncomingMessage(channel.worker, forks=request.references, creation=request.creation, served=served)
        later = partial(self._serve, served, request, holder, arrived.references)
        arrived.proceed = partial(served.submit, later)
        held_back = False
        if not self.refusals.check(served, request, arrived):
            return
        try:
            for extension in served.extensions:
                held_back = not extension.arrived(arrived) or held_back
        except Exception as error:  # noqa: BLE001 - the caller must not wait forever
            if not isinstance(error, ProtocolError):  # a bug in telegrad
                _log.exception("worker %r failed to admit %r", self._local.name, request.function)
            self._answer(served, None, error)
            return
        if held_back:
            served.waits = DeferredWait("reference", self._local.runtime.now(), arrived.references)
            served.on_cancel = partial(_give_up_references, served, arrived.references, partial(self._answer, served))
            if served.cancelled:  # before on_cancel was set
                served.on_cancel()
        else:
            self._serve(served, request, holder, arrived.references)

    def _serve(
        self,
        served: Served,
        request: Request,
        holder: list[Message],
        references: list[PlacedReference] | tuple[()],
    ) -> None:
        """Run the function, and reply."""
        if not _is_grad_enabled():  # a function that ran on this thread before left it so
            torch.set_grad_enabled(True)
        served.running, served.thread, served.waits = self._local.runtime.now(), get_ident(), None
        token = current_served.set(served)
        try:
            if not served.extensions:
                self._run(served, request, holder, references)
            else:
                run: Callable[[], None] = partial(self._run, served, request, holder, references)
                served.autograd = request.autograd
                for extension in reversed(served.extensions):
                    if extension.serves:
                        run = partial(extension.serve, served, run)
                run()
        except Exception as error:  # noqa: BLE001 - a bug in telegrad, and the caller must not wait forever
            _log.exception("worker %r failed to serve %r", self._local.name, request.function)
            self._answer(served, None, error)
        finally:
            current_served.reset(token)

    def serve_message(self, channel: Channel, call: int, what: str, run: Callable[[], None], done: Any) -> None:
        """Serve a call that is a message of its own kind: `run` it, and reply with the head `done`, or the error."""
        served = Served(self._agent, channel, call, channel.worker, what, self._local.runtime.now(), None, 0)
        if self.active.setdefault((channel, call), served) is not served:
            _log.warning("dropped %s from worker %r: call %d is in progress already", what, channel.peer, call)
            return
        served.running, served.thread = served.started, get_ident()
        outcome = ""
        token = current_served.set(served)
        try:
            run()
            frames = pack_head(channel, done)
        except BaseException as error:  # noqa: BLE001 - whatever it raises belongs to the caller
            outcome = type(error).__name__
            frames = self.replier.pack_failure(served, error)
        finally:
            current_served.reset(token)
            self.active.pop((channel, call), None)
        _record(self._local, served, outcome, sum([frame.size for frame in frames]))
        try:
            channel.post(frames)
        except TelegradError as failure:  # the caller is gone
            _log.debug("the reply to %s of worker %r cannot be delivered: %s", what, served.caller, failure)
        if (on_idle := self._local.on_idle) is not None:  # it may be removed now
            on_idle()

    def _run(
        self,
        served: Served,
        request: Request,
        holder: list[Message],
        references: list[PlacedReference] | tuple[()],
    ) -> None:
        try:
            if served.cancelled:  # while it waited for a thread, or for its references
                served.check()
            name = request.function
            values = self._unpack(served.worker, request, holder.pop(), references)
            if references:
                references.clear()
            if name[:1] == "@":
                function, deferred = self._services.get(name) or _unknown(self._services, name)
                if deferred:
                    function = partial(function, partial(self._answer, served))
                    if request.autocast is None:
                        function(*values[0], **values[1])
                    else:
                        with enter_autocast(request.autocast):
                            function(*values[0], **values[1])
                    return
                args, kwargs = values
            elif name:
                if self._registry is None:
                    try:
                        function = function_names.resolve_function(name)
                    except FunctionNotFound as missing:
                        function = self._wait_for_main(missing, served, name)
                else:
                    function = self._registry.function(name, served.caller)
                args, kwargs = values
            else:
                function, args, kwargs = values
                served.function = getattr(function, "__qualname__", repr(function))
            if served.cancelled:
                served.check()
            run = function if served.around is None else served.around(function)
            if request.autocast is None:
                result = run(*args, **kwargs)
            else:
                with enter_autocast(request.autocast):
                    result = run(*args, **kwargs)
            # Or the arguments would live until the reply has left, and their memory would go back with the next one.
            del args, kwargs, values
            if served.channel.resumable:  # otherwise large messages are copied into shared memory
                served.owns_result = _is_owned(result)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller
            explain_name(error, self._local.name)
            if self.on_failure is not None:
                self.on_failure(error)
            self._answer(served, None, error)
            return
        if type(result) in AT_ONCE:
            self._answer(served, result, None)
        else:
            self.conclude(served, function, result, partial(self._answer, served))

    def _wait_for_main(self, missing: FunctionNotFound, served: Served, name: str) -> Callable[..., Any]:
        local = self._local
        return wait_for_function(missing, name, local.name, local.runtime, local.executor, served.deadline)

    def conclude(
        self, served: Served, function: object, result: Any, answer: Callable[[object, BaseException | None], None]
    ) -> None:
        """Reply with what a function returned; if that is a coroutine or an announced future, with its result."""
        if type(result) is CoroutineType:
            _run_coroutine(self.loop, self._local.name, served, result, answer)
        elif isinstance(result, FutureBase) and getattr(function, DEFERRED, False):
            served.deferred = True
            result.add_done_callback(lambda future: _pass_on(future, answer))
        else:
            answer(result, None)

    # -- cancelling -------------------------------------------------------------------------------------------

    def cancel(self, channel: Channel, call: int, reason: str) -> list[Served]:
        """Cancel a call that its caller gave up. Returns what was cancelled, if it was still running."""
        reason = shortened(reason) or "the caller gave no reason"  # an empty one would not count as cancelled
        served = self.active.get((channel, call))
        if served is None:
            self.early_cancels.add(channel, call, reason)
            return []
        served.cancelled = reason
        if (on_cancel := served.on_cancel) is not None:  # it is removed when the reply is sent
            on_cancel()
        return [served]

    def cancel_all(self, channel: Channel, reason: str) -> list[Served]:
        """Cancel all calls of a caller that is gone."""
        self.early_cancels.forget(channel)
        return [
            served for key in list(self.active) if key[0] is channel for served in self.cancel(channel, key[1], reason)
        ]


def _record(local: LocalWorker, served: Served, outcome: str, size: int) -> None:
    """Record a call that is a message of its own kind; the others are recorded when their reply has left."""
    now = local.runtime.now()
    marks = served.running, now
    name, what, thread = served.worker.name, served.function, served.thread
    about = SERVE, served.started, now, served.id
    local.events.record(*about, peer=name, what=what, outcome=outcome, size=size, thread=thread, marks=marks)


def _is_owned(result: object) -> bool:
    """Whether a function has returned large tensors that nobody holds but this module, which holds the result once."""
    if type(result) is torch.Tensor:
        return may_stay_in_place((result,)) and nobody_else_holds(result, 2)
    if type(result) is tuple or type(result) is list:
        # Held by the caller, the argument here, and that of getrefcount; the tensors by the result.
        return may_stay_in_place(result) and getrefcount(result) == 3 and nobody_else_holds_any(result, 1)
    return False


def _run_coroutine(
    loop: EventLoop,
    worker: str,
    served: Served,
    coroutine: Coroutine[Any, Any, Any],
    answer: Callable[[object, BaseException | None], None],
) -> None:
    """Run a coroutine that a function returned, and reply with its result."""

    def done(value: object, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = CallCancelled(f"{served.function} was cancelled: {served.cancelled or 'by itself'}")
        answer(value, error)

    if served.autograd is not None and served.autograd.context == loop.blocked_for:
        coroutine.close()
        answer(None, _blocked_loop(worker, served))
        return
    mode = served.autograd is None or bool(served.autograd.modes & GRAD_MODE)
    served.coroutine = coroutine
    cancel = served.on_cancel = loop.run(InGradMode(coroutine, mode, served.autocast), done)
    if served.cancelled:
        cancel()
    if served.answered:
        served.on_cancel = served.coroutine = None  # the reply was sent before they were set


def _give_up_references(
    served: Served, references: list[PlacedReference], answer: Callable[[object, BaseException | None], None]
) -> None:
    """End a call that waits for the owners of its references. What waits for them refers to the call."""
    references.clear()
    served.give_up(answer)


def _unpack_checked(
    registry: Registry,
    pipeline: Pipeline,
    caller: WorkerRecord,
    request: Request,
    message: Message,
    references: Sequence[PlacedReference],
) -> Any:
    """Decode the arguments of a request in registered mode, if the caller may call the function."""
    registry.check_request(request.function, caller.name)  # before anything is decoded
    return check_arguments(pipeline.unpack(caller, request, message, references))


def _unknown(services: Iterable[str], name: str) -> NoReturn:
    known = ", ".join(sorted(each[1:] for each in list(services) if not each.startswith(PREFIX))) or "none"
    raise FunctionNotFound(f"no function is registered as {name[1:]!r}; registered: {known}")


def _pass_on(future: Any, answer: Callable[[object, BaseException | None], None]) -> None:
    try:
        value = future.value()
    except Exception as error:  # noqa: BLE001 - it belongs to the caller
        answer(None, error)
    else:
        answer(value, None)


def _blocked_loop(worker: str, served: Served) -> TelegradError:
    return TelegradError(
        f"worker {worker!r} cannot run {served.function}: a coroutine there blocks the event loop in "
        f"backward() of context {served.autograd.context if served.autograd else 0:#x}, and that pass may need "
        "this call. Run the pass on a thread of its own: await asyncio.to_thread(telegrad.autograd.backward, ...)"
    )
