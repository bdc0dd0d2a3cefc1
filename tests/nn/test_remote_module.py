"""A module elsewhere is used as if it were here."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import UserDict
from typing import Any

import pytest
import torch

from telegrad import autograd, nn, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError, WorkerLost
from telegrad.nn import RemoteModule

Group = dict[str, Agent]

pytestmark = pytest.mark.usefixtures("group")


class Net(torch.nn.Module):
    """A bit of everything."""

    def __init__(self, width: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.inner = torch.nn.Linear(2, width, bias=bias)
        numbers = torch.Generator().manual_seed(0)  # its own: all workers are in this process
        for parameter in self.inner.parameters():
            torch.nn.init.uniform_(parameter, -1, 1, generator=numbers)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> tuple[torch.Tensor, dict[str, Any]]:
        self.calls += 1
        return self.inner(x) * self.scale + shift, {"mode": self.training, "twice": x * 2}

    def norm(self, power: int) -> torch.Tensor:
        return self.inner.weight.abs().pow(power).sum()

    def reset(self) -> Net:
        torch.nn.init.zeros_(self.inner.weight)
        return self


class Parent(torch.nn.Module):
    """An ordinary module with a remote one in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.net = inner
        self.last = torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(self.first(x))[0])


@pytest.fixture
def net() -> RemoteModule:
    return RemoteModule("b", Net)


def there(agent: Agent, module: RemoteModule) -> torch.nn.Module:
    """The module itself, as its worker sees it: all workers of a local group are in this process."""
    return agent.references.value(module.module_rref._id, None)


# -- calls


def test_a_call_runs_on_the_worker_and_returns_what_it_returns() -> None:
    module = RemoteModule("b/cpu", Net, (4,), {"bias": False})
    x = torch.randn(5, 2)
    y, more = module(x, shift=1.0)
    want, _ = Net(4, bias=False)(x, shift=1.0)
    torch.testing.assert_close(y, want)
    assert more["mode"] is True
    torch.testing.assert_close(more["twice"], x * 2)


def test_forward_async_gives_a_future(net: RemoteModule) -> None:
    x = torch.randn(5, 2)
    assert torch.equal(net.forward_async(x).wait()[0], net.forward(x)[0])


def test_a_module_can_live_on_the_worker_that_makes_it() -> None:
    module = RemoteModule("a", Net)
    assert module.module_rref.is_owner()
    assert module(torch.randn(5, 2))[0].shape == (5, 3)


def test_attributes_are_those_of_torch(net: RemoteModule) -> None:
    assert (net.on, net.device, net.is_scriptable) == ("b", "cpu", False)
    assert net.get_module_rref() is net.module_rref
    assert RemoteModule("rank:1", Net).on == 1


def test_gradients_are_those_of_one_process(group: Group, net: RemoteModule) -> None:
    net.double()
    here = Net().double()
    x = torch.randn(5, 2, dtype=torch.double, requires_grad=True)
    here(x)[0].square().sum().backward()
    want, x.grad = x.grad, None
    with autograd.context() as context:
        context.backward(net(x)[0].square().sum())
        got = nn.gradients(net, context)
        torch.testing.assert_close(context.gradients[x], want, rtol=1e-12, atol=0)
    assert got.keys() == dict(here.named_parameters()).keys()
    for name, parameter in here.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-12, atol=0)


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    note: str = ""


class Fields(UserDict[str, Any]):
    """A mapping of a program's own."""


