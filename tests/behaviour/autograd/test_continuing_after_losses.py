"""A program continues after workers die and calls time out in a context, and its pass is correct.

Each seed is a program: chains of nested calls, in which every worker multiplies by its own weight, with deaths and
short timeouts in between. The pass begins with the results that arrived. Its gradients equal those of one process for
the same chains, or it raises. When the context has ended, no worker holds anything of it.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.support.one_process import assert_equal, gradients_on

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.testing.simulation import Simulation

NAMES = ["a", "b", "c", "d", "e"]
SEEDS = 150
Outcome = tuple[dict[str, torch.Tensor | None], torch.Tensor | None, list[list[str]]]


class Program:
    """The program of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sim = Simulation(seed, NAMES, resumable=self.random.random() < 0.5)
        self.weights = {name: number(place + 2.0) for place, name in enumerate(NAMES)}
        self.x = number(1.5)

    def run(self) -> Outcome | None:
        """Return gradients of live workers and of x, and the chains' routes; None if the pass failed or had none."""
        sim = self.sim

        def main() -> Outcome | None:
            for name in NAMES:
                sim[name].register("multiply", self.multiply_on(name))
            with acting_as(sim["a"]), autograd.context() as context_id:
                outcome = self.work(context_id)
            sim.sleep(120.0)
            left = {name: agent.autograd.contexts.all() for name, agent in sim.agents.items()}
            assert not any(left.values()), left
            return outcome

        with sim:
            outcome: Outcome | None = sim.run(main)
        return outcome

    def multiply_on(self, name: str) -> Any:
        def multiply(way: list[str], x: torch.Tensor) -> Any:
            y = x * self.weights[name]
            return y * self.sim[name].call(way[0], "@multiply", (way[1:], y)) if way else y

        return multiply

    def work(self, context_id: int) -> Outcome | None:
        results, ways = [], []
        for _ in range(self.random.randint(1, 6)):
            if self.random.random() < 0.35:
                self.kill_one()
            way = self.random.choices(NAMES, k=self.random.randint(1, 4))
            timeout = self.random.choice([None, None, 0.0005, 0.01])
            try:
                results.append(self.sim["a"].call(way[0], "@multiply", (way[1:], self.x), timeout=timeout))
                ways.append(way)
            except TelegradError:
                continue  # the program continues
        if self.random.random() < 0.3:
            self.kill_one()
        try:
            autograd.backward(context_id, [torch.stack(results).sum()] if results else [self.x * 0])
        except TelegradError:
            return None
        found = {name: gradients_on(agent, context_id) for name, agent in self.sim.agents.items()}
        return {name: found[name].get(self.weights[name]) for name in found}, found["a"].get(self.x), ways

    def kill_one(self) -> None:
        victim = self.random.choice(NAMES[1:])
        if victim in self.sim.agents:
            self.sim.kill(victim)
            self.sim.sleep(self.random.choice([0.0, 0.001, 60.0]))


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.double, requires_grad=True)


def in_one_process(ways: list[list[str]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weights, x = {name: number(place + 2.0) for place, name in enumerate(NAMES)}, number(1.5)

    def multiply(way: list[str], value: torch.Tensor) -> torch.Tensor:
        y = value * weights[way[0]]
        return y * multiply(way[1:], y) if way[1:] else y

    torch.stack([multiply(way, x) for way in ways]).sum().backward()
    return weights, x


def test_a_pass_after_losses_is_right_or_fails_and_leaves_nothing() -> None:
    compared = 0
    for seed in range(SEEDS):
        outcome = Program(seed).run()
        if outcome is None or not outcome[2]:
            continue
        gradients, of_x, ways = outcome
        weights, x = in_one_process(ways)
        for name, grad in gradients.items():
            assert_equal(grad, weights[name].grad)
        assert_equal(of_x, x.grad)
        compared += 1
    assert compared > SEEDS // 4
