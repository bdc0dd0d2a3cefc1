"""Helpers for tests that send signals to their own process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from telegrad.rpc.signals import WrappedHandlers
from telegrad.testing.interruption import PATIENCE


@contextmanager
def wrapped_sigint() -> Iterator[WrappedHandlers]:
    """Install Python's own SIGINT handler, wrapped as `init_rpc` wraps it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    installation = WrappedHandlers()
    try:
        yield installation
    finally:
        installation.restore()
        signal.signal(signal.SIGINT, before)


def press() -> None:
    """Send SIGINT to this process, as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def interrupted(function: Callable[..., object], *args: Any) -> NoReturn:
    """Call `function`. A signal that it deferred is raised here."""
    function(*args)
    threading.Event().wait(PATIENCE)
    raise AssertionError("the signal was lost")


def run_as(module: str, body: str, **names: Any) -> Callable[..., Any]:
    """Return the function `run` of the source `body`, executed as if it belonged to `module`."""
    scope: dict[str, Any] = {"__name__": module, **names}
    exec(body, scope)
    return scope["run"]  # type: ignore[no-any-return]
