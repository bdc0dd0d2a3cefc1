"""Descriptors of tensors, and the region that they describe. An input is msgpack: descriptors, size of the region."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import msgspec
import torch

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.errors import PayloadError, ProtocolError
from telegrad.wire.tensors import TensorDescriptor, decode_tensors, encode_tensors

MOST = 1 << 16
_decoder = msgspec.msgpack.Decoder(tuple[tuple[TensorDescriptor, ...], bytes, int])


def _run(data: bytes) -> None:
    try:
        descriptors, contents, size = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # `decode_head` refuses it: see the target "messages"
    region = bytearray(max(0, min(size, MOST)))
    region[: len(contents)] = contents[: len(region)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attachment in decode_tensors(descriptors, region):
            _check(attachment, region)


def _check(attachment: torch.Tensor | memoryview, region: bytearray) -> None:
    """Check that all elements lie in the region."""
    if isinstance(attachment, memoryview):
        assert attachment.nbytes <= len(region)
        return
    if (
        attachment.is_meta
        or attachment.is_quantized
        or attachment.layout is not torch.strided
        or not attachment.numel()
    ):
        return
    strides: Sequence[int] = attachment.stride()
    last = sum((size - 1) * step for size, step in zip(attachment.shape, strides, strict=True))
    assert last >= 0
    start = attachment.data_ptr() - torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    assert start >= 0
    assert start + (last + 1) * attachment.itemsize <= len(region)


def _seeds() -> Iterable[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of sparse and quantised tensors
        yield from _encoded(_tensors())


def _tensors() -> list[list[torch.Tensor]]:
    x = torch.arange(12.0)
    return [
        [x],
        [x.view(3, 4).t(), torch.tensor(1), torch.empty(0, 2)],
        [x, x[2:5], x.view(3, 4)],
        [torch.ones(2, 3).to_sparse()],
        [torch.ones(2, 2).to_sparse_csr(), torch.ones(2, 2).to_sparse_csc()],
        [torch.ones(4, 4).to_sparse_bsr((2, 2))],
        [torch.quantize_per_tensor(x, 0.5, 3, torch.qint8)],
        [torch.quantize_per_channel(x.view(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int64), 0, torch.qint8)],
        [torch.ones(2, dtype=torch.complex64).conj(), torch.empty(3, device="meta")],
        [torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True])],
    ]


def _encoded(groups: Iterable[Sequence[torch.Tensor]]) -> Iterable[bytes]:
    for group in groups:
        layout = encode_tensors(group)
        region = bytearray(layout.size)
        layout.write(memoryview(region))
        yield msgspec.msgpack.encode((layout.descriptors, bytes(region), layout.size))


TENSORS = Target("tensors", _run, (ProtocolError, PayloadError), _seeds, mutate_msgpack)
