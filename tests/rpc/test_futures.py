"""A future keeps its result for as long as somebody keeps the future, and no longer."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.api import acting_as
from telegrad.testing.group import local_group


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_result_of_an_asynchronous_call_dies_with_its_future(transport: str) -> None:
    with local_group(transport=transport) as group, acting_as(group["a"]):
        for _ in range(3):
            future = rpc.rpc_async("b", operator.neg, (torch.ones(100_000),))
            result = future.wait()
            died = threading.Event()
            weakref.finalize(result, died.set)
            del future, result
            assert died.wait(20)
