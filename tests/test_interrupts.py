"""After an interrupt at any point the call is over, and the agent works as before."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from tests.support.paths import ROOT
from tests.support.signals import interrupted, press, run_as, wrapped_sigint

from telegrad import autograd as dist_autograd
from telegrad import interrupts, rpc
from telegrad.agent.agent import Agent
from telegrad.backward.effects import start_island
from telegrad.connection.channel import Channel
from telegrad.errors import CallCancelled, WorkerLost
from telegrad.interrupts import interruptible, is_protected, shielded
from telegrad.protocol.limits import SessionSettings
from telegrad.rpc.signals import WrappedHandlers
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.interruption import PATIENCE, interrupt, places_of, sweep, target
from telegrad.transport.socket_link import SocketLink

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are handled in the main thread"
)

_may_end = threading.Event()


def never() -> bool:
    """Run on the callee until the test lets it end."""
    return _may_end.wait(PATIENCE)


@pytest.fixture(autouse=True)
def functions_end() -> Iterator[None]:
    _may_end.clear()
    yield
    _may_end.set()


@pytest.fixture
def handled() -> Iterator[WrappedHandlers]:
    with wrapped_sigint() as installation:
        yield installation


# -- the rules ----------------------------------------------------------------------------------------------


def frames_of(body: str, module: str, **names: Any) -> bool:
    """Return whether a signal would be deferred in `look`, which `body` calls in `module`."""
    results: list[bool] = []
    run_as(module, body, look=lambda: results.append(is_protected(sys._getframe())), **names)()
    return results[0]


def test_the_innermost_function_with_a_rule_decides() -> None:
    plain = "def run():\n    look()\n"
    assert not frames_of(plain, "users.module")
    assert not frames_of(plain, "telegrad.launch.local")
    assert frames_of(plain, "telegrad.connection.channel")
    users = run_as("users.module", "def run(then):\n    then()\n")
    assert frames_of("def run():\n    users(look)\n", "telegrad.connection.channel", users=users)
    waits = interruptible(run_as("telegrad.waiting", "def run(then):\n    then()\n"))
    assert not frames_of("def run():\n    waits(look)\n", "telegrad.connection.channel", waits=waits)
    protected = run_as("telegrad.wire.frames", "def run(then):\n    then()\n")
    assert frames_of(
        "def run():\n    waits(lambda: protected(look))\n",
        "telegrad.connection.channel",
        waits=waits,
        protected=protected,
    )
    cleans_up = shielded(run_as("telegrad.calls.client", "def run(then):\n    then()\n"))
    assert frames_of(
        "def run():\n    cleans_up(lambda: waits(look))\n",
        "telegrad.connection.channel",
        waits=waits,
        cleans_up=cleans_up,
    )


def threads_except_workers() -> list[str]:
    """Return the names of other threads: idle worker threads of the executor end only after a while."""
    return sorted(thread.name for thread in threading.enumerate() if "runner" not in thread.name)


# -- at every line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "shared_memory", "names"),
    [
        ("unix", True, ("a small call", "a large call", "a reference", "a pass")),
        ("unix", False, ("a large call",)),
        ("tcp", True, ("a small call", "a large call", "a pass")),
    ],
)
def test_after_an_interrupt_at_any_line_the_next_call_works(
    transport: str, shared_memory: bool, names: tuple[str, ...]
) -> None:
    with target(transport, shared_memory=shared_memory) as there:
        threads = threads_except_workers()
        for name in names:
            counts = sweep(there, name)
            assert counts["during it"] + counts["after it"] > 100
        assert threads_except_workers() == threads


@contextmanager
def caller_in(transport: str) -> Iterator[Agent]:
    """Return a worker without a connection."""
    with local_group(["a", "b"], transport=transport) as agents:
        installation = WrappedHandlers()
        try:
            yield agents["a"]
        finally:
            installation.restore()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_first_call_can_be_interrupted_at_any_point_while_it_connects(transport: str) -> None:
    def call(caller: Agent) -> None:
        assert caller.call("b", operator.add, (2, 3)) == 5

    with caller_in(transport) as caller:
        places = places_of(lambda: call(caller))
    connecting = [place for place in places if place.module.endswith((".peers", ".handshake", ".unix", ".tcp"))]
    assert len(connecting) > 50
    for place in connecting[::6]:
        with caller_in(transport) as caller:
            interrupt(lambda: call(caller), place)
            call(caller)


# -- waits ----------------------------------------------------------------------------------------------------


def press_when(condition: Callable[[], bool]) -> None:
    """Send SIGINT from another thread when `condition` holds."""

    def run() -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition() and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


WAITS: dict[str, Callable[[], object]] = {
    "rpc_sync": lambda: rpc.rpc_sync("b", never),
    "a future": lambda: rpc.rpc_async("b", never).wait(),
    "a future with a timeout": lambda: rpc.rpc_async("b", never).wait(PATIENCE),
    "to_here": lambda: rpc.remote("b", never).to_here(),
    "a barrier": rpc.barrier,
    "a future without a call": lambda: rpc.Future().wait(PATIENCE),
}
LOCAL = ("a future without a call",)
"""Waits that do not involve a worker."""


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_can_be_interrupted_and_the_next_call_works(name: str) -> None:
    with target("unix") as there:
        begun = threading.Event()
        agents = (there.caller, there.callee)
        press_when(lambda: begun.is_set() and (name in LOCAL or any(agent.server.unanswered() for agent in agents)))
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: (begun.set(), WAITS[name]()))
        _may_end.set()
        assert rpc.rpc_sync("b", operator.add, (2, 3)) == 5


def test_a_thread_that_waits_while_another_reads_can_be_interrupted() -> None:
    with target("unix") as there:
        reads = threading.Thread(target=there.caller.call, args=("b", never))
        reads.start()
        press_when(lambda: len(there.callee.server.unanswered()) == 2)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync("b", never)
        _may_end.set()
        reads.join(PATIENCE)
        assert not reads.is_alive()
        there.check()
        there.settle()


def test_an_interrupted_wait_for_credits_does_not_block_others() -> None:
    settings = AgentSettings(session=SessionSettings(request_credits=1))
    with local_group(["a", "b"], settings=settings) as agents:
        a = agents["a"]
        channel = channel_of(a)
        installation = WrappedHandlers()
        try:
            holds = threading.Thread(target=a.call, args=("b", never))
            holds.start()
            wait_until(lambda: len(agents["b"].server.unanswered()) == 1)
            press_when(lambda: len(channel.credit_window.waiters) == 1)
            with pytest.raises(KeyboardInterrupt):
                a.call("b", operator.add, (1, 2))
            assert not channel.credit_window.waiters
            _may_end.set()
            holds.join(PATIENCE)
            assert a.call("b", operator.add, (1, 2)) == 3
        finally:
            installation.restore()


def test_a_wakeup_of_a_waiter_that_gave_up_goes_to_the_next_waiter_for_credits() -> None:
    with local_group(["a", "b"]) as agents:
        channel = channel_of(agents["a"])
        woken: list[str] = []
        channel.credits._max_requests = 1
        assert channel.credits.acquire(1)
        first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
        assert not channel.credit_window.acquire(1, first)
        assert not channel.credit_window.acquire(1, second)
        channel.credit_window.release(1)
        channel.credit_window.cancel(first)
        assert woken == ["first", "second"]


def channel_of(agent: Any) -> Channel:
    agent.call("b", operator.add, (1, 2))
    channel = agent.peers.find("b").outgoing
    assert isinstance(channel, Channel)
    return channel


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


# -- autograd -------------------------------------------------------------------------------------------------


class Presses(torch.autograd.Function):
    """Sends SIGINT in its backward: in user code, inside a pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        press()
        return grad


