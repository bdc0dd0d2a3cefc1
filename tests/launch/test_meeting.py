from __future__ import annotations

import stat
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from support.witnesses import Belongings
from telegrad.launch.meeting import Meeting, worker_names


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (0, "1 to 65536 workers, but 0 were"),
        (-1, "but -1 were"),
        ([], "but 0 were"),
        (["a", "b", "a"], "'a' is given more than once"),
        (["a", "no spaces"], "invalid worker name 'no spaces'"),
        (["a", ""], "invalid worker name ''"),
        ("ab", "not the string 'ab'"),
    ],
)
def test_impossible_groups_are_refused_with_a_reason(workers: int | list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        worker_names(workers)


def test_workers_are_numbered_unless_they_have_names() -> None:
    assert worker_names(3) == ["worker0", "worker1", "worker2"]
    assert worker_names(("ps", "trainer-0")) == ["ps", "trainer-0"]


def test_a_client_reaches_the_store_at_the_address_in_the_environment() -> None:
    with Meeting(["a"]) as meeting:
        variables = meeting.environment(0)
        client = TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), timeout=timedelta(seconds=60))
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_the_directory_is_private_and_short_and_goes_with_the_meeting() -> None:
    with Meeting(["a"]) as meeting:
        directory = Path(meeting.environment(0)["TELEGRAD_RUNTIME_DIR"])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 55
        (directory / "socket").touch()
    assert not directory.exists()


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Meeting(["a"]) as meeting:
        assert meeting.directory.startswith("/tmp/tg-")


def test_every_group_has_a_token_of_its_own() -> None:
    with Meeting(["a"]) as one, Meeting(["a"]) as other:
        tokens = {one.environment(0)["TELEGRAD_TOKEN"], other.environment(0)["TELEGRAD_TOKEN"]}
    assert len(tokens) == 2
    assert {len(token) for token in tokens} == {64}


def test_a_closed_meeting_leaves_no_thread_and_no_descriptor() -> None:
    with Meeting(["a"]):
        pass  # the first in a process leaves what torch keeps for all of them
    before = Belongings()
    with Meeting(["a"]):
        pass
    before.wait_until_as_before()


def test_the_number_of_threads_is_left_to_whoever_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Meeting(["a"]) as meeting:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert meeting.environment(0)["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert meeting.environment(0)["OMP_NUM_THREADS"] == "3"
