"""Tensors of every kind get their saved values back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from telegrad.errors import TelegradError
from telegrad.recovery import tensor_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.zeros(0, 3),
    "bfloat16": lambda: torch.arange(4).bfloat16(),
    "complex": lambda: torch.arange(4) * 1j,
    "conjugate": lambda: (torch.arange(4) * 1j).conj(),
    "not a number": lambda: torch.tensor([float("nan"), -0.0]),
    "channels last": lambda: torch.rand(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "slice": lambda: torch.rand(4, 4)[:, 1:3],
    "expanded": lambda: torch.ones(1).expand(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 3, torch.quint8),
}


def others(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors that can take the values of another one, with other values."""
    if tensor.layout is torch.sparse_csr:
        return [(torch.eye(3) * 2).to_sparse_csr()]
    if tensor.is_sparse:
        return [torch.zeros(3, 3).to_sparse(), (torch.ones(3, 3)).to_sparse()]
    if tensor.is_quantized:
        return [torch.quantize_per_tensor(torch.rand(3), 0.7, 1, torch.quint8)]
    if 0 in tensor.stride():
        return [torch.zeros(1).expand(3)]
    return [torch.zeros_like(tensor)]


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.is_quantized:
        return tensor.dequantize().numpy().tobytes()
    return bytes(tensor.to_dense().resolve_conj().contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_gets_the_values_of_another_one(kind: str) -> None:
    tensor = KINDS[kind]()
    saved = tensor_state.save(tensor)
    for other in [*others(tensor), tensor_state.new(saved)]:
        tensor_state.load(other, saved)
        assert bits(other) == bits(tensor)
        assert other.layout is tensor.layout
        assert other.device == tensor.device


def test_views_of_a_tensor_get_its_values() -> None:
    base = torch.zeros(4)
    view = base[1:3]
    tensor_state.load(base, tensor_state.save(torch.arange(4.0)))
    assert view.tolist() == [1, 2]


@pytest.mark.parametrize(
    "built",
    [torch.zeros(3), torch.zeros(2, dtype=torch.double), torch.zeros(2).to_sparse()],
    ids=["shape", "type", "layout"],
)
def test_a_tensor_that_does_not_fit_is_refused(built: torch.Tensor) -> None:
    saved = tensor_state.save(torch.ones(2))
    assert not tensor_state.fits(built, saved)
    with pytest.raises(TelegradError, match=r"a tensor of shape \[2\] and type torch.float32 was saved, and a tensor"):
        tensor_state.load(built, saved)


def test_a_compressed_tensor_with_other_places_does_not_fit() -> None:
    assert not tensor_state.fits(torch.zeros(3, 3).to_sparse_csr(), tensor_state.save(torch.eye(3).to_sparse_csr()))


def test_a_new_tensor_has_gradient_and_device() -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.grad = torch.full((2,), 3.0)
    other = tensor_state.new(tensor_state.save(tensor))
    assert other.requires_grad
    assert other.is_leaf
    assert other.grad is not None
    assert other.grad.tolist() == [3, 3]


def test_a_parameter_without_values_is_named() -> None:
    lazy = torch.nn.LazyLinear(2).weight
    with pytest.raises(TypeError, match="a parameter that is not initialized: call lazy modules once in the build fun"):
        tensor_state.save(lazy)
    with pytest.raises(TelegradError, match="was saved, and one that is not initialized built"):
        tensor_state.load(lazy, tensor_state.save(torch.ones(2, 3)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, device="meta"), "on the meta device: it has no values"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided), r"values\(\) and"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), r"values\(\) and"),
    ],
    ids=["meta", "nested", "jagged"],
)
def test_a_tensor_that_could_not_be_loaded_is_not_saved(make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        tensor_state.save(make())
