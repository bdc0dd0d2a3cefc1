"""Values that others have announced and that are not created yet, counted by who announced them."""

from __future__ import annotations

from collections import Counter

from telegrad.protocol.rref_ids import RRefId


class ExpectedValues:
    """The values that an owner keeps room for. The lock of the `RRefContext` protects it."""

    def __init__(self) -> None:
        self._announced_by: dict[RRefId, int] = {}
        self._counts: Counter[int] = Counter()

    def add(self, rref: RRefId, announced_by: int) -> None:
        """Count a value for the first worker that announced it."""
        if rref not in self._announced_by:
            self._announced_by[rref] = announced_by
            self._counts[announced_by] += 1

    def remove(self, rref: RRefId) -> None:
        """Stop counting a value: it is created, or never will be."""
        announced_by = self._announced_by.pop(rref, None)
        if announced_by is not None:
            self._counts[announced_by] -= 1

    def count(self, worker: int) -> int:
        """Return how many values a worker has announced."""
        return self._counts[worker]
