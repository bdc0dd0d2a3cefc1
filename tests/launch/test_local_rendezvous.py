"""The rendezvous that the launcher hosts: names, store, directory, token."""

from __future__ import annotations

import os
import stat
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.processes import ResourceSnapshot
from torch.distributed import TCPStore

from telegrad.launch.local_rendezvous import LocalRendezvous, worker_names


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (0, "1 to 65536 workers, but 0 were"),
        (-1, "but -1 were"),
        ([], "but 0 were"),
        (["a", "b", "a"], "'a' is given more than once"),
        (["a", "no spaces"], "no spaces"),
        (["a", ""], "''"),
        ("ab", "not the string 'ab'"),
    ],
)
def test_invalid_groups_are_refused_with_a_reason(workers: int | list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        worker_names(workers)


def test_workers_without_names_are_numbered() -> None:
    assert worker_names(3) == ["worker0", "worker1", "worker2"]
    assert worker_names(("ps", "trainer-0")) == ["ps", "trainer-0"]


def test_a_client_reaches_the_store_at_the_address_in_the_environment() -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        variables = rendezvous.environment(0)
        client = TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), timeout=timedelta(seconds=60))
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_the_directory_is_private_and_short_and_removed_at_the_end() -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        directory = Path(rendezvous.environment(0)["TELEGRAD_RUNTIME_DIR"])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 55
        (directory / "socket").touch()
    assert not directory.exists()


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with LocalRendezvous(["a"]) as rendezvous:
        assert rendezvous.directory.startswith("/tmp/tg-")


def test_every_group_has_its_own_token() -> None:
    with LocalRendezvous(["a"]) as one, LocalRendezvous(["a"]) as other:
        tokens = {os.pread(rendezvous.token_descriptor, 100, 0) for rendezvous in (one, other)}
    assert len(tokens) == 2
    assert {len(token) for token in tokens} == {64}


def test_a_token_of_the_launcher_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELEGRAD_TOKEN", "TELEGRAD_TOKEN_FD", "TELEGRAD_TOKEN_FILE"):
        monkeypatch.setenv(name, "of another group")
    with LocalRendezvous(["a"]) as rendezvous:
        assert "of another group" not in rendezvous.environment(0).values()


def test_a_closed_rendezvous_leaves_no_thread_and_no_descriptor() -> None:
    with LocalRendezvous(["a"]):
        pass  # torch keeps some resources after the first one
    before = ResourceSnapshot()
    with LocalRendezvous(["a"]):
        pass
    before.wait_until_restored()


def test_a_number_of_threads_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert rendezvous.environment(0)["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert rendezvous.environment(0)["OMP_NUM_THREADS"] == "3"
