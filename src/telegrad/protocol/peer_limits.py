"""Limits per peer: how much of this worker one other worker may use.

A field that is None has the default of the group's mode: without limit if the group accepts any function (its workers
trust each other), and `REGISTERED` if it accepts registered functions only. `math.inf` means no limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What one other worker may use of this worker. The other worker gets a `LimitExceeded` for a call beyond it.

    >>> PeerLimits(calls=8).or_else(REGISTERED).references
    10000
    """

    calls_per_second: float | None = None
    """Calls that it may make per second, on average."""
    burst: float | None = None
    """Calls that it may make at once after a pause. Default: two seconds of `calls_per_second`."""
    calls: float | None = None
    """Its calls that are queued or run at the same time, nested ones too."""
    running: float | None = None
    """Its functions that run at the same time, not counting those that wait for calls. The rest is queued."""
    bytes_held: float | None = None
    """Bytes of its messages that are being received, queued or processed, and of replies that it has not read."""
    message_size: float | None = None
    """Bytes of one of its messages. Never more than `bytes_held`."""
    contexts: float | None = None
    """Autograd contexts that exist on this worker because it called in them, and that have not ended."""
    calls_per_context: float | None = None
    """Calls that it makes in one autograd context."""
    references: float | None = None
    """RRefs to values of this worker that it holds, or that it has announced."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"peer limit {field.name} must be above zero (math.inf: no limit), not {value!r}")

    def or_else(self, default: PeerLimits) -> PeerLimits:
        """Return the limits with a number in every field: this one's, or else that of `default`, or else infinity."""
        chosen: dict[str, float] = {}
        for field in fields(self):
            mine, other = getattr(self, field.name), getattr(default, field.name)
            chosen[field.name] = mine if mine is not None else math.inf if other is None else other
        if self.burst is None and (self.calls_per_second is not None or default.burst is None):
            chosen["burst"] = max(1.0, 2 * chosen["calls_per_second"])
        chosen["message_size"] = min(chosen["message_size"], chosen["bytes_held"])
        return PeerLimits(**chosen)

    @property
    def is_unlimited(self) -> bool:
        """Whether no field limits anything."""
        return all(getattr(self, field.name) in (None, math.inf) for field in fields(self))


UNLIMITED = PeerLimits()
REGISTERED = PeerLimits(
    calls_per_second=1000,
    burst=2000,
    calls=1024,
    running=8,
    bytes_held=1 << 30,
    message_size=256 << 20,
    contexts=256,
    calls_per_context=4096,
    references=10_000,
)
"""The defaults in a group that accepts registered functions only, whose workers need not trust each other."""

GivenLimits = PeerLimits | Mapping[str, PeerLimits] | None
"""Limits for all peers, or by patterns of their names. The first pattern that matches counts."""


def limits_for(peer: str, given: GivenLimits, *, registered: bool) -> PeerLimits | None:
    """Return the limits of one peer, with a number in every field; None if it has none.

    >>> limits_for("partner1", {"partner*": PeerLimits(calls=4)}, registered=False).calls
    4
    >>> limits_for("other", {"partner*": PeerLimits(calls=4)}, registered=False) is None
    True
    """
    if isinstance(given, Mapping):
        given = next((limits for pattern, limits in given.items() if fnmatchcase(peer, pattern)), None)
    chosen = (given or UNLIMITED).or_else(REGISTERED if registered else UNLIMITED)
    return None if chosen.is_unlimited else chosen


def check_limits(given: object) -> GivenLimits:
    """Return what was given as peer limits, if it is of the right type."""
    if given is None or isinstance(given, PeerLimits):
        return given
    if isinstance(given, Mapping) and all(
        isinstance(pattern, str) and isinstance(limits, PeerLimits) for pattern, limits in given.items()
    ):
        return dict(given)
    raise TypeError(
        f"peer_limits must be a PeerLimits, or a dict of them by patterns of worker names, not {type(given).__name__}"
    )
