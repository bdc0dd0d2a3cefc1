"""The rendezvous of one `init_rpc`: opens the store, finds the group, and keeps what newcomers need."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.bootstrap import ListenIfNeeded, Probe, check_token
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.environment.detection import restart_count
from telegrad.errors import RendezvousError, TokenError
from telegrad.options import Options
from telegrad.rendezvous import FAILURE_LINGER
from telegrad.rendezvous_epochs import GroupFinder
from telegrad.rendezvous_file import Prefixed
from telegrad.rendezvous_store import launcher_hosts, open_store, pause
from telegrad.rpc.store_watch import LEAVE_TIMEOUT, StoreWatch

_log = logging.getLogger("telegrad")

_PREFIX = "telegrad"
_REPORT_TIMEOUT = 1.0  # seconds to reach the store, for a worker that has failed
_history: dict[int, int] = {}  # the incarnations of this process, and the group of each


class Rendezvous:
    """The rendezvous of one worker."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int | None,
        timeout: float,
        *,
        prefix: str = _PREFIX,
        address: tuple[str, int] | None = None,
        is_host: bool = False,
        one_kind: bool = False,
        reopen: Callable[[float], Store] | None = None,
    ) -> None:
        self.rank = rank
        """-1: any free id of an open group."""
        self.address = address
        """Host and port of the store if it has any."""
        self._store: Store | None = Prefixed(prefix, store)
        self._world_size = world_size or 0
        self._deadline = time.monotonic() + timeout
        self._prefix = prefix
        self._is_host = is_host
        self._one_kind = one_kind  # see Terms
        self._reopen = reopen
        self._finder: GroupFinder | None = None

    @classmethod
    def open(
        cls,
        options: Options,
        rank: int,
        world_size: int | None,
        timeout: float | None = None,
        *,
        prefix: str = _PREFIX,
    ) -> Self:
        """Open the store that the options name; see `open_store`."""
        seconds = options.init_timeout if timeout is None else timeout
        store, rank, world_size, address, is_host = open_store(
            options.init_method, rank, world_size, seconds, options.allowed_ports()
        )

        def reopen(within: float) -> Store:
            return open_store(options.init_method, rank, world_size, within).store

        again = None if is_host or address is None else reopen
        found = (store, rank, world_size, options.init_timeout)
        return cls(*found, prefix=prefix, address=address, is_host=is_host, reopen=again)

    def _make_finder(self) -> GroupFinder:
        if self._store is None:
            raise RendezvousError("this rendezvous is over")
        prefix, reopen = self._prefix, self._reopen
        return GroupFinder(
            self._store,
            self._world_size,
            max(0.0, self._deadline - time.monotonic()),
            history=_history,
            restart=_restart(),
            is_host=self._is_host,
            any_id=self.rank < 0,
            one_kind=self._one_kind,
            reopen=None if reopen is None else lambda seconds: Prefixed(prefix, reopen(seconds)),
        )

    def exchange_records(
        self, me: WorkerRecord, keys: GroupKeys | None, listen_if_needed: ListenIfNeeded, probe: Probe
    ) -> FoundGroup:
        """Find the group; see `telegrad.bootstrap.start_agent`."""
        self._finder = self._make_finder()
        return self._finder.find(me, keys, listen_if_needed, probe)

    def keep(self, agent: Agent) -> None:
        """Publish that the agent has joined, and keep the store as long as it lives."""
        board = None if self._finder is None else self._finder.board
        if board is None:
            return
        watched = None if self._reopen is None or launcher_hosts() else self.address
        try:
            try:
                board.publish(agent.me)
                board.remove([peer.record for peer in agent.peers.table.used() if peer.gone])
            except RuntimeError as error:  # of torch's stores
                _log.debug("worker %r cannot publish its record, for the store is gone: %s", agent.me.name, error)
            StoreWatch(agent, board, self._prefix, watched)
        except BaseException:
            agent.close()
            raise
        self._store = self._finder = None  # or the store would outlive the agent

    def failed(self, who: str, keys: GroupKeys | None, error: BaseException, *, of_another: bool = False) -> None:
        """Tell others that this worker does not join, as far as that is possible in a short time.

        For `of_another` see `GroupFinder.report`.
        """
        finder = self._finder or self._make_finder()

        def tell() -> None:
            try:
                if finder.board is not None:
                    finder.board.leave()
                else:
                    finder.report(who, keys, error, of_another=of_another)
            except RuntimeError as other:
                _log.debug("%s failed and could not tell the others: %s", who, other)

        thread = threading.Thread(target=tell, name="telegrad-failed", daemon=True)
        thread.start()
        thread.join(LEAVE_TIMEOUT)
        if self._is_host and not finder.registered:  # else the rendezvous has waited
            _wait(FAILURE_LINGER)

    def close(self, error: BaseException) -> None:
        """Close the store after an error, whose traceback would keep it open as long as somebody keeps the error."""
        self._store = self._finder = None
        seen: set[int] = set()
        chain: BaseException | None = error
        while chain is not None and id(chain) not in seen:
            seen.add(id(chain))
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__


def report_failure(
    options: Options,
    name: str | None,
    rank: int,
    world_size: int | None,
    error: Exception,
    *,
    prefix: str = _PREFIX,
) -> None:
    """Tell the workers of a group that forms that this one failed before it opened the store."""
    try:
        rendezvous = Rendezvous.open(options, rank, world_size, _REPORT_TIMEOUT, prefix=prefix)
    except (RendezvousError, ValueError) as other:
        _log.debug("nobody can be told that this worker failed: %s", other)
        return
    rank = rendezvous.rank
    rendezvous.failed(f"worker {name or f'worker{rank}'!r} (rank {rank})", group_keys(options), error)


def group_keys(options: Options) -> GroupKeys | None:
    """Return the keys of the group, or None without a token."""
    try:
        token, _ = check_token(options)
    except TokenError:
        return None
    return None if token is None else derive_keys(token)


def _wait(seconds: float) -> None:
    """Keep the store open for other workers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pause(end - seconds, end)


def _restart() -> int:
    """Return how often a launcher has started this worker before; -1 without such a launcher."""
    restart = restart_count(os.environ)
    return -1 if restart is None else restart
