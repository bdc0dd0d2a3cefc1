"""Everything programs do with an nn.Module works on a RemoteModule, or raises an error that says what to do."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

from telegrad import autograd, nn, rpc
from telegrad.agent.agent import Agent
from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule

Group = dict[str, Agent]

pytestmark = pytest.mark.usefixtures("group")


class Net(torch.nn.Module):
    """A module with state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        self.again = self.inner[0]
        self.register_buffer("count", torch.zeros(()))
        self.factor = 2.0
        self.words: list[str] = []
        self.extra = "none"

    @property
    def halved(self) -> float:
        return self.factor / 2

    @halved.setter
    def halved(self, value: float) -> None:
        self.factor = value * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


@pytest.fixture
def net() -> RemoteModule:
    return RemoteModule("b", Net)


def module_on(agent: Agent, module: RemoteModule) -> Any:
    """Return the module itself: all workers of a local group are in this process."""
    assert module.training in (True, False)  # waits until the module exists
    return agent.references.value(module.module_rref._id, None)


# -- attributes


def test_assigning_an_attribute_changes_the_module(group: Group, net: RemoteModule) -> None:
    net.factor = 3.0
    assert net.factor == module_on(group["b"], net).factor == 3.0
    net.halved = 4.0  # a property, whose setter runs on the worker
    assert net.factor == 8.0
    net.factor *= 2
    assert net.factor == 16.0
    net.words = ["one"]
    assert module_on(group["b"], net).words == ["one"]
    net.new = {"a": 1}
    assert module_on(group["b"], net).new == {"a": 1}
    other = RemoteModule.init_from_module_rref("b", net.module_rref)
    other.factor = 5.0
    assert net.factor == 5.0


def test_dropout_obeys_its_assigned_attributes() -> None:
    dropout = RemoteModule("b", torch.nn.Dropout, (0.5,))
    dropout.p = 0.0
    assert dropout(torch.ones(1000)).sum() == 1000
    dropout.p = 1.0
    assert dropout(torch.ones(1000)).sum() == 0
    dropout.training = False
    assert dropout(torch.ones(1000)).sum() == 1000
    assert dropout.training is False


def test_the_mode_is_read_from_the_module(group: Group, net: RemoteModule) -> None:
    dropout, other = net.get_submodule("inner.1"), RemoteModule.init_from_module_rref("b", net.module_rref)
    net.eval()
    assert (net.training, other.training, dropout.training) == (False, False, False)
    net.training = True  # of this module alone, as for a local one
    assert (net.training, other.training, dropout.training) == (True, True, False)
    assert module_on(group["b"], net).training
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        net.train("yes")  # type: ignore[arg-type]


def test_deleting_an_attribute_deletes_it_on_the_worker(group: Group, net: RemoteModule) -> None:
    del net.words
    assert not hasattr(module_on(group["b"], net), "words")
    assert not hasattr(net, "words")
    with pytest.raises(AttributeError, match="words"):
        del net.words


def test_a_bias_can_be_set_to_none(group: Group, net: RemoteModule) -> None:
    linear = net.again
    linear.bias = None
    assert module_on(group["b"], net).again.bias is None
    assert linear.bias is None


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2), torch.nn.Linear(1, 1)])
def test_tensors_and_local_modules_cannot_be_assigned(net: RemoteModule, value: Any) -> None:
    for name in ("weight", "other"):
        with pytest.raises(TelegradError, match=rf"cannot assign a \w+ to '{name}' of .*Linear on 'b'.*apply\(\)"):
            setattr(net.again, name, value)
    assert not hasattr(net.again, "other")