class Records(torch.nn.Module):
    """Returns what programs make of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        y = x * self.weight
        return Output(y, "kept") if kind == "dataclass" else Fields(logits=y, note="kept")


@pytest.mark.parametrize("kind", ["dataclass", "mapping"])
@pytest.mark.parametrize("way", ["backward", "grad", "inputs"])
def test_no_way_leads_around_that_error(group: Group, kind: str, way: str) -> None:
    module, x = RemoteModule("b", Records), torch.ones(2, requires_grad=True)
    result = module(x, kind)
    logits = result.logits if kind == "dataclass" else result["logits"]
    assert (result.note if kind == "dataclass" else result["note"]) == "kept"
    loss = (logits * x).sum()  # a way around the call
    ways: dict[str, Any] = {
        "backward": loss.backward,
        "grad": lambda: torch.autograd.grad(loss, [x]),
        "inputs": lambda: loss.backward(inputs=[x]),
    }
    with pytest.raises(TelegradError, match="outside of an autograd context"):
        ways[way]()


def test_a_backward_pass_through_a_call_outside_of_a_context_is_an_error(net: RemoteModule) -> None:
    x = torch.randn(5, 2)
    for y in (net(x)[0], net.forward_async(x).wait()[0], net.norm(2), net.scale):
        assert y.requires_grad
        y.add_(1)  # it is an ordinary tensor in all other respects
        with pytest.raises(TelegradError, match=r"Net on 'b'.*outside of an autograd context"):
            y.sum().backward()


def test_without_grad_nothing_requires_it_here_or_there(group: Group, net: RemoteModule) -> None:
    seen = []
    net(torch.randn(5, 2))
    there(group["b"], net).register_forward_hook(lambda module, args, out: seen.append(out[0].requires_grad))
    with torch.no_grad():
        assert not net(torch.randn(5, 2))[0].requires_grad
        assert not net.forward_async(torch.randn(5, 2)).wait()[0].requires_grad
        assert not net.scale.requires_grad
        with autograd.context():
            assert not net(torch.randn(5, 2))[0].requires_grad
    assert seen == [False] * 3


def test_autocast_reaches_the_module(net: RemoteModule) -> None:
    here, x = Net(), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        want = here.inner(x)
        got = net.inner(x)
        assert net.norm(2).dtype == here.norm(2).dtype
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert net.inner(x).dtype == torch.float32


def test_hooks_run_where_they_were_registered(group: Group, net: RemoteModule) -> None:
    order = []
    net(torch.randn(5, 2))
    there(group["b"], net).register_forward_hook(lambda module, args, out: order.append(type(module).__name__))
    net.register_forward_hook(lambda module, args, out: order.append(type(module).__name__))
    net(torch.randn(5, 2))
    assert order == ["Net", "RemoteModule"]


def test_other_methods_are_ordinary_calls(net: RemoteModule) -> None:
    torch.testing.assert_close(net.norm(power=2), Net().norm(2))
    assert net.reset() is net
    assert net.norm(2) == 0
    assert net.width == 3
    assert torch.equal(net.scale, torch.ones(1))
    assert not hasattr(net, "no_such_thing")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'no_such_thing'"):
        net.no_such_thing()


def test_a_submodule_is_a_remote_module_too(net: RemoteModule) -> None:
    inner = net.inner
    assert isinstance(inner, RemoteModule)
    assert inner.in_features == 2
    x = torch.randn(5, 2)
    torch.testing.assert_close(inner(x), Net().inner(x))


def test_gradients_flow_through_methods_and_attributes(net: RemoteModule) -> None:
    here = Net()
    (here.norm(2) * here.scale).sum().backward()
    with autograd.context() as context:
        context.backward((net.norm(2) * net.scale).sum())
        got = nn.gradients(net, context)
    assert got.keys() == {"inner.weight", "scale"}
    torch.testing.assert_close(got["inner.weight"], here.inner.weight.grad)
    torch.testing.assert_close(got["scale"], here.scale.grad)


# -- errors


def test_what_is_no_module_is_an_error_at_first_use() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns .* on worker 'b'"):
            RemoteModule("b", dict, ()).forward()


def test_a_class_that_cannot_be_built_is_its_own_error_with_the_worker() -> None:
    module = RemoteModule("b", torch.nn.Linear, (1,))
    for _ in range(2):
        with pytest.raises(TypeError, match="out_features") as caught:
            module(torch.ones(1))
        assert caught.value.__notes__ == ["raised by Linear for a RemoteModule on worker 'b'"]


def test_a_device_that_is_not_there_is_an_error_that_names_worker_and_device() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
        RemoteModule(f"b/{missing}", Net).forward(torch.ones(2))
    module = RemoteModule("b", Net)
    with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
        module.to(missing)
    assert module.device == "cpu"


def test_a_lost_worker_is_named(group: Group, net: RemoteModule) -> None:
    net(torch.ones(1, 2))
    group["b"].close()
    with pytest.raises(WorkerLost, match="'b'"):
        net(torch.ones(1, 2))


@pytest.mark.parametrize("method", ["register_buffer", "register_parameter", "add_module"])
def test_what_would_add_to_the_module_here_is_refused(net: RemoteModule, method: str) -> None:
    with pytest.raises(ValueError, match=f"Method ``{method}`` not supported for RemoteModule"):
        getattr(net, method)("name", None)


# -- parameters


def test_parameters_are_references(net: RemoteModule) -> None:
    here = Net()
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in here.named_parameters()]
    for rref, parameter in zip(net.remote_parameters(), here.parameters(), strict=True):
        assert rref.owner_name() == "b"
        assert torch.equal(rref.to_here(), parameter)
    assert len(net.remote_parameters(recurse=False)) == 1
    assert [name for name, _ in net.named_parameters(prefix="net", recurse=False)] == ["net.scale"]
    assert [(name, rref.to_here().item()) for name, rref in net.named_buffers()] == [("calls", 0)]
    assert all(isinstance(parameter, rpc.RRef) for parameter in net.parameters())


def test_requires_grad_and_zero_grad_act_there(group: Group, net: RemoteModule) -> None:
    assert net.requires_grad_(False) is net
    module = there(group["b"], net)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    net.requires_grad_()
    module.scale.grad = torch.ones(1)
    net.zero_grad()
    assert module.scale.grad is None


# -- mode, device, dtype


def test_train_and_eval_act_there(group: Group, net: RemoteModule) -> None:
    assert net.eval() is net
    assert (net.training, there(group["b"], net).training) == (False, False)
    assert net(torch.ones(1, 2))[1]["mode"] is False
    assert net.train() is net
    assert (net.training, there(group["b"], net).inner.training) == (True, True)


def test_casts_act_there_and_keep_the_parameters(group: Group, net: RemoteModule) -> None:
    (scale, *_) = net.remote_parameters()
    for cast, dtype in (("double", torch.double), ("half", torch.half), ("bfloat16", torch.bfloat16)):
        assert getattr(net, cast)() is net
        assert net.scale.dtype == scale.to_here().dtype == dtype
        assert net.calls.dtype == torch.long
    assert net.to(torch.float32) is net
    assert net.to("cpu", torch.float64).cpu().to(torch.ones(1, dtype=torch.float64)).scale.dtype == torch.float64
    assert net.device == "cpu"


def test_inputs_go_to_the_device_of_the_module() -> None:
    module = RemoteModule("b/meta", torch.nn.Linear, (2, 3))
    y = module(torch.ones(5, 2))
    assert y.is_meta
    assert y.shape == (5, 3)
    assert module.to("meta").device == "meta"


def fill(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.constant_(module.weight, 7.0)


def test_apply_runs_a_function_there(net: RemoteModule) -> None:
    assert net.apply(fill) is net
    assert torch.equal(net.inner.weight, torch.full((3, 2), 7.0))


# -- state


def test_the_state_cannot_be_had_with_its_history(net: RemoteModule) -> None:
    with pytest.raises(TelegradError, match="have no gradients"):
        net.state_dict(keep_vars=True)


def test_the_state_can_be_saved_and_loaded(net: RemoteModule) -> None:
    net(torch.ones(1, 2))
    saved = net.state_dict()
    assert list(saved) == list(Net().state_dict())
    assert saved["calls"] == 1
    assert not any(value.requires_grad for value in saved.values())
    other = RemoteModule("c", Net)
    other.reset()
    assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
    assert torch.equal(other.inner.weight, net.inner.weight)
    here = Net()
    here.load_state_dict(saved)
    assert here.calls == 1
    net.load_state_dict(Net().state_dict(), assign=True)
    assert net.calls == 0


def test_a_state_that_does_not_fit_is_an_error(net: RemoteModule) -> None:
    saved = net.state_dict()
    del saved["scale"]
    saved["odd"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"scale".*Unexpected key.*"odd"'):
        net.load_state_dict(saved)
    missing, unexpected = net.load_state_dict(saved, strict=False)
    assert (missing, unexpected) == (["scale"], ["odd"])
    with pytest.raises(RuntimeError, match=r"(?s)on worker 'b'.*size mismatch for scale"):
        net.load_state_dict({**net.state_dict(), "scale": torch.ones(2)})


def test_hooks_on_the_state_run(net: RemoteModule) -> None:
    net.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__("calls"))
    assert "calls" not in net.state_dict()


# -- inside another module


@pytest.fixture
def pair(net: RemoteModule) -> tuple[Parent, Parent]:
    torch.manual_seed(1)
    remote = Parent(net)
    here = Parent(Net())
    here.load_state_dict(remote.state_dict())
    return remote, here


def test_the_state_of_a_parent_has_the_keys_of_one_that_is_all_here(pair: tuple[Parent, Parent]) -> None:
    remote, here = pair
    assert list(remote.state_dict()) == list(here.state_dict())
    assert remote.state_dict()._metadata == here.state_dict()._metadata
    here.net.reset()
    remote.load_state_dict(here.state_dict())
    assert torch.equal(remote.net.inner.weight, torch.zeros(3, 2))
    file = io.BytesIO()
    torch.save(remote.state_dict(), file)
    file.seek(0)
    remote.load_state_dict(torch.load(file))
    broken = here.state_dict()
    broken["net.odd"] = broken.pop("net.scale")
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"net.scale".*Unexpected key.*"net.odd"'):
        remote.load_state_dict(broken)


def test_a_parent_can_be_cast_moved_and_switched(group: Group, pair: tuple[Parent, Parent]) -> None:
    remote, here = pair
    for model in pair:
        assert model.double().to("cpu").eval() is model
    assert not there(group["b"], remote.net).training
    x = torch.randn(5, 2, dtype=torch.double)
    torch.testing.assert_close(remote(x).detach(), here(x).detach(), rtol=1e-12, atol=1e-15)
    remote.train()
    assert there(group["b"], remote.net).training
    remote.apply(fill)
    assert torch.equal(remote.net.inner.weight, torch.full((3, 2), 7.0, dtype=torch.double))


def test_a_parent_lists_its_own_parameters_and_the_references_lists_all(pair: tuple[Parent, Parent]) -> None:
    remote, here = pair
    local = [name for name, _ in here.named_parameters() if not name.startswith("net.")]
    assert [name for name, _ in remote.named_parameters()] == local
    assert len(list(remote.parameters())) == len(local)
    named = nn.named_parameter_rrefs(remote)
    assert [name for name, _ in named] == [name for name, _ in here.named_parameters()]
    for (name, rref), parameter in zip(named, here.parameters(), strict=True):
        assert rref.owner_name() == ("b" if name.startswith("net.") else "a")
        assert torch.equal(rref.to_here(), parameter)
    assert [name for name, _ in nn.remote_modules(remote)] == ["net"]


def test_a_parent_can_be_copied_and_the_copy_lives_on_its_own(pair: tuple[Parent, Parent]) -> None:
    remote, _ = pair
    other = copy.deepcopy(remote)
    other.net.reset()
    assert other.net.module_rref.owner_name() == "b"
    assert other.net.norm(2) == 0
    assert remote.net.norm(2) > 0


def test_it_shows_where_it_is(net: RemoteModule) -> None:
    assert repr(net) == "RemoteModule(Net on 'b', device='cpu')"


# -- sent and pickled


def forward_of(module: RemoteModule, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return rpc.get_worker_info().name, module(x)[0].detach()


@pytest.mark.parametrize("worker", ["b", "c"])
def test_it_can_be_sent_in_a_call_and_is_the_same_module_there(net: RemoteModule, worker: str) -> None:
    net.eval()
    x = torch.randn(5, 2)
    name, y = rpc.rpc_sync(worker, forward_of, (net, x))
    assert name == worker
    torch.testing.assert_close(y, net(x)[0].detach())
    assert net.calls == 2


def test_another_can_be_made_from_the_reference(group: Group, net: RemoteModule) -> None:
    other = rpc.rpc_sync("c", RemoteModule.init_from_module_rref, ("c", net.get_module_rref()))
    x = torch.randn(5, 2)
    torch.testing.assert_close(other(x)[0].detach(), net(x)[0].detach())
    assert other.module_rref.owner_name() == "b"
    with acting_as(group["c"]):
        assert other.calls == 2


def test_it_cannot_be_pickled_outside_of_a_call(net: RemoteModule) -> None:
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
            save(net)


def test_the_worker_lets_the_module_go_when_nobody_has_it(group: Group, net: RemoteModule) -> None:
    net(torch.ones(1, 2))
    kept = group["b"].references.counts()["values"]
    net.module_rref.release()
    deadline = group["a"].runtime.now() + 10
    while group["b"].references.counts()["values"] == kept:
        group["a"].call("b", len, ((),))
        assert group["a"].runtime.now() < deadline
    assert kept == 1
