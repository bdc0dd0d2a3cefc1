"""Device maps decide where arguments, results and gradients go."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.one_process import Group, gradients_on

from telegrad import autograd, rpc
from telegrad.bootstrap import check_device_maps
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError
from telegrad.settings import AgentSettings
from telegrad.testing import accelerator
from telegrad.testing.group import local_group

pytestmark = pytest.mark.usefixtures("asynchronous_sim")
DEVICES = ["cpu", "sim:0", "sim:1"]
kept: dict[str, torch.Tensor] = {}

maps = st.permutations(DEVICES).flatmap(
    lambda targets: st.lists(st.sampled_from(DEVICES), unique=True).map(
        lambda sources: dict(zip(sources, targets, strict=False))
    )
)
placed = st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4)


@pytest.fixture
def group() -> Iterator[Group]:
    """Start workers a and b. The test acts as a."""
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        yield agents


def move(targets: list[str], *tensors: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
    """Return where the tensors are, and twice their values on other devices."""
    moved = [tensor.to(device) * 2 for tensor, device in zip(tensors, targets, strict=True)]
    return [str(tensor.device) for tensor in tensors], moved


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(device_map=maps, sources=placed, data=st.data(), in_context=st.booleans())
def test_everything_follows_the_map_of_the_caller(
    group: Group, device_map: dict[str, str], sources: list[str], data: st.DataObject, in_context: bool
) -> None:
    targets = [data.draw(st.sampled_from(DEVICES)) for _ in sources]
    back = {there: here for here, there in device_map.items()}
    tensors = [torch.full((3,), float(n), device=device, requires_grad=True) for n, device in enumerate(sources)]
    with autograd.context() as context:
        arrived, results = rpc.rpc_sync("b", move, (targets, *tensors), device_map=device_map)
        assert arrived == [device_map.get(device, device) for device in sources]
        assert [str(result.device) for result in results] == [back.get(device, device) for device in targets]
        assert [result.tolist() for result in results] == [[2.0 * n] * 3 for n in range(len(sources))]
        if in_context:
            context.backward(sum(result.sum().cpu() for result in results))
            gradients = autograd.get_gradients(context)
            for tensor in tensors:
                assert gradients[tensor].device == tensor.device
                assert gradients[tensor].tolist() == [2.0] * 3


def test_without_a_map_tensors_keep_their_devices(group: Group) -> None:
    tensors = [torch.ones(1, device=device) for device in DEVICES]
    arrived, results = rpc.rpc_sync("b", move, (DEVICES[::-1], *tensors))
    assert arrived == DEVICES
    assert [str(result.device) for result in results] == DEVICES[::-1]


def where(x: torch.Tensor) -> str:
    return str(x.device)


def test_futures_and_references_follow_the_map_too(group: Group) -> None:
    x, device_map = torch.ones(2, device="sim:0"), {"sim:0": "sim:1", "sim:1": "cpu"}
    assert rpc.rpc_async("b", where, (x,), device_map=device_map).wait() == "sim:1"
    assert str(rpc.rpc_async("b", operator.neg, (x,), device_map=device_map).wait().device) == "sim:0"
    made = rpc.remote("b", operator.neg, (x,), device_map=device_map)
    assert made.rpc_sync().sum().item() == -2
    assert str(made.to_here().device) == "sim:1"  # as it is there: to_here has no map of its own


def test_the_option_is_the_map_of_all_calls_of_a_worker() -> None:
    options = AgentSettings(device_maps={"b": (("sim:0", "sim:1"),)})
    with local_group(["a", "b"], settings=options) as agents:
        x = torch.ones(2, device="sim:0")
        with acting_as(agents["a"]):
            assert rpc.rpc_sync("b", where, (x,)) == "sim:1"
            assert str(rpc.rpc_sync("b", operator.neg, (x,)).device) == "sim:0"
            assert str(rpc.remote("b", operator.neg, (x,)).to_here().device) == "sim:0"
            assert rpc.rpc_sync("b", where, (x,), device_map={}) == "sim:0"
            assert rpc.rpc_sync("a", where, (x,)) == "sim:0"
        with acting_as(agents["b"]):
            assert rpc.rpc_sync("a", where, (x,)) == "sim:0"


def keep(x: torch.Tensor) -> torch.Tensor:
    kept["leaf"] = torch.ones(2, device=x.device, requires_grad=True)
    return x * kept["leaf"]


def test_leaves_of_the_callee_have_their_gradients_where_they_are(group: Group) -> None:
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        context.backward(rpc.rpc_sync("b", keep, (x,), device_map={"cpu": "sim:1"}).sum())
        assert gradients_on(group["b"], context)[kept["leaf"]].device == torch.device("sim:1")
        assert autograd.get_gradients(context)[x].device == torch.device("cpu")
    kept.clear()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_large_tensors_travel_over_every_transport(transport: str) -> None:
    with local_group(["a", "b"], transport=transport) as agents, acting_as(agents["a"]):
        x = torch.arange(2.0**20, device="sim:0")
        y = rpc.rpc_sync("b", operator.mul, (x, 2), device_map={"sim:0": "sim:1"})
        x.zero_()
        assert y.device == x.device
        assert torch.equal(y.cpu(), torch.arange(2.0**20) * 2)


def test_a_16_mb_message_is_copied_once_more_on_each_side_than_one_of_the_cpu(group: Group) -> None:
    x = torch.ones(2**22, device="sim:0")
    rpc.rpc_sync("b", where, (x,))
    accelerator.reset_copies()
    rpc.rpc_sync("b", where, (x,))
    copied = accelerator.copies()
    assert (copied.device_to_host, copied.host_to_device) == (x.nbytes, x.nbytes)
    assert copied.within_device == copied.between_devices == 0
    assert copied.synchronizations == 2


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_map", "says"),
    [
        ({"sim:0": "sim:2"}, "maps sim:0 to sim:2, but worker 'b' has no sim:2"),
        ({"sim:7": "sim:0"}, "maps sim:7 to sim:0, but worker 'a' has no sim:7"),
        ({"sim:0": "cuda:0"}, "worker 'b' has no cuda:0"),
        ({"sim:0": "sim:1", "sim:1": "sim:1"}, "maps both sim:0 and sim:1 to sim:1"),
    ],
)
def test_a_wrong_map_of_a_call_is_an_error_and_nothing_is_sent(
    group: Group, device_map: dict[Any, Any], says: str
) -> None:
    rpc.rpc_sync("b", where, (torch.ones(1),))
    before = rpc.traffic()["b"]
    with pytest.raises(ValueError, match=says):
        rpc.rpc_sync("b", where, (torch.ones(1, device="sim:0"),), device_map=device_map)
    assert rpc.traffic()["b"].sent == before.sent


def test_a_device_that_the_callee_lacks_is_an_error_and_nothing_is_sent() -> None:
    with local_group(["a", "b"], devices={"b": ()}) as agents, acting_as(agents["a"]):
        assert rpc.rpc_sync("b", where, (torch.ones(1),)) == "cpu"
        before = rpc.traffic()["b"].sent
        with pytest.raises(PayloadError, match=r"is on sim:0 of worker 'a', but worker 'b' has no sim:0"):
            rpc.rpc_sync("b", where, (torch.ones(1, device="sim:0"),))
        assert rpc.traffic()["b"].sent == before
        assert rpc.rpc_sync("b", where, (torch.ones(1, device="sim:0"),), device_map={"sim:0": "cpu"}) == "cpu"
        with acting_as(agents["b"]), pytest.raises(PayloadError, match="worker 'b' has no sim:1"):
            rpc.rpc_sync("a", torch.ones, (2,), {"device": "sim:1"})


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ({"worker7": ()}, "names worker 'worker7', which is not in the group: the workers are a, b"),
        ({"b": (("sim:0", "sim:5"),)}, "the device map of worker 'a' for worker 'b' maps sim:0 to sim:5"),
    ],
)
def test_a_wrong_map_is_an_error_of_its_worker_at_init(group: Group, pairs: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_device_maps(group["a"].me, pairs, [agent.me for agent in group.values()])
