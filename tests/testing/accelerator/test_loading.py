"""The simulated accelerator is a device of torch: placement, operators and the engine's threads."""

from __future__ import annotations

import copy
import io
import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from tests.support.loaded_interpreter import run_loaded
from torch import nn

from telegrad.errors import TelegradError
from telegrad.testing import accelerator

pytestmark = pytest.mark.usefixtures("sim")


class Identity(torch.autograd.Function):
    """Remembers the threads on which its backward runs."""

    threads: list[int] = []  # noqa: RUF012  # emptied by each test that reads it

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Identity.threads.append(threading.get_ident())
        return grad


def in_new_process(code: str) -> str:
    """Run a program in which no device was installed before, and return what it printed."""
    result = run_loaded([sys.executable, "-W", "error", "-c", code], timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- torch knows the devices ----------------------------------------------------------------------------------------


def test_torch_knows_the_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    torch.accelerator.synchronize("sim:1")


def test_the_current_device_belongs_to_a_thread() -> None:
    torch.accelerator.set_device_index(1)
    assert torch.empty(1, device="sim").device == torch.device("sim:1")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert found == [0]
    with torch.sim.device("sim:0"):
        assert torch.empty(1, device="sim").device == torch.device("sim:0")
    assert torch.accelerator.current_device_index() == 1


def test_a_device_that_does_not_exist_is_named() -> None:
    for use in (lambda: torch.empty(1, device="sim:7"), lambda: torch.ones(1).to("sim:7")):
        with pytest.raises(RuntimeError, match="sim:7 does not exist"):
            use()


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(TelegradError, match="has 2 simulated devices"):
        accelerator.install(devices=3)
    accelerator.install(devices=2)


def test_a_number_of_devices_can_be_chosen() -> None:
    code = "import torch; from telegrad.testing import accelerator as a; a.install(5); print(torch.sim.device_count())"
    assert in_new_process(code) == "5\n"
    code = (
        "from telegrad.testing import accelerator\ntry: accelerator.install(0)\nexcept Exception as error: print(error)"
    )
    assert in_new_process(code) == "the simulated accelerator has 1 to 16 devices, not 0\n"


def test_functions_need_an_installed_accelerator() -> None:
    code = (
        "from telegrad.testing import accelerator\ntry: accelerator.copies()\nexcept Exception as error: print(error)"
    )
    assert "install() first" in in_new_process(code)


def test_another_backend_in_its_place_is_reported() -> None:
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('npu')\nfrom telegrad.testing import accelerator\n"
        "try: accelerator.install()\nexcept Exception as error: print(error)"
    )
    assert "another backend" in in_new_process(code)


def test_a_forked_child_uses_the_devices() -> None:
    x = torch.ones(3, device="sim:1")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            accelerator.install()
            status = 0 if (x + 1).sum().item() == 6 else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


# -- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(2, 2),
        lambda x: x + torch.ones(2, 2, device="sim:0"),
        lambda x: torch.ones(2, 2) @ x,
        lambda x: torch.cat([x, x.to("sim:0")]),
        lambda x: torch.cat([torch.ones(2, 2), x]),
        lambda x: x.add_(torch.ones(2, 2)),
        lambda x: torch.where(x > 0, x, torch.ones(2, 2)),
        lambda x: x.index_put((torch.tensor([0], device="sim:1"),), torch.ones(1, 2)),
        lambda x: nn.functional.linear(x, torch.ones(2, 2, device="sim:0")),
        lambda x: torch.stack([x, torch.ones(2, 2, device="sim:0")]),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: torch.add(torch.ones(2, 2), 1, out=x),
        lambda x: torch.ones(()).add_(x.sum()),
        lambda x: x.set_(torch.ones(2, 2, device="sim:0")),
        lambda x: torch._foreach_add([x, x], [torch.ones(2, 2), torch.ones(2, 2)]),
    ],
)
def test_operators_refuse_tensors_on_two_devices(mix: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"on the same device|storage on sim:0"):
        mix(torch.ones(2, 2, device="sim:1"))


def test_scalars_and_indices_may_be_on_the_cpu() -> None:
    x = torch.arange(4.0, device="sim:1")
    for result in (x * torch.tensor(2.0), torch.tensor(2.0) * x, x * 2, x[torch.tensor([0, 2])], x[1:], x.sum()):
        assert result.device == torch.device("sim:1")
    x[torch.tensor([0, 1])] = 5.0
    assert x.tolist() == [5.0, 5.0, 2.0, 3.0]


def test_new_tensors_are_on_the_device_asked_for() -> None:
    for make in (
        lambda d: torch.ones(2, device=d),
        lambda d: torch.randn(2, device=d),
        lambda d: torch.randperm(4, device=d),
        lambda d: torch.tril_indices(3, 3, device=d),
        lambda d: torch.tensor([1, 2], device=d),
        lambda d: torch.zeros(1, device=d).new_ones(2),
        lambda d: torch.empty_strided((2, 2), (1, 2), device=d),
    ):
        assert make("sim:1").device == torch.device("sim:1")


def test_views_share_memory() -> None:
    x = torch.arange(12.0, device="sim:0")
    for view in (x.view(3, 4), x.as_strided((2,), (6,)), x.unfold(0, 3, 3), x[2:5], x.view(torch.int32), x.detach()):
        view.zero_()
        assert x.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert x.tolist() == [0.0] * 12
    z = torch.ones(2, dtype=torch.cfloat, device="sim:0")
    torch.view_as_real(z)[0, 1] = 3.0
    assert z.tolist() == [1 + 3j, 1]


