"""Which group a worker forms or joins at a store that has seen other groups."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.stores import tcp_client, tcp_server, together
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from telegrad import rendezvous, rendezvous_epochs, rendezvous_search
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, StoreLost, UnauthenticatedRecord
from telegrad.rendezvous_epochs import GroupFinder
from telegrad.rendezvous_members import Noticeboard, read_current, swap_current
from telegrad.rendezvous_records import Epoch, Records, Registration
from telegrad.rendezvous_search import IdTaken, MixedGroup

LONG = 60.0
"""A timeout that no test reaches."""
KEYS = derive_keys(b"the token of the group that meets here")

OpenStore = Callable[[], Store]


class World:
    """Workers of one process, which are alive, leaving, silent or gone by incarnation."""

    def __init__(self, open_store: OpenStore, world_size: int = 2) -> None:
        self.open_store = open_store
        self.world_size = world_size
        self.states: dict[int, str] = {}
        self.boards: dict[int, Noticeboard] = {}
        self._numbers = iter(range(1, 1_000_000))

    def probe(self, record: WorkerRecord) -> str:
        return self.states.get(record.incarnation, "gone")

    def worker(
        self,
        rank: int,
        name: str | None = None,
        *,
        generation: int = 0,
        keys: GroupKeys | None = KEYS,
        timeout: float = LONG,
        world_size: int | None = None,
        **terms: object,
    ) -> Callable[[], FoundGroup]:
        """Return a function that looks for the group as a new process would."""
        record = WorkerRecord(
            f"w{rank}" if name is None else name, rank, next(self._numbers), (), generation=generation
        )
        size = self.world_size if world_size is None else world_size
        finder = GroupFinder(self.open_store(), size, timeout, **terms)  # type: ignore[arg-type]

        def find() -> FoundGroup:
            self.states[record.incarnation] = "alive"
            try:
                found = finder.find(record, keys, lambda records: None, self.probe)
            except BaseException:
                self.states[record.incarnation] = "gone"
                raise
            assert finder.board is not None
            self.boards[record.incarnation] = finder.board
            return found

        return find

    def leave(self, *records: WorkerRecord) -> None:
        """Let workers leave in order, one after the other."""
        for record in records:
            self.boards[record.incarnation].leave()
            self.states[record.incarnation] = "leaving"

    def kill(self, *records: WorkerRecord) -> None:
        for record in records:
            self.states[record.incarnation] = "gone"


@pytest.fixture(params=["hash", "file", "tcp"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    if request.param == "hash":
        shared = HashStore()
        return lambda: shared
    server = tcp_server()
    client = tcp_client(server)
    stores = iter([server, client] * 1000)
    return lambda: next(stores)


@pytest.fixture
def world(open_store: OpenStore) -> World:
    return World(open_store)


@pytest.fixture
def hashed() -> World:
    shared = HashStore()
    return World(lambda: shared)


Outcomes = list[FoundGroup | RendezvousError]


def formed(outcomes: Outcomes) -> list[WorkerRecord]:
    """Return the records of a group that was formed by all of them."""
    first = outcomes[0]
    assert isinstance(first, FoundGroup), first
    assert outcomes == [first] * len(outcomes)
    assert not first.exists
    return list(first.records)


def names(found: FoundGroup | RendezvousError) -> list[str]:
    assert isinstance(found, FoundGroup), found
    return [record.name for record in found.records]


# -- again and again ------------------------------------------------------------------------------------------


def test_groups_form_one_after_the_other(world: World) -> None:
    seen = set()
    for _ in range(5):
        records = formed(together(world.worker(0), world.worker(1)))
        seen.update(record.incarnation for record in records)
        world.leave(*records)
    assert len(seen) == 10


def test_a_group_forms_after_one_whose_workers_were_killed(world: World) -> None:
    world.kill(*formed(together(world.worker(0), world.worker(1))))
    assert len(formed(together(world.worker(0), world.worker(1)))) == 2


def test_workers_that_left_form_the_next_group_although_their_peers_are_still_leaving(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.boards[records[0].incarnation].leave(is_over=True)  # and neither has ended
    assert len(formed(together(hashed.worker(0), hashed.worker(1)))) == 2


def test_a_peer_that_says_in_the_handshake_that_it_leaves_is_not_joined(hashed: World) -> None:
    first, second = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(first)
    hashed.states[second.incarnation] = "leaving"  # and could not note it in the store
    assert len(formed(together(hashed.worker(0), hashed.worker(1)))) == 2


def test_the_next_group_may_have_another_size(hashed: World) -> None:
    hashed.leave(*formed(together(hashed.worker(0), hashed.worker(1))))
    assert len(formed(together(*(hashed.worker(rank, world_size=3) for rank in range(3))))) == 3


# -- groups that exist ----------------------------------------------------------------------------------------


def test_a_replacement_joins_the_group_of_the_others(world: World) -> None:
    records = formed(together(world.worker(0), world.worker(1)))
    world.kill(records[1])
    (found,) = together(world.worker(1))
    assert found == FoundGroup(records, exists=True)


def test_a_worker_that_left_alone_joins_again(world: World) -> None:
    records = formed(together(world.worker(0), world.worker(1)))
    world.leave(records[0])
    world.kill(records[0])
    (found,) = together(world.worker(0))
    assert found == FoundGroup(records, exists=True)


def test_a_newcomer_finds_the_latest_records(world: World) -> None:
    world.world_size = 3
    records = formed(together(*(world.worker(rank) for rank in range(3))))
    world.kill(records[1])
    (found,) = together(world.worker(1))
    assert isinstance(found, FoundGroup)
    latest = replace(records[1], incarnation=max(world.boards), generation=7)
    world.boards[latest.incarnation].publish(latest)
    world.kill(records[2])
    (found,) = together(world.worker(2))
    assert found == FoundGroup([records[0], latest, records[2]], exists=True)


def test_a_newcomer_whose_record_comes_too_late_is_found_nevertheless(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[0])
    (found,) = together(hashed.worker(0))  # it joins worker 1, and has not published its record yet
    assert isinstance(found, FoundGroup)
    newcomer = replace(records[0], incarnation=max(hashed.boards), generation=1)
    hashed.kill(records[1])
    outcomes: Outcomes = []
    second = threading.Thread(target=lambda: outcomes.extend(together(hashed.worker(1))))
    second.start()
    store = hashed.open_store()
    while (epoch := read_current(store, KEYS)[1]) is None or epoch.number == 1:
        os.sched_yield()
    hashed.boards[newcomer.incarnation].publish(newcomer)
    second.join()
    assert outcomes == [FoundGroup([newcomer, records[1]], exists=True)]


def test_a_record_that_is_published_while_the_next_epoch_begins_is_found(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[0])
    together(hashed.worker(0))
    newcomer = replace(records[0], incarnation=max(hashed.boards), generation=1)
    hashed.kill(records[1])
    text, epoch = read_current(hashed.open_store(), KEYS)

    class Late(World):
        def probe(self, record: WorkerRecord) -> str:
            state = hashed.probe(record)
            if record == records[0]:  # after the old record was read, and before the epoch is changed
                hashed.boards[newcomer.incarnation].publish(newcomer)
            return state

    late = Late(hashed.open_store)
    (found,) = together(late.worker(1))
    assert found == FoundGroup([newcomer, records[1]], exists=True)
    assert read_current(hashed.open_store(), KEYS) == (text, epoch)


def test_a_record_is_not_replaced_by_one_of_an_earlier_generation(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[1])
    together(hashed.worker(1), hashed.worker(0))
    board = hashed.boards[max(hashed.boards)]
    late, later = (replace(records[1], incarnation=100 + number, generation=number) for number in (4, 5))
    for record in (later, late):
        board.publish(record)
    assert board.read_members()[1].record == later


def test_a_second_process_under_the_name_of_a_living_worker_is_refused(hashed: World) -> None:
    formed(together(hashed.worker(0), hashed.worker(1)))
    (error,) = together(hashed.worker(1))
    assert isinstance(error, DuplicateWorker)
    assert "worker 'w1' (rank 1, pid" in str(error)
    assert "is in the group and alive" in str(error)


@pytest.mark.parametrize(("rank", "name"), [(1, "w0"), (1, "w2"), (1, "new")])
def test_a_replacement_needs_name_and_rank_of_the_dead(hashed: World, rank: int, name: str) -> None:
    hashed.world_size = 3
    records = formed(together(*(hashed.worker(one) for one in range(3))))
    hashed.kill(records[1])
    (error,) = together(hashed.worker(rank, name))
    assert isinstance(error, DuplicateWorker)
    assert "the replacement of a worker" in str(error)


def test_a_worker_that_is_alone_in_its_group_is_not_doubled(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[1])
    (error,) = together(hashed.worker(0))
    assert isinstance(error, DuplicateWorker)


def test_another_world_size_than_that_of_the_group_is_named(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[1])
    (error,) = together(hashed.worker(1, world_size=5))
    assert isinstance(error, RendezvousError)
    assert "was started for 5 workers, but its group has 2" in str(error)


def test_a_member_that_is_silent_for_a_moment_is_not_given_up(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[1])
    answers = iter(["silent", "silent", "alive", "gone"])
    finder = GroupFinder(hashed.open_store(), 2, LONG)
    me = WorkerRecord("w1", 1, 999, ())
    found = finder.find(me, KEYS, lambda records: None, lambda record: next(answers))
    assert found.exists


def test_a_member_that_stays_silent_is_given_up(hashed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_search, "_SILENCE", 0.05)
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.kill(records[1])
    hashed.states[records[0].incarnation] = "silent"
    assert len(formed(together(hashed.worker(0), hashed.worker(1)))) == 2


# -- failures -------------------------------------------------------------------------------------------------


def test_a_process_that_shared_a_failure_may_try_again_and_a_fresh_one_gets_the_error(world: World) -> None:
    history: dict[int, int] = {}
    (error,) = together(world.worker(0, timeout=0.1, history=history))
    assert isinstance(error, RendezvousTimeout)
    (late,) = together(world.worker(1))
    assert isinstance(late, RendezvousTimeout)
    assert str(late) == str(error)
    again = threading.Thread(target=world.worker(0, history=history))
    again.start()
    while read_current(world.open_store(), KEYS)[1].number < 2:  # type: ignore[union-attr]
        os.sched_yield()
    assert len(formed(together(world.worker(1)))) == 2
    again.join()


@pytest.mark.parametrize("terms", [{"restart": 1}, {}])
def test_a_worker_that_was_started_after_a_failure_does_not_share_it(
    hashed: World, monkeypatch: pytest.MonkeyPatch, terms: dict[str, int]
) -> None:
    together(hashed.worker(0, timeout=0.05))
    if not terms:
        monkeypatch.setattr(rendezvous_search, "_STARTED", time.time() + 11)
    assert len(formed(together(hashed.worker(0, **terms), hashed.worker(1, **terms)))) == 2


def test_a_worker_that_fails_before_it_registers_ends_the_wait_of_the_others(hashed: World) -> None:
    failing = GroupFinder(hashed.open_store(), 2, LONG)
    outcomes: Outcomes = []
    other = threading.Thread(target=lambda: outcomes.extend(together(hashed.worker(0))))
    other.start()
    failing.report("worker 'b' (rank 1)", KEYS, ValueError("invalid device map\nand more"))
    other.join()
    assert type(outcomes[0]) is RendezvousError
    assert str(outcomes[0]) == "worker 'b' (rank 1) failed in init_rpc: ValueError: invalid device map"
    assert isinstance(together(hashed.worker(0))[0], RendezvousError), "the failure is for those who come later, too"


def test_a_failure_is_not_reported_into_a_group_that_exists(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    GroupFinder(hashed.open_store(), 2, LONG).report("worker 'w1' (rank 1)", KEYS, ValueError("bad"))
    hashed.kill(records[1])
    (found,) = together(hashed.worker(1))
    assert found == FoundGroup(records, exists=True)


# -- workers that died while the group formed ------------------------------------------------------------------


def register_dead(store: Store, rank: int, *, pid: int, restart: int = -1) -> Epoch:
    """Begin an epoch in which a worker registered that then died."""
    epoch = Epoch(1, 77, 2)
    assert swap_current(store, KEYS, "", epoch)
    dead = Registration(WorkerRecord(f"w{rank}", rank, 4242, ()), 2, pid, socket.gethostname(), restart)
    own = PrefixStore(epoch.prefix, store)
    for key in ("first", f"name/w{rank}", f"rank/{rank}"):
        own.set(key, Records(KEYS, store, epoch.prefix).encode(key, dead))
    return epoch


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_a_worker_that_died_while_the_group_formed_does_not_stop_its_successor(hashed: World) -> None:
    register_dead(hashed.open_store(), 1, pid=dead_pid())
    assert len(formed(together(hashed.worker(0), hashed.worker(1)))) == 2


def test_all_meet_again_when_a_launcher_has_started_a_worker_again(hashed: World) -> None:
    register_dead(hashed.open_store(), 1, pid=os.getpid(), restart=0)
    assert len(formed(together(hashed.worker(0, restart=0), hashed.worker(1, restart=1)))) == 2


def test_a_process_whose_init_was_interrupted_does_not_stop_itself(hashed: World) -> None:
    epoch = register_dead(hashed.open_store(), 1, pid=os.getpid())
    assert len(formed(together(hashed.worker(0), hashed.worker(1, history={4242: epoch.group})))) == 2


def test_a_living_worker_in_the_place_of_another_is_a_duplicate(hashed: World) -> None:
    register_dead(hashed.open_store(), 1, pid=os.getpid())
    (error,) = together(hashed.worker(1))
    assert isinstance(error, DuplicateWorker)


# -- tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [None, derive_keys(b"the token of another group, 32 bytes")])
def test_workers_with_different_tokens_learn_it_at_once(hashed: World, others: GroupKeys | None) -> None:
    for error in together(hashed.worker(0), hashed.worker(1, keys=others)):
        assert isinstance(error, UnauthenticatedRecord)
        assert "Start every worker with the same TELEGRAD_TOKEN" in str(error)


def test_entries_of_an_epoch_are_not_believed_in_another(hashed: World) -> None:
    records = formed(together(hashed.worker(0), hashed.worker(1)))
    store = hashed.open_store()
    old = read_current(store, KEYS)[1]
    assert old is not None
    hashed.leave(*records)
    new = Epoch(2, 99, 2)
    text, _ = read_current(store, KEYS)
    assert swap_current(store, KEYS, text, new)
    for key in ("first", "name/w0", "name/w1", "rank/0", "rank/1", "confirmed/0", "confirmed/1", "outcome"):
        PrefixStore(new.prefix, store).set(key, PrefixStore(old.prefix, store).get(key))
    (error,) = together(hashed.worker(0))
    assert isinstance(error, UnauthenticatedRecord)


# -- a store that is lost -------------------------------------------------------------------------------------


def survivors(hashed: World, records: Sequence[WorkerRecord], store: Store) -> list[bool]:
    return [hashed.boards[record.incarnation].publish_group(store, records) for record in records]


def test_survivors_publish_their_group_in_an_empty_store() -> None:
    lost, new = HashStore(), HashStore()
    world = World(lambda: lost, 3)
    records = formed(together(*(world.worker(rank) for rank in range(3))))
    world.kill(records[0])
    assert survivors(world, records[1:], new) == [True, True]
    world.open_store = lambda: new
    (found,) = together(world.worker(0))
    assert isinstance(found, FoundGroup)
    assert found.exists
    assert names(found) == ["w1", "w2"]


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_replacement_that_came_before_the_survivors_joins_them(waiting: int) -> None:
    lost, new = HashStore(), HashStore()
    world = World(lambda: lost, 3)
    records = formed(together(*(world.worker(rank) for rank in range(3))))
    world.kill(*records[:waiting])
    world.open_store = lambda: new
    outcomes: Outcomes = []
    early = threading.Thread(target=lambda: outcomes.extend(together(*(world.worker(rank) for rank in range(waiting)))))
    early.start()
    while (epoch := read_current(new, KEYS)[1]) is None or not PrefixStore(epoch.prefix, new).check(["rank/0"]):
        os.sched_yield()
    for record in records[waiting:]:
        assert world.boards[record.incarnation].publish_group(new, records)
    early.join()
    assert outcomes == [FoundGroup(records, exists=True)] * waiting


def test_survivors_do_not_disturb_another_group_that_has_formed() -> None:
    lost, new = HashStore(), HashStore()
    world = World(lambda: lost)
    records = formed(together(world.worker(0), world.worker(1)))
    world.open_store = lambda: new
    others = formed(together(world.worker(0), world.worker(1)))
    assert survivors(world, records, new) == [False, False]
    world.kill(others[1])
    (found,) = together(world.worker(1))
    assert found == FoundGroup(others, exists=True)


def test_a_worker_that_loses_the_store_looks_for_another() -> None:
    old, new = tcp_server(), HashStore()
    world = World(lambda: new)
    finder = GroupFinder(tcp_client(old), 2, LONG, reopen=lambda seconds: new)
    me = WorkerRecord("w1", 1, 5_000, ())
    outcomes: Outcomes = []
    waits = threading.Thread(target=lambda: outcomes.append(finder.find(me, KEYS, lambda records: None, world.probe)))
    waits.start()
    while read_current(old, KEYS)[1] is None:
        os.sched_yield()
    del old
    first = together(world.worker(0))
    waits.join()
    assert len(formed([*first, *outcomes])) == 2


def test_a_store_that_stays_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_epochs, "STORE_GRACE", 0.1)

    class Lost(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    def reopen(seconds: float) -> Store:
        raise RendezvousTimeout("cannot reach the rendezvous store")

    finder = GroupFinder(Lost(), 2, LONG, reopen=reopen)
    with pytest.raises(StoreLost, match=r"worker 'w1' \(rank 1\) lost the rendezvous store .*Connection reset"):
        finder.find(WorkerRecord("w1", 1, 5, ()), KEYS, lambda records: None, lambda record: "gone")


# -- open groups ----------------------------------------------------------------------------------------------


@pytest.fixture
def opened(open_store: OpenStore) -> World:
    return World(open_store, 0)


def test_workers_join_an_open_group_one_after_the_other(opened: World) -> None:
    assert [names(together(opened.worker(rank))[0]) for rank in range(3)] == [["w0"], ["w0"], ["w0", "w1"]]


def test_workers_that_join_an_open_group_at_once_know_each_other(opened: World) -> None:
    outcomes = together(*(opened.worker(rank) for rank in range(12)))
    known = {}
    for rank, found in enumerate(outcomes):
        assert isinstance(found, FoundGroup), found
        assert found.is_open
        known[f"w{rank}"] = set(names(found)) - {f"w{rank}"}
    for one in known:
        for other in known.keys() - {one}:
            assert other in known[one] or one in known[other]
    assert sum(not found.exists for found in outcomes if isinstance(found, FoundGroup)) == 1


def test_workers_without_a_rank_get_the_lowest_ids(opened: World) -> None:
    def joins(name: str) -> FoundGroup:
        rank = 0
        while True:
            try:
                return opened.worker(rank, name, any_id=True)()
            except IdTaken as taken:
                rank = taken.free

    outcomes = together(*(lambda name=name: joins(name) for name in "abcdefgh"))  # type: ignore[misc]
    assert all(isinstance(found, FoundGroup) for found in outcomes), outcomes
    epoch = read_current(opened.open_store(), KEYS)[1]
    assert epoch is not None
    assert [member.record.id for member in epoch.members] == list(range(8))


def test_a_dead_member_of_an_open_group_blocks_nobody(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    (_, second) = (member.record for member in read_current(opened.open_store(), KEYS)[1].members)  # type: ignore[union-attr]
    opened.kill(second)
    (found,) = together(opened.worker(2))
    assert isinstance(found, FoundGroup)
    assert found.exists
    (again,) = together(opened.worker(1))
    assert "w1" in names(again), "its predecessor, whose place it takes"


def test_a_member_that_left_an_open_group_keeps_its_name_and_id(opened: World) -> None:
    records = []
    for rank in range(2):
        together(opened.worker(rank))
        records.append(max(opened.boards))
    opened.boards[records[1]].leave()
    opened.states[records[1]] = "gone"
    (other,) = together(opened.worker(1, "other"))
    assert isinstance(other, DuplicateWorker)
    assert "own rank, such as 2" in str(other)
    (found,) = together(opened.worker(2, "third"))
    assert names(found) == ["w0"]
    (again,) = together(opened.worker(1))
    assert names(again) == ["w0", "w1", "third"]


def test_an_open_group_whose_members_are_gone_is_over(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    opened.states.clear()
    (found,) = together(opened.worker(1))
    assert found == FoundGroup([WorkerRecord("w1", 1, max(opened.boards), ())], is_open=True)


def test_dead_members_are_marked(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    first, second = (member.record for member in read_current(opened.open_store(), KEYS)[1].members)  # type: ignore[union-attr]
    opened.boards[second.incarnation].remove([first])
    marked = read_current(opened.open_store(), KEYS)[1]
    assert marked is not None
    assert [(member.left, member.lost) for member in marked.members] == [(False, True), (False, False)]


def test_a_living_name_or_id_of_an_open_group_is_refused(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    for rank, name, words in (
        (1, "w1", "alive"),
        (1, "x", "two workers have rank 1"),
        (5, "w1", "two workers are called"),
    ):
        (error,) = together(opened.worker(rank, name))
        assert isinstance(error, DuplicateWorker)
        assert words in str(error)


def test_open_and_fixed_groups_do_not_mix(hashed: World) -> None:
    formed(together(hashed.worker(0), hashed.worker(1)))
    (error,) = together(hashed.worker(2, world_size=0))
    assert isinstance(error, MixedGroup)
    hashed.states.clear()
    (found,) = together(hashed.worker(2, world_size=0))
    assert isinstance(found, FoundGroup)
    (error,) = together(hashed.worker(0))
    assert isinstance(error, MixedGroup)
    hashed.states.clear()
    assert len(formed(together(hashed.worker(0), hashed.worker(1)))) == 2


def test_a_store_may_be_for_one_kind_of_groups_of_the_processes_of_one_start(
    hashed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch, where a static group that has ended still refuses dynamic members."""
    history: dict[int, int] = {}
    formed(together(hashed.worker(0, history=history), hashed.worker(1)))
    hashed.states.clear()
    (error,) = together(hashed.worker(2, world_size=0, one_kind=True))
    assert isinstance(error, MixedGroup)
    (found,) = together(hashed.worker(0, world_size=0, one_kind=True, history=history))  # it was in that group
    assert isinstance(found, FoundGroup)
    hashed.states.clear()
    formed(together(hashed.worker(0), hashed.worker(1)))
    hashed.states.clear()
    monkeypatch.setattr("telegrad.rendezvous_search._STARTED", time.time() + 1)
    (found,) = together(hashed.worker(2, world_size=0, one_kind=True))  # it was started later
    assert isinstance(found, FoundGroup)


