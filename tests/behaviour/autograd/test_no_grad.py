"""A call made under no_grad or inference_mode runs without grad mode, as in one process."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import leaf, remotely

from telegrad import autograd, rpc

W = leaf(3, seed=1)


def times_own(x):
    return x * W


@pytest.mark.parametrize("function", [torch.exp, times_own])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_result_does_not_require_grad(group, function, mode):
    x = leaf(3)
    with autograd.context():
        with mode():
            y = remotely("b", function, x)
            future = rpc.rpc_async("b", function, (x,))
        assert not y.requires_grad
        assert not future.wait().requires_grad
