"""An Ethernet switch in user space, as its own process, that loses, delays, reorders and resets packets on command.

``tc`` with netem does the same, but not every kernel has netem. This needs packet sockets only.
``python -m tests.support.packet_switch a0=a1 b0=b1`` connects the interfaces a0 and b0 of its network namespace. The
other ends of their cables, a1 and b1, must be there as well when it starts: it switches their offloads off, so that
packets have checksums and at most 1,500 bytes. When it has printed a line they may be moved to other namespaces.

Each line of its input is a JSON object that replaces its `Settings`. It answers with the packets that it has counted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import itertools
import json
import random
import select
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

SIOCETHTOOL = 0x8946
OFFLOADS = {"receive checksum": 0x15, "send checksum": 0x17, "scatter": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
"""Commands of the ioctl that switch offloads."""
ETH_P_ALL, IPV4, TCP = 3, b"\x08\x00", 6
RST, ACK = 4, 16
HELD = 0.02
"""Seconds by which reordered packets come later."""


@dataclass(frozen=True)
class Settings:
    """What happens to packets."""

    loss: float = 0.0
    """The probability that an IP packet is dropped."""
    delay: float = 0.0
    """Seconds that each packet takes."""
    reorder: float = 0.0
    """The probability that an IP packet comes `HELD` later, and others overtake it."""
    cut: tuple[str, ...] = ()
    """Ports of which all packets are dropped, both ways."""
    mute: tuple[str, ...] = ()
    """Ports from which all packets are dropped. Those to them arrive."""
    part: tuple[str, ...] = ()
    """Ports between which all packets are dropped. They reach the others."""
    reset: bool = False
    """Whether the present connections are reset: the next segment of each arrives as a RST."""


@dataclass
class Switch:
    """Forwards packets between ports."""

    ports: dict[str, socket.socket]
    settings: Settings = Settings()
    counts: Counter[str] = field(default_factory=Counter)
    _learned: dict[bytes, str] = field(default_factory=dict)  # the port of each hardware address
    _flows: set[frozenset[bytes]] = field(default_factory=set)  # connections that were seen
    _doomed: set[frozenset[bytes]] = field(default_factory=set)  # ... and have to be reset
    _late: list[tuple[float, int, str, bytes]] = field(default_factory=list)  # a heap: due, number, port, packet
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        """Forward packets until the input ends."""
        poller = select.poll()
        names = {port.fileno(): name for name, port in self.ports.items()}
        for fd in (0, *names):
            poller.register(fd, select.POLLIN)
        while True:
            wait = None if not self._late else max(0.0, self._late[0][0] - time.monotonic()) * 1000
            for fd, _ in poller.poll(wait):
                if fd == 0:
                    line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]  # poll knows no buffers
                    if not line:
                        return
                    self.command(json.loads(line))
                else:
                    self._receive(names[fd])
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, port, packet = heapq.heappop(self._late)
                self._send(port, packet)

    def command(self, values: dict[str, object]) -> None:
        """Take new settings and answer."""
        self.settings = Settings(**values)  # type: ignore[arg-type]  # as `Network.tell_switch` writes them
        self._doomed = set(self._flows) if self.settings.reset else set()
        sys.stdout.write(json.dumps(self.counts) + "\n")
        sys.stdout.flush()

    def _receive(self, source: str) -> None:
        port, settings = self.ports[source], self.settings
        for _ in range(64):
            try:
                packet, address = port.recvfrom(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # the cable is unplugged
                    raise
                return
            if address[2] == socket.PACKET_OUTGOING:
                continue
            self.counts["received"] += 1
            self._learned[packet[6:12]] = source
            target = self._learned.get(packet[:6])
            for name in self.ports if target is None else (target,):
                if name != source:
                    self._forward(source, name, packet, settings)

    def _forward(self, source: str, target: str, packet: bytes, settings: Settings) -> None:
        parted = source in settings.part and target in settings.part
        if parted or source in settings.cut or target in settings.cut or source in settings.mute:
            self.counts["cut"] += 1
            return
        due = settings.delay
        if packet[12:14] == IPV4:
            if random.random() < settings.loss:
                self.counts["lost"] += 1
                return
            if random.random() < settings.reorder:
                self.counts["reordered"] += 1
                due += HELD
            packet = self._reset(packet)
        if due:
            heapq.heappush(self._late, (time.monotonic() + due, next(self._numbers), target, packet))
        else:
            self._send(target, packet)

    def _reset(self, packet: bytes) -> bytes:
        """Return the packet, or a RST in its place if its connection has to be reset."""
        header = (packet[14] & 15) * 4
        if packet[23] != TCP:
            return packet
        tcp = 14 + header
        ends = packet[26:30] + packet[tcp : tcp + 2], packet[30:34] + packet[tcp + 2 : tcp + 4]
        flow = frozenset(ends)
        self._flows.add(flow)
        length = int.from_bytes(packet[16:18], "big") - header - (packet[tcp + 12] >> 4) * 4
        if flow not in self._doomed or not length:
            return packet
        self._doomed.discard(flow)
        self._flows.discard(flow)
        self.counts["reset"] += 1
        return reset_of(packet, tcp)

    def _send(self, target: str, packet: bytes) -> None:
        try:
            self.ports[target].send(packet)
        except OSError as error:
            if error.errno not in (errno.ENETDOWN, errno.ENOBUFS, errno.ENXIO):
                raise
            self.counts["unsent"] += 1


def reset_of(packet: bytes, tcp: int) -> bytes:
    """Return a RST with the sequence number of a segment. `tcp` is where its TCP header begins."""
    network = bytearray(packet[14:34])
    network[0] = 0x45
    network[2:4] = (40).to_bytes(2, "big")
    network[10:12] = b"\0\0"
    network[10:12] = checksum(bytes(network))
    transport = bytearray(packet[tcp : tcp + 20])
    transport[12], transport[13] = 5 << 4, RST | ACK
    transport[16:20] = bytes(4)
    pseudo = bytes(network[12:20]) + struct.pack("!BBH", 0, TCP, 20)
    transport[16:18] = checksum(pseudo + bytes(transport))
    return packet[:14] + bytes(network) + bytes(transport)


def checksum(data: bytes) -> bytes:
    """Return the checksum of IP and TCP headers."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")


def switch_offloads_off(interface: str) -> None:
    """Let the kernel compute checksums and cut segments before packets leave an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP8x", interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(control, SIOCETHTOOL, request)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise


def main(cables: list[str]) -> None:
    """Connect the interfaces."""
    ports = {}
    for cable in cables:
        here, there = cable.split("=")
        switch_offloads_off(here)
        switch_offloads_off(there)
        ports[there] = port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        port.bind((here, ETH_P_ALL))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Switch(ports).run()


if __name__ == "__main__":
    main(sys.argv[1:])
