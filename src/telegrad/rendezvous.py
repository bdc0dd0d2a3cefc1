"""Brings the workers of a group together over one of torch's stores, so that each knows who the others are.

The rules:

1. A worker *claims* its name, then its rank. Each claim is one compare-and-set, so of two workers one learns of the
   other. The rank comes last: once every rank is claimed, all that can be wrong has been found.
2. There is one *verdict*, again a compare-and-set: whoever sees every rank claimed says "complete", whoever sees a
   conflict or loses patience says why not. The first verdict holds for everybody. So either all go on or none does,
   and a worker that comes after it fails alone.
3. A worker that knows the verdict says so, and is then done with the store. Rank 0, in whose process the store may
   live, waits for that.

The store is not trusted: what it holds is plain data, limited in size and checked. Polling `check` takes the place of
``store.wait``, which logs a warning on every timeout (TCPStore), knows whole seconds only (FileStore), and cannot be
interrupted from the keyboard.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, NoReturn
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous

from telegrad.connection.worker_record import MAX_ID, WorkerRecord, check_id, check_name
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from telegrad.interrupts import interruptible
from telegrad.transport.addresses import parse_address

MAX_RECORD = 64 * 1024
FAREWELL = 2.0
"""Seconds for which rank 0 keeps the store for others after a failure, even if the timeout has passed."""

_LONGEST_PAUSE = 0.1
_LONGEST_TIMEOUT = 10.0 * 365 * 86400
_LISTED = 32
"""How many workers an error names, so that it fits into the store and on a screen."""

_FIRST = "first"
_VERDICT = "verdict"


class Claim(msgspec.Struct, frozen=True):
    """What one worker puts into the store: its record, and what others need to find it by hand."""

    record: WorkerRecord
    world_size: int
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"worker {self.record.name!r} (rank {self.record.id}, pid {self.pid} on {self.machine})"


class Verdict(msgspec.Struct, frozen=True):
    """What has become of the group."""

    outcome: Literal["complete", "duplicate", "timeout", "error"]
    message: str = ""


_ERRORS: dict[str, type[RendezvousError]] = {
    "duplicate": DuplicateWorker,
    "timeout": RendezvousTimeout,
    "error": RendezvousError,
}


def open_store(
    init_method: str | None, rank: int, world_size: int | None, timeout: float
) -> tuple[Store, int, int, tuple[str, int] | None]:
    """Return the group's store, this worker's rank, the world size, and the store's host and port if it has any.

    `init_method` is a URL as torch.distributed takes it, ``env://`` by default. A rank of -1 and a world size of None
    or -1 come from the URL, else from RANK and WORLD_SIZE. The store does not wait for the other workers: `assemble`
    does, and can say who is missing.
    """
    deadline = time.monotonic() + min(timeout, _LONGEST_TIMEOUT)
    url = _split(init_method or "env://")
    query = dict(parse_qsl(url.query))
    rank = _number("rank", rank, query.pop("rank", None), "RANK")
    world_size = _number(
        "world_size", -1 if world_size is None else world_size, query.pop("world_size", None), "WORLD_SIZE"
    )
    _check_place(rank, world_size)
    address = _store_address(url)
    if address is not None:
        # To the handlers of tcp:// and env://, -1 means: do not wait until all have connected.
        query.update(rank=str(rank), world_size="-1")
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _await_server(*address, deadline, timeout)
    else:
        query.update(rank=str(rank), world_size=str(world_size))
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        store = next(rendezvous(urlunsplit(url._replace(query=urlencode(query))), timeout=left))[0]
    except (RuntimeError, ValueError, OSError) as error:
        _explain(error, init_method or "env://", address, timeout)
    if address is not None and isinstance(store, TCPStore):
        address = (address[0], store.port)
    return store, rank, world_size, address


def store_address(init_method: str) -> tuple[str, int] | None:
    """Host and port of the store that `init_method` names; None if it has no such store, as a file."""
    return _store_address(_split(init_method))


def assemble(store: Store, me: WorkerRecord, world_size: int, timeout: float) -> list[WorkerRecord]:
    """Tell the group about `me`, wait until all have come, and return everybody's record in the order of their ids.

    Every group needs a store, or a PrefixStore, of its own. Raises DuplicateWorker, RendezvousTimeout, or
    RendezvousError; before the group is complete, all who wait get the same one.
    """
    _check_place(me.id, world_size)
    mine = Claim(me, world_size, os.getpid(), socket.gethostname())
    if len(_encode(mine)) > MAX_RECORD:
        raise RendezvousError(f"the record of worker {me.name!r} has more than {MAX_RECORD} bytes")
    _check_claim(mine, me.id)
    start = time.monotonic()
    deadline = start + min(timeout, _LONGEST_TIMEOUT)
    ranks = range(world_size)
    placed = False
    try:
        try:
            _claim_place(store, mine)
            placed = True
            _await_verdict(store, mine, start, deadline)
            claims = _read_claims(store, ranks)
        except RendezvousError:
            _take_leave(store, me.id, placed, _who_came(store, world_size), time.monotonic() + FAREWELL)
            raise
        _take_leave(store, me.id, placed, ranks, deadline)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"worker {me.name!r} (rank {me.id}) lost the rendezvous store before the group was complete: {error}. The "
            "process that holds the store, most often rank 0, has probably exited: look at its output"
        ) from error
    return [claim.record for claim in claims]


# Opening the store


def _split(init_method: str) -> SplitResult:
    try:
        url = urlsplit(init_method)
        _ = url.port  # a port that is no number raises here, and not where it would go unexplained
    except ValueError as error:
        raise RendezvousError(f"the init_method {init_method!r} is not a URL: {error}") from error
    if url.scheme == "file" and not os.path.isdir(os.path.dirname(url.path)):
        # Torch would try to open the file for five minutes.
        raise RendezvousError(f"{init_method!r} must name a file by its full path, in a directory that exists")
    if not url.scheme:
        raise RendezvousError(f"the init_method {init_method!r} must begin with env://, tcp://, or file://")
    return url


def _number(what: str, given: int, in_url: str | None, variable: str) -> int:
    if in_url is not None and given != -1 and str(given) != in_url:
        raise RendezvousError(f"the {what} is {given} by argument and {in_url} in the init_method; give it once")
    if given != -1:
        return given
    text = os.environ.get(variable) if in_url is None else in_url
    if not text:
        raise RendezvousError(f"the {what} is not known: pass {what}= to init_rpc, or set {variable}")
    try:
        return int(text)
    except ValueError as error:
        raise RendezvousError(f"the {what} must be a number, and {variable} or the URL says {text!r}") from error


def _check_place(rank: int, world_size: int) -> None:
    if not 1 <= world_size <= MAX_ID + 1:
        raise RendezvousError(f"a world size of {world_size} is not possible: a group has 1 to {MAX_ID + 1} workers")
    if not 0 <= rank < world_size:
        raise RendezvousError(f"rank {rank} is not possible in a group of {world_size}: they are 0 to {world_size - 1}")


def _store_address(url: SplitResult) -> tuple[str, int] | None:
    """Return where the TCP store of this URL is or will be; None if it has no such store."""
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise RendezvousError(f"{urlunsplit(url)!r} must name host and port of rank 0, as in tcp://10.0.0.1:29500")
        return url.hostname, url.port
    if url.scheme != "env":
        return None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if not host or not port:
        raise RendezvousError(
            f"{' and '.join(missing)} must be set for env://: host and port, on the machine of rank 0, at which the "
            "workers find each other. Set them, run under torchrun, or pass init_method='tcp://host:port'"
        )
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise RendezvousError(f"MASTER_PORT must be a port from 0 to 65535, and is {port!r}")
    return host, int(port)


@interruptible
def _await_server(host: str, port: int, deadline: float, timeout: float) -> None:
    """Return as soon as something listens at the store's address.

    Torch's own client would wait as well, but logs a stack trace for every second that rank 0 is late.
    """
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.05)).close()
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise _unreachable(host, port, timeout, error) from error
            _pause(start, deadline)
        else:
            return


def _unreachable(host: str, port: int, timeout: float, error: Exception) -> RendezvousTimeout:
    return RendezvousTimeout(
        f"cannot reach the rendezvous store at {host}:{port} after {timeout:g} s ({error}). Is rank 0 running, are "
        "MASTER_ADDR and MASTER_PORT (or the init_method) the same everywhere, and is this port open in the firewall?"
    )


def _explain(error: Exception, init_method: str, address: tuple[str, int] | None, timeout: float) -> NoReturn:
    text = str(error)
    if address is not None and "EADDRINUSE" in text:
        raise RendezvousError(
            f"rank 0 cannot hold the rendezvous store: port {address[1]} is in use on this machine. Either another "
            "process runs as rank 0 too, or something else has the port: choose another (MASTER_PORT)"
        ) from error
    if address is not None and "timed out" in text:
        raise _unreachable(*address, timeout, error) from error
    raise RendezvousError(f"cannot open the rendezvous store of {init_method!r}: {text}") from error


# Coming together


def _claim_place(store: Store, mine: Claim) -> None:
    """Claim this worker's name and rank; what is in the way of that is everybody's verdict and raised here."""
    first = _take(store, _FIRST, mine, "the worker that came first")
    if first.world_size != mine.world_size:
        message = f"the world sizes differ: {first} was started for {first.world_size} workers, and {mine} for "
        _fail(store, Verdict("error", f"{message}{mine.world_size}. Give all of them the same"))
    holder = _take(store, f"name/{mine.record.name}", mine, f"the worker called {mine.record.name!r}")
    if holder.record.id != mine.record.id:
        message = f"two workers are called {mine.record.name!r}: {holder} and {mine}. Give each a name of its own"
        _fail(store, Verdict("duplicate", message))
    holder = _take(store, _claim_key(mine.record.id), mine, f"rank {mine.record.id}")
    if holder != mine:
        message = f"two workers claim rank {mine.record.id}: {holder} and {mine}. Give each a rank of its own"
        _fail(store, Verdict("duplicate", message + _leftover_hint(store)))


def _take(store: Store, key: str, mine: Claim, whose: str) -> Claim:
    """Claim `key`, and return the claim that holds it: `mine`, or that of a worker that was there before."""
    return _decode_claim(store.compare_set(key, "", _encode(mine)), whose)


def _leftover_hint(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, FileStore):
        return ""
    return ". If the first of them is of an earlier run, delete the rendezvous file, which that run left behind"


def _fail(store: Store, verdict: Verdict) -> NoReturn:
    """Make `verdict` that of the group unless it has one, and raise it here in any case."""
    store.compare_set(_VERDICT, "", _encode(verdict))
    raise _ERRORS[verdict.outcome](verdict.message)


def _await_verdict(store: Store, mine: Claim, start: float, deadline: float) -> None:
    """Return when the group is complete; raise what the verdict says if it is not to be."""
    claims = [_claim_key(rank) for rank in range(mine.world_size)]
    # The store does one thing at a time, so the worker that claims last sees all claims here.
    if store.check(claims):
        store.compare_set(_VERDICT, "", _encode(Verdict("complete")))
    while not store.check([_VERDICT]):
        if time.monotonic() >= deadline:
            store.compare_set(_VERDICT, "", _encode(_lost_patience(store, mine, time.monotonic() - start)))
        else:
            _pause(start, deadline)
    verdict = _decode_verdict(store.get(_VERDICT))
    if verdict.outcome != "complete":
        raise _ERRORS[verdict.outcome](verdict.message)


def _who_came(store: Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if store.check([_claim_key(rank)])]


def _lost_patience(store: Store, mine: Claim, waited: float) -> Verdict:
    came = _who_came(store, mine.world_size)
    missing = sorted(set(range(mine.world_size)) - set(came))
    if not missing:
        # The last worker to come died between its claim and its verdict. Whoever calls it will be told.
        return Verdict("complete")
    present = [f"{claim.record.name!r} (rank {claim.record.id})" for claim in _read_claims(store, came[:_LISTED])]
    more = f" and {len(came) - _LISTED} more" if len(came) > _LISTED else ""
    return Verdict(
        "timeout",
        f"{len(missing)} of {mine.world_size} workers did not come within {waited:.3g} s: {_list_ranks(missing)}. "
        f"Those that came: {', '.join(present)}{more}. Look at the output of the missing ones, or raise the timeout",
    )


def _take_leave(store: Store, rank: int, placed: bool, expected: Sequence[int], deadline: float) -> None:
    """Say that this worker needs the store no longer; rank 0 also waits until all `expected` ranks have said so.

    Only the worker that holds the rank (`placed`) speaks for it, not another that claimed it too. Saying it needs no
    reply (TCPStore sends none), so rank 0 may exit the moment it has heard the last. A worker that died meanwhile is
    no reason to fail: those that call it will be told.
    """
    if placed:
        store.set(f"left/{rank}", "1")
    if rank == 0:
        start = time.monotonic()
        keys = [f"left/{other}" for other in expected]
        while keys and time.monotonic() < deadline and not store.check(keys):
            _pause(start, deadline)


@interruptible
def _pause(start: float, deadline: float) -> None:
    """Sleep a tenth of the time waited so far: prompt for a quick group, and cheap for a slow one."""
    now = time.monotonic()
    time.sleep(max(0.001, min((now - start) / 10, _LONGEST_PAUSE, deadline - now)))


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs of neighbours in short: ``ranks 1, 4-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:_LISTED])
    text += ", and more" if len(runs) > _LISTED else ""
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


# What is in the store


def _claim_key(rank: int) -> str:
    return f"claim/{rank}"


def _encode(value: Claim | Verdict) -> str:
    return msgspec.json.encode(value).decode()


def _read_claims(store: Store, ranks: Sequence[int]) -> list[Claim]:
    if not ranks:
        return []
    values = store.multi_get([_claim_key(rank) for rank in ranks])
    claims = []
    for rank, value in zip(ranks, values, strict=True):
        claim = _decode_claim(value, f"rank {rank}")
        _check_claim(claim, rank)
        claims.append(claim)
    return claims


def _decode_claim(value: bytes, whose: str) -> Claim:
    if len(value) > MAX_RECORD:
        raise RendezvousError(f"the record of {whose} in the rendezvous store has more than {MAX_RECORD} bytes")
    try:
        return msgspec.json.decode(value, type=Claim)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RendezvousError(f"the record of {whose} in the rendezvous store cannot be read: {error}") from error


def _check_claim(claim: Claim, rank: int) -> None:
    record = claim.record
    try:
        if check_id(record.id) != rank:
            raise ValueError(f"it is that of rank {record.id}")
        check_name(record.name)
        if not 0 <= record.incarnation < 2**64:
            raise ValueError(f"the incarnation {record.incarnation} does not fit in 64 bits")
        for address in record.addresses:
            parse_address(address)
    except ValueError as error:
        raise RendezvousError(f"the record of rank {rank} is not valid: {error}") from error


def _decode_verdict(value: bytes) -> Verdict:
    try:
        if len(value) > MAX_RECORD:
            raise ValueError(f"it has more than {MAX_RECORD} bytes")
        return msgspec.json.decode(value, type=Verdict)
    except (msgspec.DecodeError, ValueError) as error:
        raise RendezvousError(f"the verdict in the rendezvous store cannot be read: {error}") from error
