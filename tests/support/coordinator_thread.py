"""The coordinator of `telegrad.launch.ray` without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from telegrad.launch.ray.coordinator import Coordinator


class CoordinatorThread:
    """A coordinator on an event loop in a thread, as Ray runs it in an actor."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._coordinator = asyncio.run_coroutine_threadsafe(self._make(), self._loop).result()

    async def _make(self) -> Coordinator:
        return Coordinator()

    def call(self, method: str, arguments: Sequence[Any], timeout: float) -> Any:
        coroutine = getattr(self._coordinator, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
