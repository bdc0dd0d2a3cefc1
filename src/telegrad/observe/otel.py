"""OpenTelemetry spans of calls and passes, with context propagation: the callee's span is a child of the caller's.

opentelemetry-api is in the extra ``telegrad[otel]``. Nothing is imported and no call pays anything until `instrument`
is called, or TELEGRAD_OTEL=1 is set. Workers without it serve traced calls as any other. What processors and exporters
of the program raise is logged, and fails no call and no pass.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telegrad.agent.agent import Agent
from telegrad.backward.failure import name_of
from telegrad.calls.call import Call, Served
from telegrad.calls.extension import Concern, Extension, OutgoingMessage
from telegrad.calls.service_names import METHOD, is_service
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.events import PASS, Entry
from telegrad.observe.call_names import BY_VALUE
from telegrad.wire.messages import Failure, Request
from telegrad.wire.tracing_messages import with_trace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

_log = logging.getLogger("telegrad")

_MOST_CONTEXTS = 1024
"""Autograd contexts whose spans are remembered, for their passes."""


def check_installed(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise an error that names the extra if OpenTelemetry is missing."""
    if find("opentelemetry") is None:
        raise TelegradError(
            "tracing needs opentelemetry-api, which this Python does not have: "
            "install it with `pip install 'telegrad[otel]'`"
        )


