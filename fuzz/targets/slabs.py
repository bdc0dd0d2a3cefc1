"""Frames about shared memory, with real memory of a few pages behind them."""

from __future__ import annotations

import gc
import os
import random
import struct
from collections.abc import Iterable
from typing import Any
from unittest import mock

from fuzz.choices import Choices
from fuzz.target import Target
from telegrad.errors import ProtocolError
from telegrad.transport.memory_map import make_memory
from telegrad.transport.shared_memory import SharedMemory
from telegrad.transport.slab_pool import SlabPool
from telegrad.wire.frames import PREFIX, Frame, Kind, Limits
from telegrad.wire.reassembly import Assembler

LIMIT = 64 * 4096


class _Link:
    """Records what is sent, and has the file descriptors that the peer sent."""

    peer = "a test"

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.sent = 0

    def take_fd(self) -> int | None:
        return self.fds.pop(0) if self.fds else None

    def send(self, *frame: object) -> None:
        self.sent += 1

    def offer(self, body: bytes, fd: int) -> bool:
        return True

    def unsent(self) -> bool:
        return False


def _pool() -> SlabPool:
    with mock.patch("os.register_at_fork"):  # it can never be undone, and there is one pool for each input
        return SlabPool(LIMIT)


def _run(data: bytes) -> None:
    choices = Choices(data)
    link: Any = _Link()
    pool = _pool()
    memory = SharedMemory(pool, link)
    assembler = Assembler(Limits(), lambda size: memoryview(bytearray(size)))
    assembler.open_region = memory.open_region
    kept: list[object] = []
    try:
        while choices:
            _step(choices, link, memory, assembler, kept)
            mapped = sum(mapping.size for mapping in memory._receiver._mappings.values())
            assert mapped <= LIMIT, f"{mapped} bytes are mapped"
    except ProtocolError:
        pass
    finally:
        memory.close()
        for fd in link.fds:
            os.close(fd)
    assert pool.total == 0
    assert not pool.slabs


def _step(choices: Choices, link: Any, memory: SharedMemory, assembler: Assembler, kept: list[object]) -> None:
    action = choices.below(10)
    number = choices.below(4) if not choices.rarely() else choices.integer()
    if action <= 2:
        size = 4096 * (1 + choices.below(8))
        if not choices.rarely():
            link.fds.append(make_memory(size))
        announced = size if not choices.rarely() else choices.number(20_000) & (1 << 64) - 1
        memory.handle_frame(Kind.SLAB_OFFER, struct.pack("<QQ", number, announced))
    elif action <= 5:
        head, data, region = b"head", choices.below(64), choices.pick((16, 4096, 8192, 1 << 40))
        place = 4096 * choices.below(4) if not choices.rarely() else choices.integer()
        body = PREFIX.pack(len(head), data, region) + struct.pack("<QQQ", number, place, choices.below(8)) + head
        if choices.rarely():
            body = body[: choices.below(len(body))]
        message = assembler.read(Frame(Kind.SHARED_MESSAGE, 1, 0, 0, body))
        assert message is not None
        message.region[:1], message.region[-1:]
        kept.append(message.region)
    elif action == 6:
        kept.clear()
        gc.collect(0)
        memory.send_releases(at_least=1)
    elif action == 7:
        lease = memory.allocate(choices.below(20_000) + 1)
        if lease is not None:
            memory.mark_sent(lease)
    elif action == 8:
        memory.apply_releases(number, choices.below(3))
    else:
        kind = choices.pick((Kind.SLAB_REPLY, Kind.REGION_FREE, Kind.SLAB_UNMAP, Kind.SLAB_OFFER))
        body = number.to_bytes(8, "little") + (b"\1" if kind == Kind.SLAB_REPLY else b"")
        memory.handle_frame(kind, body if not choices.rarely() else choices.take(choices.below(20)))


def _seeds() -> Iterable[bytes]:
    rng = random.Random(2)
    return [rng.randbytes(12 * index) for index in range(1, 20)]


SLABS = Target("slabs", _run, (), _seeds, max_size=512)
