"""The contract of launchers: the local launcher fulfills it, and the suite notices a launcher that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from telegrad import launch
from telegrad.launch.base import Group
from telegrad.testing import check_launcher
from telegrad.testing.launch_contract import CHECKS, BrokenPromise, Check, Harness, LauncherUnderTest, NotApplicable


def run_check(check: Check, under_test: LauncherUnderTest) -> None:
    """Run one check, or skip the test if it does not apply."""
    try:
        with closing(Harness(under_test)) as harness:
            check(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_local(check: Check) -> None:
    run_check(check, LauncherUnderTest(launch.start, restarts=True))


class Wrapped(Group):
    """A local group of which a subclass breaks one rule."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def names(self) -> Any:
        return self._group.names

    def join(self, timeout: float | None = None) -> list[Any]:
        return self._group.join(timeout)

    def kill(self, name: str) -> None:
        self._group.kill(name)

    def stop(self) -> None:
        self._group.stop()


class Reversed(Wrapped):
    def join(self, timeout: float | None = None) -> list[Any]:
        return super().join(timeout)[::-1]


class Careless(Wrapped):
    def kill(self, name: str) -> None:
        if name in self.names:
            super().kill(name)


class Nervous(Wrapped):
    def kill(self, name: str) -> None:
        super().kill(name)
        super().stop()


class Anonymous(Wrapped):
    def join(self, timeout: float | None = None) -> list[Any]:
        try:
            return super().join(timeout)
        except launch.WorkerFailed as error:
            raise launch.WorkerFailed("a worker failed") from error.__cause__


@pytest.mark.parametrize(
    ("wrapper", "rule"),
    [
        (Reversed, "results_are_in_the_order_of_the_workers"),
        (Careless, "only_workers_of_the_group_can_be_killed"),
        (Nervous, "a_killed_worker_leaves_the_others_running"),
        (Anonymous, "a_process_that_dies_is_named"),
    ],
)
def test_a_launcher_that_breaks_a_rule_is_noticed(wrapper: Callable[[Group], Group], rule: str) -> None:
    @contextmanager
    def broken() -> Iterator[LauncherUnderTest]:
        yield LauncherUnderTest(lambda *args, **options: wrapper(launch.start(*args, **options)))

    with pytest.raises(BrokenPromise, match=rule.replace("_", " ")):
        check_launcher(broken, checks=[check for check in CHECKS if check.__name__ == rule])
