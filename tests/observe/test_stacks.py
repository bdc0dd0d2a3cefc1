"""The stacks of threads, of more threads than can be read, and of threads that end meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import wait_until

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.observe.gather import gather
from telegrad.observe.model import ViewRequest
from telegrad.observe.stacks import Stacks
from telegrad.observe.stuck import analyze
from telegrad.observe.stuck_text import render
from telegrad.testing.group import local_group

_go = threading.Event()
_begun = threading.Semaphore(0)


@contextmanager
def many_threads(number: int) -> Iterator[None]:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, args=(60,)) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def wait_to_go() -> None:
    _begun.release()
    assert _go.wait(60)


def test_a_thread_beyond_the_hundredth_is_unknown_and_others_are_not() -> None:
    main = threading.get_ident()
    assert not Stacks("a").is_unknown(main)
    assert "test_stacks.py" in Stacks("a").where(main)
    with many_threads(110):
        # Another thread reads them: that of the reader is always known.
        found: list[Stacks] = []
        reader = threading.Thread(target=lambda: found.append(Stacks("a")))
        reader.start()
        reader.join()
        assert found[0].is_unknown(main)
        assert "an unknown line" in found[0].where(main)
        assert not found[0].is_unknown(12345)  # no thread


def test_a_call_whose_stack_cannot_be_read_is_not_called_deferred() -> None:
    _go.clear()
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        future = rpc.rpc_async("b", wait_to_go, timeout=60)
        assert _begun.acquire(timeout=60)
        with many_threads(120):
            view = gather(group["a"], ViewRequest(stacks=True))
            text = render(analyze(view))
        _go.set()
        future.wait()
    (call,) = (call for worker in view.workers for call in worker.served)
    assert call.state == "running"
    assert "at an unknown line: it has" in text


def test_stacks_are_read_while_threads_begin_and_end() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            thread = threading.Thread(target=recurse, args=(20,))
            thread.start()
            thread.join()

    def recurse(depth: int) -> int:
        return 0 if depth == 0 else 1 + recurse(depth - 1)

    churning = [threading.Thread(target=churn) for _ in range(4)]
    for thread in churning:
        thread.start()
    try:
        seen: set[int] = set()
        for _ in range(300):
            seen |= set(Stacks("a").all())
        wait_until(lambda: len(seen | set(Stacks("a").all())) > 4)
    finally:
        stop.set()
        for thread in churning:
            thread.join()
