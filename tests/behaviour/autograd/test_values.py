"""Every kind of tensor keeps its edge in a message, in every kind of container."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_as_in_one_process, assert_equal, gradients_on, leaf, remotely
from torch import nn

from telegrad import autograd, rpc
from telegrad.errors import BackwardError, PayloadError

weights: dict[str, torch.Tensor] = {}
received: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    weights.update(w=leaf(4, seed=9))
    received.clear()


# -- views and in-place operations --------------------------------------------------------------------------------


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.add_(1)
    return y * y


def multiply_a_view_in_place(x: torch.Tensor) -> torch.Tensor:
    x[1:3].mul_(weights["w"][1:3])
    return x.sin()


def fill_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(2, 2)[0].zero_()
    return x.exp()


@pytest.mark.parametrize("function", [add_in_place, multiply_a_view_in_place, fill_a_view])
def test_an_argument_may_be_changed_in_place(group: Group, function: Any) -> None:
    x = leaf(4)
    assert_as_in_one_process(group, lambda call: call("b", function, x * 1).sum(), [x, weights["w"]])


def add_in_place_to_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    y.mul_(x)
    return x * y


def test_two_arguments_may_be_changed_in_place(group: Group) -> None:
    x, y = leaf(4), leaf(4, seed=1)
    assert_as_in_one_process(group, lambda call: call("b", add_in_place_to_both, x * 1, y * 1).sum(), [x, y])


def test_what_the_callee_does_in_place_does_not_change_the_callers_tensor(group: Group) -> None:
    x = leaf(4)
    before = x.detach().clone()
    with autograd.context() as context:
        context.backward(remotely("b", add_in_place, x).sum())
        assert_equal(context.gradients[x], 2 * (before + 1))
    assert_equal(x.detach(), before)


def test_a_result_may_be_changed_in_place(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        y = call("b", torch.sin, x)
        y.mul_(3)
        y[:2].add_(y[2:])
        return y.sum()

    assert_as_in_one_process(group, program, [x])


def test_two_results_of_one_call_may_be_changed_in_place(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        one, two = call("b", sin_and_cos, x)
        one.mul_(2)
        two[:2].mul_(3)
        return (one + two).sum()

    assert_as_in_one_process(group, program, [x])


def sin_and_cos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


def test_a_tensor_that_was_sent_may_be_changed_by_its_sender(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        inner = x * 2
        y = call("b", torch.neg, inner)
        inner.mul_(5)
        return (y * inner).sum()

    assert_as_in_one_process(group, program, [x])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:3],
        lambda x: x.view(2, 2).t(),
        lambda x: x[::2],
        lambda x: x[0].expand(3),
        lambda x: x.unsqueeze(0).expand(3, 4),
        lambda x: x.detach()[:2].requires_grad_(),
    ],
)
def test_views_are_sent_with_their_edge(group: Group, view: Any) -> None:
    x = leaf(4)
    view_of_leaf = view(x)
    leaves = [x] if view_of_leaf.grad_fn is not None else [view_of_leaf]
    assert_as_in_one_process(
        group, lambda call: call("b", torch.exp, view(x) if leaves[0] is x else view_of_leaf).sum(), leaves
    )


def test_a_sender_that_changes_a_tensor_its_own_graph_needs_gets_an_error(group: Group) -> None:
    x = leaf(4)
    with autograd.context() as context:
        inner = x.exp()
        y = remotely("b", torch.neg, inner)
        inner.mul_(2)
        with pytest.raises(
            BackwardError, match="Error on Node 0: one of the variables needed for gradient computation"
        ):
            context.backward(y.sum())


# -- several tensors ----------------------------------------------------------------------------------------------


def product_of_all(*tensors: torch.Tensor) -> torch.Tensor:
    received.extend(tensors)
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result * tensor
    return result


def test_the_same_tensor_twice_in_a_message_arrives_as_one(group: Group) -> None:
    x = leaf(4)
    assert_as_in_one_process(group, lambda call: call("b", product_of_all, x, x, x * 1).sum(), [x])
    assert received[3] is received[4]
    assert received[5] is not received[4]


def test_a_tensor_and_its_view_in_one_message_keep_an_edge_each(group: Group) -> None:
    x = leaf(4)
    assert_as_in_one_process(group, lambda call: call("b", product_of_all, x, x.view(4), x[:1]).sum(), [x])


def test_tensors_that_need_no_gradient_and_integers_travel_among_others(group: Group) -> None:
    x, numbers, constant = leaf(4), torch.tensor([1, 2, 3, 4]), torch.ones(4, dtype=torch.double)
    assert_as_in_one_process(group, lambda call: call("b", product_of_all, numbers, x, constant).sum(), [x])
    assert [tensor.requires_grad for tensor in received[3:]] == [False, True, False]


def ordered(x: torch.Tensor) -> Any:
    values, order = x.sort()
    return values * 2, order, (x > 0), len(x)


def test_integers_and_booleans_come_back_among_others(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        values, order, positive, count = call("b", ordered, x)
        assert count == 4
        assert not order.requires_grad
        return (values[order] * positive).sum()

    assert_as_in_one_process(group, program, [x])


def sine_twice_and_itself(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    return y, y, x


def test_a_reply_may_hold_one_tensor_twice_and_the_argument_itself(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        one, two, itself = call("b", sine_twice_and_itself, x)
        assert one is two
        return (one * two * itself).sum()

    assert_as_in_one_process(group, program, [x])


def own_weight() -> torch.Tensor:
    return weights["w"]


def test_a_callee_may_return_its_own_parameter(group: Group) -> None:
    assert_as_in_one_process(group, lambda call: call("b", own_weight).exp().sum(), [weights["w"]])


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    rest: dict[str, Any]


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def unpack(batch: Batch, holder: Holder, *, scale: torch.Tensor) -> dict[str, Any]:
    out = batch.inputs * batch.rest["more"][0] + holder.tensor
    return {"out": [Holder(out * scale)], "batch": Batch(out, {})}


def test_tensors_in_dataclasses_dicts_and_objects_keep_their_edge(group: Group) -> None:
    leaves = [leaf(4, seed=seed) for seed in range(4)]

    def program(call: Any) -> torch.Tensor:
        args = (Batch(leaves[0], {"more": [leaves[1]]}), Holder(leaves[2]))
        if call is remotely:
            result = rpc.rpc_sync("b", unpack, args, {"scale": leaves[3]})
        else:
            result = unpack(*args, scale=leaves[3])
        return (result["out"][0].tensor * result["batch"].inputs).sum()

    assert_as_in_one_process(group, program, leaves)


# -- parameters, subclasses, modules ------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass without changes."""


