"""Waits for the owner to confirm a reference, and for the call that computes its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telegrad.calls.client import failure_of
from telegrad.errors import DeadlineExceeded
from telegrad.execution.executor import GuaranteedTask
from telegrad.futures import Future

if TYPE_CHECKING:
    from telegrad.rref.handle import RRef
    from telegrad.rref.user_state import UserRRef


def wait_until_settled(handle: RRef[Any], user: UserRRef, timeout: float) -> None:
    """Wait until the owner has confirmed a reference, or never will."""
    manager = handle._manager
    agent = manager.agent
    event = agent.runtime.event()
    if manager.context.when_settled([user], event.set):
        return
    started = agent.runtime.now()
    if not agent.executor.wait(event, manager.deadline(timeout)):
        elapsed = agent.runtime.now() - started
        raise DeadlineExceeded(
            f"{handle!r} was not confirmed by its owner within {elapsed:.3g} s",
            worker=handle.owner_name(),
            elapsed=elapsed,
        )


def creation_future(handle: RRef[Any]) -> Future[Any]:
    """Return a future that is done when the value has been computed. Its result is None."""
    manager = handle._manager
    manager.check_open()
    future: Future[Any] = Future(manager.agent)
    user = handle._user

    def finish(error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(None)

    if user is None:
        owned = manager.context.find(handle._id)
        if owned.when_ready(lambda: finish(owned.error)):
            finish(owned.error)
        return future

    def settled() -> None:
        try:
            handle._check_user(user)
            finish(failure_of(user.creation, manager.agent.pipeline) if user.creation is not None else None)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the future
            finish(error.with_traceback(None))

    # The thread that settles may be reading a link, and the future may run the user's callbacks.
    if manager.context.when_settled([user], lambda: manager.agent.executor.submit(GuaranteedTask(settled))):
        settled()
    return future
