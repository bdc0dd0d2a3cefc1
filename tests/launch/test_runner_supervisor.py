"""The loop of a launcher whose workers run under runners. Whole groups are tested in tests/behaviour/cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from telegrad.launch.runner_engine import Engine, Work
from telegrad.launch.runner_messages import Hello
from telegrad.launch.runner_supervisor import RunnerSupervisor
from telegrad.launch.runner_worker import RunnerWorker


def test_a_runner_with_a_rank_that_the_group_does_not_have_is_named(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []
    channel = SimpleNamespace(close=lambda: closed.append("channel"))
    listener: Any = SimpleNamespace(connected=lambda: [(channel, Hello(7, "here"))])
    workers = {"a": RunnerWorker("a", 0, {})}
    supervisor = RunnerSupervisor(Work(["a"]), Engine("srun", [], listener=listener), workers, 1.0)
    try:
        cast("Any", supervisor)._on_connected()
    finally:
        supervisor.requests.close()
        cast("Any", supervisor)._selector.close()
    assert closed == ["channel"]
    assert "srun has started a runner of rank 7, but the group has 1 workers" in caplog.text
    assert workers["a"].channel is None