def test_survivors_of_an_open_group_publish_it_in_an_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, new = HashStore(), HashStore()
    world = World(lambda: lost, 0)
    for rank in range(3):
        together(world.worker(rank))
    members = [member.record for member in read_current(lost, KEYS)[1].members]  # type: ignore[union-attr]
    world.kill(members[0])
    world.open_store = lambda: new
    outcomes: Outcomes = []
    early = threading.Thread(
        target=lambda: outcomes.extend(together(world.worker(0, is_host=True, restart=1, generation=65536)))
    )
    early.start()
    for record in members[1:]:
        assert world.boards[record.incarnation].publish_group(new, members, {members[0].incarnation})
    early.join()
    assert outcomes == [FoundGroup(members, exists=True, is_open=True)]


# -- races ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_workers_that_come_in_any_order_agree_on_one_group(seed: int) -> None:
    store = HashStore()
    chance = random.Random(seed)
    world = World(lambda: PrefixStore("telegrad", store), 3)
    for round_number in range(4):
        ranks = [0, 1, 2]
        chance.shuffle(ranks)
        world.open_store = lambda: store
        outcomes = together(*(world.worker(rank) for rank in ranks))
        records = formed(outcomes)
        if chance.random() < 0.5:
            world.leave(*records)
        elif chance.random() < 0.5:
            world.kill(*records)
        else:  # one is replaced, and then all leave
            victim = chance.choice(records)
            world.kill(victim)
            (found,) = together(world.worker(victim.id))
            assert isinstance(found, FoundGroup)
            assert found.exists, round_number
            world.states.clear()


