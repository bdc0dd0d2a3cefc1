"""The message of a call that is traced: it carries the caller's span, so that the callee's becomes its child.

A call that is not traced travels as another kind of request and pays nothing for this.
"""

from __future__ import annotations

from typing import Any

from telegrad.wire.call_messages import Request, RequestWithState


class TracedRequest(RequestWithState, frozen=True, array_like=True, tag=35):
    """A request whose caller is traced by OpenTelemetry."""

    profiling: int | None = None  # type: ignore[misc]  # a field here
    """The options of the caller's profiler, if it has one as well."""
    trace: dict[str, str] | None = None  # type: ignore[misc]  # a field here, None in all other requests
    """What OpenTelemetry's propagators carry, such as ``traceparent``."""


def with_trace(request: Request, trace: dict[str, str]) -> TracedRequest:
    """Return a request that carries a span."""
    fields: list[Any] = [getattr(request, name) for name in (*RequestWithState.__struct_fields__, "profiling")]
    return TracedRequest(*fields, trace)  # type: ignore[call-arg]  # mypy takes these fields for class variables
