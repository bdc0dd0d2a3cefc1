"""The default agent of this process, on which the functions of `telegrad.rpc` and `telegrad.autograd` act."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import current_agent, current_served
from telegrad.errors import NotInitialized

_lock = threading.Lock()  # protects _default
_default: Agent | None = None


def default_agent() -> Agent:
    """Return the agent that runs the current function, or else the agent of this process."""
    served = current_served.get()
    agent = served.agent if served is not None else current_agent.get() or _default
    if agent is None:
        raise NotInitialized("this process has no agent: call telegrad.init_rpc() first")
    return agent


def process_agent() -> Agent | None:
    """Return the agent that `init_rpc` created in this process, if any."""
    return _default


def set_default_agent(agent: Agent | None) -> None:
    """Make `agent` the default agent of this process."""
    global _default
    with _lock:
        _default = agent


@contextlib.contextmanager
def acting_as(agent: Agent) -> Iterator[None]:
    """Make `agent` the default agent inside the block. For processes with several agents."""
    token = current_agent.set(agent)
    try:
        yield
    finally:
        current_agent.reset(token)


def unset_default_agent(agent: Agent) -> None:
    """Leave the process without a default agent if it is `agent`."""
    global _default
    with _lock:
        if _default is agent:
            _default = None


keep_uncompiled(__name__)
