"""Futures of calls: lifetime of their results, callbacks and completion."""

from __future__ import annotations

import gc
import operator
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.testing.group import local_group


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_result_of_a_call_is_freed_with_its_future(transport: str) -> None:
    with local_group(transport=transport) as group, acting_as(group["a"]):
        for _ in range(3):
            future = rpc.rpc_async("b", operator.neg, (torch.ones(100_000),))
            result = future.wait()
            died = threading.Event()
            weakref.finalize(result, died.set)
            del future, result
            assert died.wait(20)


class Latch:
    """An event that remote functions wait for. All workers are in this process."""

    released = threading.Event()


def wait_for_release() -> None:
    Latch.released.wait(20)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_callbacks_run_when_the_agent_is_closed_during_the_call(transport: str) -> None:
    """Otherwise the next future would never be done."""
    try:
        for _ in range(10):
            Latch.released.clear()
            with local_group(transport=transport) as group, acting_as(group["a"]):
                next_futures = [rpc.rpc_async("b", wait_for_release).then(_outcome_of) for _ in range(5)]
                group["a"].close()
                assert [future.wait(timeout=20) for future in next_futures] == ["WorkerLost"] * 5
                Latch.released.set()
    finally:
        Latch.released.set()


def test_the_value_of_a_future_that_is_not_done_is_an_error_that_says_what_to_call() -> None:
    Latch.released.clear()
    try:
        with local_group() as group, acting_as(group["a"]):
            future = rpc.rpc_async("b", wait_for_release)
            with pytest.raises(TelegradError, match=r"wait_for_release.* on worker 'b'.* has no value yet: wait\(\)"):
                future.value()
            Latch.released.set()
            assert future.wait() is None
            assert future.value() is None
    finally:
        Latch.released.set()
    with pytest.raises(TelegradError, match=r"nobody has completed, has no value yet: wait\(\)"):
        rpc.Future().value()


def _outcome_of(future: torch.futures.Future[object]) -> str:
    try:
        future.value()
    except TelegradError as error:
        return type(error).__name__
    return "returned"


def test_only_the_call_completes_its_future_even_while_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_group() as group, acting_as(group["a"]):
        begin = group["a"].client.begin

        def begin_slowly(*args: Any, **kwargs: Any) -> Any:
            call = begin(*args, **kwargs)
            future = args[5].__self__
            with pytest.raises(RuntimeError, match="can only be marked completed once"):
                future.set_result(4)
            return call

        monkeypatch.setattr(group["a"].client, "begin", begin_slowly)
        assert rpc.rpc_async("b", operator.neg, (3,)).wait() == -3


async def return_at_once() -> Any:
    return Result()


class Result:
    """A result that tracks its instances."""

    alive: ClassVar[weakref.WeakSet[Result]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> Any:
        return int, ()


@pytest.mark.usefixtures("no_collector")
def test_the_result_of_a_coroutine_is_freed_once_it_is_sent() -> None:
    with local_group() as group, acting_as(group["a"]):
        for _ in range(50):
            assert rpc.rpc_sync("b", return_at_once) == 0
        deadline = time.monotonic() + 20
        while Result.alive and time.monotonic() < deadline:
            os.sched_yield()
        assert not Result.alive
