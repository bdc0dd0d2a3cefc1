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
from contextlib import AbstractContextManager

from telegrad.testing.contract import BrokenPromise, NotApplicable, run_checks
from telegrad.testing.transport_contract.delivery import DELIVERY_CHECKS
from telegrad.testing.transport_contract.harness import (
    Check,
    Harness,
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
    run_checks(checks, factory, Harness, lambda under_test: f"{under_test.transport.scheme}: ")
