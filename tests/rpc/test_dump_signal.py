"""SIGUSR1 writes what a worker does, at any moment, and harms nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until

from telegrad import observe
from telegrad.agent.agent import Agent
from telegrad.rpc import dump_signal
from telegrad.rpc.dump_signal import DumpOnSignal
from telegrad.testing.group import local_group


@pytest.fixture
def agent() -> Iterator[Agent]:
    with local_group(["a"]) as group:
        yield group["a"]


@pytest.fixture
def handler(agent: Agent) -> Iterator[DumpOnSignal]:
    made = DumpOnSignal(agent)
    yield made
    made.restore()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_signal_writes_what_is_going_on(handler: DumpOnSignal, capfd: pytest.CaptureFixture[str]) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: not handler._dumping)
    assert "Nothing is in progress." in capfd.readouterr().err


def test_a_burst_of_signals_is_merged(handler: DumpOnSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, dumps = threading.Event(), threading.Event(), []

    def dump() -> None:
        dumps.append(threading.get_ident())
        begun.set()
        assert go.wait(20)

    monkeypatch.setattr(observe, "dump", dump)
    for _ in range(200):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert begun.wait(20)
    go.set()
    wait_until(lambda: not handler._dumping)
    assert len(dumps) == 2


def test_a_shortage_of_threads_raises_nothing_in_the_program(
    handler: DumpOnSignal, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(dump_signal, "start_new_thread", fail)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "worker 'a' cannot write what it is doing: can't start new thread" in capfd.readouterr().err
    os.kill(os.getpid(), signal.SIGUSR1)  # the next one finds a thread
    wait_until(lambda: not handler._dumping)
    assert "Nothing is in progress." in capfd.readouterr().err


def test_a_handler_of_the_program_stays(agent: Agent) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        made = DumpOnSignal(agent)
        os.kill(os.getpid(), signal.SIGUSR1)
        made.restore()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_program_sets_later_stays(agent: Agent) -> None:
    made = DumpOnSignal(agent)
    later = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert later is made
        made.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_the_handler_of_an_agent_that_another_thread_has_closed_is_replaced() -> None:
    with local_group(["a"]) as old, local_group(["b"]) as new:
        first = DumpOnSignal(old["a"])
        old["a"].close()
        thread = threading.Thread(target=first.restore)
        thread.start()
        thread.join()
        second = DumpOnSignal(new["b"])
        assert signal.getsignal(signal.SIGUSR1) is second
        second.restore()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
