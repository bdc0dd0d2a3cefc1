"""A group in this process that the commands of `telegrad` find, and that works while they look."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import DistAutogradContext, current
from telegrad.observe.local_socket import listen
from telegrad.testing.group import local_group

WEIGHT = torch.full((3,), 2.0, requires_grad=True)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * WEIGHT).tanh()


def here() -> list[str]:
    """Return the options with which a command finds the group of this test, and no other on this machine."""
    return ["--runtime-dir", os.environ["TELEGRAD_RUNTIME_DIR"]]


@contextmanager
def observed_group(workers: Sequence[str] = ("a", "b")) -> Iterator[dict[str, Agent]]:
    """Yield a group whose sockets are in the runtime directory of the test, which is that of the group meanwhile."""
    before = os.environ["TELEGRAD_RUNTIME_DIR"]
    with local_group(workers) as group:
        for agent in group.values():
            listen(agent)
        address = group[workers[0]].me.addresses[0]
        os.environ["TELEGRAD_RUNTIME_DIR"] = os.path.dirname(address.removeprefix("unix://"))
        try:
            yield group
        finally:
            os.environ["TELEGRAD_RUNTIME_DIR"] = before


@contextmanager
def open_context(agent: Agent) -> Iterator[DistAutogradContext]:
    """Make a context, and be in it."""
    context = agent.autograd.contexts.new()
    token = current.set(context)
    try:
        yield context
    finally:
        current.reset(token)
        agent.autograd.contexts.release(context)


@contextmanager
def training(agent: Agent, other: str) -> Iterator[None]:
    """Train in the background: a call and a backward pass, again and again."""
    stopped, begun = threading.Event(), threading.Event()

    def train() -> None:
        while not stopped.is_set():
            with open_context(agent) as context:
                loss = agent.call(other, scaled, (torch.ones(3, requires_grad=True),)).sum()
                agent.autograd.backward(context.id, [loss])
            begun.set()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        stopped.set()
        thread.join(30)