def instrument(agent: Agent | None = None, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make spans of the calls and passes of this worker, until `Tracing.remove`.

    Without a provider, OpenTelemetry's global one is used: set it first, with an exporter.
    """
    check_installed()
    return Tracing(default_agent() if agent is None else agent, tracer_provider)


class Tracing(Extension):
    """The spans of one agent: of calls that it makes, calls that it serves, and passes that it takes part in."""

    serves = True
    heads = True

    def __init__(self, agent: Agent, tracer_provider: TracerProvider | None) -> None:
        from opentelemetry import trace

        self._agent = agent
        self._tracer = trace.get_tracer("telegrad", tracer_provider=tracer_provider)
        self._lock = threading.Lock()  # protects the three below
        self._made: dict[int, Span] = {}
        self._served: dict[Served, tuple[Span, str]] = {}
        self._contexts: OrderedDict[int, Context] = OrderedDict()
        agent.pipeline.add(self, Concern.ALL)
        self._end_listening = agent.local.events.listen(self._recorded)

    def remove(self) -> None:
        """Make no more spans. Those of calls that have not ended end with their calls."""
        self._end_listening()
        self._agent.pipeline.remove(self)

    # -- calls that this worker makes ------------------------------------------------------------------------------

    def heading(self, message: OutgoingMessage, head: Any) -> Any:
        """Begin the span of a request, and have the request carry it."""
        call = message.call
        if call is None or not isinstance(head, Request) or is_service(head.function):
            return head
        try:
            return self._with_span(message, call, head)
        except Exception:  # noqa: BLE001 - of a processor of the user's
            _log.exception("the span of %s could not be made", call)
            return head

    def _with_span(self, message: OutgoingMessage, call: Call, head: Request) -> Any:
        from opentelemetry import propagate, trace

        name = _name(head.function or call.by_value, head.rref_access)
        attributes: dict[str, str | int] = {
            "rpc.system": "telegrad",
            "rpc.service": message.peer.name,
            "rpc.method": name,
            "telegrad.worker": self._agent.me.name,
            "telegrad.call": call.id,
        }
        if message.context is not None:
            attributes["telegrad.context"] = str(message.context.id)
            self._remember(message.context.id)
        span = self._tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        with self._lock:
            self._made[call.id] = span
        call.when_ended(self._ended)
        return with_trace(head, carrier) if carrier else head

    def unsent(self, message: OutgoingMessage) -> None:
        """End the span of a request that did not leave."""
        if message.call is not None:
            self._end(self._take(message.call), "the request did not leave")

    def _ended(self, call: Call) -> None:
        problem = ""
        if call.error is not None:
            problem = f"{type(call.error).__name__}: {call.error}"
        elif isinstance(call.answer, Failure):
            problem = f"{call.answer.type_name}: {call.answer.text}"
        self._end(self._take(call), problem)

    def _take(self, call: Call) -> Span | None:
        with self._lock:
            return self._made.pop(call.id, None)

    # -- calls that it serves --------------------------------------------------------------------------------------

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        """Serve a call within a span, which the function and its coroutine see as the current one."""
        token = None
        if not is_service(served.function):
            try:
                token = self._enter(served)
            except Exception:  # noqa: BLE001 - as above
                _log.exception("the span of call %d of worker %r could not be made", served.id, served.caller)
        try:
            function()
        finally:
            if token is not None:
                from opentelemetry import context

                context.detach(token)

    def _enter(self, served: Served) -> Any:
        """Begin the span of a served call, and make it the current one. Returns what ends that."""
        from opentelemetry import context, propagate, trace

        parent = propagate.extract(served.trace or {}, context.Context())
        name = _name(served.function, served.rref_access)
        attributes: dict[str, str | int] = {
            "rpc.system": "telegrad",
            "rpc.service": self._agent.me.name,
            "rpc.method": name,
            "telegrad.worker": self._agent.me.name,
            "telegrad.caller": served.caller,
            "telegrad.call": served.id,
        }
        if served.autograd is not None:
            attributes["telegrad.context"] = str(served.autograd.context)
        span = self._tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes)
        with self._lock:
            self._served[served] = span, name
        token = context.attach(trace.set_span_in_context(span, parent))
        if served.autograd is not None:
            self._remember(served.autograd.context)
        return token

    def answered(self, served: Served) -> None:
        """End the span of a call whose reply has left."""
        with self._lock:
            span, name = self._served.pop(served, (None, ""))
        if span is not None and name == BY_VALUE and served.function:  # known since the value was read
            span.update_name(served.function)
            span.set_attribute("rpc.method", served.function)
        self._end(span, served.outcome)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _remember(self, context_id: int) -> None:
        """Remember the current span as the parent of the passes of a context."""
        from opentelemetry import context, trace

        if trace.get_current_span().get_span_context().is_valid:
            with self._lock:
                self._contexts.setdefault(context_id, context.get_current())
                while len(self._contexts) > _MOST_CONTEXTS:
                    self._contexts.popitem(last=False)

    def _recorded(self, entry: Entry) -> None:
        """Make the span of a pass when its event is recorded."""
        if entry[1] != PASS:
            return
        _, _, began, ended, number, _, _, context_id, _, _, outcome, *_ = entry
        try:
            self._pass_span(began, ended, context_id, number, outcome)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("the span of pass %d could not be made", number)

    def _pass_span(self, began: float, ended: float, context_id: int, number: int, outcome: str) -> None:
        with self._lock:
            parent = self._contexts.get(context_id)
        to_wall = time.time_ns() - int(self._agent.runtime.now() * 1e9)
        attributes = {
            "telegrad.worker": self._agent.me.name,
            "telegrad.driver": name_of(self._agent, number >> 48),  # the worker that began it numbers it
            "telegrad.context": str(context_id),
            "telegrad.pass": str(number),
        }
        start = to_wall + int(began * 1e9)
        span = self._tracer.start_span("backward", parent, attributes=attributes, start_time=start)
        self._end(span, outcome, to_wall + int(ended * 1e9))

    def _end(self, span: Span | None, problem: str, at: int | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if span is None:
            return
        try:
            if problem:
                span.set_status(Status(StatusCode.ERROR, problem))
            span.end(at)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("a span could not be ended")


def _name(function: str, access: Any) -> str:
    """Return what a person calls the function: without its module, and the method for a call on a reference."""
    if function == METHOD and access is not None:
        return str(access.method) or BY_VALUE
    return function.rpartition(":")[2] or BY_VALUE
