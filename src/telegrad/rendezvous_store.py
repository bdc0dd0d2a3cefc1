"""Opens the torch store through which the workers of a group find each other (see `telegrad.rendezvous`)."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import NoReturn
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous

from telegrad.connection.worker_record import MAX_ID
from telegrad.errors import RendezvousError, RendezvousTimeout
from telegrad.interrupts import interruptible

_MAX_PAUSE = 0.1
_MIN_FREE = 4096  # bytes that a rendezvous file needs at least
MAX_TIMEOUT = 10.0 * 365 * 86400


def open_store(
    init_method: str | None, rank: int, world_size: int | None, timeout: float
) -> tuple[Store, int, int, tuple[str, int] | None]:
    """Return the group's store, this worker's rank, the world size, and the store's host and port if it has any.

    `init_method` is a URL in the format of torch.distributed, ``env://`` by default. A rank of -1 and a world size of
    None or -1 are read from the URL, or else from RANK and WORLD_SIZE. This does not wait for the other workers:
    `telegrad.rendezvous.assemble` does, and names the missing ones.
    """
    deadline = time.monotonic() + min(timeout, MAX_TIMEOUT)
    url = _split(init_method or "env://")
    query = dict(parse_qsl(url.query))
    rank = _number("rank", rank, query.pop("rank", None), "RANK")
    world_size = _number(
        "world_size", -1 if world_size is None else world_size, query.pop("world_size", None), "WORLD_SIZE"
    )
    check_rank(rank, world_size)
    address = _store_address(url)
    if address is not None:
        # A world size of -1 tells the handlers of tcp:// and env:// not to wait until all have connected.
        query.update(rank=str(rank), world_size="-1")
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _wait_for_server(*address, deadline, timeout)
    else:
        query.update(rank=str(rank), world_size=str(world_size))
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        store = next(rendezvous(urlunsplit(url._replace(query=urlencode(query))), timeout=left))[0]
    except (RuntimeError, ValueError, OSError) as error:
        _raise_explained(error, init_method or "env://", address, timeout)
    if address is not None and isinstance(store, TCPStore):
        address = (address[0], store.port)
    return store, rank, world_size, address


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


def _number(what: str, given: int, in_url: str | None, variable: str) -> int:
    if in_url is not None and given != -1 and str(given) != in_url:
        raise RendezvousError(f"the {what} argument is {given}, but the init_method says {in_url}; pass only one")
    if given != -1:
        return given
    text = os.environ.get(variable) if in_url is None else in_url
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
            f"{' and '.join(missing)} must be set for env://: a host name and a free port of rank 0's machine. "
            "Set them, run under torchrun, or pass init_method='tcp://host:port'"
        )
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise RendezvousError(f"MASTER_PORT must be a port from 0 to 65535, not {port!r}")
    return host, int(port)


@interruptible
def _wait_for_server(host: str, port: int, deadline: float, timeout: float) -> None:
    """Return once something listens at the store's address.

    Torch's own client would wait too, but it logs a stack trace for every second that rank 0 is late.
    """
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.05)).close()
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise _unreachable(host, port, timeout, error) from error
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
    raise RendezvousError(f"cannot open the rendezvous store {init_method!r}: {text}") from error
