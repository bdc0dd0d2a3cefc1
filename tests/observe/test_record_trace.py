from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.recorded_groups import worker_view
from tests.support.trace_format import check_trace

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import current
from telegrad.calls.call import current_served
from telegrad.observe.model import Event, EventPosition, GroupView, Kind, ViewRequest
from telegrad.observe.record_trace import EventReader, record_trace
from telegrad.observe.service import Observation
from telegrad.observe.timeline import Category, Span, Timeline
from telegrad.observe.trace import trace_events
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Faults, Simulation

SHIFTS = {"a": 0.0, "b": 5000.0, "c": -300.0}
WEIGHT = torch.full((3,), 2.0, requires_grad=True)


class ObservedSimulation(Simulation):
    """Workers with shifted clocks, which let others look at them."""

    def _make(self, name: str, generation: int = 0, place: str = "") -> Agent:
        agent = super()._make(name, generation, place)
        Observation(agent)
        return agent


def inner(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def outer(x: torch.Tensor) -> torch.Tensor:
    served = current_served.get()
    assert served is not None
    result: torch.Tensor = served.agent.call("c", inner, (x,))
    return result + x


def train(agent: Agent) -> None:
    """Make nested calls, and run a backward pass through them."""
    context = agent.autograd.contexts.new()
    token = current.set(context)
    try:
        x = torch.ones(3, requires_grad=True)
        agent.autograd.backward(context.id, [agent.call("b", outer, (x,)).sum()])
    finally:
        current.reset(token)
        agent.autograd.contexts.release(context)


def sides(timeline: Timeline) -> tuple[dict[tuple[str, int], Span], dict[tuple[str, int], Span]]:
    """Return calls and where they were served, by caller and number."""
    calls, serves = {}, {}
    for span in timeline.spans:
        if span.category is Category.CALL:
            calls[timeline.workers[span.worker].name, span.details["call"]] = span
        elif span.category is Category.SERVE:
            serves[span.details["caller"], span.details["call"]] = span
    return calls, serves


@pytest.mark.parametrize("seed", range(5))
def test_with_shifted_clocks_no_reply_precedes_its_request(seed: int) -> None:
    simulation = ObservedSimulation(seed, list(SHIFTS), faults=Faults(longest_delay=0.02))
    for name, seconds in SHIFTS.items():
        simulation.scheduler.jump(name, seconds)

    def program() -> Any:
        with record_trace(agent=simulation["a"]) as recorded:
            for _ in range(3):
                train(simulation["a"])
        return recorded.trace

    with simulation:
        trace = simulation.run(program)
    timeline = trace.timeline
    for view, offset in zip(timeline.workers, timeline.offsets, strict=True):
        assert offset == pytest.approx(SHIFTS["a"] - SHIFTS[view.name], abs=0.05)
    calls, serves = sides(timeline)
    assert len(calls) == len(serves) == 6
    for key, serve in serves.items():
        call = calls[key]
        assert call.began <= serve.began <= serve.ended + 1e-9
        assert all(part.began <= call.ended + 1e-9 for part in serve.parts)
        assert any(part.category is Category.TRANSFER for part in call.parts)
    gradients = [arrow for arrow in timeline.arrows if arrow.name == "gradient"]
    ways = Counter(tuple(span.name.split()[0] for span, _ in arrow.points) for arrow in gradients)
    # From a to b, b to c, and b to a. On b, a gate waits for what comes back from c: `outer` also uses its input.
    assert ways == {("island", "gradient", "island"): 9, ("island", "gradient", "gate"): 3}
    for arrow in gradients:
        times = [time for _, time in arrow.points]
        assert times == sorted(times)
    check_trace(list(trace_events(timeline)))


def test_a_block_of_a_program_is_recorded(tmp_path: Path) -> None:
    with local_group(["a", "b", "c"]) as group:
        train(group["a"])  # not recorded
        with record_trace(tmp_path / "trace.json", agent=group["a"]) as recorded:
            with pytest.raises(RuntimeError, match="when the block of record_trace"):
                recorded.summary()
            train(group["a"])
            train(group["a"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events)
    # Not what was served: a worker may note that a little after the reply has arrived.
    calls = [event["name"].rpartition(":")[2] for event in events if event.get("cat") == "call"]
    assert sorted(name.split()[-1] for name in calls) == ["inner", "inner", "outer", "outer"]
    assert sum(event["ph"] == "s" and event["name"] == "gradient" for event in events) == 8
    assert [share.worker for share in recorded.shares()] == ["a", "b", "c"]
    assert recorded.summary().splitlines()[1].startswith("a ")
    recorded.save(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text().startswith("<svg")


class Script:
    """Answers of a group, one after another."""

    def __init__(self, *answers: GroupView) -> None:
        self._answers = list(answers)
        self.asked: list[Mapping[str, EventPosition]] = []

    def __call__(self, request: ViewRequest, since: Mapping[str, EventPosition], clocks: bool) -> GroupView:
        self.asked.append(dict(since))
        return self._answers.pop(0)


def answer(*numbers: int, now: float, dropped: int = 0) -> GroupView:
    events = tuple(Event(number, Kind.STEP, now - 0.5, now) for number in numbers)
    view = worker_view("a", now=now, events=events, dropped=dropped, next_event=numbers[-1] + 1)
    return GroupView((view,), {}, {"a": 0.0}, {"a": 0.0}, now)


def test_events_from_before_are_not_recorded_and_each_is_asked_for_once() -> None:
    script = Script(answer(7, now=1.0), answer(8, 9, now=2.0), answer(10, now=3.0))
    reader = EventReader(script)
    reader.read()
    trace = reader.stop()
    assert script.asked == [{}, {"a": (100, 8)}, {"a": (100, 10)}]
    assert len(trace.timeline.spans) == 3
    assert trace.gaps() == []
    assert (trace.timeline.began, trace.timeline.ended) == (1.0, 3.0)


def test_what_is_missing_is_said() -> None:
    silent = GroupView((), {"b": "it is lost"}, {}, {}, 4.0)
    reader = EventReader(Script(answer(7, now=1.0), answer(20, now=2.0, dropped=12), silent), limit=0)
    reader.read()
    lost, dropped, left_out = reader.stop().gaps()
    assert lost == "worker 'b' did not answer: it is lost"
    assert dropped.startswith("worker 'a' had dropped 12 events before they were read: record fewer seconds")
    assert left_out.startswith("1 events at the end were left out")
