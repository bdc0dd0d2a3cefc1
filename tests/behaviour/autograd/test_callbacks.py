"""Callbacks of futures work in the context, and for the agent, in which they were added."""

from __future__ import annotations

import torch
from tests.support.one_process import assert_equal, leaf, remotely

from telegrad import autograd, rpc


def test_calls_in_a_callback_are_recorded(group):
    x, agent = leaf(3), group["a"]
    with autograd.context() as context:
        future = rpc.rpc_async("b", torch.exp, (x,)).then(lambda done: agent.call("c", torch.sin, (done.wait(),)))
        y = future.wait()
        assert y.grad_fn is not None
        context.backward(y.sum())
        assert_equal(context.gradients[x], (x.exp().cos() * x.exp()).detach())


def test_a_callback_acts_on_the_agent_that_it_was_registered_on(group):
    x = leaf(3)
    with autograd.context() as context:
        y = rpc.rpc_async("b", torch.exp, (x,)).then(lambda done: rpc.rpc_sync("c", torch.sin, (done.wait(),))).wait()
        context.backward(y.sum())
        assert_equal(context.gradients[x], (x.exp().cos() * x.exp()).detach())


@rpc.functions.async_execution
def calls_in_its_callback(x):
    return rpc.rpc_async("c", torch.sin, (x,)).then(lambda done: rpc.rpc_sync("c", torch.exp, (done.wait(),)))


def test_callbacks_inside_a_function_that_replies_later(group):
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", calls_in_its_callback, x).sum())
        assert_equal(context.gradients[x], (x.sin().exp() * x.cos()).detach())
