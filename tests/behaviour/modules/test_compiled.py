"""Models with parts on other workers can be compiled, before and after they are split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from telegrad import autograd, nn
from telegrad.agent.agent import Agent
from telegrad.nn import RemoteModule, split

Group = dict[str, Agent]

# Dynamo looks at .grad of each tensor, and hides the warning from people only.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def compiler(group: Group) -> Any:
    yield
    torch.compiler.reset()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(4, 4)
        self.decoder = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.decoder(self.encoder(x * 2).relu() + x) * 3
        return y


def results(model: Any, names: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with autograd.context() as context:
        loss = model(x).square().mean()
        context.backward(loss)
        return loss.detach(), dict(zip(names, nn.gradients(model, context).values(), strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("places", [{"encoder": "b"}, {"decoder.1": "c"}, {"encoder": "b", "decoder": "c"}])
def test_a_split_model_can_be_compiled(places: dict[str, str], backend: str) -> None:
    model, x = Model(), torch.randn(3, 4)
    names = [name for name, _ in model.named_parameters()]
    want = results(model, names, x)
    compiled = torch.compile(split(model, places), backend=backend)
    for _ in range(2):
        torch.testing.assert_close(results(compiled, names, x), want)


def test_a_remote_module_itself_can_be_compiled() -> None:
    module = RemoteModule("b", torch.nn.Linear, (4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    got = []
    for one in (module, torch.compile(module, backend="eager")):
        with autograd.context() as context:
            context.backward(one(x).sum())
            got.append(context.gradients[x])
    torch.testing.assert_close(got[1], got[0])


def test_a_model_can_be_compiled_before_it_is_split() -> None:
    model, x = Model(), torch.randn(3, 4)
    names = [name for name, _ in model.named_parameters()]
    want = results(model, names, x)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(results(compiled, names, x), want)
    split(compiled, {"_orig_mod.encoder": "b"})
    torch.testing.assert_close(results(compiled, names, x), want)


def test_a_compiled_part_is_compiled_where_it_is_placed(group: Group) -> None:
    model, x = Model(), torch.randn(3, 4)
    names = [name for name, _ in model.named_parameters()]
    want = results(model, names, x)
    keys = list(model.state_dict())
    model.encoder = torch.compile(model.encoder, backend="eager")
    before = list(model.state_dict())
    split(model, {"encoder": "b"})
    torch.testing.assert_close(results(model, names, x), want)
    assert list(model.state_dict()) == before != keys  # torch.compile puts a name of its own into them
    part = group["b"].references.value(model.encoder.module_rref._id, None)
    assert type(part).__name__ == "OptimizedModule"


def test_the_inner_module_of_a_compiled_part_cannot_be_placed() -> None:
    model = torch.nn.Sequential(torch.compile(torch.nn.Linear(4, 4), backend="eager"))
    with pytest.raises(ValueError, match=r"'0\._orig_mod' is inside a module made by torch.compile.*'0'"):
        split(model, {"0._orig_mod": "b"})


def test_compiled_code_reads_attributes_of_a_remote_part_each_time() -> None:
    dropout = RemoteModule("b", torch.nn.Dropout, (0.0,))

    def run(x: torch.Tensor) -> torch.Tensor:
        return dropout(x + 1) * dropout.p  # type: ignore[no-any-return]

    compiled = torch.compile(run, backend="eager")
    with torch.no_grad():
        assert not compiled(torch.ones(2)).any()
        dropout.p = 1.0
        assert not compiled(torch.ones(2)).any()
        dropout.training = False
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        other = copy.deepcopy(dropout)
        other.p = 0.5
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
