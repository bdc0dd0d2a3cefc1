"""Waits for what takes long and that no file descriptor signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, within: float = 240.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {within:g} s"
        threading.Event().wait(0.05)
