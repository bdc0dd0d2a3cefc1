"""Coroutines run with their own grad mode, and errors that exit end only their call."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch
from tests.support.executors import ExecutorHarness

from telegrad.calls.call import Served
from telegrad.errors import RemoteError
from telegrad.execution.event_loop import EventLoop, InGradMode
from telegrad.testing.group import local_group


async def toggle(steps: int) -> list[bool]:
    seen = []
    for _ in range(steps):
        seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not torch.is_grad_enabled())
        await asyncio.sleep(0)
    return seen


async def clean_up(done: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        done.append("cancelled")
        await asyncio.sleep(0)
        raise
    finally:
        done.append("cleaned up")


async def fail() -> None:
    await asyncio.sleep(0)
    raise KeyError("unchanged")


def test_each_coroutine_has_its_own_grad_mode_and_the_thread_keeps_its_own() -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(asyncio.ensure_future(InGradMode(toggle(4), mode)) for mode in (True, False)))

    assert asyncio.run(main()) == [[True, False, True, False], [False, True, False, True]]
    assert torch.is_grad_enabled()


def test_errors_and_cancellation_reach_the_caller_and_the_coroutine() -> None:
    done: list[str] = []

    async def main() -> None:
        with pytest.raises(KeyError, match="unchanged"):
            await asyncio.ensure_future(InGradMode(fail(), mode=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(InGradMode(clean_up(done), mode=False)), 0.01)

    asyncio.run(main())
    assert done == ["cancelled", "cleaned up"]


def test_a_coroutine_cancelled_before_its_start_leaves_no_warning() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(InGradMode(toggle(1), mode=True))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()


async def leave(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def one() -> int:
    return 1


class Unpicklable:
    def __reduce__(self) -> Any:
        raise SystemExit(8)


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt()])
def test_a_coroutine_that_exits_fails_only_its_call(error: BaseException) -> None:
    with local_group() as group:
        with pytest.raises(RemoteError, match=type(error).__name__):
            group["a"].call("b", leave, (error,), timeout=20)
        assert group["a"].call("b", one, (), timeout=20) == 1


def test_a_result_whose_pickling_exits_fails_its_call() -> None:
    with local_group() as group, pytest.raises(RemoteError, match="SystemExit"):
        group["a"].call("b", Unpicklable, (), timeout=20)


def test_the_loop_keeps_no_call_that_has_ended() -> None:
    async def return_soon() -> str:
        await asyncio.sleep(0)
        return "done"

    with local_group(["a", "b"]) as group:
        group["b"].register("soon", return_soon)
        assert group["a"].call("b", "@soon") == "done"
        assert group["a"].call("b", abs, (-1,)) == 1  # the reply of the first one has been sent
        gc.collect()
        assert [item.function for item in gc.get_objects() if type(item) is Served and item.function == "@soon"] == []


def test_a_coroutine_that_comes_while_the_loop_closes_is_cancelled(
    harness: ExecutorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventLoop(harness.runtime, harness.executor)
    closing = threading.Thread(target=events.close)
    started, ended = EventLoop._started, threading.Event()
    errors: list[BaseException | None] = []

    def started_and_closing(self: EventLoop) -> asyncio.AbstractEventLoop:
        loop = started(self)
        closing.start()
        closing.join(0.2)  # it has to wait for run()
        return loop

    def done(result: object, error: BaseException | None) -> None:
        errors.append(error)
        ended.set()

    monkeypatch.setattr(EventLoop, "_started", started_and_closing)
    events.run(clean_up([]), done)
    closing.join(20)
    assert ended.wait(20)
    assert [type(error) for error in errors] == [asyncio.CancelledError]
