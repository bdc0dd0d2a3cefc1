"""Measures how long the machine did not run this process, so that tests with a time limit can allow for it."""

from __future__ import annotations

import threading
import time

_NAP = 0.02
_USUAL = 0.1
"""Seconds by which a wait may be late on a machine that is merely busy."""


class Stalls:
    """Sums up the stalls during a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _measure(self) -> None:
        while True:
            before = time.monotonic()
            over = self._over.wait(_NAP)
            late = time.monotonic() - before - _NAP
            if late > _USUAL:
                self.seconds += late
            if over:
                return
