"""What the workers of a universe serve. Every function records that it ran."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.testing.universe.retries import worlds
from telegrad.testing.universe.world import Handle, World


class Copied(str):
    """What arrives of an actor that is copied to another worker: the name of the value."""

    __slots__ = ()


class Actor:
    """A value with state, whose methods run one at a time and in each caller's order."""

    def __init__(self, world: World, key: str, worker: str) -> None:
        self._world = world
        self._worker = worker
        self.key = key
        self._running = False
        self._last: dict[str, int] = {}

    def note(self, key: str, caller: str, number: int, load: bytes) -> int:
        """Check that the calls of `caller` arrive in order, and one at a time."""
        self._world.serves(key, self._worker)
        if self._running:
            self._world.violated(f"two calls of the actor {self.key} ran at the same time")
        if number <= self._last.get(caller, -1):
            self._world.violated(f"{key}, number {number}, ran after number {self._last[caller]} of {caller}")
        self._last[caller] = number
        self._running = True
        if load:
            self._world.sim.sleep(0.001)
        self._running = False
        return number

    def __str__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return Copied, (self.key,)


class Services:
    """The functions that one worker serves."""

    def __init__(self, world: World, agent: Agent) -> None:
        self._world = world
        self._name = agent.me.name
        world.started += 1
        worlds[agent] = weakref.ref(world)  # it refers to the agent
        for name in ("hop", "fail", "later", "make", "keep", "use", "pass_on", "weight", "scaled", "chained"):
            agent.register(name, getattr(self, name))
        agent.peers.members.on_lost(partial(world.lost, agent))

    def hop(self, key: str, route: list[str], load: bytes) -> list[str]:
        """Call on along a route, and return the workers that were reached."""
        world = self._world
        world.serves(key, self._name)
        if not route:
            return [self._name]
        inner = world.new_key("call", self._name)
        reached: list[str] = rpc.rpc_sync(route[0], "@hop", (inner, route[1:], load), timeout=0)
        world.has_returned(inner)
        return [self._name, *reached]

    def fail(self, key: str) -> None:
        """Raise an error that is no fault."""
        self._world.serves(key, self._name)
        raise LookupError(key)

    async def later(self, key: str, route: list[str]) -> list[str]:
        """Call on along a route in a coroutine."""
        world = self._world
        world.serves(key, self._name)
        if not route:
            return [self._name]
        inner = world.new_key("call", self._name)
        reached: list[str] = await rpc.rpc_async(route[0], "@hop", (inner, route[1:], b""), timeout=0)
        world.has_returned(inner)
        return [self._name, *reached]

    def make(self, key: str, is_actor: bool, load: bytes) -> object:
        """Make a value that stays here."""
        self._world.serves(key, self._name)
        return Actor(self._world, key, self._name) if is_actor else f"value of {key}"

    def keep(self, key: str, value: str, handle: Handle) -> None:
        """Keep a reference."""
        self._world.serves(key, self._name)
        self._world.lineage[value].add(self._name)
        self._world.kept[self._name].append((value, handle))

    def use(self, key: str, value: str, handle: Handle) -> str:
        """Use a reference, and drop it."""
        self._world.serves(key, self._name)
        self._world.lineage[value].add(self._name)
        return str(handle.to_here(timeout=0))

    def pass_on(self, key: str, value: str, route: list[str], handle: Handle) -> Handle:
        """Send a reference on along a route, and return the one that comes back."""
        world = self._world
        world.serves(key, self._name)
        world.lineage[value].add(self._name)
        if not route:
            return handle
        inner = world.new_key("pass on", self._name)
        back: Handle = rpc.rpc_sync(route[0], "@pass_on", (inner, value, route[1:], handle), timeout=0)
        world.has_returned(inner)
        return back

    def weight(self, key: str, training: str) -> torch.Tensor:
        """Return the parameter of a training that this worker owns."""
        self._world.serves(key, self._name)
        return self._world.weights[training, self._name]

    def scaled(self, key: str, training: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two results, of which the caller may use only one."""
        self._world.serves(key, self._name)
        weight = self._world.weights[training, self._name]
        return layer(x, weight)

    def chained(self, key: str, context: str, route: list[str], x: torch.Tensor) -> torch.Tensor:
        """Scale a tensor here and along a route."""
        world = self._world
        world.serves(key, self._name)
        y = x * world.weights[context, self._name]
        if not route:
            return y
        inner = world.new_key("link", self._name)
        reached: torch.Tensor = rpc.rpc_sync(route[0], "@chained", (inner, context, route[1:], y), timeout=0)
        world.has_returned(inner)
        return reached


def layer(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `scaled` computes."""
    return x * weight, (x + weight) * weight
