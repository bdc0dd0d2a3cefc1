from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from tests.support.observed_group import here, observed_group, training
from tests.support.recorded_groups import worker_view
from tests.support.trace_format import check_trace

from telegrad.cli import main
from telegrad.observe.attach import Attached, GroupEnded
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands import trace
from telegrad.observe.model import Event, GroupView, Kind


@pytest.fixture
def group_that_trains() -> Iterator[None]:
    with observed_group() as group, training(group["a"], "b"):
        yield


@pytest.mark.usefixtures("group_that_trains")
def test_a_running_group_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", "-o", str(path), "--seconds", "0.4", *here()]) == 0
    printed = capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    check_trace(events)
    names = [event["name"].rpartition(":")[2].split()[-1] for event in events if event.get("cat") == "serve"]
    assert names.count("scaled") >= 2
    assert {event["name"] for event in events if event["ph"] == "s"} == {"request", "reply", "gradient"}
    slices = sum(event["ph"] == "X" for event in events)
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["worker", "a", "b"]
    assert lines[-1].startswith(f"{path}: {slices} slices. Open it at https://ui.perfetto.dev")


@pytest.mark.usefixtures("group_that_trains")
def test_a_picture_is_drawn_if_the_name_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.svg"
    command = ["trace", "-o", str(path), "--seconds", "0.1", "--merged", "--json", *here()]
    assert main(command) == 0
    assert path.read_text().startswith("<svg")
    printed = json.loads(capsys.readouterr().out)
    assert (printed["file"], printed["missing"]) == (str(path), [])
    assert [share["worker"] for share in printed["workers"]] == ["a", "b"]
    for share in printed["workers"]:
        parts = (share[name] for name in ("compute", "serialise", "transfer", "wait", "idle"))
        assert sum(parts) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "-1"], "--seconds must be at least 0, not -1"),
        (["-o", "/no/such/folder/trace.json"], "there is no folder '/no/such/folder' to write to"),
        (["-o", "trace.png"], "the output ends with .json or .svg, unlike 'trace.png'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_recorded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *options]) == 2
    assert words in capsys.readouterr().err


def test_without_a_group_the_error_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["trace", "-o", str(tmp_path / "x.json"), "--runtime-dir", str(tmp_path)]
    assert main(command) == 1
    assert "--address tcp://HOST:PORT" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


class Ending:
    """A group that ends after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def look(self, request: AttachRequest) -> GroupView:
        self.looks -= 1
        if self.looks < 0:
            raise GroupEnded("the group has ended")
        event = Event(0, Kind.CALL, 1.0, 2.0, 1, "b", "m:f")
        return GroupView((worker_view("a", 0, now=3.0, events=(event,), next_event=1),), now=3.0)


@pytest.mark.parametrize("looks", [1, 2])
def test_what_was_read_before_the_group_ended_is_the_trace(looks: int, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = trace._record(cast(Attached, Ending(looks)), 0.0 if looks == 1 else 30.0, 1.0)
    assert [share.worker for share in recorded.shares()] == ["a"]
    assert "the group has ended; the trace shows what was read before" in capsys.readouterr().err
