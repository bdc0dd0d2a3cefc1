"""Shared memory lives exactly as long as something refers to it, and a peer cannot truncate it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
import torch

from telegrad.transport.memory_map import SharedMapping, check_memory, make_memory, view_of

SIZE = 1 << 20


def mapped() -> int:
    """Return how many mappings of telegrad's memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:telegrad")


@pytest.fixture
def fd() -> int:
    return make_memory(SIZE)


def test_two_mappings_of_one_descriptor_are_the_same_memory(fd: int) -> None:
    before = mapped()
    first, second = SharedMapping(fd, SIZE), SharedMapping(fd, SIZE)
    os.close(fd)
    assert mapped() == before + 2
    view_of(first.block(4096, 100))[:5] = b"hello"
    assert bytes(view_of(second.block(4000, 200))[96:101]) == b"hello"
    del first, second
    assert mapped() == before


def test_a_tensor_keeps_the_mapping_alive_and_its_end_is_noticed(fd: int) -> None:
    before, died = mapped(), []
    mapping = SharedMapping(fd, SIZE)
    os.close(fd)
    block = mapping.block(0, 8192)
    notice = weakref.ref(block, died.append)
    view = view_of(block)
    tensor = torch.frombuffer(view, dtype=torch.float32, count=16, offset=64)
    part = view[10:20]
    del mapping, block, view
    tensor.fill_(3.0)
    assert mapped() == before + 1
    assert died == []
    del part
    other = tensor.view(4, 4)[1:]
    del tensor
    assert died == []
    assert float(other.sum()) == 36.0
    del other
    assert died == [notice]
    assert mapped() == before


def test_memory_cannot_be_resized(fd: int) -> None:
    for size in (SIZE // 2, 2 * SIZE):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, size)
    check_memory(fd, SIZE)
    os.close(fd)


def test_memory_that_a_peer_could_truncate_is_refused(tmp_path: Path) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SIZE)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, SIZE)
    small = make_memory(SIZE // 2)
    for refused in (loose, plain, small):
        with pytest.raises(OSError):
            check_memory(refused, SIZE)
        os.close(refused)


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (0, 0), (0, SIZE + 1), (SIZE, 1), (SIZE - 10, 11)])
def test_a_block_outside_of_its_mapping_is_an_error(fd: int, offset: int, size: int) -> None:
    mapping = SharedMapping(fd, SIZE)
    os.close(fd)
    with pytest.raises(ValueError, match="are not in a mapping"):
        mapping.block(offset, size)


def test_a_mapping_that_the_system_refuses_is_an_oserror(fd: int) -> None:
    os.close(fd)
    with pytest.raises(OSError, match="cannot map"):
        SharedMapping(fd, SIZE)
