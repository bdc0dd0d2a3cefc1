"""The transition table of session states."""

from __future__ import annotations

import pytest
from tests.support.sessions import ENDED, make_session

from telegrad.errors import TelegradError
from telegrad.protocol.session_events import TRANSITIONS, SessionState


def test_the_transition_table_has_every_state_and_is_enforced() -> None:
    assert set(TRANSITIONS) == set(SessionState)
    for ended in ENDED:
        assert not TRANSITIONS[ended]
    with pytest.raises(TelegradError, match="cannot go from connecting to broken"):
        make_session()._move(SessionState.BROKEN)
