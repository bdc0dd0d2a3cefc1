"""Interrupts telegrad with Ctrl-C at every line or bytecode, and checks that it still works afterwards.

python -m telegrad.testing.interruption --transport tcp --opcodes
"""

from __future__ import annotations

import argparse
import operator
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.rpc.signals import WrappedHandlers
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

PATIENCE = 60.0
"""Seconds for a call, and for an interrupt to be raised: far more than a busy machine needs."""

_NOT_TRACED = ("telegrad.testing", "telegrad.rpc.signals", "telegrad.interrupts")
_LARGE = torch.ones(400_000)  # four chunks, or one shared-memory region
_WEIGHT = torch.ones(8, requires_grad=True)
_LARGE_WEIGHT = torch.ones(400_000, requires_grad=True)

Operation = Callable[[], None]


class Place(NamedTuple):
    """A line of telegrad, or one of its bytecodes."""

    module: str
    function: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}, line {self.line}" + (f", {self.offset}" if self.offset >= 0 else "")


def _trace(visit: Callable[[Place], None], opcodes: bool) -> Callable[[FrameType, str, Any], Any]:
    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        if event == ("opcode" if opcodes else "line"):
            offset = frame.f_lasti if opcodes else -1
            visit(Place(frame.f_globals["__name__"], frame.f_code.co_qualname, frame.f_lineno or 0, offset))
        return inside

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("telegrad.") or name.startswith(_NOT_TRACED):
            return None
        if opcodes:
            frame.f_trace_opcodes = True
        return inside

    return enter


def places_of(operation: Operation, *, opcodes: bool = False) -> list[Place]:
    """Return the places that this thread executes in `operation`, each once."""
    passed: dict[Place, None] = {}
    sys.settrace(_trace(lambda place: passed.setdefault(place), opcodes))
    try:
        operation()
    finally:
        sys.settrace(None)
    return list(passed)


def interrupt(operation: Operation, place: Place) -> str:
    """Run `operation`, send a SIGINT when it first reaches `place`, and return when KeyboardInterrupt was raised.

    Any other exception propagates. Call it in the main thread, where Python handles signals.
    """
    sent = False

    def visit(here: Place) -> None:
        nonlocal sent
        if here == place and not sent:
            sent = True
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    when = "during it"
    try:
        sys.settrace(_trace(visit, place.offset >= 0))
        try:
            operation()
        finally:
            sys.settrace(None)
        if not sent:
            return "not passed"
        when = "after it"
        threading.Event().wait(PATIENCE)
    except KeyboardInterrupt:
        return when
    raise AssertionError(f"a SIGINT at {place} was lost")


class Target:
    """Two agents in this process. The main thread makes calls from one, and is interrupted."""

    def __init__(self, caller: Agent, callee: Agent) -> None:
        self.caller, self.callee = caller, callee
        self.operations: dict[str, Operation] = {
            "a small call": self._small,
            "a large call": self._large,
            "an asynchronous call": self._asynchronous,
            "a reference": self._reference,
            "a pass": lambda: self._pass(_WEIGHT),
            "a large pass": lambda: self._pass(_LARGE_WEIGHT),
        }
        for prepare in self.operations.values():  # opens connections and shared memory of every size
            for _ in range(3):
                prepare()
        channel = caller.peers.find(callee.me.name).outgoing
        assert channel is not None
        self._channel, self._link = channel, channel.link

    def _small(self) -> None:
        assert rpc.rpc_sync("b", operator.add, (2, 3), timeout=PATIENCE) == 5

    def _large(self) -> None:
        assert rpc.rpc_sync("b", torch.neg, (_LARGE,), timeout=PATIENCE)[-1] == -1

    def _asynchronous(self) -> None:
        assert rpc.rpc_async("b", operator.add, (2, 3), timeout=PATIENCE).wait() == 5

    def _reference(self) -> None:
        assert rpc.remote("b", torch.ones, (3,), timeout=PATIENCE).to_here(PATIENCE).sum() == 3

    def _pass(self, weight: torch.Tensor) -> None:
        with dist_autograd.context() as context_id:
            result = rpc.rpc_sync("b", torch.mul, (weight, 2.0), timeout=PATIENCE)
            dist_autograd.backward(context_id, [result.sum()], timeout=PATIENCE)
            assert dist_autograd.get_gradients(context_id)[weight][0] == 2

    def check(self) -> None:
        """Check that the next call works, over the same connection."""
        self._small()
        assert self._channel.link is self._link, "the connection was closed"
        assert not dist_autograd._has_valid_context()

    def settled(self) -> bool:
        """Whether all interrupted operations have ended on both sides and released their resources."""
        self._small()  # reads replies that nobody waits for
        return (
            not self._channel.calls
            and self._channel.credits._in_flight == 0
            and not self._channel.abandoned
            and not self.callee.server.unanswered()
            and not any(agent.autograd.contexts.all() for agent in (self.caller, self.callee))
        )

    def settle(self) -> None:
        """Wait until `settled`."""
        runtime = self.caller.runtime
        deadline = runtime.now() + PATIENCE
        while not self.settled():
            assert runtime.now() < deadline, "an interrupted operation did not end"
            runtime.event().wait(runtime.now() + 0.001)


@contextmanager
def target(transport: str, *, shared_memory: bool = True) -> Iterator[Target]:
    """Start a group of two with the signal handlers of `init_rpc`. For use in the main thread."""
    settings = AgentSettings() if shared_memory else AgentSettings(shared_memory=0)
    with local_group(["a", "b"], transport=transport, settings=settings) as agents:
        rpc.set_default_agent(agents["a"])
        handlers = WrappedHandlers()
        try:
            yield Target(agents["a"], agents["b"])
        finally:
            handlers.restore()
            rpc.set_default_agent(None)


def sweep(victim: Target, name: str, *, opcodes: bool = False, places: Sequence[Place] | None = None) -> Counter[str]:
    """Interrupt an operation at each of its places, and check after each that calls still work."""
    operation = victim.operations[name]
    seen: Counter[str] = Counter()
    for place in places_of(operation, opcodes=opcodes) if places is None else places:
        try:
            seen[interrupt(operation, place)] += 1
            victim.check()
        except BaseException as error:
            error.add_note(f"{name} was interrupted at {place}")
            raise
    victim.settle()
    return seen


def main(arguments: list[str] | None = None) -> int:
    """Interrupt every operation at every place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["unix", "tcp"], default="unix")
    parser.add_argument("--opcodes", action="store_true", help="at every bytecode, not only at every line")
    parser.add_argument("--no-shared-memory", action="store_true")
    options = parser.parse_args(arguments)
    with target(options.transport, shared_memory=not options.no_shared_memory) as victim:
        for name in victim.operations:
            counts = sweep(victim, name, opcodes=options.opcodes)
            sys.stdout.write(f"{name}: {sum(counts.values())} places; raised {dict(counts)}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
