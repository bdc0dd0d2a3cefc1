"""Sessions for tests of the session's modules."""

from __future__ import annotations

from dataclasses import replace

from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session import Session
from telegrad.protocol.session_events import SessionState

DEFAULTS = SessionSettings()
PATIENT = replace(DEFAULTS, refuse_limit=1e6, resume_limit=1e6)
ENDED = (SessionState.CLOSED, SessionState.LOST)


def make_session(resumable: bool = True, initiator: bool = True, limits: SessionSettings = DEFAULTS) -> Session:
    return Session(resumable=resumable, initiator=initiator, settings=limits, now=0.0, worker="b")


def make_connected(resumable: bool = True, initiator: bool = True, limits: SessionSettings = DEFAULTS) -> Session:
    session = make_session(resumable, initiator, limits)
    session.connected((0, 0), 0.0)
    return session
