from __future__ import annotations

import msgspec
from tests.support.synthetic_group import SyntheticGroup

from telegrad.observe.dashboard.spans import MOST_AT_ONCE, SECONDS, Spans
from telegrad.observe.model import Event, GroupView, Kind, WorkerView


def worker(*events: Event) -> WorkerView:
    return WorkerView("a", 0, 1, 0, "host", 1, (), 100.0, 0.0, 0.0, events=events)


def test_all_workers_are_put_on_the_observers_clock() -> None:
    now = 100_600.0
    spans = Spans().add(SyntheticGroup().view(now))
    calls = {span.worker: span for span in spans if span.kind == "call"}
    served = {span.worker: span for span in spans if span.kind == "serve"}
    assert now - 40 < calls["trainer"].began < served["stage0"].began < served["stage0"].ended <= now


def test_identifiers_are_strings_because_browsers_have_53_bits() -> None:
    event = Event(0, Kind.PASS, 1.0, 2.0, 2**60 + 1, context=2**61 + 1, pass_id=2**62 + 1)
    span = Spans().add(GroupView((worker(event),), now=100.0))[0]
    assert (span.id, span.context, span.pass_id) == (str(2**60 + 1), str(2**61 + 1), str(2**62 + 1))


def test_old_spans_are_forgotten() -> None:
    spans = Spans()
    spans.add(GroupView((worker(Event(0, Kind.CALL, 1.0, 2.0)),), now=2.0))
    spans.add(GroupView((worker(),), now=3.0 + SECONDS))
    assert not spans.kept


def test_of_too_many_spans_the_longest_are_kept_and_the_rest_is_counted() -> None:
    events = [Event(number, Kind.CALL, 1.0, 1.0 + number * 1e-6) for number in range(MOST_AT_ONCE + 10)]
    spans = Spans()
    new = spans.add(GroupView((worker(*events),), now=2.0))
    assert len(new) == MOST_AT_ONCE
    assert spans.left_out == 10
    assert min(span.ended for span in new) == round(1.0 + 10e-6, 6)


def test_events_that_cannot_be_drawn_are_left_out() -> None:
    assert not Spans().add(GroupView((worker(Event(0, Kind.MEMBER, 1.0, 1.0, what="joined")),), now=2.0))


def test_a_call_has_the_name_that_its_callee_knows() -> None:
    calls = [
        Event(0, Kind.CALL, 1.0, 2.0, 1, "b", "@telegrad.method"),
        Event(1, Kind.CALL, 1.0, 2.0, 2, "b", ""),
        Event(2, Kind.CALL, 1.0, 2.0, 3, "b", "m:f"),
        Event(3, Kind.CALL, 1.0, 2.0, 4, "b", "@telegrad.to_here"),
    ]
    names = {1: "Model.forward", 2: "<lambda>", 3: "m:f", 4: "@telegrad.to_here"}
    served = [Event(number, Kind.SERVE, 1.2, 1.8, number, "a", name) for number, name in names.items()]
    views = (worker(*calls), msgspec.structs.replace(worker(*served), name="b"))
    found = {span.id: span.what for span in Spans().add(GroupView(views, now=2.0)) if span.worker == "a"}
    assert found == {"1": "Model.forward", "2": "<lambda>", "3": "m:f", "4": "to_here()"}


def test_the_function_of_a_call_may_have_been_seen_with_the_look_before() -> None:
    spans = Spans()
    served = msgspec.structs.replace(worker(Event(0, Kind.SERVE, 1.2, 1.8, 1, "a", "Model.forward")), name="b")
    spans.add(GroupView((served,), now=2.0))
    call = Event(0, Kind.CALL, 1.0, 2.0, 1, "b", "@telegrad.method")
    assert [span.what for span in spans.add(GroupView((worker(call),), now=2.5))] == ["Model.forward"]
    assert [span.what for span in spans.add(GroupView((worker(call),), now=3.0))] == ["a method of a remote object"]
