"""The rendezvous store of a group, in an actor on the driver's node. It also tells workers when the group is stopped.

Nobody chooses a port, and no file is shared: workers get the handle of the actor inside Ray calls. The actor is on the
driver's node and belongs to the driver, so it ends only when the driver does, and then Ray ends the whole group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Coordinator:
    """The entries of one store, as torch's stores define their methods. Ray runs the methods on one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._changed = asyncio.Condition()
        self._stopped = asyncio.Event()

    async def set(self, key: str, value: bytes) -> None:
        """Write an entry."""
        await self._write(key, value)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write an entry if it has the expected value; empty: if it does not exist. Return the value that it has."""
        current = self._entries.get(key)
        if current == expected or (current is None and not expected):
            await self._write(key, desired)
            return desired
        return expected if current is None else current

    async def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        total = int(self._entries.get(key, b"0")) + amount
        await self._write(key, str(total).encode())
        return total

    async def append(self, key: str, value: bytes) -> None:
        """Append to an entry, which is empty at first."""
        await self._write(key, self._entries.get(key, b"") + value)

    async def delete(self, key: str) -> bool:
        """Delete an entry. Return whether it existed."""
        return self._entries.pop(key, None) is not None

    async def count(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    async def check(self, keys: Sequence[str]) -> bool:
        """Return whether all entries exist."""
        return all(key in self._entries for key in keys)

    async def read(self, keys: Sequence[str], timeout: float) -> list[bytes] | None:
        """Return the values of entries as soon as all exist, or None if that takes more than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: all(key in self._entries for key in keys))
                return [self._entries[key] for key in keys]
        except TimeoutError:
            return None

    async def stop(self) -> None:
        """Let `stopped` return."""
        self._stopped.set()

    async def stopped(self) -> None:
        """Return when the group is stopped."""
        await self._stopped.wait()

    async def _write(self, key: str, value: bytes) -> None:
        # Before the first await: callers have just read what they replace.
        self._entries[key] = value
        async with self._changed:
            self._changed.notify_all()
