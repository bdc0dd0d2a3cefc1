"""After an interrupt the call is over, and the agent works as before: wherever it strikes."""

from __future__ import annotations

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

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.backward.driver import PassRun
from telegrad.connection.channel import Channel
from telegrad.errors import CallCancelled, WorkerLost
from telegrad.interrupts import interruptible, is_protected, shielded
from telegrad.protocol.limits import SessionSettings
from telegrad.rpc.signals import WrappedHandlers
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.interruption import PATIENCE, interrupt, places_of, sweep, target
from telegrad.transport.sockets import SocketLink

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are handled in the main thread"
)

_may_end = threading.Event()


def never() -> bool:
    """Runs on the callee, until the test lets it end."""
    return _may_end.wait(PATIENCE)


@pytest.fixture(autouse=True)
def functions_end() -> Iterator[None]:
    _may_end.clear()
    yield
    _may_end.set()


@pytest.fixture
def handled() -> Iterator[WrappedHandlers]:
    """Python's own handler, wrapped as init_rpc wraps it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    installation = WrappedHandlers()
    yield installation
    installation.restore()
    signal.signal(signal.SIGINT, before)


def run_as(module: str, body: str, **names: Any) -> Callable[..., Any]:
    """A function `run` that is, to all appearance, of that module."""
    scope: dict[str, Any] = {"__name__": module, **names}
    exec(body, scope)
    return scope["run"]  # type: ignore[no-any-return]


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(function: Callable[..., object], *args: Any) -> NoReturn:
    """Call it; if it is not interrupted itself, what came meanwhile is raised here."""
    function(*args)
    threading.Event().wait(PATIENCE)
    raise AssertionError("the signal was lost")


# -- the rules ----------------------------------------------------------------------------------------------


def frames_of(body: str, module: str, **names: Any) -> bool:
    """Whether a signal would be deferred in `look`, which `body` calls in that module."""
    answers: list[bool] = []
    run_as(module, body, look=lambda: answers.append(is_protected(sys._getframe())), **names)()
    return answers[0]


def test_the_innermost_function_that_has_a_rule_decides() -> None:
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
    tidies = shielded(run_as("telegrad.calls.client", "def run(then):\n    then()\n"))
    assert frames_of(
        "def run():\n    tidies(lambda: waits(look))\n", "telegrad.connection.channel", waits=waits, tidies=tidies
    )


def threads_but_runners() -> list[str]:
    """There may be more runners than before: those that rest end after a while."""
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
        threads = threads_but_runners()
        for name in names:
            counts = sweep(there, name)
            assert counts["during it"] + counts["after it"] > 100
        assert threads_but_runners() == threads


@contextmanager
def caller_in(transport: str) -> Iterator[Agent]:
    """A worker that has no connection yet."""
    with local_group(["a", "b"], transport=transport) as agents:
        installation = WrappedHandlers()
        try:
            yield agents["a"]
        finally:
            installation.restore()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_first_call_can_be_interrupted_anywhere_while_it_connects(transport: str) -> None:
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
    """Press Ctrl-C, in another thread, when it holds."""

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
    "a future of nobody": lambda: rpc.Future().wait(PATIENCE),
}
LOCAL = ("a future of nobody",)
"""Waits for nothing that runs on a worker."""


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


def test_who_waits_for_credits_and_is_interrupted_does_not_keep_others_waiting() -> None:
    settings = AgentSettings(session=SessionSettings(request_credits=1))
    with local_group(["a", "b"], settings=settings) as agents:
        a = agents["a"]
        channel = channel_of(a)
        installation = WrappedHandlers()
        try:
            holds = threading.Thread(target=a.call, args=("b", never))
            holds.start()
            wait_until(lambda: len(agents["b"].server.unanswered()) == 1)
            press_when(lambda: len(channel._starved) == 1)
            with pytest.raises(KeyboardInterrupt):
                a.call("b", operator.add, (1, 2))
            assert not channel._starved
            _may_end.set()
            holds.join(PATIENCE)
            assert a.call("b", operator.add, (1, 2)) == 3
        finally:
            installation.restore()


def test_the_wake_of_one_that_gave_up_goes_to_another_that_waits_for_credits() -> None:
    with local_group(["a", "b"]) as agents:
        channel = channel_of(agents["a"])
        woken: list[str] = []
        channel.credits._max_requests = 1
        assert channel.credits.ask(1)
        first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
        assert not channel.take_credit(1, first)
        assert not channel.take_credit(1, second)
        channel.return_credit(1)
        channel.stop_starving(first)
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
    """Ctrl-C in its backward: in the user's code, inside of a pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        press()
        return grad


