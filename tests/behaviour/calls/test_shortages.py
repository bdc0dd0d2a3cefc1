"""A worker recovers when the operating system refuses a resource, whichever and whenever.

A small program runs once to count its requests to the system: threads, sockets, eventfds, shared memory, buffers. Then
it runs again for each of these requests, which fails. A call may then fail with the cause, or be served later. No peer
may be lost, and afterwards everything must work.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.dispatch import Dispatcher
from telegrad.default_agent import acting_as, default_agent
from telegrad.errors import DeadlineExceeded, WorkerLost
from telegrad.testing.group import local_group
from telegrad.transport import slab_receiver, slab_sender, sockets
from telegrad.transport.buffers import BufferPool
from telegrad.transport.memory_map import SharedMapping
from telegrad.waiting import RealRuntime
from telegrad.wire import frame_reader

Group = dict[str, Agent]
PATIENCE = 20.0  # seconds for one operation
LARGE = 200_000  # elements of a tensor that travels in shared memory or in chunks
MOST = 6  # runs per kind, with refused requests spread over all that the program makes


class Refused:
    """Counts the requests for one kind of resource, and refuses `length` of them starting with number `first`."""

    def __init__(self, make_error: Callable[[], Exception]) -> None:
        self._make_error = make_error
        self._lock = threading.Lock()  # protects count and refused
        self.count = 0
        self.first = -1
        self.length = 1
        self.refused = 0

    def ask(self) -> None:
        with self._lock:
            number, self.count = self.count, self.count + 1
            refuse = 0 <= self.first <= number < self.first + self.length
            self.refused += refuse
        if refuse:
            raise self._make_error()

    def over(self) -> None:
        self.first = -1


def no_descriptors() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


def no_buffers() -> OSError:
    return OSError(errno.ENOBUFS, "No buffer space available")


def no_kernel_memory() -> OSError:
    return OSError(errno.ENOMEM, "Cannot allocate memory")


KINDS: dict[str, Callable[[], Exception]] = {
    "a thread": lambda: RuntimeError("can't start new thread"),
    "an event": MemoryError,
    "a socket": no_descriptors,
    "an accept": no_descriptors,
    "an eventfd": no_descriptors,
    "a poll registration": no_kernel_memory,
    "a read": no_kernel_memory,
    "a write": no_buffers,
    "shared memory": no_descriptors,
    "a mapping": no_kernel_memory,
    "a buffer": MemoryError,
    "a body": MemoryError,
    "a delivery": MemoryError,
}


@contextmanager
def refusing(kind: str) -> Iterator[Refused]:
    refused = Refused(KINDS[kind])

    def after_asking(function: Any) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            refused.ask()
            return function(*args, **kwargs)

        return asked

    class ShortSocket(socket.socket):
        """A socket whose system calls may fail."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if kind == "a socket" and kwargs.get("fileno") is None and len(args) < 4:
                refused.ask()
            super().__init__(*args, **kwargs)

        if kind == "an accept":
            accept = after_asking(socket.socket.accept)
        if kind == "a read":
            recv_into = after_asking(socket.socket.recv_into)
            recvmsg_into = after_asking(socket.socket.recvmsg_into)
        if kind == "a write":
            send = after_asking(socket.socket.send)
            sendmsg = after_asking(socket.socket.sendmsg)

    def no_room(length: int) -> bytearray | None:
        try:
            refused.ask()
        except MemoryError:
            return None
        return bytearray(length)

    original_set_mask = sockets.SocketPoller.set_mask

    def set_mask(self: sockets.SocketPoller, fd: int, item: Any, mask: int) -> None:
        if self._items.get(fd) is not item:
            refused.ask()
        original_set_mask(self, fd, item, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", ShortSocket)
        if kind == "a thread":
            patch.setattr(RealRuntime, "start_thread", after_asking(RealRuntime.start_thread))
        elif kind == "an event":
            patch.setattr(RealRuntime, "event", after_asking(RealRuntime.event))
        elif kind == "an eventfd":
            patch.setattr(os, "eventfd", after_asking(os.eventfd))
        elif kind == "a poll registration":
            patch.setattr(sockets.SocketPoller, "set_mask", set_mask)
        elif kind == "shared memory":
            patch.setattr(slab_sender, "make_memory", after_asking(slab_sender.make_memory))
        elif kind == "a mapping":
            for module in (slab_sender, slab_receiver):
                patch.setattr(module, "SharedMapping", after_asking(SharedMapping))
        elif kind == "a buffer":
            patch.setattr(BufferPool, "take", after_asking(BufferPool.take))
        elif kind == "a body":
            patch.setattr(frame_reader, "_allocate_body", no_room)
        elif kind == "a delivery":
            patch.setattr(Dispatcher, "deliver", after_asking(Dispatcher.deliver))
        yield refused


NOT_REQUESTED = {("shared memory", "tcp"), ("a mapping", "tcp")}
"""Resources that the program does not need over a transport."""


# -- the program --------------------------------------------------------------------------------------------------


def add(x: Any, y: Any) -> Any:
    return x + y


def count(depth: int, other: str, me: str) -> int:
    """Call back and forth between two workers."""
    if depth == 0:
        return 0
    deeper: int = rpc.rpc_sync(other, count, (depth - 1, me, other), timeout=PATIENCE)
    return 1 + deeper


async def add_later(x: int, y: int) -> int:
    return x + y


def size(parts: list[Any]) -> int:
    return len(parts)


class Rendezvous:
    """Shared by functions that return only when all of them run at the same time."""

    barrier = threading.Barrier(1)


def wait_at_barrier() -> int:
    return Rendezvous.barrier.wait(PATIENCE)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def plain() -> None:
    assert rpc.rpc_sync("b", add, (1, 2), timeout=PATIENCE) == 3


def in_threads() -> None:
    with ThreadPoolExecutor(3) as pool:
        agent = default_agent()
        results = list(pool.map(lambda x: agent.call("b", add, (x, 1), timeout=PATIENCE), range(3)))
    assert results == [1, 2, 3]


def nested() -> None:
    assert rpc.rpc_sync("b", count, (4, "a", "b"), timeout=PATIENCE) == 4


def slow_ones_in_parallel() -> None:
    Rendezvous.barrier = threading.Barrier(4)
    futures = [rpc.rpc_async("b", wait_at_barrier, timeout=PATIENCE) for _ in range(4)]
    assert sorted(future.wait() for future in futures) == [0, 1, 2, 3]


def asynchronous() -> None:
    futures = [rpc.rpc_async("b", add, (x, 1), timeout=PATIENCE) for x in range(4)]
    assert [future.wait() for future in futures] == [1, 2, 3, 4]


def coroutines() -> None:
    assert rpc.rpc_async("b", add_later, (3, 4), timeout=PATIENCE).wait() == 7


def large() -> None:
    ones = torch.ones(LARGE)
    for _ in range(3):  # the first one offers shared memory, later ones use it
        assert torch.equal(rpc.rpc_sync("b", add, (ones, 1), timeout=PATIENCE), ones + 1)


def many() -> None:
    assert rpc.rpc_sync("b", size, ([torch.ones(1) for _ in range(5000)],), timeout=PATIENCE) == 5000


def many_descriptors() -> None:
    """Send so many tensors that their descriptors alone do not fit the buffer that frames are read into."""
    assert rpc.rpc_sync("b", size, ([torch.ones(1) for _ in range(10_000)],), timeout=PATIENCE) == 10_000


def backward() -> None:
    x = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", square, (x,), timeout=PATIENCE)
        autograd.backward(context, [(y * y).sum()], timeout=PATIENCE)
        assert torch.equal(autograd.get_gradients(context)[x], 4 * x.detach() ** 3)


def references() -> None:
    reference = rpc.remote("b", add, (1, 2), timeout=PATIENCE)
    assert reference.to_here(timeout=PATIENCE) == 3
    assert rpc.rpc_sync("b", add, (1, 1), timeout=PATIENCE) == 2


MORE = {"a body": (many_descriptors,)}
"""What the program does in addition, by kind of resource."""
PROGRAM = (plain, in_threads, nested, asynchronous, coroutines, large, many, backward, references)


def run(group: Group, *more: Callable[[], None]) -> list[Exception]:
    """Run the program, and return the errors of its parts."""
    raised = []
    with acting_as(group["a"]):
        for part in (*PROGRAM, *more):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - checked by the caller
                raised.append(error)
    return raised


def shut_down(group: Group) -> None:
    with ThreadPoolExecutor(len(group)) as pool:
        list(pool.map(lambda agent: agent.shutdown(timeout=PATIENCE), group.values()))


def check_errors(errors: list[Exception]) -> None:
    """Accept any error except a lost peer, an exceeded deadline or a wrong result."""
    for error in errors:
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, WorkerLost | DeadlineExceeded | AssertionError):
                raise error
            seen = seen.__cause__


def requests_of(kind: str, transport: str) -> int:
    with refusing(kind) as refused, local_group(transport=transport) as group:
        before = refused.count  # startup is another test
        assert run(group, *MORE.get(kind, ())) == []
        shut_down(group)
        return refused.count - before


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_recovers_when_the_system_refuses_a_resource(kind: str, transport: str) -> None:
    total = requests_of(kind, transport)
    assert (total > 0) == ((kind, transport) not in NOT_REQUESTED)
    refusals = 0
    step = max(1, total // MOST)
    for length in (1, 3):
        for first in range(0, total, step * length):
            with refusing(kind) as refused, local_group(transport=transport) as group:
                refused.first, refused.length = refused.count + first, length
                check_errors(run(group, *MORE.get(kind, ())))
                refused.over()
                assert run(group, slow_ones_in_parallel) == [], (
                    f"after requests {first} to {first + length - 1} for {kind} were refused"
                )
                shut_down(group)
                refusals += refused.refused
    assert refusals > 0 or total == 0
