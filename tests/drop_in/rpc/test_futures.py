"""The futures of the drop-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.drop_in.rpc.futures import Future, collect_all, failed, wait_all


def test_an_exception_of_a_callback_becomes_a_runtime_error_as_in_torch() -> None:
    future: Future[int] = Future()
    following = future.then(lambda _: 1 + "x")  # type: ignore[operator]  # the error is the point
    future.set_result(1)
    with pytest.raises(RuntimeError, match="Got the following error when running the callback: TypeError"):
        following.wait()


@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_a_callback_must_be_callable(method: str) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(Future(), method)(None)


def test_collect_all_fails_as_soon_as_one_future_fails() -> None:
    never: Future[int] = Future()
    late: Future[int] = Future()
    together = collect_all([never, failed(ValueError("x")), late])
    late.set_result(1)
    with pytest.raises(ValueError, match="x"):
        together.wait()
    with pytest.raises(ValueError, match="x"):
        wait_all([never, failed(ValueError("x"))])


def test_collect_all_waits_for_all_futures_if_none_fails() -> None:
    futures: list[Any] = [Future(), Future()]
    together = collect_all(futures)
    futures[0].set_result(1)
    assert not together.done()
    futures[1].set_result(2)
    assert [future.wait() for future in together.wait()] == [1, 2]
    assert wait_all(futures) == [1, 2]


def test_torchs_own_futures_are_collected_by_torch() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    assert wait_all([future]) == [3]
    assert wait_all([]) == []
