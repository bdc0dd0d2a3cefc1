"""A split model is the model that it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from telegrad import autograd, nn
from telegrad.agent.agent import Agent
from telegrad.errors import PayloadError, TelegradError, UnknownWorker, WorkerLost
from telegrad.nn import RemoteModule, split
from telegrad.rref.handle import call_through
from telegrad.testing import Faults, Simulation

Group = dict[str, Agent]

# The tests list parameters of the local parts on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the parameters of this model")


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        self.passes += 1
        hidden = self.norm(self.embed(tokens)) * scale
        return hidden, hidden.tanh()


class Model(torch.nn.Module):
    """Has keyword arguments, tuples, a skip connection around a remote part, and local parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.encoder = Encoder()
        self.decoder = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 6))
        self.unused = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, bent = self.encoder(tokens, scale=2.0)
        return self.head(self.decoder(hidden * self.scale) + bent + hidden)


PLACES = {"encoder": "b", "decoder.0": "c/cpu", "decoder.2": "rank:1", "unused": "c"}


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = Model().double()
    return copy.deepcopy(model), model


def gradients_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def descend(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * grad


def descend_there(module: torch.nn.Module, context: int) -> None:
    left = autograd.get_gradients(context)
    for parameter in module.parameters():
        if parameter in left:
            descend(parameter, left[parameter])


def step(model: torch.nn.Module, context: Any) -> None:
    """Do a step of plain gradient descent on all workers."""
    here = context.gradients
    for parameter in model.parameters():
        if parameter in here:
            descend(parameter, here[parameter])
    for _, module in nn.remote_modules(model):
        call_through(module.module_rref.rpc_sync(), descend_there, int(context))


def train(split_model: torch.nn.Module, model: torch.nn.Module, steps: int) -> None:
    """Train both side by side, and check that loss, gradients and state stay equal."""
    for number in range(steps):
        tokens = torch.randint(0, 10, (8,), generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        want = model(tokens).square().mean()
        want.backward()
        with autograd.context() as context:
            loss = split_model(tokens).square().mean()
            context.backward(loss)
            got = nn.gradients(split_model, context)
            step(split_model, context)
        torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-9, atol=0)
        assert list(got) == list(gradients_by_name(model))
        for name, grad in gradients_by_name(model).items():
            torch.testing.assert_close(got[name], grad, rtol=1e-9, atol=1e-15)
        for parameter in model.parameters():
            if parameter.grad is not None:
                descend(parameter, parameter.grad)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(split_model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_a_split_model_trains_like_a_local_one(group: Group) -> None:
    here, model = models()
    assert split(model, PLACES) is model
    assert [name for name, _ in nn.remote_modules(model)] == ["encoder", "decoder.0", "decoder.2", "unused"]
    assert [name for name, _ in nn.named_parameter_rrefs(model)] == [name for name, _ in here.named_parameters()]
    assert [rref.owner_name() for rref in nn.parameter_rrefs(model)] == [*"abbb", *"ccbb", *"cc", *"aa"]
    train(model, here, steps=5)


def test_a_split_model_trains_on_a_network_with_faults() -> None:
    for seed in range(5):
        with Simulation(seed=seed, workers=["a", "b", "c"], faults=Faults(drop=0.02, duplicate=0.02, cut=0.005)) as sim:

            def program() -> None:
                here, model = models()
                split(model, PLACES)
                train(model, here, steps=2)

            sim.run(lambda: sim.spawn("a", program).join(sim["a"].runtime.now() + 600))


def test_state_can_be_saved_and_restored_during_training(group: Group) -> None:
    here, model = models()
    train(split(model, PLACES), here, steps=2)
    saved = model.state_dict()
    assert list(saved) == list(here.state_dict())
    _, again = models()
    split(again, {"decoder": "b", "encoder.embed": "c"})  # elsewhere
    again.load_state_dict(saved)
    train(again, here, steps=2)


def test_a_part_keeps_its_mode_buffers_dtype_and_gradients(group: Group) -> None:
    _, model = models()
    model.encoder.norm.eval()  # only a part of the part
    model.unused.eval()
    model.encoder.passes += 41
    model.encoder.embed.requires_grad_(False)
    model.encoder.norm.weight.grad = torch.ones(6, dtype=torch.double)
    split(model, {"encoder": "b", "unused": "c"})
    assert (model.training, model.encoder.training, model.unused.training) == (True, True, False)
    model(torch.arange(4))
    module = group["b"].references.value(model.encoder.module_rref._id, None)
    assert (module.training, module.norm.training) == (True, False)
    assert not group["c"].references.value(model.unused.module_rref._id, None).training
    assert module.passes == 42
    assert [p.requires_grad for p in module.parameters()] == [False, True, True]
    assert torch.equal(module.norm.weight.grad, torch.ones(6, dtype=torch.double))
    assert module.embed.weight.dtype == torch.double


def double(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def test_a_part_keeps_its_hooks(group: Group) -> None:
    here, model = models()
    here.decoder[0].register_forward_hook(double)
    model.decoder[0].register_forward_hook(double)
    train(split(model, PLACES), here, steps=1)


def test_a_hook_that_cannot_be_sent_raises_and_leaves_the_model_unchanged(group: Group) -> None:
    here, model = models()
    lock = threading.Lock()
    model.decoder[0].register_forward_hook(lambda *_: print(lock))
    with pytest.raises(PayloadError, match="lock") as caught:
        split(model, PLACES)
    assert caught.value.__notes__ == ["'decoder.0' could not be placed on 'c'; the model is unchanged"]
    assert isinstance(model.encoder, Encoder)
    tokens = torch.arange(4)
    assert torch.equal(model(tokens), here(tokens))


def test_a_hook_on_a_parameter_raises(group: Group) -> None:
    _, model = models()
    model.encoder.embed.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(TelegradError, match=r"encoder\.embed\.weight has hooks"):
        split(model, PLACES)


def test_a_missing_device_raises_and_leaves_the_model_unchanged(group: Group) -> None:
    _, model = models()
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=f"worker 'c' has no device '{missing}'") as caught:
        split(model, {"encoder": "b", "head": f"c/{missing}"})
    assert "'head' could not be placed on 'c'" in caught.value.__notes__[0]
    assert isinstance(model.encoder, Encoder)


def test_a_lost_worker_raises_and_leaves_the_model_unchanged(group: Group) -> None:
    _, model = models()
    group["c"].close()
    with pytest.raises(WorkerLost, match="'c'"):
        split(model, PLACES)
    assert isinstance(model.encoder, Encoder)


def test_a_module_used_twice_is_replaced_in_both_positions(group: Group) -> None:
    block = torch.nn.Linear(3, 3).double()
    here = torch.nn.Sequential(block, torch.nn.Tanh(), block)
    model = split(copy.deepcopy(here), {"0": "b"})
    assert isinstance(model[0], RemoteModule)
    assert model[0] is model[2]
    x = torch.randn(4, 3, dtype=torch.double)
    here(x).sum().backward()
    with autograd.context() as context:
        context.backward(model(x).sum())
        got = nn.gradients(model, context)
    assert got.keys() == {"0.weight", "0.bias"}
    torch.testing.assert_close(got["0.weight"], block.weight.grad)
    assert list(model.state_dict()) == list(here.state_dict())


def test_weights_tied_inside_one_part_stay_tied(group: Group) -> None:
    here = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3)))
    here[0][2].weight = here[0][0].weight
    model = split(copy.deepcopy(here), {"0": "b"})
    assert [name for name, _ in nn.named_parameter_rrefs(model)] == [name for name, _ in here.named_parameters()]
    x = torch.randn(4, 3)
    here(x).sum().backward()
    with autograd.context() as context:
        context.backward(model(x).sum())
        torch.testing.assert_close(nn.gradients(model, context)["0.0.weight"], here[0][0].weight.grad)


