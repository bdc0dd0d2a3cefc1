"""Torch stores for tests of the rendezvous."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore

from telegrad.errors import RendezvousError

T = TypeVar("T")


def tcp_server() -> TCPStore:
    """Return a store that listens on a free port of the loopback address."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def tcp_client(server: TCPStore) -> TCPStore:
    """Return a connection to the store."""
    return TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10), wait_for_workers=False)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port: while it is bound here, the kernel gives it to nobody who does not ask for it by number."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


def together(*workers: Callable[[], T]) -> list[T | RendezvousError]:
    """Run all workers concurrently in threads, and return what each returned or raised."""
    outcomes: dict[int, T | RendezvousError] = {}

    def run(index: int, worker: Callable[[], T]) -> None:
        try:
            outcomes[index] = worker()
        except RendezvousError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[index] for index in range(len(workers))]
