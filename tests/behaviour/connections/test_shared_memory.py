"""Shared memory between processes: values are correct, and nothing leaks during calls, shutdown or crashes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
from telegrad import launch, rpc
from telegrad.default_agent import default_agent
from telegrad.errors import WorkerLost

MB = 1 << 20
_kept: list[torch.Tensor] = []
"""Tensors that a worker was asked to keep."""


def mapped(pid: int | str = "self") -> int:
    """Return how many slabs a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:telegrad")


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def in_use() -> int:
    """Return how many bytes of this worker's slabs are in use."""
    return sum(slab.allocator.in_use for slab in default_agent().local.slabs.slabs)


# -- functions that run in the workers ------------------------------------------------------------------------


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def change(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def keep(x: torch.Tensor) -> int:
    _kept.append(x)
    return len(_kept)


def kept() -> list[torch.Tensor]:
    return _kept


def is_first() -> bool:
    return telegrad.get_worker_info().id == 0


def figures() -> tuple[int, int, int]:
    return memory("VmRSS"), mapped(), in_use()


def modify_on_both_sides() -> int:
    if not is_first():
        return 0
    for size in (100_000, MB, 4 * MB):
        for _ in range(5):
            x = torch.rand(size // 4)
            before = x.clone()
            doubled = rpc.rpc_sync("worker1", change, (x,))
            assert torch.equal(x, before)
            future = rpc.rpc_async("worker1", change, (x,))
            x.zero_()  # after it was sent
            assert torch.equal(doubled, before * 2)
            assert torch.equal(future.wait(), before * 2)
    return mapped()


def keep_on_worker1(count: int) -> tuple[int, int]:
    if not is_first():
        return 0, 0
    sent = [torch.full((MB // 4,), float(number)) for number in range(count)]
    for x in sent:
        rpc.rpc_sync("worker1", keep, (x,))
    for _ in range(2):
        for x, there in zip(sent, rpc.rpc_sync("worker1", kept), strict=True):
            assert torch.equal(x, there)
    return mapped(), default_agent().local.slabs.total


def call_many_times(count: int) -> tuple[Any, Any]:
    if not is_first():
        return 0, 0
    x = torch.rand(20_000)

    def call(times: int) -> Any:
        for number in range(times):
            x[0] = number
            assert rpc.rpc_sync("worker1", echo, (x,))[0] == number
        return figures(), rpc.rpc_sync("worker1", figures)

    return call(count // 5), call(count)


def use_after_shutdown() -> float:
    if not is_first():
        return 0.0
    for _ in range(3):
        got = rpc.rpc_sync("worker1", change, (torch.ones(MB),))
    assert mapped() > 0
    rpc.shutdown()
    got.add_(1)
    total = float(got.sum())
    del got
    assert mapped() == 0
    return total


def call_forever() -> None:
    while True:
        rpc.rpc_sync("worker1", change, (torch.ones(MB),))


def lose_worker1(note: str) -> tuple[float, int, int]:
    if not is_first():
        threading.Event().wait(60)
        return 0.0, 0, 0
    for _ in range(3):
        got = rpc.rpc_sync("worker1", change, (torch.ones(MB),))
        rpc.rpc_sync("worker1", keep, (got,))
    assert mapped(rpc.rpc_sync("worker1", os.getpid)) > 0
    Path(note).touch()
    with pytest.raises(WorkerLost):
        call_forever()
    total = float(got.sum())
    del got
    slabs = default_agent().local.slabs
    # The loss is reported a moment before the memory shared with the worker is unmapped.
    deadline = time.monotonic() + 20
    while mapped() and time.monotonic() < deadline:
        os.sched_yield()
    return total, mapped(), slabs.total


def sum_of(x: torch.Tensor) -> tuple[float, int]:
    """Return the sum of a few elements, which needs little memory, and the peak memory of this process."""
    return float(x[:: len(x) // 8].sum()), memory("VmHWM")


def rss() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return memory("VmRSS")


def send_and_watch(size: int, times: int) -> list[tuple[int, int]]:
    """Return how far the memory peaks of both processes rise above their usage before the first call."""
    if not is_first():
        return []
    x = torch.ones(size // 4)
    rpc.rpc_sync("worker1", sum_of, (torch.ones(16),))
    mine, theirs = rss(), rpc.rpc_sync("worker1", rss)
    peaks = []
    for _ in range(times):
        total, peak = rpc.rpc_sync("worker1", sum_of, (x,))
        assert total == 8.0
        peaks.append((memory("VmHWM") - mine, peak - theirs))
    return peaks


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * x


def largest_gradient_error() -> float:
    if not is_first():
        return 0.0
    worst = 0.0
    for _ in range(4):
        x = torch.rand(MB // 4, requires_grad=True)
        with telegrad.autograd.context() as context:
            loss = (rpc.rpc_sync("worker1", scale, (x,)) * x).sum()
            telegrad.autograd.backward(context, [loss])
            found = telegrad.autograd.get_gradients(context)[x]
        worst = max(worst, float((found - 3 * x.detach() ** 2).abs().max()))
    assert mapped() > 0
    return worst


# -- tests ----------------------------------------------------------------------------------------------------


def test_neither_side_sees_later_modifications_of_the_other() -> None:
    slabs, _ = launch.local(modify_on_both_sides, 2, timeout=90)
    assert slabs > 0


@pytest.mark.parametrize("bound", [0, 4 * MB, 16 * MB])
def test_tensors_that_do_not_fit_into_shared_memory_still_arrive(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SHARED_MEMORY", str(bound))
    (slabs, total), _ = launch.local(keep_on_worker1, 2, (40,), timeout=90)
    assert total <= bound
    assert (slabs > 0) == (bound > 0)


def test_memory_stays_flat_over_ten_thousand_calls() -> None:
    (early, late), _ = launch.local(call_many_times, 2, (10_000,), timeout=110)
    for before, after in zip(early, late, strict=True):
        assert after[0] - before[0] < 8 * MB
        assert after[1] == before[1], "more slabs were mapped"
        assert after[2] <= before[2] + 2 * MB // 4


def test_gradients_sent_in_shared_memory_are_correct() -> None:
    worst, _ = launch.local(largest_gradient_error, 2, timeout=90)
    assert worst < 1e-5


def test_a_received_tensor_is_valid_after_shutdown() -> None:
    total, _ = launch.local(use_after_shutdown, 2, timeout=60)
    assert total == 3.0 * MB


def test_a_killed_worker_leaks_no_memory_and_invalidates_no_tensor(tmp_path: Path) -> None:
    note = tmp_path / "ready"
    with launch.start(lose_worker1, 2, (str(note),)) as group:
        deadline = time.monotonic() + 60
        while not note.exists():
            assert time.monotonic() < deadline, "the worker did not become ready"
        group.kill("worker1")
        total, slabs, counted = group.join(60)[0]
    assert total == 2.0 * MB
    assert slabs == 0
    assert counted == 0


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_sending_256_mb_raises_the_peak_by_one_copy_on_each_side(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    peaks, _ = launch.local(send_and_watch, 2, (256 * MB, 4), timeout=100)
    assert max(mine for mine, _ in peaks) < 1.1 * 256 * MB, peaks
    assert max(theirs for _, theirs in peaks) < 1.1 * 256 * MB, peaks
