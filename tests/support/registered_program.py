"""A whole program in registered mode, on worker processes in which loading code or pickles is recorded."""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import cloudpickle
import torch
from tests.support import exposed
from tests.support.hostile import Gadget

import telegrad
from telegrad import autograd
from telegrad.errors import BackwardError, FunctionNotFound, PayloadError, RemoteError
from telegrad.optim import DistributedOptimizer, clip_grad_norm_

FORBIDDEN = (
    *((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (pickle, "_Unpickler"), (cloudpickle, "loads")),
    *((cloudpickle, "load"), (torch, "load"), (torch.jit, "load"), (importlib, "import_module")),
    *((importlib, "__import__"), (builtins, "eval"), (builtins, "exec")),
)  # fmt: skip

_ALLOWED = ("torch/", "<frozen", "typing.py", "dataclasses.py", "collections/__init__.py", "linecache.py")
"""Code of torch and Python that imports or compiles code of its own when it is first used."""


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record every use of the forbidden functions, and make it fail unless torch or Python use it for themselves."""
    used: list[str] = []

    def guard(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def forbidden(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if any(part in caller for part in _ALLOWED):
                return real(*args, **kwargs)
            used.append(f"{owner.__name__}.{name} in {caller}")
            raise AssertionError(f"{owner.__name__}.{name} was called\n" + "".join(traceback.format_stack()))

        return mock.patch.object(owner, name, forbidden)

    with ExitStack() as stack:
        for owner, name in FORBIDDEN:
            stack.enter_context(guard(owner, name))
        yield used


def guard_works() -> None:
    """Raise unless the guard is in place."""
    data = pickle.dumps(Gadget())
    for load in (lambda: pickle.loads(data), lambda: pickle.Unpickler(io.BytesIO(data)), lambda: eval("1")):
        try:
            load()
        except AssertionError:
            continue
        raise RuntimeError("the guard does not work")


def run() -> list[str]:
    """Run the program, and return what was used of the forbidden functions."""
    me = telegrad.get_worker_info().name
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()  # imports parts of torch
    with recorded() as used:
        guard_works()
        used.clear()
        telegrad.barrier()
        if me == "worker0":
            program("worker1")
        gathered = telegrad.all_gather({"name": me, "value": torch.ones(2)})
        assert sorted(gathered) == ["worker0", "worker1"]
        telegrad.barrier()
        telegrad.shutdown()
    return used


def program(other: str) -> None:
    """Use everything that registered mode offers."""
    calls(other)
    references(other)
    passes(other)
    optimizers(other)


def calls(other: str) -> None:
    """Make calls that return and that fail."""
    value = [1, 2.5, "x", b"y", None, {"k": (True, 1 << 70)}, {3}, slice(1, 2), torch.float32, 1j]
    assert telegrad.rpc_sync(other, "echo", (value,)) == value
    assert telegrad.rpc_async(other, exposed.scale, (torch.ones(3),)).wait().tolist() == [2.0, 2.0, 2.0]
    large = torch.arange(1 << 20, dtype=torch.float32)
    assert torch.equal(telegrad.rpc_sync(other, "echo", (large,)), large)
    for arguments, kind in ((("own class",), RemoteError), (("x",), ValueError)):
        try:
            telegrad.rpc_sync(other, "fail", arguments)
        except kind:
            continue
        raise AssertionError(f"{kind} was not raised")
    refused: list[tuple[Any, type[Exception]]] = [
        ("os:system", FunctionNotFound),
        (exposed.not_exposed, FunctionNotFound),
        (lambda: 1, PayloadError),
    ]
    for function, kind in refused:
        try:
            telegrad.rpc_sync(other, function, ("true",))
        except kind:
            continue
        raise AssertionError(f"{function} was called")


def references(other: str) -> None:
    """Use RRefs and actors."""
    vault = telegrad.remote(other, exposed.Vault, ([1, 2],), ordered=True)
    for number in range(5):
        vault.rpc_async().store(number)
    assert vault.rpc_sync().open() == 4
    with suppress(PayloadError):
        vault.to_here()
        raise AssertionError("an object was sent")
    value = telegrad.remote(other, "echo", ({"x": torch.ones(2)},))
    assert value.to_here()["x"].tolist() == [1.0, 1.0]
    failed = telegrad.remote(other, "fail", ("own class",))
    with suppress(RemoteError):
        failed.to_here()
        raise AssertionError("nothing was raised")
    weight = telegrad.remote(other, "echo", (torch.ones(2, requires_grad=True),))
    telegrad.remote(other, "scale", (weight.to_here(),))


def passes(other: str) -> None:
    """Run backward passes: plain, with create_graph, with unused outputs, and one that fails."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        y = telegrad.rpc_sync(other, exposed.scale, (x,)) ** 3
        (gradient,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
        autograd.backward(context_id, [gradient.sum()])
        assert torch.allclose(context_id.gradients[x], 48 * x.detach())
        assert type(telegrad.rpc_sync(other, "echo", (context_id,))) is int
    with autograd.context() as context_id:
        (unused, _), _ = telegrad.rpc_sync(other, "echo", (x * 1, x * 2))
        autograd.backward(context_id, [telegrad.rpc_sync(other, "scale", (unused,)).sum()], timeout=60)
        with suppress(BackwardError):  # the graph was freed
            autograd.backward(context_id, [unused.sum()])
            raise AssertionError("the pass has not failed")


def optimizers(other: str) -> None:
    """Train a remote module with optimizers, clipping and checkpoints."""
    net = telegrad.nn.RemoteModule(other, "Net", (2,))
    parameters = net.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)
    stepping = DistributedOptimizer(torch.optim.SGD, parameters, lr=torch.tensor(0.1), step_in_backward=True)
    losses = []
    for _ in range(3):
        with autograd.context() as context_id:
            loss = net(torch.ones(4, 2)).square().mean()
            losses.append(loss.item())
            context_id.backward(loss)
            clip_grad_norm_(context_id, parameters, 1.0)
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)
        stepping.param_groups[0]["lr"] = torch.tensor(0.05)
        optimizer.param_groups[0]["lr"] *= 0.5
    assert losses[-1] < losses[0]
    optimizer.load_state_dict(optimizer.state_dict())
    net.load_state_dict(net.state_dict())
    net.train()
