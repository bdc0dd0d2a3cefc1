"""Opens the torch store through which the workers of a group find each other (see `telegrad.rendezvous`)."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous

from telegrad.connection.worker_record import MAX_ID
from telegrad.environment.advice import address_advice
from telegrad.errors import RendezvousError, RendezvousTimeout
from telegrad.interrupts import interruptible
from telegrad.rendezvous_file import SharedFileStore
from telegrad.transport.ports import describe_ports
from telegrad.waiting_report import WaitingReport, seconds

_log = logging.getLogger("telegrad")

_MAX_PAUSE = 0.1
_FIRST_LOG = 10.0  # seconds of waiting after which it is logged: importing torch takes some on a busy machine
_UNKNOWN_HOST_LIMIT = 5.0  # seconds for which a host name may be unknown: name servers have moments of weakness
_MIN_FREE = 4096  # bytes that a rendezvous file needs at least
MAX_TIMEOUT = 10.0 * 365 * 86400


class OpenedStore(NamedTuple):
    """The store of a group, and what this worker knows of its place in the group."""

    store: Store
    rank: int
    """-1 in an open group: any free one."""
    world_size: int
    """0: the group is open."""
    address: tuple[str, int] | None
    """Host and port of the store if it has any."""
    is_host: bool
    """Whether this process hosts the store."""


def open_store(
    init_method: str | None, rank: int, world_size: int | None, timeout: float, ports: Sequence[int] = ()
) -> OpenedStore:
    """Open the group's store, and find out this worker's rank and the world size.

    `init_method` is a URL in the format of torch.distributed, ``env://`` by default. If the environment names no
    address for ``env://``, it is the rendezvous of the launcher, TELEGRAD_INIT_METHOD, if there is one. A rank of -1
    and a world size of None or -1 are read from the URL, or else from RANK and WORLD_SIZE. If there is no world size
    anywhere, or it is 0, the group is open, and the rank may remain -1. This does not wait for the other workers:
    `telegrad.rendezvous.assemble` does, and names the missing ones. If there are `ports`, a store that this process
    hosts must have one of them.
    """
    deadline = time.monotonic() + min(timeout, MAX_TIMEOUT)
    if init_method in (None, "env://") and not os.environ.get("MASTER_ADDR"):
        init_method = os.environ.get("TELEGRAD_INIT_METHOD", init_method)
    url = _split(init_method or "env://")
    query = dict(parse_qsl(url.query))
    world_size = _world_size(world_size, query.pop("world_size", None), init_method)
    rank = _number("rank", rank, query.pop("rank", None), "RANK", None if world_size else -1)
    if world_size:
        check_rank(rank, world_size)
    elif not -1 <= rank <= MAX_ID:
        raise RendezvousError(f"invalid rank {rank}: the ranks of an open group are 0 to {MAX_ID}")
    address = _store_address(url)
    is_host = False
    if address is not None:
        is_host = rank == 0 and not launcher_hosts()
        if is_host and ports and address[1] not in ports:
            raise RendezvousError(
                f"rank 0 cannot host the rendezvous store at port {address[1]}: TELEGRAD_PORTS or the option ports "
                f"allows only {describe_ports(ports)}. Choose one of these (MASTER_PORT), or add this one"
            )
        # A world size of -1 tells the handlers of tcp:// and env:// not to wait until all have connected. Rank 0 hosts.
        query.update(rank="0" if rank == 0 else "1", world_size="-1")
        _check_host(address[0], min(deadline, time.monotonic() + _UNKNOWN_HOST_LIMIT))
        if not is_host:
            _wait_for_server(*address, deadline, timeout, rank)
    else:
        query.update(rank="0", world_size="-1")
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        if url.scheme == "file":
            file = SharedFileStore(url.path, left.total_seconds())
            file.check([])  # raises if it cannot be opened, or is locked for ever
            return OpenedStore(file, rank, world_size, None, False)
        store = next(rendezvous(urlunsplit(url._replace(query=urlencode(query))), timeout=left))[0]
    except (RuntimeError, ValueError, OSError) as error:
        _raise_explained(error, init_method or "env://", address, timeout)
    if address is not None and isinstance(store, TCPStore):
        address = (address[0], store.port)
    if address is None:
        # A store of a launcher may know a host that all workers reach; they advertise their address on the way there.
        address = getattr(store, "address", None)
    return OpenedStore(store, rank, world_size, address, is_host)


def launcher_hosts() -> bool:
    """Return whether the launcher hosts TCP stores, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _world_size(given: int | None, in_url: str | None, init_method: str | None) -> int:
    """Return the world size, 0 for an open group. Raises if the launcher has started fewer workers."""
    size = _number("world_size", -1 if given is None else given, in_url, "WORLD_SIZE", 0)
    started = os.environ.get("WORLD_SIZE", "")
    local = init_method is not None and init_method == os.environ.get("TELEGRAD_INIT_METHOD")
    by_launcher = local or (launcher_hosts() and (init_method or "env://").startswith("env://"))
    if by_launcher and started.isdecimal() and size > int(started):
        raise RendezvousError(
            f"init_rpc was called for {size} workers, but the launcher has started {started}: start as many as the "
            "program needs, or leave out world_size"
        )
    return size


