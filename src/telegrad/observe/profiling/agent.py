"""The part of an agent that profiles: for its own calls, and for those of others."""

from __future__ import annotations

from functools import partial

from telegrad.agent.agent import Agent
from telegrad.observe.profiling import clocks, sessions
from telegrad.observe.profiling.extension import CallProfiling, ServeProfiling, name_of
from telegrad.observe.profiling.group import GroupProfiling
from telegrad.observe.profiling.passes import PassProfiling
from telegrad.observe.profiling.torch_watcher import watch_torch


class Profiling:
    """Remote profiling of one agent, made before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        watch_torch()
        clocks.register(agent)
        self.name_of = partial(name_of, agent)
        """Returns the name of a worker from its id."""
        self.calls = CallProfiling(agent.me, agent.pipeline, self.name_of)
        self.serving = ServeProfiling(agent.me.id, agent.pipeline)
        self.passes = agent.autograd.messaging.pass_profiler = PassProfiling(agent, self.name_of)
        self.group = GroupProfiling(agent)
        # In registered mode others may not see what a worker does, unless its program allows it.
        self.allow(agent.registry is None)
        agent.profiling = self
        sessions.sessions.attach(self)

    def allow(self, is_allowed: bool) -> None:
        """Let other workers see what this one does, or no longer."""
        self.serving.allowed = self.passes.allowed = self.group.allowed = is_allowed

    def switch(self, is_on: bool) -> None:
        """Have calls and passes of this agent profiled, or no longer. Called when somebody in the process profiles."""
        self.calls.switch(is_on)
        self.passes.switch(is_on)
