"""Frames between launchers and runners."""

from __future__ import annotations

import pytest

from telegrad.errors import ProtocolError
from telegrad.launch.runner_messages import Exited, Frames, Hello, Message, Output, Start, pack

MESSAGES: list[Message] = [
    Hello(1, "host", "10.0.0.1", 2, "key"),
    Start("a", 0, ["x.py"], {"A": "b"}, "secret", "/", ["/lib"], b"work" * 1000),
    Output(1, b"\0\xff"),
    Exited(-9),
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_frames_arrive_in_pieces(size: int) -> None:
    data = b"".join(map(pack, MESSAGES))
    frames = Frames()
    found = [message for start in range(0, len(data), size) for message in frames.feed(data[start : start + size])]
    assert found == MESSAGES


def test_a_frame_above_the_limit_is_refused_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="a frame of 1152921504606846976 bytes"):
        list(Frames(100).feed(b"\x10" + b"\0" * 7))


def test_garbage_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        list(Frames().feed(b"\0" * 7 + b"\x02" + b"\xc1\xc1"))


def test_the_repr_of_a_start_shows_no_token() -> None:
    assert "secret" not in repr(MESSAGES[1])
