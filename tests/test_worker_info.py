"""Names and ids of workers."""

from __future__ import annotations

import pytest

from telegrad.errors import InvalidName
from telegrad.rpc import WorkerInfo


def test_a_worker_info_shows_id_and_name() -> None:
    assert repr(WorkerInfo("a", 1)) == "WorkerInfo(id=1, name=a)"
    assert WorkerInfo("a", 1) == WorkerInfo("a", 1)
    assert len({WorkerInfo("a", 1), WorkerInfo("a", 1), WorkerInfo("b", 2)}) == 2


@pytest.mark.parametrize("name", ["", " ", "abc*", "a" * 128])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="Worker name must match"):
        WorkerInfo(name, 0)
