"""Mistakes that were found in messages and passes with devices, each with its smallest program."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.support.one_process import Group

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError, TelegradError
from telegrad.testing import accelerator
from telegrad.testing.group import local_group
from telegrad.wire.descriptors import COPIED_AS_BYTES
from telegrad.wire.tensors import decode_tensors, encode_tensors

pytestmark = pytest.mark.usefixtures("asynchronous_sim")
kept: dict[str, torch.Tensor] = {}


@pytest.fixture
def group() -> Iterator[Group]:
    """Start workers a and b. The test acts as a."""
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        yield agents
    kept.clear()


def identity(x: Any) -> Any:
    return x


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(filter(None, COPIED_AS_BYTES), key=str), ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_integers_of_few_bits_arrive_on_devices(group: Group, dtype: torch.dtype, step: int) -> None:
    stored = torch.arange(12, dtype=torch.uint8)
    x = stored.to("sim:0").view(dtype)[::step]
    there = rpc.rpc_sync("b", identity, (x,), device_map={"sim:0": "sim:1"})
    assert (there.dtype, there.device) == (dtype, x.device)
    assert torch.equal(there.view(torch.uint8).cpu(), stored[::step])


def test_views_of_conjugated_tensors_keep_their_values(group: Group) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j, 5j, 6 + 0j])
    on_device = x.to("sim:0")
    parts: list[torch.Tensor] = []
    for source in x, on_device:
        parts += [source.conj()[::2], source.conj().imag, source.conj().real]
    there = rpc.rpc_sync("b", identity, (parts,))
    for one, other in zip(there[:3], there[3:], strict=True):
        assert other.device == on_device.device
        assert torch.equal(one.resolve_conj().resolve_neg(), other.cpu().resolve_conj().resolve_neg())


# -- errors -----------------------------------------------------------------------------------------------------------


class WithTensor(Exception):
    pass


def fail_with(x: torch.Tensor) -> None:
    raise WithTensor("no", x + 1)


def test_tensors_in_exceptions_follow_the_map_of_the_call(group: Group) -> None:
    with pytest.raises(WithTensor) as raised:
        rpc.rpc_sync("b", fail_with, (torch.ones(2, device="sim:0"),), device_map={"sim:0": "sim:1"})
    assert raised.value.args[1].device == torch.device("sim:0")
    assert raised.value.args[1].tolist() == [2, 2]


def test_a_caller_without_devices_gets_exceptions_with_tensors() -> None:
    with local_group(["a", "b"], devices={"a": ()}) as agents, acting_as(agents["a"]):
        with pytest.raises(WithTensor) as raised:
            rpc.rpc_sync("b", fail_with, (torch.ones(2),), device_map={"cpu": "sim:1"})
        assert raised.value.args[1].device == torch.device("cpu")


def test_a_shortage_on_the_device_of_the_callee_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def full(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_blocking"):
            raise torch.OutOfMemoryError("sim:0 is full")
        return to(x, *args, **kwargs)

    x = torch.ones(2, device="sim:0")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        with pytest.raises(torch.OutOfMemoryError, match="sim:0 is full"):
            rpc.rpc_sync("b", twice, (x,))
    assert rpc.rpc_sync("b", twice, (x,)).tolist() == [2, 2]


@pytest.mark.parametrize(
    "name",
    ["meta", "sim", "sim:2", "sim:-1", "sim:0:0", "cpu:5", "hpu:0", "privateuseone:0", "sim:" + "0" * 10_000_000],
    ids=lambda name: name[:20],
)
def test_a_device_that_a_peer_invents_is_an_error_of_the_message(name: str) -> None:
    x = torch.arange(8.0)
    for tensors in [x], [x, x[2:]]:
        layout = encode_tensors(tensors)
        region = bytearray(layout.size)
        layout.write(region)
        descriptors = [msgspec.structs.replace(descriptor, device=name) for descriptor in layout.descriptors]
        with pytest.raises(PayloadError, match="this worker has no such device") as raised:
            decode_tensors(descriptors, region)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("claimed", [(("cuda", 2**62),), (("cuda", 1),) * 100])
def test_a_worker_that_claims_too_many_devices_is_refused(claimed: Any) -> None:
    with local_group(["a", "b"], devices={"a": claimed}) as agents, acting_as(agents["a"]):
        with pytest.raises(TelegradError, match=r"worker 'b' refused our connection: .* devices"):
            rpc.rpc_sync("b", torch.ones, (2,))


def test_a_worker_that_claims_many_devices_does_not_stop_the_one_that_replies() -> None:
    with local_group(["a", "b"], devices={"a": (("cuda", 0xFFFF),) * 32}) as agents, acting_as(agents["a"]):
        with pytest.raises(PayloadError, match="has no sim:0") as raised:
            rpc.rpc_sync("b", torch.ones, (2,), {"device": "sim:0"})
        assert len(str(raised.value)) < 5000


def test_a_device_number_that_is_too_large_is_named(group: Group) -> None:
    with pytest.raises(ValueError, match="device_map contains 1000000000000000000000000000000, which is not a device"):
        rpc.rpc_sync("b", twice, (torch.ones(1),), device_map={"cpu": 10**30})


# -- passes -----------------------------------------------------------------------------------------------------------


class CopiedLate(torch.autograd.Function):
    """Its gradient is sevens, copied from pinned memory: it is there when the stream of the node has done its work."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.device = x.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.source = torch.full(grads[0].shape, 7.0).pin_memory()
        return ctx.source.to(ctx.device, non_blocking=True)


def with_leaf(x: torch.Tensor) -> Any:
    kept["leaf"] = torch.ones(3, device=x.device, requires_grad=True)
    return CopiedLate.apply(kept["leaf"]) * x


def read_on_another_stream(context: int) -> list[float]:
    with torch.Stream(kept["leaf"].device):
        return autograd.get_gradients(context)[kept["leaf"]].add(0).tolist()


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_are_ready_on_every_stream_when_the_pass_is_over(group: Group, hooked: bool) -> None:
    with autograd.context() as context:
        y = rpc.rpc_sync("b", with_leaf, (torch.ones(3, device="sim:0"),))
        if hooked:
            kept["leaf"].register_post_accumulate_grad_hook(lambda leaf: None)
        context.backward(y.sum())
        assert rpc.rpc_sync("b", read_on_another_stream, (int(context),)) == [7, 7, 7]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_pass_with_inputs_keeps_nothing_alive(group: Group, device: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with autograd.context() as context:
            x = torch.ones(3, device=device, requires_grad=True)
            alive = weakref.ref(x)
            autograd.grad(context, [rpc.rpc_sync("b", twice, (x,)).sum()], [x])
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_memory_of_devices_returns_after_errors(group: Group) -> None:
    before = torch.accelerator.memory_allocated(0)
    with pytest.raises(TelegradError, match="has no sim:0"), local_group(["c", "d"], devices={"d": ()}) as agents:
        agents["c"].call("d", twice, (torch.ones(10_000, device="sim:0"),))
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == before
    assert accelerator.copies().device_to_host == 0
