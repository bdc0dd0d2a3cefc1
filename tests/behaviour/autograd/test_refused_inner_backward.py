"""A plain backward inside a pass that would have to send gradients raises an error."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import leaf, remotely

from telegrad import autograd
from telegrad.errors import BackwardError


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        ctx.other = other
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            (ctx.other[0] * 2).sum().backward()
        return grad, None


@pytest.mark.parametrize("planned", [False, True])
def test_an_inner_backward_that_reaches_a_received_tensor_is_refused(group, planned):
    x, z = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        other = remotely("b", torch.neg, z)
        loss = Nested.apply(remotely("b", torch.sin, x), [other]).sum() + (other.sum() if planned else 0)
        with pytest.raises(BackwardError, match="came from worker 'b'"):
            context.backward(loss)
