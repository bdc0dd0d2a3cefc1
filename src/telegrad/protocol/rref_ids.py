"""The ids that name RRefs and forks."""

from __future__ import annotations

from dataclasses import dataclass

WorkerId = int
ForkId = tuple[int, int]
"""Of a fork: the worker that made it, and a number that it never uses again: its incarnation tag, then a counter."""
RRefId = tuple[int, int, int]
"""Of an RRef: the same, from the same counter; then the owner's incarnation tag."""
Incarnation = tuple[int, int]
"""One run of a worker process: the worker, and its incarnation tag."""

COUNTER_BITS = 40
"""Width of the counter below the incarnation tag."""


@dataclass(frozen=True)
class ForkData:
    """An RRef that is sent to another worker."""

    rref: RRefId
    fork: ForkId
    owner: WorkerId
