"""Method calls, autograd and backward passes on values of other workers."""

from __future__ import annotations

import pytest
import torch
from tests.support.rrefs import Counter, Group, grad_of, loss_of, raise_lookup, sum_times, times, weight

from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.errors import TelegradError


def test_backward_waits_for_the_call_that_computes_the_value(group: Group) -> None:
    """The request for the pass overtakes the call, which is large."""
    w = rpc.remote("b", weight)
    loss = rpc.remote("b", sum_times, (torch.ones(1_000_000), w))
    loss.backward()
    assert rpc.rpc_sync("b", grad_of, (w,)).tolist() == [1e6, 1e6]


def test_gradients_flow_through_to_here_and_through_arguments(group: Group) -> None:
    w = rpc.remote("b", weight)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with context() as id:
        y = rpc.rpc_sync("c", times, (x, w))
        loss = (y * w.to_here()).sum()
        backward(id, [loss])
        assert get_gradients(id)[x].tolist() == [9.0, 9.0]
        on_b = rpc.rpc_sync("b", lambda w: get_gradients(id)[w.local_value()], (w,))
        assert on_b.tolist() == [6.0, 12.0]
        assert loss.item() == 27.0


@pytest.mark.parametrize("owner", ["a", "b"])
def test_backward_runs_on_the_owner(group: Group, owner: str) -> None:
    w = rpc.remote(owner, weight)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = rpc.remote(owner, loss_of, (x.detach(), w))
    loss.backward(retain_graph=True)
    loss.backward()
    assert rpc.rpc_sync(owner, grad_of, (w,)).tolist() == [2.0, 4.0]
    with context() as id:
        loss = rpc.remote(owner, loss_of, (x, w))
        loss.backward(id)
        assert get_gradients(id)[x].tolist() == [3.0, 3.0]
    assert x.grad is None


def test_backward_of_a_value_that_is_not_a_tensor_names_its_type(group: Group) -> None:
    with pytest.raises(TelegradError, match="reference 0:0 on worker 'b' is a Counter"):
        rpc.remote("b", Counter).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        rpc.remote("b", torch.ones, (1,)).backward()
    with pytest.raises(LookupError, match="none"):
        rpc.remote("b", raise_lookup, ("none",)).backward()
