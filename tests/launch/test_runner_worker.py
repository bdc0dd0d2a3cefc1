"""One worker under a runner, as its launcher sees it. Whole groups are tested in tests/behaviour/cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.launch.runner_messages import STDERR, STDOUT, Hello
from telegrad.launch.runner_worker import RunnerWorker


def make(close: Any = lambda: None) -> RunnerWorker:
    printer = SimpleNamespace(feed=lambda piece: None, close=close)
    return RunnerWorker("a", 0, {STDOUT: printer, STDERR: printer})


def channel(closed: list[str]) -> Any:
    return SimpleNamespace(close=lambda: closed.append("channel"))


def test_a_runner_sees_the_end_though_nothing_can_be_printed() -> None:
    def full() -> None:
        raise OSError("no space left on device")

    closed: list[str] = []
    worker = make(full)
    worker.connect(channel(closed), Hello(0, "here"))
    with pytest.raises(OSError, match="no space left"):
        worker.close()
    assert closed == ["channel"]
    assert worker.channel is None


def test_a_later_start_is_not_the_one_that_was_killed() -> None:
    worker = make()
    worker.killed_on_purpose = True  # before its runner was there
    worker.connect(channel([]), Hello(0, "here"))
    assert worker.killed_on_purpose
    worker.connect(channel([]), Hello(0, "here", restart=1))
    assert not worker.killed_on_purpose
