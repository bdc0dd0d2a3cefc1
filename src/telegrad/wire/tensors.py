"""Encode the contents of tensors into one block of memory, and restore them on the receiver.

The block is called a region. The sender describes each attachment with a ``TensorDescriptor`` and copies its bytes to a
multiple of 16. That copy is a snapshot (with the exception of `in_place`). The receiver checks every descriptor against
the region, and creates tensors over the region itself. Tensors keep their properties, with these rules:

- A dense tensor keeps its strides. Of a view with gaps, or an expanded one, only its own elements are sent, contiguous.
- Tensors of one message that overlap share memory and a version counter on the receiver: the span from their lowest to
  their highest byte is sent once (see `overlap`). Tensors that merely share a storage do not.
- Tensors on devices are copied through host memory (see `staging`). The sender says where they go (see `devices`).
- Conjugated and negated views are resolved, unless they overlap with another tensor.
- Leaves keep ``requires_grad``. ``.grad`` and hooks are not sent.
- Small attachments are copied out of a large region, so that a scalar does not keep a gigabyte alive.
- No torch state of the calling thread (default device, grad or inference mode, user-defined modes) has an effect.

>>> import torch
>>> x = torch.arange(6.0).reshape(2, 3).t()
>>> layout = encode_tensors([x])
>>> region = bytearray(layout.size)
>>> layout.write(region)
>>> y = decode_tensors(layout.descriptors, region)[0]
>>> bool((y == x).all()), y.stride()
(True, (1, 3))
"""

from __future__ import annotations

from telegrad.wire.descriptors import TensorDescriptor
from telegrad.wire.tensor_decode import decode_tensors
from telegrad.wire.tensor_encode import RegionLayout, encode_tensors

__all__ = ["RegionLayout", "TensorDescriptor", "decode_tensors", "encode_tensors"]
