"""TorchScript functions and modules in messages."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from tests.support.paths import ROOT

from telegrad.errors import FunctionNotFound, PayloadError
from telegrad.wire.function_names import function_name, resolve_function
from telegrad.wire.payload import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch has deprecated TorchScript

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_script_function_is_sent_by_its_name_in_torch() -> None:
    name = function_name(double)
    assert name is not None
    assert name.startswith("__torch__:")
    assert name.endswith("double")
    assert torch.equal(resolve_function(name)(torch.ones(2)), torch.full((2,), 2.0))


def test_a_script_function_is_found_by_importing_the_module_that_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    assert "scripted" not in sys.modules
    function = resolve_function("__torch__:scripted.add_one")
    assert torch.equal(function(torch.zeros(1)), torch.ones(1))
    monkeypatch.delitem(sys.modules, "scripted")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__torch__:nowhere.to_be.found", "module 'nowhere.to_be' cannot be imported"),
        ("__torch__:operator.no_script", "'operator.no_script' is not compiled here"),
        ("__torch__:alone", "'alone' is not compiled here"),
    ],
)
def test_a_missing_script_function_is_named_in_the_error(name: str, text: str) -> None:
    with pytest.raises(FunctionNotFound, match=text):
        resolve_function(name)


def test_a_script_function_can_be_a_value() -> None:
    encoded = encode({"f": double})
    value = decode(encoded.data, encoded.attachments)
    assert isinstance(value, dict)
    assert torch.equal(value["f"](torch.ones(2)), torch.full((2,), 2.0))


def test_a_script_module_round_trips() -> None:
    module = torch.jit.script(torch.nn.Linear(2, 3))
    encoded = encode([module])
    (received,) = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # a list
    assert torch.equal(received(torch.ones(2)), module(torch.ones(2)))


@pytest.mark.parametrize("edges", [True, False])
def test_script_modules_with_and_without_parameters_are_listed(edges: bool) -> None:
    frozen = torch.jit.script(torch.nn.Linear(2, 3).requires_grad_(False))
    trained = torch.jit.script(torch.nn.Linear(2, 3))
    assert encode([frozen, trained], edges=edges).modules == (trained,)


def test_a_script_module_with_a_tensor_that_has_a_history_is_refused_in_a_context() -> None:
    module = torch.jit.script(torch.nn.BatchNorm1d(2))
    module.running_mean = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(PayloadError, match="it is part of a TorchScript module"):
        encode([module])
