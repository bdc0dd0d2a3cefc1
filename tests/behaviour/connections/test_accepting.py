"""Listeners report when the process runs out of file descriptors, and can be paused."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from telegrad.transport.sockets import SocketPoller
from telegrad.transport.unix import UnixTransport

PATIENCE = 20.0


def test_a_socket_listener_raises_when_no_file_descriptor_is_left(tmp_path: Path) -> None:
    transport = UnixTransport()
    listener = transport.listen(f"unix://{tmp_path}/a.sock")
    link = transport.connect(listener.address, time.monotonic() + PATIENCE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                listener.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()
    finally:
        link.close()
        listener.close()


def test_a_paused_listener_is_not_reported_by_the_poller(tmp_path: Path) -> None:
    transport, poller = UnixTransport(), SocketPoller()
    listener = transport.listen(f"unix://{tmp_path}/a.sock")
    poller.add(listener, read=True)
    link = transport.connect(listener.address, time.monotonic() + PATIENCE)
    try:
        assert [item for item, _ in poller.wait(None)] == [listener]
        poller.arm(listener, read=False)
        assert not poller.wait(0.0)
        poller.arm(listener, read=True)
        assert [item for item, _ in poller.wait(None)] == [listener]
    finally:
        link.close()
        listener.close()
        poller.close()
