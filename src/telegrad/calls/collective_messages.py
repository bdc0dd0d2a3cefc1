"""The messages of collectives between a member and the one above it in the tree."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from telegrad.calls.collective_view import DIGEST_SIZE, KnownView, View
from telegrad.errors import (
    AuthenticationError,
    CallCancelled,
    CallError,
    DeadlineExceeded,
    GroupsDiffer,
    LimitExceeded,
    PayloadError,
    ProtocolError,
    TelegradError,
    WorkerLost,
)

USER = "user"
"""The topic of the collectives of the program."""
SHUTDOWN = "shutdown"
"""The topic of the rounds of a graceful shutdown."""
DETACHED = "detached"
"""The answer of a parent in a shutdown that has another parent than its child knows of: the child has to avoid it."""
ROOT = -1
"""In place of the id of a parent: there is none."""
INSISTS = -2
"""In place of the id of the parent's parent: the child has been sent away for too long, and has to be taken."""
UNKNOWN_VIEW = False
"""The answer of a member that has to be sent the names of the members."""
_LONGEST = 1e9  # seconds, and rounds

Respond = Callable[[object, Exception | None], None]
CallUp = Callable[[str, tuple[Any, ...], Respond], None]
"""Calls the service of another worker with arguments. What it answers is passed on, on any thread."""


class Stage(IntEnum):
    """What a message says. The numbers are sent."""

    VALUE = 0
    """The value of the sender, which has nobody below it or is the receiver. The answer is the outcome."""
    ENTER = 1
    """Somebody at or below the sender has come. The answer is the outcome, without values."""
    SUBTREE = 2
    """The values of the sender and of all below it. The answer is the outcome."""
    FAILED = 3
    """It has failed at the sender. Answered at once."""


class Round(NamedTuple):
    """Identifies one collective."""

    topic: str
    number: int
    digest: bytes
    """That of its view; empty for a round of a shutdown."""


class PendingRound(NamedTuple):
    """A collective that waits for others at one member."""

    round: Round
    began: float
    missing: list[str]
    """For whom: members below it, or if those have come, the one above it."""
    answers: list[Respond]
    """What answers those that have come."""


class Arrival(NamedTuple):
    """What a member says about the collective that it is in."""

    round: Round
    known: KnownView
    name: str
    value: Any
    timeout: float | None
    whole: bool
    """Whether it asked for the whole group, rather than for certain workers."""
    oldest: int
    """The lowest number of a collective of this view that it is in; it will come to no lower one."""
    stage: Stage = Stage.VALUE


Expire = Callable[[Round, str, float, Callable[[Exception], None]], None]
"""Fails a collective, a call of the function named, whose timeout in seconds has passed. Names the missing workers."""


class WaitsFor(NamedTuple):
    """Whom a collective waits for at one member."""

    names: list[str]
    """Members that have not come."""
    inner: list[str]
    """Members below which somebody may not have come, and whom to ask."""
    parent: str | None
    """Whom to ask if all here have come."""


class Fields(NamedTuple):
    """The arguments of a message that is not a question."""

    value: Any
    timeout: float | None
    whole: bool
    oldest: int
    stage: Stage
    view: View | None
    above: int | None
    """In a shutdown: the id of the receiver's parent as the sender knows the group; -1: it is the root. Or INSISTS."""


def round_of(topic: object, number: object, digest: object) -> Round | None:
    """Return the collective that a message names; None if that is malformed."""
    if type(topic) is not str or topic not in (USER, SHUTDOWN) or not (type(number) is int and 1 <= number < _LONGEST):
        return None
    if type(digest) is not bytes or len(digest) != (DIGEST_SIZE if topic == USER else 0):
        return None
    return Round(topic, number, digest)


def fields_of(key: Round, rest: tuple[Any, ...]) -> Fields | None:
    """Return the other arguments of a message about a collective; None if they are malformed."""
    if len(rest) not in (5, 6):
        return None
    value, timeout, whole, oldest, stage, *given = rest
    if (
        not (timeout is None or (isinstance(timeout, int | float) and 0 <= timeout < _LONGEST))
        or type(whole) is not bool
        or not (type(oldest) is int and 1 <= oldest <= key.number)
        or not (type(stage) is int and 0 <= stage < len(Stage))
        or (given and not (_is_view(given[0]) if key.topic == USER else type(given[0]) is int))
    ):
        return None
    last = given[0] if given else None
    view, above = (last, None) if key.topic == USER else (None, last)
    return Fields(value, timeout, whole, oldest, Stage(stage), view, above)


def _is_view(view: object) -> bool:
    return type(view) is tuple and all(
        type(entry) is tuple and [type(part) for part in entry] == [str, int, int] for entry in view
    )


_CALL_ERRORS: dict[str, type[CallError]] = {
    kind.__name__: kind for kind in (CallCancelled, DeadlineExceeded, WorkerLost)
}
_OTHER_ERRORS: dict[str, type[TelegradError]] = {
    kind.__name__: kind for kind in (AuthenticationError, GroupsDiffer, PayloadError, ProtocolError)
}
_OUTCOMES = (CallCancelled, DeadlineExceeded, WorkerLost, GroupsDiffer, ProtocolError)


def may_be_unheard_of(error: BaseException) -> bool:
    """Return whether the member above may not know of an error with which a message to it has failed.

    It could not be sent, or that member could not decode it, or has refused it.
    """
    return isinstance(error, Exception) and (isinstance(error, LimitExceeded) or not isinstance(error, _OUTCOMES))


def not_passed_on(me: str, error: BaseException) -> TelegradError:
    """Return the error for the others if this worker cannot pass on the values that it has collected."""
    kind = AuthenticationError if isinstance(error, AuthenticationError) else PayloadError
    text = str(error) or repr(error)  # a MemoryError has no text
    return kind(f"worker {me!r} could not pass on the values of a collective: {text}")


def told(me: str, what: str, error: BaseException) -> TelegradError:
    """Return the error for the others if this worker cannot pass its value to the one that collects it."""
    text = f"worker {me!r} cannot take part in {what}: {str(error) or repr(error)}"  # a MemoryError has no text
    if isinstance(error, AuthenticationError):
        return AuthenticationError(text)
    return PayloadError(text) if isinstance(error, PayloadError) else CallCancelled(text, worker=me)


def to_plain(error: Exception) -> tuple[str, str, str]:
    """Return the error of a collective as plain data."""
    return type(error).__name__, str(error), str(getattr(error, "worker", None) or "")


def failure(key: Round, error: Exception) -> tuple[Any, ...]:
    """Return the message that a collective has failed at the sender."""
    return (*key, to_plain(error), None, True, 1, int(Stage.FAILED))


def from_plain(data: object) -> Exception | None:
    """Return the error that another member has sent; None if it is malformed."""
    if type(data) is not tuple or [type(part) for part in data] != [str, str, str]:
        return None
    kind, text, worker = data
    if kind in _OTHER_ERRORS:
        return _OTHER_ERRORS[kind](text)
    return _CALL_ERRORS.get(kind, CallCancelled)(text, worker=worker or None)
