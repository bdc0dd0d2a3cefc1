"""Deferred signal handlers: which are wrapped, when pending signals are delivered, and what is restored."""

from __future__ import annotations

import operator
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.signals import interrupted, press, run_as, wrapped_sigint

from telegrad import rpc
from telegrad.connection.channel import Channel
from telegrad.rpc import signals
from telegrad.rpc.signals import DeferredSignalHandler, WrappedHandlers, deliver_pending, wrap_signal_handler
from telegrad.testing.interruption import PATIENCE, target

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are handled in the main thread"
)


@pytest.fixture
def wrapped() -> Iterator[WrappedHandlers]:
    """Wrap Python's own handler, as init_rpc does."""
    with wrapped_sigint() as handlers:
        yield handlers


# -- the handler ----------------------------------------------------------------------------------------------


def test_a_signal_in_protected_code_is_raised_right_after_it(wrapped: WrappedHandlers) -> None:
    passed: list[str] = []
    critical = run_as(
        "telegrad.connection.channel",
        "def run():\n    press()\n    passed.append('first')\n    press()\n    passed.append('second')\n",
        press=press,
        passed=passed,
    )
    with pytest.raises(KeyboardInterrupt):
        interrupted(critical)
    assert passed == ["first", "second"]


def test_rpc_async_and_remote_raise_pending_signals_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredSignalHandler, "_retry", lambda self: None)  # nothing retries
    with target("unix") as there:
        post = Channel.post

        def pressed(*args: Any, **kwargs: Any) -> bool:
            # Worker b replies in this process, too, perhaps when the call has been interrupted already.
            if threading.current_thread() is threading.main_thread():
                press()
            return post(*args, **kwargs)

        for start in (rpc.rpc_async, rpc.remote):
            with monkeypatch.context() as patched:
                patched.setattr(Channel, "post", run_as_channel(pressed))
                with pytest.raises(KeyboardInterrupt):
                    start("b", operator.add, (1, 2))
            signals.pending_handlers.clear()
        there.check()


def run_as_channel(function: Callable[..., Any]) -> Callable[..., Any]:
    return run_as(
        "telegrad.connection.channel", "def run(*args, **kwargs):\n    return f(*args, **kwargs)\n", f=function
    )


def test_a_second_signal_after_the_maximal_deferral_interrupts_protected_code(
    wrapped: WrappedHandlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "MAX_DEFERRAL", 0.0)
    stuck = run_as(
        "telegrad.connection.channel",
        "def run():\n    press()\n    while True: press()\n",
        press=press,
    )
    with pytest.raises(KeyboardInterrupt):
        stuck()


