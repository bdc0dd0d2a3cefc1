"""create_graph keeps the graph of gradients in any grad mode of the caller."""

from __future__ import annotations

import torch
from tests.support.one_process import assert_equal, leaf, remotely

from telegrad import autograd


def test_grad_with_create_graph_inside_no_grad(group):
    x = leaf(3)
    with autograd.context() as context:
        y = (remotely("b", torch.exp, x) + remotely("c", torch.exp, x) + x.exp()).sum()
        with torch.no_grad():
            (first,) = autograd.grad(context, y, [x], create_graph=True)
        (second,) = autograd.grad(context, first.sum(), [x])
        assert_equal(second, 3 * x.exp().detach())
