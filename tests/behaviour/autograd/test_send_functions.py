"""The context lists its sends, as in PyTorch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from telegrad.backward import nodes as functions
from telegrad.backward.nodes import SendRpcBackward


def test_an_error_while_a_send_is_made_leaves_no_reference_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    record, left = functions.record, [1]

    def record_once(*args: object) -> object:
        if not left:
            raise MemoryError
        left.pop()
        return record(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(functions, "record", record_once)
    x = torch.zeros(2, requires_grad=True)
    node = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(MemoryError) as caught:
            SendRpcBackward(1, 1, 0, [x, torch.zeros(2, requires_grad=True)])
        del caught, x
        assert node() is None
    finally:
        gc.enable()
