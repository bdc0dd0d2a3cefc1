"""Compares distributed backward passes: torch.distributed.autograd and telegrad.autograd, in turn.

The overhead of a pass that stays on one worker is compared with plain ``loss.backward()`` in the same process.

    python benchmarks/backward.py [--transport unix|tcp] [--cases hop1 ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import command
import torch
from measure import time_inside
from pairs import (
    CALLEE,
    CALLER,
    TELEGRAD,
    TORCH,
    Action,
    BenchmarkError,
    Case,
    System,
    Workers,
    at_most,
    join_telegrad,
    join_torch,
)
from torch.distributed import autograd as torch_autograd
from torch.distributed import rpc as torch_rpc

from telegrad import autograd as telegrad_autograd

SIZE = 64
"""Rows and columns of every small matrix."""
MOST_MATMULS = 64
CALLS = 8
NODES, PARAMETERS = 3000, 50
BIG = 16 << 20 >> 2
"""Floats in 16 MB."""
ALONE = "alone"

Setup = Callable[[], AbstractContextManager[Action]]
"""Sets up one iteration, yields what is timed, and cleans up."""
Function = Callable[..., torch.Tensor]


# -- functions on the callee ----------------------------------------------------------------------------------


@cache
def weights() -> list[torch.Tensor]:
    """Return the callee's leaves, created on first use, the same on every worker."""
    # Orthogonal, so a long chain neither overflows nor decays into denormal numbers, which are slow.
    draw = torch.Generator().manual_seed(1)
    return [
        torch.linalg.qr(torch.randn(SIZE, SIZE, generator=draw)).Q.contiguous().requires_grad_()
        for _ in range(MOST_MATMULS)
    ]


def multiply(x: torch.Tensor, matmuls: int) -> torch.Tensor:
    """Multiply by `matmuls` different leaves."""
    for weight in weights()[:matmuls]:
        x = x @ weight
    return x


def double(x: torch.Tensor) -> torch.Tensor:
    """Do almost nothing."""
    return x * 2


def weight_gradients(system: str, context_id: int) -> list[torch.Tensor | None]:
    """Return the gradients of this worker's leaves from the context."""
    found = (torch_autograd if system == TORCH else telegrad_autograd).get_gradients(context_id)
    return [found.get(weight) for weight in weights()]


# -- one pass over two workers --------------------------------------------------------------------------------


class Program:
    """A chain of calls of `function` on the callee, and a loss at the end."""

    def __init__(self, rpc: Any, x: torch.Tensor, function: Function, rest: tuple[Any, ...] = (), calls: int = 1):
        self.autograd: Any = torch_autograd if rpc is torch_rpc else telegrad_autograd
        self._system = TORCH if rpc is torch_rpc else TELEGRAD
        self._rpc = rpc
        self._x = x.requires_grad_()
        # The gradient of a plain sum is an expanded scalar, and torch would send only the scalar. Real losses differ.
        self._slope = torch.rand(x.numel())
        self._function, self._rest, self._calls = function, rest, calls

    def forward(self) -> torch.Tensor:
        """Return the loss of the callee's result."""
        return self._forward(lambda *arguments: self._rpc.rpc_sync(CALLEE, self._function, arguments))

    def _forward(self, call: Function) -> torch.Tensor:
        result = self._x
        for _ in range(self._calls):
            result = call(result, *self._rest)
        return torch.dot(result.flatten(), self._slope)

    def backward(self, context_id: int, loss: torch.Tensor) -> None:
        """Run the pass through both workers."""
        self.autograd.backward(context_id, [loss])

    def check(self) -> None:
        """Raise if a pass gives other gradients, on either worker, than in one process."""
        leaves = [self._x, *weights()]
        expected = torch.autograd.grad(self._forward(self._function), leaves, allow_unused=True)
        with self.autograd.context() as context_id:
            self.backward(context_id, self.forward())
            mine = self.autograd.get_gradients(context_id).get(self._x)
            theirs = self._rpc.rpc_sync(CALLEE, weight_gradients, (self._system, int(context_id)))
        _check([mine, *theirs], expected)


def _check(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one is None) != (other is None) or (
            one is not None and other is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        ):
            raise BenchmarkError(f"a pass gave a wrong gradient for leaf {number}: its time means nothing")


def _only_backward(program: Program) -> Setup:
    @contextlib.contextmanager
    def setup() -> Iterator[Action]:
        with program.autograd.context() as context_id:
            loss = program.forward()
            yield lambda: program.backward(context_id, loss)

    return setup


def _forward_and_backward(program: Program) -> Setup:
    @contextlib.contextmanager
    def setup() -> Iterator[Action]:
        with program.autograd.context() as context_id:
            yield lambda: program.backward(context_id, program.forward())

    return setup


def _everything(program: Program) -> Setup:
    def action() -> None:
        with program.autograd.context() as context_id:
            program.backward(context_id, program.forward())

    return lambda: contextlib.nullcontext(action)