def test_a_remote_module_can_be_assigned(net: RemoteModule) -> None:
    net.partner = RemoteModule("c", torch.nn.Linear, (2, 2))
    assert net.partner.on == "b"
    assert net.partner.module_rref.owner_name() == "b"  # the handle on the worker
    assert net.partner(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize("name", ["on", "device", "module_rref", "is_scriptable", "forward", "train", "_label"])
def test_the_identity_of_a_handle_cannot_be_assigned(net: RemoteModule, name: str) -> None:
    with pytest.raises(TelegradError, match=name):
        setattr(net, name, None)
    with pytest.raises(TelegradError, match=name):
        delattr(net, name)
    assert net(torch.ones(2)).shape == (2,)


def test_private_names_are_remote_once_they_are_assigned(group: Group, net: RemoteModule) -> None:
    module_on(group["b"], net)._seen = 1
    assert not hasattr(net, "_seen")
    net._seen = 2
    assert net._seen == module_on(group["b"], net)._seen == 2
    module_on(group["b"], net)._seen = 3
    assert net._seen == 3
    assert copy.copy(net)._seen == 3
    del net._seen
    assert not hasattr(net, "_seen")
    assert not hasattr(module_on(group["b"], net), "_seen")


class Counted(RemoteModule):
    """A subclass with its own attribute."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_attributes_declared_by_a_subclass_are_local(group: Group) -> None:
    module = Counted("b", Net)
    module(torch.ones(2))
    assert module.calls == 1
    assert not hasattr(module_on(group["b"], module), "calls")


# -- functional code


def test_functional_call_raises_and_changes_nothing(net: RemoteModule) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), net)
    before, weight = copy.deepcopy(model.state_dict()), model[0].weight
    given = {"0.weight": torch.zeros(2, 2), "1.again.weight": torch.zeros(2, 2)}
    with pytest.raises(TelegradError, match="functional_call"):
        torch.func.functional_call(model, given, (torch.ones(2),))
    with pytest.raises(TelegradError, match="functional_call"):
        torch.func.functional_call(net, {"count": torch.ones(())}, (torch.ones(2),))
    assert model[0].weight is weight
    after = model.state_dict()
    assert torch.equal(after["1.again.weight"], before["1.again.weight"])
    assert after["1.count"] == 0


def normed(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        parametrizations.weight_norm(module)


def test_apply_can_parametrize_the_module(net: RemoteModule) -> None:
    net.again.apply(normed)
    assert [name for name, _ in net.again.named_parameters()] == [
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    ]
    assert net.again.weight.shape == (2, 2)


# -- submodules, parameters and state


def test_submodules_are_listed_as_remote_modules(net: RemoteModule) -> None:
    here = Net()
    for duplicates in (False, True):
        got = dict(net.named_modules(prefix="net", remove_duplicate=not duplicates))
        assert list(got) == [n for n, _ in here.named_modules(prefix="net", remove_duplicate=not duplicates)]
    assert got["net"] is net
    assert all(isinstance(module, RemoteModule) for module in net.modules())
    assert [name for name, _ in net.named_children()] == [name for name, _ in here.named_children()]
    assert [repr(child).split()[0] for child in net.children()] == ["RemoteModule(Sequential", "RemoteModule(Linear"]
    assert got["net.inner.1"].p == 0.5
    assert net.get_submodule("inner.1").p == 0.5
    assert net.get_submodule("") is net
    with pytest.raises(AttributeError, match="nowhere"):
        net.get_submodule("inner.nowhere")
    assert [name for name, _ in torch.nn.Sequential(net).named_modules()] == ["", "0"]
    assert [name for name, _ in nn.remote_modules(net)] == [""]
    assert len(nn.parameter_rrefs(net)) == 2


def test_get_parameter_and_get_buffer_return_references(net: RemoteModule) -> None:
    weight = net.get_parameter("inner.0.weight")
    assert isinstance(weight, rpc.RRef)
    assert torch.equal(weight.to_here(), net.again.weight)
    assert net.get_buffer("count").to_here() == 0
    with pytest.raises(AttributeError, match=r"not an nn\.Parameter"):
        net.get_parameter("count")


def test_to_empty_moves_the_module_without_its_values(group: Group, net: RemoteModule) -> None:
    assert net.to_empty(device="meta") is net
    assert net.device == "meta"
    assert module_on(group["b"], net).again.weight.is_meta
    assert net.to_empty(device="cpu").device == "cpu"
    assert not module_on(group["b"], net).again.weight.is_meta


def test_extra_state_is_saved_and_loaded(net: RemoteModule) -> None:
    net.set_extra_state("some")
    assert net.get_extra_state() == "some"
    saved = net.state_dict()
    assert saved["_extra_state"] == "some"
    other = RemoteModule("c", Net)
    other.load_state_dict(saved)
    assert other.extra == "some"


def test_compile_compiles_the_module_on_the_worker(group: Group, net: RemoteModule) -> None:
    net.eval()
    want = net(torch.ones(2))
    net.compile(backend="eager")
    assert module_on(group["b"], net)._compiled_call_impl is not None
    torch.testing.assert_close(net(torch.ones(2)), want)


# -- hooks and copies


def test_backward_hooks_of_the_handle_get_the_same_gradients_as_local_ones() -> None:
    seen: dict[str, list[Any]] = {"local": [], "remote": []}

    def note(to: str, module: Any, grad_input: Any, grad_output: Any) -> Any:
        seen[to].append((grad_input, grad_output))
        return tuple(2 * grad for grad in grad_input)

    torch.manual_seed(0)
    here = torch.nn.Linear(2, 2)
    remote = RemoteModule("b", torch.nn.Linear, (2, 2))
    remote.load_state_dict(here.state_dict())
    here.register_full_backward_hook(functools.partial(note, "local"))
    remote.register_full_backward_hook(functools.partial(note, "remote"))
    x = torch.ones(3, 2, requires_grad=True)
    here(x * 2).square().sum().backward()
    with autograd.context() as context:
        context.backward(remote(x * 2).square().sum())
        torch.testing.assert_close(context.gradients[x], x.grad)
    torch.testing.assert_close(seen["remote"], seen["local"])
    assert len(seen["local"]) == 1


def doubled(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_its_own_attributes_and_the_hooks(net: RemoteModule, copied: Any) -> None:
    net.eval()
    plain = net(torch.ones(2))
    net.register_forward_hook(doubled)
    other = copied(net)
    torch.testing.assert_close(other(torch.ones(2)), 2 * plain)
    other.factor = 0.0
    assert (net.factor, other.factor) == (2.0, 0.0)
    shared = copied is copy.copy
    with torch.no_grad():
        other.again.apply(zero)
    assert bool(net.again.weight.any()) is not shared
    assert other.module_rref.owner_name() == "b"


def zero(module: Any) -> None:
    torch.nn.init.zeros_(module.weight)
