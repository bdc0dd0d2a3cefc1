"""Autocast state is captured on one worker and entered on another."""

from __future__ import annotations

from telegrad.execution.autocast import current_autocast, enter_autocast
from telegrad.wire.messages import Autocast


def test_autocast_is_not_entered_for_devices_that_the_worker_lacks() -> None:
    assert current_autocast() is None
    with enter_autocast(Autocast((("cpu", 10), ("cuda", 9), ("nothing", 99)), False)):
        found = current_autocast()
    assert found == Autocast((("cpu", 10),), False)
    assert current_autocast() is None
