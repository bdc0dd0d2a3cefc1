"""The errors of collectives that have lasted too long, which say who is missing or does not answer."""

from __future__ import annotations

from collections.abc import Callable

from telegrad.calls.collective_messages import SHUTDOWN, Round
from telegrad.calls.completion import Explainer
from telegrad.errors import DeadlineExceeded, TelegradError, WorkerLost
from telegrad.waiting_report import workers


def explained(
    explainer: Explainer | None, error: DeadlineExceeded, timeout: float, what: str = "the collective"
) -> DeadlineExceeded:
    """Return the error of a call of `what` with a note that says what is stuck, if that is worth the time."""
    if explainer is not None and explainer.is_worth(timeout):
        explanation = explainer.explain(what, 0)
        if explanation:
            error.add_note(explanation)
    return error


def missing_error(key: Round, missing: list[str], timeout: float, what: str = "the collective") -> DeadlineExceeded:
    """Return the error of a collective, a call of `what`, for which these members are missing after so many seconds."""
    have = "has" if len(missing) == 1 else "have"
    text = f"after {timeout:.3g} s {workers(missing)} "
    if key.topic == SHUTDOWN:
        text += f"{have} not called shutdown()"
    else:
        text += f"did not join {what}: each member must call it as often as the others, or give it more timeout"
    return DeadlineExceeded(text, worker=missing[0], elapsed=timeout)


def late(
    error: DeadlineExceeded, key: Round, target: str, ask: Callable[[str, Round], list[str]], timeout: float | None
) -> DeadlineExceeded:
    """Return the error of a shutdown that has lasted too long, with the notes of that of its call to `target`."""
    elapsed = timeout or 0.0
    try:
        found = missing_error(key, ask(target, key) or [target], elapsed)
    except WorkerLost as lost:
        if lost.worker in (target, None):  # then another one can be asked
            raise
        text = f"after {elapsed:.3g} s the shutdown has not ended: {lost}"
        found = DeadlineExceeded(text, worker=lost.worker, elapsed=elapsed)
    except TelegradError as unanswered:
        found = missing_error(key, [silent(unanswered, target)], elapsed)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def silent(error: TelegradError, target: str) -> str:
    """Return the member that does not say whom a collective waits for: `target`, or one that it has asked."""
    return getattr(error, "worker", None) or target
