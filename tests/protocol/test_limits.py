"""Validation of the settings of a session."""

from __future__ import annotations

import pytest

from telegrad.protocol.limits import SessionSettings


@pytest.mark.parametrize(
    ("name", "value"), [("ack_delay", 0.0), ("request_credits", -1), ("resume_limit", float("nan"))]
)
def test_a_setting_that_is_not_positive_is_rejected_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SessionSettings(**{name: value})


def test_a_silence_limit_that_would_close_healthy_connections_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be more than twice heartbeat_interval"):
        SessionSettings(heartbeat_interval=5.0, silence_limit=10.0)
