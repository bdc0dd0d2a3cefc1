"""Unix sockets: only processes of this user can connect, and files of dead processes are removed."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad.errors import AuthenticationError
from telegrad.transport import unix
from telegrad.transport.base import Link, Listener
from telegrad.transport.unix import UnixTransport


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "a.sock")


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = UnixTransport().listen(f"unix://{path}")
    yield listener
    listener.close()


def connect(path: Path) -> Link:
    return UnixTransport().connect(f"unix://{path}", time.monotonic() + 20)


def leave_a_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()


def test_only_the_owner_can_use_the_socket(listener: Listener, path: Path) -> None:
    assert listener.address == f"unix://{path}"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_links_describe_their_peer_by_path_and_process(listener: Listener, path: Path) -> None:
    here = connect(path)
    there = listener.accept()
    assert there is not None
    assert here.peer == f"{path} (pid {os.getpid()})"
    assert there.peer == f"pid {os.getpid()}"
    assert not here.resumable
    assert not there.resumable
    here.close()
    there.close()


def test_a_socket_is_reachable_if_it_is_there_and_belongs_to_this_user(
    listener: Listener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaches = UnixTransport().reaches
    assert reaches(listener.address)
    assert not reaches(f"unix://{path}x")
    path.with_name("file").touch()
    assert not reaches(f"unix://{path.with_name('file')}")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not reaches(listener.address)


def test_the_file_has_its_final_name_only_when_it_listens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int, list[str]]] = []
    rename = Path.rename

    def look_and_rename(self: Path, target: Path) -> Path:
        with socket.socket(socket.AF_UNIX) as sock:
            answers = sock.connect_ex(str(self))
        seen.append((self == path, answers, [name.name for name in path.parent.glob("*.sock")]))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look_and_rename)
    UnixTransport().listen(f"unix://{path}").close()
    assert seen == [(False, 0, [])]


def test_no_file_remains_when_listening_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        UnixTransport().listen(f"unix://{path}")
    assert list(path.parent.iterdir()) == []


def test_closing_removes_the_file_and_abandoning_does_not(path: Path) -> None:
    listener = UnixTransport().listen(f"unix://{path}")
    listener.abandon()
    assert path.exists()
    listener.close()
    assert not path.exists()


def test_the_file_of_a_dead_process_is_replaced(path: Path) -> None:
    leave_a_dead_socket(path)
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    listener = UnixTransport().listen(f"unix://{path}")
    connect(path).close()
    listener.close()


def test_a_file_that_is_not_a_socket_is_not_replaced(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OSError, match="is in use"):
        UnixTransport().listen(f"unix://{path}")
    assert UnixTransport().remove_dead(f"unix://{path}")
    assert path.read_text() == "precious"


def test_a_path_in_a_directory_that_does_not_exist_is_an_oserror(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        UnixTransport().listen(f"unix://{path.parent}/nowhere/a.sock")
    with pytest.raises(ConnectionRefusedError, match="there is no socket"):
        connect(path.parent / "nowhere" / "a.sock")


def test_remove_dead_removes_the_socket_of_a_dead_process(path: Path) -> None:
    leave_a_dead_socket(path)
    assert UnixTransport().remove_dead(f"unix://{path}")
    assert not path.exists()
    assert UnixTransport().remove_dead(f"unix://{path}")  # there is nothing left


def test_remove_dead_leaves_the_socket_of_a_live_process(listener: Listener, path: Path) -> None:
    assert not UnixTransport().remove_dead(listener.address)
    assert path.exists()


def test_remove_dead_leaves_a_live_process_whose_backlog_is_full(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        assert not UnixTransport().remove_dead(f"unix://{path}")
        assert path.exists()
        with pytest.raises(OSError, match="is in use"):
            UnixTransport().listen(f"unix://{path}")


def test_a_listener_refuses_a_process_of_another_user(
    listener: Listener, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unix, "_peer_credentials", lambda sock: (4711, os.getuid() + 1))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        stranger.connect(str(path))
        assert listener.accept() is None
        assert stranger.recv(1) == b""
    assert f"process 4711 runs as user {os.getuid() + 1}" in caplog.text


def test_a_refused_connection_does_not_hide_the_next_one(
    listener: Listener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = iter([os.getuid() + 1, os.getuid()])
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as friend:
        stranger.connect(str(path))
        friend.connect(str(path))
        monkeypatch.setattr(unix, "_peer_credentials", lambda sock: (1, next(uids)))
        link = listener.accept()
        assert link is not None
        link.close()


def test_a_link_to_a_listener_of_another_user_is_refused(
    listener: Listener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "_peer_credentials", lambda sock: (4711, os.getuid() + 1))
    with pytest.raises(AuthenticationError, match=f"runs as user {os.getuid() + 1}"):
        connect(path)


def test_the_kernel_reports_the_credentials_of_the_peer() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert unix._peer_credentials(here) == (os.getpid(), os.getuid())
