"""RemoteModules and distributed autograd inside TorchScript, which reads annotations: so here they are real ones."""

import gc
import io
import warnings

import pytest
import torch
from torch import Tensor
from torch.jit import Future

from telegrad import autograd, nn, rpc
from telegrad.agent.agent import Agent
from telegrad.drop_in.autograd import backward, get_gradients
from telegrad.drop_in.autograd.scripting import register
from telegrad.drop_in.nn.remote_module import RemoteModule, _RemoteModule
from telegrad.errors import PayloadError

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]

register(get_gradients, backward)  # as telegrad.drop_in.install() does


class Scale(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor, number: int) -> tuple[int, Tensor]:
        if number < 0:
            raise ValueError("negative")
        return number + 1, x * self.by


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.interface
    class ScaleInterface:
        def forward(self, x: Tensor, number: int) -> tuple[int, Tensor]:
            pass

    @torch.jit.interface
    class RemoteScaleInterface:
        def forward(self, x: Tensor, number: int) -> tuple[int, Tensor]:
            pass

        def forward_async(self, x: Tensor, number: int) -> Future[tuple[int, Tensor]]:
            pass

    @torch.jit.script
    def use(module: RemoteScaleInterface, x: Tensor) -> Tensor:
        first = module.forward_async(x, 1)
        second = module.forward_async(x * 2, 2)
        number, y = module.forward(x, 3)
        return first.wait()[1] * second.wait()[1] * y + number

    @torch.jit.script
    def gradients_of(context: int) -> dict[Tensor, Tensor]:
        return get_gradients(context)

    @torch.jit.script
    def backward_twice(context: int, loss: Tensor) -> None:
        backward(context, [loss], True)
        backward(context, [loss])


def scriptable(by: float = 3.0) -> _RemoteModule:
    return _RemoteModule("b", Scale, (by,), _module_interface_cls=ScaleInterface)


def test_a_remote_module_with_an_interface_can_be_scripted() -> None:
    module = scriptable()
    assert module.is_scriptable
    x = torch.ones(2)
    script = torch.jit.script(module)
    for one in (module, script):
        assert one.forward(x, 1)[0] == 2
        assert torch.equal(one.forward(x, 1)[1], 3 * x)
        assert torch.equal(one.forward_async(x, 1).wait()[1], 3 * x)


def test_a_script_can_use_the_result_and_gradients_flow() -> None:
    module = scriptable()
    script = torch.jit.script(module)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        y = use(script, x)
        context.backward(y.sum())
        assert torch.equal(y, torch.full((2,), 3.0 * 6 * 3 + 4))
        assert torch.equal(context.gradients[x], torch.full((2,), 3 * 2 * 27.0))
        assert nn.gradients(nn.RemoteModule.init_from_module_rref("b", module.module_rref), context)["by"] == 2 * 2 * 27


def test_a_remote_exception_reaches_the_caller_of_the_script() -> None:
    script = torch.jit.script(scriptable())
    with pytest.raises(Exception, match="negative"):
        script.forward(torch.ones(2), -1)
    with pytest.raises(Exception, match="negative"):
        script.forward_async(torch.ones(2), -1).wait()


def test_another_module_can_be_created_from_the_rref_and_scripted() -> None:
    other = RemoteModule.init_from_module_rref("b", scriptable().module_rref, ScaleInterface)
    assert other.is_scriptable
    assert torch.equal(torch.jit.script(other).forward(torch.ones(2), 1)[1], torch.full((2,), 3.0))


def test_a_scripted_module_cannot_be_saved_or_sent() -> None:
    script = torch.jit.script(scriptable())
    with pytest.raises(torch.jit.Error, match="RemoteModule can only be pickled when using RPC"):
        torch.jit.save(script, io.BytesIO())
    with pytest.raises(PayloadError, match="Passing a script RemoteModule over RPC is not supported"):
        rpc.rpc_sync("c", len, ([script],))


def test_a_class_that_is_not_an_interface_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be a type object decorated by @torch\.jit\.interface"):
        _RemoteModule("b", Scale, (1.0,), _module_interface_cls=Scale)


def test_the_worker_releases_the_module_with_the_script(group: dict[str, Agent]) -> None:
    module = scriptable()
    script = torch.jit.script(module)
    script.forward(torch.ones(1), 1)
    references = group["b"].references
    assert references.counts()["values"] == 1
    del module, script
    gc.collect()
    deadline = group["a"].runtime.now() + 20
    while references.counts()["values"]:
        group["a"].call("b", len, ((),))
        assert group["a"].runtime.now() < deadline


def test_a_script_can_run_passes_and_read_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("b", torch.mul, (x, 3)).sum()
        backward_twice(int(context), loss)
        grads = gradients_of(int(context))
        assert list(grads) == [x]
        assert torch.equal(grads[x], torch.full((2,), 6.0))
