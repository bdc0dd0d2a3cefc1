"""Captures what telegrad logs, for tests that check it line by line."""

from __future__ import annotations

import logging
import queue

PATIENCE = 30.0


class LogLines(logging.Handler):
    """The messages that telegrad logs at level INFO and above, in order."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        """Record a message."""
        self._lines.put(record.getMessage())

    def next(self) -> str:
        """Wait for the next message and return it."""
        return self._lines.get(timeout=PATIENCE)

    def is_empty(self) -> bool:
        """Return whether all messages have been read."""
        return self._lines.empty()

    def count(self) -> int:
        """Return how many messages have not been read."""
        return self._lines.qsize()

    def clear(self) -> None:
        """Forget all messages."""
        while not self.is_empty():
            self.next()