def test_an_interrupted_pass_ends_on_all_workers_and_the_next_one_works() -> None:
    weight = torch.ones(3, requires_grad=True)
    with target("unix") as there:
        with dist_autograd.context() as context_id:
            result = rpc.rpc_sync("b", torch.mul, (weight, 2.0))
            with pytest.raises(KeyboardInterrupt):
                dist_autograd.backward(context_id, [Presses.apply(result).sum()])
        there.operations["a pass"]()
        there.settle()


def test_an_interrupt_in_an_island_that_the_main_thread_runs_for_another_worker_is_not_lost() -> None:
    # The pass of the island fails, with the interrupt as its reason.
    run = SimpleNamespace(
        graph=SimpleNamespace(
            islands={0: SimpleNamespace(direct=False, last=0, entries=[7])},
            fed={7: SimpleNamespace(forget=lambda: ended.append(7))},
        ),
        engine=SimpleNamespace(run=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)),
        info=SimpleNamespace(create_graph=False, modes=0),
        context=None,
        failure=None,
        fail=lambda error: failed.append(error),
        driver_thread=0,
        messaging=SimpleNamespace(agent=None, pass_profiler=None, now=time.monotonic),
        threads={},
        touched=0.0,
        islands_run=0,
        events=SimpleNamespace(on=False),
        wait_for_gradient=None,
        wait_for_slot=None,
        inner={},
        lock=threading.Lock(),
        rules=SimpleNamespace(island_finished=list),
    )
    failed: list[BaseException] = []
    ended: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        start_island(run, SimpleNamespace(island=0, waiting=()))  # type: ignore[arg-type]
    assert len(failed) == len(ended) == 1