@pytest.mark.parametrize("places", [{"encoder": "b"}, {"encoder": "b", "head": "c"}, {"head": "c"}])
@pytest.mark.parametrize("view", [False, True])
def test_weights_tied_across_workers_raise(group: Group, places: dict[str, str], view: bool) -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Embedding(10, 6), "head": torch.nn.Linear(6, 10)})
    tied = model["encoder"].weight
    model["head"].weight = torch.nn.Parameter(tied.data.view(10, 6)) if view else tied
    with pytest.raises(ValueError, match=r"'encoder.weight' \((here|on b)\) and 'head.weight' \((here|on c)\) are one"):
        split(model, places)


@pytest.mark.parametrize(
    ("places", "error", "text"),
    [
        ({"encodr": "b"}, ValueError, "no submodule 'encodr'; did you mean 'encoder'"),
        ({"": "b"}, ValueError, "the whole model"),
        ({"decoder": "b", "decoder.0": "c"}, ValueError, "'decoder.0' is a part of 'decoder'"),
        ({"decoder.0": "b", "decoder": "b"}, ValueError, "'decoder.0' is a part of 'decoder'"),
        ({"encoder": "nobody"}, UnknownWorker, "no worker named 'nobody'"),
        ({"encoder": "b/foo"}, RuntimeError, "foo"),
        ({"encoder": "b/c/d"}, ValueError, "Could not parse"),
    ],
)
def test_invalid_placements_raise(group: Group, places: dict[str, str], error: type[Exception], text: str) -> None:
    _, model = models()
    with pytest.raises(error, match=text):
        split(model, places)
    assert not list(nn.remote_modules(model))


def test_a_part_without_forward_raises(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    with pytest.raises(ValueError, match="'0' is a ModuleList, which has no forward"):
        split(model, {"0": "b"})


def test_a_remote_part_cannot_be_placed_again(group: Group) -> None:
    _, model = models()
    split(model, PLACES)
    with pytest.raises(ValueError, match="'encoder' is already on worker 'b'"):
        split(model, {"encoder": "c"})
    with pytest.raises(ValueError, match="'decoder' contains '0', which is already on worker 'c'"):
        split(model, {"decoder": "c"})


def test_a_split_model_can_be_split_further(group: Group) -> None:
    here, model = models()
    split(model, {"encoder": "b"})
    split(model, {"head": "c"})
    train(model, here, steps=1)


def test_the_error_for_a_lazy_part_says_what_to_do(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"0\.weight is lazy: .* Call the model once before the split"):
        split(model, {"0": "b"})
    with pytest.raises(ValueError, match=r"1\.\w+ is lazy"):
        split(model, {"1": "b"})
    split(model, {"2": "b"})  # local parts may be lazy
    x = torch.randn(4, 2)
    y = model(x)
    split(model, {"0": "c"})
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("places", [["b"], {torch.nn.Tanh(): "b"}])
def test_places_that_are_no_dict_of_paths_are_an_error(group: Group, places: Any) -> None:
    with pytest.raises(TypeError, match=r"places must be a dict .*\{'encoder': 'worker1'\}"):
        split(torch.nn.Sequential(torch.nn.Tanh()), places)
