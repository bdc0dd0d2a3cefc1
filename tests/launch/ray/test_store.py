"""`telegrad.launch.ray.store` with a coordinator in this process, and groups that meet there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.support.coordinator_thread import CoordinatorThread
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.launch.ray.store import RayStore, close_store, find_store, keep_store, store_url
from telegrad.rendezvous_epochs import GroupFinder
from telegrad.rendezvous_store import open_store


@pytest.fixture
def coordinator() -> Iterator[CoordinatorThread]:
    running = CoordinatorThread()
    yield running
    running.close()


@pytest.fixture
def store(coordinator: CoordinatorThread) -> RayStore:
    return RayStore(coordinator.call, ("192.0.2.1", 6379))


def test_torch_reaches_every_method_through_a_prefix(store: RayStore) -> None:
    prefixed = PrefixStore("p", store)
    prefixed.set("a", "1")
    assert prefixed.get("a") == store.get("p/a") == b"1"
    assert prefixed.check(["a"])
    assert not prefixed.check(["a", "b"])
    assert prefixed.compare_set("a", "1", "2") == b"2"
    assert prefixed.add("n", 5) == 5
    prefixed.multi_set(["b", "c"], ["3", "4"])
    assert prefixed.multi_get(["a", "b", "c"]) == [b"2", b"3", b"4"]
    prefixed.append("a", "x")
    prefixed.wait(["a"], timedelta(seconds=5))
    assert prefixed.get("a") == b"2x"
    assert prefixed.num_keys() == 4
    assert prefixed.delete_key("a")
    assert not prefixed.check(["a"])


def test_waiting_for_an_entry_that_never_comes_ends(store: RayStore) -> None:
    with pytest.raises(RuntimeError, match="never did not appear in the store"):
        PrefixStore("", store).wait(["never"], timedelta(seconds=0.01))


def test_a_store_that_is_kept_survives_the_loss_of_its_last_reference(coordinator: CoordinatorThread) -> None:
    keep_store("key", RayStore(coordinator.call))
    prefixed = PrefixStore("p", next(rendezvous(store_url("key")))[0])
    gc.collect()
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"
    close_store("key")
    assert find_store("key") is None


def test_the_url_gives_the_store_and_the_address_that_all_reach(
    store: RayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_store("key", store)
    monkeypatch.setenv("TELEGRAD_INIT_METHOD", store_url("key"))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    try:
        # Options without an init_method name env://, for which there is no address here.
        opened = open_store("env://", 1, 2, 5)
    finally:
        close_store("key")
    assert opened.store is store
    assert opened.address == ("192.0.2.1", 6379)
    assert (opened.rank, opened.world_size, opened.is_host) == (1, 2, False)


def test_a_process_without_the_store_is_told_so() -> None:
    with pytest.raises(RendezvousError, match="only the process of a worker"):
        open_store(store_url("other"), 0, 1, 5)


def test_a_group_forms_at_the_store(coordinator: CoordinatorThread) -> None:
    def find(rank: int) -> FoundGroup:
        finder = GroupFinder(PrefixStore("telegrad", stores[rank]), 3, 30.0)
        me = WorkerRecord(f"w{rank}", rank, rank + 1, ())
        return finder.find(me, None, lambda group: None, lambda record: "alive")

    stores = [RayStore(coordinator.call) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(find, range(3)))
    assert [[record.name for record in group.records] for group in found] == [["w0", "w1", "w2"]] * 3
