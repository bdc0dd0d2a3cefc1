"""register_multi_grad_hook: called as often, and with the same gradients, as in one process."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.support.one_process import assert_equal, leaf, locally, remotely
from torch.autograd.graph import register_multi_grad_hook

from telegrad import autograd
from telegrad.torch_private import ties

MODES = pytest.mark.parametrize("mode", ["all", "any"])
ACCUMULATE = pytest.mark.parametrize("accumulate", ["context", "grad"])


class Log:
    """Records the gradients that a multi-grad hook gets."""

    def __init__(self, mode):
        self.mode, self.calls = mode, []

    def on(self, *tensors):
        return register_multi_grad_hook(tensors, self._note, mode=self.mode)

    def _note(self, grads):
        self.calls.append([grads] if self.mode == "any" else list(grads))


def assert_same_calls(got, want):
    assert len(got.calls) == len(want.calls)
    for mine, theirs in zip(got.calls, want.calls, strict=True):
        if got.mode == "any":  # which gradient is the first depends on the order of messages
            assert len(mine) == len(theirs) == 1
            continue
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)


def check(program, mode, accumulate="context", expected=1):
    want = Log(mode)
    program(locally, want).backward()
    assert len(want.calls) == expected
    got = Log(mode)
    with autograd.context() as context:
        context.backward(program(remotely, got), accumulate=accumulate)
    assert_same_calls(got, want)


@MODES
@ACCUMULATE
@pytest.mark.parametrize("kind", ["one", "two", "leaves", "leaf and inner"])
def test_a_hook_on_tensors_that_are_sent(group, mode, accumulate, kind):
    def program(call, log):
        a, b = leaf(3), leaf(3, seed=1)
        u, v = (a, b) if kind == "leaves" else (a, b * 3) if kind == "leaf and inner" else (a * 2, b * 3)
        log.on(*((u,) if kind == "one" else (u, v)))
        return (call("b", torch.sin, u) * call("c", torch.cos, v)).sum()

    check(program, mode, accumulate)


@MODES
@ACCUMULATE
def test_a_hook_on_tensors_before_those_that_are_sent(group, mode, accumulate):
    def program(call, log):
        u, v = leaf(3) * 2, leaf(3, seed=1) * 3
        log.on(u, v)
        return (call("b", torch.sin, u.exp()) * call("c", torch.cos, v.exp())).sum()

    check(program, mode, accumulate)


@MODES
@ACCUMULATE
def test_a_hook_on_results_of_calls(group, mode, accumulate):
    def program(call, log):
        u, v = call("b", torch.sin, leaf(3)), call("c", torch.exp, leaf(3, seed=1))
        log.on(u, v)
        return (u * call("b", torch.cos, v)).sum()

    check(program, mode, accumulate)


@MODES
@ACCUMULATE
def test_a_hook_on_arguments_of_two_calls(group, mode, accumulate):
    """The hook is on the callee, and its gradients arrive in two messages."""

    def program(call, log):
        arguments = []

        def serve(x):
            arguments.append(x * 1)
            if len(arguments) == 2:
                log.on(*arguments)
            return arguments[-1].sin()

        SERVED.append(serve)
        a, b = leaf(3), leaf(3, seed=1)
        return (call("b", served, a) * call("b", served, b)).sum()

    check(program, mode, accumulate)


SERVED = []


def served(x):
    return SERVED[-1](x)


@MODES
def test_a_tensor_whose_gradient_is_not_computed_is_not_waited_for(group, mode):
    def program(call, log):
        u, v = leaf(3) * 2, leaf(3, seed=1) * 3
        log.on(u, v)
        call("c", torch.cos, v)  # nobody uses it
        return call("b", torch.sin, u).sum()

    check(program, mode)


@MODES
@ACCUMULATE
def test_a_hook_around_a_skip_connection(group, mode, accumulate):
    def program(call, log):
        h, z = leaf(3) * 2, leaf(3, seed=1) * 3
        log.on(h, z)
        return (h + call("b", torch.sin, h) * call("c", torch.exp, z)).sum()

    check(program, mode, accumulate)


@MODES
def test_every_pass_calls_the_hook(group, mode):
    def run(call, backward):
        log = Log(mode)
        u, v = leaf(3) * 2, leaf(3, seed=1) * 3
        log.on(u, v)
        loss = (call("b", torch.sin, u) * call("c", torch.cos, v)).sum()
        for retain in (True, False):
            backward(loss, retain)
        return log

    want = run(locally, lambda loss, retain: loss.backward(retain_graph=retain))
    assert len(want.calls) == 2
    with autograd.context() as context:
        assert_same_calls(run(remotely, lambda loss, retain: context.backward(loss, retain)), want)


@MODES
@pytest.mark.parametrize("kind", ["grad", "context", ".grad"])
def test_only_what_a_pass_with_inputs_needs_is_waited_for(group, mode, kind):
    def run(call, find):
        log = Log(mode)
        a, b = leaf(3), leaf(3, seed=1)
        u, v = a * 2, b * 3
        log.on(u, v)
        find((call("b", torch.sin, u) * call("c", torch.cos, v)).sum(), a)
        return log

    if kind == "grad":
        want = run(locally, torch.autograd.grad)
        with autograd.context() as context:
            got = run(remotely, lambda loss, x: autograd.grad(context, loss, x))
    else:
        accumulate = "context" if kind == "context" else "grad"
        want = run(locally, lambda loss, x: loss.backward(inputs=[x]))
        with autograd.context() as context:
            got = run(remotely, lambda loss, x: context.backward(loss, inputs=[x], accumulate=accumulate))
    assert len(want.calls) == 1
    assert_same_calls(got, want)


@MODES
@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_inputs_with_a_hook(group, mode, accumulate):
    def run(call, find):
        log = Log(mode)
        a, b = leaf(3), leaf(3, seed=1)
        log.on(a, b)
        find((call("b", torch.sin, a) * call("c", torch.cos, b)).sum(), [a, b])
        return log

    want = run(locally, lambda loss, inputs: loss.backward(inputs=inputs))
    with autograd.context() as context:
        got = run(remotely, lambda loss, inputs: context.backward(loss, inputs=inputs, accumulate=accumulate))
        assert len(context.gradients) == (2 if accumulate == "context" else 0)
    assert len(want.calls) == 1
    assert_same_calls(got, want)


@MODES
def test_a_hook_that_was_removed_is_not_called(group, mode):
    log = Log(mode)
    with autograd.context() as context:
        u, v = leaf(3) * 2, leaf(3, seed=1) * 3
        log.on(u, v).remove()
        context.backward((remotely("b", torch.sin, u) * remotely("c", torch.cos, v)).sum())
    assert log.calls == []


def test_nothing_is_kept_of_a_hook_whose_tensors_are_gone():
    gc.collect()
    before = len(ties)
    tensor = leaf(3) * 2
    there = weakref.ref(tensor)
    register_multi_grad_hook([tensor, leaf(3)], lambda grad: None, mode="any")
    assert len(ties) == before + 1
    del tensor
    gc.collect()
    assert there() is None
    assert len(ties) == before
