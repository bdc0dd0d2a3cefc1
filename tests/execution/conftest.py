"""Fixtures: running executors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.executors import ExecutorHarness, ScarceRuntime, running


@pytest.fixture
def harness() -> Iterator[ExecutorHarness]:
    yield from running()


@pytest.fixture
def serial() -> Iterator[ExecutorHarness]:
    """An executor that runs one user function at a time."""
    yield from running(max_running=1)


@pytest.fixture
def narrow() -> Iterator[ExecutorHarness]:
    """An executor that runs at most two user functions at once."""
    yield from running(max_running=2)


@pytest.fixture
def scarce() -> Iterator[tuple[ExecutorHarness, ScarceRuntime]]:
    """An executor whose system may run out of threads and memory."""
    runtime = ScarceRuntime()
    for harness in running(runtime):
        yield harness, runtime
