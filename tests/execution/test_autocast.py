"""Autocast state is captured on one worker and entered on another."""

from __future__ import annotations

from telegrad.execution import autocast
from telegrad.wire.messages import Autocast


def test_autocast_is_not_entered_for_devices_that_the_worker_lacks() -> None:
    assert autocast.current() is None
    with autocast.entered(Autocast((("cpu", 10), ("cuda", 9), ("nothing", 99)), False)):
        found = autocast.current()
    assert found == Autocast((("cpu", 10),), False)
    assert autocast.current() is None