def test_the_next_signal_delivers_a_pending_one_if_no_thread_can_be_started(
    wrapped: WrappedHandlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(signals, "start_new_thread", refuse)
    run_as("telegrad.connection.channel", "def run():\n    press()\n", press=press)()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_user_handlers_are_deferred_and_restored() -> None:
    seen: list[str] = []

    def on_alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        handlers = WrappedHandlers()
        critical = run_as(
            "telegrad.connection.channel",
            "def run():\n    alarm()\n    seen.append('whole')\n",
            alarm=lambda: signal.raise_signal(signal.SIGALRM),
            seen=seen,
        )
        with pytest.raises(TimeoutError, match="too late"):
            interrupted(critical)
        assert seen == ["whole"]
        handlers.restore()
        assert signal.getsignal(signal.SIGALRM) is on_alarm
        assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_installed_later_stays_and_gets_the_pending_signal(wrapped: WrappedHandlers) -> None:
    delivered = threading.Event()

    def mine(number: int, frame: FrameType | None) -> None:
        delivered.set()

    critical = run_as(
        "telegrad.connection.channel",
        "def run():\n    press()\n    install()\n",
        press=press,
        install=lambda: signal.signal(signal.SIGINT, mine),
    )
    critical()
    assert delivered.wait(PATIENCE)
    wrapped.restore()
    assert signal.getsignal(signal.SIGINT) is mine


def test_the_signal_itself_is_resent_if_sigurg_has_a_handler() -> None:
    before = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        handlers = WrappedHandlers()
        with pytest.raises(KeyboardInterrupt):
            interrupted(run_as("telegrad.connection.channel", "def run():\n    press()\n", press=press))
        handlers.restore()
    finally:
        signal.signal(signal.SIGURG, before)


def test_a_retry_that_comes_too_late_does_not_reach_the_handler_that_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, sending, restoring = signal.pthread_kill, threading.Event(), threading.Event()

    def send_late(thread: int, number: int) -> None:
        sending.set()
        restoring.wait(PATIENCE)
        threading.Event().wait(0.05)  # the handlers are restored meanwhile, unless that waits for this thread
        send(thread, number)

    def deliver() -> None:
        run_as("telegrad.connection.channel", "def run():\n    press()\n", press=press)()
        assert sending.wait(PATIENCE)
        deliver_pending()  # before the retry

    monkeypatch.setattr(signal, "pthread_kill", send_late)
    before = signal.signal(signal.SIGURG, lambda *_: None)
    handlers = WrappedHandlers()
    try:
        with pytest.raises(KeyboardInterrupt):
            deliver()
        restoring.set()
        handlers.restore()
        threading.Event().wait(0.1)  # a late one would raise here
    finally:
        signal.signal(signal.SIGURG, before)


def test_ignored_signals_are_not_wrapped() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handlers = WrappedHandlers()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        handlers.restore()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_is_wrapped_once() -> None:
    handler = wrap_signal_handler(signal.default_int_handler)
    assert wrap_signal_handler(handler) is handler


def test_handlers_are_wrapped_again_before_every_notebook_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Callable[..., None]] = []
    events = SimpleNamespace(
        register=lambda name, function: callbacks.append(function),
        unregister=lambda name, function: callbacks.remove(function),
    )
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        handlers = WrappedHandlers()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as ipykernel does before each cell
        callbacks[0](SimpleNamespace(raw_cell="1 + 1"))
        assert isinstance(signal.getsignal(signal.SIGINT), DeferredSignalHandler)
        handlers.restore()
        assert not callbacks
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_child_of_a_fork_has_the_original_handlers(wrapped: WrappedHandlers) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(signal.getsignal(signal.SIGINT), DeferredSignalHandler)


# -- processes ------------------------------------------------------------------------------------------------

PROGRAM = """
import operator, os, signal, sys, threading
import telegrad
from telegrad import rpc
me = threading.main_thread().ident
before = signal.getsignal(signal.SIGINT)
options = telegrad.Options(init_method="file://" + sys.argv[1], transports=("unix",))

def press_when(condition):
    def run():
        while not condition():
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        may_end.set()
    threading.Thread(target=run, daemon=True).start()

may_end = threading.Event()

def slow():
    may_end.wait(20)

def interrupted(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")

# No other worker joins, so init_rpc waits.
press_when(lambda: os.path.exists(sys.argv[1] + ".none"))
interrupted(rpc.init_rpc, "alone", rank=0, world_size=2,
            rpc_backend_options=telegrad.Options(init_method="file://" + sys.argv[1] + ".none", transports=("unix",)))
assert signal.getsignal(signal.SIGINT) is before
assert os.listdir(os.environ["TELEGRAD_RUNTIME_DIR"]) == [], "the socket was not removed"

rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("only", operator.add, (1, 2)) == 3
may_end.clear()
press_when(lambda: rpc.default_agent().shutdown_protocol.begun)
pending = rpc.rpc_async("only", slow)
interrupted(rpc.shutdown)
assert signal.getsignal(signal.SIGINT) is before
rpc.shutdown()
assert threading.active_count() <= 3
print("all checks passed")
os._exit(0)
"""


def test_init_and_shutdown_can_be_interrupted_and_clean_up(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    environment = {**os.environ, "TELEGRAD_RUNTIME_DIR": str(tmp_path / "run"), "TELEGRAD_TOKEN": secrets.token_hex(32)}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_loaded(
        [sys.executable, str(program), str(tmp_path / "store")],
        env=environment,
        timeout=120,
    )
    assert "all checks passed" in ended.stdout, ended.stderr
