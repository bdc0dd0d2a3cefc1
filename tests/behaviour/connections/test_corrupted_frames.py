"""A resumable session survives frames that are corrupted on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from tests.support.log_lines import PATIENCE, LogLines
from tests.support.redirection import redirected

from telegrad.testing.group import local_group
from telegrad.transport.addresses import parse_address
from telegrad.wire.frames import HEADER, HEADER_SIZE, Kind


class CorruptingProxy:
    """A proxy between two workers that changes the length of the first frame of a given kind with `corrupt`."""

    def __init__(self, target: str, kind: Kind, corrupt: Callable[[int], int]) -> None:
        address = parse_address(target)
        self._target = (address.host, address.port)
        self._kind = kind
        self._corrupt = corrupt
        self.corrupted = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for task, source, sink in ((self._forward, client, server), (self._back, server, client)):
                self._threads.append(threading.Thread(target=task, args=(source, sink)))
                self._threads[-1].start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as stream:
            while len(header := stream.read(HEADER_SIZE)) == HEADER_SIZE:
                fields = list(HEADER.unpack(header))
                body = stream.read(fields[3])
                if fields[2] == self._kind and not self.corrupted:
                    self.corrupted += 1
                    fields[3] = self._corrupt(fields[3])
                sink.sendall(HEADER.pack(*fields) + body)
        self._shut_down(source, sink)

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._shut_down(source, sink)

    def _shut_down(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._shut_down(self._listener)
        self._listener.close()
        self._threads[0].join()
        self._shut_down(*self._sockets)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._sockets:
            end.close()


times_run: list[int] = []


def record_and_add_one(number: int, x: torch.Tensor) -> torch.Tensor:
    times_run.append(number)
    return x + 1


@pytest.mark.parametrize(
    "corrupt", [lambda n: n ^ 0x80000000, lambda n: n - 1, lambda n: n // 2], ids=["huge", "-1", "half"]
)
@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.BULK_HEAD, Kind.BULK_CHUNK])
def test_the_session_resumes_after_a_frame_was_corrupted_and_the_call_returns(
    kind: Kind, corrupt: Callable[[int], int], log: LogLines
) -> None:
    x = torch.arange(8.0 if kind == Kind.MESSAGE else 400_000.0)
    times_run.clear()
    with local_group(["a", "b"], transport="plain tcp") as agents:
        proxy = CorruptingProxy(agents["b"].me.addresses[0], kind, corrupt)
        try:
            with redirected(agents["a"], agents["b"].me.addresses[0], proxy.address):
                assert torch.equal(agents["a"].call("b", record_and_add_one, (1, x), timeout=PATIENCE), x + 1)
                assert torch.equal(agents["a"].call("b", record_and_add_one, (2, x), timeout=PATIENCE), x + 1)
            assert times_run == [1, 2]
            assert (proxy.corrupted, proxy.connections) == (1, 2)
            told = sorted([log.next(), log.next()], key=lambda line: "reconnected" in line)
            assert "closed the connection with worker 'a'" in told[0]
            assert "worker 'a' reconnected to worker 'b'" in told[1]
            assert log.is_empty()
        finally:
            for agent in agents.values():
                agent.close()
            proxy.close()
    log.clear()