def test_the_first_worker_of_an_open_group_waits_for_survivors_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_search, "REPUBLISH_WAIT", 0.1)
    store = HashStore()
    world = World(lambda: store, 0)
    (found,) = together(world.worker(0, is_host=True, restart=1))
    assert isinstance(found, FoundGroup)
    assert not found.exists


# -- failures that are told -----------------------------------------------------------------------------------


def told(world: World, failing: int, histories: list[dict[int, int]]) -> RendezvousError:
    """Let one worker report that it failed, and return what the other one gets."""
    finder = GroupFinder(world.open_store(), 2, LONG, history=histories[failing])
    finder.report(f"worker {failing}", KEYS, ValueError("it has a bad option"))
    other = together(world.worker(1 - failing, history=histories[1 - failing]))[0]
    assert isinstance(other, RendezvousError)
    return other


def test_after_a_failure_that_it_was_told_of_a_process_may_try_again(hashed: World) -> None:
    histories: list[dict[int, int]] = [{}, {}]
    for failing in (0, 1, 0):
        assert f"worker {failing} failed in init_rpc: ValueError: it has a bad option" in str(
            told(hashed, failing, histories)
        )
    records = formed(together(*(hashed.worker(rank, history=histories[rank]) for rank in (0, 1))))
    assert [record.id for record in records] == [0, 1]


