"""The rendezvous of a worker that joins a group through one of its members, without a store.

The store may be gone for good, with the process that hosted it. Any member knows the group. The newcomer knows the
address of one or more of them (`Options.members`), connects there, and learns of all members in handshakes in which
both sides prove that they know the token. Then it joins as any other newcomer does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Self

from telegrad.agent.agent import Agent
from telegrad.bootstrap import ListenIfNeeded
from telegrad.connection.dialer import DescribedMember
from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.handshake import Refused
from telegrad.connection.questions import Questions
from telegrad.connection.worker_record import MAX_ID, FoundGroup, WorkerRecord
from telegrad.environment.launchers import RESTART_VARIABLE
from telegrad.errors import DuplicateWorker, NotAMember, RendezvousError, RendezvousTimeout, TelegradError
from telegrad.options import Options
from telegrad.protocol.membership import State
from telegrad.rendezvous_search import IdTaken
from telegrad.rendezvous_store import WaitLog, pause
from telegrad.transport.addresses import parse_address

_ATTEMPT = 5.0  # seconds that one member may take to describe the group


class MemberRendezvous:
    """The rendezvous of one worker with a group that exists."""

    def __init__(self, addresses: Sequence[str], rank: int, world_size: int | None, timeout: float) -> None:
        self.rank = rank
        """-1: that of the worker whose place it takes, or any free one of an open group."""
        # A member lists the way through a relay, too, which only those can take who know the group.
        self._addresses = [each for each in addresses if not each.startswith("relay://")] or list(addresses)
        self._world_size = world_size or 0
        self._start = time.monotonic()
        self._timeout = timeout
        tcp = [each for each in map(parse_address, self._addresses) if each.scheme == "tcp"]
        self.address = (tcp[0].host, tcp[0].port) if tcp else None
        """Host and port of a member, if it has any: this worker advertises its address on the way there."""

    @classmethod
    def open(cls, options: Options, name: str | None, rank: int, world_size: int | None) -> Self:
        """Check the options. This connects to nobody yet."""
        text = os.environ.get("RANK", "")
        if rank < 0 and text.isdecimal():
            rank = int(text)
        if rank < 0 and name is None:
            raise RendezvousError("a worker that joins through Options(members=...) needs a name: pass it to init_rpc")
        return cls(options.member_addresses(), rank, world_size if (world_size or 0) > 0 else 0, options.init_timeout)

    def exchange_records(
        self, me: WorkerRecord, keys: GroupKeys | None, listen_if_needed: ListenIfNeeded, questions: Questions
    ) -> FoundGroup:
        """Learn of the group from the first member that answers; see `telegrad.bootstrap.start_agent`."""
        members = self._ask(me, questions)
        is_open = members[0].is_open
        if self._world_size and not is_open and self._world_size != len(members):
            raise RendezvousError(
                f"worker {me.name!r} was started for {self._world_size} workers, but its group has {len(members)}: "
                "pass the same world size to all workers"
            )
        self._check_place(me, members, questions)
        records = [one.record for one in members if one.state is not State.LEFT or one.record.name == me.name]
        records = records if is_open else [one.record for one in members]
        listen_if_needed([*records, me])
        return FoundGroup(records, exists=True, is_open=is_open)

    def _ask(self, me: WorkerRecord, questions: Questions) -> list[DescribedMember]:
        """Return all members, as the first member that answers knows them."""
        deadline = self._start + self._timeout
        log, failures = WaitLog(f"worker {me.name!r}"), {}
        while True:
            for address in self._addresses:
                try:
                    members = questions.describe(address, _ATTEMPT)
                except Refused as refused:
                    if refused.code != "leaving":
                        raise RendezvousError(f"worker {me.name!r} cannot join at {address}: {refused}") from refused
                    failures[address] = refused.reason
                except (OSError, TelegradError) as error:
                    failures[address] = str(error)
                else:
                    if members:
                        return members
                    failures[address] = "it is in no group yet"
            said = "; ".join(
                failure if address in failure else f"{address}: {failure}" for address, failure in failures.items()
            )
            if time.monotonic() >= deadline:
                raise RendezvousTimeout(
                    f"worker {me.name!r} found no member of its group within {self._timeout:g} s: {said}. Pass the "
                    "addresses of members that are alive (rpc.workers() on any of them lists them), and the same token"
                )
            log.log_if_due(lambda said=said: f"a member of its group: {said}")  # type: ignore[misc]  # mypy: lambda
            pause(self._start, deadline)

    def _check_place(self, me: WorkerRecord, members: Sequence[DescribedMember], questions: Questions) -> None:
        """Raise an error if this worker has no place in the group, or IdTaken if it has another id."""
        own = next((one for one in members if one.record.name == me.name), None)
        holder = next((one for one in members if one.record.id == me.id and one is not own), None)
        if own is None and not members[0].is_open:
            names = ", ".join(repr(one.record.name) for one in members)
            raise NotAMember(f"there is no worker {me.name!r} in the group, whose workers are {names}")
        if own is not None and own.record.id != me.id:
            if self.rank < 0:
                raise IdTaken(own.record.id)
            raise DuplicateWorker(
                f"worker {me.name!r} of the group has rank {own.record.id}, not {me.id}: leave out the rank, or pass it"
            )
        if own is None and holder is not None:
            used = {one.record.id for one in members}
            free = next((number for number in range(MAX_ID + 1) if number not in used), 0)
            if self.rank < 0:
                raise IdTaken(free)
            raise DuplicateWorker(
                f"worker {holder.record.name!r} of the group has rank {me.id}: leave out the rank, or pass {free}"
            )
        restart = os.environ.get(RESTART_VARIABLE, "")
        is_restarted = restart.isdecimal() and int(restart) > 0
        if own is not None and own.state is State.ALIVE and not is_restarted and questions(own.record) == "alive":
            raise DuplicateWorker(
                f"worker {me.name!r} is in the group and alive, so another process cannot join it under the same name. "
                "Give each worker its own name, or end the first one"
            )

    def keep(self, agent: Agent) -> None:
        """Do nothing: there is no store to publish anything in. The other members know this worker."""

    def failed(self, who: str, keys: GroupKeys | None, error: BaseException) -> None:
        """Do nothing: nobody waits for this worker."""

    def close(self, error: BaseException) -> None:
        """Do nothing: nothing is open."""
