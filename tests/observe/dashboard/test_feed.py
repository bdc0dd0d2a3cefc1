from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
from tests.support.synthetic_group import SyntheticGroup

from telegrad.observe.dashboard.feed import BACKLOG, Feed
from telegrad.observe.model import EventPosition, GroupView


class Group:
    """A group that is looked at one second later each time."""

    def __init__(self) -> None:
        self.group, self.looks = SyntheticGroup(stages=1), 0
        self.asked: list[dict[str, EventPosition]] = []

    def gather(self, since: dict[str, EventPosition]) -> GroupView:
        self.asked.append(since)
        self.looks += 1
        return self.group.view(100_600.0 + self.looks, since)


def state(feed: Feed) -> Any:
    return json.loads(feed.state())


def test_events_are_asked_for_once() -> None:
    group = Group()
    feed = Feed(group.gather)
    for _ in range(3):
        feed.look()
    assert group.asked[0] == {}
    assert 0 < group.asked[1]["trainer"][1] <= group.asked[2]["trainer"][1]
    spans = [(span["worker"], span["began"], span["kind"], span.get("id")) for span in state(feed)["spans"]]
    assert len(spans) == len(set(spans))


def test_the_events_of_a_replaced_worker_are_asked_for_by_its_incarnation() -> None:
    group = Group()
    feed = Feed(group.gather)
    before = group.gather

    def replaced(since: dict[str, EventPosition]) -> GroupView:
        view = before(since)
        worker = msgspec.structs.replace(view.workers[0], incarnation=99, events=(), next_event=0)
        return msgspec.structs.replace(view, workers=(worker, *view.workers[1:]))

    feed._gather = replaced
    feed.look()
    feed.look()
    assert group.asked[-1]["trainer"] == (99, 0)
    assert group.asked[-1]["stage0"][1] > 0


def test_a_browser_that_does_not_keep_up_gets_the_whole_state_and_no_backlog() -> None:
    async def watch() -> list[bytes | None]:
        subscriber = feed.subscribe()
        for _ in range(3 * BACKLOG):
            await asyncio.to_thread(feed.look)
        await asyncio.sleep(0)
        found = []
        while subscriber._queue.qsize():
            found.append(await subscriber.next())
        feed.unsubscribe(subscriber)
        return found

    feed = Feed(Group().gather)
    found = asyncio.run(watch())
    assert len(found) <= BACKLOG
    assert found[0] == b""


def test_a_group_that_cannot_be_seen_is_an_error_on_the_page_until_it_can() -> None:
    group, failing = Group(), threading.Event()
    failing.set()

    def gather(since: dict[str, EventPosition]) -> GroupView:
        if failing.is_set():
            raise ConnectionError("nobody <there>")
        return group.gather(since)

    async def watch() -> tuple[str, str]:
        subscriber = feed.subscribe()
        feed.start()
        assert await asyncio.wait_for(subscriber.next(), 20) == b""
        error = state(feed)["error"]
        failing.clear()
        while not await asyncio.wait_for(subscriber.next(), 20):
            pass
        return error, state(feed)["error"]

    feed = Feed(gather, interval=0.2)
    try:
        assert asyncio.run(watch()) == ("ConnectionError: nobody <there>", "")
    finally:
        feed.close()


def test_closing_tells_every_browser() -> None:
    async def watch() -> bytes | None:
        subscriber = feed.subscribe()
        await asyncio.to_thread(feed.close)
        late = feed.subscribe()
        assert await asyncio.wait_for(late.next(), 20) is None
        return await asyncio.wait_for(subscriber.next(), 20)

    feed = Feed(Group().gather)
    assert asyncio.run(watch()) is None


def test_every_view_is_handed_on_once() -> None:
    seen: list[float] = []
    feed = Feed(Group().gather, on_view=lambda view: seen.append(view.now))
    feed.look()
    feed.look()
    assert seen == [100_601.0, 100_602.0]
