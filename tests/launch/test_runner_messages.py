"""Frames between launchers and runners."""

from __future__ import annotations

import pytest

from telegrad.errors import ProtocolError
from telegrad.launch.runner_messages import (
    MARK,
    Exited,
    Frames,
    Hello,
    Message,
    Output,
    Parts,
    Start,
    WorkPart,
    in_parts,
    pack,
)

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


@pytest.mark.parametrize("noise", [b"", b"Welcome!\n", MARK[:-1], b"\0" * 100])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_a_login_shell_writes_before_the_frames_is_output(noise: bytes, size: int) -> None:
    data = noise + MARK + b"".join(map(pack, MESSAGES))
    frames = Frames(mark=MARK)
    found = [message for start in range(0, len(data), size) for message in frames.feed(data[start : start + size])]
    first = [message.data for message in found[: -len(MESSAGES)] if isinstance(message, Output)]
    assert b"".join(first) == noise
    assert len(first) == len(found) - len(MESSAGES)
    assert found[-len(MESSAGES) :] == MESSAGES


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 3_000_000])
def test_work_is_sent_in_parts(size: int) -> None:
    start = Start("a", 0, [], {}, "secret", "/", [], bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    *sent, last = in_parts(start)
    parts = Parts()
    for part in sent:
        assert isinstance(part, WorkPart)
        assert len(pack(part)) < 1_100_000
        parts.add(part)
    assert isinstance(last, Start)
    assert len(pack(last)) < 1000
    assert parts.complete(last) == start


def test_a_frame_above_the_limit_is_refused_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="a frame of 1152921504606846976 bytes"):
        list(Frames(100).feed(b"\x10" + b"\0" * 7))


def test_garbage_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        list(Frames().feed(b"\0" * 7 + b"\x02" + b"\xc1\xc1"))


def test_the_repr_of_a_start_shows_no_token() -> None:
    assert "secret" not in repr(MESSAGES[1])


def test_nesting_without_an_end_is_refused() -> None:
    body = b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 4000 + b"\xc0"
    with pytest.raises(ProtocolError, match="cannot be read"):
        list(Frames().feed(len(body).to_bytes(8, "big") + body))
