"""Exceptions whose text cannot be formatted, or cannot be sent."""

from __future__ import annotations

import pytest

from telegrad import rpc
from telegrad.calls.exceptions import sendable, text_of, traceback_of
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

HALF = "half a character: \ud800"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raise_half() -> None:
    raise ValueError(HALF)


def test_a_text_that_cannot_be_made() -> None:
    assert text_of(Mute()) == "<Mute: str() failed>"
    assert "Mute" in traceback_of(Mute(), None)


def test_what_can_be_sent_stays_as_it_is() -> None:
    for text in ("", "plain", "größer 🙂 \0 \\ud800"):
        assert sendable(text) == text


def test_half_characters_are_escaped() -> None:
    assert text_of(ValueError(HALF)) == "half a character: \\ud800"
    traceback_of(ValueError(HALF), None).encode()


def test_an_exception_with_half_a_character_in_its_text_arrives_as_it_is() -> None:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        with pytest.raises(ValueError, match="half a character") as caught:
            rpc.rpc_sync("b", raise_half, timeout=20)
        assert caught.value.args == (HALF,)
        assert rpc.rpc_sync("b", abs, (-1,)) == 1