def test_an_interrupted_pass_is_over_on_all_workers_and_the_next_one_works() -> None:
    weight = torch.ones(3, requires_grad=True)
    with target("unix") as there:
        with dist_autograd.context() as context_id:
            result = rpc.rpc_sync("b", torch.mul, (weight, 2.0))
            with pytest.raises(KeyboardInterrupt):
                dist_autograd.backward(context_id, [Presses.apply(result).sum()])
        there.operations["a pass"]()
        there.settle()


def test_ctrl_c_in_an_island_that_the_main_thread_runs_for_somebody_else_is_not_lost() -> None:
    # The pass that it belongs to fails, and says why.
    run = SimpleNamespace(
        _graph=SimpleNamespace(
            islands={0: SimpleNamespace(direct=False, last=0)}, run=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        ),
        about=SimpleNamespace(create_graph=False),
        context=None,
        failure=None,
        fail=lambda error: failed.append(error),
        _driver=0,
        _messaging=SimpleNamespace(agent=None),
        _wait_for=None,
        wait_for_slot=None,
        inner={},
        _island_ended=lambda island: ended.append(island),
    )
    failed: list[BaseException] = []
    ended: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        PassRun._run_island(run, SimpleNamespace(island=0, waiting=()))  # type: ignore[arg-type]
    assert len(failed) == len(ended) == 1


# -- futures --------------------------------------------------------------------------------------------------


def test_an_interrupt_while_a_result_is_read_leaves_the_future_its_result() -> None:
    with target("unix"):
        future = rpc.rpc_async("b", PressesWhenRead)
        with pytest.raises(KeyboardInterrupt):
            interrupted(future.wait)
        assert isinstance(future.wait(), PressesWhenRead)


class PressesWhenRead:
    def __setstate__(self, state: object) -> None:
        if threading.current_thread() is threading.main_thread():
            press()

    def __getstate__(self) -> object:
        return {"something": True}


def test_an_interrupt_in_a_callback_is_raised_after_it_and_its_future_fails(handled: WrappedHandlers) -> None:
    done: rpc.Future[int] = rpc.Future()
    done.set_result(1)
    following: list[Any] = []

    def callback(_: object) -> None:
        press()
        raise AssertionError("it was not interrupted")

    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: following.append(done.then(callback)))
    if following:
        with pytest.raises(CallCancelled, match="callback was interrupted"):
            following[0].wait()
    with pytest.raises(KeyboardInterrupt):
        interrupted(done.add_done_callback, callback)


# -- what breaks through --------------------------------------------------------------------------------------


def break_off(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class BrokenSocket:
    send = staticmethod(break_off)

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("where", ["send", "receive"])
def test_an_exception_that_breaks_through_closes_the_connection_and_says_so(
    transport: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a handler that was installed later and is not wrapped. On tcp the session goes on all the same."""
    with local_group(["a", "b"], transport=transport) as agents:
        a = agents["a"]
        link = channel_of(a).link
        assert isinstance(link, SocketLink)

        with monkeypatch.context() as patched:
            if where == "receive":
                patched.setattr(link._reader, "only", break_off)
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
