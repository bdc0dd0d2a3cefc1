"""Calls, parameters, mode and state of a RemoteModule."""

from __future__ import annotations

import io

import pytest
import torch
from tests.support.remote_nets import Group, Net, Parent, fill, module_on

from telegrad import autograd, nn, rpc
from telegrad.errors import TelegradError, WorkerLost
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("group")


def test_a_call_runs_on_the_worker_and_returns_its_result() -> None:
    module = RemoteModule("b/cpu", Net, (4,), {"bias": False})
    x = torch.randn(5, 2)
    y, more = module(x, shift=1.0)
    want, _ = Net(4, bias=False)(x, shift=1.0)
    torch.testing.assert_close(y, want)
    assert more["mode"] is True
    torch.testing.assert_close(more["twice"], x * 2)


def test_forward_async_returns_a_future(net: RemoteModule) -> None:
    x = torch.randn(5, 2)
    assert torch.equal(net.forward_async(x).wait()[0], net.forward(x)[0])


def test_a_module_can_be_on_the_calling_worker() -> None:
    module = RemoteModule("a", Net)
    assert module.module_rref.is_owner()
    assert module(torch.randn(5, 2))[0].shape == (5, 3)


def test_gradients_equal_those_of_one_process(group: Group, net: RemoteModule) -> None:
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


def test_autocast_applies_to_the_module(net: RemoteModule) -> None:
    here, x = Net(), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        want = here.inner(x)
        got = net.inner(x)
        assert net.norm(2).dtype == here.norm(2).dtype
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert net.inner(x).dtype == torch.float32


def test_a_value_that_is_not_a_module_raises_at_first_use() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns .* on worker 'b'"):
            RemoteModule("b", dict, ()).forward()


def test_a_constructor_error_names_the_worker() -> None:
    module = RemoteModule("b", torch.nn.Linear, (1,))
    for _ in range(2):
        with pytest.raises(TypeError, match="out_features") as caught:
            module(torch.ones(1))
        assert caught.value.__notes__[0] == "raised by Linear for a RemoteModule on worker 'b'"


def test_the_error_for_a_lost_worker_names_it(group: Group, net: RemoteModule) -> None:
    net(torch.ones(1, 2))
    group["b"].close()
    with pytest.raises(WorkerLost, match="'b'"):
        net(torch.ones(1, 2))


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


def test_requires_grad_and_zero_grad_act_on_the_worker(group: Group, net: RemoteModule) -> None:
    assert net.requires_grad_(False) is net
    module = module_on(group["b"], net)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    net.requires_grad_()
    module.scale.grad = torch.ones(1)
    net.zero_grad()
    assert module.scale.grad is None


def test_train_and_eval_act_on_the_worker(group: Group, net: RemoteModule) -> None:
    assert net.eval() is net
    assert (net.training, module_on(group["b"], net).training) == (False, False)
    assert net(torch.ones(1, 2))[1]["mode"] is False
    assert net.train() is net
    assert (net.training, module_on(group["b"], net).inner.training) == (True, True)


def test_apply_runs_a_function_on_the_worker(net: RemoteModule) -> None:
    assert net.apply(fill) is net
    assert torch.equal(net.inner.weight, torch.full((3, 2), 7.0))


def test_state_dict_with_keep_vars_raises(net: RemoteModule) -> None:
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


def test_a_state_dict_that_does_not_fit_raises(net: RemoteModule) -> None:
    saved = net.state_dict()
    del saved["scale"]
    saved["odd"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"scale".*Unexpected key.*"odd"'):
        net.load_state_dict(saved)
    missing, unexpected = net.load_state_dict(saved, strict=False)
    assert (missing, unexpected) == (["scale"], ["odd"])
    with pytest.raises(RuntimeError, match=r"(?s)on worker 'b'.*size mismatch for scale"):
        net.load_state_dict({**net.state_dict(), "scale": torch.ones(2)})


def test_state_dict_hooks_run(net: RemoteModule) -> None:
    net.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__("calls"))
    assert "calls" not in net.state_dict()


def test_a_parents_state_dict_has_the_same_keys_as_a_local_one(pair: tuple[Parent, Parent]) -> None:
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


@pytest.mark.filterwarnings("ignore:the parameters of this model")
def test_a_parent_lists_local_parameters_and_parameter_rrefs_lists_all(pair: tuple[Parent, Parent]) -> None:
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


def test_a_module_instead_of_its_class_is_an_error_that_names_split() -> None:
    with pytest.raises(TypeError, match=r"module_cls must be a class, not a Linear that exists.*split\(\)"):
        RemoteModule("b", torch.nn.Linear(2, 1))
