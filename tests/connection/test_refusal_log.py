"""The first refusals are logged one by one, and the rest as a summary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.connection.refusal_log import FIRST, INTERVAL, MANY_LEFT, MAX_SOURCES, Refusal, RefusalLog
from telegrad.execution.timers import Timer


class Worker:
    """A worker with a clock and timers that the test moves."""

    name = "a"

    def __init__(self) -> None:
        self.runtime: Any = self
        self.executor: Any = SimpleNamespace(timers=self)
        self.time = 0.0
        self.timers: list[Timer] = []
        self.log = RefusalLog(self)  # type: ignore[arg-type]  # what a refusal log needs of a worker

    def now(self) -> float:
        return self.time

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, action))
        return self.timers[-1]

    def cancel(self, timer: Timer) -> None:
        timer.action = None

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for timer in self.timers:
            if timer.action is not None and timer.when <= self.time:
                action, timer.action = timer.action, None
                action()

    def refuse(self, kind: Refusal, times: int, sources: int = 1) -> None:
        for number in range(times):
            source = f"10.0.0.{number % sources}"
            self.log.add(kind, source, f"an unknown peer ({source}:1)", f"reason {number}")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "telegrad")

    def take() -> list[str]:
        taken = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return taken

    return take


def test_a_few_refusals_are_logged_one_by_one_and_never_again(lines: Callable[[], list[str]]) -> None:
    worker = Worker()
    worker.refuse(Refusal.NOT_TELEGRAD, 2)
    assert lines() == [
        f"worker 'a' refused a connection from an unknown peer (10.0.0.0:1): reason {number}" for number in range(2)
    ]
    worker.advance(INTERVAL)
    assert lines() == []


def test_a_flood_makes_a_few_lines_and_a_summary_per_interval(lines: Callable[[], list[str]]) -> None:
    worker = Worker()
    worker.refuse(Refusal.EVICTED, 9_700, sources=3)
    worker.refuse(Refusal.NOT_TELEGRAD, 112)
    worker.log.add_dropped({"10.0.0.2": 1000})
    assert len(lines()) == 2 * FIRST
    worker.advance(INTERVAL)
    assert lines() == [
        "worker 'a' refused 10,812 connections from 3 addresses in the last 10 s: 1,000 closed without a handshake, "
        "9,700 evicted without a valid Hello, 112 sent something else than a handshake"
    ]
    assert not [timer for timer in worker.timers if timer.action is not None]


def test_a_wrong_token_has_lines_of_its_own_during_a_flood(lines: Callable[[], list[str]]) -> None:
    worker = Worker()
    worker.refuse(Refusal.EVICTED, 10_000)
    lines()
    worker.log.add(Refusal.TOKEN, "10.0.0.7", "worker 'b' (10.0.0.7:40112)", "the group tokens differ")
    assert lines() == ["worker 'a' refused a connection from worker 'b' (10.0.0.7:40112): the group tokens differ"]


def test_connections_that_end_by_themselves_are_mentioned_only_if_they_are_many(
    lines: Callable[[], list[str]],
) -> None:
    worker = Worker()
    worker.refuse(Refusal.LEFT, MANY_LEFT)
    worker.advance(INTERVAL)
    assert lines() == []
    worker.refuse(Refusal.LEFT, MANY_LEFT + 1)
    worker.advance(INTERVAL)
    assert lines() == [
        f"worker 'a' refused {MANY_LEFT + 1} connections from 1 address in the last 10 s: "
        f"{MANY_LEFT + 1} closed without a handshake"
    ]


def test_closing_logs_what_was_counted_and_sets_no_more_timers(lines: Callable[[], list[str]]) -> None:
    worker = Worker()
    worker.refuse(Refusal.LATE, FIRST + 1)
    lines()
    worker.advance(2.0)
    worker.log.close()
    assert lines() == [
        f"worker 'a' refused {FIRST + 1} connections from 1 address in the last 2 s: 6 sent no proof in time"
    ]
    worker.refuse(Refusal.LATE, 1)
    assert not [timer for timer in worker.timers if timer.action is not None]


def test_the_addresses_that_are_kept_are_bounded(lines: Callable[[], list[str]]) -> None:
    worker = Worker()
    worker.log.add_dropped({f"10.0.{number // 256}.{number % 256}": 1 for number in range(1000)})
    assert len(worker.log._sources) == MAX_SOURCES + 1
    worker.advance(INTERVAL)
    assert f"from more than {MAX_SOURCES} addresses" in lines()[0]
