"""The contract of `telegrad.launch.base` as a test suite for any launcher whose workers run on this machine.

>>> from collections.abc import Iterator
>>> from contextlib import contextmanager
>>> from telegrad import launch
>>> @contextmanager
... def local() -> Iterator[LauncherUnderTest]:
...     yield LauncherUnderTest(launch.start)
>>> check_launcher(local, checks=CHECKS[:1])

Each check is a function whose name states the rule. To get one test case per check, parametrize over `CHECKS` as
``tests/launch/test_base.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from telegrad.testing.contract import BrokenPromise, NotApplicable, run_checks
from telegrad.testing.launch_contract.ending import ENDING_CHECKS
from telegrad.testing.launch_contract.failures import FAILURE_CHECKS
from telegrad.testing.launch_contract.harness import Check, Harness, LauncherUnderTest
from telegrad.testing.launch_contract.results import RESULT_CHECKS

__all__ = ["CHECKS", "BrokenPromise", "Check", "Harness", "LauncherUnderTest", "NotApplicable", "check_launcher"]

CHECKS: tuple[Check, ...] = RESULT_CHECKS + FAILURE_CHECKS + ENDING_CHECKS
"""All rules of `telegrad.launch.base`, except the last: the checks run in the process that launches."""


def check_launcher(
    factory: Callable[[], AbstractContextManager[LauncherUnderTest]], *, checks: Iterable[Check] = CHECKS
) -> None:
    """Run every check on a launcher. Raise one `BrokenPromise` that names all checks that failed."""
    run_checks(checks, factory, Harness)