def test_sizes_and_storages_can_be_changed() -> None:
    x = torch.arange(3.0, device="sim:1")
    x.resize_(2, 3)
    assert x.device == torch.device("sim:1")
    assert x[0].tolist() == [0.0, 1.0, 2.0]
    out = torch.empty(0, device="sim:1")
    torch.add(torch.ones(3, device="sim:1"), 1, out=out)
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert torch.accelerator.current_device_index() == 0
    out.untyped_storage().resize_(400)
    assert out.untyped_storage().device == torch.device("sim:1")
    assert out.tolist() == [2.0, 2.0, 2.0]
    other = torch.empty(0, device="sim:1").set_(out.untyped_storage(), 1, (2,), (1,))
    assert other.tolist() == [2.0, 2.0]
    assert out.set_().shape == (0,)


def test_tensors_are_copied_pickled_and_printed() -> None:
    x = nn.Parameter(torch.ones(2, device="sim:1"))
    assert copy.deepcopy(x).device == x.device
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for location, expected in ((None, "sim:1"), ("sim:0", "sim:0"), ("cpu", "cpu")):
        file.seek(0)
        assert torch.load(file, map_location=location)["x"].device == torch.device(expected)
    assert "sim:1" in repr(x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_values_survive_the_way_to_a_device_and_back(dtype: torch.dtype) -> None:
    for x in (torch.arange(6).to(dtype).reshape(2, 3).t(), torch.ones((), dtype=dtype), torch.ones(0, 3, dtype=dtype)):
        assert torch.equal(x.to("sim:0").to("sim:1").cpu(), x)
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(conjugated.to("sim:0").cpu(), conjugated)
    assert torch.equal(torch.tensor([1 + 2j]).to("sim:0").conj().cpu(), torch.tensor([1 - 2j]))


def test_memory_is_counted_and_freed() -> None:
    before = torch.accelerator.memory_allocated(1)
    x = torch.ones(1000, device="sim:1")
    assert torch.accelerator.memory_allocated(1) == before + 4000
    del x
    assert torch.accelerator.memory_allocated(1) == before
    torch.accelerator.empty_cache()


def test_a_seed_draws_the_same_numbers_as_on_the_cpu() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="sim:1").cpu(), expected)


def test_autocast_runs_matrix_products_in_lower_precision() -> None:
    layer, x = nn.Linear(2, 2).to("sim:1"), torch.ones(1, 2, device="sim:1")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert x.exp().dtype is torch.float32
    assert layer(x).dtype is torch.float32


# -- the engine -------------------------------------------------------------------------------------------------------


def test_nodes_run_on_the_thread_of_their_device() -> None:
    Identity.threads.clear()
    for device in ("sim:0", "sim:1"):
        x = torch.ones(2, device=device, requires_grad=True)
        Identity.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.device == torch.device(device)
    assert len({threading.get_ident(), *Identity.threads}) == 3


def test_nodes_run_on_the_calling_thread_without_multithreading() -> None:
    Identity.threads.clear()
    with torch.autograd.set_multithreading_enabled(False):
        a = torch.ones(2, device="sim:0", requires_grad=True)
        Identity.apply(Identity.apply(a).to("sim:1")).sum().backward()
    assert Identity.threads == [threading.get_ident()] * 2


@pytest.mark.parametrize("pass_before", ["torch.ones(1, requires_grad=True).backward()", ""])
def test_the_engine_may_have_run_before(pass_before: str) -> None:
    code = f"""
import threading, torch
{pass_before}
from telegrad.testing import accelerator
accelerator.install()
x = torch.ones(2, device="sim:1", requires_grad=True)
x.register_hook(lambda grad: print(threading.current_thread() is threading.main_thread()))
x.sum().backward()
"""
    assert in_new_process(code) == "False\n"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 3, 3, padding=1), nn.LayerNorm(4)
        self.rnn, self.embedding = nn.LSTM(4, 4, batch_first=True), nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.relu(self.convolution(x)))
        y, _ = self.rnn(y + self.embedding(tokens))
        y, _ = self.attention(y, y, y)
        return nn.functional.dropout(y, 0.3).logsumexp(-1)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_training_equals_the_cpu(optimizer: type[torch.optim.Optimizer]) -> None:
    x, tokens = torch.randn(2, 2, 4), torch.randint(0, 5, (2, 3))
    model = Net()
    other = copy.deepcopy(model).to("sim:1")
    losses: list[list[float]] = []
    for net, device in ((model, "cpu"), (other, "sim:1")):
        torch.manual_seed(0)
        steps = optimizer(net.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            steps.zero_grad()
            loss = net(x.to(device), tokens.to(device)).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            steps.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1])
    for ours, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert ours.device == torch.device("sim:1")
        torch.testing.assert_close(ours.cpu(), expected)


def test_second_derivatives_over_two_devices_equal_the_cpu() -> None:
    values = torch.randn(3, 3)

    def second(first: str, then: str) -> torch.Tensor:
        x = values.clone().requires_grad_()
        y = (x.to(first).tanh() @ x.to(first)).to(then).pow(3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.to(first).square().sum(), x)[0]

    torch.testing.assert_close(second("sim:0", "sim:1"), second("cpu", "cpu"))
