"""What a hostile member does to a running agent, over real connections. Each attack sends a number of frames."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from fuzz.choices import Choices
from fuzz.hostile_messages import HostileMember
from telegrad.agent.agent import Agent
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, TelegradError
from telegrad.rref.ids import incarnation_of
from telegrad.transport.base import Link
from telegrad.transport.memory_map import make_memory
from telegrad.wire.frames import BULK, BULK_CHUNK, CHUNK, CONTROL, MESSAGE, PREFIX, Kind, aligned, next_chunk, pack_ping
from telegrad.wire.messages import Request, encode_head
from telegrad.wire.packing import OutgoingFrame
from telegrad.wire.slab_messages import pack_location, pack_region_free, pack_slab_offer, pack_slab_reply

PATIENCE = 10.0
"""Seconds that the attacker waits for the agent to read."""


class Attacker:
    """Worker b. When the agent under attack ends its session, it comes back as a new incarnation."""

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        target: WorkerRecord,
        others: Sequence[WorkerRecord],
        randomness: random.Random,
    ) -> None:
        self._make_agent = make_agent
        self._target = target
        self._others = tuple(others)
        self.random = randomness
        self.lives = 0
        self.reads = True
        """Whether it reads what the agent sends back."""
        self._agent: Agent | None = None
        self._channel: Channel | None = None
        self.messages: HostileMember

    def connect(self) -> Channel:
        """Return the channel to the agent, of a new incarnation if the last one has been given up."""
        channel = self._channel
        if channel is not None and channel.link is not None and channel.session.is_connected:
            return channel
        self.close()
        agent = self._agent = self._make_agent()
        agent.me = agent.local.me = msgspec.structs.replace(agent.me, generation=self.lives)
        agent.start([agent.me, self._target], is_open=True)
        self.lives += 1
        agent.call(self._target.name, divmod, (1, 1), timeout=30.0)
        channel = self._channel = agent.peers.find(self._target.name).outgoing
        assert channel is not None
        if self.reads:
            channel.readers.leave_to_poller()
        self.messages = HostileMember(
            (agent.me.id, incarnation_of(agent.me)),
            (self._target.id, incarnation_of(self._target)),
            tuple((record.id, incarnation_of(record)) for record in self._others),
        )
        return channel

    def send(
        self,
        kind: int,
        body: bytes,
        *,
        lane: int | None = None,
        sequence: int | None = None,
        acks: tuple[int, int] = (0, 0),
    ) -> None:
        """Send one frame, with the next sequence number of `lane` unless one is given."""
        channel = self.connect()
        link = channel.link
        if link is None:
            return
        if sequence is None:
            sequence = 0
            if lane is not None:
                with channel.lock:
                    if channel.session.state.is_over:
                        return
                    # By the session, which checks what the agent acknowledges.
                    sequence = channel.session.send(lane, OutgoingFrame(kind, body, None), len(body))
        link.send(int(kind), body, sequence, *acks)
        if link.unsent():
            self._drain(link)

    def _drain(self, link: Link) -> None:
        """Wait until the agent has taken what is queued here, or takes no more: it is its memory that counts."""
        deadline = time.monotonic() + PATIENCE
        while (
            link.unsent() and time.monotonic() < deadline and self._channel is not None and self._channel.link is link
        ):
            time.sleep(0.0005)

    def choices(self, size: int = 120) -> Choices:
        """Return random choices."""
        return Choices(self.random.randbytes(size))

    def offer(self, number: int, size: int, announced: int) -> None:
        """Offer a slab of `size` bytes as one of `announced` bytes."""
        link = self.connect().link
        fd = make_memory(size)
        try:
            if link is not None:
                link.offer(pack_slab_offer(number, announced), fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """End this incarnation."""
        agent, self._agent, self._channel = self._agent, None, None
        if agent is not None:
            agent.close()


def messages(attacker: Attacker, count: int) -> None:
    """Send messages whose heads are valid and whose contents are hostile, and read the replies."""
    for _ in range(count):
        attacker.connect()
        attacker.send(MESSAGE, attacker.messages.body(attacker.choices()), lane=CONTROL)


def unread(attacker: Attacker, count: int) -> None:
    """Send requests that fail or echo, and never read a reply."""
    attacker.reads = False
    messages(attacker, count)
    attacker.reads = True


def garbage(attacker: Attacker, count: int) -> None:
    """Change bytes of valid frames: most end the session, and the attacker comes back."""
    for _ in range(count):
        attacker.connect()
        body = bytearray(attacker.messages.body(attacker.choices()))
        kind, sequence, acks = MESSAGE, None, (0, 0)
        for _ in range(attacker.random.randrange(4)):
            body[attacker.random.randrange(len(body))] = attacker.random.randrange(256)
        if not attacker.random.randrange(50):
            kind = attacker.random.choice([*map(int, Kind), 99])
        if not attacker.random.randrange(200):
            sequence = attacker.choices(10).number(8) & (1 << 64) - 1
        if not attacker.random.randrange(200):
            acks = (attacker.choices(10).number(8) & (1 << 64) - 1, 0)
        lane = BULK if kind in (Kind.BULK_HEAD, BULK_CHUNK) else CONTROL
        attacker.send(kind, bytes(body), lane=lane, sequence=sequence, acks=acks)


def bulk(attacker: Attacker, count: int) -> None:
    """Begin large messages that never end, and come back as another incarnation."""
    for index in range(count):
        attacker.connect()
        size = attacker.random.choice((CHUNK, 16 << 20, 300 << 20, 1 << 36))
        head = PREFIX.pack(4, 0, size) + b"head"
        attacker.send(Kind.BULK_HEAD, head, lane=BULK)
        attacker.send(BULK_CHUNK, bytes(min(size, CHUNK)), lane=BULK)
        if index % 8 == 7:
            attacker.close()


def large(attacker: Attacker, count: int) -> None:
    """Send large messages of many sizes, whole ones: calls that fail, because their data is no pickle."""
    for index in range(count):
        attacker.connect()
        size = attacker.random.randrange(100_000, 8 << 20)
        head = encode_head(Request(1000 + index, "builtins:len", 0.0, True))
        attacker.send(Kind.BULK_HEAD, PREFIX.pack(len(head), aligned(size), 0) + head, lane=BULK)
        left = aligned(size)
        while left:
            attacker.send(BULK_CHUNK, bytes(next_chunk(left)), lane=BULK)
            left -= next_chunk(left)


def slabs(attacker: Attacker, count: int) -> None:
    """Send hostile frames about shared memory."""
    for index in range(count):
        attacker.connect()
        choices = attacker.choices(40)
        action = choices.below(8)
        number = choices.below(64) if choices.flag() else index + 64
        if action < 4:
            size = 4096 << choices.below(8)
            attacker.offer(number, size, size if choices.flag() or choices.flag() else 4096 * (1 + choices.below(9)))
        elif action == 4:
            attacker.send(Kind.SLAB_UNMAP, number.to_bytes(8, "little"))
        elif action == 5 and choices.rarely():
            attacker.send(Kind.SLAB_REPLY, pack_slab_reply(number, choices.flag()))
        elif action == 6 and choices.rarely():
            attacker.send(Kind.REGION_FREE, pack_region_free([number]))
        else:
            body = PREFIX.pack(4, 0, 4096) + pack_location(number, 4096 * choices.below(4), index + 1) + b"head"
            attacker.send(Kind.SHARED_MESSAGE, body, lane=CONTROL)


def pings(attacker: Attacker, count: int) -> None:
    """Send control frames only."""
    for _ in range(count):
        channel = attacker.connect()
        attacker.send(Kind.PING, pack_ping(*channel.session.sent_up_to()))


def mixed(attacker: Attacker, count: int) -> None:
    """Do all of it in turn."""
    shared = attacker.connect().memory is not None
    for attack, part in (
        (messages, 0.55),
        (garbage, 0.3),
        (pings, 0.1),
        (bulk, 0.0005),
        (slabs if shared else pings, 0.05),
    ):
        try:
            attack(attacker, max(1, int(count * part)))
        except (TelegradError, AuthenticationError):
            attacker.close()


ATTACKS: dict[str, Callable[[Attacker, int], None]] = {
    "messages": messages,
    "unread": unread,
    "garbage": garbage,
    "bulk": bulk,
    "large": large,
    "slabs": slabs,
    "pings": pings,
    "mixed": mixed,
}
