"""The views of all members, from one of them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence

import msgspec
import pytest

from telegrad.agent.agent import Agent
from telegrad.observe import gather as gather_module
from telegrad.observe import service
from telegrad.observe.clocks import Sample, best
from telegrad.observe.describe import describe
from telegrad.observe.gather import gather
from telegrad.observe.model import LiveCall, Node, ViewRequest, WorkerView
from telegrad.testing.group import local_group


def test_a_lost_worker_is_silent_and_the_rest_is_seen() -> None:
    with local_group(["a", "b", "c"]) as group:
        for name in "bc":
            group["a"].call(name, operator.add, (1, 2))
        group["c"].shutdown_protocol.close_listeners()
        group["a"].peers.lost_workers.peer_lost(group["a"].peers.find("c"), "its cable was cut")
        view = gather(group["a"], ViewRequest(), timeout=20)
        assert [worker.name for worker in view.workers] == ["a", "b"]
        assert view.silent == {"c": "it is lost: its cable was cut"}


def test_a_worker_that_does_not_answer_is_no_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(service, "encoded_view", lambda agent, request: b"late" if release.wait(60) else b"never")
    with local_group(["a", "b"]) as group:
        try:
            assert "b" in gather(group["a"], timeout=0.1).silent
            assert group["a"].client.completion.failed == 0
        finally:
            release.set()


def test_a_worker_whose_answer_cannot_be_read_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "encoded_view", lambda agent, request: b"no view")
    with local_group(["a", "b"]) as group:
        view = gather(group["a"], timeout=20)
    assert [worker.name for worker in view.workers] == ["a"]
    assert "its answer cannot be read" in view.silent["b"]


@pytest.mark.parametrize(("clocks", "rounds"), [(False, 1), (True, 5)])
def test_the_best_of_several_comparisons_of_a_clock_counts(
    monkeypatch: pytest.MonkeyPatch, clocks: bool, rounds: int
) -> None:
    taken: list[Sequence[Sample]] = []

    def remember(samples: Sequence[Sample]) -> Sample:
        taken.append(samples)
        return best(samples)

    monkeypatch.setattr(gather_module, "best", remember)
    with local_group(["a", "b"]) as group:
        view = gather(group["a"], timeout=20, clocks=clocks)
    (samples,) = taken
    assert len(samples) == rounds
    assert view.errors == {"a": 0.0, "b": min(sample.error for sample in samples)}


def test_comparing_clocks_with_a_worker_that_does_not_answer_leaves_time_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, answer = threading.Event(), service.encoded_view

    def late_on_c(agent: Agent, request: ViewRequest) -> bytes:
        if agent.me.name == "c":
            release.wait(60)
        return answer(agent, request)

    monkeypatch.setattr(service, "encoded_view", late_on_c)
    with local_group(["a", "b", "c"]) as group:
        try:
            view = gather(group["a"], timeout=2.0, clocks=True)
        finally:
            release.set()
    assert [worker.name for worker in view.workers] == ["a", "b"]
    assert view.silent == {"c": "it did not answer in time"}


def test_a_replacement_tells_its_events_from_the_first_on() -> None:
    with local_group(["a", "b"]) as group:
        group["a"].call("b", operator.add, (1, 2))
        of_b = group["b"].me.incarnation
        asked = {"same": (of_b, 10**6), "another": (of_b + 1, 10**6)}
        views = {who: gather(group["a"], since={"b": at}, only=["b"]).workers[0] for who, at in asked.items()}
        assert views["same"].events == ()
        assert views["another"].events[0].number == 0
        assert views["another"].position() == (of_b, views["another"].events[-1].number + 1)


def test_only_the_wanted_workers_are_asked() -> None:
    with local_group(["a", "b", "c"]) as group:
        assert [worker.name for worker in gather(group["a"], only=["b"]).workers] == ["b"]


NONE = float("nan")


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"name": "a"}, "it describes worker 'a' instead of itself"),
        ({"now": NONE}, "Expected `float` >= -1000000000000.0 - at `$.now`"),
        ({"made": (LiveCall(1, "b", "a", "f", NONE),)}, "at `$.made[0].began`"),
        ({"contexts": ({"id": 1, "began": 1.0, "nodes": (Node(1, "n", state="sleeps"),)},)}, "nodes[0].state`"),
    ],
)
def test_a_view_that_readers_cannot_work_with_is_refused(
    lie: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_group(["a", "b"]) as group:
        told: dict[str, object] = msgspec.structs.asdict(describe(group["b"], ViewRequest())) | lie
        monkeypatch.setattr(service, "encoded_view", lambda agent, request: msgspec.msgpack.encode(told))
        view = gather(group["a"], timeout=20)
    assert [worker.name for worker in view.workers] == ["a"]
    assert reason in view.silent["b"]


def test_infinite_deadlines_can_be_told() -> None:
    call = LiveCall(1, "b", "a", "f", 0.0, float("inf"))
    with local_group(["a", "b"]) as group:
        told = msgspec.structs.replace(describe(group["b"], ViewRequest()), made=(call,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=WorkerView).made == (call,)


def test_a_worker_that_has_ended_or_a_fork_of_one_says_at_once_that_it_cannot_ask() -> None:
    with local_group(["a", "b", "c"]) as group:
        group["a"].call("b", operator.add, (1, 2))  # and not c: there is no connection
        group["a"].local.closed = "it is a fork"
        began = group["a"].runtime.now()
        view = gather(group["a"], timeout=60)
        group["a"].local.closed = ""
        assert group["a"].runtime.now() - began < 30
    assert view.silent == dict.fromkeys("bc", "worker 'a' cannot ask it: it is a fork")
