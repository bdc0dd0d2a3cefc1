"""Whatever happens to calls, connections and workers, everything that counts towards limits is given back."""

from __future__ import annotations

import gc
import logging
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Faults, Simulation

NAMES = ("a", "b", "c", "d")
LIMITS = PeerLimits(
    calls_per_second=200,
    burst=20,
    calls=6,
    running=2,
    bytes_held=600_000,
    message_size=300_000,
    contexts=3,
    calls_per_context=8,
    references=6,
)
SETTINGS = AgentSettings(rpc_timeout=5.0, peer_limits=LIMITS)


class Worker:
    """Uses the other workers at random, beyond all limits."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.random = sim.random
        self.others = [other for other in NAMES if other != name]
        self.refused = 0

    def run(self) -> None:
        for _ in range(12):
            try:
                self.step()
            except (TelegradError, RuntimeError) as error:
                self.refused += "peer_limits" in str(error)
        gc.collect()

    def step(self) -> None:
        to = self.random.choice(self.others)
        match self.random.randrange(6):
            case 0:
                futures = [rpc.rpc_async(to, operator.neg, (number,)) for number in range(self.random.randrange(12))]
                for future in futures:
                    future.wait()
            case 1:
                size = self.random.choice((10, 20_000, 60_000, 100_000))
                futures = [rpc.rpc_async(to, torch.sum, (torch.ones(size),)) for _ in range(3)]
                for future in futures:
                    future.wait()
            case 2:
                self.train(to)
            case 3:
                rrefs = [rpc.remote(to, torch.ones, (self.random.choice((1, 1000)),)) for _ in range(4)]
                rpc.rpc_sync(self.random.choice(self.others), len, (rrefs,))
                for rref in rrefs:
                    rref.to_here()
            case 4:
                future = rpc.rpc_async(to, sleep, (self.random.uniform(0.0, 2.0),))
                if self.random.random() < 0.5:
                    future.cancel()
                future.wait()
            case _:
                rpc.rpc_sync(to, chain, ([*self.random.sample(NAMES, 3)],), timeout=self.random.choice((0.01, 5.0)))

    def train(self, to: str) -> None:
        x = torch.ones(self.random.choice((3, 1000)), requires_grad=True)
        with autograd.context() as context:
            loss = torch.zeros(())
            for _ in range(self.random.randrange(1, 10)):
                loss = loss + rpc.rpc_sync(to, torch.sum, (x * 2,))
            autograd.backward(context, [loss])


def sleep(seconds: float) -> None:
    agent = default_agent()
    agent.executor.wait(agent.runtime.event(), agent.runtime.now() + seconds)


def chain(names: list[str]) -> int:
    """Call on through workers."""
    if not names:
        return 0
    return 1 + default_agent().call(names[0], chain, (names[1:],))  # type: ignore[no-any-return]


def left_over(agent: Agent) -> dict[str, Any]:
    """Return what still counts towards limits on a worker."""
    left: dict[str, Any] = {
        f"calls and bytes of {peer}": usage for peer, usage in agent.local.accounts.usage().items() if usage != (0, 0)
    }
    context = agent.references.context
    for worker, name in enumerate(NAMES):
        opened = agent.autograd.contexts.opened_by(worker)
        with context.lock:
            references = context.references_of(worker)
        if opened or references:
            left[f"contexts and references of {name}"] = (opened, references)
    for peer in agent.peers.all():
        account = agent.local.accounts.of(peer.record.name)
        if account is not None and (account.tasks.running or account.tasks.queued or account.tasks.waiting):
            left[f"tasks of {peer.record.name}"] = account.tasks.running, account.tasks.queued
    return left


def play(seed: int, *, resumable: bool, kill: bool) -> int:
    faults = Faults(drop=0.01, duplicate=0.02, cut=0.005) if resumable else Faults()
    with Simulation(seed, NAMES, faults=faults, resumable=resumable, settings=SETTINGS) as sim:
        workers = {name: Worker(sim, name) for name in NAMES}

        def main() -> None:
            threads = {name: sim.spawn(name, workers[name].run) for name in NAMES}
            if kill:
                sim.sleep(sim.random.uniform(0.0, 1.0))
                sim.kill("d")
                sim.restart("d")
            for name, thread in threads.items():
                if name != "d" or not kill:
                    thread.ended.wait(None)
            sim.network.faults = Faults()
            for _ in range(20):
                gc.collect()
                sim.sleep(5.0)
                left = {name: left_over(agent) for name, agent in sim.agents.items()}
                if not any(left.values()):
                    return
            raise AssertionError(f"seed {seed}: still counted: {left}")

        sim.run(main)
        return sum(worker.refused for worker in workers.values())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep pytest from collecting log records: their exceptions keep frames alive, and those keep references alive."""
    logger = logging.getLogger("telegrad")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("resumable", [False, True])
def test_everything_is_given_back(resumable: bool, kill: bool) -> None:
    refused = sum(play(seed, resumable=resumable, kill=kill) for seed in range(8))
    assert refused > 20
