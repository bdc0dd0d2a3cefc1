"""`telegrad.launch.ray.coordinator` without Ray: its methods are coroutines."""

from __future__ import annotations

import asyncio

from telegrad.launch.ray.coordinator import Coordinator


def test_compare_set_writes_only_if_the_entry_has_the_expected_value() -> None:
    async def program() -> None:
        entries = Coordinator()
        assert await entries.compare_set("k", b"old", b"new") == b"old"
        assert not await entries.check(["k"])
        assert await entries.compare_set("k", b"", b"one") == b"one"
        assert await entries.compare_set("k", b"", b"two") == b"one"
        assert await entries.compare_set("k", b"one", b"two") == b"two"
        assert await entries.read(["k"], 0) == [b"two"]

    asyncio.run(program())


def test_of_many_that_swap_at_once_one_wins() -> None:
    async def program() -> None:
        entries = Coordinator()
        found = await asyncio.gather(*(entries.compare_set("k", b"", str(n).encode()) for n in range(20)))
        assert len(set(found)) == 1

    asyncio.run(program())


def test_a_read_waits_until_all_entries_exist() -> None:
    async def program() -> None:
        entries = Coordinator()
        reading = asyncio.create_task(entries.read(["a", "b"], 60))
        await entries.set("a", b"1")
        await asyncio.sleep(0)
        assert not reading.done()
        await entries.append("b", b"2")
        await entries.append("b", b"3")
        assert await reading == [b"1", b"23"]

    asyncio.run(program())


def test_a_read_of_entries_that_never_come_ends() -> None:
    async def program() -> None:
        assert await Coordinator().read(["a"], 0.01) is None

    asyncio.run(program())


def test_a_deleted_entry_is_gone() -> None:
    async def program() -> None:
        entries = Coordinator()
        assert await entries.add("n", 3) == 3
        assert await entries.add("n", -1) == 2
        assert await entries.count() == 1
        assert await entries.delete("n")
        assert not await entries.delete("n")
        assert await entries.count() == 0

    asyncio.run(program())


def test_all_who_wait_for_the_stop_learn_of_it() -> None:
    async def program() -> None:
        entries = Coordinator()
        waiting = [asyncio.create_task(entries.stopped()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await entries.stop()
        await asyncio.gather(*waiting)

    asyncio.run(program())
