"""A whole agent, and a member that sends it messages with valid heads and hostile contents.

The agent has no threads: tasks run one after the other. A task that raises anything is a crash, because tasks report
their own errors. Afterwards the member is lost, then the other worker, and the agent must hold nothing of either: what
a member leaves behind would grow without limit over its incarnations.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterable

from fuzz.census import held
from fuzz.choices import Choices
from fuzz.hostile_messages import HostileMember
from fuzz.target import Target
from fuzz.threadless_agent import B, C, ThreadlessAgent, WouldWait
from telegrad.errors import ProtocolError
from telegrad.rref.ids import incarnation_of

MOST_MESSAGES = 64


class _Crash(logging.Handler):
    """Makes a logged traceback a crash: code that logs one considers it a bug in telegrad."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and not isinstance(record.exc_info[1], WouldWait):
            raise AssertionError(f"logged as a bug: {record.getMessage()}") from record.exc_info[1]


def _run(data: bytes) -> None:
    choices = Choices(data)
    harness = ThreadlessAgent()
    tag = incarnation_of(harness.agent.me)
    member = HostileMember((1, incarnation_of(B)), (0, tag), ((2, incarnation_of(C)),))
    log = logging.getLogger("telegrad")
    handler = _Crash()
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(MOST_MESSAGES):
                if not choices:
                    break
                is_reply = choices.rarely()
                message = member.message(choices, is_reply=is_reply)
                try:
                    harness.deliver("b", *message, is_reply=is_reply)
                except ProtocolError:
                    break
            harness.lose("b")
            harness.lose("c")
            left = {name: count for name, count in held(harness.agent).items() if count and name not in _ALLOWED}
            assert not left, f"after both workers are lost the agent holds {left}"
    finally:
        log.removeHandler(handler)


_ALLOWED = ("peers", "timers", "unacked")
"""What is left after losses: the records of peers, and timers that have not run because the clock stands still."""


def _seeds() -> Iterable[bytes]:
    rng = random.Random(4)
    return [rng.randbytes(30 * index) for index in range(1, 30)]


MEMBER = Target("member", _run, (), _seeds, max_size=2048)
