"""When a wait is worth a line in the log, and how the line names whom it waits for.

The first line comes after FIRST seconds, each further one when the wait has lasted twice as long: 3, 6, 12, 24 s.
Pure: whoever waits passes the time of its own clock.
"""

from __future__ import annotations

from collections.abc import Collection

FIRST = 3.0
"""Seconds after which a wait is reported for the first time."""
_MAX_NAMED = 8  # workers that one line names


class WaitingReport:
    """Decides when one wait is reported: ever more rarely.

    >>> report = WaitingReport(100.0)
    >>> [now for now in range(100, 130) if report.is_due(now)]
    [103, 106, 112, 124]
    """

    def __init__(self, now: float, first: float = FIRST) -> None:
        self.began = now
        """When the wait began."""
        self.due = now + first
        """When it is to be reported next."""

    def elapsed(self, now: float) -> float:
        """Return for how long it has waited."""
        return now - self.began

    def is_due(self, now: float) -> bool:
        """Return whether to report the wait now, and if so, set when it is due again."""
        if now < self.due:
            return False
        # At least twice what it has lasted, however late this was called.
        self.due = self.began + 2 * (now - self.began)
        return True


def seconds(elapsed: float) -> str:
    """Return a duration as a log line gives it.

    >>> seconds(0.5001), seconds(3.0002), seconds(12345.6)
    ('0.5 s', '3 s', '12346 s')
    """
    return f"{elapsed:.2g} s" if elapsed < 0.95 else f"{elapsed:.0f} s"


def workers(names: Collection[str], *, limit: int = _MAX_NAMED) -> str:
    """Return the workers with these names as a log line names them.

    >>> workers(["b"]), workers(["d", "b"]), workers(["d", "c", "b"], limit=2)
    ("worker 'b'", "workers 'b' and 'd'", "workers 'b', 'c' and 1 more")
    """
    named = [repr(name) for name in sorted(names)]
    if len(named) == 1:
        return f"worker {named[0]}"
    if len(named) > limit:
        return f"workers {', '.join(named[:limit])} and {len(named) - limit} more"
    return f"workers {', '.join(named[:-1])} and {named[-1]}"
