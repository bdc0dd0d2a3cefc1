"""The contents of tensors travel beside the pickle, in one block of memory; this module fills that block and reads it.

The block is called a region. The sender describes each attachment with a ``TensorDescriptor`` and writes its bytes at a
multiple of 16; that copy is the snapshot. The receiver checks every descriptor against the region before it believes
it, and makes tensors that lie in the region itself. What arrives is what was sent, with these rules:

- A dense tensor keeps its strides. A view with gaps, or an expanded one, ships its own elements only, contiguous.
- CPU tensors of one message that overlap share memory on arrival, and a version counter: the span from their lowest to
  their highest byte ships once (see `overlap`). Views that only lie in one storage do not.
- Conjugated and negated views are resolved, unless they overlap with another tensor.
- ``requires_grad`` arrives as it was, on leaves. ``.grad`` and hooks stay behind.
- Small attachments are copied out of a large region, so that a scalar does not keep a gigabyte alive.
- Nothing of the calling thread's torch state (default device, grad or inference mode, modes of the user) is inherited.

>>> x = torch.arange(6.0).reshape(2, 3).t()
>>> layout = lay_out([x])
>>> region = bytearray(layout.size)
>>> layout.write(region)
>>> y = build(layout.descriptors, region)[0]
>>> bool((y == x).all()), y.stride()
(True, (1, 3))
"""

from __future__ import annotations

from telegrad.wire.descriptors import TensorDescriptor
from telegrad.wire.tensor_decode import build
from telegrad.wire.tensor_encode import Layout, lay_out

__all__ = ["Layout", "TensorDescriptor", "build", "lay_out"]