def test_a_parameter_as_an_argument_keeps_its_edge(group: Group) -> None:
    x = nn.Parameter(leaf(4).detach())
    assert_as_in_one_process(group, lambda call: call("b", product_of_all, x).exp().sum(), [x])


def test_a_subclass_as_an_argument_keeps_its_edge_and_its_class(group: Group) -> None:
    x = leaf(4)
    assert_as_in_one_process(
        group, lambda call: call("b", product_of_all, x.as_subclass(Tagged)).exp().sum().as_subclass(torch.Tensor), [x]
    )
    assert [type(tensor) for tensor in received] == [Tagged, Tagged]


def run_module(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    received.append(module)
    result: torch.Tensor = module(x)
    return result


def test_a_module_that_is_sent_becomes_the_receivers_own_with_one_warning(group: Group) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 2).double(), leaf(3, 4)
    with autograd.context() as context:
        with pytest.warns(UserWarning, match=r"an nn\.Module was sent whole") as caught:
            y = remotely("b", run_module, module, x)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            remotely("b", run_module, module, x)
        context.backward(y.sum())
        assert set(context.gradients) == {x}
        theirs = gradients_on(group["b"], context)
        arrived = received[0]
        assert set(theirs) == {arrived.weight, arrived.bias}
        assert arrived.weight is not module.weight
        assert_equal(theirs[arrived.weight], x.detach().sum(0).expand(2, 4).contiguous())
        assert_equal(context.gradients[x], module.weight.detach().sum(0).expand(3, 4).contiguous())


