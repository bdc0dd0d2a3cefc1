"""Messages of collectives: what is malformed is refused, and errors arrive as what they were."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.calls.collective_messages import Fields, Round, Stage, fields_of, from_plain, round_of, to_plain, told
from telegrad.errors import (
    AuthenticationError,
    CallCancelled,
    DeadlineExceeded,
    GroupsDiffer,
    PayloadError,
    ProtocolError,
    ResourceExhausted,
    WorkerLost,
)

KEY = Round("user", 3, bytes(16))


def test_a_well_formed_message_is_taken_apart() -> None:
    view = (("a", 0, 1), ("b", 2, 3))
    assert round_of("user", 3, bytes(16)) == KEY
    assert round_of("shutdown", 3, b"") == Round("shutdown", 3, b"")
    assert fields_of(KEY, ("value", 2.0, True, 1, 2)) == Fields("value", 2.0, True, 1, Stage.SUBTREE, None, None)
    assert fields_of(KEY, (None, None, False, 3, 0, view)) == Fields(None, None, False, 3, Stage.VALUE, view, None)
    shutdown = Round("shutdown", 3, b"")
    assert fields_of(shutdown, (None, None, True, 3, 1, -1)) == Fields(None, None, True, 3, Stage.ENTER, None, -1)


@pytest.mark.parametrize(
    "parts", [("other", 1, b""), (5, 1, b""), ("user", 1, b""), ("shutdown", 1, bytes(16)), ("user", 0, bytes(16))]
)
def test_a_collective_that_cannot_be_is_refused(parts: tuple[Any, Any, Any]) -> None:
    assert round_of(*parts) is None


@pytest.mark.parametrize(
    "rest",
    [
        (),
        (1, None, True, 1),
        (1, None, True, 4, 0),
        (1, None, True, 1, -1),
        (1, None, True, 1, 4),
        (1, None, True, 1, 1.0),
        (1, None, True, 1, 0, [("a", 0, 1)]),
        (1, None, True, 1, 0, (("a", 0),)),
        (1, None, True, 1, 0, (("a", 0, 1),), 5),
    ],
)
def test_a_malformed_message_is_refused(rest: tuple[Any, ...]) -> None:
    assert fields_of(KEY, rest) is None


@pytest.mark.parametrize("kind", [CallCancelled, DeadlineExceeded, WorkerLost])
def test_errors_keep_their_type_and_the_worker(kind: type[WorkerLost]) -> None:
    error = from_plain(to_plain(kind("worker 'c' is gone", worker="c")))
    assert type(error) is kind
    assert (str(error), error.worker) == ("worker 'c' is gone", "c")


def test_other_errors_keep_their_text() -> None:
    for error in (GroupsDiffer("they differ"), ProtocolError("malformed")):
        copy = from_plain(to_plain(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
    unknown = from_plain(to_plain(ResourceExhausted("no memory")))
    assert (type(unknown), str(unknown)) == (CallCancelled, "no memory")
    for malformed in (None, ("WorkerLost", "text"), ("WorkerLost", "text", 5), ["WorkerLost", "text", ""]):
        assert from_plain(malformed) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AuthenticationError("no proof"), AuthenticationError),
        (PayloadError("no pickle"), PayloadError),
        (ResourceExhausted("no credits"), CallCancelled),
    ],
)
def test_others_are_told_why_a_member_cannot_take_part(error: Exception, kind: type[Exception]) -> None:
    arrived = from_plain(to_plain(told("b", "barrier()", error)))
    assert type(arrived) is kind
    assert str(arrived) == f"worker 'b' cannot take part in barrier(): {error}"
