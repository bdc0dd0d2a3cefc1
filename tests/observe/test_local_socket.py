"""Looking at a group from a process that is no member, over the sockets of this user."""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.processes import wait_until

from telegrad.agent.agent import Agent
from telegrad.errors import TelegradError
from telegrad.observe import attach as attach_module
from telegrad.observe import local_socket, service
from telegrad.observe.answer import answer as local_answer
from telegrad.observe.attach import GroupEnded, LocalConnection, attach, choose, local_groups, socket_directories
from telegrad.observe.attach_protocol import MOST_OBSERVERS, AttachRequest, receive, send
from telegrad.observe.model import Kind, ViewRequest
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.transport.addresses import OBSERVE_SUFFIX
from telegrad.transport.runtime_directory import GROUP_DIRECTORY

Group = dict[str, Agent]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", str(path))
    monkeypatch.setattr(local_socket, "observe_address", partial(observe_address_in, path))
    path.mkdir(mode=0o700)
    return path


def observe_address_in(directory: Path, address: str) -> str:
    """Return an address in a directory that two groups share: those of `local_group` have one each."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    return f"unix://{directory}/{digest}{OBSERVE_SUFFIX}"


@pytest.fixture
def group(directory: Path) -> Iterator[Group]:
    with local_group(["a", "b"]) as agents:
        for agent in agents.values():
            local_socket.listen(agent)
        yield agents


def test_a_group_is_found_and_all_its_workers_are_seen_without_a_token(group: Group, directory: Path) -> None:
    group["a"].call("b", operator.add, (1, 2))
    wait_until(lambda: not group["b"].server.unanswered())  # it records the call when the reply has left
    made, members = group["a"].client.made, group["a"].peers.members.all()
    with attach(directory=str(directory)) as attached:
        view = attached.look(AttachRequest(ViewRequest(stacks=True, events_since=0), clocks=True))
    assert [worker.name for worker in view.workers] == ["a", "b"]
    assert view.silent == {}
    calls = [event for event in view.workers[0].events if event.kind is Kind.CALL]
    assert [(call.peer, call.what) for call in calls] == [("b", "_operator:add")]
    assert view.workers[1].calls_served == 1
    assert max(view.errors.values()) < 1.0
    assert abs(view.offsets["b"]) <= view.errors["b"]
    # It was no call of the program, and nobody has joined.
    assert group["a"].client.made == made
    assert group["a"].activity() == []
    assert group["a"].peers.members.all() == members


def test_events_are_read_once_if_the_observer_says_which_it_has(group: Group, directory: Path) -> None:
    with attach(directory=str(directory)) as attached:
        view = attached.look(AttachRequest(ViewRequest(events_since=0)))
        since = {worker.name: worker.position() for worker in view.workers}
        group["a"].call("b", operator.add, (1, 2))
        served = group["b"].local.events.since
        wait_until(lambda: any(entry[1] == Kind.SERVE for entry in served(since["b"][1])[0]))
        view = attached.look(AttachRequest(since=since))
    kinds = {worker.name: [event.kind for event in worker.events] for worker in view.workers}
    assert Kind.CALL in kinds["a"]
    assert kinds["b"].count(Kind.SERVE) == 1
    assert all(event.number >= since[worker.name][1] for worker in view.workers for event in worker.events)


def test_two_groups_must_be_told_apart(directory: Path) -> None:
    with local_group(["a", "b"]) as first, local_group(["c", "d"]) as second:
        for agent in (*first.values(), *second.values()):
            local_socket.listen(agent)
        groups = local_groups(directory)
        assert sorted(group.name() for group in groups) == ["a, b", "c, d"]
        with pytest.raises(ValueError, match="2 groups are running here"):
            choose(groups, None)
        assert choose(groups, "d").name() == "c, d"
        with pytest.raises(ValueError, match="no group of this user here has a worker 'e'"):
            choose(groups, "e")


def test_groups_of_launchers_are_found_in_the_directory_that_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directory / "tg-1"
    made.mkdir()
    monkeypatch.setattr(local_socket, "observe_address", partial(observe_address_in, made))
    with local_group(["a", "b"]) as group:
        local_socket.listen(group["a"])
        assert [found.name() for found in local_groups(directory)] == ["a, b"]


def test_directories_of_other_users_and_links_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(attach_module.tempfile, "gettempdir", lambda: str(tmp_path))
    own, link, file = (tmp_path / f"{GROUP_DIRECTORY}{name}" for name in ("own", "link", "file"))
    own.mkdir()
    link.symlink_to(own)
    file.touch()
    assert {path.name for path in socket_directories() if path.parent == tmp_path} == {"run", own.name}
    owner = os.geteuid()
    monkeypatch.setattr(attach_module.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(attach_module, "runtime_directory", lambda: tmp_path / "run")
    assert {path.name for path in socket_directories() if path.parent == tmp_path} == {"run"}


def test_a_worker_that_only_lets_this_host_look_is_seen_through_its_own_socket(directory: Path) -> None:
    with local_group(["a", "b"], settings=AgentSettings(observe="local")) as group:
        local_socket.listen(group["a"])
        with attach(directory=str(directory)) as attached:
            assert "does not let other workers look at it" in attached.look(AttachRequest()).silent["b"]
        local_socket.listen(group["b"])
        with attach(directory=str(directory)) as attached:
            view = attached.look(AttachRequest())
        assert [worker.name for worker in view.workers] == ["a", "b"]


def test_a_worker_can_refuse_to_be_looked_at(directory: Path) -> None:
    with local_group(["a"], settings=AgentSettings(observe="off")) as group:
        local_socket.listen(group["a"])
        assert local_groups(directory) == []


def test_the_socket_is_private_and_removed_when_the_worker_ends(group: Group, directory: Path) -> None:
    paths = list(directory.glob(f"*{OBSERVE_SUFFIX}"))
    assert len(paths) == 2
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    for agent in group.values():
        agent.close()
    assert list(directory.iterdir()) == []


def test_another_user_is_refused(group: Group, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "_CREDENTIALS", Credentials())
    (path, _) = sorted(directory.glob(f"*{OBSERVE_SUFFIX}"))
    connection = LocalConnection(path)
    try:
        with pytest.raises(OSError):
            connection.ask(AttachRequest(who=True))
    finally:
        connection.close()


class Credentials:
    """Says that everybody is somebody else."""

    size = 12

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        return os.getpid(), os.getuid() + 1, 0


def test_a_request_that_is_none_is_answered_with_an_error_and_a_huge_one_ends_the_connection(
    group: Group, directory: Path
) -> None:
    (path, _) = sorted(directory.glob(f"*{OBSERVE_SUFFIX}"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        send(sock, b"nonsense")
        answer = receive(sock, 1 << 20)
        assert answer is not None
        assert b"cannot read the request" in answer
        sock.sendall(b"\xff\xff\xff\xff")
        assert sock.recv(1) == b""


def test_one_observer_too_many_is_told_so(group: Group, directory: Path) -> None:
    paths = sorted(directory.glob(f"*{OBSERVE_SUFFIX}"))
    connections = [LocalConnection(path) for path in paths for _ in range(MOST_OBSERVERS)]
    try:
        for connection in connections:
            assert connection.ask(AttachRequest(who=True)).identity is not None
        with pytest.raises(TelegradError, match="has 8 observers, which is the most"):
            attach(directory=str(directory))
        connections.pop().close()
        wait_until(lambda: bool(local_groups(directory)))
    finally:
        for connection in connections:
            connection.close()


def test_a_worker_that_does_not_answer_is_told_from_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_module, "_QUICK", 0.05)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(directory / f"a{OBSERVE_SUFFIX}"))
        with pytest.raises(ValueError, match="no group of this user runs here"):  # its process is gone
            attach(directory=str(directory))
        stopped.listen()
        with pytest.raises(TelegradError, match="does not answer: it is stopped, or its interpreter is blocked"):
            attach(directory=str(directory))


def test_a_worker_that_stops_answering_delays_a_look_at_the_others_for_a_moment_only(
    group: Group, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "_QUICK", 0.05)
    monkeypatch.setattr(attach_module, "_SLACK", 600.0)  # beyond the time that a test may take
    release = threading.Event()

    def answer(agent: Agent, data: bytes) -> bytes:
        if agent.me.name == "b":
            release.wait(600)
        return local_answer(agent, data)

    with attach(directory=str(directory)) as attached:
        monkeypatch.setattr(local_socket, "answer", answer)
        monkeypatch.setattr(service, "encoded_view", lambda agent, request: b"late" if release.wait(600) else b"")
        try:
            view = attached.look(AttachRequest(timeout=0.2))
        finally:
            release.set()
    assert [worker.name for worker in view.workers] == ["a"]
    assert view.silent == {"b": "it did not answer in time"}


def test_observers_come_again_after_a_shortage_of_descriptors(
    group: Group, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that accepts must not end because of an error that passes."""
    monkeypatch.setattr(local_socket, "_RETRY", 0.01)
    (listener,) = (each for each in group["a"].listeners if isinstance(each, local_socket.LocalObservers))
    failing = FailingOnce(listener._socket)
    listener._socket = failing  # type: ignore[assignment]
    path = Path(listener.address.removeprefix("unix://"))
    for _ in range(3):  # the first is accepted by the call of accept() that was waiting
        connection = LocalConnection(path)
        try:
            identity = connection.ask(AttachRequest(who=True)).identity
        finally:
            connection.close()
        assert identity is not None
    assert failing.failed


class FailingOnce:
    """A listening socket that finds no file descriptor the first time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return self._socket.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


def test_if_the_worker_that_was_asked_ends_another_one_is(group: Group, directory: Path) -> None:
    with attach(directory=str(directory)) as attached:
        assert [worker.name for worker in attached.look(AttachRequest()).workers] == ["a", "b"]
        group["a"].close()
        wait_until(lambda: "a" not in [worker.name for worker in attached.look(AttachRequest()).workers])
        group["b"].close()
        with pytest.raises(GroupEnded, match="the group has ended"):
            attached.look(AttachRequest())
