"""Calls of an idempotent function, which are made again if their callee is lost and replaced."""

from __future__ import annotations

import weakref

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.rpc.idempotence import idempotent
from telegrad.testing.universe.plan import Action
from telegrad.testing.universe.world import World

_RETRIES = 2
_LIMIT = 200.0  # seconds: a worker may be replaced late, or never


worlds: weakref.WeakKeyDictionary[Agent, weakref.ref[World]] = weakref.WeakKeyDictionary()
"""The universe of each worker: only functions of modules are made again, which cannot know it otherwise."""


@idempotent(retries=_RETRIES, backoff=0.01)
def run_again(key: str, seconds: float) -> str:
    """Take some time, and say where this ran."""
    agent = default_agent()
    world, name = worlds[agent](), agent.me.name
    assert world is not None
    world.tries(key, name)
    agent.executor.wait(agent.runtime.event(), agent.runtime.now() + seconds)  # others are served meanwhile
    return name


class Retries:
    """Calls one worker several times, one call after the other or all at once."""

    def __init__(self, world: World, worker: str, action: Action) -> None:
        self._world = world
        self._worker = worker
        self._action = action

    def run(self) -> None:
        """Make the calls: each returns where it ran, or an error says why it has not."""
        world, action = self._world, self._action
        to, keys = action.workers[0], [world.new_key("retried call", self._worker) for _ in range(action.count)]
        error: TelegradError | None = None
        if action.flag:
            calls = [rpc.rpc_async(to, run_again, (key, action.seconds), timeout=_LIMIT) for key in keys]
        for number, key in enumerate(keys):
            try:
                if action.flag:
                    where = calls[number].wait()
                else:
                    where = rpc.rpc_sync(to, run_again, (key, action.seconds), timeout=_LIMIT)
            except TelegradError as caught:
                error = error or caught
            else:
                if where != to or not 1 <= world.tried[key] <= 1 + _RETRIES:
                    world.violated(f"{key} of {to} ran on {where}, and {world.tried[key]} times in all")
        if error is not None:
            raise error
