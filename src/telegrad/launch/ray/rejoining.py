"""Lets actors that Ray has restarted join their group again. A thread of the driver does this.

The rules:

1. When a worker is lost, its actor is asked to join again, with a higher generation each time.
2. If Ray says that the actor is not there at the moment, it is asked again after `_PAUSE` seconds.
3. If Ray says that the actor is dead for good, or the actor fails to join, that is logged, and it is given up until it
   is lost again.
4. Every actor is also asked every `_POLL` seconds, because the driver learns of a loss only if it has a connection. An
   actor that is a member says so.

Nothing here imports Ray.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal

from telegrad.launch.supervisor import Timers

_log = logging.getLogger("telegrad")

_PAUSE = 0.5
_POLL = 2.0

Ask = Callable[[str, int, int], "Future[bool]"]
"""Asks an actor to join with a generation in place of a lost one; the result is False if it is a member."""
Judge = Callable[[BaseException], Literal["unavailable", "dead", "failed"]]
"""Says what an error of `Ask` means."""


class Rejoining:
    """Asks the actors of one group to join again."""

    def __init__(self, names: Sequence[str], ask: Ask, judge: Judge) -> None:
        self._names = list(names)
        self._ask = ask
        self._judge = judge
        self._restarts = dict.fromkeys(names, 0)
        self.asked: dict[str, Future[bool]] = {}
        """The actors that have not answered yet."""
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers = Timers()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="telegrad-ray-rejoin", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._timers.call_in(_POLL, self._ask_all)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Those in `asked` may still join."""
        self._events.put(self._stop)
        if self._thread.ident is not None:
            self._thread.join()

    def lost(self, name: str, generation: int) -> None:
        """A worker was lost. Any thread may call this."""
        if name in self._names:
            self._events.put(partial(self._begin, name, generation))

    def _run(self) -> None:
        while not self._stopping:
            self._timers.run_next(self._events)

    def _stop(self) -> None:
        self._stopping = True

    def _ask_all(self) -> None:
        for name in self._names:
            if name not in self.asked:
                self._begin(name, -1)
        self._timers.call_in(_POLL, self._ask_all)

    def _begin(self, name: str, generation: int) -> None:
        if self._stopping:
            return
        self._restarts[name] += 1
        self.asked[name] = self._ask(name, self._restarts[name], generation)
        self.asked[name].add_done_callback(
            lambda future: self._events.put(partial(self._on_answer, name, generation, future))
        )

    def _on_answer(self, name: str, generation: int, future: Future[bool]) -> None:
        if self.asked.get(name) is future:
            del self.asked[name]
        error = future.exception()
        if error is None:
            if future.result():
                _log.info("worker %r was restarted by Ray and has joined the group again", name)
            return
        state = self._judge(error)
        if state == "unavailable":
            self._timers.call_in(_PAUSE, partial(self._begin, name, generation))
        elif state == "dead":
            self._names.remove(name)
            _log.warning("worker %r is lost for good: Ray does not restart its actor", name)
        else:
            _log.warning("worker %r is lost: its actor was restarted and cannot join again: %s", name, error)
