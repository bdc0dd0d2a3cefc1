"""Descriptors of attachments, and checks of descriptors received from a peer.

A descriptor is untrusted: every number in it is checked here or in `tensor_decode` before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from telegrad.errors import LimitExceeded, PayloadError, ProtocolError

ALIGNMENT = 16
MAX_DIMENSIONS = 64

# Forms of a descriptor. The numbers are part of the protocol.
STRIDED, BUFFER, VIEW, META, COO, CSR, CSC, BSR, BSC, QUANTIZED, QUANTIZED_CHANNELS, DIRECT = range(12)

# How a VIEW relates to the tensors that it overlaps with: the base of the others, a view of the base, a detached view
# of it, or none of these. And how its elements are interpreted.
UNRELATED, ROOT, VIEW_OF_ROOT, DETACHED = range(4)
CONJUGATED, NEGATED = 1, 2

COMPRESSED = {CSR: torch.sparse_csr, CSC: torch.sparse_csc, BSR: torch.sparse_bsr, BSC: torch.sparse_bsc}
COMPRESSED_FORM = {layout: form for form, layout in COMPRESSED.items()}

# A dtype is sent as its index in this table, so new ones are appended.
DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("qint8", "quint8", "qint32"),
)
DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in DTYPE_NAMES)
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}
PLAIN_CODES = {dtype: code for dtype, code in CODES.items() if code < CODES[torch.qint8] and not dtype.is_complex}
"""Those of dtypes that are neither quantised nor can be conjugated: a contiguous tensor is its memory."""
# torch cannot copy elements of these dtypes. Each element is one byte, so they are copied as bytes.
COPIED_AS_BYTES = frozenset(getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8))

INT64_MAX = 2**63 - 1


class TensorDescriptor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one attachment is stored in the region. Untrusted if it was received from a peer.

    Python's garbage collector need not visit it: it cannot be part of a cycle, and a message may have thousands.
    """

    form: int
    dtype: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()  # empty if contiguous
    requires_grad: bool = False
    device: str = ""  # empty for the CPU
    parts: tuple[TensorDescriptor, ...] = ()
    """The plain tensors that make up a sparse or quantised one, or the handle of a DIRECT one."""
    detail: tuple[int | float, ...] = ()
    """VIEW: span bytes, first element, relation, interpretation. COO: coalesced. QUANTIZED*: parameters."""


def code_of(dtype: torch.dtype) -> int:
    """Return the code of a dtype."""
    code = CODES.get(dtype)
    if code is None:
        raise PayloadError(f"a tensor of {dtype} cannot be sent: convert it to another dtype first")
    return code


def dtype_of(descriptor: TensorDescriptor) -> torch.dtype:
    """Return the dtype of a descriptor. Raise if it is unknown or this torch does not have it."""
    code = descriptor.dtype
    if not 0 <= code < CODES[torch.qint8]:  # a quantised tensor gets its dtype from its parts
        raise ProtocolError(f"a peer announces a tensor of form {descriptor.form} and unknown dtype {code}")
    dtype = DTYPES[code]
    if dtype is None:
        raise PayloadError(
            f"received a tensor of torch.{DTYPE_NAMES[code]}, but torch {torch.__version__} has no such dtype"
        )
    return dtype


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance in elements from the first to the last element in memory, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def checked_extent(descriptor: TensorDescriptor) -> int:
    """Return the extent of a descriptor in elements, after checking its shape and strides.

    Sizes of 0 count as 1 in the bound, because torch multiplies the others even for an empty tensor.
    """
    shape, stride = descriptor.shape, descriptor.stride
    if len(shape) > MAX_DIMENSIONS:
        raise LimitExceeded(f"a peer announces a tensor of {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
    bound = 16  # the size of the largest element, so byte counts fit too
    for size in shape:
        if size < 0:
            raise ProtocolError(f"a peer announces a tensor of negative size: {shape}")
        bound *= size or 1
    if bound > INT64_MAX:
        raise LimitExceeded(f"a peer announces a tensor larger than any memory: {shape}")
    if not stride:
        return math.prod(shape)
    if len(stride) != len(shape) or min(stride) < 0 or max(stride) > INT64_MAX:
        raise ProtocolError(f"a peer announces strides {stride} for a tensor of shape {shape}")
    extent = extent_of(shape, stride)
    if extent * 16 > INT64_MAX:
        raise LimitExceeded(f"a peer announces a tensor larger than any memory: {shape}, strides {stride}")
    return extent


def integers_of(descriptor: TensorDescriptor, count: int) -> tuple[int, ...]:
    """Return the details of a form that has `count` of them, all integers."""
    detail = descriptor.detail
    numbers = tuple([number for number in detail if isinstance(number, int)])
    if len(detail) != count or len(numbers) != count:
        raise ProtocolError(f"a peer announces a tensor of form {descriptor.form} with invalid details {detail}")
    return numbers
