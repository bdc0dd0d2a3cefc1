"""A coroutine has a grad mode of its own, and is in all else what it was."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from telegrad.errors import RemoteError
from telegrad.execution.event_loop import InGradMode
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
    raise KeyError("as it is")


def test_each_has_its_own_mode_and_the_thread_keeps_its_own() -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(asyncio.ensure_future(InGradMode(toggle(4), mode)) for mode in (True, False)))

    assert asyncio.run(main()) == [[True, False, True, False], [False, True, False, True]]
    assert torch.is_grad_enabled()


def test_errors_and_timeouts_go_their_ways() -> None:
    done: list[str] = []

    async def main() -> None:
        with pytest.raises(KeyError, match="as it is"):
            await asyncio.ensure_future(InGradMode(fail(), mode=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(InGradMode(clean_up(done), mode=False)), 0.01)

    asyncio.run(main())
    assert done == ["cancelled", "cleaned up"]


def test_one_that_is_cancelled_before_it_has_begun_leaves_no_warning() -> None:
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
def test_a_coroutine_that_exits_fails_its_call_only(error: BaseException) -> None:
    with local_group() as group:
        with pytest.raises(RemoteError, match=type(error).__name__):
            group["a"].call("b", leave, (error,), timeout=20)
        assert group["a"].call("b", one, (), timeout=20) == 1


def test_a_result_whose_pickling_exits_fails_its_call() -> None:
    with local_group() as group, pytest.raises(RemoteError, match="SystemExit"):
        group["a"].call("b", Unpicklable, (), timeout=20)
