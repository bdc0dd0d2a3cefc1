"""``python -m fuzz.live``: a hostile member of the group attacks a running agent, and another member keeps calling it.

The agent under attack, worker a, is a process of its own. Worker b knows the token and sends hostile frames over real
connections. Worker c calls a all the time. Printed: how long c's calls took, and what a held before, during and after.

    python -m fuzz.live --transport tcp --attack messages --frames 100000
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fuzz.attacks import ATTACKS, Attacker
from fuzz.census import census
from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.rref.manager import RRefManager
from telegrad.settings import AgentSettings
from telegrad.testing.group import TOKEN
from telegrad.transport.base import Transport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.tls import TlsTransport
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime

ROOT = Path(__file__).resolve().parent.parent


def make_agent(name: str, number: int, transport: str, directory: str, settings: AgentSettings | None = None) -> Agent:
    """Return an agent that others may join, not started yet. `transport` is as in `telegrad.testing.group`."""
    listening: tuple[Transport, str]
    if transport == "unix":
        listening = UnixTransport(), f"unix://{directory}/{name}-{time.monotonic_ns()}.sock"
    elif transport == "tcp":
        listening = TlsTransport(derive_keys(TOKEN).preamble), "tcp://127.0.0.1:0"
    else:
        assert transport == "plain tcp", transport
        listening = TcpTransport(), "tcp://127.0.0.1:0"
    agent = Agent(
        name,
        number,
        transports=[listening],
        poller=SocketPoller(),
        runtime=RealRuntime(),
        token=TOKEN,
        host="here",
        main="fuzz",
        settings=settings,
    )
    Autograd(agent)
    RRefManager(agent)
    return agent


def _serve(transport: str, directory: str) -> None:
    """Be worker a until standard input ends."""
    agent = make_agent("a", 0, transport, directory)
    agent.start([agent.me], is_open=True)
    print(msgspec.json.encode(agent.me).decode(), flush=True)
    sys.stdin.read()
    agent.close()


@contextmanager
def victim(transport: str, directory: str) -> Iterator[WorkerRecord]:
    """Start worker a in a process of its own, and yield its record."""
    command = [sys.executable, "-m", "fuzz.live", "--serve", directory, "--transport", transport]
    log = Path(directory) / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker a did not start:\n{log.read_text()}")
        yield msgspec.json.decode(line, type=WorkerRecord)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


class Caller:
    """Worker c: calls worker a again and again, and records how long each call took."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.times: list[float] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caller")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            start = time.monotonic()
            try:
                self.agent.call("a", divmod, (7, 2), timeout=20.0)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                self.errors.append(repr(error))
            self.times.append(time.monotonic() - start)

    def stop(self) -> None:
        """Stop calling."""
        self._stop.set()
        self._thread.join()


def quantiles(times: list[float]) -> str:
    """Return median, 99th percentile and maximum in milliseconds.

    >>> quantiles([0.001, 0.002, 0.003])
    'median 2.0 ms, 99 % 3.0 ms, longest 3.0 ms'
    """
    ordered = [1000 * value for value in sorted(times)] or [0.0]
    middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"median {middle:.1f} ms, 99 % {high:.1f} ms, longest {ordered[-1]:.1f} ms"


def run(transport: str, attack: str, frames: int, seed: int, steps: int = 5) -> None:
    """Attack, and print the figures."""
    with tempfile.TemporaryDirectory(prefix="tg-") as directory, victim(transport, directory) as record:
        agent = make_agent("c", 2, transport, directory)
        agent.start([agent.me, record], is_open=True)
        caller = Caller(agent)
        attacker = Attacker(lambda: make_agent("b", 1, transport, directory), record, (agent.me,), random.Random(seed))
        try:
            print(f"before: {_text(agent.call('a', census))}", flush=True)
            for step in range(steps):
                start, first = time.monotonic(), len(caller.times)
                ATTACKS[attack](attacker, frames // steps)
                seconds = time.monotonic() - start
                print(
                    f"{frames * (step + 1) // steps:,} frames, {frames / steps / seconds:,.0f}/s, "
                    f"{attacker.lives} lives; calls of c: {quantiles(caller.times[first:])}\n"
                    f"        {_text(agent.call('a', census))}",
                    flush=True,
                )
            attacker.close()
            time.sleep(2.0)
            print(f"after:  {_text(agent.call('a', census))}", flush=True)
            print(f"{len(caller.times):,} calls of c, {len(caller.errors)} failed {caller.errors[:3]}")
        finally:
            caller.stop()
            attacker.close()
            agent.close()
        log = (Path(directory) / "log").read_text()
        print(f"the log of a has {log.count(chr(10)):,} lines; tracebacks: {log.count('Traceback'):,}")
        for block in sorted({block[:1500] for block in log.split("\n\n") if "Traceback" in block})[:3]:
            print(block)


def _text(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in held.items() if value)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.live", description=__doc__.split("\n")[0])
    parser.add_argument("--serve", metavar="DIRECTORY", help="be worker a (used by this program itself)")
    parser.add_argument("--transport", choices=("unix", "tcp", "plain tcp"), default="unix")
    parser.add_argument("--attack", choices=sorted(ATTACKS), default="mixed")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.transport, options.serve)
    else:
        run(options.transport, options.attack, options.frames, options.seed)


if __name__ == "__main__":
    main()
