"""Names and ids of workers are checked."""

from __future__ import annotations

import pytest

from telegrad.connection.worker_record import MAX_ID, MAX_NAME, check_id, check_name


@pytest.mark.parametrize("name", ["a", "worker_0", "trainer-1:gpu", "x" * MAX_NAME])
def test_valid_names_are_returned(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "a/b", "x" * (MAX_NAME + 1), 7, None])
def test_invalid_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ValueError, match=f"invalid worker name .*: use 1 to {MAX_NAME} letters, digits"):
        check_name(name)


@pytest.mark.parametrize("worker_id", [0, MAX_ID])
def test_valid_ids_are_returned(worker_id: int) -> None:
    assert check_id(worker_id) == worker_id


@pytest.mark.parametrize("worker_id", [-1, MAX_ID + 1])
def test_invalid_ids_are_refused_with_the_rule(worker_id: int) -> None:
    with pytest.raises(ValueError, match=f"invalid worker id {worker_id}: ids are 0 to {MAX_ID}"):
        check_id(worker_id)
