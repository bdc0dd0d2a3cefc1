"""A group of agents in one process, on real sockets and threads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.calls.registry import Registry
from telegrad.connection.group_keys import derive_keys
from telegrad.observe.profiling.agent import Profiling
from telegrad.observe.service import Observation
from telegrad.rpc.exposing import default_registry
from telegrad.rref.manager import RRefManager
from telegrad.settings import AgentSettings
from telegrad.transport.base import Transport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.tls import TlsTransport
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.devices import DeviceCounts

TOKEN = b"the token of a group in one process"


@contextmanager
def local_group(
    workers: Sequence[str] = ("a", "b"),
    *,
    transport: str = "unix",
    token: bytes | None = TOKEN,
    settings: AgentSettings | None = None,
    registries: Mapping[str, Registry] | None = None,
    devices: Mapping[str, DeviceCounts] | None = None,
) -> Iterator[dict[str, Agent]]:
    """Start agents, yield them by name, and close them at the end of the block.

    `transport` is ``unix``, ``tcp`` (with TLS, as in a real group), or ``plain tcp``. `registries` are what each worker
    exposes, if the settings say ``accept="registered"``. Default: what this process exposes with `telegrad.expose`.
    `devices` are the accelerators that workers claim to have. Default: those of this process.

    >>> import operator
    >>> with local_group(["a", "b"]) as group:
    ...     group["a"].call("b", operator.add, (1, 2))
    3
    """
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        agents: dict[str, Agent] = {}
        try:
            for number, name in enumerate(workers):
                listening: tuple[Transport, str]
                if transport == "unix":
                    listening = UnixTransport(), f"unix://{directory}/{name}.sock"
                elif transport == "tcp":
                    assert token is not None, "TLS requires a token"
                    listening = TlsTransport(derive_keys(token).preamble), "tcp://127.0.0.1:0"
                else:
                    assert transport == "plain tcp", transport
                    listening = TcpTransport(), "tcp://127.0.0.1:0"
                agents[name] = Agent(
                    name,
                    number,
                    transports=[listening],
                    poller=SocketPoller(),
                    runtime=RealRuntime(),
                    token=token,
                    host="here",
                    main="one process",
                    settings=settings,
                    registry=default_registry if registries is None else registries.get(name),
                    devices=None if devices is None else devices.get(name),
                )
                Autograd(agents[name])
                RRefManager(agents[name])
                Profiling(agents[name])
                Observation(agents[name])
            records = [agent.me for agent in agents.values()]
            for agent in agents.values():
                agent.start(records)
            yield agents
        finally:
            # First all listeners: an agent waits until a worker that it lost does not listen any more.
            for agent in agents.values():
                if not agent.closed:
                    agent.shutdown_protocol.close_listeners()
            for agent in agents.values():
                agent.close()
