"""Device maps: what users may write, what peers may send, and where tensors go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import PayloadError, ProtocolError
from telegrad.wire import devices
from telegrad.wire.devices import (
    MAX_PAIRS,
    SAME_DEVICE,
    TO_CPU,
    DevicePairs,
    GradientTargets,
    Placement,
    check_pairs_exist,
    check_received_pairs,
    check_received_sources,
    has_device,
    local_devices,
    parse_device_map,
    reversed_pairs,
    source_devices,
)

CUDA = (("cuda", 2),)
names = st.sampled_from(["cpu", "cuda:0", "cuda:1", "xpu:0"])
maps = st.permutations(["cpu", "cuda:0", "cuda:1", "xpu:0"]).flatmap(
    lambda targets: st.lists(names, unique=True).map(lambda sources: tuple(zip(sources, targets, strict=False)))
)


class OnDevice(torch.Tensor):
    """Stands for a tensor on a device that this machine does not have."""

    device = torch.device("cuda:0")
    is_cpu = False


def on_device(name: str) -> Any:
    made = torch.ones(2, 3).as_subclass(OnDevice)
    made.device = torch.device(name)
    made.is_cpu = name == "cpu"
    return made


# -- what users write -------------------------------------------------------------------------------------------------


@given(pairs=maps)
def test_a_map_is_read_as_it_was_written(pairs: DevicePairs) -> None:
    assert parse_device_map(dict(pairs), "the map") == pairs
    assert parse_device_map({torch.device(a): torch.device(b) for a, b in pairs}, "the map") == pairs


@given(pairs=maps)
def test_the_reverse_of_the_reverse_is_the_map(pairs: DevicePairs) -> None:
    assert reversed_pairs(reversed_pairs(pairs)) == pairs
    assert dict(reversed_pairs(pairs)) == {b: a for a, b in pairs}


@pytest.mark.parametrize(
    ("given_map", "says"),
    [
        ({"cuda:0": "cuda:1", "cuda:1": "cuda:1"}, "maps both cuda:0 and cuda:1 to cuda:1: it must be one to one"),
        ({"cuda:0": "cuda:1", torch.device("cuda:0"): "cuda:0"}, "names cuda:0 twice"),
        ({"cuda": "cuda:1"}, "'cuda' without an index: write cuda:0"),
        ({"cuda:0": "gpu:1"}, "'gpu:1', which is not a device"),
        ({"cuda:0": "meta"}, "'meta', which has no memory"),
    ],
)
def test_a_map_that_makes_no_sense_is_an_error(given_map: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_device_map(given_map, "the map")


@pytest.mark.parametrize("given_map", [["cuda:0"], "cuda:0", {"cuda:0": 1.5}, {True: "cuda:0"}, {"cuda:0": None}])
def test_what_is_not_a_map_of_devices_is_a_type_error(given_map: Any) -> None:
    with pytest.raises(TypeError, match="the map"):
        parse_device_map(given_map, "the map")


@pytest.mark.parametrize(
    ("pairs", "worker", "device"),
    [
        ((("cuda:2", "cuda:0"),), "worker0", "cuda:2"),
        ((("cuda:0", "cuda:0"),), "worker1", "cuda:0"),
        ((("xpu:0", "cpu"),), "worker0", "xpu:0"),
    ],
)
def test_a_map_with_a_device_that_a_worker_lacks_names_both(pairs: DevicePairs, worker: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"worker '{worker}' has no {device}"):
        check_pairs_exist(pairs, "worker0", CUDA, "worker1", (), "the device map")


def test_a_map_whose_devices_exist_is_accepted() -> None:
    check_pairs_exist((("cuda:1", "cpu"), ("cpu", "xpu:0")), "a", CUDA, "b", (("xpu", 1),), "the device map")


def test_a_worker_has_the_devices_that_it_counts() -> None:
    assert has_device((), torch.device("cpu"))
    assert has_device(CUDA, torch.device("cuda"))
    assert not has_device(CUDA, torch.device("cuda:2"))
    assert not has_device(CUDA, torch.device("xpu:0"))


def test_this_process_names_its_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert local_devices() == ()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert local_devices() == ()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert local_devices() == (("cuda", 4),)


# -- what peers send --------------------------------------------------------------------------------------------------


@given(pairs=maps)
def test_a_received_map_is_accepted(pairs: DevicePairs) -> None:
    assert check_received_pairs(pairs) == pairs


@pytest.mark.parametrize(
    "pairs",
    [
        (("a", "b"), ("c", "b")),
        (("a", "b"), ("a", "c")),
        (("a" * 100, "b"),),
        tuple((f"a:{i}", f"b:{i}") for i in range(MAX_PAIRS + 1)),
    ],
)
def test_a_hostile_map_is_refused(pairs: DevicePairs) -> None:
    with pytest.raises(ProtocolError, match="device map"):
        check_received_pairs(pairs)


def test_source_devices_must_fit_the_tensors() -> None:
    assert check_received_sources((), 3) == ()
    assert check_received_sources(("", "cuda:0"), 2) == ("", "cuda:0")
    for hostile, says in ((("cuda:0",), "devices for 2 tensors"), (("", "x" * 100), "more than 64 characters")):
        with pytest.raises(ProtocolError, match=says):
            check_received_sources(hostile, 2)


# -- where tensors go -------------------------------------------------------------------------------------------------


@given(pairs=maps, name=names)
def test_a_tensor_follows_the_map_or_keeps_its_device(pairs: DevicePairs, name: str) -> None:
    placement = Placement("a", "b", (("cuda", 2), ("xpu", 1)), pairs)
    target = dict(pairs).get(name, name)
    assert placement.target_of(on_device(name)) == ("" if target == "cpu" else target)
    assert placement.moves_cpu == (dict(pairs).get("cpu", "cpu") != "cpu")


def test_what_is_no_tensor_and_what_has_no_memory_go_nowhere() -> None:
    placement = Placement("a", "b", CUDA, (("cpu", "cuda:1"),))
    meta = torch.ones(2, device="meta")
    assert placement.targets([b"buffer", meta, torch.ones(2)]) == ["", "", "cuda:1"]
    assert SAME_DEVICE.targets([b"buffer", meta, torch.ones(2), on_device("cuda:1")]) == ["", "", "", "cuda:1"]


def test_a_device_that_the_receiver_lacks_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(PayloadError) as caught:
        Placement("a", "b", ()).target_of(on_device("cuda:1"))
    assert str(caught.value) == (
        "a tensor of shape [2, 3] is on cuda:1 of worker 'a', but worker 'b' has no cuda:1 (it has no accelerator, or "
        "its backend was not loaded before init_rpc). Map the device with Options(device_maps={'b': {'cuda:1': "
        "'cpu'}}) or with device_map in the call, or send the tensor from the CPU"
    )
    with pytest.raises(PayloadError, match="on worker 'b', or return the tensor from the CPU"):
        Placement("a", "b", (), is_reply=True).target_of(on_device("cuda:1"))


def test_gradients_go_to_the_devices_of_their_tensors() -> None:
    grads = [torch.ones(1), torch.ones(1)]
    assert TO_CPU.targets(grads) == ["", ""]
    assert not TO_CPU.moves_cpu
    targets = GradientTargets(("", "cuda:1"))
    assert targets.targets(grads) == ["", "cuda:1"]
    assert targets.moves_cpu
    assert source_devices([torch.ones(1), on_device("cuda:1")]) == ("", "cuda:1")
    assert source_devices([torch.ones(1)]) == ()


def test_the_accelerators_of_a_worker_are_named() -> None:
    assert devices.describe_devices((("cuda", 1), ("xpu", 2))) == "its accelerators: cuda:0, xpu:0, xpu:1"


def test_however_many_devices_a_worker_claims_its_description_is_short() -> None:
    described = devices.describe_devices((("cuda", 2**62), *[("x" * 1000, 1)] * 1000))
    assert described.startswith("its accelerators: cuda:0, cuda:1, ")
    assert f"cuda:7, ... cuda:{2**62 - 1}, xxx" in described
    assert len(described) < 1000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", torch.device("cpu")),
        ("cuda:1", torch.device("cuda:1")),
        ("cuda:2", None),
        ("cuda", None),
        ("cuda:-1", None),
        ("xpu:0", None),
        ("meta", None),
        ("cuda:" + "0" * 100, None),
    ],
)
def test_a_device_that_a_peer_names_is_one_of_this_worker(
    name: str, expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "local_devices", lambda: CUDA)
    assert devices.own_device(name) == expected
