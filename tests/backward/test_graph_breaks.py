"""torch.compile breaks the graph at telegrad's functions, and gives the results and gradients of eager code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.optim import DistributedOptimizer
from telegrad.testing.group import local_group

BACKENDS = ["eager", "aot_eager"]

# Dynamo reads .grad of each tensor, and its filter hides the warning only outside of pytest.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        yield
    torch.compiler.reset()


def with_sync(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = rpc.rpc_sync("b", torch.sin, (x * 2,)) * x
    return y


def with_async(x: torch.Tensor) -> torch.Tensor:
    future = rpc.rpc_async("b", torch.sin, (x * 2,))
    y: torch.Tensor = x.cos() + future.wait()
    return y


def with_reference(x: torch.Tensor) -> torch.Tensor:
    kept = rpc.remote("b", torch.sin, (x * 2,))
    y: torch.Tensor = kept.rpc_sync().mul(3) + kept.to_here() * x
    return y


def with_branch(x: torch.Tensor) -> torch.Tensor:
    total = x
    for number in range(3):
        if number % 2:
            total = total + rpc.rpc_sync("b", torch.mul, (total, x))
    return total


FUNCTIONS = [with_sync, with_async, with_reference, with_branch]


def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0.1, 1, 5, dtype=torch.double, requires_grad=True)
    with autograd.context() as context:
        y = function(x)
        context.backward(y.square().sum())
        return y.detach(), context.gradients[x]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_call_in_a_compiled_function_is_a_graph_break(function: Callable[..., Any], backend: str) -> None:
    want = gradient(function)
    compiled = torch.compile(function, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(gradient(compiled), want)


FULL_GRAPHS = """
import sys
sys.path.append("tests")
import torch
import tests.backward.test_graph_breaks as test_graph_breaks
from telegrad.nn import RemoteModule
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
    for function in [*test_graph_breaks.FUNCTIONS, torch.nn.Sequential(RemoteModule("b", torch.nn.Sigmoid))]:
        try:
            test_graph_breaks.gradient(torch.compile(function, backend="eager", fullgraph=True))
        except torch._dynamo.exc.Unsupported as error:
            assert "telegrad talks to other workers, which cannot be part of a compiled graph" in str(error), error
            print("refused")
"""


def test_a_full_graph_is_an_error_that_says_why() -> None:
    # In another process: after such an error torch keeps evaluating all frames of the process itself, and holds one
    # more reference to their arguments, which other tests count.
    done = run_loaded(
        [sys.executable, "-c", FULL_GRAPHS],
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 5


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def use(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_step_can_be_compiled(backend: str) -> None:
    def step(weight: Any, optimizer: DistributedOptimizer, x: torch.Tensor) -> torch.Tensor:
        with autograd.context() as context:
            loss = (weight.rpc_sync().mul(x) * 2).sum()
            context.backward(loss)
            optimizer.step(context)
        return loss.detach() + 1

    results = []
    for run in (step, torch.compile(step, backend=backend)):
        weight = rpc.remote("b", parameter)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        losses = [run(weight, optimizer, torch.arange(3.0)) for _ in range(3)]
        results.append((losses, weight.to_here().detach()))
    torch.testing.assert_close(results[1], results[0])


def test_telegrad_does_not_load_the_compiler() -> None:
    code = "import sys, telegrad.nn, telegrad.optim, telegrad.autograd; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