def test_a_worker_that_fails_after_its_group_is_over_tells_those_that_will_form_the_next(hashed: World) -> None:
    histories: list[dict[int, int]] = [{}, {}]
    records = formed(together(*(hashed.worker(rank, history=histories[rank]) for rank in (0, 1))))
    for record in records:
        hashed.boards[record.incarnation].leave(is_over=True)
        hashed.states[record.incarnation] = "gone"
    assert "it has a bad option" in str(told(hashed, 1, histories))
    formed(together(*(hashed.worker(rank, history=histories[rank]) for rank in (0, 1))))


# -- interrupts, and errors of others -------------------------------------------------------------------------


def test_those_who_come_after_an_interrupt_begin_anew(hashed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(start: float, deadline: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rendezvous, "pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hashed.worker(0)()
    formed(together(hashed.worker(0), hashed.worker(1)))


def test_the_error_of_others_does_not_fail_the_next_group(hashed: World) -> None:
    first: dict[int, int] = {}
    with pytest.raises(RendezvousTimeout):
        hashed.worker(0, timeout=0.05, history=first)()
    late = GroupFinder(hashed.open_store(), 2, LONG, history=(second := {}))
    with pytest.raises(RendezvousTimeout, match=r"ranks? 1"):
        late.find(WorkerRecord("w1", 1, 77, ()), KEYS, lambda records: None, hashed.probe)

    def again() -> FoundGroup:
        late.report("w1", KEYS, RendezvousTimeout("rank 1 did not join"))
        return hashed.worker(1, history=second)()

    formed(together(hashed.worker(0, history=first), again))


def test_a_process_that_reports_the_death_of_another_worker_before_it_comes_gets_the_error(hashed: World) -> None:
    history: dict[int, int] = {}
    reporting = GroupFinder(hashed.open_store(), 2, LONG, history=history)
    reporting.report("worker 'w1' (rank 1)", KEYS, RendezvousError("its actor is dead"), of_another=True)
    for worker in (hashed.worker(0, history=history), hashed.worker(0)):
        with pytest.raises(RendezvousError, match=r"worker 'w1' \(rank 1\) failed in init_rpc: its actor is dead"):
            worker()


def test_members_are_asked_at_the_same_time_whether_they_are_there() -> None:
    shared = HashStore()
    world = World(lambda: shared, world_size=6)
    formed(together(*[world.worker(rank) for rank in range(6)]))
    meeting = threading.Barrier(5)

    def probe(record: WorkerRecord) -> str:
        if threading.current_thread() is not threading.main_thread():
            meeting.wait(LONG)  # for all the others
        return "gone"

    finder = GroupFinder(shared, 6, 1.0)
    with pytest.raises(RendezvousTimeout, match="5 of 6 workers did not join"):
        finder.find(WorkerRecord("w0", 0, 77, ()), KEYS, lambda records: None, probe)
    assert not meeting.broken


# -- returning to an open group -------------------------------------------------------------------------------


def test_who_has_left_an_open_group_in_order_returns_without_votes(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    _, second = (member.record for member in read_current(opened.open_store(), KEYS)[1].members)  # type: ignore[union-attr]
    opened.leave(second)
    assert opened.worker(1)().generation == 1
    current = read_current(opened.open_store(), KEYS)[1]
    assert current is not None
    assert [(one.record.generation, one.gone) for one in current.members] == [(0, False), (1, False)]


def test_the_place_of_a_lost_member_of_an_open_group_needs_votes(opened: World) -> None:
    together(opened.worker(0))
    together(opened.worker(1))
    first, second = (member.record for member in read_current(opened.open_store(), KEYS)[1].members)  # type: ignore[union-attr]
    opened.boards[first.incarnation].remove([second])
    opened.kill(second)
    assert opened.worker(1)().generation == -1
