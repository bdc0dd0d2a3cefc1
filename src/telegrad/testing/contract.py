"""Runs the checks of a contract on an implementation of it: a transport, a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from typing import Protocol, TypeVar


class BrokenPromise(AssertionError):
    """The implementation violates its contract."""


class NotApplicable(Exception):
    """A check has nothing to test on this implementation, because it lacks an optional ability."""


class Closable(Protocol):
    """What is used of the harness in which a check runs."""

    def close(self) -> None:
        """End what the check has left."""


Subject = TypeVar("Subject")
Harness = TypeVar("Harness", bound=Closable)


def run_checks(
    checks: Iterable[Callable[[Harness], None]],
    factory: Callable[[], AbstractContextManager[Subject]],
    make_harness: Callable[[Subject], Harness],
    label: Callable[[Subject], str] = lambda subject: "",
) -> None:
    """Run every check on a new subject. Raise one `BrokenPromise` that names all checks that failed.

    `label` says in front of a failure which subject it is.
    """
    failed: list[str] = []
    errors: list[Exception] = []
    for check in checks:
        with factory() as subject:
            before = label(subject)
            try:
                with closing(make_harness(subject)) as harness:
                    check(harness)
            except NotApplicable:
                continue
            except Exception as error:  # noqa: BLE001 - any error means that the check failed, and is reported
                errors.append(error)
                text = str(error) if isinstance(error, BrokenPromise) else repr(error)
                failed.append(f"{before}{check.__name__.replace('_', ' ')}: {text}")
    if failed:
        raise BrokenPromise("\n".join(failed)) from errors[0]
