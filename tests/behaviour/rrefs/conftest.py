from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.rrefs import Group, group_that_frees_everything


@pytest.fixture
def group() -> Iterator[Group]:
    """Workers a, b and c; the test acts as a."""
    with group_that_frees_everything() as agents:
        yield agents
