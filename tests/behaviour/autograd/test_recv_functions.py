"""The context lists its recv nodes, as in PyTorch."""

from __future__ import annotations

import torch
from tests.support.one_process import leaf, remotely

from telegrad import autograd


def test_the_recv_function_of_a_result_is_its_grad_fn(group):
    with autograd.context():
        y = remotely("b", torch.exp, leaf(3))
        (recv,) = autograd._current_context()._recv_functions().values()
        assert recv == y.grad_fn
        assert recv.name() == "torch::distributed::autograd::RecvRpcBackward"
