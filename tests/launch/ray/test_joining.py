"""Actors that leave a group, without Ray."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.launch.ray import joining
from telegrad.options import Options


def test_an_actor_that_does_not_leave_in_time_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_LEAVE_WITHIN", 0.01)
    closed: list[str] = []
    rendezvous: Any = SimpleNamespace(key="key", close=lambda: closed.append("rendezvous"))
    call = SimpleNamespace(future=Future)
    actor = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda *arguments: call))
    joined = joining._JoinedActors(rendezvous, ["late"], {"late": actor}, None, Options())
    joined._rejoining.asked["late"] = Future()
    joined.leave(graceful=True)
    assert closed == ["rendezvous"]
    assert "actor 'late' was asked to join the group again, and has not left it within 0.01 s" in caplog.text
