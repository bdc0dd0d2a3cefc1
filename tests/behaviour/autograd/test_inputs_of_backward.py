"""backward(inputs=...) treats its inputs as torch does."""

from __future__ import annotations

import torch
from tests.support.one_process import assert_equal, leaf, remotely

from telegrad import autograd


def test_inputs_may_be_one_tensor(group):
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x).sum(), inputs=x)
        assert_equal(context.gradients[x], x.exp().detach())


def test_the_same_input_twice_is_added_once(group):
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x).sum(), inputs=[x, x])
        assert_equal(context.gradients[x], x.exp().detach())


def test_an_input_that_is_no_leaf_gets_its_grad_without_a_warning(group):
    x = leaf(3)
    with autograd.context() as context:
        inner = x.sin()
        context.backward(remotely("b", torch.exp, inner).sum(), inputs=[inner], accumulate="grad")
    assert_equal(inner.grad, inner.exp().detach())


def test_grad_is_no_alias_of_what_the_user_holds(group):
    x, given = leaf(3), torch.ones(3, dtype=torch.double)
    with autograd.context() as context:
        context.backward([x], grad_tensors=[given], inputs=[x], accumulate="grad")
    assert x.grad.data_ptr() != given.data_ptr()


def test_post_accumulate_hooks_of_inputs_run(group):
    x, calls = leaf(3), []
    x.register_post_accumulate_grad_hook(lambda tensor: calls.append(tensor.grad.clone()))
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x).sum(), inputs=[x], accumulate="grad")
    assert len(calls) == 1
