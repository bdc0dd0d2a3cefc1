"""Spans of a group in one process, in the in-memory exporter."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.support.one_process import Group, wait_until

from telegrad import autograd, observe
from telegrad.calls import pipeline
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.observe.otel import Tracing, check_installed, instrument
from telegrad.rpc import api
from telegrad.testing.group import local_group


class Spans:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("program")

    def all(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def one(self, name: str, kind: SpanKind = SpanKind.INTERNAL, worker: str | None = None) -> ReadableSpan:
        """Return the span. A served call's ends a moment after its caller has the result."""

        def is_meant(span: ReadableSpan) -> bool:
            of = (span.attributes or {}).get("telegrad.worker")
            return span.name == name and span.kind == kind and worker in (None, of)

        wait_until(lambda: any(map(is_meant, self.all())), lambda: [span.name for span in self.all()])
        (found,) = filter(is_meant, self.all())
        return found


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    found.provider.shutdown()


@pytest.fixture
def group(spans: Spans) -> Iterator[Group]:
    """Start workers a, b and c with spans. The test acts as a."""
    with local_group(["a", "b", "c"]) as agents:
        tracing = [instrument(agent, spans.provider) for agent in agents.values()]
        with acting_as(agents["a"]):
            yield agents
        for each in tracing:
            wait_until(lambda each=each: not each._made and not each._served)  # type: ignore[misc]
            each.remove()


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def own(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def add(x: int, y: int) -> int:
    return x + y


def fail() -> None:
    raise ValueError("no")


def current_span() -> int:
    return trace.get_current_span().get_span_context().span_id


async def later() -> int:
    await asyncio.sleep(0)
    return trace.get_current_span().get_span_context().span_id


def nested() -> int:
    return api.rpc_sync("c", add, (1, 2))


def refuse(*arguments: object, **options: object) -> NoReturn:
    raise OSError("full")


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_callees_span_is_a_child_of_the_callers(group: Group, spans: Spans) -> None:
    with spans.tracer.start_as_current_span("program"):
        api.rpc_sync("b", add, (1, 2))
    program, made, served = spans.one("program"), spans.one("add", SpanKind.CLIENT), spans.one("add", SpanKind.SERVER)
    assert parent_of(program) is None
    assert parent_of(made) == own(program)
    assert parent_of(served) == own(made)
    assert made.attributes is not None
    assert (made.attributes["rpc.service"], made.attributes["telegrad.worker"]) == ("b", "a")


def test_a_function_sent_by_value_is_named_on_both_sides(group: Group, spans: Spans) -> None:
    def local(x: int) -> int:
        return x

    assert api.rpc_sync("b", local, (1,)) == 1
    for kind in (SpanKind.CLIENT, SpanKind.SERVER):
        name = "test_a_function_sent_by_value_is_named_on_both_sides.<locals>.local"
        span = spans.one(name, kind)
        assert span.attributes is not None
        assert span.attributes["rpc.method"] == name


def test_nested_calls_are_one_trace(group: Group, spans: Spans) -> None:
    assert api.rpc_sync("b", nested) == 3
    outer, inner = spans.one("nested", SpanKind.SERVER), spans.one("add", SpanKind.CLIENT, "b")
    assert parent_of(inner) == own(outer)
    assert len({span.context.trace_id for span in spans.all() if span.context}) == 1


def test_the_function_and_a_coroutine_see_the_span(group: Group, spans: Spans) -> None:
    assert api.rpc_sync("b", current_span) == own(spans.one("current_span", SpanKind.SERVER))
    assert api.rpc_sync("b", later) == own(spans.one("later", SpanKind.SERVER))
    assert current_span() == 0


def test_an_error_is_told_by_both_spans(group: Group, spans: Spans) -> None:
    with pytest.raises(ValueError, match="no"):
        api.rpc_sync("b", fail)
    made, served = spans.one("fail", SpanKind.CLIENT), spans.one("fail", SpanKind.SERVER)
    assert (made.status.status_code, served.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert served.status.description == "ValueError"
    assert "no" in (made.status.description or "")


def test_asynchronous_calls_and_references_have_spans(group: Group, spans: Spans) -> None:
    assert api.rpc_async("b", add, (1, 2)).wait() == 3
    spans.one("add", SpanKind.CLIENT)
    reference = api.remote("b", list, ((1, 1, 2),))
    assert reference.rpc_sync().count(1) == 2
    spans.one("count", SpanKind.SERVER)


def test_a_pass_has_a_span_on_every_worker_in_the_trace_of_its_program(group: Group, spans: Spans) -> None:
    with spans.tracer.start_as_current_span("program"):
        with autograd.context() as context_id:
            x = torch.ones(3, requires_grad=True)
            autograd.backward(context_id, [api.rpc_sync("b", scaled, (x,)).sum()])
    ours, theirs = spans.one("backward", worker="a"), spans.one("backward", worker="b")
    assert parent_of(ours) == own(spans.one("program"))
    assert parent_of(theirs) == own(spans.one("scaled", SpanKind.SERVER))
    assert theirs.attributes is not None
    assert theirs.attributes["telegrad.driver"] == "a"
    assert ours.start_time is not None
    assert ours.end_time is not None
    assert abs(ours.start_time - (spans.one("program").start_time or 0)) < 5e9
    assert ours.start_time < ours.end_time


def test_a_worker_without_spans_serves_traced_calls(spans: Spans) -> None:
    with local_group(["a", "b"]) as agents:
        tracing = instrument(agents["a"], spans.provider)
        assert agents["a"].call("b", add, (1, 2)) == 3
        tracing.remove()
        assert agents["a"].call("b", add, (1, 2)) == 3
    assert [span.kind for span in spans.all()] == [SpanKind.CLIENT]


def test_nothing_is_added_to_plain_calls(group: Group) -> None:
    tracing = [each for each in group["a"].pipeline.concerned[0] if isinstance(each, Tracing)]
    assert len(tracing) == 1
    tracing[0].remove()
    assert group["a"].pipeline.concerned[0] == ()
    assert group["a"].local.events.append == group["a"].local.events._entries.append


def test_a_request_that_cannot_leave_ends_its_span(group: Group, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "pack", refuse)
    with pytest.raises(OSError, match="full"):
        group["a"].call("b", add, (1, 2))
    assert [span.status.description for span in spans.all()] == ["the request did not leave"]


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(TelegradError, match=r"pip install 'telegrad\[otel\]'"):
        check_installed(lambda name: None)


class Failing(SpanProcessor):
    """A processor of a program with a mistake in it."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self._at == "start":
            raise ValueError("a mistake of the program")

    def on_end(self, span: object) -> None:
        if self._at == "end":
            raise ValueError("a mistake of the program")


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_processor_that_raises_fails_no_call_and_no_pass(at: str, caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Failing(at))
    x = torch.ones(2, requires_grad=True)
    with local_group(["a", "b"]) as agents:
        tracing = [instrument(agent, provider) for agent in agents.values()]
        with acting_as(agents["a"]), autograd.context() as context:
            loss = api.rpc_sync("b", torch.mul, (x, 3)).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
        for each in tracing:
            wait_until(lambda each=each: not each._made and not each._served)  # type: ignore[misc]
            each.remove()
    provider.shutdown()
    assert "a mistake of the program" in caplog.text


def test_it_is_found_without_an_import_of_its_own() -> None:
    for name in ("attach", "otel", "record_trace"):
        assert observe.__getattr__(name) is importlib.import_module(f"telegrad.observe.{name}")
    with pytest.raises(AttributeError):
        observe.__getattr__("otle")
