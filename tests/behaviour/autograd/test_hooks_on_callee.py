"""User code that runs in a pass makes its calls from the worker that runs it."""

from __future__ import annotations

import torch
from tests.support.one_process import assert_equal, leaf, remotely

from telegrad import autograd, rpc


def calls_in_a_hook(x):
    x = x.sin()
    x.register_hook(lambda grad: rpc.rpc_sync("a", torch.mul, (grad, 2)))
    return x.exp()


def test_a_hook_on_the_callee_acts_on_the_callee(group):
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", calls_in_a_hook, x).sum(), timeout=30)
        assert_equal(context.gradients[x], (2 * x.sin().exp() * x.cos()).detach())
