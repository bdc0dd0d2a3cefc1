"""Measures, where a program asks for it, how long calls wait for Python's interpreter lock."""

from __future__ import annotations

import threading
import time

enabled = False
_lock = threading.Lock()  # protects the two below
_waits = 0
_waited = 0.0


def enable_gil_profiling(flag: bool) -> None:
    """Measure from now on, or not; `_get_current_rpc_agent().get_debug_info()` has the average."""
    global enabled, _waits, _waited
    with _lock:
        enabled, _waits, _waited = flag, 0, 0.0


def measure() -> None:
    """Let other threads have the lock, and note how long it takes to get it back."""
    global _waits, _waited
    started = time.perf_counter()
    time.sleep(0)
    waited = time.perf_counter() - started
    with _lock:
        _waits += 1
        _waited += waited


def average_wait() -> float | None:
    """Microseconds; None if nothing was measured."""
    with _lock:
        return _waited / _waits * 1e6 if enabled and _waits else None
