from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.witnesses import Witness


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    made = Witness(tmp_path / "witness")
    yield made
    made.close()
