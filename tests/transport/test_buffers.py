"""The pool reuses a buffer only when nothing refers to it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from telegrad.transport.buffers import BufferPool

MB = 1024 * 1024


def where(buffer: memoryview) -> int:
    """Return the address of the memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("size", [0, 1, 1000, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, 3 * MB + 5])
def test_a_buffer_is_writable_and_has_exactly_the_requested_size(size: int) -> None:
    buffer = BufferPool().take(size)
    assert len(buffer) == size
    buffer[:] = b"x" * size
    assert bytes(buffer) == b"x" * size


def test_a_buffer_that_nothing_refers_to_is_reused() -> None:
    pool = BufferPool()
    buffer = pool.take(MB)
    first = where(buffer)
    del buffer
    assert where(pool.take(MB)) == first
    assert pool.held() == MB


def test_nearly_equal_sizes_share_a_buffer() -> None:
    pool = BufferPool()
    buffer = pool.take(MB + 1)
    first = where(buffer)
    del buffer
    again = pool.take(MB + 100_000)
    assert where(again) == first
    assert len(again) == MB + 100_000


def test_a_buffer_in_use_is_not_reused() -> None:
    pool = BufferPool()
    taken = [pool.take(MB) for _ in range(5)]
    assert len({where(buffer) for buffer in taken}) == 5


@pytest.mark.parametrize(
    "view", [lambda b: b[10:20], lambda b: b.cast("b"), lambda b: b.obj], ids=["slice", "cast", "obj"]
)
def test_anything_made_from_a_buffer_keeps_it_in_use(view: object) -> None:
    pool = BufferPool()
    buffer = pool.take(MB)
    first = where(buffer)
    kept = view(buffer)  # type: ignore[operator]  # one of the three above
    del buffer
    assert where(pool.take(MB)) != first
    del kept
    assert where(pool.take(MB)) == first


def test_a_tensor_over_a_buffer_keeps_it_in_use_until_its_storage_is_freed() -> None:
    pool = BufferPool()
    buffer = pool.take(MB)
    first = where(buffer)
    tensor = torch.frombuffer(buffer, dtype=torch.float32, count=16, offset=64)
    del buffer
    tensor.fill_(7.0)
    other = pool.take(MB)
    other[:] = bytes(MB)
    assert where(other) != first
    assert torch.equal(tensor, torch.full((16,), 7.0))
    part = tensor.view(4, 4)[1:]
    del tensor
    assert where(pool.take(MB)) != first
    kept_by_graph = (part.requires_grad_() * part).sum()
    del part
    assert where(pool.take(MB)) != first
    kept_by_graph.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    del kept_by_graph
    assert first in [where(buffer) for buffer in [pool.take(MB), pool.take(MB), pool.take(MB)]]


def test_the_pool_keeps_no_more_than_its_limit() -> None:
    pool = BufferPool(keep=3 * MB)
    taken = [pool.take(MB) for _ in range(10)]
    assert pool.held() == 3 * MB
    assert len({where(buffer) for buffer in taken}) == 10
    del taken
    assert pool.held() == 3 * MB


def test_free_buffers_make_room_for_other_sizes() -> None:
    pool = BufferPool(keep=4 * MB)
    taken = [pool.take(MB) for _ in range(4)]
    addresses = [where(buffer) for buffer in taken]
    del taken[2:]
    large = pool.take(2 * MB)
    assert pool.held() == 4 * MB
    again = where(large)
    del large
    assert where(pool.take(2 * MB)) == again, "it was kept in place of the two free ones"
    assert [where(buffer) for buffer in taken] == addresses[:2]


def test_buffers_in_use_are_not_dropped_to_make_room() -> None:
    pool = BufferPool(keep=4 * MB)
    taken = [pool.take(MB) for _ in range(4)]
    large = pool.take(2 * MB)
    assert pool.held() == 4 * MB
    first = where(taken[0])
    del large, taken
    assert first in [where(buffer) for buffer in [pool.take(MB) for _ in range(4)]]


def test_small_buffers_are_not_kept() -> None:
    pool = BufferPool()
    pool.take(1000)
    assert pool.held() == 0


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(keep=2 * MB)
    together = threading.Barrier(4)
    spoilt: list[int] = []

    def use(mark: int) -> None:
        together.wait(20)
        for _ in range(300):
            buffer = pool.take(128 * 1024)
            buffer[:] = bytes([mark]) * len(buffer)
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            del buffer
            if not bool((tensor == mark).all()):
                spoilt.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not spoilt
    assert pool.held() <= 2 * MB


def test_trimming_drops_only_free_buffers() -> None:
    pool = BufferPool()
    used, free = pool.take(8 * MB), pool.take(MB)
    used[:4] = b"kept"
    del free
    pool.trim()
    assert pool.held() == 8 * MB
    first = where(used)
    assert where(pool.take(8 * MB)) != first
    assert bytes(used[:4]) == b"kept"
    del used
    pool.trim()
    assert pool.held() == 0


def test_new_large_buffers_take_no_memory_before_they_are_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    pool, before = BufferPool(), resident()
    buffer = pool.take(256 * MB)
    assert resident() - before < 64 * MB
    buffer[-1] = 1
    assert len(buffer) == 256 * MB