def test_the_warning_names_the_line_that_sent_the_module(group: Group) -> None:
    with autograd.context():
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.warns(UserWarning, match="sent whole") as caught:
                call("b", run_module, (nn.Linear(4, 2), torch.ones(3, 4)))
            assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_each_module_that_is_sent_whole_is_warned_of_also_one_of_torchscript(group: Group) -> None:
    modules = [nn.Linear(4, 2).double(), nn.Linear(4, 2).double(), torch.jit.script(nn.Linear(4, 2).double())]
    modules.append(nn.ParameterList([leaf(4).detach()]))
    for module in modules:
        for times in (1, 0):
            with autograd.context(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                remotely("b", itself_is_there, module)
            assert sum("sent whole" in str(warning.message) for warning in caught) == times


def itself_is_there(value: Any) -> bool:
    return value is not None


def test_modules_without_parameters_that_require_grad_are_not_warned_of(group: Group) -> None:
    with autograd.context():
        remotely("b", itself_is_there, nn.ReLU())
        remotely("b", itself_is_there, nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_module_with_a_history_is_refused(group: Group) -> None:
    module = torch.jit.script(nn.BatchNorm1d(4))
    module.running_mean = leaf(4, dtype=torch.float) * 2
    with autograd.context(), pytest.raises(PayloadError, match="part of a TorchScript module"):
        remotely("b", itself_is_there, module)


def module_and_weight(module: nn.Module, x: Any) -> torch.Tensor:
    received.append((module, x))
    weight = x if isinstance(x, torch.Tensor) else x["weight"][0]
    return (module(torch.ones(4, dtype=torch.double)) + (weight * 2).sum()).sum()


def weight_and_module(x: Any, module: nn.Module) -> torch.Tensor:
    return module_and_weight(module, x)


@pytest.mark.filterwarnings("ignore:an nn.Module was sent whole")
@pytest.mark.parametrize("pack", [lambda w: w, lambda w: {"weight": [w]}])
@pytest.mark.parametrize("module_first", [True, False])
def test_a_parameter_that_is_an_argument_keeps_its_edge_beside_its_module(
    group: Group, pack: Any, module_first: bool
) -> None:
    module = nn.Linear(4, 1, bias=False).double()
    with autograd.context() as context:
        if module_first:
            loss = remotely("b", module_and_weight, module, pack(module.weight))
        else:
            loss = remotely("b", weight_and_module, pack(module.weight), module)
        context.backward(loss)
        assert_equal(context.gradients[module.weight], torch.full((1, 4), 2.0, dtype=torch.double))
        arrived = received[0][0]
        theirs = gradients_on(group["b"], context)
        assert_equal(theirs[arrived.weight], torch.ones(1, 4, dtype=torch.double))


# -- no_grad and inference mode -----------------------------------------------------------------------------------


def test_what_is_computed_under_no_grad_has_no_history(group: Group) -> None:
    x = leaf(4)
    with autograd.context() as context:
        with torch.no_grad():
            y = remotely("b", torch.exp, x)
        assert not y.requires_grad
        context.backward((y * x).sum())
        assert_equal(context.gradients[x], x.exp().detach())


def test_what_is_computed_under_inference_mode_has_no_history(group: Group) -> None:
    x = leaf(4)
    with autograd.context() as context:
        with torch.inference_mode():
            y = remotely("b", torch.exp, x)
        assert not y.requires_grad
        assert not y.is_inference()
        context.backward((y * x).sum())
        assert_equal(context.gradients[x], x.exp().detach())


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * weights["w"]


@torch.inference_mode()
def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    return x * weights["w"]


@pytest.mark.parametrize("function", [without_grad, in_inference_mode])
def test_no_grad_and_inference_mode_of_the_callee_are_honoured(group: Group, function: Any) -> None:
    x = leaf(4)
    with autograd.context() as context:
        y = remotely("b", function, x)
        assert not y.requires_grad
        context.backward((y * x).sum())
        assert_equal(context.gradients[x], (x * weights["w"]).detach())
        assert gradients_on(group["b"], context) == {}


def turns_grad_off_for_good(x: torch.Tensor) -> None:
    torch.set_grad_enabled(False)


def test_a_function_that_leaves_grad_mode_off_does_not_disturb_the_next_call(group: Group) -> None:
    x = leaf(4)
    with autograd.context() as context:
        for _ in range(3):
            remotely("b", turns_grad_off_for_good, x)
            y = remotely("b", torch.exp, x)
            assert y.requires_grad
        context.backward(y.sum())
        assert_equal(context.gradients[x], x.exp().detach())


def test_without_a_context_nothing_is_recorded(group: Group) -> None:
    x = leaf(4)
    y = remotely("b", torch.exp, x)
    assert_equal(y.detach(), x.exp().detach())
    assert group["a"].autograd.debug_info()["sends"] == 0
