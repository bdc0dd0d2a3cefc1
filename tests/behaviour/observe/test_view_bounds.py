"""Views of busy workers stay small."""

from __future__ import annotations

import threading

import pytest

from telegrad.observe import describe as describe_module
from telegrad.observe.describe import describe
from telegrad.observe.model import ViewRequest
from telegrad.testing.group import local_group

released = threading.Event()


def wait_for_release() -> bool:
    return released.wait(60)


def test_a_bounded_number_of_calls_is_listed_however_many_workers_they_are_made_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(describe_module, "_MOST_LIVE", 3)
    released.clear()
    with local_group(["a", "b", "c"]) as group:
        calls = [group["a"].begin(to, wait_for_release) for to in ("b", "c") for _ in range(2)]
        try:
            made = describe(group["a"], ViewRequest()).made
        finally:
            released.set()
        assert [call.callee for call in made] == ["b", "b", "c"]
        assert all(group["a"].client.complete(call) for call in calls)
