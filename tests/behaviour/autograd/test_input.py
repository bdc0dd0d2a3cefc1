"""Bad input raises an error with a remedy, never hangs, and leaves nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_equal, gradients_on, leaf, remotely

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, TelegradError

# -- roots --------------------------------------------------------------------------------------------------------


def test_no_roots(group: Group) -> None:
    with autograd.context() as context:
        with pytest.raises(TelegradError, match="No tensors provided for gradient computation"):
            autograd.backward(context, [])


@pytest.mark.parametrize("roots", [None, 3, [None], ["loss"]])
def test_roots_that_are_no_tensors(group: Group, roots: Any) -> None:
    with autograd.context() as context, pytest.raises(TypeError):
        autograd.backward(context, roots)


def test_a_root_that_does_not_require_grad(group: Group) -> None:
    with autograd.context() as context:
        with pytest.raises(TelegradError, match=r"requires_grad not set on root: roots\[1\] does not require grad"):
            autograd.backward(context, [leaf(3).sum(), torch.ones(())])


def test_a_result_without_a_graph_as_a_root(group: Group) -> None:
    with autograd.context() as context:
        with pytest.raises(TelegradError, match=r"requires_grad not set on root: roots\[0\]"):
            context.backward(remotely("b", torch.sum, torch.ones(3)))


def test_a_number_as_a_root(group: Group) -> None:
    with autograd.context() as context, pytest.raises(TypeError, match="roots must be a Tensor or a list"):
        context.backward(1.5)  # type: ignore[arg-type]  # what loss.item() returns


def test_a_tensor_instead_of_the_id_of_a_context() -> None:
    with pytest.raises(TypeError, match=r"must be the id of a context, not a Tensor: write backward"):
        autograd.backward(torch.ones(()), [torch.ones(())])  # type: ignore[arg-type]


def test_a_root_that_is_not_a_scalar_without_a_gradient(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        with pytest.raises(
            TelegradError, match=r"roots\[0\] of shape \[3\] is not a scalar, all roots need to be scalar"
        ):
            context.backward(y)
        context.backward(y.sum())
        assert_equal(context.gradients[x], x.exp().detach())


def test_gradients_of_the_wrong_shape_or_number(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        with pytest.raises(TelegradError, match=r"grad_tensors\[0\] has shape \[2\], but roots\[0\] has \[3\]"):
            context.backward(y, grad_tensors=[torch.ones(2)])
        with pytest.raises(TelegradError, match="got 1 roots and 2 gradients"):
            context.backward(y, grad_tensors=[torch.ones(3), torch.ones(3)])
        with pytest.raises(TelegradError, match="got 2 roots and 1 gradients"):
            autograd.grad(context, [y, y], [x], [torch.ones(3)])


def test_inputs_that_are_empty_or_do_not_require_grad(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        with pytest.raises(ValueError, match="inputs cannot be empty"):
            context.backward(loss, inputs=[])
        with pytest.raises(ValueError, match="inputs cannot be empty"):
            autograd.grad(context, loss, [])
        with pytest.raises(TelegradError, match=r"does not require grad: inputs\[1\]"):
            autograd.grad(context, loss, [x, torch.ones(3)])
        assert_equal(autograd.grad(context, loss, [x])[0], x.exp().detach())


# -- contexts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda context, loss, x: autograd.backward(context, [loss]),
        lambda context, loss, x: autograd.grad(context, [loss], [x]),
        lambda context, loss, x: autograd.get_gradients(context),
        lambda context, loss, x: autograd._retrieve_context(context),
        lambda context, loss, x: autograd._release_context(context),
    ],
)
def test_a_context_that_is_unknown_or_was_left(group: Group, use: Any) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        with pytest.raises(TelegradError, match="Could not find autograd context with id: 100"):
            use(100, loss, x)
    with pytest.raises(TelegradError, match=f"Could not find autograd context with id: {int(context)}.*left already"):
        use(context, loss, x)


def test_the_id_of_a_left_context_says_so_too(group: Group) -> None:
    with autograd.context() as context:
        loss = leaf(3).sum()
    with pytest.raises(TelegradError, match="Could not find autograd context"):
        context.backward(loss)
    with pytest.raises(TelegradError, match="Could not find autograd context"):
        assert context.gradients


class Wait(torch.autograd.Function):
    """A function whose backward waits until the test lets it continue."""

    reached = threading.Event()
    go = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Wait.reached.set()
        assert Wait.go.wait(60)
        return grad


def waits(x: torch.Tensor) -> torch.Tensor:
    return Wait.apply(x)


def test_a_second_pass_on_the_same_worker_while_one_runs_is_refused(group: Group) -> None:
    Wait.reached, Wait.go = threading.Event(), threading.Event()
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", waits, x).sum()
        thread = threading.Thread(target=context.backward, args=(loss, True))
        thread.start()
        assert Wait.reached.wait(60)
        with pytest.raises(
            TelegradError, match="is running on this worker already; run passes of one context one after"
        ):
            context.backward(loss, retain_graph=True)
        Wait.go.set()
        thread.join(60)
        context.backward(loss)
        assert_equal(context.gradients[x], torch.full((3,), 2.0, dtype=torch.double))


def test_a_second_pass_on_another_worker_is_refused_and_the_first_continues(group: Group) -> None:
    Wait.reached, Wait.go = threading.Event(), threading.Event()
    x = leaf(3)
    errors: list[BaseException] = []
    with autograd.context() as context:
        loss = remotely("b", waits, x).sum()

        def first() -> None:
            try:
                context.backward(loss)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                errors.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        assert Wait.reached.wait(60)
        with acting_as(group["b"]), pytest.raises(TelegradError, match="is running on this worker already"):
            autograd.backward(context, [leaf(3).sum()])
        Wait.go.set()
        thread.join(60)
        assert errors == []
        assert_equal(context.gradients[x], torch.ones(3, dtype=torch.double))


# -- graphs -------------------------------------------------------------------------------------------------------

AGAIN = "Trying to backward through the graph a second time"


def test_a_second_pass_through_buffers_freed_on_the_callee(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        context.backward(loss)
        with pytest.raises(BackwardError, match=f"Error on Node 1: {AGAIN}"):
            context.backward(loss)
        assert_equal(context.gradients[x], x.exp().detach())
        context.backward(remotely("b", torch.exp, x).sum())
        assert_equal(context.gradients[x], 2 * x.exp().detach())


def test_a_second_pass_through_buffers_freed_on_the_caller(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.neg, x.exp())
        context.backward(y.sum())
        with pytest.raises(BackwardError, match=f"Error on Node 0: {AGAIN}"):
            context.backward(y.sum())
        assert_equal(context.gradients[x], -x.exp().detach())


def test_a_second_pass_through_a_graph_without_buffers_is_allowed_as_in_one_process(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.neg, x)
        context.backward(y.sum())
        context.backward(y.sum())
        assert_equal(context.gradients[x], torch.full((3,), -2.0, dtype=torch.double))


def test_a_plain_backward_that_reaches_a_recv(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        loss = (remotely("b", torch.exp, x) * y).sum()
        with pytest.raises(
            TelegradError,
            match=rf"a plain backward\(\) reached a tensor that came from worker 'b' in context {int(context):#x}.*"
            rf"telegrad\.autograd\.backward\({int(context)}, \[loss\]\)",
        ):
            loss.backward(retain_graph=True)
        y.grad = None
        context.backward(loss)
        assert_equal(context.gradients[x], (x.exp() * y).detach())


def test_a_pass_that_reaches_a_recv_of_another_context_that_is_open(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        failures: list[str] = []

        def other() -> None:
            with acting_as(group["a"]), autograd.context() as second:
                ids.append(second)
                with pytest.raises(BackwardError) as caught:
                    second.backward(loss, retain_graph=True)
                failures.append(str(caught.value))

        ids: list[int] = []
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        (text,) = failures
        assert f"a pass of context {ids[0]:#x} reached a tensor that came from worker 'b'" in text
        assert f"in context {int(context):#x}" in text
        assert f"telegrad.autograd.backward({int(context)}, [loss])" in text
        context.backward(loss)
        assert_equal(context.gradients[x], x.exp().detach())


def test_a_tensor_of_a_context_that_was_left_cannot_be_differentiated(group: Group) -> None:
    x = leaf(3)
    with autograd.context():
        loss = remotely("b", torch.exp, x).sum()
    with pytest.raises(TelegradError, match="Autograd context no longer valid!"):
        loss.backward(retain_graph=True)
    with autograd.context() as context:
        with pytest.raises(BackwardError, match="Error on Node 0: Autograd context no longer valid!"):
            context.backward(loss)


def test_a_plain_backward_that_reaches_no_recv_works_inside_a_context(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        (y.detach() * x).sum().backward()
        assert_equal(x.grad, x.exp().detach())
        context.backward(y.sum())
        assert_equal(context.gradients[x], x.exp().detach())


def differentiates_itself(x: torch.Tensor) -> torch.Tensor:
    x.exp().sum().backward()
    return x


def test_a_plain_backward_inside_a_callee_that_reaches_its_argument(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        with pytest.raises(TelegradError, match=r"a plain backward.*came from worker 'a'"):
            remotely("b", differentiates_itself, x)
        assert gradients_on(group["b"], context) == {}
