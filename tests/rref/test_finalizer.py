"""Releasing handles that are garbage-collected."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from tests.support.rrefs import Counter, Group, Summing, becomes_true, nothing_is_held

from telegrad import rpc
from telegrad.default_agent import acting_as


def test_a_reference_from_a_proxy_does_not_keep_its_source_alive(group: Group) -> None:
    first = rpc.remote("b", Counter)
    second = first.remote().add(2)
    assert second.to_here() == 2
    del first
    assert becomes_true(lambda: group["b"].references.counts()["values"] == 1)


def test_a_futures_exception_keeps_no_reference_alive(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    future = rref.rpc_async().fail()
    with pytest.raises(Exception, match="1 and 2"):
        future.wait()
    del rref
    assert becomes_true(lambda: nothing_is_held(group))
    assert future.done()


def test_a_call_in_progress_keeps_its_reference_alive(group: Group) -> None:
    """The tensor is large: it would arrive after the message that the reference is gone."""
    large = torch.ones(1_000_000)
    for _ in range(10):
        future = rpc.remote("b", Summing).rpc_async().total(large)
        result = rpc.remote("b", Summing).remote().total(large)
        assert future.wait() == result.to_here() == 1e6


def test_references_are_collected_in_many_threads_while_others_are_created(group: Group) -> None:
    errors: list[BaseException] = []

    def make_and_drop() -> None:
        try:
            with acting_as(group["a"]):
                for number in range(40):
                    rref = rpc.remote("b", Counter, (number,))
                    cycle: list[Any] = [rref]
                    cycle.append(cycle)
                    assert rref.rpc_sync().add() == number + 1
        except BaseException as error:  # noqa: BLE001 - checked below
            errors.append(error)

    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_destructor_takes_no_lock(group: Group) -> None:
    """A destructor may run in a thread that holds any of the locks."""
    rref = rpc.remote("b", Counter)
    rref.to_here()
    manager = group["a"].references
    with manager.context.lock, manager.sequencer._lock, manager._finalizer._lock:
        del rref
        gc.collect()
