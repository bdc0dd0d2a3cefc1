"""Keeps account of what each peer uses of this worker, and makes the errors for what exceeds its limits.

`telegrad.protocol.peer_usage` has the rules. A peer without limits has no account, and costs nothing. An account
belongs to a name, not to a connection or incarnation: a worker cannot get around its limits by reconnecting, and what
its calls still use after it is lost still counts.

What is taken is an object, `Held`. It is given back when it is released, or at the latest when nothing refers to it any
more: no way out of a call can leave something behind.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque

from telegrad.errors import LimitExceeded
from telegrad.execution.task_group import TaskGroup
from telegrad.protocol.peer_limits import PeerLimits, limits_for
from telegrad.protocol.peer_usage import MESSAGE_OVERHEAD, Excess, PeerUsage
from telegrad.settings import AgentSettings
from telegrad.waiting import Runtime
from telegrad.wire.frames import Limits, StoredLimits

_log = logging.getLogger("telegrad")

_LOG_PAUSE = 60.0  # seconds between two log lines about the refused calls of one peer
_LEAST_STORED = 1 << 20
"""Frames up to this size are stored before the limits of a peer are checked."""

_WHAT = {
    "calls_per_second": "calls per second",
    "calls": "calls in progress",
    "bytes_held": "bytes of messages and unread replies",
    "message_size": "bytes in one message",
    "contexts": "autograd contexts",
    "calls_per_context": "calls in one autograd context",
    "references": "references",
}
_REMEDY = {
    "calls": "wait for earlier calls to end",
    "bytes_held": "wait for earlier calls to end, and read their replies",
    "message_size": "send less at once",
    "contexts": "leave autograd contexts that are no longer needed",
    "calls_per_context": "use a new autograd context",
    "references": "release RRefs that are no longer needed",
}


class Held:
    """Calls and bytes that were taken from an account."""

    __slots__ = ("_account", "_calls", "_size")

    def __init__(self, account: PeerAccount, calls: int, size: int) -> None:
        self._account: PeerAccount | None = account
        self._calls = calls
        self._size = size

    @property
    def size(self) -> int:
        """The bytes that are held."""
        return self._size

    def release(self) -> None:
        """Give it back. Another time has no effect."""
        account, self._account = self._account, None
        if account is not None:
            account.give_back(self._calls, self._size)

    def __del__(self) -> None:
        # Runs in any thread, at any moment, perhaps while the lock of the account is held: see `give_back_dropped`.
        account = self._account
        if account is not None:
            account.dropped.append((self._calls, self._size))


class PeerAccount:
    """What one peer uses of this worker."""

    def __init__(self, worker: str, peer: str, limits: PeerLimits, runtime: Runtime) -> None:
        self._worker = worker
        self._peer = peer
        self._runtime = runtime
        self._lock = threading.Lock()  # protects the three below
        self._usage = PeerUsage(limits, runtime.now())
        self._logged_at = -_LOG_PAUSE
        self._unlogged = 0
        self.dropped: deque[tuple[int, int]] = deque()
        """What `Held` objects that were never released had taken."""
        self.limits = limits
        self.tasks = TaskGroup(limits.running or math.inf)
        """The functions that it calls here."""

    # -- taking and giving back -------------------------------------------------------------------------------

    def take_call(self, size: int, unread: int, taken: Held | None) -> Held:
        """Take a call with a request of `size` bytes. `taken` are its bytes, if they were taken when it was announced.

        Raises LimitExceeded, and then `taken` is given back.
        """
        size = 0 if taken is not None else size + MESSAGE_OVERHEAD
        with self._lock:
            self._give_back_dropped()
            excess = self._usage.take_call(size, self._runtime.now(), unread)
            if excess is None and taken is not None:
                size, taken._account = taken._size, None  # they are held for the call now
        if excess is not None:
            if taken is not None:
                taken.release()
            raise self.error(excess)
        return Held(self, 1, size)

    def take_message(self, size: int, unread: int = 0) -> Held:
        """Take the bytes of a message. Raises LimitExceeded."""
        with self._lock:
            self._give_back_dropped()
            excess = self._usage.size_excess(size) or self._usage.take_bytes(size + MESSAGE_OVERHEAD, unread)
        if excess is not None:
            raise self.error(excess)
        return Held(self, 0, size + MESSAGE_OVERHEAD)

    def give_back(self, calls: int, size: int) -> None:
        """Give back what a `Held` had taken."""
        with self._lock:
            self._usage.give_back(calls, size)

    def _give_back_dropped(self) -> None:
        while self.dropped:
            self._usage.give_back(*self.dropped.popleft())

    def usage(self) -> tuple[int, int]:
        """Return the calls in progress and the bytes held."""
        with self._lock:
            self._give_back_dropped()
            return self._usage.calls, self._usage.bytes_held

    # -- checks -----------------------------------------------------------------------------------------------

    def size_error(self, size: int) -> LimitExceeded | None:
        """Return the error if a message is too large."""
        excess = self._usage.size_excess(size)
        return None if excess is None else self.error(excess)

    def check_size(self, size: int) -> None:
        """Raise LimitExceeded if a message is too large."""
        error = self.size_error(size)
        if error is not None:
            raise error

    def check_count(self, limit: str, wanted: int) -> None:
        """Raise LimitExceeded if there would be more contexts, calls in a context, or references than allowed."""
        excess = self._usage.count_excess(limit, wanted)
        if excess is not None:
            raise self.error(excess)

    def check_unread(self, unread: int) -> None:
        """Raise LimitExceeded if no result may be queued because the peer has not read earlier ones."""
        excess = self._usage.unread_excess(unread)
        if excess is not None:
            raise self.error(excess)

    def is_stuck(self, unread: int) -> bool:
        """Return whether the peer must be disconnected because it does not read its replies."""
        return self._usage.is_stuck(unread)

    def frame_limits(self, limits: Limits) -> Limits:
        """Return the limits of the frames of this peer: larger ones are read and discarded."""
        stored = min(float(limits.frame), max(self.limits.message_size or 0.0, _LEAST_STORED))
        return StoredLimits(limits.frame, limits.message, int(stored))

    # -- refusals ---------------------------------------------------------------------------------------------

    def count_refusal(self, error: LimitExceeded, discarded: int = 0) -> str:
        """Count a refused call. Return why the peer must be disconnected; empty if it need not be."""
        now = self._runtime.now()
        with self._lock:
            over = self._usage.refused(now, discarded)
            self._unlogged += 1
            count = 0
            if now >= self._logged_at + _LOG_PAUSE:
                self._logged_at, count, self._unlogged = now, self._unlogged, 0
        if over:
            return f"it kept exceeding its limits after many refused calls; the last: {error}"
        if count:
            _log.warning(
                "worker %r refused %d call%s of worker %r since the last line about it; the last: %s",
                *(self._worker, count, "s" if count > 1 else "", self._peer, str(error)),
            )
        return ""

    def error(self, excess: Excess) -> LimitExceeded:
        """Return the error for the peer."""
        name = excess.limit
        if name == "calls_per_second":
            text, remedy = "more", f"retry after {excess.retry_after:.3g} s"
        else:
            text, remedy = f"{excess.wanted:,.0f}", _REMEDY[name]
        if not excess.permanent and excess.retry_after is None:
            remedy += ", then retry"
        made = LimitExceeded(
            f"worker {self._worker!r} allows worker {self._peer!r} {excess.allowed:,.0f} {_WHAT[name]}, and this would "
            f"be {text}: {remedy}, or raise peer_limits ({name}) in the options of worker {self._worker!r}",
            worker=self._worker,
        )
        made.limit, made.retry_after = name, excess.retry_after
        return made

    def unread_reason(self, unread: int) -> str:
        """Return why a peer that does not read its replies is disconnected."""
        return (
            f"it does not read its replies: {unread:,} bytes are queued, and its limit is "
            f"{self.limits.bytes_held:,.0f} (peer_limits: bytes_held)"
        )


class PeerAccounts:
    """The accounts of all peers that have limits, by name."""

    def __init__(self, worker: str, settings: AgentSettings, runtime: Runtime) -> None:
        self._worker = worker
        self._given = settings.peer_limits
        self._registered = settings.accept == "registered"
        self._runtime = runtime
        self._lock = threading.Lock()  # protects the accounts
        self._accounts: dict[str, PeerAccount] = {}

    def of(self, peer: str) -> PeerAccount | None:
        """Return the account of a peer; None if it has no limits. This worker itself has none."""
        if peer == self._worker:
            return None
        limits = limits_for(peer, self._given, registered=self._registered)
        if limits is None:
            return None
        with self._lock:
            account = self._accounts.get(peer)
            if account is None:
                account = self._accounts[peer] = PeerAccount(self._worker, peer, limits, self._runtime)
            return account

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return the calls in progress and the bytes held of each peer that has limits."""
        with self._lock:
            accounts = dict(self._accounts)
        return {name: account.usage() for name, account in accounts.items()}
