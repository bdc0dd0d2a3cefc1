"""Looks at a running group from a process that is not a member.

On the same host, as the same user, a group is found by the sockets of its workers. From another host, it is reached at
the address of a member, with the group's token. Either way the group does not notice: an observer is no member, takes
part in nothing, and nobody waits for it.

This module imports neither torch nor an agent, so commands start at once.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from telegrad.errors import ProtocolError, TelegradError, UnknownWorker
from telegrad.observe.attach_protocol import (
    MOST_ANSWER,
    AttachAnswer,
    AttachRequest,
    Identity,
    decode_attach_answer,
    encode,
    receive,
    send,
)
from telegrad.observe.clocks import Sample, best
from telegrad.observe.model import GroupView
from telegrad.transport.addresses import OBSERVE_SUFFIX
from telegrad.transport.runtime_directory import GROUP_DIRECTORY, runtime_directory

_SLACK = 5.0  # seconds that an answer may take beyond the timeout of the request
_QUICK = 2.0  # seconds in which a worker says who it is
_CLOCK_ROUNDS = 4


class Connection(Protocol):
    """A connection to a worker of the group."""

    def ask(self, request: AttachRequest) -> AttachAnswer:
        """Send a request, and return the answer."""

    def close(self) -> None:
        """End the connection."""


class LocalConnection:
    """A connection to the socket of a worker of this host."""

    def __init__(self, path: Path, timeout: float = _QUICK) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: AttachRequest) -> AttachAnswer:
        """Send a request, and return the answer. Raises OSError, or ProtocolError if it is none."""
        return self._ask(request, _QUICK if request.who else request.timeout + _SLACK)

    def ask_about_itself(self, request: AttachRequest, worker: str) -> AttachAnswer:
        """Do the same, but for the worker at the other end alone, which has nobody to wait for."""
        return self._ask(msgspec.structs.replace(request, only=(worker,)), _QUICK)

    def _ask(self, request: AttachRequest, timeout: float) -> AttachAnswer:
        self._socket.settimeout(timeout)
        with suppress(BrokenPipeError):  # a worker that refuses says why, and closes, before it reads anything
            send(self._socket, encode(request))
        data = receive(self._socket, MOST_ANSWER)
        if data is None:
            raise ConnectionResetError(f"the worker at {self._path} has ended the connection")
        return parse(data)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def parse(data: bytes | bytearray | memoryview) -> AttachAnswer:
    """Return the answer in a message."""
    try:
        return decode_attach_answer(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the worker answered with something else: {error}; use the same telegrad on both"
        ) from error


class LocalGroup(msgspec.Struct, frozen=True):
    """A group with workers on this host."""

    workers: tuple[tuple[Identity, Path], ...]
    """Those on this host, by id, with their sockets."""

    def name(self) -> str:
        """Name the group by its workers."""
        names = sorted({name for identity, _ in self.workers for name in identity.group} or {"?"})
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def matches(self, wanted: str) -> bool:
        """Return whether it is the wanted one: one of its workers has this name or process id."""
        return any(wanted in (str(identity.pid), *identity.group) for identity, _ in self.workers)


def local_groups(directory: Path | None = None, silent: list[str] | None = None) -> list[LocalGroup]:
    """Return the groups that have workers of this user on this host.

    What is known of workers that live and cannot be looked at is appended to `silent`.
    """
    found: list[tuple[Identity, Path]] = []
    silent = [] if silent is None else silent
    directories = socket_directories() if directory is None else [directory, *directory.glob(f"{GROUP_DIRECTORY}*")]
    for path in [path for each in directories for path in sorted(each.glob(f"*{OBSERVE_SUFFIX}"))]:
        try:
            connection = LocalConnection(path)
        except OSError:  # it has just ended, or was killed: the next worker that starts removes the socket
            continue
        try:
            answer = connection.ask(AttachRequest(who=True))
        except TimeoutError:
            silent.append(f"the worker at {path} does not answer: it is stopped, or its interpreter is blocked")
            continue
        except TelegradError as error:
            silent.append(f"the worker at {path} cannot be understood: {error}")
            continue
        except OSError:  # as above
            continue
        finally:
            connection.close()
        if answer.identity is not None:
            found.append((answer.identity, path))
        else:
            silent.append(answer.error)
    return join_groups(found)


def socket_directories() -> list[Path]:
    """Return where sockets of this user's workers may be: the runtime directory, and those of launchers' groups."""
    own = runtime_directory()
    parents = dict.fromkeys([str(own), tempfile.gettempdir(), "/tmp"])
    launched = [path for parent in parents for path in sorted(Path(parent).glob(f"{GROUP_DIRECTORY}*"))]
    return list(dict.fromkeys([own, *(path for path in launched if _belongs_to_this_user(path))]))


def _belongs_to_this_user(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # it was just removed
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def join_groups(found: Iterable[tuple[Identity, Path]]) -> list[LocalGroup]:
    """Return which workers belong together: those that know each other."""
    groups: list[list[tuple[Identity, Path]]] = []
    for identity, path in sorted(found, key=lambda each: (each[0].id, each[0].name)):
        known = {*identity.group.values(), identity.incarnation}
        own = [group for group in groups if any(not known.isdisjoint(other.group.values()) for other, _ in group)]
        groups = [group for group in groups if group not in own]
        groups.append([each for group in own for each in group] + [(identity, path)])
    return [LocalGroup(tuple(group)) for group in groups]


def choose(groups: Sequence[LocalGroup], wanted: str | None, silent: Sequence[str] = ()) -> LocalGroup:
    """Return the group to look at. Raises an error that lists them if that is not clear, or who is `silent`."""
    if wanted is not None:
        groups = [group for group in groups if group.matches(wanted)]
    if len(groups) == 1:
        return groups[0]
    if not groups and silent:
        raise TelegradError("no worker can be looked at:\n" + "\n".join(f"  {each}" for each in silent))
    if not groups:
        what = f"no group of this user here has a worker {wanted!r}" if wanted else "no group of this user runs here"
        raise UnknownWorker(
            f"{what}. Set TELEGRAD_RUNTIME_DIR as the workers have it, or use --address tcp://HOST:PORT of a member, "
            "and TELEGRAD_TOKEN"
        )
    listed = "\n".join(f"  --group {group.workers[0][0].pid:<8} {group.name()}" for group in groups)
    raise UnknownWorker(f"{len(groups)} groups are running here; choose one:\n{listed}")


class GroupEnded(TelegradError):
    """The group that was looked at is gone."""


class Attached:
    """An observer of a group. Close it, or use it in a ``with`` statement."""

    def __init__(
        self, connection: Connection, others: Sequence[tuple[Identity, Path]] = (), same_host: bool = True
    ) -> None:
        self._connection = connection
        self._others = list(others)  # of this host: asked if the first one has ended, or if they do not let it look
        self._same_host = same_host

    def look(self, request: AttachRequest) -> GroupView:
        """Return what can be seen of the group. Raises `GroupEnded` if none of its workers can be asked any more."""
        while True:
            try:
                return self._look(request)
            except OSError as error:
                self._ask_another(error)

    def _ask_another(self, error: OSError) -> None:
        """Connect to another worker of this host, because the one that was asked has ended."""
        self._connection.close()
        while self._others:
            (_, path), *self._others = self._others
            try:
                self._connection = LocalConnection(path)
            except OSError:  # it has ended, too
                continue
            return
        raise GroupEnded(f"the group has ended, or its workers do not answer any more: {error}") from error

    def _look(self, request: AttachRequest) -> GroupView:
        shift = 0.0 if self._same_host else self._offset()
        answer = self._connection.ask(request)
        if answer.group is None:
            raise TelegradError(answer.error or "the worker gave no view of its group")
        view = answer.group
        for identity, path in self._others:
            if identity.name in view.silent:
                view = _merged(view, identity.name, _ask_directly(identity, path, request))
        offsets = {name: offset + shift for name, offset in view.offsets.items()}
        return msgspec.structs.replace(view, offsets=offsets, now=time.monotonic())

    def _offset(self) -> float:
        """Return what to add to the times of the asked worker to get this process's."""
        samples = []
        for _ in range(_CLOCK_ROUNDS):
            asked = time.monotonic()
            identity = self._connection.ask(AttachRequest(who=True)).identity
            answered = time.monotonic()
            if identity is not None:
                samples.append(Sample(asked, answered, identity.now))
        return best(samples).offset if samples else 0.0

    def close(self) -> None:
        """Stop looking."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ask_directly(identity: Identity, path: Path, request: AttachRequest) -> GroupView | None:
    try:
        connection = LocalConnection(path)
    except OSError:  # it is still silent
        return None
    try:
        return connection.ask_about_itself(request, identity.name).group
    except (OSError, TelegradError):  # as above
        return None
    finally:
        connection.close()


def _merged(view: GroupView, name: str, own: GroupView | None) -> GroupView:
    if own is None or not own.workers:
        return view
    return GroupView(
        tuple(sorted((*view.workers, *own.workers), key=lambda each: each.id)),
        {other: reason for other, reason in view.silent.items() if other != name},
        {**view.offsets, name: 0.0},  # on one host all processes have one clock
        {**view.errors, name: 0.0},
        view.now,
    )


def attach(address: str | None = None, group: str | None = None, directory: str | None = None) -> Attached:
    """Attach to a group: at the address of a member, or else to one with workers of this user on this host.

    `group` is the name or process id of one of its workers, if there are several groups. `directory` is where their
    sockets are, if not where those of this user are.
    """
    if address is not None:
        from telegrad.observe.remote import RemoteConnection

        return Attached(RemoteConnection(address), same_host=False)
    if directory is not None and not Path(directory).is_dir():
        raise TelegradError(f"there is no directory {directory!r}, in which to look for the sockets of workers")
    silent: list[str] = []
    chosen = choose(local_groups(None if directory is None else Path(directory), silent), group, silent)
    problem: OSError | None = None
    for identity, path in chosen.workers:
        try:
            connection = LocalConnection(path)
        except OSError as error:
            problem = error
            continue
        return Attached(connection, [each for each in chosen.workers if each[0].name != identity.name])
    raise TelegradError(f"the workers of the group {chosen.name()} have just ended: {problem}") from problem