def _prepare(part: Callable[[Program], Setup], make: Callable[[Any], Program]) -> Callable[[Any], Setup]:
    def prepare(rpc: Any) -> Setup:
        program = make(rpc)
        program.check()
        return part(program)

    return prepare


def _matmuls(count: int, calls: int = 1) -> Callable[[Any], Program]:
    return lambda rpc: Program(rpc, torch.rand(SIZE, SIZE), multiply, (count,), calls)


def _big(rpc: Any) -> Program:
    return Program(rpc, torch.rand(BIG), double)


# -- one worker alone -----------------------------------------------------------------------------------------


class Graph:
    """A residual network of small operations, with `NODES` nodes and `PARAMETERS` leaves."""

    def __init__(self) -> None:
        self.parameters = [(torch.randn(SIZE, SIZE) / SIZE**0.5).requires_grad_() for _ in range(PARAMETERS)]
        self._x = torch.rand(SIZE, SIZE)
        found = len(_nodes(self.forward()))
        if found != NODES:
            raise BenchmarkError(f"the graph has {found} nodes, and should have {NODES}")

    def forward(self) -> torch.Tensor:
        """Compute the loss. Each block adds three nodes, the final sum one."""
        blocks: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
            lambda h, p: h + torch.tanh(h @ p),
            lambda h, p: h - torch.sin(h * p),
            lambda h, p: h + torch.sigmoid(h - p),
        )
        h = self._x
        count = (NODES - PARAMETERS - 1) // 3
        for _, block, parameter in zip(range(count), itertools.cycle(blocks), itertools.cycle(self.parameters)):
            h = block(h, parameter)
        return h.sum()

    def plain(self) -> Iterator[Action]:
        """Set up torch's backward."""
        for parameter in self.parameters:
            parameter.grad = None
        yield self.forward().backward

    def in_context(self) -> Iterator[Action]:
        """Set up telegrad's backward, which accumulates gradients in the context."""
        with telegrad_autograd.context() as context_id:
            loss = self.forward()
            yield lambda: telegrad_autograd.backward(context_id, [loss])

    def check(self) -> None:
        """Raise if the gradients of the two differ."""
        expected = torch.autograd.grad(self.forward(), self.parameters)
        with telegrad_autograd.context() as context_id:
            telegrad_autograd.backward(context_id, [self.forward()])
            found = telegrad_autograd.get_gradients(context_id)
        _check([found.get(parameter) for parameter in self.parameters], expected)


def _nodes(loss: torch.Tensor) -> set[Any]:
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
    return seen


@cache
def _graph() -> Graph:
    """Return one graph for both systems, which run in the same process."""
    graph = Graph()
    graph.check()
    return graph


# -- the cases ------------------------------------------------------------------------------------------------

CASES = {
    "hop1": Case(
        "one call, 1 matmul: backward only", 200, _prepare(_only_backward, _matmuls(1)), time_inside, at_most(0.3)
    ),
    "hop64": Case(
        f"one call, {MOST_MATMULS} matmuls: backward only",
        40,
        _prepare(_only_backward, _matmuls(MOST_MATMULS)),
        time_inside,
        at_most(0.6),
    ),
    "context": Case(
        "one call, 1 matmul: context enter + forward + backward + exit",
        100,
        _prepare(_everything, _matmuls(1)),
        time_inside,
        at_most(0.25),
    ),
    "chain8": Case(
        f"{CALLS} calls in a chain, 1 matmul each: forward + backward",
        30,
        _prepare(_forward_and_backward, _matmuls(1, CALLS)),
        time_inside,
        at_most(0.3),
    ),
    "16MB": Case(
        "one call with 16 MB: forward + backward",
        6,
        _prepare(_forward_and_backward, _big),
        time_inside,
        at_most(0.4),
    ),
    "local": Case(
        f"{NODES:,} nodes on one worker: backward only (torch: plain loss.backward())",
        10,
        lambda rpc: contextlib.contextmanager(_graph().in_context),
        time_inside,
        at_most(1.2, tcp=1.2),
    ),
}
PLAIN = {"plain": Case("", 10, lambda rpc: contextlib.contextmanager(_graph().plain), time_inside)}
SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad), ALONE: System(join_telegrad, (CALLER,))}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return torch and telegrad, or for a single worker plain torch in the same process."""
    if case == "local":
        return {TORCH: (ready[ALONE], "plain"), TELEGRAD: (ready[ALONE], case)}
    return {system: (ready[system], case) for system in (TORCH, TELEGRAD)}


BENCHMARK = command.Benchmark(
    "backward.py",
    "Compare backward passes of telegrad with those of torch.distributed.autograd, and with plain ones.",
    CASES,
    SYSTEMS,
    turns,
    PLAIN,
)


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import backward

    sys.exit(command.run(backward.BENCHMARK))
