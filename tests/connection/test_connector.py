"""A failed attempt to open a channel does not block later callers."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from telegrad.testing.group import local_group


def test_callers_can_retry_after_a_channel_could_not_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(["a", "b"]) as group:
        peers = group["a"].peers
        make = peers.make_channel
        failures = [MemoryError("no memory for a channel")]

        def make_later(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return make(*args, **kwargs)

        monkeypatch.setattr(peers, "make_channel", make_later)
        with pytest.raises(MemoryError, match="no memory for a channel"):
            group["a"].call("b", operator.add, (1, 2), timeout=20)
        assert group["a"].call("b", operator.add, (1, 2), timeout=20) == 3
