"""Three hosts that cannot all connect to each other, as network namespaces.

::

    a: 10.99.17.1, fd99:17::1 ──┐
    c: fd99:17::3 ──────────────┤ a bridge
    router: 10.99.17.2 ─────────┘
       └── b: 192.168.77.2, behind NAT, without IPv6

b connects outwards to a, and nobody to b. c and b have no family in common. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.support.namespaces import PATIENCE, run

ADDRESSES = {"a": ("10.99.17.1/24", "fd99:17::1/64"), "b": ("192.168.77.2/24",), "c": ("fd99:17::3/64",)}
STORE = {"a": "10.99.17.1", "b": "10.99.17.1", "c": "fd99:17::1"}
"""The address of host a, as each host reaches it."""


class ThreeHosts:
    """The namespaces of the hosts."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def inside(self, host: str) -> list[str]:
        """Return the words with which a command begins that is to run on a host."""
        return ["ip", "netns", "exec", self._prefix + host]

    def listening(self, host: str) -> set[int]:
        """Return the TCP ports on which anybody listens on a host, as `ss` lists them."""
        listed = subprocess.run(
            [*self.inside(host), "ss", "-Htln"], check=True, capture_output=True, text=True, timeout=PATIENCE
        ).stdout
        return {int(found) for line in listed.splitlines() for found in re.findall(r":(\d+)\s", line)[:1]}


@contextmanager
def three_hosts() -> Iterator[ThreeHosts]:
    """Make the namespaces, and remove them at the end."""
    prefix = f"tg3{os.getpid()}"
    hub, router = prefix + "hub", prefix + "router"
    with ExitStack() as stack:
        for name in ("hub", "router", *ADDRESSES):
            run("ip", "netns", "add", prefix + name)
            stack.callback(run, "ip", "netns", "del", prefix + name)  # and its interfaces
            run("ip", "-n", prefix + name, "link", "set", "dev", "lo", "up")
        run("ip", "-n", hub, "link", "add", "name", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "dev", "bridge", "up")
        for name, host in (("a", "a"), ("c", "c"), ("r", "router")):
            run(*f"ip -n {hub} link add name {name}0 type veth peer name eth0 netns {prefix}{host}".split())
            run(*f"ip -n {hub} link set dev {name}0 master bridge up".split())
        run(*f"ip -n {router} link add name eth1 type veth peer name eth0 netns {prefix}b".split())
        run("ip", "netns", "exec", prefix + "b", "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
        for host, addresses in ADDRESSES.items():
            for address in addresses:
                nodad = ["nodad"] if ":" in address else []
                run("ip", "-n", prefix + host, "address", "add", address, "dev", "eth0", *nodad)
            run("ip", "-n", prefix + host, "link", "set", "dev", "eth0", "up")
        for device, address in (("eth0", "10.99.17.2/24"), ("eth1", "192.168.77.1/24")):
            run("ip", "-n", router, "address", "add", address, "dev", device)
            run("ip", "-n", router, "link", "set", "dev", device, "up")
        run(*f"ip -n {prefix}b route add default via 192.168.77.1".split())
        inside = ["ip", "netns", "exec", router]
        run(*inside, "sysctl", "-w", "net.ipv4.ip_forward=1")
        run(*inside, "nft", "add table ip nat")
        run(*inside, "nft", "add chain ip nat out { type nat hook postrouting priority 100; }")
        run(*inside, "nft", 'add rule ip nat out oifname "eth0" masquerade')
        yield ThreeHosts(prefix)
