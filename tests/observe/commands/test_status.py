"""The commands on a running group."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.processes import wait_until

from telegrad import autograd, cli, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.observe import local_socket
from telegrad.testing.group import local_group

Group = dict[str, Agent]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", str(tmp_path / "run"))
    with local_group(["a", "b", UNIQUE]) as agents:  # in a directory that is found as that of a launcher
        for agent in agents.values():
            local_socket.listen(agent)
        agents["a"].call("b", operator.add, (1, 2))
        yield agents


UNIQUE = f"w{os.getpid()}"  # other tests may run groups with an a at the same time
OPTIONS = ("--group", UNIQUE)


def test_status_prints_a_row_for_each_worker(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--interval", "0", *OPTIONS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["worker", "up", "calls/s"]
    assert [line.split()[0] for line in lines[1:4]] == ["a", "b", UNIQUE]
    assert f"incarnation {group['a'].me.incarnation:x}" in "\n".join(lines)


def test_status_as_json_has_the_rows_and_the_view(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--interval", "0", "--json", *OPTIONS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["calls_served"] for row in found["workers"]] == [0, 1, 0]
    assert found["view"]["workers"][0]["name"] == "a"


def test_top_prints_plain_tables_when_piped(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--count", "2", "--interval", "0", *OPTIONS]) == 0
    assert capsys.readouterr().out.count("worker  calls/s") == 2


def test_stuck_says_that_nothing_is(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stuck", *OPTIONS]) == 0
    assert "Nothing is older than 1 s." in capsys.readouterr().out


def test_story_tells_of_a_context_and_of_a_call(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    with acting_as(group["a"]), autograd.context() as context:
        loss = rpc.rpc_sync("b", torch.mul, (torch.ones(2, requires_grad=True), 2)).sum()
        autograd.backward(context, [loss])
    wanted = ["calls torch:mul on 'b'", "runs torch:mul for 'a'", "sends the gradients", "gets the gradients"]

    def tell() -> str:
        assert cli.main(["story", hex(context), *OPTIONS]) == 0
        return capsys.readouterr().out

    # What a worker does after its reply or gradient has left, it records a moment later.
    wait_until(lambda: tell().count("leaves context") == 2)
    told = tell()
    places = [told.find(each) for each in wanted]
    assert -1 not in places
    assert places == sorted(places)
    assert cli.main(["story", "a:1", "--json", *OPTIONS]) == 0
    assert {line["worker"] for line in json.loads(capsys.readouterr().out)} == {"a", "b"}


def test_story_of_nothing_known_and_of_no_id(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["story", "0x1", *OPTIONS]) == 1
    assert cli.main(["story", "what", *OPTIONS]) == 2
    assert "neither a context nor CALLER:NUMBER" in capsys.readouterr().err


def test_a_group_that_is_not_there_is_an_error(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--group", "nobody"]) == 1
    assert "no group of this user here has a worker 'nobody'" in capsys.readouterr().err


def test_a_runtime_directory_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["status", "--runtime-dir", missing]) == 1
    assert capsys.readouterr().err.startswith(f"telegrad status: there is no directory {missing!r}")
