from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.support.rrefs import Group, gates, group_that_frees_everything


@pytest.fixture
def group() -> Iterator[Group]:
    """Workers a, b and c; the test acts as a."""
    with group_that_frees_everything() as agents:
        yield agents


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that `wait_for("gate")` waits for."""
    gates["gate"] = threading.Event()
    yield gates["gate"]
    gates["gate"].set()
