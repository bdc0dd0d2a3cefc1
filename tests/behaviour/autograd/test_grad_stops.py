"""grad() runs nothing that lies behind its inputs."""

from __future__ import annotations

import torch
from tests.support.one_process import assert_equal, leaf, remotely

from telegrad import autograd

seen = []


def hooked(x):
    y = x.exp()
    y.register_hook(lambda grad: seen.append(grad))
    return y * 2


def test_hooks_behind_the_inputs_do_not_run(group):
    seen.clear()
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", hooked, x)
        (got,) = autograd.grad(context, (y * y).sum(), [y])
        assert_equal(got, 2 * y.detach())
    assert seen == []


def test_buffers_behind_the_inputs_are_not_freed(group):
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        autograd.grad(context, (y * y).sum(), [y])
        context.backward(y.sum())
        assert_equal(context.gradients[x], x.exp().detach())
