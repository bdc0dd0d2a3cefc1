"""`telegrad.launch.ray.rejoining` with actors that only exist in the test."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from telegrad.launch.ray import rejoining
from telegrad.launch.ray.rejoining import Rejoining

Asked = tuple[str, int, int, "Future[bool]"]


class Away(Exception):
    pass


class Dead(Exception):
    pass


def judge(error: BaseException) -> str:
    return {Away: "unavailable", Dead: "dead"}.get(type(error), "failed")


@pytest.fixture
def asked() -> queue.Queue[Asked]:
    """The questions to actors, in order."""
    return queue.Queue()


@pytest.fixture
def running(asked: queue.Queue[Asked], monkeypatch: pytest.MonkeyPatch) -> Iterator[Rejoining]:
    monkeypatch.setattr(rejoining, "_PAUSE", 0.001)
    monkeypatch.setattr(rejoining, "_POLL", 3600.0)

    def ask(name: str, restart: int, replaces: int) -> Future[bool]:
        answer: Future[bool] = Future()
        asked.put((name, restart, replaces, answer))
        return answer

    made = Rejoining(["a", "b"], ask, judge)  # type: ignore[arg-type]  # judge returns any string
    made.start()
    yield made
    made.stop()


def test_a_lost_worker_is_asked_with_a_higher_generation_each_time(
    running: Rejoining, asked: queue.Queue[Asked]
) -> None:
    for restart in (1, 2):
        running.lost("a", 70000 * restart)
        name, number, replaces, answer = asked.get(timeout=10)
        assert (name, number, replaces) == ("a", restart, 70000 * restart)
        answer.set_result(True)


def test_an_actor_that_is_away_is_asked_again(running: Rejoining, asked: queue.Queue[Asked]) -> None:
    running.lost("b", 5)
    for number in (1, 2, 3):
        name, restart, replaces, answer = asked.get(timeout=10)
        assert (name, restart, replaces) == ("b", number, 5)
        answer.set_exception(Away())


def test_a_dead_actor_is_given_up(
    running: Rejoining, asked: queue.Queue[Asked], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "telegrad")
    running.lost("a", 0)
    asked.get(timeout=10)[3].set_exception(Dead())
    running.lost("b", 0)  # an event behind the answer
    assert asked.get(timeout=10)[0] == "b"
    running.lost("a", 0)
    running.stop()
    assert asked.empty()
    assert "worker 'a' is lost for good: Ray does not restart its actor" in caplog.text


def test_an_actor_that_cannot_join_is_reported(
    running: Rejoining, asked: queue.Queue[Asked], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "telegrad")
    running.lost("a", 0)
    asked.get(timeout=10)[3].set_exception(ValueError("no space"))
    running.lost("b", 0)
    asked.get(timeout=10)
    assert "cannot join again: no space" in caplog.text


def test_the_driver_itself_is_not_asked(running: Rejoining, asked: queue.Queue[Asked]) -> None:
    running.lost("driver", 0)
    running.lost("a", 0)
    assert asked.get(timeout=10)[0] == "a"


def test_all_actors_are_asked_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoining, "_POLL", 0.001)
    asked: queue.Queue[Asked] = queue.Queue()

    def ask(name: str, restart: int, replaces: int) -> Future[bool]:
        answer: Future[bool] = Future()
        asked.put((name, restart, replaces, answer))
        return answer

    made = Rejoining(["a", "b"], ask, judge)  # type: ignore[arg-type]  # judge returns any string
    made.start()
    try:
        first, second = asked.get(timeout=10), asked.get(timeout=10)
        assert [one[:3] for one in (first, second)] == [("a", 1, -1), ("b", 1, -1)]
        first[3].set_result(False)
        assert asked.get(timeout=10)[:3] == ("a", 2, -1)  # and not b, which has not answered
    finally:
        made.stop()
