"""The story of a universe: what happened, in order, with virtual times. Printed when a seed fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_LINES = 600


class Story:
    """Events, kept as formats and values, because most stories are never read."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._events: list[tuple[float, str, str, tuple[Any, ...]]] = []

    def add(self, worker: str, text: str, *values: object) -> None:
        """Add an event of a worker, or of the universe if `worker` is empty. `values` must be immutable."""
        self._events.append((self._now(), worker, text, values))

    def __str__(self) -> str:
        lines = [
            f"{when:12.6f}  {worker or '-':<4} {text % values if values else text}"
            for when, worker, text, values in self._events
        ]
        if len(lines) > _MOST_LINES:
            half = _MOST_LINES // 2
            lines = [*lines[:half], f"... {len(lines) - _MOST_LINES} events left out ...", *lines[-half:]]
        return "\n".join(lines)
