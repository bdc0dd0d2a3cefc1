"""The contract of `telegrad.transport.base` as a test suite for any transport.

>>> from collections.abc import Iterator
>>> from contextlib import contextmanager
>>> from telegrad.transport.memory import MemoryNetwork, MemoryTransport
>>> @contextmanager
... def memory() -> Iterator[TransportUnderTest]:
...     transport = MemoryTransport(MemoryNetwork())
...     yield TransportUnderTest(transport, transport.poller(), "memory://")
>>> check_transport(memory, checks=CHECKS[:3])

Each check is a function whose name states the rule. To get one test case per check, parametrize over `CHECKS` as
``tests/transport/test_contract.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing

from telegrad.testing.transport_contract.delivery import DELIVERY_CHECKS
from telegrad.testing.transport_contract.harness import (
    BrokenPromise,
    Check,
    Harness,
    NotApplicable,
    TransportUnderTest,
)
from telegrad.testing.transport_contract.lifetime import LIFETIME_CHECKS
from telegrad.testing.transport_contract.polling import POLLING_CHECKS
from telegrad.testing.transport_contract.waiting import WAITING_CHECKS

__all__ = ["CHECKS", "BrokenPromise", "Check", "Harness", "NotApplicable", "TransportUnderTest", "check_transport"]

CHECKS: tuple[Check, ...] = DELIVERY_CHECKS + LIFETIME_CHECKS + WAITING_CHECKS + POLLING_CHECKS
"""All rules of `telegrad.transport.base`."""


def check_transport(
    factory: Callable[[], AbstractContextManager[TransportUnderTest]], *, checks: Iterable[Check] = CHECKS
) -> None:
    """Run every check on a new transport. Raise one `BrokenPromise` that names all checks that failed."""
    failed: list[str] = []
    errors: list[Exception] = []
    for check in checks:
        with factory() as under_test:
            scheme = under_test.transport.scheme
            try:
                with closing(Harness(under_test)) as harness:
                    check(harness)
            except NotApplicable:
                continue
            except Exception as error:  # noqa: BLE001 - any error means that the check failed, and is reported
                errors.append(error)
                text = str(error) if isinstance(error, BrokenPromise) else repr(error)
                failed.append(f"{scheme}: {check.__name__.replace('_', ' ')}: {text}")
    if failed:
        raise BrokenPromise("\n".join(failed)) from errors[0]
