"""Proxies of an RRef's value that a program creates itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.drop_in import rpc
from telegrad.drop_in.rpc import rref_proxy
from telegrad.drop_in.rpc.functions import async_execution


@async_execution
def later(x: int) -> Any:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future.then(lambda done: done.wait() * 2)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @async_execution
    def add_later(self, number: int) -> Any:
        return later(number)


@pytest.mark.usefixtures("agents")
def test_a_proxy_can_use_any_function_that_makes_calls() -> None:
    counter = rpc.remote("b", Counter)
    assert rref_proxy.RRefProxy(counter, rpc.rpc_sync).add(1) == 1
    assert rref_proxy.RRefProxy(counter, rpc.rpc_async).add(1).wait() == 2
    assert rref_proxy.RRefProxy(counter, rpc.remote, 10.0).add(1).to_here() == 3
    calls = []

    def custom_api(to: Any, func: Any, args: Any, timeout: float) -> Any:
        calls.append(to.name)
        return rpc.rpc_sync(to, func, args, timeout=timeout)

    assert rref_proxy.RRefProxy(counter, custom_api).add(1) == 4
    assert rref_proxy.RRefProxy(counter, custom_api).add_later(1) == 4
    assert calls == ["b", "b"]
