"""What runs one worker on a node for a launcher elsewhere. Whole groups are tested in `test_ssh.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from telegrad.launch import runner
from telegrad.launch.runner_channel import PipeChannel
from telegrad.launch.runner_messages import Message, Signal, Start, in_parts, pack

START = Start("a", 0, [], {}, "token", "/", [], b"work")


@pytest.fixture
def ends() -> Iterator[tuple[int, PipeChannel]]:
    """What a launcher writes to, and the channel of the runner."""
    (read_end, theirs), (unread, write_end) = os.pipe(), os.pipe()
    with ExitStack() as stack:
        channel = PipeChannel(read_end, write_end)
        stack.callback(channel.close)
        stack.callback(os.close, unread)
        stack.callback(os.close, theirs)
        yield theirs, channel


def wait_for_start(ends: tuple[int, PipeChannel], messages: Sequence[Message]) -> Start | None:
    theirs, channel = ends
    os.write(theirs, b"".join(map(pack, messages)))
    with ExitStack() as stack:
        return cast("Start | None", cast("Any", runner)._wait_for_start(channel, stack))


def test_a_runner_gets_its_work(ends: tuple[int, PipeChannel]) -> None:
    assert wait_for_start(ends, list(in_parts(START))) == START


@pytest.mark.parametrize("number", [9, 15])
def test_a_signal_that_comes_together_with_the_work_counts(number: int, ends: tuple[int, PipeChannel]) -> None:
    assert wait_for_start(ends, [*in_parts(START), Signal(number)]) is None