# -- futures --------------------------------------------------------------------------------------------------


def test_an_interrupt_while_a_result_is_unpickled_does_not_lose_the_result() -> None:
    with target("unix"):
        for _ in range(20):  # a worker thread may be faster to read the result, which then presses nothing
            PressesWhenRead.pressed = False
            future = rpc.rpc_async("b", PressesWhenRead)
            with contextlib.suppress(KeyboardInterrupt):
                future.wait()
                assert not PressesWhenRead.pressed or interrupted(lambda: None)
            if PressesWhenRead.pressed:
                break
        assert PressesWhenRead.pressed
        assert isinstance(future.wait(), PressesWhenRead)


class PressesWhenRead:
    pressed = False

    def __setstate__(self, state: object) -> None:
        if threading.current_thread() is threading.main_thread():
            PressesWhenRead.pressed = True
            press()

    def __getstate__(self) -> object:
        return {"something": True}


def test_an_interrupt_in_a_callback_is_raised_afterwards_and_fails_its_future(handled: WrappedHandlers) -> None:
    done: rpc.Future[int] = rpc.Future()
    done.set_result(1)
    following: list[Any] = []

    def callback(_: object) -> None:
        press()
        raise AssertionError("it was not interrupted")

    # Protected like telegrad's own code, so that the future is stored before the interrupt is raised again.
    store = run_as("telegrad.connection.channel", "def run():\n    following.append(done.then(callback))\n", **locals())
    with pytest.raises(KeyboardInterrupt):
        interrupted(store)
    with pytest.raises(CallCancelled, match="callback was interrupted"):
        following[0].wait()
    with pytest.raises(KeyboardInterrupt):
        interrupted(done.add_done_callback, callback)


# -- unwrapped handlers ----------------------------------------------------------------------------------------


def raise_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class BrokenSocket:
    send = staticmethod(raise_interrupt)

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("where", ["send", "receive"])
def test_an_exception_of_an_unwrapped_handler_closes_the_connection_with_a_reason(
    transport: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler was installed after init_rpc, so it is not wrapped. On tcp the session resumes."""
    with local_group(["a", "b"], transport=transport) as agents:
        a = agents["a"]
        link = channel_of(a).link
        assert isinstance(link, SocketLink)

        with monkeypatch.context() as patched:
            if where == "receive":
                patched.setattr(link._reader, "take_single", raise_interrupt)
            else:
                patched.setattr(link, "_socket", BrokenSocket(link._socket))
            with pytest.raises(KeyboardInterrupt):
                a.call("b", operator.add, (1, 2))
        assert "KeyboardInterrupt on this worker, in the middle of" in caplog.text
        if transport == "tcp":
            assert a.call("b", operator.add, (1, 2)) == 3
        else:
            with pytest.raises(WorkerLost, match="KeyboardInterrupt on this worker, in the middle of"):
                a.call("b", operator.add, (1, 2))


EXEMPT = {
    "cli": "runs no agent",
    "doctor": "runs no agent",
    "drop_in": "calls protected code",
    "environment": "reads variables, and holds nothing",
    "errors": "changes no state",
    "interrupts": "the handler itself",
    "launch": "runs no agent in its process",
    "nn": "calls protected code",
    "worker_devices": "runs before and after agents, and holds nothing",
    "optim": "calls protected code",
    "recovery": "calls protected code",
    "testing": "interrupts on purpose",
}
"""Top-level modules and packages that may be interrupted anywhere, and why."""


def test_every_module_is_protected_or_exempt_for_a_reason() -> None:
    package = ROOT / "src" / "telegrad"
    names = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    protected = {name.removeprefix("telegrad.").rstrip(".") for name in interrupts._PROTECTED}
    assert names - {"__init__"} - protected == set(EXEMPT)
