"""A collective that has lasted too long says who is missing, or who does not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from telegrad.calls.collective_errors import late
from telegrad.calls.collective_messages import SHUTDOWN, Round
from telegrad.errors import DeadlineExceeded, ProtocolError, TelegradError, WorkerLost

KEY = Round(SHUTDOWN, 1, b"")


def answers(outcome: list[str] | TelegradError) -> Callable[[str, Round], list[str]]:
    def ask(target: str, key: Round) -> list[str]:
        if isinstance(outcome, TelegradError):
            raise outcome
        return outcome

    return ask


@pytest.mark.parametrize(
    ("outcome", "text", "worker"),
    [
        (["c", "d"], "after 5 s workers 'c' and 'd' have not called shutdown()", "c"),
        ([], "after 5 s worker 'b' has not called shutdown()", "b"),
        (ProtocolError("test"), "after 5 s worker 'b' has not called shutdown()", "b"),
        (DeadlineExceeded("test", worker="c"), "after 5 s worker 'c' has not called shutdown()", "c"),
        (WorkerLost("worker 'c' is lost", worker="c"), "the shutdown has not ended: worker 'c' is lost", "c"),
    ],
)
def test_a_shutdown_that_has_lasted_too_long_raises_a_timeout(
    outcome: list[str] | TelegradError, text: str, worker: str
) -> None:
    expired = DeadlineExceeded("the call to b", worker="b")
    expired.add_note("a note")
    error = late(expired, KEY, "b", answers(outcome), 5.0)
    assert text in str(error)
    assert (error.worker, error.elapsed, error.__notes__) == (worker, 5.0, ["a note"])


def test_if_the_worker_to_which_this_one_reports_is_lost_another_can_be_asked() -> None:
    with pytest.raises(WorkerLost):
        late(DeadlineExceeded("x"), KEY, "b", answers(WorkerLost("worker 'b' is lost", worker="b")), 5.0)
