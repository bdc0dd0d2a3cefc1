"""The startup data of a worker does not leak the token."""

from __future__ import annotations

from telegrad.launch.forked import Startup


def test_the_repr_of_a_startup_shows_no_token() -> None:
    startup = Startup("alice", {"TELEGRAD_TOKEN": "secret"}, b"options with a secret", init=True)
    assert "alice" in repr(startup)
    assert "secret" not in repr(startup)
