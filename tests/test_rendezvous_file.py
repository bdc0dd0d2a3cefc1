"""A store in a file survives workers that are killed while they write, and says when it is gone."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore

from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import StoreLost
from telegrad.rendezvous import assemble
from telegrad.rendezvous_file import Prefixed, SharedFileStore


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def opened(path: str) -> SharedFileStore:
    return SharedFileStore(path, 0.2)


def test_entries_are_set_once_and_read_by_all(path: str) -> None:
    one, other = opened(path), opened(path)
    assert not one.check(["a"])
    assert one.compare_set("a", "", "first") == b"first"
    assert other.compare_set("a", "", "second") == b"first"
    assert other.compare_set("a", "first", "second") == b"second"
    assert other.compare_set("b", "expected", "value") == b"expected"
    one.set("c", b"third")
    assert one.check(["a", "c"])
    assert not one.check(["a", "b"])
    assert other.multi_get(["a", "c"]) == [b"second", b"third"]
    with pytest.raises(RuntimeError, match="has no entry 'b'"):
        other.get("b")


def test_it_has_the_format_of_the_store_of_torch(path: str) -> None:
    mine, theirs = Prefixed("p", opened(path)), PrefixStore("p", FileStore(path, -1))
    mine.set("a", "mine")
    theirs.set("b", "theirs")
    assert mine.get("b") == b"theirs"
    assert theirs.check(["a"])
    assert theirs.get("a") == b"mine"
    theirs.delete_key("a")
    assert not mine.check(["a"])


def test_a_prefix_keeps_its_store(path: str) -> None:
    store = Prefixed("outer", Prefixed("inner", opened(path)))
    gc.collect()
    store.set("a", "1")
    assert store.get("a") == b"1"


@pytest.mark.parametrize("left", range(1, 14))
def test_what_a_killed_writer_has_left_is_ignored_and_removed(path: str, left: int) -> None:
    store = opened(path)
    store.set("a", "1")
    size = os.path.getsize(path)
    store.set("b", "value")
    os.truncate(path, size + left)
    survivor = opened(path)
    assert survivor.check(["a"])
    assert not survivor.check(["b"])
    survivor.set("c", "3")
    assert opened(path).multi_get(["a", "c"]) == [b"1", b"3"]
    assert not opened(path).check(["b"])


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_taken_away_is_noticed(path: str, how: str) -> None:
    store = opened(path)
    store.set("a", "1")
    os.rename(path, f"{path}.old")
    if how == "replaced":
        opened(path).set("b", "2")
    with pytest.raises(RuntimeError, match=f"store was {how}"):
        store.check(["a"])


def test_a_lock_that_is_not_released_is_an_error(path: str) -> None:
    store = opened(path)
    store.set("a", "1")
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"was locked by another process for 0.2 s"):
            store.check(["a"])


def test_workers_that_wait_at_a_file_that_is_deleted_say_so(path: str) -> None:
    outcomes: list[Exception] = []
    store = Prefixed("p", opened(path))

    def wait() -> None:
        try:
            assemble(store, WorkerRecord("w0", 0, 1, ()), None, 2, 60.0)
        except StoreLost as error:
            outcomes.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not opened(path).check(["p/rank/0"]):
        os.sched_yield()
    os.unlink(path)
    waiting.join(30)
    assert "worker 'w0' (rank 0) lost the rendezvous store before the group was complete: the rendezvous file" in str(
        outcomes[0]
    )


_WRITER = """
import sys
from telegrad.rendezvous_file import SharedFileStore
store = SharedFileStore(sys.argv[1], 60.0)
print("begun", flush=True)
for number in range(10**9):
    store.set(f"{sys.argv[2]}/{number % 7}", f"{number:0100000}")
"""


def test_writers_that_are_killed_at_any_moment_leave_a_readable_file(path: str) -> None:
    store = SharedFileStore(path, 30.0)
    for name in "ab":
        command = [sys.executable, "-c", _WRITER, path, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            for number in range(20):
                store.set(f"mine/{name}/{number}", "x")
            writer.kill()
        assert SharedFileStore(path, 30.0).check([f"mine/{name}/{number}" for number in range(20)])
