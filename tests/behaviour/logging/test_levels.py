"""What a program logs at each level."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.options import Options
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

released = threading.Event()


def wait_for_release() -> None:
    released.wait(30)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)


def train(group: dict[str, Agent]) -> None:
    x = torch.ones(2, requires_grad=True)
    with acting_as(group["a"]), telegrad.autograd.context() as context:
        for _ in range(3):
            telegrad.rpc_sync("b", torch.neg, (torch.ones(1),))
        context.backward(telegrad.rpc_sync("b", torch.mul, (x, 2)).sum())


def shut_down(group: dict[str, Agent]) -> None:
    threads = [threading.Thread(target=agent.shutdown) for agent in group.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_debug_has_what_is_routine_and_no_line_for_each_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "telegrad"), local_group(["a", "b"]) as group:
        with acting_as(group["a"]):
            for _ in range(10):
                telegrad.rpc_sync("b", torch.neg, (torch.ones(1),))
        assert len(caplog.records) == 2  # for the connection, on both workers
        train(group)
        shut_down(group)
    debug = messages(caplog, logging.DEBUG)
    for said in (
        "worker 'a' connected to worker 'b' at unix://",
        "worker 'b' accepted a connection of worker 'a'",
        "context 0x",
        "is over on all workers",
        "a round of the shutdown",
    ):
        assert said in debug
    info = messages(caplog, logging.INFO)
    assert "worker 'a' leaves the group" in info
    assert "worker 'b' leaves the group" in info
    assert messages(caplog, logging.WARNING) == ""


def test_info_says_who_joins_and_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "telegrad"):
        telegrad.init_rpc("a", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{tmp_path}/s"))
        telegrad.shutdown()
    assert messages(caplog, logging.INFO).splitlines() == [
        "worker 'a' has joined the group of worker 'a'",
        "worker 'a' leaves the group",
    ]


def test_a_slow_call_is_a_warning_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    warned = threading.Event()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has waited" in record.getMessage():
                warned.set()

    handler = Notice()
    logging.getLogger("telegrad").addHandler(handler)
    try:
        with local_group(["a", "b"], settings=AgentSettings(slow_call=0.05)) as group, acting_as(group["a"]):
            released.clear()
            call = threading.Thread(target=group["a"].call, args=("b", wait_for_release))
            call.start()
            assert warned.wait(20)
            released.set()
            call.join()
    finally:
        released.set()
        logging.getLogger("telegrad").removeHandler(handler)
    said = messages(caplog, logging.WARNING)
    assert re.search(r"worker 'a' has waited 0\.\d+ s for ", said)
    assert "wait_for_release" in said
    assert "'b', which is not answered yet" in said


def test_slow_calls_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().settings().slow_call == 10
    assert Options(slow_call=0).settings().slow_call == 0
    monkeypatch.setenv("TELEGRAD_SLOW_CALL", "30")
    assert Options().settings().slow_call == 30
