"""Tensors that nobody else can change are sent from where they are; the bytes on the wire are the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.support.message_stream import allocate

from telegrad.wire.frames import BULK_CHUNK, BULK_HEAD, CHUNK
from telegrad.wire.in_place import SMALLEST, InPlaceRegion, in_place, may_stay_in_place
from telegrad.wire.packing import OutgoingFrame, pack, pack_small
from telegrad.wire.tensors import encode_tensors

FLOATS = SMALLEST // 4


def tensors(*counts: int) -> list[torch.Tensor]:
    return [torch.rand(count) for count in counts]


def packed(attachments: list[torch.Tensor], data: bytes, owned: list[torch.Tensor]) -> tuple[OutgoingFrame, ...]:
    ids = {id(tensor) for tensor in owned}
    region = in_place(encode_tensors(attachments), lambda tensor: id(tensor) in ids, allocate)
    return pack(b"head", data, region, allocate)


def contents(frames: tuple[OutgoingFrame, ...]) -> list[tuple[int, bytes]]:
    return [(frame.kind, bytes(frame.body)) for frame in frames]


@pytest.mark.parametrize("data", [b"", b"data", b"d" * (CHUNK + 100)])
@pytest.mark.parametrize("counts", [(FLOATS,), (4 * FLOATS + 3,), (FLOATS + 1, 5, 2 * FLOATS), (3, 3 * FLOATS, FLOATS)])
def test_the_frames_are_those_of_a_copy(data: bytes, counts: tuple[int, ...]) -> None:
    attachments = tensors(*counts)
    for tensor in attachments:
        if tensor.numel() % 4:
            tensor.resize_(tensor.numel() // 4 * 4)  # or the padding is arbitrary memory in one of the two
    copied = packed(attachments, data, [])
    for owned in ([attachments[0]], attachments[-1:], attachments):
        assert contents(packed(attachments, data, owned)) == contents(copied)


def test_padding_after_a_tensor_is_not_memory_behind_it() -> None:
    (tensor,) = tensors(2 * FLOATS + 1)
    frames = packed([tensor], b"", [tensor])
    assert sum(len(frame.body) for frame in frames[1:]) == tensor.nbytes + 12


def test_only_chunks_that_hold_something_else_are_copied() -> None:
    (tensor,) = tensors(8 * FLOATS)
    frames = packed([tensor], b"data", [tensor])
    tensor.zero_()
    kinds = [frame.kind for frame in frames]
    changed = [not any(bytes(frame.body)) for frame in frames[1:]]
    assert kinds == [BULK_HEAD] + [BULK_CHUNK] * len(changed)
    assert changed == [False] + [True] * (len(changed) - 2) + [changed[-1]]
    assert frames[1].body[:4] == b"data"


def test_a_tensor_that_somebody_else_holds_is_copied() -> None:
    mine, other = tensors(4 * FLOATS, 4 * FLOATS)
    frames = packed([mine, other], b"", [mine])
    before = contents(frames)
    other.zero_()
    assert contents(frames) == before
    mine.zero_()
    assert contents(frames) != before


def test_frames_keep_the_memory_but_not_the_tensor() -> None:
    (tensor,) = tensors(2 * FLOATS)
    expected = bytes(tensor.view(torch.uint8).tolist())
    frames = packed([tensor], b"", [tensor])
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert b"".join(bytes(frame.body) for frame in frames[1:]) == expected


@pytest.mark.parametrize(
    "attachment",
    [
        torch.rand(FLOATS - 1),
        torch.rand(FLOATS, 2)[:, 0],
        torch.rand(1).expand(FLOATS),
        torch.rand(FLOATS, dtype=torch.complex64).conj(),
    ],
    ids=["small", "with gaps", "expanded", "conjugated"],
)
def test_what_is_small_or_not_dense_is_copied(attachment: torch.Tensor) -> None:
    layout = encode_tensors([attachment])
    assert in_place(layout, lambda tensor: True, allocate) is layout


@pytest.mark.parametrize("kind", ["small", "sparse", "meta"])
def test_other_kinds_of_tensors_do_not_stay_in_place(kind: str) -> None:
    made = {
        "small": torch.rand(8),
        "sparse": torch.eye(FLOATS // 64).to_sparse(),
        "meta": torch.empty(FLOATS, device="meta"),
    }
    large = torch.rand(FLOATS)
    assert not may_stay_in_place([made[kind]])
    assert may_stay_in_place([large])
    assert may_stay_in_place([made[kind], large]) is (kind == "small")
    assert not may_stay_in_place([large, "something else"])


def test_a_tensor_with_weak_references_does_not_stay_in_place() -> None:
    large = torch.rand(FLOATS)
    reference = weakref.ref(large)
    assert not may_stay_in_place([large])
    del reference
    assert may_stay_in_place([large])


def test_a_region_with_tensors_in_place_can_be_written_elsewhere() -> None:
    (tensor,) = tensors(FLOATS)
    region = in_place(encode_tensors([tensor]), lambda tensor: True, allocate)
    assert isinstance(region, InPlaceRegion)
    written = bytearray(region.size)
    region.write(memoryview(written))
    assert torch.equal(torch.frombuffer(written, dtype=torch.float32), tensor)
    assert len(pack_small(b"", b"", region).body) > region.size