class WaitLog:
    """Logs what a worker waits for in the rendezvous; see `telegrad.waiting_report` for how often."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._report = WaitingReport(time.monotonic(), _FIRST_LOG)

    def log_if_due(self, what: Callable[[], str]) -> None:
        """Log the wait if it is time to. `what` returns what the worker waits for; empty: nothing to log."""
        now = time.monotonic()
        if self._report.is_due(now) and (text := what()):
            _log.warning("%s has waited %s for %s", self._who, seconds(self._report.elapsed(now)), text)


def store_address(init_method: str) -> tuple[str, int] | None:
    """Return host and port of the store that `init_method` names, or None if it is not a TCP store."""
    return _store_address(_split(init_method))


def check_rank(rank: int, world_size: int) -> None:
    """Raise an error if a group cannot have this size, or no worker with this rank."""
    if not 1 <= world_size <= MAX_ID + 1:
        raise RendezvousError(f"invalid world size {world_size}: a group has 1 to {MAX_ID + 1} workers")
    if not 0 <= rank < world_size:
        raise RendezvousError(f"invalid rank {rank}: the ranks of {world_size} workers are 0 to {world_size - 1}")


@interruptible
def pause(start: float, deadline: float) -> None:
    """Sleep for a tenth of the time waited so far, to be quick for fast groups and cheap for slow ones."""
    now = time.monotonic()
    time.sleep(max(0.001, min((now - start) / 10, _MAX_PAUSE, deadline - now)))


def _split(init_method: str) -> SplitResult:
    try:
        url = urlsplit(init_method)
        _ = url.port  # raises if the port is not a number
    except ValueError as error:
        raise RendezvousError(f"init_method {init_method!r} is not a URL: {error}") from error
    if url.scheme == "file" and not os.path.isdir(os.path.dirname(url.path)):
        # Torch would retry to open the file for five minutes.
        raise RendezvousError(f"init_method {init_method!r} must be the full path of a file in an existing directory")
    if url.scheme == "file" and _is_full(url.path):
        # Torch would abort the process when it cannot write to the file.
        raise RendezvousError(
            f"no space is left for the rendezvous file {url.path}; remove files from its file system, or choose an "
            "init_method on another one"
        )
    if not url.scheme:
        raise RendezvousError(f"init_method {init_method!r} must begin with env://, tcp:// or file://")
    return url


def _is_full(path: str) -> bool:
    """Return whether the file system of `path` has no room for the records of a group."""
    status = os.statvfs(os.path.dirname(path))
    has_no_inode = status.f_files > 0 and status.f_favail == 0 and not os.path.exists(path)
    return has_no_inode or status.f_bavail * status.f_frsize < _MIN_FREE


def _number(what: str, given: int, in_url: str | None, variable: str, default: int | None) -> int:
    if in_url is not None and given != -1 and str(given) != in_url:
        raise RendezvousError(f"the {what} argument is {given}, but the init_method says {in_url}; pass only one")
    if given != -1:
        return given
    text = os.environ.get(variable) if in_url is None else in_url
    if not text and default is not None:
        return default
    if not text:
        raise RendezvousError(f"the {what} is unknown: pass {what}= to init_rpc, or set {variable}")
    try:
        return int(text)
    except ValueError as error:
        raise RendezvousError(f"the {what} must be a number, but {variable} or the URL says {text!r}") from error


def _store_address(url: SplitResult) -> tuple[str, int] | None:
    """Return the address at which rank 0 hosts the TCP store of this URL, or None if the URL names no TCP store."""
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise RendezvousError(
                f"init_method {urlunsplit(url)!r} must contain host and port of rank 0, as in tcp://10.0.0.1:29500"
            )
        return url.hostname, url.port
    if url.scheme != "env":
        return None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if not host or not port:
        raise RendezvousError(
            f"{' and '.join(missing)} must be set for env://: a host name and a free port of rank 0's machine; "
            f"{address_advice(os.environ, _program())}"
        )
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise RendezvousError(f"MASTER_PORT must be a port from 0 to 65535, not {port!r}")
    return host, int(port)


def _program() -> str:
    """Return the script that runs, as a shell would name it; empty at a prompt or in a notebook."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return shlex.quote(os.path.relpath(main)) if main and os.path.exists(main) else ""


@interruptible
def _check_host(host: str, deadline: float) -> None:
    """Raise an error if nobody knows the address of the store's host."""
    start = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                raise RendezvousError(
                    f"the host name {host!r} is unknown ({error}): check MASTER_ADDR or the init_method, which must "
                    "name the machine of rank 0"
                ) from error
            pause(start, deadline)
        else:
            return


@interruptible
def _wait_for_server(host: str, port: int, deadline: float, timeout: float, rank: int) -> None:
    """Return once something listens at the store's address.

    Torch's own client would wait too, but it logs a stack trace for every second that rank 0 is late.
    """
    start = time.monotonic()
    log = WaitLog(f"the worker with rank {rank}" if rank >= 0 else "this worker")
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.05)).close()
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise _unreachable(host, port, timeout, error) from error
            log.log_if_due(partial("the rendezvous store at {}:{}, which rank 0 hosts ({})".format, host, port, error))
            pause(start, deadline)
        else:
            return


def _unreachable(host: str, port: int, timeout: float, error: Exception) -> RendezvousTimeout:
    return RendezvousTimeout(
        f"cannot reach the rendezvous store at {host}:{port} after {timeout:g} s ({error}). Is rank 0 running, are "
        "MASTER_ADDR and MASTER_PORT (or the init_method) the same everywhere, and is this port open in the firewall?"
    )


def _raise_explained(error: Exception, init_method: str, address: tuple[str, int] | None, timeout: float) -> NoReturn:
    text = str(error)
    if address is not None and "EADDRINUSE" in text:
        raise RendezvousError(
            f"rank 0 cannot host the rendezvous store: port {address[1]} is in use on this machine, by another process "
            "with rank 0 or by another program. Choose another port (MASTER_PORT)"
        ) from error
    if address is not None and "timed out" in text:
        raise _unreachable(*address, timeout, error) from error
    if "No rendezvous handler" in text:
        text += ". Use env://, tcp://host:port or file:///path"
    raise RendezvousError(f"cannot open the rendezvous store {init_method!r}: {text}") from error
