"""Decides whether and when a worker that died is started again. Pure: the times are arguments.

The rules:

1. Within `window` seconds, a worker is started again at most `limit` times.
2. The delay before a start is `first_delay`, and doubles with each further start up to `max_delay`. After
   `healthy_after` seconds of life it begins at `first_delay` again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 300.0


@dataclass(frozen=True)
class RestartPolicy:
    """How often a worker that died is started again, and how long to wait before each start.

    >>> RestartPolicy(-1)
    Traceback (most recent call last):
    ...
    ValueError: the number of restarts must be an integer, at least 0, not -1
    """

    limit: int = 0
    """Starts within the window, beyond the first one; 0: a worker that died is not started again."""
    window: float = WINDOW
    first_delay: float = 0.1
    max_delay: float = 10.0
    healthy_after: float = 60.0

    def __post_init__(self) -> None:
        if type(self.limit) is not int or self.limit < 0:
            raise ValueError(f"the number of restarts must be an integer, at least 0, not {self.limit!r}")
        if not (math.isfinite(self.window) and self.window > 0):
            raise ValueError(f"the window of restarts must be a number of seconds above 0, not {self.window:g}")


@dataclass(frozen=True)
class Restart:
    """A start that the policy allows."""

    delay: float
    used: int
    """The restarts within the window, including this one."""


class RestartHistory:
    """The restarts of one worker."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque()
        self._delay = policy.first_delay

    def next(self, started: float, now: float) -> Restart | None:
        """Return when to start the worker again that ran from `started` to `now`, or None: the limit is reached."""
        policy = self._policy
        while self._recent and now - self._recent[0] >= policy.window:
            self._recent.popleft()
        if len(self._recent) >= policy.limit:
            return None
        if now - started >= policy.healthy_after:
            self._delay = policy.first_delay
        delay, self._delay = self._delay, min(2 * self._delay, policy.max_delay)
        self._recent.append(now)
        return Restart(delay, len(self._recent))
