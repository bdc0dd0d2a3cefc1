"""Says why a deadline has passed: attaches what is stuck to the error, if it can be found out in a second.

Looking at the group takes messages to all workers, and while they travel the error is late. So only calls, passes and
collectives that had at least `PATIENCE` seconds are explained, and only one every `INTERVAL` seconds on each worker: a
program whose short timeouts pass often is not slowed down. Nothing that goes wrong here changes the error.
"""

from __future__ import annotations

import logging
import threading

from telegrad.agent.agent import Agent
from telegrad.observe.gather import gather
from telegrad.observe.model import ViewRequest
from telegrad.observe.stuck import analyze
from telegrad.observe.stuck_text import render

_log = logging.getLogger("telegrad")

PATIENCE = 5.0
"""Seconds that something must have been given for its failure to be explained."""
INTERVAL = 5.0
TIMEOUT = 0.8
"""Seconds for the other workers to answer."""
LONGEST = 8000
"""Characters of an explanation."""
_SAID_ELSEWHERE = (
    "What {what} waited for was not looked up: worker {name!r} had looked at the group less than {interval:g} s "
    "before, and said what is stuck in the error of {of}."
)


class Explainer:
    """Explains the deadlines of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # protects _last and _last_what
        self._last = -INTERVAL
        self._last_what = ""
        self.patience = PATIENCE
        agent.client.completion.explainer = agent.collectives.explainer = self

    def is_worth(self, elapsed: float) -> bool:
        """Return whether something that took so many seconds is worth an explanation."""
        return elapsed >= self.patience and not self._agent.closed and not self._agent.local.departing

    def explain(self, what: str, call: int) -> str:
        """Return what is stuck, or where that is said if another explanation was made just now; empty if this fails."""
        agent = self._agent
        with self._lock:
            now = agent.runtime.now()
            if now - self._last < INTERVAL:
                return _SAID_ELSEWHERE.format(what=what, name=agent.me.name, of=self._last_what, interval=INTERVAL)
            self._last, self._last_what = now, what
        try:
            group = gather(agent, ViewRequest(stacks=True, contexts=False), timeout=TIMEOUT)
            report = analyze(group, min(1.0, self.patience), (agent.me.name, call) if call else None)
            return f"What {what} waited for:\n" + render(report, limit=LONGEST)
        except Exception as error:  # noqa: BLE001 - the deadline's own error is the one to raise
            _log.debug("worker %r cannot explain why %s took so long: %r", agent.me.name, what, error)
            return ""
