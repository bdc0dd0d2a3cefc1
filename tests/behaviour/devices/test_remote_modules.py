"""Modules on simulated devices of other workers compute what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support import exposed
from tests.support.remote_nets import Group, Net, module_on

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule, gradients, parameter_rrefs, split
from telegrad.optim import DistributedOptimizer
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

pytestmark = pytest.mark.usefixtures("sim")

Pairs = tuple[tuple[str, str], ...]


@contextmanager
def group_with(*pairs: tuple[str, str]) -> Iterator[Group]:
    """Start workers a and b; the test acts as a, whose device map for b has these pairs."""
    settings = AgentSettings(device_maps={"b": pairs} if pairs else {})
    with local_group(["a", "b"], settings=settings) as agents, acting_as(agents["a"]):
        yield agents


@pytest.mark.parametrize("source", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("target", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize(
    "pairs",
    [(), (("sim:0", "sim:1"),), (("sim:0", "sim:1"), ("sim:1", "sim:0")), (("cpu", "sim:1"),), (("sim:1", "cpu"),)],
    ids=str,
)
def test_results_follow_the_map_and_gradients_their_leaves(source: str, target: str, pairs: Pairs) -> None:
    here = Net()
    x = torch.randn(4, 2)
    expected_input = x.clone().requires_grad_()
    expected = here(expected_input)[0].square().sum()
    expected.backward()
    with group_with(*pairs) as agents:
        module = RemoteModule(f"b/{target}", Net)
        leaf = x.to(source).requires_grad_()
        with autograd.context() as context:
            result, others = module(leaf)
            loss = result.square().sum().cpu()
            context.backward(loss)
            found = gradients(module, context)
            own = autograd.get_gradients(context)
        back = {theirs: ours for ours, theirs in pairs}
        # Unless the map names the module's device, results go back from the CPU.
        assert str(result.device) == str(others["twice"].device) == back.get(target, back.get("cpu", "cpu"))
        assert torch.equal(loss, expected)
        assert own[leaf].device == leaf.device
        assert torch.equal(own[leaf].cpu(), expected_input.grad)
        for name, parameter in here.named_parameters():
            torch.testing.assert_close(found[name].cpu(), parameter.grad)
        assert {str(p.device) for p in module_on(agents["b"], module).parameters()} == {target}


def test_the_callees_gradients_are_on_the_devices_of_its_parameters() -> None:
    with group_with() as agents:
        module = RemoteModule("b/sim:1", Net)
        with autograd.context() as context:
            context.backward(module(torch.ones(3, 2))[0].sum())
            held = agents["b"].autograd.contexts.retrieve(int(context)).gradients.as_dict()
        assert {str(gradient.device) for gradient in held.values()} == {"sim:1"}
        assert len(held) == 3


@pytest.mark.parametrize("pairs", [(), (("cpu", "sim:1"),), (("sim:0", "cpu"),)], ids=str)
def test_a_module_moves_between_devices_and_keeps_its_values(pairs: Pairs) -> None:
    here, x = Net(), torch.randn(4, 2)
    with group_with(*pairs) as agents:
        module = RemoteModule("b/sim:0", Net)
        for device in ("sim:1", "cpu", "sim:0"):
            assert module.to(device).device == device
            assert str(module_on(agents["b"], module).scale.device) == device
            assert torch.equal(module(x)[0].detach().cpu(), here(x)[0].detach())
            assert torch.equal(module.norm(2).detach().cpu(), here.norm(2).detach())
        assert module.to("sim").device == "sim"
        assert module(x)[0].shape == (4, 3)


@pytest.mark.parametrize("pairs", [(), (("cpu", "sim:1"),), (("sim:1", "cpu"),)], ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_on_the_cpu_and_load_onto_the_modules_device(pairs: Pairs, assign: bool) -> None:
    with group_with(*pairs) as agents:
        module = RemoteModule("b/sim:1", Net)
        saved = module.state_dict()
        assert {str(value.device) for value in saved.values()} == {"cpu"}
        changed = {name: (value + 1).to("sim:0") for name, value in saved.items()}
        module.load_state_dict(changed, assign=assign)
        loaded = module_on(agents["b"], module)
        assert {str(value.device) for value in loaded.state_dict().values()} == {"sim:1"}
        for name, value in loaded.state_dict().items():
            assert torch.equal(value.cpu(), changed[name].cpu())
        assert module(torch.ones(1, 2))[0].shape == (1, 3)


def test_a_worker_without_devices_gets_inputs_and_parts_of_a_model_from_one_with_devices() -> None:
    devices = {"a": (("sim", 2),), "b": ()}
    with local_group(["a", "b"], devices=devices) as agents, acting_as(agents["a"]):
        leaf = torch.ones(4, 2, device="sim:1", requires_grad=True)
        with autograd.context() as context:
            result, _ = RemoteModule("b", Net)(leaf)
            context.backward(result.sum())
            assert autograd.get_gradients(context)[leaf].device == leaf.device
        assert result.device.type == "cpu"
        with pytest.raises(TelegradError, match=r"worker 'b' has no device 'sim:0'.*it has no accelerator"):
            RemoteModule("b/sim:0", Net)
        whole = split(model().to("sim:1"), {"0": "b", "2": "b/cpu"})
        assert {value.device.type for value in whole[0].state_dict().values()} == {"cpu"}


def test_a_worker_without_devices_trains_modules_on_devices() -> None:
    devices = {"a": (), "b": (("sim", 2),)}
    with local_group(["a", "b"], devices=devices) as agents, acting_as(agents["a"]):
        whole, expected = split(model(), {"0": "b/sim:0", "2": "b/sim:1"}), model()
        expected.load_state_dict(whole.state_dict())
        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(whole), lr=0.05, foreach=True)
        losses = train(whole, optimizer, 3, remote=True)
        optimizer.load_state_dict(optimizer.state_dict())
        wanted = train(expected, torch.optim.Adam(expected.parameters(), lr=0.05, foreach=True), 3, remote=False)
        assert losses == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("missing", ["sim:2", "cuda:7"])
def test_a_device_that_the_worker_lacks_is_an_error_of_the_constructor(missing: str) -> None:
    with group_with():
        with pytest.raises(TelegradError, match=rf"worker 'b' has no device '{missing}'.*sim:0, sim:1.*'b/cpu'"):
            RemoteModule(f"b/{missing}", Net)
        module = RemoteModule("b/sim:0", Net)
        with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
            module.to(missing)
        assert module.device == "sim:0"
        rref = module.get_module_rref()
        with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
            RemoteModule.init_from_module_rref(f"b/{missing}", rref)


def test_a_module_on_a_device_of_this_worker() -> None:
    with group_with():
        module = RemoteModule("sim:1", torch.nn.Linear, (2, 2))
        assert module.on == "a"
        x = torch.ones(1, 2, requires_grad=True)
        with autograd.context() as context:
            context.backward(module(x).sum())
            assert autograd.get_gradients(context)[x].shape == (1, 2)


def test_a_result_outside_a_context_cannot_be_differentiated() -> None:
    with group_with(("sim:0", "sim:1")):
        module = RemoteModule("b/sim:1", torch.nn.Linear, (2, 2))
        result = module(torch.ones(1, 2))
        assert str(result.device) == "sim:0"
        with pytest.raises(TelegradError, match="outside of an autograd context"):
            result.sum().backward()


# -- split --------------------------------------------------------------------------------------------------------


def model() -> torch.nn.Sequential:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    made = torch.nn.Sequential(*layers, torch.nn.Linear(4, 1)).double()
    made[0].weight.grad = torch.ones(4, 4, dtype=torch.double)
    return made


def train(whole: torch.nn.Module, optimizer: Any, steps: int, remote: bool) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        if remote:
            with autograd.context() as context:
                loss = whole(x).square().mean()
                context.backward(loss)
                optimizer.step(context)
        else:
            optimizer.zero_grad()
            loss = whole(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("source", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("pairs", [(), (("cpu", "sim:1"),)], ids=str)
def test_a_model_that_is_split_onto_devices_trains_like_one_process(source: str, pairs: Pairs) -> None:
    whole = model()
    expected = copy.deepcopy(whole)
    places = {"0": "b/sim:0", "1": "b/sim:1", "2": "b", "3": "b/sim"}
    with group_with(*pairs) as agents:
        split(whole.to(source), places)
        parts = {name: module_on(agents["b"], getattr(whole, name)) for name in places}
        assert [str(part.weight.device) for part in parts.values()] == ["sim:0", "sim:1", "cpu", "sim:0"]
        assert torch.equal(parts["0"].weight.grad.cpu(), torch.ones(4, 4))
        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(whole), lr=0.05)
        losses = train(whole, optimizer, 4, remote=True)
    wanted = train(expected, torch.optim.Adam(expected.parameters(), lr=0.05), 4, remote=False)
    assert losses == pytest.approx(wanted, rel=1e-12)


def test_a_part_on_several_devices_is_refused_before_anything_is_sent() -> None:
    whole = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(2, 2).to("sim:0"), torch.nn.Linear(2, 2).to("sim:1"))
    )
    with group_with(), pytest.raises(ValueError, match="'0' has tensors on sim:0 and sim:1"):
        split(whole, {"0": "b/sim:0"})
    assert isinstance(whole[0], torch.nn.Sequential)


def test_a_missing_device_leaves_the_model_unchanged() -> None:
    whole = model()
    with group_with(), pytest.raises(TelegradError, match="worker 'b' has no device 'sim:5'") as caught:
        split(whole, {"0": "b/sim:0", "1": "b/sim:5"})
    assert "'1' could not be placed on 'b'" in caught.value.__notes__[0]
    assert all(isinstance(layer, torch.nn.Linear) for layer in whole)


# -- registered mode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [(), (("sim:0", "sim:1"),)], ids=str)
def test_a_module_on_a_device_in_registered_mode(pairs: Pairs) -> None:
    settings = AgentSettings(accept="registered", device_maps={"b": pairs} if pairs else {})
    with local_group(["a", "b"], settings=settings) as agents, acting_as(agents["a"]):
        module = RemoteModule("b/sim:1", exposed.Net, (3,))
        leaf = torch.ones(2, 3, device="sim:0", requires_grad=True)
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
        with autograd.context() as context:
            result = module(leaf)
            context.backward(result.sum())
            assert autograd.get_gradients(context)[leaf].device == leaf.device
            optimizer.clip_grad_norm_(context, 1.0)
            optimizer.step(context)
        assert str(result.device) == ("sim:0" if pairs else "cpu")
        module.load_state_dict(module.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        assert module.forward_async(leaf).wait().device == result.device
