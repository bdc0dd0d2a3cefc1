"""Attributes, copies and pickling of the local handle."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.support.remote_nets import Group, Net, Parent, module_on

from telegrad import autograd, nn, rpc
from telegrad.default_agent import acting_as
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("group")


def test_it_has_the_attributes_of_torchs_remote_module(net: RemoteModule) -> None:
    assert (net.on, net.device, net.is_scriptable) == ("b", "cpu", False)
    assert net.get_module_rref() is net.module_rref
    assert RemoteModule("rank:1", Net).on == 1


def test_other_methods_and_attributes_are_remote(net: RemoteModule) -> None:
    torch.testing.assert_close(net.norm(power=2), Net().norm(2))
    assert net.reset() is net
    assert net.norm(2) == 0
    assert net.width == 3
    assert torch.equal(net.scale, torch.ones(1))
    assert not hasattr(net, "no_such_thing")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'no_such_thing'"):
        net.no_such_thing()


def test_a_submodule_is_a_remote_module(net: RemoteModule) -> None:
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


def test_hooks_run_where_they_were_registered(group: Group, net: RemoteModule) -> None:
    order = []
    net(torch.randn(5, 2))
    module_on(group["b"], net).register_forward_hook(lambda module, args, out: order.append(type(module).__name__))
    net.register_forward_hook(lambda module, args, out: order.append(type(module).__name__))
    net(torch.randn(5, 2))
    assert order == ["Net", "RemoteModule"]


def test_a_deep_copy_of_a_parent_copies_the_module(pair: tuple[Parent, Parent]) -> None:
    remote, _ = pair
    other = copy.deepcopy(remote)
    other.net.reset()
    assert other.net.module_rref.owner_name() == "b"
    assert other.net.norm(2) == 0
    assert remote.net.norm(2) > 0


def test_repr_shows_worker_and_device(net: RemoteModule) -> None:
    assert repr(net) == "RemoteModule(Net on 'b', device='cpu')"


def forward_of(module: RemoteModule, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return rpc.get_worker_info().name, module(x)[0].detach()


@pytest.mark.parametrize("worker", ["b", "c"])
def test_a_handle_sent_in_a_call_refers_to_the_same_module(net: RemoteModule, worker: str) -> None:
    net.eval()
    x = torch.randn(5, 2)
    name, y = rpc.rpc_sync(worker, forward_of, (net, x))
    assert name == worker
    torch.testing.assert_close(y, net(x)[0].detach())
    assert net.calls == 2


def test_another_handle_can_be_created_from_the_reference(group: Group, net: RemoteModule) -> None:
    other = rpc.rpc_sync("c", RemoteModule.init_from_module_rref, ("c", net.get_module_rref()))
    x = torch.randn(5, 2)
    torch.testing.assert_close(other(x)[0].detach(), net(x)[0].detach())
    assert other.module_rref.owner_name() == "b"
    with acting_as(group["c"]):
        assert other.calls == 2


def test_it_cannot_be_pickled_outside_a_call(net: RemoteModule) -> None:
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
            save(net)


def test_the_worker_frees_the_module_when_it_is_released(group: Group, net: RemoteModule) -> None:
    net(torch.ones(1, 2))
    before = group["b"].references.counts()["values"]
    net.module_rref.release()
    deadline = group["a"].runtime.now() + 10
    while group["b"].references.counts()["values"] == before:
        group["a"].call("b", len, ((),))
        assert group["a"].runtime.now() < deadline
    assert before == 1
