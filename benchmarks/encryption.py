"""What TLS costs: calls over TCP with TLS, without, and torch's calls, which are never encrypted, in turn in one run.

The two kinds of telegrad's calls share their processes: each worker has two agents, one with TLS. Between other
processes the same call can take twice as long, because of where their memory is, which hides a difference of 30 %. For
the same reason each worker stays on one core.

python benchmarks/encryption.py [--cases noop echo ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import command
from pairs import TELEGRAD, TORCH, Action, Case, System, Workers, WorkerSpec, join_torch
from torch.distributed import FileStore

import calls
from telegrad.agent.agent import Agent
from telegrad.bootstrap import start_agent
from telegrad.connection.worker_record import FoundGroup
from telegrad.rendezvous import assemble
from telegrad.rpc import Options
from telegrad.rpc.api import acting_as, rpc_sync

WITHOUT = "no-tls"
MOST = 1.3
"""The largest allowed ratio of a small call with TLS to one without."""
TARGETS: dict[str, Mapping[str, float]] = {"tcp": {WITHOUT: MOST}}
CASES = {
    "noop": dataclasses.replace(calls.CASES["noop"], targets=TARGETS),
    "echo": dataclasses.replace(calls.CASES["echo"], targets=TARGETS),
    "1MB": dataclasses.replace(calls.CASES["1MB"], targets={}),
    "16MB": dataclasses.replace(calls.CASES["16MB"], targets={}),
}
INIT_TIMEOUT = 60.0


class TwoAgents:
    """A worker of two groups, with TLS and without. `rpc_sync` calls in the one with TLS."""

    def __init__(self, spec: WorkerSpec) -> None:
        logging.getLogger("telegrad").setLevel(logging.ERROR)  # it warns that TLS is off, as it should
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[spec.names.index(spec.name) % len(cores)]})
        self._agents = {system: _join(spec, system) for system in (TELEGRAD, WITHOUT)}

    def calling(self, system: str) -> Calls:
        """Return what makes calls with TLS or without."""
        return Calls(self._agents[system])

    def shutdown(self) -> None:
        """Leave both groups."""
        for agent in self._agents.values():
            agent.shutdown()


class Calls:
    """As much of telegrad.rpc as the cases need, for one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def rpc_sync(self, *args: Any) -> Any:
        """Call another worker."""
        with acting_as(self._agent):
            return rpc_sync(*args)


def _join(spec: WorkerSpec, system: str) -> Agent:
    options = Options(transports=(spec.transport,), token=spec.token, tls=system == TELEGRAD)
    size, rank = len(spec.names), spec.names.index(spec.name)
    store = FileStore(f"{spec.directory}/{system}", size)
    return start_agent(
        spec.name,
        rank,
        lambda me, keys, listen, probe: FoundGroup(assemble(store, me, keys, size, INIT_TIMEOUT, listen)),
        options,
        ("127.0.0.1", 0),
    )


def _with(case: Case, system: str) -> Case:
    """Return the case for workers with two agents."""

    def prepare(joined: TwoAgents) -> Action:
        action: Action = case.prepare(joined.calling(system))
        return action

    return dataclasses.replace(case, prepare=prepare)


HIDDEN = {f"{name}, {system}": _with(case, system) for name, case in CASES.items() for system in (TELEGRAD, WITHOUT)}
JOIN: Callable[[WorkerSpec], Any] = TwoAgents
SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(JOIN)}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return torch, telegrad, and telegrad without TLS."""
    ours = ready[TELEGRAD]
    return {
        TORCH: (ready[TORCH], case),
        TELEGRAD: (ours, f"{case}, {TELEGRAD}"),
        WITHOUT: (ours, f"{case}, {WITHOUT}"),
    }


BENCHMARK = command.Benchmark(
    "encryption.py", "Compare calls over TCP with TLS and without, and with torch.", CASES, SYSTEMS, turns, HIDDEN
)


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import encryption

    sys.exit(command.run(encryption.BENCHMARK, ["--transport", "tcp", *sys.argv[1:]]))
